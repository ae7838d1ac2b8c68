"""Each rule against hand-computed numbers, properties that hold for every p and q, and real noise."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specjax import keys, sampling
from specjax.protocol import FIXED, IID, Proposal, Verifier
from specjax.topology import Topology
from specjax.verifiers import VERIFIERS, BlockRule, CoupledRule, GreedyRule, LossyFixedAcceptance, TokenRule
from specjax.verifiers.enumeration import texts

COINS = [name for name, make in VERIFIERS.items() if hasattr(make, "arithmetic")]
LOSSLESS_COINS = [name for name in COINS if VERIFIERS[name]().lossless]


def chain(tokens, law, valid=None, siblings=IID):
    tokens = jnp.asarray(tokens, jnp.int32)
    valid = jnp.ones(tokens.shape, bool) if valid is None else jnp.asarray(valid)
    return Proposal(tokens, law, valid, Topology.chain(tokens.shape[1]), siblings)


def noise(rule, batch, seed=0):
    return keys.Noise(keys.row_keys(seed, batch), jnp.full((batch,), 5), rule.stream)


def random_laws(rng, *shape, power=1.0):
    law = rng.gamma(0.5, size=shape) ** power + 1e-12
    return law / law.sum(-1, keepdims=True)


compiled_arithmetic = jax.jit(lambda rule, p, proposal: rule.arithmetic(p, proposal), static_argnums=0)


def acceptance_by_length(rule, p, q, draft_length):
    """(expected accepted tokens of each draft, its probability) for laws p, q [V] that are the same everywhere."""
    drafts = texts(len(p), draft_length)
    rows = len(drafts)
    proposal = chain(drafts, jnp.broadcast_to(q, (rows, draft_length, len(q))))
    arithmetic = compiled_arithmetic(rule, jnp.broadcast_to(p, (rows, draft_length + 1, len(p))), proposal)
    h, chance = np.clip(np.asarray(arithmetic.accept), 0, 1), np.prod(np.asarray(q)[drafts], -1)
    if isinstance(rule, BlockRule):  # the last success: at least i + 1 kept unless all later coins fail
        kept = 1 - np.cumprod((1 - h)[:, ::-1], -1)[:, ::-1]
    else:
        kept = np.cumprod(h, -1)
    return kept.sum(-1), chance


@pytest.mark.parametrize("name", VERIFIERS)
def test_every_rule_satisfies_the_protocol(name):
    rule = VERIFIERS[name]()
    assert isinstance(rule, Verifier) and rule.name == name and rule == VERIFIERS[name]() and hash(rule) is not None
    assert rule.lossless is not name.startswith("lossy_")


@pytest.mark.parametrize("rule, expected", [(TokenRule(), 10 / 9), (BlockRule(), 11 / 9)])
def test_expected_accepted_tokens_of_the_textbook_pair(rule, expected):
    with jax.enable_x64(True):
        kept, chance = acceptance_by_length(rule, jnp.array([1 / 3, 2 / 3]), jnp.array([2 / 3, 1 / 3]), 2)
    assert (kept * chance).sum() == pytest.approx(expected, abs=1e-12)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6))
def test_block_keeps_at_least_as_many_as_token(seed):
    """In expectation over drafts; on a single draft it may keep fewer. The textbook pair above shows a strict gain."""
    rng = np.random.default_rng(seed)
    with jax.enable_x64(True):
        p, q = (jnp.asarray(random_laws(rng, 3)) for _ in range(2))
        token, chance = acceptance_by_length(TokenRule(), p, q, 3)
        block, _ = acceptance_by_length(BlockRule(), p, q, 3)
    assert (block * chance).sum() >= (token * chance).sum() - 1e-12


def test_flags_after_a_failure_count_for_the_block_rule_only():
    proposal = chain([[0, 0, 0, 0]], None, siblings=FIXED)
    p = jnp.full((1, 5, 2), 0.5)
    token, block = TokenRule(), BlockRule()
    flags = jnp.array([[1, 0, 1, 1]])
    for rule, expected in ((token, 1), (block, 4)):
        arithmetic = compiled_arithmetic(rule, p, proposal).replace(accept=flags.astype(jnp.float32))
        n, path = rule.decide(arithmetic, proposal, jnp.full((1, 4), 0.5))
        assert n[0] == expected and path.tolist() == [[1, 2, 3, 4]]


@pytest.mark.parametrize("name", LOSSLESS_COINS)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
def test_equal_laws_accept_everything_without_nan(name, dtype):
    with jax.enable_x64(dtype == jnp.float64):
        rule, rng = VERIFIERS[name](), np.random.default_rng(0)
        p = jnp.asarray(random_laws(rng, 8, 4, 5), dtype)
        proposal = chain(rng.integers(5, size=(8, 3)), p[:, :3])
        arithmetic = compiled_arithmetic(rule, p, proposal)
        n, path = rule.decide(arithmetic, proposal, jnp.full((8, 3), 1 - 1e-7, dtype))
        assert (n == 3).all()
        for kept in range(4):
            law = rule.next_law(p, proposal, arithmetic, jnp.full((8,), kept), path)
            chex.assert_tree_all_finite(law)
            np.testing.assert_allclose(law, p[:, kept], rtol=1e-5)


@pytest.mark.parametrize("name", LOSSLESS_COINS)
@pytest.mark.parametrize("drawn", [True, False])
def test_a_token_outside_the_targets_support_is_never_accepted(name, drawn):
    rule = VERIFIERS[name]()
    p = jnp.tile(jnp.array([0.0, 0.4, 0.6]), (1, 3, 1))
    proposal = chain([[0, 0]], jnp.tile(jnp.array([1.0, 0.0, 0.0]), (1, 2, 1)) if drawn else None)
    arithmetic = compiled_arithmetic(rule, p, proposal)
    n, path = rule.decide(arithmetic, proposal, jnp.zeros((1, 2)))
    assert n[0] == 0
    np.testing.assert_allclose(rule.next_law(p, proposal, arithmetic, n, path), p[:, 0], rtol=1e-6)


@pytest.mark.parametrize("name", VERIFIERS)
@pytest.mark.parametrize("token", [-1, 11])
def test_invalid_nodes_are_never_looked_at(name, token):
    rule = VERIFIERS[name]()
    rng = np.random.default_rng(1)
    p = jnp.asarray(random_laws(rng, 16, 4, 4), jnp.float32).at[:, 2:].set(jnp.nan)
    law = jnp.asarray(random_laws(rng, 16, 3, 4), jnp.float32).at[:, 1:].set(jnp.nan)
    valid = jnp.tile(jnp.array([True, False, False]), (16, 1))
    proposal = chain(np.array([[2, token, token]] * 16), law, valid)
    verdict = jax.jit(rule.verify)(p, proposal, noise(rule, 16))
    assert (verdict.num_accepted <= 1).all() and ((0 <= verdict.next_token) & (verdict.next_token < 4)).all()
    if name in COINS:
        arithmetic = compiled_arithmetic(rule, p, proposal)
        n, path = rule.decide(arithmetic, proposal, jnp.zeros((16, 3)))
        assert (n <= 1).all() and (n > 0).any()
        chex.assert_tree_all_finite(rule.next_law(p, proposal, arithmetic, n, path))


@pytest.mark.parametrize("name", VERIFIERS)
@pytest.mark.parametrize("law", [None, "empty"])
def test_an_empty_proposal_is_target_only_decoding(name, law):
    rule = VERIFIERS[name]()
    p = jnp.asarray(random_laws(np.random.default_rng(2), 6, 1, 4), jnp.float32)
    proposal = chain(np.zeros((6, 0)), None if law is None else jnp.zeros((6, 0, 4)))
    verdict = jax.jit(rule.verify)(p, proposal, noise(rule, 6))
    assert (verdict.num_accepted == 0).all() and verdict.path.shape == (6, 0)
    if name in COINS:
        expected = sampling.inverse_cdf(p[:, 0], noise(rule, 6).next_token())
        assert (verdict.next_token == expected).all()


@pytest.mark.parametrize("name", COINS)
def test_dtype_is_kept_and_single_precision_agrees_with_double(name):
    rule, rng = VERIFIERS[name](), np.random.default_rng(3)
    p, q = random_laws(rng, 64, 4, 6), random_laws(rng, 64, 3, 6)
    tokens, coins = rng.integers(6, size=(64, 3)), rng.random((64, 3))
    found = {}
    with jax.enable_x64(True):
        for dtype in (jnp.float32, jnp.float64):
            proposal = chain(tokens, jnp.asarray(q, dtype))
            arithmetic = compiled_arithmetic(rule, jnp.asarray(p, dtype), proposal)
            decided = rule.decide(arithmetic, proposal, jnp.asarray(coins, jnp.float32))
            law = rule.next_law(jnp.asarray(p, dtype), proposal, arithmetic, *decided)
            assert arithmetic.accept.dtype == law.dtype == dtype
            found[dtype] = jnp.minimum(arithmetic.accept, 1), decided[0], law
    single, double = found[jnp.float32], found[jnp.float64]
    np.testing.assert_allclose(single[0], double[0], rtol=2e-4, atol=1e-6)
    assert (single[1] == double[1]).all()
    np.testing.assert_allclose(single[2], double[2], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("name", LOSSLESS_COINS)
def test_deterministic_proposals_equal_one_hot_laws(name):
    rule, rng = VERIFIERS[name](), np.random.default_rng(4)
    p, tokens = jnp.asarray(random_laws(rng, 32, 4, 5), jnp.float32), rng.integers(5, size=(32, 3))
    chosen, drawn = chain(tokens, None), chain(tokens, jax.nn.one_hot(tokens, 5))
    coins = jnp.asarray(rng.random((32, 3)), jnp.float32)
    results = []
    for proposal in (chosen, drawn):
        arithmetic = compiled_arithmetic(rule, p, proposal)
        n, path = rule.decide(arithmetic, proposal, coins)
        results.append((arithmetic.accept, n, rule.next_law(p, proposal, arithmetic, n, path)))
    chex.assert_trees_all_close(*results, rtol=1e-4, atol=1e-6)


def test_laws_of_different_precision_are_promoted():
    with jax.enable_x64(True):
        p, q = jnp.full((1, 2, 2), 0.5, jnp.float32), jnp.full((1, 1, 2), 0.5, jnp.float64)
        assert TokenRule().arithmetic(p, chain([[0]], q)).accept.dtype == jnp.float64


def test_coupled_text_does_not_depend_on_the_draft():
    rule, rng = CoupledRule(), np.random.default_rng(5)
    drafts = texts(3, 3)
    p = jnp.tile(jnp.asarray(random_laws(rng, 1, 4, 3), jnp.float32), (len(drafts), 1, 1))
    shared = keys.Noise(jnp.repeat(keys.row_keys(7, 1), len(drafts)), jnp.full((len(drafts),), 5), rule.stream)
    target = rule.target_tokens(p, shared.gumbel(jnp.arange(4), 3))
    verdict = rule.verify(p, chain(drafts, None), shared)
    n = np.asarray(verdict.num_accepted)
    assert set(n) == {0, 1, 2, 3}
    for row in range(len(drafts)):
        emitted = [*drafts[row, : n[row]], int(verdict.next_token[row])]
        assert emitted == target[row, : n[row] + 1].tolist()


def test_coupled_draws_agree_with_the_drafter_on_the_same_noise():
    """A drafter with q = p that draws from the position stream is always right."""
    rule, rng = CoupledRule(), np.random.default_rng(6)
    p = jnp.asarray(random_laws(rng, 20, 3, 4), jnp.float32)
    sources = noise(rule, 20).draft(2)
    tokens = [sampling.draw(p[:, d], jax.tree.map(lambda x, d=d: x[d], sources)) for d in range(2)]
    verdict = rule.verify(p, chain(jnp.stack(tokens, 1), p[:, :2]), noise(rule, 20))
    assert (verdict.num_accepted == 2).all()


def test_greedy_follows_the_first_maximum():
    p = jnp.array([[[0.0, 1.0], [1.0, 0.0], [0.0, 1.0]]])
    for tokens, n, last in (([1, 0], 2, 1), ([1, 1], 1, 0), ([0, 0], 0, 1)):
        verdict = GreedyRule().verify(p, chain([tokens], None), noise(GreedyRule(), 1))
        assert (verdict.num_accepted[0], verdict.next_token[0]) == (n, last)


def test_trees_and_bad_settings_are_refused():
    tree = Proposal(jnp.zeros((1, 2), int), None, jnp.ones((1, 2), bool), Topology((0, 0)), FIXED)
    chains_only = [make() for make in VERIFIERS.values() if not make.trees]
    assert {rule.name for rule in chains_only} >= {"token", "block"}
    for rule in chains_only:
        with pytest.raises(ValueError, match="chains only"):
            rule.verify(jnp.full((1, 3, 2), 0.5), tree, noise(rule, 1))
    with pytest.raises(ValueError, match="alpha must be in"):
        LossyFixedAcceptance(alpha=1.5)


@pytest.mark.parametrize("name", [*LOSSLESS_COINS, "coupled", "lossy_resample_from_target"])
def test_first_token_of_a_round_through_real_noise(name):
    """Chi-square, 3 degrees of freedom, one fixed seed; false alarm rate 1e-3 per rule. The lossy rule must fail."""
    rule, rows, vocab = VERIFIERS[name](), 40_000, 4
    rng = np.random.default_rng(8)
    p, q = (jnp.asarray(random_laws(rng, *shape), jnp.float32) for shape in ((3, vocab), (2, vocab)))
    source = noise(rule, rows, seed=9)
    draws = source.draft(2)
    laws = [jnp.tile(law, (rows, 1)) for law in q]
    tokens = jnp.stack([sampling.draw(laws[d], jax.tree.map(lambda x, d=d: x[d], draws)) for d in range(2)], 1)
    proposal = chain(tokens, jnp.stack(laws, 1))
    verdict = jax.jit(rule.verify)(jnp.tile(p, (rows, 1, 1)), proposal, source)
    first = np.where(verdict.num_accepted > 0, tokens[:, 0], verdict.next_token)
    expected = rows * np.asarray(p[0], np.float64) / float(p[0].sum())
    statistic = ((np.bincount(first, minlength=vocab) - expected) ** 2 / expected).sum()
    assert 0.02 < float((verdict.num_accepted > 0).mean()) < 0.98
    assert (statistic < 16.27) == rule.lossless  # the 0.999 quantile
