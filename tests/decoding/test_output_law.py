"""The law of what the user receives, over several rounds, against the target's law by enumeration.

A test of one round cannot see noise that a later round draws again; this one can, and shows it on a rule broken in just
that way. Chi-square at a fixed seed with false alarm rate 1e-3 per rule.
"""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct
from scipy.stats import chi2

from specjax.decoding import generate
from specjax.drafters import Independent
from specjax.keys import ROUND, Noise, Role
from specjax.models import LanguageModel, TransformerConfig
from specjax.models.transformer import apply
from specjax.sampling import Sampling
from specjax.verifiers import VERIFIERS, BlockRule
from specjax.verifiers.enumeration import texts

VOCAB, TOKENS, DRAFT_LENGTH, SAMPLES = 3, 4, 3, 200_000
PROMPTS = [[0], [1, 2], [2, 2, 0, 1, 1], [0, 1, 2]]
CONFIG = TransformerConfig(VOCAB, 4, 1, 1, d_ff=4, context_length=32, tied_head=False, head_bias=True)


@struct.dataclass
class RevisitedNoise(Noise):
    """The fault: drafts and coins keyed by the position they are about, so a later round draws the same ones again."""

    def _round_uniform(self, depth, role):
        if role is Role.NEXT:
            return super()._round_uniform(depth, role)

        def one(key, position):
            return jax.random.uniform(
                jax.random.fold_in(jax.random.fold_in(jax.random.fold_in(key, ROUND), position), role)
            )

        return jax.vmap(one)(self.row_keys, self.length + depth)


def revisited(noise):
    return RevisitedNoise(noise.row_keys, noise.length, noise.stream)


class RevisitingDrafter(Independent):
    def propose(self, params, state, context, noise):
        return super().propose(params, state, context, revisited(noise))


@dataclasses.dataclass(frozen=True)
class RevisitingBlock(BlockRule):
    name: ClassVar[str] = "revisiting_block"

    def verify(self, p, proposal, noise):
        return super().verify(p, proposal, revisited(noise))


def model(seed, law):
    """A law near the given one at every position, but different for every text."""
    made = LanguageModel.init(CONFIG, jax.random.key(seed))
    leaves, tree = jax.tree.flatten(made.params)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    params = jax.tree.unflatten(
        tree, [x + 0.15 * jax.random.normal(k, x.shape) for x, k in zip(leaves, keys, strict=True)]
    )
    params["head"]["bias"] = jnp.log(jnp.array(law))
    return made.replace(params=params)


@pytest.fixture(scope="module")
def target():
    return model(0, [0.25, 0.2, 0.55])


@pytest.fixture(scope="module")
def drafter():
    return model(1, [0.65, 0.25, 0.1])


@pytest.fixture(scope="module")
def expected(target):
    """[prompts, V^4] law of the first four new tokens."""
    continuations = texts(VOCAB, TOKENS)
    laws = []
    forward = jax.jit(lambda tokens: apply(CONFIG, target.params, tokens)[0])
    for prompt in PROMPTS:
        whole = np.concatenate([np.tile(prompt, (len(continuations), 1)), continuations], 1)
        logits = forward(np.pad(whole, ((0, 0), (0, 9 - whole.shape[1]))))[:, len(prompt) - 1 :][:, :TOKENS]
        law = np.asarray(jax.nn.softmax(logits), np.float64)
        laws.append(np.take_along_axis(law, continuations[..., None], 2)[..., 0].prod(-1))
    assert np.allclose(np.sum(laws, -1), 1, atol=1e-5)
    return np.array(laws) / np.sum(laws, -1, keepdims=True)


def p_value(target, drafter, expected, verifier, make=Independent, alpha=(0.35, 0.65), **options):
    """Of the chi-square test over all prompts and texts, rows of all prompts mixed in one ragged batch."""
    rows, calls = 25_000, SAMPLES // 25_000
    which = np.arange(rows) % len(PROMPTS)
    observed = np.zeros(expected.shape)
    tries = kept = 0
    for seed in range(calls):
        result = generate(
            target,
            [PROMPTS[i] for i in which],
            max_new_tokens=TOKENS + 2,  # rounds are not cut short where the first four tokens are decided
            drafter=make(CONFIG, DRAFT_LENGTH),
            drafter_params=drafter.params,
            verifier=verifier,
            seed=1000 + seed,
            **options,
        )
        number = np.stack(result.tokens)[:, :TOKENS] @ VOCAB ** np.arange(TOKENS)[::-1]
        np.add.at(observed, (which, number), 1)
        assert (result.counts.rounds >= 2).all()
        tries, kept = tries + result.counts.attempts[:, 0].sum(), kept + result.counts.acceptances[:, 0].sum()
    assert observed.sum() == SAMPLES and alpha[0] < kept / tries < alpha[1]  # near 0.5 unless told
    cells = expected * observed.sum(-1, keepdims=True)
    assert cells.min() > 5
    return chi2.sf(((observed - cells) ** 2 / cells).sum(), (cells.shape[1] - 1) * cells.shape[0])


@pytest.mark.slow
@pytest.mark.parametrize("verifier", ["token", "block", "coupled"])
def test_lossless_rules_keep_the_law_over_several_rounds(target, drafter, expected, verifier):
    assert VERIFIERS[verifier].lossless
    assert p_value(target, drafter, expected, verifier) > 1e-3


@pytest.mark.slow
def test_a_greedy_drafter_keeps_the_law_of_a_target_at_temperature_one(target, drafter, expected):
    """Its q is one-hot, not the softmax it took the maximum of."""
    greedy = Sampling.of(0.0)
    assert p_value(target, drafter, expected, "block", alpha=(0.1, 0.6), draft_sampling=greedy) > 1e-3


@pytest.mark.slow
def test_noise_that_a_later_round_draws_again_is_caught(target, drafter, expected):
    assert p_value(target, drafter, expected, RevisitingBlock(), RevisitingDrafter) < 1e-3


@pytest.mark.slow
def test_a_correction_from_the_target_law_is_caught(target, drafter, expected):
    assert p_value(target, drafter, expected, "lossy_resample_from_target") < 1e-3


def test_texts_are_numbered_in_the_order_of_their_digits():
    np.testing.assert_array_equal(texts(VOCAB, TOKENS) @ VOCAB ** np.arange(TOKENS)[::-1], np.arange(VOCAB**TOKENS))
