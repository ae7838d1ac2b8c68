"""Drafts end behind the first unsure token; with a threshold of 0 they are those of `Independent`, bit for bit."""

import jax
import numpy as np
import pytest

from specjax.decoding import generate
from specjax.decoding.round import drafting_context
from specjax.decoding.run import Run
from specjax.drafters import Adaptive, Independent
from specjax.keys import Noise, Stream
from specjax.sampling import Sampling
from tests.decoding.tiny_pair import DRAFTER, LIMITS, PROMPTS, Pair

DEPTH = 5


@pytest.fixture(scope="module")
def pair():
    return Pair()


@pytest.fixture(autouse=True)
def double_precision():
    with jax.enable_x64(True):
        yield


def first_proposal(pair, drafter, sampling):
    run = Run.start(
        pair.target, PROMPTS[:4], max_new_tokens=20, drafter=drafter, drafter_params=pair.drafter.params,
        sampling=sampling, verifier="token", buffer_length=32, seed=3,
    )  # fmt: skip
    noise = Noise(run.state.row_keys, run.state.length, Stream.ROUND)
    context = drafting_context(run.decoder, run.inputs, run.state)
    return jax.jit(drafter.propose)(run.inputs.drafter_params, run.state.draft_state, context, noise)[0]


@pytest.mark.parametrize("temperature", [0.0, 1.3])
def test_a_threshold_of_zero_never_stops(pair, temperature):
    sampling = Sampling.of(temperature)
    ours = first_proposal(pair, Adaptive(DRAFTER, DEPTH, 0.0), sampling)
    theirs = first_proposal(pair, Independent(DRAFTER, DEPTH), sampling)
    np.testing.assert_array_equal(ours.tokens, theirs.tokens)
    assert ours.valid.all() and (ours.law is None) == (temperature == 0)
    if ours.law is not None:
        np.testing.assert_allclose(ours.law, theirs.law, atol=1e-12)


def test_the_unsure_token_itself_is_kept(pair):
    sampling, threshold = Sampling.of(1.0), 0.2
    whole = first_proposal(pair, Independent(DRAFTER, DEPTH), sampling)
    ours = first_proposal(pair, Adaptive(DRAFTER, DEPTH, threshold), sampling)
    seen = np.take_along_axis(np.asarray(whole.law), np.asarray(whole.tokens)[..., None], 2)[..., 0]
    lengths = set()
    for row in range(4):
        unsure = np.flatnonzero(seen[row] < threshold)
        length = unsure[0] + 1 if unsure.size else DEPTH
        assert ours.valid[row].tolist() == [d < length for d in range(DEPTH)]
        np.testing.assert_array_equal(ours.tokens[row, :length], whole.tokens[row, :length])
        lengths.add(length)
    assert len(lengths) > 1  # rows of different depth stood side by side


def test_fewer_tokens_are_drafted_and_more_of_them_are_right(pair):
    options = dict(max_new_tokens=LIMITS, drafter_params=pair.drafter.params, verifier="token", buffer_length=32)
    rates = []
    for drafter in (Independent(DRAFTER, DEPTH), Adaptive(DRAFTER, DEPTH, 0.5)):
        counts = [generate(pair.target, PROMPTS, drafter=drafter, seed=seed, **options).counts for seed in range(4)]
        drafted, kept = (sum(getattr(c, name).sum() for c in counts) for name in ("drafted", "accepted"))
        rates.append((drafted, kept / drafted))
    assert rates[1][0] < rates[0][0] and rates[1][1] > rates[0][1]


@pytest.mark.parametrize("value", [-0.1, 1.5])
def test_a_threshold_that_is_no_probability(value):
    with pytest.raises(ValueError, match=r"stop_below must be in \[0, 1\]"):
        Adaptive(DRAFTER, DEPTH, value)
