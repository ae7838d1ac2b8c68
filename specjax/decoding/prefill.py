"""The state after the prompts: read by the target whole, or only what an earlier run has not read.

    row of the earlier run      a b c d e f g h            8 tokens, 7 positions in its cache
    row's new prompt            a b c d e x y z u          5 in common
    cache taken over            . . . . .                  rolled back to 5 positions
    read                                  x y z            the last token is pending
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key

from specjax.decoding.round import Inputs
from specjax.decoding.state import Counts, Decoder, State
from specjax.decoding.stop_strings import StopProgress
from specjax.models import KVCache, init_cache
from specjax.models.transformer import apply
from specjax.protocol import Context

# [B, P, F], what each position's features were in the prefill; None for a drafter that wants none.
Features = Float[Array, "B P F"] | None


def bucket_shapes(
    decoder: Decoder, lengths: np.ndarray, limits: np.ndarray, buffer_length: int | None
) -> tuple[int, int]:
    """(padded prompt width P, buffer length L): powers of two, so that few programs serve all prompts.

    Raises:
        ValueError: a `buffer_length` that is too small, or larger than a context.
    """
    needed, context = int((lengths + limits).max()), decoder.context_length
    width = min(_power_of_two(int(lengths.max())), context)
    if buffer_length is None:
        return width, min(max(_power_of_two(needed), width), context)
    if not needed <= buffer_length <= context:
        raise ValueError(
            f"buffer_length {buffer_length} must be between {needed}, which this call needs, and {context}"
        )
    return min(width, buffer_length), buffer_length


def reusable(
    prompts: list[np.ndarray], texts: list[np.ndarray], reach: np.ndarray, buffer_length: int
) -> tuple[np.ndarray, int]:
    """(tokens [B] of each prompt whose cache can be taken over, padded width W of what is left to read).

    Args:
        prompts: per row; the last token is pending, so it is never counted.
        texts: per row, what the earlier run has committed.
        reach: [B] positions of the earlier run that are there to be taken over.
        buffer_length: L; the W positions that are read behind the reused ones must lie within it.
    """
    common = np.array([_common(prompt[:-1], text) for prompt, text in zip(prompts, texts, strict=True)])
    lengths = np.array([len(prompt) for prompt in prompts])
    common = np.minimum(common, reach)
    width = min(_power_of_two(int((lengths - 1 - common).max())), buffer_length)
    return np.minimum(common, buffer_length - width).astype(np.int32), width


def _common(one: np.ndarray, other: np.ndarray) -> int:
    """How many first tokens are equal."""
    shorter = min(len(one), len(other))
    different = np.flatnonzero(one[:shorter] != other[:shorter])
    return int(different[0]) if different.size else shorter


def _power_of_two(n: int) -> int:
    return 1 << max(4, (n - 1).bit_length())


@functools.partial(jax.jit, static_argnums=(0, 1))
def prefill(
    decoder: Decoder,
    buffer_length: int,
    inputs: Inputs,
    prompts: Int[Array, "B P"],
    lengths: Int[Array, "B"],
    limits: Int[Array, "B"],
    keys: Key[Array, "B"],
) -> tuple[State, Features]:
    """All but each row's last token run through both models.

    Args:
        decoder, inputs: of the call.
        buffer_length: L.
        prompts: right-padded.
        lengths: of the prompts.
        limits: length at which each row ends.
        keys: of the rows.

    Returns:
        (the state, the features of the prompts)
    """
    nodes = decoder.drafter.topology.num_nodes + 1
    cache = init_cache(decoder.target, prompts.shape[0], buffer_length + nodes)
    cache, features = _read(decoder, inputs, prompts, cache)
    return _first_state(decoder, buffer_length, inputs, prompts, lengths, limits, keys, cache, features), features


@functools.partial(jax.jit, static_argnums=(0, 1, 2), donate_argnums=4)
def resume(
    decoder: Decoder,
    buffer_length: int,
    width: int,
    inputs: Inputs,
    cache: KVCache,
    known: Float[Array, "B Q F"] | None,
    reused: Int[Array, "B"],
    prompts: Int[Array, "B P"],
    lengths: Int[Array, "B"],
    limits: Int[Array, "B"],
    keys: Key[Array, "B"],
) -> tuple[State, Features]:
    """`prefill` on the cache of an earlier run, which is donated.

    Args:
        width: W; at most so many tokens are left to read in a row.
        cache: of which the first `reused` positions of each row hold the first tokens of its prompt.
        known: features of those positions.
        reused: [B].

    The others are those of `prefill`.
    """
    at = reused[:, None] + jnp.arange(width)
    rest = jnp.take_along_axis(jnp.asarray(prompts), jnp.minimum(at, prompts.shape[1] - 1), 1)
    cache, features = _read(decoder, inputs, rest, cache.rollback(jnp.asarray(reused)))
    if features is not None:
        positions = jnp.arange(prompts.shape[1])
        take = lambda x, at: jnp.take_along_axis(x, jnp.clip(at, 0, x.shape[1] - 1)[..., None], 1)  # noqa: E731
        earlier = take(known, jnp.broadcast_to(positions, prompts.shape))
        features = jnp.where(
            (positions < reused[:, None])[..., None], earlier, take(features, positions - reused[:, None])
        )
    return _first_state(decoder, buffer_length, inputs, prompts, lengths, limits, keys, cache, features), features


def _read(decoder: Decoder, inputs: Inputs, tokens, cache: KVCache):
    """(cache, features) after the tokens; no logits are made."""
    nowhere = jnp.zeros((tokens.shape[0], 0), jnp.int32)
    layers = decoder.drafter.feature_layers
    return apply(decoder.target, inputs.target_params, tokens, cache, feature_layers=layers, logits_at=nowhere)[1:]


def _first_state(decoder, buffer_length, inputs, prompts, lengths, limits, keys, cache, features) -> State:
    prompts, lengths = jnp.asarray(prompts), jnp.asarray(lengths)
    batch, width = prompts.shape
    depth, vocab = decoder.drafter.topology.max_depth, decoder.target.vocab_size
    cache = cache.rollback(lengths - 1)
    context = Context(
        tokens=prompts,
        length=lengths,
        sampling=inputs.draft_sampling,
        features=features,
        target_params=inputs.target_params,
        target_cache=cache,
        buffer_length=buffer_length,
    )
    slots = buffer_length + depth + 1
    wide = jnp.promote_types(decoder.target.dtype, jnp.float32)
    return State(
        tokens=jnp.pad(prompts, ((0, 0), (0, slots - width))),
        logprobs=jnp.zeros((batch, slots), wide),
        origins=jnp.zeros((batch, slots), jnp.int8),
        length=lengths,
        limit=jnp.asarray(limits),
        finish=jnp.zeros(batch, jnp.int32),
        row_keys=keys,
        target_cache=cache,
        draft_state=decoder.drafter.init(inputs.drafter_params, context),
        counts=Counts.zeros(batch, depth),
        history=None if inputs.penalties is None else inputs.penalties.start(prompts, lengths, vocab),
        stop=None if inputs.stop_tables is None else StopProgress.start(batch),
    )
