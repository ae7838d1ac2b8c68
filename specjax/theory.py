"""Closed forms of speculative decoding: tokens per round, speed-up, acceptance. Plain numpy, no model.

Symbols: α the acceptance rate (acceptances / attempts), γ the draft length, c the cost of one draft step and v that of
one verify, both in units of one target-only step, so that a round costs γc + v; p and q the laws of target and drafter.
Functions of α and of costs broadcast like numpy; laws are given along the last axis.

The numbers for one constant, independent α assume the token rule. Where α differs by depth (it does, in real models)
use the survival per depth: the share of rounds whose first d drafted tokens were all accepted, for d = 1..γ.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import ArrayLike


def expected_tokens(alpha: ArrayLike, draft_length: int):
    """Tokens that one round emits: (1 - α^(γ+1)) / (1 - α), the limit at α = 1 being γ + 1.

    Counts the accepted drafts and the one token every round adds: the correction, or the bonus if all were accepted.

    Raises:
        ValueError: α outside [0, 1] or γ < 0.

    References:
        Leviathan et al. 2023, arXiv 2211.17192, equation 1.
    """
    alpha = _rate("alpha", alpha)
    # The sum 1 + α + ... + α^γ is the same number and needs no special case at α = 1.
    return sum((alpha**k for k in range(1, _length(draft_length) + 1)), start=np.ones_like(alpha))[()]


def expected_tokens_without_bonus(alpha: ArrayLike, draft_length: int):
    """Tokens of a round that emits no bonus token: (1 - α^γ) / (1 - α), the limit at α = 1 being γ; 0 for γ = 0.

    The form found in introductions. A round that accepts all its drafts and throws the bonus away wastes a law it has
    already paid for, so this describes a weaker algorithm than `expected_tokens`.

    Raises:
        ValueError: α outside [0, 1] or γ < 0.
    """
    alpha = _rate("alpha", alpha)
    return sum((alpha**k for k in range(_length(draft_length))), start=np.zeros_like(alpha))[()]


def survival_from_acceptance(acceptance: ArrayLike) -> np.ndarray:
    """[γ] survival per depth: the running product of the acceptance rates conditional on reaching each depth."""
    return np.cumprod(np.atleast_1d(_rate("acceptance", acceptance)), -1)


def expected_tokens_from_survival(survival: ArrayLike) -> float:
    """τ from a measured survival per depth [γ]: 1 + Σ_d survival_d. Exact for any rule and any dependence on depth.

    Raises:
        ValueError: a value outside [0, 1], or a survival that grows with depth.
    """
    survival = np.atleast_1d(_rate("survival", survival))
    if np.any(np.diff(survival) > 1e-12):
        raise ValueError(
            f"survival must not grow with depth; got {survival.tolist()}; multiply conditional rates up first"
        )
    return 1.0 + float(np.sum(survival))


def constant_alpha_speedup(alpha: ArrayLike, cost_ratio: ArrayLike, draft_length: int, verify_ratio: ArrayLike = 1.0):
    """Speed-up over target-only decoding for one constant α: expected tokens / (γc + v).

    Args:
        alpha: α in [0, 1].
        cost_ratio: c >= 0.
        draft_length: γ.
        verify_ratio: v, seconds of a verify γ + 1 tokens wide over those of a target-only step. The paper has v = 1: a
            wider forward is free while memory traffic decides, which measurements on CPUs contradict.

    References:
        Leviathan et al. 2023, arXiv 2211.17192, theorem 3.8 (there v = 1).
    """
    return expected_tokens(alpha, draft_length) / _round_cost(cost_ratio, draft_length, verify_ratio)


def predicted_speedup(survival: ArrayLike, cost_ratio: float, verify_ratio: float = 1.0) -> float:
    """Speed-up over target-only decoding from a measured survival per depth [γ]: τ / (γc + v)."""
    draft_length = np.atleast_1d(survival).shape[-1]
    return float(expected_tokens_from_survival(survival) / _round_cost(cost_ratio, draft_length, verify_ratio))


def time_per_token(
    alpha: ArrayLike,
    draft_length: int,
    draft_seconds: float,
    target_seconds: float,
    verify_seconds: float | None = None,
):
    """Seconds per token: (γ draft + verify) / expected tokens, for one constant α.

    Args:
        alpha: α in [0, 1].
        draft_length: γ.
        draft_seconds: one draft step.
        target_seconds: one target-only step.
        verify_seconds: one verify of γ + 1 tokens; None takes `target_seconds`.
    """
    verify_seconds = target_seconds if verify_seconds is None else verify_seconds
    return (draft_length * draft_seconds + verify_seconds) / expected_tokens(alpha, draft_length)


def time_per_token_linear(alpha: ArrayLike, draft_length: int, draft_seconds: float, target_seconds: float):
    """The optimistic approximation (γ draft + target) / (αγ + 1) of `time_per_token`.

    It counts αγ accepted drafts as if a rejection did not end the round; it agrees at α = 0, α = 1 and γ <= 1 only.
    """
    return (draft_length * draft_seconds + target_seconds) / (_rate("alpha", alpha) * _length(draft_length) + 1)


def optimal_draft_length(
    acceptance: ArrayLike,
    cost_ratio: float,
    max_draft_length: int | None = None,
    verify_ratio: float | Callable[[int], float] = 1.0,
) -> int:
    """The γ with the largest predicted speed-up; the smallest such γ, and 0 when speculation does not pay.

    Args:
        acceptance: one constant α, or the conditional acceptance rate of each depth (then γ goes no deeper).
        cost_ratio: c.
        max_draft_length: largest γ considered; required with a constant α.
        verify_ratio: v, one number for every γ > 0, or a function of γ (the measured width curve at width γ + 1).

    Raises:
        ValueError: a constant α without `max_draft_length`.
    """
    if np.ndim(acceptance) == 0:
        if max_draft_length is None:
            raise ValueError("max_draft_length is required with a constant acceptance rate")
        rates = np.full(_length(max_draft_length), acceptance, float)
    else:
        rates = np.asarray(acceptance, float)[:max_draft_length]
    survival = survival_from_acceptance(rates) if rates.size else rates
    return best_draft_length(survival, cost_ratio, verify_ratio, range(rates.size + 1))


def best_draft_length(
    survival: ArrayLike, cost_ratio: float, verify_ratio: float | Callable[[int], float], lengths: Sequence[int]
) -> int:
    """The γ among `lengths` with the largest predicted speed-up, the first of equals, whether or not it pays.

    Args:
        survival: share of drafts kept at each depth, as deep as the longest of `lengths`.
        cost_ratio, verify_ratio: as for `optimal_draft_length`.
        lengths: the choice; 0 stands for target-only decoding, whose speed-up is 1.
    """
    cost = verify_ratio if callable(verify_ratio) else lambda _: verify_ratio
    predicted = lambda gamma: predicted_speedup(survival[:gamma], cost_ratio, cost(gamma)) if gamma else 1.0  # noqa: E731
    return max(lengths, key=predicted)


def overlap(p: ArrayLike, q: ArrayLike):
    """Acceptance of the token rule for a draft drawn from q: Σ_x min(p_x, q_x) = 1 - TV(p, q).

    References:
        Leviathan et al. 2023, arXiv 2211.17192, theorem 3.5 and corollary 3.6.
    """
    return np.sum(np.minimum(*_laws(p, q)), -1)[()]


def total_variation(p: ArrayLike, q: ArrayLike):
    """Total variation distance: half the L1 distance of two laws."""
    p, q = _laws(p, q)
    return (np.sum(np.abs(p - q), -1) / 2)[()]


def one_hot_acceptance(p: ArrayLike, token: int) -> float:
    """Acceptance of a token that was chosen, not drawn (q is one-hot): p(token)."""
    p, _ = _laws(p, p)
    return float(p[..., token])


def coupled_acceptance(p: ArrayLike, q: ArrayLike) -> float:
    """Probability that Gumbel-max draws from p and q with the same noise agree: Σ_x 1 / Σ_j max(p_j/p_x, q_j/q_x).

    A token outside either support is never the common draw and adds nothing. Between (1 - TV) / (1 + TV) and 1 - TV.

    Args:
        p, q: [V] laws.

    References:
        Daliri et al. 2024, arXiv 2408.07978.
    """
    p, q = _laws(p, q)
    both = (p > 0) & (q > 0)
    with np.errstate(over="ignore"):  # a ratio beyond the largest float is a token that never wins
        ratios = np.maximum(p[None, :] / p[both, None], q[None, :] / q[both, None])
        return float(np.sum(1 / np.sum(ratios, -1)))


def token_rule_expected_accepted(p: ArrayLike, q: ArrayLike) -> float:
    """Expected accepted drafts of the token rule on a chain whose laws depend on the depth only; p and q are [γ, V]."""
    return float(np.sum(survival_from_acceptance(overlap(p, q))))


def block_rule_expected_accepted(p: ArrayLike, q: ArrayLike) -> float:
    """Expected accepted drafts of the block rule on a chain whose laws depend on the depth only; p and q are [γ, V].

    Σ_d E_q[w_d] with w_0 = 1 and w_d = min(w_{d-1} p(x_d) / q(x_d), 1), by enumerating all V^γ drafts.

    References:
        Sun et al. 2024, arXiv 2403.10444, algorithm 2 and theorem 2.
    """
    p, q = _laws(p, q)
    weight, mass, accepted = np.ones(1), np.ones(1), 0.0
    for p_d, q_d in zip(p, q, strict=True):
        drawn = q_d > 0
        weight = np.minimum(weight[:, None] * (p_d[drawn] / q_d[drawn]), 1).ravel()
        mass = (mass[:, None] * q_d[drawn]).ravel()
        accepted += float(np.sum(mass * weight))
    return accepted


def _round_cost(cost_ratio, draft_length, verify_ratio):
    cost_ratio, verify_ratio = np.asarray(cost_ratio, float), np.asarray(verify_ratio, float)
    if not (np.all(cost_ratio >= 0) and np.all(verify_ratio > 0)):
        raise ValueError(f"cost_ratio must be >= 0 and verify_ratio > 0; got {cost_ratio} and {verify_ratio}")
    return _length(draft_length) * cost_ratio + verify_ratio


def _rate(name, value):
    value = np.asarray(value, float)
    if not np.all((value >= 0) & (value <= 1)):
        raise ValueError(f"{name} must be in [0, 1]; got {value}")
    return value


def _length(draft_length):
    if draft_length < 0:
        raise ValueError(f"draft_length must be >= 0; got {draft_length}")
    return int(draft_length)


def _laws(p, q):
    p, q = np.asarray(p, float), np.asarray(q, float)
    if p.shape != q.shape:
        raise ValueError(f"p and q must have the same shape; got {p.shape} and {q.shape}")
    for name, law in (("p", p), ("q", q)):
        if not (np.all(law >= 0) and np.allclose(np.sum(law, -1), 1, atol=1e-4)):
            raise ValueError(f"{name} must be a law: non-negative and summing to 1; its sums are {np.sum(law, -1)}")
    return p, q
