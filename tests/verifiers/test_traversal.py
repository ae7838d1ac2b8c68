"""Traversal verification: the block rule on chains, and never shorter than multi-round rejection in expectation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specjax.protocol import FIXED, IID, Proposal
from specjax.topology import Topology
from specjax.verifiers import BlockRule, MultiRoundRule, TokenRule, TraversalRule
from tests.verifiers.trees import KINDS, expected_length, parts, random_case, random_round

RULE = TraversalRule()


@pytest.mark.parametrize("siblings", KINDS)
@given(st.integers(0, 10**6))
def test_on_a_chain_it_is_the_block_rule(siblings, seed):
    rng = np.random.default_rng(seed)
    p, proposal = random_round(rng, 16, Topology.chain(4), 5, siblings)
    proposal = proposal.replace(valid=jnp.asarray(np.arange(4) < rng.integers(5, size=(16, 1))))
    coins = jnp.asarray(rng.random((16, 4)), jnp.float32)
    for ours, block in zip(parts(RULE, p, proposal, coins), parts(BlockRule(), p, proposal, coins), strict=True):
        np.testing.assert_allclose(ours, block, rtol=1e-4, atol=1e-6)


def test_one_level_is_multi_round_rejection():
    """Behind the root the weights play no part: leaves of depth 1 are judged alike."""
    p, proposal = random_round(np.random.default_rng(0), 32, Topology.from_shape((3,)), 5)
    coins = jnp.asarray(np.random.default_rng(1).random((32, 3)), jnp.float32)
    for ours, theirs in zip(parts(RULE, p, proposal, coins), parts(MultiRoundRule(), p, proposal, coins), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_a_path_is_weighed_as_a_whole():
    """w = 1/2 at the first node and p/q = 4/3 at the second: 2/3 for the leaf, where multi-round has 1/2 x 1."""
    p = jnp.array([[[0.25, 0.75], [2 / 3, 1 / 3], [0.5, 0.5]]])
    law = jnp.array([[[0.5, 0.5], [0.5, 0.5]]])
    proposal = Proposal(jnp.array([[0, 0]]), law, jnp.ones((1, 2), bool), Topology.chain(2), IID)
    np.testing.assert_allclose(RULE.arithmetic(p, proposal).accept[0, 1], 2 / 3, rtol=1e-6)


CHAINS = [Topology.chain(2), Topology.chain(3)]
TREES = [Topology.from_shape((2, 1)), Topology.from_shape((2, 2)), Topology.from_shape((2, 1, 1))]


@pytest.mark.parametrize("siblings", KINDS)
@pytest.mark.parametrize("topology", CHAINS + TREES, ids=lambda t: str(t.parents))
def test_keeps_at_least_as_many_as_multi_round(topology, siblings):
    """Expected accepted length, from p and q without noise, over all drafts of the same drafter."""
    gains = []
    with jax.enable_x64(True):
        for seed in range(8):
            rng = np.random.default_rng(seed)
            case = random_case(rng, topology, siblings, concentration=(0.3, 1.0, 3.0)[seed % 3])
            gains.append(expected_length(RULE, case) - expected_length(MultiRoundRule(), case))
    assert min(gains) >= -1e-12
    # With one-hot q a weight is the product of what multi-round accepts along the path: no gain, no loss.
    assert max(gains) < 1e-12 if siblings == FIXED else max(gains) > 1e-3


def test_the_same_on_chains_through_block_and_token():
    with jax.enable_x64(True):
        for seed in range(8):
            case = random_case(np.random.default_rng(seed), Topology.chain(3), IID)
            ours, theirs = expected_length(RULE, case), expected_length(MultiRoundRule(), case)
            block, token = expected_length(BlockRule(), case), expected_length(TokenRule(), case)
            assert ours == pytest.approx(block, abs=1e-12) and theirs == pytest.approx(token, abs=1e-12)
            assert block >= token - 1e-12


def test_more_candidates_keep_more():
    with jax.enable_x64(True):
        for seed in range(4):
            case = random_case(np.random.default_rng(seed), Topology.from_shape((4, 1)), IID)
            one = type(case)("one", Topology.chain(2), case.target, case.drafter, siblings=IID)
            assert expected_length(RULE, case) > expected_length(RULE, one) + 1e-3
