"""What a call gives back."""

import dataclasses

import numpy as np

from specjax.decoding.state import Counts


@dataclasses.dataclass(frozen=True)
class Generation:
    """The result of a call, on the host.

    Attributes:
        tokens: per row, the new tokens (without the prompt, with the token that ended it).
        logprobs: per row, the target's log-probabilities of them, of the raw logits: temperature 1, no filters, no
            penalties.
        origins: per row, the Origin of each.
        prompt_lengths: [B].
        finish: per row, "stop" (a stop id or a stop string) or "length" ("running" in what a stream yields).
        stop_string: per row, the stop string that ended it, or None.
        counts: Counts of numpy arrays.
        prefill_seconds, decode_seconds: wall clock of both phases, compilation included where there was one.
        reused: [B] prompt tokens that the target did not read again, because a previous run had.
    """

    tokens: list[np.ndarray]
    logprobs: list[np.ndarray]
    origins: list[np.ndarray]
    prompt_lengths: np.ndarray
    finish: list[str]
    stop_string: list[str | None]
    counts: Counts
    prefill_seconds: float
    decode_seconds: float
    reused: np.ndarray

    @property
    def lengths(self) -> np.ndarray:
        """[B] new tokens per row."""
        return np.array([len(row) for row in self.tokens])
