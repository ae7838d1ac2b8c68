"""Held-out decoding and sampled training texts: they say what really happens, and they are reproducible."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.decoding import generate
from specjax.drafters import Independent
from specjax.models import LanguageModel, TransformerConfig
from specjax.sampling import Sampling
from specjax.training.objectives import Distillation, NextToken
from specjax.training.rollouts import HeldOutDecoding, HeldOutLoss, Sampled, TextSample

TARGET = TransformerConfig(vocab_size=11, d_model=16, num_layers=2, num_heads=2, context_length=64)
DRAFTER = TransformerConfig(vocab_size=11, d_model=8, num_layers=1, num_heads=1, context_length=64)
PROMPTS = [[1, 2, 3], [4, 5, 6]]


@pytest.fixture(scope="module")
def target():
    return LanguageModel.init(TARGET, jax.random.key(0))


@pytest.fixture(scope="module")
def drafter():
    return LanguageModel.init(DRAFTER, jax.random.key(1))


def batch(rows=4, width=13):
    return {"tokens": np.random.default_rng(0).integers(0, 11, (rows, width)).astype(np.int32)}


def test_a_target_that_drafts_for_itself_is_always_accepted(target):
    evaluator = HeldOutDecoding(target, Independent(TARGET, 3), PROMPTS, 17, Sampling.of(0.0), verifier="greedy")
    values = dict(evaluator(target.params))
    assert values["held_out/acceptance_rate"] == 1
    # 17 tokens in rounds of 4: five rounds, the last one cut short by the limit.
    assert values["held_out/block_efficiency"] == pytest.approx(17 / 5)
    assert values["depth/acceptance_rate_3"] == 1


def test_figures_are_those_of_the_counts(target, drafter):
    options = dict(max_new_tokens=20, sampling=Sampling.of(1.0))
    values = dict(HeldOutDecoding(target, Independent(DRAFTER, 3), PROMPTS, 20, Sampling.of(1.0))(drafter.params))
    counts = generate(target, PROMPTS, drafter=Independent(DRAFTER, 3), drafter_params=drafter.params, **options).counts
    assert values["held_out/block_efficiency"] == counts.emitted.sum() / counts.rounds.sum()
    assert values["held_out/acceptance_rate"] == counts.accepted.sum() / counts.attempts.sum()
    assert 0 < values["held_out/overlap"] < 1


def test_held_out_loss_weighs_batches_by_their_tokens(target):
    full, half = batch(), batch()
    half["mask"] = np.arange(13) < np.array([[13], [7], [2], [13]])
    full["mask"] = np.ones((4, 13), bool)
    values = dict(HeldOutLoss(NextToken(TARGET), [full, half], bits_per_nat=2.0)(target.params))

    logits = np.asarray(target(jnp.asarray(full["tokens"][:, :-1]))[0], np.float64)
    log_law = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    losses = -np.take_along_axis(log_law, full["tokens"][:, 1:, None], -1)[..., 0]
    counted = np.concatenate([losses[full["mask"][:, 1:]], losses[half["mask"][:, 1:]]])
    assert values["held_out/cross_entropy"] == pytest.approx(counted.mean(), abs=1e-5)
    assert values["held_out/bits_per_byte"] == pytest.approx(2 * counted.mean(), abs=1e-5)


def test_held_out_loss_of_a_distillation_reads_the_frozen_target(target, drafter):
    objective = Distillation(DRAFTER, TARGET)
    values = dict(HeldOutLoss(objective, [batch()], frozen=target.params)(drafter.params))
    assert 0 < values["held_out/overlap"] < 1


@pytest.mark.parametrize("writer", ["target", "drafter"])
def test_sampled_batches_keep_the_prompt_and_mask_it(target, drafter, writer):
    given = (TARGET, target.params) if writer == "target" else (DRAFTER, None)
    source = Sampled(*given, prompt_length=5)
    corpus = batch()
    key = jax.random.key(7)
    sampled = source(drafter.params, key, corpus)
    assert sampled["tokens"].shape == (8, 13)  # two prompts of 5 fit into each of the four rows of 13
    np.testing.assert_array_equal(sampled["tokens"][:, :5].reshape(4, 10), corpus["tokens"][:, :10])
    assert not sampled["mask"][:, :5].any() and sampled["mask"][:, 5:].all()
    np.testing.assert_array_equal(source(drafter.params, key, corpus)["tokens"], sampled["tokens"])
    other = source(drafter.params, jax.random.key(8), corpus)["tokens"]
    assert not np.array_equal(other, sampled["tokens"])


def test_greedy_samples_are_the_writers_own_text(target, drafter):
    sampled = Sampled(TARGET, target.params, prompt_length=4, temperature=0.0)(None, jax.random.key(0), batch())
    prompts = list(batch()["tokens"][:, :12].reshape(12, 4))
    plain = generate(target, prompts, max_new_tokens=9, sampling=Sampling.of(0.0))
    np.testing.assert_array_equal(sampled["tokens"][:, 4:], np.stack(plain.tokens))


def test_a_prompt_as_long_as_the_window_is_refused(target):
    with pytest.raises(ValueError, match="prompt_length must be from 1 to 12"):
        Sampled(TARGET, target.params, prompt_length=13)(None, jax.random.key(0), batch())


def test_text_sample_starts_with_its_prompt(target):
    ((tag, text),) = TextSample(TARGET, [1, 2], 5, lambda ids: " ".join(map(str, ids)))(target.params)
    assert tag == "samples/text" and text.startswith("    1 2 ") and len(text.split()) == 7
