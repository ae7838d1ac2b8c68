"""The padded forward: a tree's paths are chains, a narrower width is a prefix, and an empty proposal costs one step."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.decoding.forward import target_forward, target_forward_in_widths
from specjax.models import init_cache
from specjax.models.transformer import apply
from specjax.protocol import FIXED, Proposal
from specjax.topology import DynamicTopology, Topology
from tests.decoding.tiny_pair import TARGET, models

TREE = Topology.from_paths([(0, 0, 0), (0, 1), (1, 0)])
PROMPT = [3, 1, 4, 1, 5]


@pytest.fixture(autouse=True)
def double_precision():
    with jax.enable_x64(True):
        yield


@pytest.fixture(scope="module")
def target():
    with jax.enable_x64(True):
        return models()[0]


def prefilled(target, rows=2):
    """A cache that holds all but the last token of the prompt."""
    _, cache, _ = target(jnp.tile(jnp.array(PROMPT), (rows, 1)), init_cache(TARGET, rows, 32))
    return cache.rollback(jnp.full(rows, len(PROMPT) - 1))


def tree_proposal(dynamic=False):
    tokens = jnp.array([[2, 7, 0, 9, 3, 6], [8, 8, 1, 2, 4, 10]])
    valid, pending = jnp.ones(tokens.shape, bool), jnp.array([PROMPT[-1]] * 2)
    if not dynamic:
        return pending, Proposal(tokens, None, valid, TREE, FIXED)
    parents = jnp.broadcast_to(jnp.array(TREE.parents), tokens.shape)
    return pending, Proposal(tokens, None, valid, DynamicTopology(6, 3), FIXED, parents=parents)


@pytest.mark.parametrize("dynamic", [False, True])
def test_every_path_of_a_tree_is_a_chain_and_compaction_leaves_its_cache(target, dynamic):
    pending, proposal = tree_proposal(dynamic)
    cache = prefilled(target)
    base = cache.length
    logits, after, features = target_forward(TARGET, target.params, pending, proposal, cache, (1,))
    for node in range(1, 7):
        path = [n for n in range(1, 7) if TREE.ancestors[node, n]]
        chain = jnp.concatenate([pending[:, None], proposal.tokens[:, np.array(path) - 1]], 1)
        alone, chain_cache, chain_features = apply(TARGET, target.params, chain, cache, feature_layers=(1,))
        np.testing.assert_allclose(logits[:, [0, *path]], alone, atol=1e-12)
        np.testing.assert_allclose(features[:, [0, *path]], chain_features, atol=1e-12)
        compact = after.compact(base, jnp.broadcast_to(jnp.array(path), (2, len(path))))
        end = len(PROMPT) + len(path)
        for ours, theirs in zip(compact.keys + compact.values, chain_cache.keys + chain_cache.values, strict=True):
            np.testing.assert_allclose(ours[:, :, :end], theirs[:, :, :end], atol=1e-12)


@pytest.mark.parametrize("last", range(7))
def test_the_narrowest_width_that_holds_the_valid_nodes_runs(target, last):
    """What lies behind it is zeros; what lies in it is what the whole forward gives."""
    pending, proposal = tree_proposal()
    proposal = proposal.replace(valid=jnp.array([[n <= last for n in range(1, 7)], [False] * 6]))
    cache = prefilled(target)
    whole, _, _ = target_forward(TARGET, target.params, pending, proposal, cache, (1,))
    logits, after, features = target_forward_in_widths(
        TARGET, target.params, pending, proposal, cache, (1,), (1, 4, 7)
    )
    width = next(w for w in (1, 4, 7) if last + 1 <= w)
    np.testing.assert_allclose(logits[:, :width], whole[:, :width], atol=1e-12)
    assert not logits[:, width:].any() and not features[:, width:].any()
    assert features[:, :width].all(-1).all() and after.length.tolist() == cache.length.tolist()


def test_an_invalid_node_may_hold_any_id(target):
    """Ids outside the vocabulary would embed as NaN, which spoils the cache of their whole row."""
    pending, proposal = tree_proposal()
    valid = jnp.array([[True, False, True, False, False, False], [True, True, True, True, False, True]])
    wild = proposal.replace(tokens=jnp.where(valid, proposal.tokens, jnp.array([-1, 99, 11, -7, 99, 10**6])))
    cache = prefilled(target)
    expected, _, _ = target_forward(TARGET, target.params, pending, proposal, cache)
    logits, after, _ = target_forward(TARGET, target.params, pending, wild, cache)
    rows, nodes = np.nonzero(np.pad(np.asarray(valid), ((0, 0), (1, 0)), constant_values=True))
    np.testing.assert_array_equal(logits[rows, nodes], expected[rows, nodes])
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(after))


def test_widths_cost_what_they_say(target):
    """By the compiled program's own count: the loop over widths holds one forward of each."""
    pending, proposal = tree_proposal()
    cache = prefilled(target)

    def run(widths):
        def call(cache):
            return target_forward_in_widths(TARGET, target.params, pending, proposal, cache, (), widths)[0]

        text = str(jax.make_jaxpr(call)(cache))
        return text.count("while["), text.count("dot_general")

    assert run((7,))[0] == 0
    loops, products = run((1, 4, 7))
    assert loops == 3 and products == 3 * run((7,))[1]
