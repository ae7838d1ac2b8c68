"""What holds for every rule on every tree: rows, kinds of topology, invalid nodes, extreme laws, the target's text."""

import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import keys
from specjax.protocol import FIXED, IID
from specjax.topology import DynamicTopology
from specjax.verifiers import VERIFIERS, CoupledRule, GreedyRule, MultiRoundRule, TraversalRule
from tests.verifiers.trees import TREE, as_dynamic, parts, random_round

RULES = [name for name, make in VERIFIERS.items() if make.trees]
COINS = [name for name in RULES if hasattr(VERIFIERS[name], "arithmetic")]
PAIRS = [(name, kind) for name in RULES for kind in sorted(VERIFIERS[name].siblings)]


def noise_for(rule, seeds):
    batch = len(seeds)
    return keys.Noise(keys.row_keys(np.asarray(seeds), batch), jnp.full((batch,), 5), rule.stream)


def emitted(verdict, proposal):
    """What a row emits: accepted tokens, the next token, padding -1."""
    tokens = np.asarray(proposal.tokens)
    return [
        [*(int(tokens[b, node - 1]) for node in np.asarray(verdict.path)[b, :n]), int(verdict.next_token[b])]
        for b, n in enumerate(np.asarray(verdict.num_accepted))
    ]


def test_all_tree_rules_are_here():
    assert set(RULES) == {"multi_round", "traversal", "k_sequential", "coupled", "greedy", "lossy_typical"}


@pytest.mark.parametrize("name, siblings", PAIRS)
def test_static_and_dynamic_trees_agree_and_rows_do_not_mix(name, siblings):
    rule, rng = VERIFIERS[name](), np.random.default_rng(0)
    p, proposal = random_round(rng, 24, TREE, 3, siblings)
    seeds, order = np.arange(24), rng.permutation(24)
    verify = jax.jit(rule.verify)
    static = emitted(verify(p, proposal, noise_for(rule, seeds)), proposal)
    dynamic = as_dynamic(proposal)
    assert emitted(verify(p, dynamic, noise_for(rule, seeds)), dynamic) == static
    assert len({len(text) for text in static}) > 1
    shuffled = jax.tree.map(lambda x: x[order], proposal)
    texts = emitted(verify(p[order], shuffled, noise_for(rule, seeds[order])), shuffled)
    assert texts == [static[b] for b in order]


@pytest.mark.parametrize("name", RULES)
def test_every_row_of_a_dynamic_tree_has_its_own_shape(name):
    """Rows of different trees in one batch: each equals its own batch of one with a static tree."""
    rule, rng = VERIFIERS[name](), np.random.default_rng(1)
    shapes = [TREE, type(TREE)((0, 1, 2, 0, 4, 4, 0)), type(TREE)((0, 0, 0, 1, 1, 2, 3))] * 4
    rounds, verify = [random_round(rng, 1, shape, 3, IID) for shape in shapes], jax.jit(rule.verify)
    alone = [emitted(verify(p, proposal, noise_for(rule, [b])), proposal)[0] for b, (p, proposal) in enumerate(rounds)]
    topology = DynamicTopology(7, 3)
    proposals = [as_dynamic(proposal).replace(topology=topology) for _, proposal in rounds]
    together = jax.tree.map(lambda *x: jnp.concatenate(x), *proposals)
    verdict = verify(jnp.concatenate([p for p, _ in rounds]), together, noise_for(rule, range(12)))
    assert emitted(verdict, together) == alone
    assert len({len(text) for text in alone}) > 1


@pytest.mark.parametrize("name, siblings", PAIRS)
@pytest.mark.parametrize("dynamic", [False, True])
def test_what_invalid_nodes_hold_changes_nothing(name, siblings, dynamic):
    rule = VERIFIERS[name]()
    p, clean = random_round(np.random.default_rng(2), 32, TREE, 3, siblings)
    valid = jnp.tile(jnp.array([True, True, False, True, True, False, False]), (32, 1)).at[::2, 1].set(False)
    valid = valid.at[::2, 4].set(False)  # the child of the second node
    clean = clean.replace(valid=valid)
    dirty = clean.replace(
        tokens=jnp.where(valid, clean.tokens, jnp.array([-1, 3, 99, -7, -1, 3, 99])),
        law=None if clean.law is None else jnp.where(valid[..., None], clean.law, jnp.nan),
    )
    dirty_p = jnp.where(jnp.pad(valid, ((0, 0), (1, 0)), constant_values=True)[..., None], p, jnp.nan)
    clean, dirty = (as_dynamic(x) if dynamic else x for x in (clean, dirty))
    source, verify = noise_for(rule, range(32)), jax.jit(rule.verify)
    expected = emitted(verify(p, clean, source), clean)
    verdict = verify(dirty_p, dirty, source)
    assert emitted(verdict, dirty) == expected
    kept = jnp.arange(verdict.path.shape[1]) < verdict.num_accepted[:, None]
    assert jnp.all(~kept | jnp.take_along_axis(valid, jnp.maximum(verdict.path - 1, 0), 1))
    assert any(len(text) > 1 for text in expected)
    if name in COINS:
        chex.assert_tree_all_finite(parts(rule, dirty_p, dirty, jnp.zeros((32, 7)))[1:])


