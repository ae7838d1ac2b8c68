"""What a chain drafts in every round is what one forward over the whole text gives; no position is skipped."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.drafters.eagle import Eagle
from specjax.models.transformer import apply
from specjax.sampling import Sampling, draw
from specjax.training.eagle_objective import unroll
from tests.decoding.tiny_pair import LIMITS, PROMPTS
from tests.drafters.tiny_eagle import EAGLE1, KEPT, REDUCED, logits_along, params_of, rounds, softmax, target

DEPTH = 3


@pytest.fixture(autouse=True)
def double_precision():
    with jax.enable_x64(True):
        yield


@pytest.mark.parametrize("model", [pytest.param(EAGLE1, marks=pytest.mark.slow), REDUCED])
def test_q_is_the_law_of_a_whole_forward_and_of_an_unrolled_step_of_training(model):
    """In every round: also after every kind of rejection, after a bonus, in a row whose prompt has one token and beside
    finished rows. Step s of training-time test is depth s of decoding."""
    params, temperature = params_of(model), 2.0

    @jax.jit
    def unrolled(tokens):
        _, _, raw = apply(model.target, target().params, tokens, feature_layers=model.feature_layers)
        features = model.start(params, target().params, raw)[:, : tokens.shape[1] - DEPTH]
        outs = unroll(model, params, target().params, features, tokens, DEPTH)
        return jnp.stack([model.logits(params, target().params, out) for out in outs], 2)  # [B, n, S, V]

    accepted, before = set(), None
    drafter, sampling = Eagle(model, DEPTH), Sampling.of(temperature)
    for state, noise, proposal in rounds(drafter, sampling, "token", PROMPTS[:3], LIMITS[:3]):
        texts = np.zeros((3, 32), np.int32)
        for row, length in enumerate(state.length):
            texts[row, : length + DEPTH] = [*state.tokens[row, :length], *proposal.tokens[row]]
            if before is not None:
                accepted.add(int(state.counts.accepted[row] - before[row]))
        laws = softmax(np.asarray(unrolled(texts)), temperature)
        for row, length in enumerate(state.length):
            assert proposal.valid[row].all() == proposal.valid[row].any() == (length > 1)
            if length > 1:
                logits = logits_along(model, texts[row, : length + DEPTH], length)[:-1]
                np.testing.assert_allclose(proposal.law[row], softmax(logits, temperature), atol=1e-10)
                np.testing.assert_allclose(proposal.law[row], laws[row, length - 2], atol=1e-10)
        drawn = draws(jnp.asarray(proposal.law), noise.draft(DEPTH))
        np.testing.assert_array_equal(proposal.tokens, drawn)
        if model is REDUCED:
            assert not np.delete(proposal.law, KEPT, -1).any() and proposal.law[..., KEPT].all()
        before = state.counts.accepted
    assert accepted == {0, 1, 2, 3}


@jax.jit
def draws(law, sources):
    return jnp.stack([draw(law[:, d], jax.tree.map(lambda x, d=d: x[d], sources)) for d in range(DEPTH)], 1)


def test_a_greedy_drafter_follows_the_largest_logits():
    compared = 0
    for state, _, proposal in rounds(Eagle(EAGLE1, DEPTH), Sampling.of(0.0), "greedy", PROMPTS[:3], LIMITS[:3]):
        assert proposal.law is None
        for row, length in enumerate(state.length):
            if length > 1:
                text = [*state.tokens[row, :length], *proposal.tokens[row]]
                best = logits_along(EAGLE1, text, length)[:-1].argmax(-1)
                assert best.tolist() == proposal.tokens[row].tolist()
                compared += 1
    assert compared > 10


def test_a_finished_row_keeps_its_state():
    drafter, final = Eagle(EAGLE1, DEPTH), {}
    for state, _, _ in rounds(drafter, Sampling.of(1.0), "token", PROMPTS[:3], [2, 14, 5]):
        for row in np.flatnonzero(state.finish):
            pairs = state.draft_state
            now = [x[row].tolist() for x in (pairs.cache.length, pairs.features, pairs.tokens, pairs.count)]
            assert final.setdefault(row, now) == now
            # What was run and what is kept are together every pair of the text.
            assert pairs.cache.length[row] + pairs.count[row] == state.length[row] - 1
    assert len(final) == 2


def test_a_drafter_needs_a_token_to_draft():
    with pytest.raises(ValueError, match="draft_length must be at least 1; got 0"):
        Eagle(EAGLE1, 0)
