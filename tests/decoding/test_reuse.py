"""A call that goes on from an earlier one: the same text and cache as a fresh call, with less read."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from specjax.decoding import run as run_module
from specjax.decoding.prefill import reusable
from specjax.decoding.run import Run
from specjax.models import LanguageModel
from specjax.sampling import Sampling
from specjax.verifiers import VERIFIERS
from tests.drafters.families import FAMILIES, make_target

BUFFER, SEEDS = 64, [40, 41, 42, 43]
PROMPTS = [[3, 1, 2], list(range(11)) * 3, [9, 0, 9, 0, 5, 6], [4]]
SAID = [[7], [1, 2, 3, 4], [8, 8, 8, 8, 8, 8, 8], [5, 0]]  # what the user adds in every turn
NAMES = ["target only", "independent", "eagle", "early_exit", "ngram"]
NAMES += [pytest.param(name, marks=pytest.mark.slow) for name in ("independent_tree", "eagle_dynamic", "medusa")]


@functools.cache
def target():
    with jax.enable_x64(True):
        return make_target(11)


@functools.cache
def drafting(name):
    with jax.enable_x64(True):
        if name == "target only":
            return {}
        return dict(zip(("drafter", "drafter_params"), FAMILIES[name](target()), strict=True))


def start(name, prompts, **options):
    defaults = dict(max_new_tokens=6, seed=SEEDS[: len(prompts)], buffer_length=BUFFER)
    return Run.start(target(), prompts, **defaults | drafting(name) | options)


def finished(run):
    run.advance()
    return run.result()


@pytest.fixture
def widths(monkeypatch):
    """Tokens per row that each prefill on an earlier cache has read."""
    seen, resume = [], run_module.resume
    monkeypatch.setattr(run_module, "resume", lambda *args: seen.append(args[2]) or resume(*args))
    return seen


def next_turn(prompts, result, turn):
    """Most rows go on; one has its last answer changed, in the next turn one its prompt."""
    texts = [[*prompt, *new.tolist(), *said] for prompt, new, said in zip(prompts, result.tokens, SAID, strict=True)]
    changed, at = (2, len(prompts[2]) + 3) if turn == 1 else (3, 8)
    texts[changed][at] = (texts[changed][at] + 1) % 11
    return texts, changed, at


def assert_equal_states(one, other, lengths):
    arrays = lambda state: state.target_cache.keys + state.target_cache.values  # noqa: E731
    for ours, theirs in zip(arrays(one), arrays(other), strict=True):
        for row, length in enumerate(lengths):
            np.testing.assert_allclose(ours[row, :, : length - 1], theirs[row, :, : length - 1], atol=1e-9)
    assert one.target_cache.length.tolist() == other.target_cache.length.tolist() == (lengths - 1).tolist()


@pytest.mark.parametrize("name", NAMES)
def test_three_turns_are_those_of_fresh_calls(name, widths):
    run, prompts = start(name, PROMPTS), PROMPTS
    for turn in (1, 2):
        result, old = finished(run), run
        known = [len(prompt) + len(new) for prompt, new in zip(prompts, result.tokens, strict=True)]
        old_prompts = np.array([len(prompt) for prompt in prompts])
        prompts, changed, at = next_turn(prompts, result, turn)
        cache = old.state.target_cache
        run, fresh = start(name, prompts, previous=old), start(name, prompts)
        reused = np.array(known) - 1
        reused[changed] = at
        if old.features is not None:  # answers have no features on file
            reused = np.minimum(reused, old_prompts - 1)
        assert run.reused.tolist() == reused.tolist() and fresh.reused.tolist() == [0] * 4
        left = max(len(prompt) - 1 - n for prompt, n in zip(prompts, reused, strict=True))
        assert len(widths) == turn and left <= widths[-1] <= max(16, 2 * left) < BUFFER
        assert all(x.is_deleted() for x in cache.keys)  # taken over, not copied
        lengths = np.array([len(prompt) for prompt in prompts])
        assert_equal_states(jax.device_get(run.state.replace(row_keys=None)),
                            jax.device_get(fresh.state.replace(row_keys=None)), lengths)  # fmt: skip
        if run.features is not None:
            for row, length in enumerate(lengths):
                known = slice(0, length - 1)
                np.testing.assert_allclose(run.features[row, known], fresh.features[row, known], atol=1e-9)
        expected = finished(fresh)
        ours = finished(run)
        assert [row.tolist() for row in ours.tokens] == [row.tolist() for row in expected.tokens]
        assert (ours.counts.accepted == expected.counts.accepted).all()
        assert ours.reused.tolist() == reused.tolist()
        for one, other in zip(ours.logprobs, expected.logprobs, strict=True):
            np.testing.assert_allclose(one, other, atol=1e-9)
        final = lengths + ours.lengths
        assert_equal_states(jax.device_get(run.state.replace(row_keys=None)),
                            jax.device_get(fresh.state.replace(row_keys=None)), final)  # fmt: skip


def test_a_prompt_whose_rest_fills_its_padding_leaves_no_wrong_feature(widths):
    """The second turn reads exactly 16 tokens, so that of the pending one behind them nothing is known; a third turn
    reads it again, and its drafts are those of a fresh call."""
    first = list(np.random.default_rng(0).integers(0, 11, 20))
    run = start("eagle", [first])
    second = [*first, *np.random.default_rng(1).integers(0, 11, 16)]
    run = start("eagle", [second], previous=run)
    assert run.reused.tolist() == [19] and widths == [16]
    third = [*second, 3, 1]
    fresh = start("eagle", [third])
    run = start("eagle", [third], previous=run)
    reach = len(third) - 1
    np.testing.assert_allclose(run.features[0, :reach], fresh.features[0, :reach], atol=1e-9)
    ours, expected = finished(run), finished(fresh)
    assert ours.tokens[0].tolist() == expected.tokens[0].tolist()
    assert ours.counts.accepted.tolist() == expected.counts.accepted.tolist()


def test_a_buffer_that_the_new_drafter_cannot_follow_is_not_taken_over():
    """The earlier buffer is longer than the drafter's context; the call itself would fit."""
    drafter, params = FAMILIES["independent"](target())
    short = dataclasses.replace(drafter, model=dataclasses.replace(drafter.model, context_length=32))
    old = Run.start(target(), [[1, 2, 3]], max_new_tokens=4, buffer_length=BUFFER)
    options = dict(max_new_tokens=4, drafter=short, drafter_params=params)
    run = Run.start(target(), [[1, 2, 3, 4]], previous=old, **options)
    assert run.buffer_length <= 32 and run.reused.tolist() == [0]