@pytest.mark.parametrize("name", COINS)
@pytest.mark.parametrize("drawn", [True, False])
@pytest.mark.parametrize("laws", ["tiny", "equal", "one-hot", "disjoint"])
def test_single_precision_stays_finite(name, drawn, laws):
    rule, rng = VERIFIERS[name](), np.random.default_rng(3)
    p, proposal = random_round(rng, 64, TREE, 4)
    if laws == "tiny":
        p = p**40 / jnp.sum(p**40, -1, keepdims=True)
    elif laws == "equal":
        p = jnp.broadcast_to(p[:, :1], p.shape)
        proposal = proposal.replace(law=p[:, 1:])
    elif laws == "one-hot":
        p = jax.nn.one_hot(jnp.argmax(p, -1), 4)
    else:
        apart = jnp.arange(4) < 2
        p = p * apart / jnp.sum(p * apart, -1, keepdims=True)
        law = jnp.where(apart, 0, proposal.law)
        proposal = proposal.replace(law=law / jnp.sum(law, -1, keepdims=True), tokens=2 + proposal.tokens % 2)
    if not drawn:
        proposal = proposal.replace(law=None)
    for coins in (jnp.zeros((64, 7)), jnp.full((64, 7), 1 - 1e-7), jnp.asarray(rng.random((64, 7)), jnp.float32)):
        accept, n, kept, law = (np.asarray(x) for x in parts(rule, p, proposal, coins))
        chex.assert_tree_all_finite((accept, law))
        assert (law >= 0).all()
        np.testing.assert_allclose(law.sum(-1), 1, rtol=1e-5)
        p_x = np.take_along_axis(np.asarray(p), np.array((0, *TREE.parents))[kept][..., None], 1)
        token = np.take_along_axis(np.asarray(proposal.tokens), np.maximum(kept - 1, 0), 1)
        chosen = np.take_along_axis(p_x, token[..., None], 2)[..., 0]
        assert (chosen[kept > 0] > 0).all()  # never a token that the target cannot emit
        if laws == "disjoint":
            assert (n == 0).all()


@pytest.mark.parametrize("rule", [CoupledRule(), GreedyRule()], ids=lambda rule: rule.name)
@pytest.mark.parametrize("dynamic", [False, True])
def test_the_targets_own_text_whatever_was_drafted(rule, dynamic):
    """p depends on the depth alone, so the target's text is one token per depth, the same for every draft."""
    rng, rows = np.random.default_rng(4), 200
    depth_law = random_round(rng, 1, TREE, 3)[0][0, :4]
    depth_law = jax.nn.one_hot(jnp.argmax(depth_law, -1), 3) if rule.greedy_only else depth_law
    p = jnp.tile(depth_law[TREE.depths], (rows, 1, 1))
    _, proposal = random_round(rng, rows, TREE, 3, FIXED)
    proposal = proposal.replace(tokens=jnp.asarray(rng.integers(3, size=(rows, 7)), jnp.int32))
    proposal = as_dynamic(proposal) if dynamic else proposal
    source = noise_for(rule, [7] * rows)
    texts = emitted(jax.jit(rule.verify)(p, proposal, source), proposal)
    longest = max(texts, key=len)
    assert len(longest) == 4 and all(text == longest[: len(text)] for text in texts)
    if rule.greedy_only:
        assert longest == jnp.argmax(depth_law, -1).tolist()
    else:
        gumbel = source.gumbel(jnp.arange(4), 3)[0]
        assert longest == jnp.argmax(jnp.log(depth_law) + gumbel, -1).tolist()
    for row, text in enumerate(texts):  # no longer path matches
        tokens, n = np.asarray(proposal.tokens)[row], len(text) - 1
        for node in range(1, 8):
            path = [m for m in range(1, 8) if TREE.ancestors[node, m]]
            assert len(path) <= n or [tokens[m - 1] for m in path] != longest[: len(path)]


@pytest.mark.parametrize("rule", [MultiRoundRule(), TraversalRule()], ids=lambda rule: rule.name)
@pytest.mark.parametrize("dynamic", [False, True])
def test_residuals_are_updated_in_place(rule, dynamic):
    """The compiled loop over the nodes holds no copy of the [B, N + 1, V] residuals."""
    p, proposal = random_round(np.random.default_rng(5), 2, TREE, 257)
    proposal = as_dynamic(proposal) if dynamic else proposal
    text = jax.jit(rule.arithmetic).lower(p, proposal).compile().as_text()
    loops = set(re.findall(r"body=%?([\w.\-]+)", text))
    computations = dict(re.findall(r"^%?([\w.\-]+) [^\n]*\{\n(.*?)^\}", text, re.M | re.S))
    bodies = [computations[name] for name in loops if "f32[2,8,257]" in computations[name]]
    assert bodies
    for body in bodies:
        assert not re.search(r"= f32\[2,8,257\]\S* copy\(", body)
