"""What a call returns: the target's own text where it must be, no row disturbed by another, and counts that add up."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.decoding import Origin, generate
from specjax.decoding.prefill import prefill
from specjax.decoding.run import decode
from specjax.drafters import Independent
from specjax.keys import Noise, Stream, row_keys
from specjax.models import LanguageModel
from specjax.report import metrics
from specjax.sampling import Sampling, gumbel_max
from tests.decoding.tiny_pair import LIMITS, PROMPTS, TARGET, VOCAB

GREEDY = Sampling.of(0.0)
SEEDS = list(range(40, 48))


def assert_same(a, b, rows_a=None, rows_b=None):
    """Equal texts, origins and counts, and equal log-probabilities, of chosen rows of two generations."""
    rows_a = range(len(a.tokens)) if rows_a is None else rows_a
    rows_b = rows_a if rows_b is None else rows_b
    for i, j in zip(rows_a, rows_b, strict=True):
        assert a.tokens[i].tolist() == b.tokens[j].tolist()
        assert a.origins[i].tolist() == b.origins[j].tolist()
        np.testing.assert_allclose(a.logprobs[i], b.logprobs[j], atol=1e-10)
        assert a.finish[i] == b.finish[j]
        for field in dataclasses.fields(a.counts):
            np.testing.assert_allclose(getattr(a.counts, field.name)[i], getattr(b.counts, field.name)[j], atol=1e-5)


def texts(generation):
    return [row.tolist() for row in generation.tokens]


def check_books(result, prompts, limits, stop_ids=()):
    """Identities that hold for every generation, whatever was decoded."""
    c = result.counts
    for i in range(len(prompts)):
        tokens, origins = result.tokens[i].tolist(), result.origins[i]
        stops = [at for at, token in enumerate(tokens) if token in stop_ids]
        assert stops == ([len(tokens) - 1] if result.finish[i] == "stop" else [])
        assert 1 <= len(tokens) <= limits[i] and (result.finish[i] == "stop" or len(tokens) == limits[i])
        assert len(tokens) == len(origins) == len(result.logprobs[i]) == c.emitted[i] == result.lengths[i]
        drafted, corrected, bonus = ((origins == o).sum() for o in (Origin.DRAFTED, Origin.CORRECTION, Origin.BONUS))
        assert drafted + corrected + bonus == len(tokens)
        assert drafted == c.accepted[i] == c.acceptances[i].sum()
        # A round ends with a token of the target's, but for the one that a stop token inside the accepted run ends.
        assert corrected + bonus == c.rounds[i] - (result.finish[i] == "stop" and origins[-1] == Origin.DRAFTED)
        assert (c.acceptances[i] <= c.attempts[i]).all() and (np.diff(c.attempts[i]) <= 0).all()
        assert c.accepted[i] <= c.drafted[i] and c.attempts[i].sum() <= c.drafted[i]
        assert (c.overlap_sum[i] <= c.attempts[i] + 1e-4).all() and (c.overlap_sum[i] >= 0).all()


def check_logprobs(pair, result, prompts):
    """Every emitted token against a plain forward of the finished text."""
    for prompt, tokens, logprobs in zip(prompts, result.tokens, result.logprobs, strict=True):
        logits = pair.logits([*prompt, *tokens])
        expected = np.asarray(jax.nn.log_softmax(logits))[len(prompt) - 1 : -1]
        np.testing.assert_allclose(logprobs, expected[np.arange(len(tokens)), tokens], atol=1e-9)


@pytest.fixture(scope="module")
def greedy_text(pair):
    with jax.enable_x64(True):
        return pair.run(PROMPTS, draft_length=0, sampling=GREEDY, verifier="greedy", seed=SEEDS)


@pytest.fixture(scope="module")
def sampled(pair):
    with jax.enable_x64(True):
        return pair.run(PROMPTS, seed=SEEDS)


def test_target_only_greedy_text_is_the_argmax_of_plain_forwards(pair, greedy_text):
    for prompt, tokens in zip(PROMPTS, greedy_text.tokens, strict=True):
        logits = pair.logits([*prompt, *tokens])[len(prompt) - 1 : -1]
        assert np.argmax(logits, -1).tolist() == tokens.tolist()
        assert np.diff(np.sort(logits, -1)[:, -2:]).min() > 1e-6  # no near-tie: equality below means something
    assert (greedy_text.counts.rounds == LIMITS).all() and all((o == Origin.BONUS).all() for o in greedy_text.origins)
    check_books(greedy_text, PROMPTS, LIMITS)


@pytest.mark.parametrize("verifier, draft_sampling", [("token", None), ("block", None), ("coupled", None),
                                                      ("greedy", None), ("token", 1.0)])  # fmt: skip
def test_speculation_at_temperature_zero_is_target_only_decoding(pair, greedy_text, verifier, draft_sampling):
    drafts = None if draft_sampling is None else Sampling.of(draft_sampling)
    result = pair.run(PROMPTS, sampling=GREEDY, verifier=verifier, draft_sampling=drafts, seed=SEEDS)
    assert texts(result) == texts(greedy_text)
    assert 0 < result.counts.accepted.sum() < result.counts.drafted.sum()
    check_books(result, PROMPTS, LIMITS)
    check_logprobs(pair, result, PROMPTS)


def test_coupled_text_is_target_only_text_at_temperature_one(pair):
    """Over 40 seeds of 8 rows, whatever was drafted; and it is the argmax of log p + g of the row's own noise."""
    kept = 0
    for seed in range(5):
        seeds = [100 * seed + i for i in range(8)]
        plain = pair.run(PROMPTS, draft_length=0, verifier="coupled", seed=seeds)
        result = pair.run(PROMPTS, verifier="coupled", seed=seeds)
        assert texts(result) == texts(plain)
        kept += result.counts.accepted.sum()
        check_books(result, PROMPTS, LIMITS)
    assert kept > 50
    keys = row_keys(seeds, 8)
    for i in (1, 5):
        for at, token in enumerate(result.tokens[i]):
            length = len(PROMPTS[i]) + at
            noise = Noise(keys[i : i + 1], jnp.array([length]), Stream.POSITION).gumbel(jnp.array([0]), VOCAB)[0, 0]
            law = jax.nn.softmax(pair.logits([*PROMPTS[i], *result.tokens[i][:at]])[-1])
            assert token == gumbel_max(law, noise)