def test_a_call_may_go_on_from_one_that_was_left_early():
    """A text that was interrupted, with other limits and seeds than before."""
    old = start("independent", PROMPTS)
    old.advance(2)
    texts = [[*prompt, *new.tolist(), 1] for prompt, new in zip(PROMPTS, old.result().tokens, strict=True)]
    options = dict(max_new_tokens=[3, 6, 5, 4], seed=9)
    run = start("independent", texts, previous=old, **options)
    assert (run.reused == [len(text) - 2 for text in texts]).all()
    assert [row.tolist() for row in finished(run).tokens] == [
        row.tolist() for row in finished(start("independent", texts, **options)).tokens
    ]


def test_the_buffer_length_is_the_earlier_ones_where_it_is_enough(widths):
    old = start("ngram", [[1, 2, 3]], buffer_length=40)
    run = start("ngram", [[1, 2, 3, 4]], previous=old, buffer_length=None)
    assert run.buffer_length == 40 and widths == [16] and run.reused.tolist() == [2]
    longer = start("ngram", [[1, 2, 3, 4]], previous=run, buffer_length=None, max_new_tokens=40)
    assert longer.buffer_length == 64 and widths == [16] and longer.reused.tolist() == [0]


def test_what_cannot_be_taken_over_is_read_whole(widths):
    copied = LanguageModel(target().config, jax.tree.map(lambda x: x + 0, target().params))
    prompt, one = [[1, 2, 3, 4]], dict(max_new_tokens=4, buffer_length=BUFFER)
    changes = [dict(prompts=prompt * 2), dict(buffer_length=32), dict(verifier="block"), dict(target=copied),
               dict(prompts=[[9, 2, 3]]), drafting("independent")]  # fmt: skip
    for change in changes:
        old = Run.start(target(), prompt, verifier="token", **one)
        run = Run.start(**(dict(target=target(), prompts=prompt, verifier="token", previous=old) | one | change))
        assert not run.reused.any() and not widths and old.state is None and run.state is not None


def test_a_run_is_used_up_once():
    old = start("target only", [[1, 2, 3]])
    new = start("target only", [[1, 2, 3]], previous=old)
    for use in (old.advance, old.result, lambda: old.finished, lambda: start("target only", [[1]], previous=old)):
        with pytest.raises(ValueError, match="this run was given as `previous` and is used up"):
            use()
    with pytest.raises(ValueError, match="previous must be a Run, such as Run.start.*; got 'x'"):
        start("target only", [[1]], previous="x")
    with pytest.raises(ValueError, match="prompts is empty"):
        start("target only", [], previous=new)
    assert new.finished is False  # a wrong call takes nothing


def test_one_program_serves_prompts_of_a_bucket():
    text = [1, 2, 3, 4, 5, 4, 3, 2, 1, 0]
    run = start("ngram", [[*text, 4]], previous=start("ngram", [text]))
    before = run_module.resume._cache_size()
    for said in ([5], [6, 7], []):
        text = [*text[:9], *said]
        run = start("ngram", [text], previous=run)
        assert run.reused.tolist() == [min(9, len(text) - 1)]
    assert run_module.resume._cache_size() == before


def test_what_is_reused_leaves_room_for_what_is_read():
    arrays = lambda *rows: [np.array(row) for row in rows]  # noqa: E731
    text = list(range(100))
    reused, width = reusable(arrays(text[:60], text[:3]), arrays(text, text), np.array([99, 99]), 64)
    assert (reused.tolist(), width) == ([48, 2], 16)  # 59 would do, but 16 tokens must fit behind it
    reused, width = reusable(arrays(text[:60], [0, 9, 9] + text), arrays(text, text), np.array([30, 99]), 128)
    assert (reused.tolist(), width) == ([0, 0], 128)
    reused, width = reusable(arrays([7]), arrays([7, 7]), np.array([1]), 64)
    assert (reused.tolist(), width) == ([0], 16)  # the pending token is never read


@pytest.mark.slow
def test_verifiers_of_both_streams_go_on(widths):
    for name in ("coupled", "block"):
        assert name in VERIFIERS
        old = start("independent", PROMPTS, verifier=name, sampling=Sampling.of(0.8, top_k=5))
        texts = [[*prompt, *new.tolist(), 1] for prompt, new in zip(PROMPTS, finished(old).tokens, strict=True)]
        options = dict(verifier=name, sampling=Sampling.of(0.8, top_k=5))
        run, fresh = start("independent", texts, previous=old, **options), start("independent", texts, **options)
        assert [r.tolist() for r in finished(run).tokens] == [r.tolist() for r in finished(fresh).tokens]
    assert len(widths) == 2
