"""Whether drafted texts are the target's own, token for token, and what a near-tie may excuse."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.keys import Noise, Stream
from specjax.models import LanguageModel
from specjax.report.results import check

NEAR_TIE = 1e-3  # of float32 logits


def first_difference(one: Sequence[int] | np.ndarray, other: Sequence[int] | np.ndarray) -> int | None:
    """Where two texts part; for a text that is the beginning of the other, its length; None for equal ones."""
    shorter = min(len(one), len(other))
    for position in range(shorter):
        if one[position] != other[position]:
            return position
    return None if len(one) == len(other) else shorter


def gap_where_texts_part(
    target: LanguageModel, prompt, tokens: np.ndarray, other: np.ndarray, row_key=None
) -> float | None:
    """How close the target's two best choices were where two texts part; None when the texts are equal, and infinite
    when one is only the beginning of the other, which no near-tie explains.

    Greedy texts choose by logit; with a row's key, texts of the position stream choose by log p + Gumbel noise.
    """
    position = first_difference(tokens, other)
    if position is None:
        return None
    if position == min(len(tokens), len(other)):
        return math.inf
    text = jnp.asarray(np.concatenate([prompt, tokens[:position]])[None], jnp.int32)
    scores = target(text)[0][:, -1]
    if row_key is not None:
        noise = Noise(row_key[None], jnp.array([text.shape[1]]), Stream.POSITION)
        scores = jax.nn.log_softmax(scores) + noise.gumbel(jnp.zeros(1, jnp.int32), scores.shape[-1])[:, 0]
    best = np.sort(np.asarray(scores[0], np.float64))[::-1]
    return float(best[0] - best[1])


def where_parted(target: LanguageModel, prompt, plain: np.ndarray, drafted: np.ndarray, row_key=None) -> dict | None:
    """{"position", "gap"} of a drafted text that leaves the plain one; None for equal ones.

    A gap of None, which a report can hold where infinity has no place, is no excuse: one text is the beginning of the
    other.
    """
    gap = gap_where_texts_part(target, prompt, plain, drafted, row_key)
    if gap is None:
        return None
    return {"position": first_difference(plain, drafted), "gap": None if math.isinf(gap) else gap}


def compare_texts(
    target: LanguageModel, prompts: Sequence, plain: Sequence, drafted: Sequence, row_keys: Sequence | None = None
) -> dict[str, Any]:
    """{"texts": how many, "parted": `where_parted` of those that are not equal} of the texts behind some prompts."""
    keys = [None] * len(prompts) if row_keys is None else row_keys
    found = [where_parted(target, *row) for row in zip(prompts, plain, drafted, keys, strict=True)]
    return {"texts": len(found), "parted": [one for one in found if one is not None]}


def joined(comparisons: Sequence[dict]) -> dict[str, Any]:
    """Several results of `compare_texts` as one."""
    return {
        "texts": sum(one["texts"] for one in comparisons),
        "parted": [parted for one in comparisons for parted in one["parted"]],
    }


def widest_gap(parted: Sequence[dict]) -> float:
    """The largest of the gaps, infinite where there is none to name; 0 without parted texts."""
    return max((math.inf if one["gap"] is None else float(one["gap"]) for one in parted), default=0.0)


def check_equal_texts(name: str, compared: dict, near_tie: float = NEAR_TIE) -> dict:
    """A check that all texts are equal, or part at a near-tie of the target's two best choices."""
    parted, texts = compared["parted"], compared["texts"]
    value = f"{texts - len(parted)} of {texts} texts equal"
    value += f"; largest gap of the two best where one parts: {widest_gap(parted):.1e}" if parted else ""
    return check(name, widest_gap(parted) <= near_tie, value, f"equal, or a gap of at most {near_tie:g}")
