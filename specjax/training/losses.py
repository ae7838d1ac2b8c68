"""How far the drafter's law is from the target's, position by position.

Every divergence takes two arrays of log-probabilities, log p of the target and log q of the drafter, both [..., V] and
made by `log_law`, and returns one number per position [...]. They are finite and have finite gradients for all finite
logits at any positive temperature: a token whose probability underflows contributes exactly nothing. Logits of minus
infinity (a masked vocabulary) are allowed; then a divergence is infinite only where its definition is.

DistillSpec (Zhou et al. 2023, arXiv 2310.08461) compares these divergences for speculative decoding; GKD (Agarwal et
al. 2023, arXiv 2306.13649) is the source of the generalised Jensen-Shannon divergence.
"""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def log_law(logits: Float[Array, "*B V"], temperature: float = 1.0) -> Float[Array, "*B V"]:
    """Log-probabilities of softmax(logits / temperature), in float32 or the dtype of the logits if that is wider.

    Raises:
        ValueError: a temperature that is not a positive number. A one-hot law has no gradient to follow.
    """
    if not (math.isfinite(temperature) and temperature > 0):
        raise ValueError(f"temperature of a law in a loss must be a positive number; got {temperature}")
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    return jax.nn.log_softmax(logits if temperature == 1 else logits / temperature)


def cross_entropy(log_q: Float[Array, "*B V"], tokens: Int[Array, "*B"]) -> Float[Array, "*B"]:
    """−log q(token), in nats: the loss of next-token training."""
    return -jnp.take_along_axis(log_q, tokens[..., None], -1)[..., 0]


def forward_kl(log_p: Float[Array, "*B V"], log_q: Float[Array, "*B V"]) -> Float[Array, "*B"]:
    """KL(p ‖ q) = Σ p (log p − log q), in nats: the classic distillation loss; q must cover all of p."""
    return _expected(jnp.exp(log_p), log_p, log_q)


def reverse_kl(log_p: Float[Array, "*B V"], log_q: Float[Array, "*B V"]) -> Float[Array, "*B"]:
    """KL(q ‖ p) = Σ q (log q − log p), in nats: q is drawn to the modes of p."""
    return _expected(jnp.exp(log_q), log_q, log_p)


def jensen_shannon(log_p: Float[Array, "*B V"], log_q: Float[Array, "*B V"], beta: float = 0.5) -> Float[Array, "*B"]:
    """Generalised Jensen-Shannon, β KL(p ‖ m) + (1 − β) KL(q ‖ m) with m = β p + (1 − β) q, in nats (GKD, equation 1).

    Divided by β it tends to KL(p ‖ q) as β → 0, and divided by 1 − β to KL(q ‖ p) as β → 1; at most log 2.

    Raises:
        ValueError: β outside (0, 1), where it is zero for every pair.
    """
    if not 0 < beta < 1:
        raise ValueError(f"beta of jensen_shannon must be strictly between 0 and 1; got {beta}")
    p, q = jnp.exp(log_p), jnp.exp(log_q)
    m = beta * p + (1 - beta) * q
    log_m = jnp.log(jnp.where(m > 0, m, 1))
    return beta * _expected(p, log_p, log_m) + (1 - beta) * _expected(q, log_q, log_m)


def total_variation(log_p: Float[Array, "*B V"], log_q: Float[Array, "*B V"]) -> Float[Array, "*B"]:
    """TV(p, q) = ½ Σ |p − q|: the rejection rate of the token rule with sampled drafts, in [0, 1]."""
    return jnp.sum(jnp.abs(jnp.exp(log_p) - jnp.exp(log_q)), -1) / 2


def negative_log_acceptance(log_p: Float[Array, "*B V"], log_q: Float[Array, "*B V"]) -> Float[Array, "*B"]:
    """−log Σ min(p, q) = −log(1 − TV), in nats: its mean is −log of the (geometric) mean acceptance rate.

    The gradient is that of TV divided by the overlap, so positions where hardly anything is accepted still count.
    """
    return -jax.nn.logsumexp(jnp.minimum(log_p, log_q), -1)


def overlap(log_p: Float[Array, "*B V"], log_q: Float[Array, "*B V"]) -> Float[Array, "*B"]:
    """Σ min(p, q) = 1 − TV(p, q): what the token rule accepts when drafts are sampled."""
    return jnp.sum(jnp.exp(jnp.minimum(log_p, log_q)), -1)


DIVERGENCES = {
    "forward_kl": forward_kl,
    "reverse_kl": reverse_kl,
    "jensen_shannon": jensen_shannon,
    "total_variation": total_variation,
    "negative_log_acceptance": negative_log_acceptance,
}


def masked_mean(values: Float[Array, "*B"] | Bool[Array, "*B"], mask: Bool[Array, "*B"]) -> Float[Array, ""]:
    """Mean of the values whose mask is set; 0, with zero gradient, when none is."""
    return jnp.sum(jnp.where(mask, values, 0)) / jnp.maximum(jnp.sum(mask), 1)


def _expected(weight, log_a, log_b):
    """Σ weight (log a − log b), a token of weight 0 counting nothing even where its log is minus infinity."""
    return jnp.sum(weight * jnp.where(weight > 0, log_a - log_b, 0), -1)
