"""Multi-round rejection: by hand, and against the token rule, which it is on a chain."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specjax.protocol import FIXED, IID, WITHOUT_REPLACEMENT, Proposal
from specjax.topology import Topology
from specjax.verifiers import MultiRoundRule, TokenRule
from tests.verifiers.trees import (
    KINDS,
    compiled_arithmetic,
    expected_length,
    parts,
    random_case,
    random_laws,
    random_round,
)

RULE = MultiRoundRule()


@pytest.mark.parametrize("siblings", KINDS)
@given(st.integers(0, 10**6))
def test_on_a_chain_it_is_the_token_rule(siblings, seed):
    rng = np.random.default_rng(seed)
    p, proposal = random_round(rng, 16, Topology.chain(4), 5, siblings)
    lengths = rng.integers(5, size=16)
    proposal = proposal.replace(valid=jnp.asarray(np.arange(4) < lengths[:, None]))
    coins = jnp.asarray(rng.random((16, 4)), jnp.float32)
    for ours, tokens in zip(parts(RULE, p, proposal, coins), parts(TokenRule(), p, proposal, coins), strict=True):
        np.testing.assert_allclose(ours, tokens, rtol=1e-5, atol=1e-7)


def test_two_candidates_by_hand():
    """p = (.5, .3, .2); 0 is tried first with q = (.8, .1, .1), then 1 from what is left of q, (0, .5, .5)."""
    p = jnp.tile(jnp.array([0.5, 0.3, 0.2]), (1, 3, 1))
    law = jnp.array([[[0.8, 0.1, 0.1], [0.0, 0.5, 0.5]]])
    valid = jnp.ones((1, 2), bool)
    proposal = Proposal(jnp.array([[0, 1]]), law, valid, Topology((0, 0)), WITHOUT_REPLACEMENT)
    # What 0 leaves: max(p - q, 0) = (0, .2, .1), normalised (0, 2/3, 1/3); what 1 leaves: (0, 1/6, 0), so token 1.
    accept, n, _, law = parts(RULE, p, proposal, jnp.array([[0.9, 0.9999]]))
    np.testing.assert_allclose(accept, [[0.625, 1.0]], rtol=1e-6)
    assert n[0] == 1  # the second one
    rejected = RULE.next_law(
        p, proposal, compiled_arithmetic(RULE, p, proposal), jnp.zeros(1, int), jnp.zeros((1, 1), int)
    )
    np.testing.assert_allclose(rejected, [[0, 1, 0]], atol=1e-6)
    np.testing.assert_allclose(law, p[:, 2], rtol=1e-6)  # behind node 2, which has no children


def test_candidates_tried_in_order_leave_what_was_not_tried():
    """One-hot q: the k candidates are accepted with probability p each in all, the next token comes from the others."""
    p = jnp.tile(jnp.array([0.5, 0.3, 0.15, 0.05]), (1, 3, 1))
    proposal = Proposal(jnp.array([[2, 0]]), None, jnp.ones((1, 2), bool), Topology((0, 0)), FIXED)
    accept, _, _, law = parts(RULE, p, proposal, jnp.full((1, 2), 0.999))
    np.testing.assert_allclose(accept, [[0.15, 0.5 / 0.85]], rtol=1e-6)
    np.testing.assert_allclose(law, [[0, 0.3 / 0.35, 0, 0.05 / 0.35]], rtol=1e-6)


@pytest.mark.parametrize("siblings", KINDS)
def test_four_candidates_are_accepted_more_often_than_one(siblings):
    """In expectation, from p and q alone. Without replacement four of four tokens always hold the target's."""
    rng = np.random.default_rng(0)
    with jax.enable_x64(True):
        for _ in range(5):
            case = random_case(rng, Topology.from_shape((4,)), siblings, vocab=4)
            one = type(case)("one", Topology((0,)), case.target, case.drafter, siblings=siblings)
            four, one = expected_length(RULE, case), expected_length(RULE, one)
            assert four > one + 1e-3
            if siblings != IID:
                assert four == pytest.approx(1, abs=1e-9)


def test_first_token_of_many_rounds_has_the_targets_law():
    """Chi-square with real coins on siblings drawn without replacement, 3 degrees of freedom; false-alarm rate 1e-3."""
    rng, rows = np.random.default_rng(3), 40_000
    p, q = random_laws(rng, 4), random_laws(rng, 4)
    first = rng.choice(4, size=rows, p=q)
    left = np.where(np.arange(4) == first[:, None], 0, q)
    left /= left.sum(-1, keepdims=True)
    second = (rng.random((rows, 1)) < left.cumsum(-1)).argmax(-1)
    law = jnp.asarray(np.stack([np.tile(q, (rows, 1)), left], 1), jnp.float32)
    tokens = jnp.asarray(np.stack([first, second], 1), jnp.int32)
    proposal = Proposal(tokens, law, jnp.ones((rows, 2), bool), Topology((0, 0)), WITHOUT_REPLACEMENT)
    coins = jnp.asarray(rng.random((rows, 2)), jnp.float32)
    _, n, path, after = parts(RULE, jnp.tile(jnp.asarray(p, jnp.float32), (rows, 3, 1)), proposal, coins)
    after = np.asarray(after, np.float64).cumsum(-1)
    drawn = (rng.random((rows, 1)) * after[:, -1:] < after).argmax(-1)
    emitted = np.where(n > 0, np.take_along_axis(np.asarray(tokens), np.maximum(path - 1, 0), 1)[:, 0], drawn)
    statistic = ((np.bincount(emitted, minlength=4) - rows * p) ** 2 / (rows * p)).sum()
    assert statistic < 16.27
    wrong = ((np.bincount(np.where(n > 0, emitted, first), minlength=4) - rows * p) ** 2 / (rows * p)).sum()
    assert wrong > 100  # the same statistic sees a wrong replacement
