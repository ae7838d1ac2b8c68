"""A suffix array over a fixed text: built once on the host, searched on the device.

The array lists all positions of the text in the lexicographic order of what stands there, so that the occurrences of
any pattern are one range of it, found by two binary searches:

    text  b a n a n a          suffix array  5 3 1 0 4 2          a | ana | anana | banana | na | nana
    the pattern "an"           its range     [1, 3)
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int


def build_corpus_index(tokens) -> dict[str, Array]:
    """The index {"tokens": [C], "suffix_array": [C]} (int32) of C token ids.

    By prefix doubling in numpy: as many sorts of C numbers as log2 of the longest stretch that occurs twice, so that
    C log² C steps are the worst. The index takes 8 C bytes on the device.

    Raises:
        ValueError: tokens that are not a one-dimensional, non-empty sequence of ids >= 0.
    """
    ids = np.asarray(tokens)
    if ids.ndim != 1 or not ids.size or not np.issubdtype(ids.dtype, np.integer) or ids.min() < 0:
        raise ValueError(
            f"a corpus must be one non-empty sequence of token ids >= 0; got {ids.dtype} of shape {ids.shape}"
            + (f" with smallest value {ids.min()}" if ids.size and np.issubdtype(ids.dtype, np.integer) else "")
        )
    size, span = ids.size, 1
    rank = np.unique(ids, return_inverse=True)[1].astype(np.int64)
    while True:
        # Rank 0 stands for the end of the text, which comes before every token.
        second = np.concatenate([rank[span:] + 1, np.zeros(min(span, size), np.int64)])
        key = rank * (size + 1) + second
        order = np.argsort(key, kind="stable")
        new = np.concatenate([[0], np.cumsum(np.diff(key[order]) > 0)])
        rank = np.empty_like(rank)
        rank[order] = new
        if new[-1] == size - 1:
            return {"tokens": jnp.asarray(ids, jnp.int32), "suffix_array": jnp.asarray(order, jnp.int32)}
        span *= 2


def check_corpus_index(index, vocab_size: int) -> None:
    """Raises ValueError when `index` is not what `build_corpus_index` makes, or holds ids past the vocabulary."""
    if not isinstance(index, dict) or set(index) != {"tokens", "suffix_array"}:
        raise ValueError(
            "a corpus index must be a dict of 'tokens' and 'suffix_array'; make it with build_corpus_index(tokens)"
        )
    tokens, order = np.asarray(index["tokens"]), np.asarray(index["suffix_array"])
    int32 = tokens.dtype == order.dtype == np.int32
    if tokens.ndim != 1 or not tokens.size or tokens.shape != order.shape or not int32:
        raise ValueError(
            "both arrays of a corpus index must be int32 of one length, not empty; got "
            f"{tokens.dtype}{list(tokens.shape)} and {order.dtype}{list(order.shape)}; "
            "make it with build_corpus_index(tokens)"
        )
    if not np.array_equal(np.sort(order), np.arange(order.size)):
        raise ValueError("suffix_array must list every position once; make the index with build_corpus_index(tokens)")
    if tokens.min() < 0 or tokens.max() >= vocab_size:
        bad = tokens[(tokens < 0) | (tokens >= vocab_size)][0]
        raise ValueError(f"the corpus holds token id {bad}; the vocabulary has ids 0 to {vocab_size - 1}")


def longest_in_corpus(
    index: dict[str, Array], tokens: Int[Array, "B L"], length: Int[Array, "B"], max_match: int
) -> tuple[Int[Array, "B"], Int[Array, "B"], Int[Array, "B"]]:
    """(matched, first, last): the longest end of each text, up to `max_match` tokens, that goes on in the corpus.

    Its occurrences with a token behind them are the places first to last - 1 of the suffix array; matched is 0 and the
    range empty where not even the last token occurs. All lengths are searched at once, in log2 C steps that compare
    max_match tokens for each of them.
    """
    corpus, order = index["tokens"], index["suffix_array"]
    size = corpus.shape[0]
    sizes = jnp.arange(1, max_match + 1)
    offsets = jnp.arange(max_match)
    used = offsets < sizes[:, None]  # [M, M]: pattern m has m tokens
    pattern = _gather(tokens, length[:, None, None] - sizes[:, None] + offsets)  # [B, M, M]

    def narrow(_, bounds):
        low, high = bounds  # [2, B, M]: the first place not before the pattern, and the first one after it
        middle = (low + high) // 2
        at = order[jnp.minimum(middle, size - 1)][..., None] + offsets
        there = jnp.where(at < size, corpus[jnp.minimum(at, size - 1)], -1)
        different = jnp.min(jnp.where(used & (there != pattern), offsets, max_match), -1, keepdims=True)
        sign = jnp.sum(jnp.where(offsets == different, jnp.sign(there - pattern), 0), -1)
        before = jnp.stack([sign[0] < 0, sign[1] <= 0]) & (low < high)
        return jnp.where(before, middle + 1, low), jnp.where(before | (low >= high), high, middle)

    shape = (2, tokens.shape[0], max_match)
    steps = size.bit_length()
    bounds = jax.lax.fori_loop(0, steps, narrow, (jnp.zeros(shape, jnp.int32), jnp.full(shape, size, jnp.int32)))
    low, high = bounds[0]
    # The occurrence at the very end has nothing behind it; it is the shortest text of its range and so the first.
    low += (low < high) & (order[jnp.minimum(low, size - 1)] + sizes == size)
    found = (low < high) & (sizes <= length[:, None])
    matched = jnp.max(jnp.where(found, sizes, 0), -1)
    place = jnp.maximum(matched - 1, 0)[:, None]
    pick = lambda x: jnp.where(matched > 0, jnp.take_along_axis(x, place, 1)[:, 0], 0)  # noqa: E731
    return matched, pick(low), pick(high)


def spread_over(first: Int[Array, "B"], last: Int[Array, "B"], number: int) -> Int[Array, "B K"]:
    """At most K = `number` places of each range, all of a short one and evenly spread over a long one; -1 elsewhere.

    A range of a suffix array is sorted by what follows, so that evenly spread places are a stratified sample of it.
    """
    size = (last - first)[:, None]
    i = jnp.arange(number, dtype=jnp.int32)
    # floor(i * size / number) without a product that could overflow
    spread = i * (size // number) + i * (size % number) // number
    return jnp.where(i < size, first[:, None] + jnp.where(size > number, spread, i), -1)


def _gather(tokens: Int[Array, "B L"], at: Int[Array, "B M N"]) -> Int[Array, "B M N"]:
    flat = jnp.maximum(at.reshape(at.shape[0], -1), 0)
    return jnp.take_along_axis(tokens, flat, 1).reshape(at.shape)