def test_rows_do_not_depend_on_batch_or_slot(pair, sampled):
    """Batches of 8, 3 and 1 rows of different lengths and limits, each row with a seed of its own."""
    for i in range(8):
        alone = pair.run(PROMPTS[i : i + 1], max_new_tokens=LIMITS[i : i + 1], seed=SEEDS[i : i + 1])
        assert_same(sampled, alone, [i], [0])
    for rows in ([6, 2, 4], [7, 0, 5], [2, 1, 3]):
        pick = lambda values, rows=rows: [values[i] for i in rows]  # noqa: E731
        three = pair.run(pick(PROMPTS), max_new_tokens=pick(LIMITS), seed=pick(SEEDS))
        assert_same(sampled, three, rows, range(3))
    assert len({tuple(t) for t in texts(sampled)}) > 6
    check_books(sampled, PROMPTS, LIMITS)
    check_logprobs(pair, sampled, PROMPTS)


def test_equal_requests_in_two_slots_are_equal(pair):
    result = pair.run([PROMPTS[2]] * 3, max_new_tokens=[20, 3, 20], seed=[7, 7, 7])
    assert_same(result, result, [0], [2])
    assert result.lengths.tolist() == [20, 3, 20]  # one row finishes early, and the others go on undisturbed:
    alone = pair.run([PROMPTS[2]], max_new_tokens=20, seed=[7])
    assert_same(result, alone, [2], [0])
    scalar = [texts(pair.run([PROMPTS[2]] * 3, max_new_tokens=20, seed=7)) for _ in range(2)]
    assert scalar[0] == scalar[1] and scalar[0][0] != scalar[0][1]  # one seed: the same call again, but rows differ


def test_budgets_around_the_draft_length(pair, sampled):
    """1, 2, γ, γ + 1 and far less than γ: the text is cut, never changed, and never too long."""
    for limit in (1, 2, 3, 4):
        result = pair.run(PROMPTS, max_new_tokens=limit, seed=SEEDS, verifier="coupled")
        whole = pair.run(PROMPTS, max_new_tokens=12, seed=SEEDS, verifier="coupled")
        assert texts(result) == [t[:limit] for t in texts(whole)]
        check_books(result, PROMPTS, [limit] * 8)
        assert set(result.finish) == {"length"}
    one = pair.run(PROMPTS, max_new_tokens=1, seed=SEEDS)
    assert (
        one.counts.drafted.sum() == 0 and metrics.summary(metrics.CountTable.of(one.counts))["acceptance_rate"] is None
    )
    assert all((origin == Origin.BONUS).all() for origin in one.origins)


def test_a_draft_longer_than_the_whole_budget(pair, greedy_text):
    result = pair.run(PROMPTS, draft_length=7, sampling=GREEDY, max_new_tokens=2)
    assert texts(result) == [t[:2] for t in texts(pair.run(PROMPTS, sampling=GREEDY, max_new_tokens=2))]
    assert (result.counts.attempts[:, 1:] == 0).all() and result.counts.accepted.sum() > 0
    check_books(result, PROMPTS, [2] * 8)


