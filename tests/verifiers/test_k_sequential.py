"""SpecTr's k-sequential transport: the token rule at k = 1, its inequality, and what k candidates gain."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specjax.protocol import IID, Proposal
from specjax.topology import Topology
from specjax.verifiers import KSequentialRule, TokenRule
from specjax.verifiers.k_sequential import _smallest_rho
from tests.verifiers.trees import expected_length, parts, random_case, random_laws, random_round

RULE = KSequentialRule()
smallest_rho = jax.jit(_smallest_rho)


@pytest.mark.parametrize("drawn", [True, False])
@given(st.integers(0, 10**6))
def test_on_a_chain_it_is_the_token_rule(drawn, seed):
    rng = np.random.default_rng(seed)
    p, proposal = random_round(rng, 16, Topology.chain(3), 5)
    proposal = proposal if drawn else proposal.replace(law=None)
    coins = jnp.asarray(rng.random((16, 3)), jnp.float32)
    for ours, tokens in zip(parts(RULE, p, proposal, coins), parts(TokenRule(), p, proposal, coins), strict=True):
        np.testing.assert_allclose(ours, tokens, rtol=1e-5, atol=1e-5)


@given(st.integers(0, 10**6))
def test_rho_is_the_smallest_that_keeps_the_residual_from_being_negative(seed):
    rng = np.random.default_rng(seed)
    with jax.enable_x64(True):
        p, q = (jnp.asarray(random_laws(rng, 4, 3, 6)) for _ in range(2))
        k = jnp.asarray(rng.integers(1, 6, size=(4, 3)))
        rho = smallest_rho(p, q, k)
    rho, p, q, k = (np.asarray(x, np.float64) for x in (rho, p, q, k))

    def slack(rho):
        beta = np.minimum(q, p / rho[..., None]).sum(-1)
        return rho * beta - (1 - (1 - beta) ** k)

    assert ((1 <= rho) & (rho <= k)).all() and (slack(rho) >= -1e-12).all()
    assert (slack(rho - 1e-5)[rho > 1.001] < 0).all()
    assert (rho[k == 1] == 1).all()


def test_missing_siblings_are_not_counted():
    """Two of three candidates valid: the same thresholds as a node that has two."""
    p, proposal = random_round(np.random.default_rng(0), 8, Topology((0, 0, 0)), 5)
    law = proposal.law.at[:, 1].set(jnp.nan)
    ragged = proposal.replace(valid=proposal.valid.at[:, 1].set(False), law=law)
    two = Proposal(proposal.tokens[:, ::2], proposal.law[:, ::2], jnp.ones((8, 2), bool), Topology((0, 0)), IID)
    coins = jnp.full((8, 3), 1 - 1e-6)
    accept, n, _, after = parts(RULE, p, ragged, coins)
    accept_two, n_two, _, after_two = parts(RULE, p[:, jnp.array([0, 1, 3])], two, coins[:, :2])
    np.testing.assert_allclose(accept[:, ::2], accept_two, rtol=1e-6)
    assert (accept[:, 1] == 0).all() and (n == n_two).all()
    rejected = np.asarray(n) == 0
    assert rejected.any()
    np.testing.assert_allclose(after[rejected], after_two[rejected], rtol=1e-5, atol=1e-7)


def test_four_candidates_are_accepted_more_often_than_one():
    with jax.enable_x64(True):
        for seed in range(5):
            case = random_case(np.random.default_rng(seed), Topology.from_shape((4,)), IID, vocab=4)
            one = type(case)("one", Topology((0,)), case.target, case.drafter, siblings=IID)
            assert expected_length(RULE, case) > expected_length(RULE, one) + 1e-3


def test_acceptance_of_k_candidates_in_closed_form():
    """1 - (1 - β)^k, with ρ from the rule; equal laws are accepted for certain."""
    p = jnp.array([[[0.5, 0.3, 0.2]] * 4])
    draws = jnp.array([[0, 1, 2]])
    same = Proposal(draws, p[:, :3], jnp.ones((1, 3), bool), Topology((0, 0, 0)), IID)
    assert (RULE.arithmetic(p, same).accept >= 1).all()
    law = jnp.tile(jnp.array([0.1, 0.1, 0.8]), (1, 3, 1))
    arithmetic = RULE.arithmetic(p, same.replace(law=law))
    rho = float(arithmetic.weight[0, 0])
    thresholds = np.minimum(1, np.array([5, 3, 0.25]) / rho)
    np.testing.assert_allclose(np.minimum(arithmetic.accept[0], 1), thresholds, rtol=1e-6)
    assert 1 < rho < 3
