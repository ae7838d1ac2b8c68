"""What the decoding loop carries from round to round."""

import dataclasses
import enum
from typing import Any

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int, Key

from specjax.decoding.stop_strings import StopProgress
from specjax.models import KVCache, TransformerConfig
from specjax.penalties import History
from specjax.protocol import Drafter, Verifier, last_tokens


class Origin(enum.IntEnum):
    """Where a token came from."""

    PROMPT = 0
    DRAFTED = 1  # drafted and accepted
    CORRECTION = 2  # drawn from the residual after a rejection
    BONUS = 3  # drawn from the target's law after a whole path was accepted; every token of target-only decoding


class Finish(enum.IntEnum):
    """Why a row ended."""

    RUNNING = 0
    STOP = 1
    LENGTH = 2


@dataclasses.dataclass(frozen=True)
class Decoder:
    """Everything static about a decoding run: one compiled program per Decoder and buffer shape."""

    target: TransformerConfig
    drafter: Drafter
    verifier: Verifier

    @property
    def context_length(self) -> int:
        return shared_context(self.target, self.drafter)


def shared_context(target: TransformerConfig, drafter: Drafter) -> int:
    """Tokens of the longest text that both can follow."""
    return min(target.context_length, drafter.context_length or target.context_length)


@struct.dataclass
class Counts:
    """What happened, per row; every reported figure derives from these.

    Attributes:
        rounds: target calls.
        drafted: nodes that could have been accepted.
        accepted: drafted tokens that were.
        emitted: tokens the user received.
        attempts: [B, D] rounds in which a valid node of depth d was judged: everything above it had been accepted.
        acceptances: [B, D] rounds in which it was accepted.
        overlap_sum: [B, D] sum of Σ min(p, q) over the attempts.
    """

    rounds: Int[Array, "B"]
    drafted: Int[Array, "B"]
    accepted: Int[Array, "B"]
    emitted: Int[Array, "B"]
    attempts: Int[Array, "B D"]
    acceptances: Int[Array, "B D"]
    overlap_sum: Float[Array, "B D"]

    @classmethod
    def zeros(cls, batch: int, depth: int) -> "Counts":
        row = lambda: jnp.zeros(batch, jnp.int32)  # noqa: E731
        deep = lambda dtype: jnp.zeros((batch, depth), dtype)  # noqa: E731
        return cls(row(), row(), row(), row(), deep(jnp.int32), deep(jnp.int32), deep(jnp.float32))


@struct.dataclass
class State:
    """The carry of the `while_loop`.

    Between rounds, per row: `length` tokens are committed, the last of them is pending (its forward has not been run),
    and the target's cache holds `length - 1` positions. Whatever lies past `length` is meaningless.

        tokens   | prompt ......... | emitted ........ r | free
                                                        r = tokens[length - 1], pending
        cache    | length - 1 positions ............. |

    Attributes:
        tokens, logprobs, origins: [B, L + D + 1] committed ids, the target's log-probabilities of the emitted ones (raw
            logits, temperature 1, no filters), and each token's Origin.
        length: [B] committed tokens.
        limit: [B] length at which the row ends.
        finish: [B] Finish; a finished row stays as it is.
        row_keys: [B] keys.
        target_cache: the target's cache.
        draft_state: whatever the drafter keeps.
        counts: the record.
        history: what the penalties count, None if there are none that count.
        stop: progress towards a stop string, None without stop strings.
    """

    tokens: Int[Array, "B S"]
    logprobs: Float[Array, "B S"]
    origins: Int[Array, "B S"]
    length: Int[Array, "B"]
    limit: Int[Array, "B"]
    finish: Int[Array, "B"]
    row_keys: Key[Array, "B"]
    target_cache: KVCache
    draft_state: Any
    counts: Counts
    history: History | None = None
    stop: StopProgress | None = None

    @property
    def live(self) -> Bool[Array, "B"]:
        return self.finish == Finish.RUNNING

    @property
    def pending(self) -> Int[Array, "B"]:
        """The last committed token of each row."""
        return last_tokens(self.tokens, self.length)
