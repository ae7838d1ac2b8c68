"""Expected acceptance: closed forms where there are any, and the mean of really tossed coins."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.protocol import FIXED, IID, Proposal
from specjax.topology import Topology
from specjax.verifiers import VERIFIERS, BlockRule, CoupledRule, TokenRule
from specjax.verifiers.expected import expected_accepted


def drafts(topology, rows=64, vocab=5, seed=0, law=True):
    rng = np.random.default_rng(seed)
    laws = rng.dirichlet(np.ones(vocab), (rows, topology.num_nodes)).astype(np.float32)
    for node, parent in enumerate(topology.parents):  # siblings share their law
        laws[:, node] = laws[:, topology.parents.index(parent)]
    p = rng.dirichlet(np.ones(vocab), (rows, topology.num_nodes + 1)).astype(np.float32)
    tokens = np.array([[rng.choice(vocab, p=one / one.sum()) for one in row.astype(float)] for row in laws])
    valid = np.ones(tokens.shape, bool)
    return jnp.asarray(p), Proposal(
        jnp.asarray(tokens), jnp.asarray(laws) if law else None, jnp.asarray(valid), topology, IID if law else FIXED
    )


def test_the_example_of_two_equal_positions():
    """p = (1/3, 2/3), q = (2/3, 1/3), γ = 2: 10/9 accepted by the token rule, 11/9 by the block rule."""
    p, q = np.array([1 / 3, 2 / 3]), np.array([2 / 3, 1 / 3])
    tokens = np.array([(a, b) for a in (0, 1) for b in (0, 1)])
    weight = q[tokens].prod(-1)
    proposal = Proposal(
        jnp.asarray(tokens), jnp.broadcast_to(jnp.asarray(q, jnp.float32), (4, 2, 2)), jnp.ones((4, 2), bool),
        Topology.chain(2),
    )  # fmt: skip
    laws = jnp.broadcast_to(jnp.asarray(p, jnp.float32), (4, 3, 2))
    for rule, expected in ((TokenRule(), 10 / 9), (BlockRule(), 11 / 9)):
        assert weight @ np.asarray(expected_accepted(rule, laws, proposal)) == pytest.approx(expected, abs=1e-6)


def test_the_token_rule_in_closed_form():
    p, proposal = drafts(Topology.chain(4))
    h = np.minimum(TokenRule().arithmetic(p, proposal).accept, 1)
    closed = np.cumprod(h, -1).sum(-1)
    np.testing.assert_allclose(expected_accepted(TokenRule(), p, proposal), closed, atol=1e-5)


@pytest.mark.parametrize("name, shape", [("block", (1, 1, 1)), ("multi_round", (2, 2)), ("traversal", (3, 1))])
def test_it_is_the_mean_over_coins(name, shape):
    """Over 20,000 coins, within five standard errors (false alarm below 1e-4 for all rows together)."""
    rule, tosses = VERIFIERS[name](), 20_000
    p, proposal = drafts(Topology.from_shape(shape), rows=3)
    arithmetic = rule.arithmetic(p, proposal)
    coins = jax.random.uniform(jax.random.key(0), (tosses, *proposal.tokens.shape))
    counts = np.asarray(jax.vmap(lambda u: rule.decide(arithmetic, proposal, u)[0])(coins))
    error = counts.std(0) / np.sqrt(tosses)
    assert (np.abs(counts.mean(0) - expected_accepted(rule, p, proposal)) < 5 * error + 1e-6).all()


def test_fewer_valid_nodes_are_a_shorter_draft():
    p, proposal = drafts(Topology.chain(3))
    short = Proposal(proposal.tokens[:, :2], proposal.law[:, :2], proposal.valid[:, :2], Topology.chain(2))
    cut = proposal.replace(valid=proposal.valid.at[:, 2].set(False))
    np.testing.assert_allclose(
        expected_accepted(BlockRule(), p, cut), expected_accepted(BlockRule(), p[:, :3], short), atol=1e-6
    )


def test_what_cannot_be_scored_is_said():
    p, chain = drafts(Topology.chain(2))
    _, fixed = drafts(Topology.from_shape((2,)), law=False)
    tree_p, tree = drafts(Topology.from_shape((2, 1)))
    with pytest.raises(ValueError, match="'coupled' has no acceptance probabilities"):
        expected_accepted(CoupledRule(), p, chain)
    with pytest.raises(ValueError, match="'token' takes chains only"):
        expected_accepted(TokenRule(), tree_p, tree)
    with pytest.raises(ValueError, match="these drafts are 'fixed'"):
        expected_accepted(VERIFIERS["k_sequential"](), p, dataclasses.replace(fixed))
    long_p, long = drafts(Topology.chain(17), rows=2)
    with pytest.raises(ValueError, match="at most 16 nodes"):
        expected_accepted(TokenRule(), long_p, long)
