"""Where the end of a text has occurred before, and what followed there: searches over [B, L], without a sort.

    position     0 1 2 3 4 5 6 7          length 8
    token        a b c d x b c d
                         ^                `match_lengths` is 3 at 4: the three tokens before it are the last three
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

# What follows is decided by at most so many occurrences, so that counting them does not grow with the text.
VOTERS = 64


def match_lengths(tokens: Int[Array, "B L"], length: Int[Array, "B"], max_match: int) -> Int[Array, "B L"]:
    """How many tokens right before each position equal the last ones of the text, counted up to `max_match`.

    Counted at positions 1 to length - 1, where a continuation exists; 0 everywhere else. What lies past `length` is
    not looked at. The cost is `max_match` comparisons per position.
    """
    width = tokens.shape[1]
    before = jnp.pad(tokens, ((0, 0), (max_match, 0)), constant_values=-1)
    equal = jnp.arange(width) < length[:, None]
    count = jnp.zeros(tokens.shape, jnp.int32)
    for back in range(1, max_match + 1):
        last = jnp.take_along_axis(tokens, jnp.maximum(length - back, 0)[:, None], 1)
        equal &= before[:, max_match - back : max_match - back + width] == last
        count += equal
    return count


def latest(flags: Bool[Array, "B L"], number: int) -> Int[Array, "B K"]:
    """Positions of the last set flags, the last one first; -1 where there are fewer. K is `number`, at most L.

    Positions are compared as float32, exact below 2^24: of integers XLA on CPU makes a full sort, ten times slower.
    """
    positions = jnp.where(flags, jnp.arange(flags.shape[1], dtype=jnp.float32), -1)
    return jax.lax.top_k(positions, min(number, flags.shape[1]))[0].astype(jnp.int32)


def vote(
    tokens: Int[Array, "B K"], voting: Bool[Array, "B K"]
) -> tuple[Int[Array, "B"], Int[Array, "B"], Int[Array, "B"]]:
    """(winner, votes, total): the first voter whose token has the most votes, their number, and that of all voters.

    Without voters both numbers are 0 and the winner means nothing.
    """
    agree = (tokens[:, :, None] == tokens[:, None, :]) & voting[:, None, :]
    votes = jnp.where(voting, jnp.sum(agree, -1, dtype=jnp.int32), 0)
    winner = jnp.argmax(votes, -1).astype(jnp.int32)
    return winner, jnp.max(votes, -1), jnp.sum(voting, -1, dtype=jnp.int32)
