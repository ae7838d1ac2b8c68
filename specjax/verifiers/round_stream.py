"""The composition shared by the rules that toss coins: arithmetic, coin flips, next law, one draw.

    p, proposal ──► arithmetic ──► Arithmetic (a threshold per node) ──► decide(uniforms) ──► accepted path
                                                                         next_law ──► inverse CDF ──► next token

The arithmetic is deterministic and keeps the dtype of the laws; the coins are arguments. That split lets the audit
enumerate every outcome exactly. A rule is these three functions, most of which it takes from here.
"""

from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from specjax import sampling
from specjax.keys import Noise
from specjax.protocol import Proposal, Verdict
from specjax.verifiers.chain import chain_path, leading_run, target_law


@struct.dataclass
class Arithmetic:
    """Everything about a verdict that no coin decides.

    Attributes:
        accept: [B, N] the threshold h of each node's coin: the coin u in [0, 1) is a success when u < h. May exceed 1.
        weight: [B, N + 1] the rule's number per node that the correction law depends on; None where it needs none.
        residual: [B, N + 1, V] the law of the token behind each node after all of the node's children failed, if the
            rule has it at hand; a row of zeros stands for p.
    """

    accept: Float[Array, "B N"]
    weight: Float[Array, "B M"] | None = None
    residual: Float[Array, "B M V"] | None = None


@runtime_checkable
class RoundRule(Protocol):
    """The parts of a rule on the round stream, beside the attributes of `specjax.protocol.Verifier`."""

    def arithmetic(self, p: Float[Array, "B M V"], proposal: Proposal) -> Arithmetic:
        """Thresholds and weights, from the laws alone."""

    def decide(
        self, arithmetic: Arithmetic, proposal: Proposal, uniforms: Float[Array, "B N"]
    ) -> tuple[Int[Array, "B"], Int[Array, "B D"]]:
        """(num_accepted, path), from one uniform per node."""

    def next_law(
        self,
        p: Float[Array, "B M V"],
        proposal: Proposal,
        arithmetic: Arithmetic,
        num_accepted: Int[Array, "B"],
        path: Int[Array, "B D"],
    ) -> Float[Array, "B V"]:
        """The law of the token that follows the accepted path."""


def verify_round(rule: RoundRule, p: Float[Array, "B M V"], proposal: Proposal, noise: Noise) -> Verdict:
    """The verdict of a rule made of the three parts; a rule adopts it as its method: `verify = verify_round`."""
    arithmetic = rule.arithmetic(p, proposal)
    num_accepted, path = rule.decide(arithmetic, proposal, noise.accept(proposal.topology.num_nodes))
    law = rule.next_law(p, proposal, arithmetic, num_accepted, path)
    return Verdict(num_accepted, path, sampling.inverse_cdf(law, noise.next_token()))


def drafted_probabilities(
    p: Float[Array, "B M V"], proposal: Proposal
) -> tuple[Float[Array, "B N"], Float[Array, "B N"]]:
    """p(x) and q(x) of each drafted token, in the wider dtype of the two; both 0 at invalid nodes.

    A deterministic proposal has q(x) = 1. Ids at invalid nodes may be anything, so they are clipped before they index.
    """
    dtype = p.dtype if proposal.law is None else jnp.promote_types(p.dtype, proposal.law.dtype)
    tokens = jnp.clip(proposal.tokens, 0, p.shape[-1] - 1)
    rows = jnp.arange(p.shape[0])[:, None]
    p_x = p[rows, proposal.node_parents, tokens].astype(dtype)
    q_x = 1 if proposal.law is None else jnp.take_along_axis(proposal.law, tokens[..., None], -1)[..., 0].astype(dtype)
    return jnp.where(proposal.valid, p_x, 0), jnp.where(proposal.valid, q_x, jnp.zeros((), dtype))


def ratio(p_x: Float[Array, "*B"], q_x: Float[Array, "*B"]) -> Float[Array, "*B"]:
    """p(x) / q(x), and 0 where q(x) is 0: what cannot have been drafted is not accepted."""
    drafted = q_x > 0
    return jnp.where(drafted, p_x / jnp.where(drafted, q_x, 1), 0)


def first_rejection(
    arithmetic: Arithmetic, proposal: Proposal, uniforms: Float[Array, "B N"]
) -> tuple[Int[Array, "B"], Int[Array, "B N"]]:
    """Coin flips of a rule whose run ends at the first failure. Strict: a threshold of 0 is not met even by u = 0."""
    return leading_run(uniforms < arithmetic.accept), chain_path(proposal)


def residual_law(
    p: Float[Array, "B M V"],
    proposal: Proposal,
    num_accepted: Int[Array, "B"],
    weight: Float[Array, "B M"] | None = None,
) -> Float[Array, "B V"]:
    """norm(max(w p - q, 0)) behind the last accepted node n, with w = weight[:, n] and q the law of node n + 1.

    Where node n + 1 does not exist or is invalid, q is 0 and the law is the bonus law p. A residual without mass (p = q
    up to rounding) falls back to p.
    """
    p_n = target_law(p, num_accepted)
    num_nodes, vocab = proposal.topology.num_nodes, p.shape[-1]
    if num_nodes == 0:
        return p_n
    child = jnp.minimum(num_accepted, num_nodes - 1)[:, None]
    rejected = (num_accepted[:, None] < num_nodes) & jnp.take_along_axis(proposal.valid, child, 1)
    if proposal.law is None:
        q = jax.nn.one_hot(jnp.take_along_axis(proposal.tokens, child, 1)[:, 0], vocab, dtype=p.dtype)
    else:
        q = jnp.take_along_axis(proposal.law, child[..., None], 1)[:, 0]
    w_n = 1 if weight is None else jnp.take_along_axis(weight, num_accepted[:, None], 1)
    residual = jnp.maximum(w_n * p_n - jnp.where(rejected, q, 0), 0)
    return normalised(residual, p_n)


def normalised(residual: Float[Array, "*B V"], fallback: Float[Array, "*B V"]) -> Float[Array, "*B V"]:
    """The residual divided by its mass; the fallback where it has none."""
    mass = jnp.sum(residual, -1, keepdims=True)
    some = mass > 0
    return jnp.where(some, residual / jnp.where(some, mass, 1), fallback)
