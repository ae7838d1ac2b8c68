"""Which path of a tree is accepted, from one flag per node.

    parents (0, 0, 1, 1, 2)         flags         whole_paths   first_siblings   in_subtree
          0
        1   2                      .   1            .   1          .   1           1   1
       3 4 5                      1 1 .            . . .          1 . .           1 1 .

Everything is a few boolean operations on [B, N, N], which are small beside one law; parents, and so the masks, may be
the same for all rows or differ from row to row.
"""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from specjax.protocol import Proposal
from specjax.verifiers.round_stream import Arithmetic


def whole_paths(flags: Bool[Array, "B N"], proposal: Proposal) -> Bool[Array, "B N"]:
    """The nodes that are set together with all their ancestors."""
    above = jnp.asarray(proposal.node_ancestors)[:, 1:, 1:]
    return ~jnp.any(above & ~flags[:, None], -1)


def first_siblings(flags: Bool[Array, "B N"], proposal: Proposal) -> Bool[Array, "B N"]:
    """The nodes that are set while no earlier sibling is."""
    parents = jnp.asarray(proposal.node_parents)
    earlier = (parents[:, :, None] == parents[:, None]) & np.tri(parents.shape[1], k=-1, dtype=bool)
    return flags & ~jnp.any(earlier & flags[:, None], -1)


def in_subtree(flags: Bool[Array, "B N"], proposal: Proposal) -> Bool[Array, "B N"]:
    """The nodes that are set themselves or have a descendant that is."""
    above = jnp.asarray(proposal.node_ancestors)[:, 1:, 1:]
    return jnp.any(above & flags[..., None], 1)


def deepest(flags: Bool[Array, "B N"], proposal: Proposal) -> Int[Array, "B"]:
    """The deepest node that is set, the first one on ties; 0, the root, when none is."""
    depths = jnp.where(flags, jnp.asarray(proposal.node_depths)[:, 1:], 0)
    best = jnp.max(depths, -1, keepdims=True, initial=0)
    numbers = jnp.arange(1, flags.shape[1] + 1, dtype=jnp.int32)
    first = jnp.min(jnp.where(depths == best, numbers, numbers.size), -1, initial=numbers.size)
    return jnp.where(best[:, 0] > 0, first, 0)


def path_to(node: Int[Array, "B"], proposal: Proposal) -> tuple[Int[Array, "B"], Int[Array, "B D"]]:
    """(depth of the node, node numbers from the root's child down to it); the path is padded with 0."""
    on_path = jnp.take_along_axis(jnp.asarray(proposal.node_ancestors), node[:, None, None], 1)[:, 0, 1:]
    place = jnp.cumsum(on_path, -1, dtype=jnp.int32) - 1  # parents come first, so the path's nodes rise
    here = on_path[:, None] & (place[:, None] == jnp.arange(proposal.topology.max_depth)[:, None])
    numbers = jnp.arange(1, on_path.shape[1] + 1, dtype=jnp.int32)
    return jnp.sum(on_path, -1, dtype=jnp.int32), jnp.sum(here * numbers, -1, dtype=jnp.int32)


def last_node(num_accepted: Int[Array, "B"], path: Int[Array, "B D"]) -> Int[Array, "B"]:
    """The node at the end of an accepted path."""
    return jnp.take_along_axis(jnp.pad(path, ((0, 0), (1, 0))), num_accepted[:, None], 1)[:, 0]


def first_successes(
    arithmetic: Arithmetic, proposal: Proposal, uniforms: Float[Array, "B N"]
) -> tuple[Int[Array, "B"], Int[Array, "B D"]]:
    """Coin flips top-down: from the root to the first child whose coin succeeds, and on from there.

    Strict: a threshold of 0 is not met even by u = 0.
    """
    success = proposal.valid & (uniforms < arithmetic.accept)
    return path_to(deepest(whole_paths(first_siblings(success, proposal), proposal), proposal), proposal)
