"""Children of the nodes of a tree: chosen by rank, or drawn with or without replacement, and the laws they have."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from specjax.keys import Noise
from specjax.protocol import FIXED, IID, WITHOUT_REPLACEMENT, Proposal
from specjax.sampling import Sampling, draw, top_tokens
from specjax.topology import Topology


@struct.dataclass
class Children:
    """Drafted nodes, as they go into a Proposal.

    Attributes:
        tokens: ids.
        law: the law each was drawn from, None for those chosen by rank; all zeros at invalid ones.
        valid: False where nothing was left to draw from.
    """

    tokens: Int[Array, "B *n"]
    law: Float[Array, "B *n V"] | None
    valid: Bool[Array, "B *n"]


def draw_children(
    logits: Float[Array, "B M V"], k: int, *, sampling: Sampling, siblings: str, noise: Noise, depth: int
) -> Children:
    """k children [B, M, k] behind each of M nodes whose drafter logits are given.

    `fixed` siblings, and all at temperature 0, are the k largest raw logits. `iid` ones are drawn from the same law,
    those `without_replacement` from what is left of it, renormalised.

    Raises:
        ValueError: more children than tokens.
    """
    batch, parents, vocab = logits.shape
    if k > vocab:
        raise ValueError(f"{k} children of one node need a vocabulary of as many tokens; it has {vocab}")
    if siblings == FIXED or sampling.greedy:
        tokens = top_tokens(logits.astype(jnp.promote_types(logits.dtype, jnp.float32)), k)
        return Children(tokens, None, jnp.ones(tokens.shape, bool))
    flat = lambda x: x.reshape(batch * parents, *x.shape[2:])  # noqa: E731
    law = flat(sampling.law(logits))
    sources = jax.tree.map(flat, noise.draft_children(depth, parents, k, replace=siblings == IID))
    ids = jnp.arange(vocab)
    drawn = []
    for j in range(k):
        mass = jnp.sum(law, -1, keepdims=True)
        token = draw(law, jax.tree.map(lambda x, j=j: x[:, j], sources))
        drawn.append(Children(token, law, mass[:, 0] > 0))
        if siblings != IID:
            left = jnp.where(ids == token[:, None], 0, law)
            total = jnp.sum(left, -1, keepdims=True)
            law = jnp.where(total > 0, left / jnp.where(total > 0, total, 1), 0)
    stacked = jax.tree.map(lambda *x: jnp.stack(x, 1), *drawn)
    return jax.tree.map(lambda x: x.reshape(batch, parents, *x.shape[1:]), stacked)


def draw_level(
    logits: Float[Array, "B M V"], topology: Topology, depth: int, *, sampling: Sampling, siblings: str, noise: Noise
) -> Children:
    """The nodes [B, n] of one depth of a static tree, from the logits behind the M nodes of the depth above, in order.

    Children are valid only by themselves: that their parent is valid too is for the caller to see to.
    """
    level, above = topology.level(depth), topology.level(depth - 1)
    parent = np.searchsorted(above, np.asarray(topology.parents)[level - 1])
    rank = topology.ranks[level - 1]
    children = draw_children(
        logits, int(rank.max()) + 1, sampling=sampling, siblings=siblings, noise=noise, depth=depth
    )
    return jax.tree.map(lambda x: x[:, parent, rank], children)


def tree_proposal(levels: list[Children], topology: Topology, siblings: str) -> Proposal:
    """A proposal from its levels, root's children first; nodes under an invalid one are made invalid by the loop."""
    nodes = jax.tree.map(lambda *x: jnp.concatenate(x, 1), *levels)
    return Proposal(nodes.tokens, nodes.law, nodes.valid, topology, siblings if nodes.law is not None else FIXED)


def check_static_tree(topology: Topology) -> None:
    """Raises ValueError when a topology is not a tree of candidates numbered by depth."""
    if not topology.num_nodes or topology.passengers or np.any(np.diff(topology.depths) < 0):
        raise ValueError(
            f"topology must have at least one node, no passengers, and nodes numbered by depth; got {topology}"
        )


def check_siblings(siblings: str) -> None:
    """Raises ValueError for an unknown kind of siblings."""
    if siblings not in (IID, WITHOUT_REPLACEMENT, FIXED):
        raise ValueError(f"siblings must be {IID}, {WITHOUT_REPLACEMENT} or {FIXED}; got {siblings!r}")
