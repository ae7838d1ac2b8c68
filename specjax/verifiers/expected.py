"""How many tokens a rule accepts in expectation on given drafts: from p and q alone, without noise."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from specjax.protocol import Proposal, Verifier

MAX_NODES = 16  # 2^16 outcomes per draft


def expected_accepted(rule: Verifier, p: Float[Array, "B M V"], proposal: Proposal) -> Float[Array, "B"]:
    """E[number of accepted tokens] of each row, over the rule's coins: every outcome of N coins, weighted.

    Args:
        rule: with the parts of `round_stream.RoundRule`, or one that needs no coins at all (greedy).
        p: the target's laws behind the root and the nodes.
        proposal: the drafts; nodes that are not valid are never accepted, so a shorter chain or a smaller tree is the
            same proposal with fewer valid nodes.

    Raises:
        ValueError: a rule whose drafts depend on the noise of its own stream (coupled), a tree for a rule of chains,
            siblings that the rule does not take, or more than 16 nodes.
    """
    nodes = proposal.topology.num_nodes
    if not hasattr(rule, "arithmetic"):
        raise ValueError(f"rule {rule.name!r} has no acceptance probabilities to sum over; give one with coins")
    if not rule.trees and not proposal.topology.is_chain:
        raise ValueError(f"rule {rule.name!r} takes chains only; these drafts are trees")
    if proposal.siblings not in rule.siblings and not proposal.topology.is_chain:
        raise ValueError(
            f"rule {rule.name!r} takes siblings {sorted(rule.siblings)}; these drafts are {proposal.siblings!r}"
        )
    if nodes > MAX_NODES:
        raise ValueError(f"{nodes} nodes have 2^{nodes} outcomes per draft; score at most {MAX_NODES} nodes")
    return _expected(rule, p, proposal)


@functools.partial(jax.jit, static_argnums=0)
def _expected(rule, p, proposal):
    nodes = proposal.topology.num_nodes
    arithmetic = rule.arithmetic(p, proposal)
    h = jnp.clip(arithmetic.accept, 0, 1)
    bits = np.arange(nodes)

    def add(cell, total):
        success = (cell >> bits) % 2 == 1
        chance = jnp.prod(jnp.where(success, h, 1 - h), -1)
        # u = 0 succeeds whenever h > 0; the largest float below 1 fails whenever h < 1. Other cells weigh nothing.
        coins = jnp.where(success, 0, jnp.nextafter(jnp.ones((), h.dtype), jnp.zeros((), h.dtype)))
        accepted, _ = rule.decide(arithmetic, proposal, jnp.broadcast_to(coins, h.shape))
        return total + chance * accepted

    return jax.lax.fori_loop(0, 2**nodes, add, jnp.zeros_like(h, shape=h.shape[:1]))
