"""SpecTr's sequential transport: all candidates of a node meet the same threshold."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from specjax.keys import Stream
from specjax.protocol import IID, Proposal
from specjax.verifiers.chain import target_law
from specjax.verifiers.round_stream import Arithmetic, drafted_probabilities, normalised, ratio, verify_round
from specjax.verifiers.tree_walk import first_successes, last_node

HALVINGS = 24  # of [1, k]; where it stops short of the smallest ρ the rule stays exact and accepts 1e-7 less


@dataclasses.dataclass(frozen=True)
class KSequentialRule:
    """Accepts each of k candidates drawn independently from q with probability min(1, p(x) / (ρ q(x))).

    With β = Σ min(q, p / ρ), some candidate is accepted with probability a = 1 - (1 - β)^k, and when all fail the next
    token comes from norm(p - min(q, p / ρ) a / β). ρ in [1, k] is the smallest number that keeps this from being
    negative: a <= ρ β. k counts the valid children of the node; with k = 1, ρ = 1 and this is the token rule.

    Reference:
        Sun et al., SpecTr: Fast Speculative Decoding via Optimal Transport, 2023 (arXiv 2310.15141), K-SEQ.
    """

    name: ClassVar[str] = "k_sequential"
    lossless: ClassVar[bool] = True
    stream: ClassVar[Stream] = Stream.ROUND
    siblings: ClassVar[frozenset[str]] = frozenset({IID})
    greedy_only: ClassVar[bool] = False
    trees: ClassVar[bool] = True

    def arithmetic(self, p: Float[Array, "B M V"], proposal: Proposal) -> Arithmetic:
        """Thresholds p(x) / (ρ q(x)) and, as weights, ρ."""
        p_x, q_x = drafted_probabilities(p, proposal)
        rho = jnp.ones((*p_x.shape[:1], p.shape[1]), p_x.dtype)
        several = _nodes_with_several_children(proposal)
        if several.size:
            nodes = jnp.broadcast_to(several, (p.shape[0], several.size))
            k, q = _children(proposal, nodes, p.shape[-1], p_x.dtype)
            rho = rho.at[:, several].set(_smallest_rho(p[:, several].astype(p_x.dtype), q, k))
        at_parent = jnp.take_along_axis(rho, jnp.broadcast_to(proposal.node_parents, p_x.shape), 1)
        return Arithmetic(accept=ratio(p_x, at_parent * q_x), weight=rho)

    def next_law(
        self,
        p: Float[Array, "B M V"],
        proposal: Proposal,
        arithmetic: Arithmetic,
        num_accepted: Int[Array, "B"],
        path: Int[Array, "B D"],
    ) -> Float[Array, "B V"]:
        """norm(p - min(q, p / ρ) a / β); p if the path's last node had no candidates."""
        node = last_node(num_accepted, path)[:, None]
        rho = jnp.take_along_axis(arithmetic.weight, node, 1)
        p_n = target_law(p, node[:, 0]).astype(rho.dtype)
        k, q = (x[:, 0] for x in _children(proposal, node, p.shape[-1], rho.dtype))
        taken = jnp.minimum(q, p_n / rho)
        beta = jnp.sum(taken, -1)
        some = (beta > 0) & (k > 1)
        scale = jnp.where(some, _any_of(k, beta) / jnp.where(some, beta, 1), 1)  # a = β at k = 1, without rounding
        return normalised(jnp.maximum(p_n - taken * scale[:, None], 0), p_n)

    decide = staticmethod(first_successes)
    verify = verify_round


def _any_of(k, beta):
    """1 - (1 - β)^k without loss for small β."""
    return -jnp.expm1(k * jnp.log1p(-jnp.minimum(beta, 1)))


def _smallest_rho(p: Float[Array, "B P V"], q: Float[Array, "B P V"], k: Int[Array, "B P"]) -> Float[Array, "B P"]:
    """The smallest ρ in [1, k] with a <= ρ β, from above: every ρ that is returned satisfies it.

    ρ β = Σ min(ρ q, p) grows with ρ while a shrinks, and at ρ = k the inequality is Bernoulli's.
    """
    some = k > 0
    p, k = jnp.where(some[..., None], p, 0), jnp.maximum(k, 1).astype(p.dtype)

    def fits(rho):
        beta = jnp.sum(jnp.minimum(q, p / rho[..., None]), -1)
        return _any_of(k, beta) <= rho * beta

    def halve(_, bounds):
        low, high = bounds
        middle = (low + high) / 2
        good = fits(middle)
        return jnp.where(good, low, middle), jnp.where(good, middle, high)

    one = jnp.ones_like(k)
    high = jnp.where(fits(one), one, k)
    return jax.lax.fori_loop(0, HALVINGS, halve, (one, high))[1]


def _nodes_with_several_children(proposal):
    """Numbers of the nodes that may have more than one child, in a dynamic tree all of them."""
    if not proposal.topology.is_static:
        return np.arange(proposal.topology.num_nodes + 1)
    return np.flatnonzero(np.bincount(np.asarray(proposal.topology.parents, int)) > 1)


def _children(proposal, nodes, vocab, dtype):
    """How many valid children each of the nodes [B, P] has, and the law [B, P, V] they were drawn from (0 if none)."""
    hangs = proposal.valid[:, None] & (jnp.asarray(proposal.node_parents)[:, None] == nodes[..., None])
    k = jnp.sum(hangs, -1, dtype=jnp.int32)
    if not hangs.shape[-1]:
        return k, jnp.zeros((*k.shape, vocab), dtype)
    first = jnp.argmax(hangs, -1)
    if proposal.law is None:
        q = jax.nn.one_hot(jnp.take_along_axis(proposal.tokens, first, 1), vocab, dtype=dtype)
    else:
        q = jnp.take_along_axis(proposal.law, first[..., None], 1).astype(dtype)
    return k, jnp.where((k > 0)[..., None], q, 0)