def test_a_stop_token_ends_the_row_wherever_it_falls(pair):
    """Any token that the model really emits is declared the stop token: the text is cut behind its first one."""
    kinds = set()
    for seed in range(6):
        seeds = [1000 * seed + i for i in range(8)]
        for verifier in ("coupled", "greedy"):
            options = dict(seed=seeds, verifier=verifier, sampling=GREEDY if verifier == "greedy" else None)
            whole = pair.run(PROMPTS, max_new_tokens=12, **options)
            stop_ids = [int(whole.tokens[seed][2 + seed % 3]), int(whole.tokens[(seed + 3) % 8][0])]
            result = pair.run(PROMPTS, max_new_tokens=12, stop_ids=stop_ids, **options)
            for i, text in enumerate(texts(whole)):
                ends = [at for at, token in enumerate(text) if token in stop_ids]
                assert texts(result)[i] == (text[: ends[0] + 1] if ends else text)
                if ends:
                    last, following = result.origins[i][-1], whole.origins[i][ends[0] + 1 : ends[0] + 2]
                    kinds.add(Origin(last).name)
                    kinds.add(("first of the text", ends[0] == 0))
                    kinds.add(("mid-run", last == Origin.DRAFTED and following.tolist() == [Origin.DRAFTED]))
            check_books(result, PROMPTS, [12] * 8, stop_ids)
            check_logprobs(pair, result, PROMPTS)
    assert kinds >= {"DRAFTED", "CORRECTION", "BONUS", ("first of the text", True), ("mid-run", True)}


@pytest.mark.parametrize("verifier", ["token", "block"])
def test_sampling_rules_with_stops_filters_and_temperatures_per_row(pair, verifier):
    sampling = Sampling.of([0.5, 1.0, 0.7] * 2 + [1.5, 0.1], top_k=[2, 4, 11, 3, 2, 5, 4, 11])
    result = pair.run(PROMPTS, sampling=sampling, verifier=verifier, seed=SEEDS, stop_ids=[2, 9], max_new_tokens=20)
    check_books(result, PROMPTS, [20] * 8, [2, 9])
    check_logprobs(pair, result, PROMPTS)
    assert {Origin(o) for row in result.origins for o in row} == {Origin.DRAFTED, Origin.CORRECTION, Origin.BONUS}
    for i, (prompt, tokens) in enumerate(zip(PROMPTS, result.tokens, strict=True)):  # bonus and drafts: inside top-k
        ranks = (-pair.logits([*prompt, *tokens])[len(prompt) - 1 : -1]).argsort(-1).argsort(-1)
        assert (ranks[np.arange(len(tokens)), tokens] < sampling.top_k[i]).all()


def test_the_whole_context_can_be_filled(pair):
    """Drafts reach past it in the last rounds, where a learned position table has no entry: that must not show."""
    config = dataclasses.replace(TARGET, positions="learned", context_length=24)
    target = LanguageModel.init(config, jax.random.key(0))
    target = target.replace(params=jax.tree.map(lambda x: 8 * x, target.params))
    limits = [24 - len(p) for p in PROMPTS[:3]]
    options = dict(max_new_tokens=limits, verifier="coupled")
    plain = generate(target, PROMPTS[:3], **options)
    result = generate(
        target, PROMPTS[:3], drafter=Independent(config, 5), drafter_params=target.params, **options
    )  # the target drafts for itself: every round is accepted whole and the last ones touch the limit
    assert result.lengths.tolist() == limits and texts(result) == texts(plain)
    assert (result.counts.acceptances == result.counts.attempts).all()
    for row, other in zip(result.logprobs, plain.logprobs, strict=True):
        np.testing.assert_allclose(row, other, atol=1e-10)


def test_one_program_serves_a_bucket(pair):
    """20 prompts of different lengths and contents, limits, seeds, temperatures and stop ids: one trace."""
    rng = np.random.default_rng(0)

    def call(i):
        prompt = rng.integers(VOCAB, size=1 + i % 16).tolist()
        sampling = Sampling.of((1, 0.5, np.float32(0.7))[i % 3])
        result = pair.run([prompt], max_new_tokens=1 + i % 14, seed=i, sampling=sampling, stop_ids=range(i % 8))
        assert 1 <= result.lengths[0] <= 1 + i % 14

    call(0)
    before = prefill._cache_size(), decode._cache_size()
    for i in range(1, 21):
        call(i)
    assert (prefill._cache_size(), decode._cache_size()) == before
