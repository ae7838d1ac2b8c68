"""A tiny target with EAGLE drafters in float64, and what they must draft, by plain forwards of whole texts."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from specjax.decoding.round import drafting_context
from specjax.decoding.run import Run
from specjax.keys import Noise
from specjax.models.eagle_layer import EagleConfig
from specjax.models.transformer import apply
from specjax.verifiers import VERIFIERS
from tests.drafters.families import make_target, spread, target_config

VOCAB = 11
TARGET = target_config(VOCAB)
EAGLE1 = EagleConfig(TARGET)
EAGLE3 = EagleConfig(TARGET, version=3)
REDUCED = EagleConfig(TARGET, version=3, draft_vocab=6)
KEPT = [10, 1, 2, 7, 4, 9]  # the reduced vocabulary, in no order
WIDTH = 40  # of the padded texts of the references


@functools.cache
def target():
    with jax.enable_x64(True):
        return make_target(VOCAB)


@functools.cache
def params_of(model: EagleConfig):
    with jax.enable_x64(True):
        ids = jnp.array(KEPT) if model.draft_vocab else None
        return spread(model.init_params(jax.random.key(5), target().params, ids), 0.2, 6)


def rounds(drafter, sampling, verifier, prompts, limits, seed=3):
    """(host state, noise, proposal, params) at the start of every round of a ragged batch."""
    params = params_of(drafter.model)
    run = Run.start(
        target(), prompts, max_new_tokens=limits, drafter=drafter, drafter_params=params, sampling=sampling,
        verifier=verifier, buffer_length=32, seed=seed,
    )  # fmt: skip
    stream = VERIFIERS[verifier]().stream

    @jax.jit
    def propose(inputs, state):
        noise = Noise(state.row_keys, state.length, stream)
        context = drafting_context(run.decoder, inputs, state)
        return drafter.propose(inputs.drafter_params, state.draft_state, context, noise)[0]

    while not run.finished:
        state = jax.device_get(run.state.replace(row_keys=None))
        noise = Noise(run.state.row_keys, jnp.asarray(state.length), stream)
        yield state, noise, jax.device_get(propose(run.inputs, run.state))
        run.advance(1)


@functools.partial(jax.jit, static_argnums=0)
def _outputs(model, params, target_params, text, num_true):
    """[WIDTH, D] and [WIDTH, V]: outputs and logits of one forward over all pairs, those from `num_true` on with the
    outputs of the pairs before them; found by repeating the whole forward until it no longer changes."""
    _, _, raw = apply(model.target, target_params, text[None], feature_layers=model.feature_layers)
    true = model.start(params, target_params, raw)
    followers = jnp.roll(text, -1)[None]
    is_true = (jnp.arange(WIDTH) < num_true)[None, :, None]

    def again(_, out):
        features = jnp.where(is_true, true, jnp.roll(out, 1, 1))
        return model.run(params, target_params, features, followers, model.init_cache(1, WIDTH))[0]

    out = jax.lax.fori_loop(0, 8, again, jnp.zeros_like(true))  # drafts are less than 8 deep
    return out[0], model.logits(params, target_params, out)[0]


def softmax(logits, temperature):
    """The law of these logits, in numpy: the same test compares hundreds of them."""
    law = np.exp((logits - logits.max(-1, keepdims=True)) / temperature)
    return law / law.sum(-1, keepdims=True)


def logits_along(model: EagleConfig, text, num_committed: int) -> np.ndarray:
    """[len(text) - num_committed + 1, V]: drafter logits behind the committed text and behind each drafted token."""
    padded = np.zeros(WIDTH, np.int32)
    padded[: len(text)] = text
    logits = _outputs(model, params_of(model), target().params, padded, num_committed - 1)[1]
    return np.asarray(logits[num_committed - 2 : len(text) - 1])
