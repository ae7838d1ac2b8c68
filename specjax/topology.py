"""The shape of a proposal: which drafted node hangs on which.

Node 0 is the root, the pending token; nodes 1..N are drafted, and a parent always comes before its children:

    shape (2, 2)            parents (0, 0, 1, 1, 2, 2)

          0                 depths       0   1 1   2 2 2 2
        1   2               ranks            0 1   0 1 0 1       place among the children of one parent
       3 4 5 6

A path is a tuple of ranks, so that (1, 0) is node 5. The last `passengers` nodes are no candidates: they take part in
the target's forward, are never accepted, and the target's choice behind each comes back to the drafter.
"""

import dataclasses
import functools
from collections.abc import Iterable, Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int


@dataclasses.dataclass(frozen=True)
class Topology:
    """A shape known while tracing; hashable. `parents[i]` is the parent of node i + 1.

    Raises:
        ValueError: a parent that does not come before its child, or more passengers than nodes.
    """

    parents: tuple[int, ...]
    passengers: int = 0

    is_static = True

    def __post_init__(self):
        for node, parent in enumerate(self.parents, start=1):
            if not 0 <= parent < node:
                raise ValueError(
                    f"node {node} has parent {parent}; a parent must come before its child (0 is the root)"
                )
        if not 0 <= self.passengers <= len(self.parents):
            raise ValueError(f"passengers must be 0 to {len(self.parents)}, the number of nodes; got {self.passengers}")

    @classmethod
    def chain(cls, length: int) -> "Topology":
        """Every node hangs on the one before it."""
        return cls(tuple(range(length)))

    @classmethod
    def from_shape(cls, shape: Sequence[int]) -> "Topology":
        """Every node of depth d has `shape[d]` children; (4, 2, 2, 1) has 4 + 8 + 16 + 16 nodes.

        Raises:
            ValueError: a number of children below 1.
        """
        if any(children < 1 for children in shape):
            raise ValueError(f"every number of children must be at least 1; got {tuple(shape)}")
        parents, level = [], [0]
        for children in shape:
            above = [node for node in level for _ in range(children)]
            level = list(range(len(parents) + 1, len(parents) + 1 + len(above)))
            parents += above
        return cls(tuple(parents))

    @classmethod
    def from_paths(cls, paths: Iterable[Sequence[int]]) -> "Topology":
        """The smallest tree that holds all paths of ranks; what a path runs through is filled in.

        Raises:
            ValueError: a rank below 0.
        """
        wanted = {()}
        for path in paths:
            if any(rank < 0 for rank in path):
                raise ValueError(f"a path is made of ranks from 0; got {tuple(path)}")
            for depth, rank in enumerate(path):
                wanted |= {(*path[:depth], lower) for lower in range(rank + 1)}
        nodes = sorted(wanted, key=lambda path: (len(path), path))
        number = {path: node for node, path in enumerate(nodes)}
        return cls(tuple(number[path[:-1]] for path in nodes[1:]))

    @property
    def num_nodes(self) -> int:
        return len(self.parents)

    @property
    def is_chain(self) -> bool:
        return not self.passengers and self.parents == tuple(range(self.num_nodes))

    @functools.cached_property
    def depths(self) -> np.ndarray:
        """[N + 1] depth of all nodes, the root's being 0."""
        depths = np.zeros(self.num_nodes + 1, np.int32)
        for node, parent in enumerate(self.parents, start=1):
            depths[node] = depths[parent] + 1
        return depths

    @property
    def max_depth(self) -> int:
        """Depth of the deepest candidate."""
        return int(self.depths[: self.num_nodes + 1 - self.passengers].max())

    @functools.cached_property
    def ancestors(self) -> np.ndarray:
        """[N + 1, N + 1] booleans: whether column j is node i itself or an ancestor of it: the attention mask."""
        mask = np.eye(self.num_nodes + 1, dtype=bool)
        for node, parent in enumerate(self.parents, start=1):
            mask[node] |= mask[parent]
        return mask

    @functools.cached_property
    def ranks(self) -> np.ndarray:
        """[N] place of each node among its parent's children, from 0."""
        seen = np.zeros(self.num_nodes + 1, np.int32)
        ranks = np.zeros(self.num_nodes, np.int32)
        for i, parent in enumerate(self.parents):
            ranks[i] = seen[parent]
            seen[parent] += 1
        return ranks

    def level(self, depth: int) -> np.ndarray:
        """Numbers of the candidates of one depth, in order."""
        return np.flatnonzero(self.depths[: self.num_nodes + 1 - self.passengers] == depth)


@dataclasses.dataclass(frozen=True)
class DynamicTopology:
    """A tree whose parents are chosen anew in every round and row; only its size is known while tracing.

    The parents come with the proposal (`Proposal.parents`). Attributes are those of `Topology`.
    """

    num_nodes: int
    max_depth: int
    passengers: int = 0

    is_static = False
    is_chain = False

    def __post_init__(self):
        if not 1 <= self.max_depth <= self.num_nodes:
            raise ValueError(f"max_depth must be 1 to {self.num_nodes}, the number of nodes; got {self.max_depth}")
        if not 0 <= self.passengers < self.num_nodes:
            raise ValueError(f"passengers must be 0 to {self.num_nodes - 1}; got {self.passengers}")


AnyTopology = Topology | DynamicTopology


def ancestors_of(parents: Int[Array, "B N"], max_depth: int) -> Bool[Array, "B M M"]:
    """`Topology.ancestors` of every row (M = N + 1), from parents that are arrays, by repeated squaring."""
    batch, nodes = parents.shape
    mask = jnp.eye(nodes + 1, dtype=bool) | jnp.pad(
        parents[..., None] == jnp.arange(nodes + 1), ((0, 0), (1, 0), (0, 0))
    )
    reach = 1
    while reach < max_depth:
        counts = jnp.einsum("bij,bjk->bik", mask.astype(jnp.float32), mask.astype(jnp.float32))
        mask, reach = counts > 0, 2 * reach
    return mask
