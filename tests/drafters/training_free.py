"""A target, its texts, and the comparison of a drafter's texts with them."""

import functools

import jax
import numpy as np

from specjax.decoding import generate
from specjax.sampling import Sampling
from tests.decoding.tiny_pair import LIMITS, PROMPTS, Pair

OPTIONS = dict(max_new_tokens=LIMITS, buffer_length=32, seed=list(range(20, 28)))


@functools.cache
def target():
    return Pair().target


@functools.cache
def target_only(temperature):
    """Texts of the target on its own."""
    with jax.enable_x64(True):
        return generate(target(), PROMPTS, sampling=Sampling.of(temperature), **OPTIONS).tokens


def assert_text_is_the_targets(drafter, params, verifier, temperature=0.0):
    """A ragged batch gives the target's own texts; returns what the drafter's run gave."""
    wanted = target_only(temperature)
    run = generate(
        target(), PROMPTS, drafter=drafter, drafter_params=params, verifier=verifier,
        sampling=Sampling.of(temperature), **OPTIONS,
    )  # fmt: skip
    for got, want in zip(run.tokens, wanted, strict=True):
        np.testing.assert_array_equal(got, want)
    assert (run.counts.emitted == LIMITS).all()
    return run
