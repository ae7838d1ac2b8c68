"""How far two implementations of one model agree: logits and perplexity. Plain numpy."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np


def compare_logits(ours: Iterable[np.ndarray], theirs: Iterable[np.ndarray]) -> dict[str, Any]:
    """Chunks [T, V] of two sequences of logits over the same text.

    Returns:
        {"positions", "max_difference", "argmax_differs": how often, "widest_gap": the largest distance, over those
        positions, between their best logit and the one of our choice; 0 without any}
    """
    positions, worst, differing, widest = 0, 0.0, 0, 0.0
    for one, other in zip(ours, theirs, strict=True):
        one, other = np.asarray(one, np.float64), np.asarray(other, np.float64)
        worst = max(worst, float(np.abs(one - other).max()))
        mine, best = one.argmax(-1), other.argmax(-1)
        rows = np.arange(len(other))
        gaps = other[rows, best] - other[rows, mine]
        differing += int((mine != best).sum())
        widest = max(widest, float(gaps.max()))
        positions += len(other)
    return {"positions": positions, "max_difference": worst, "argmax_differs": differing, "widest_gap": widest}


def perplexity(logits: Iterable[np.ndarray], tokens: Sequence[int]) -> float:
    """exp of the mean cross entropy of tokens[1:], from chunks [T, V] of the logits behind every token."""
    total, at = 0.0, 0
    for chunk in logits:
        chunk = np.asarray(chunk, np.float64)
        following = np.asarray(tokens[at + 1 : at + 1 + len(chunk)], int)
        chunk = chunk[: len(following)]
        top = chunk.max(-1)
        total += float(np.sum(top + np.log(np.exp(chunk - top[:, None]).sum(-1))))
        total -= float(chunk[np.arange(len(following)), following].sum())
        at += len(following)
    return float(np.exp(total / at))


def gap_between(logits: np.ndarray, one: int, other: int) -> float:
    """|logit of one token - logit of another|, of the same position."""
    return abs(float(logits[one]) - float(logits[other]))
