"""Shapes and paths give the tree they describe; arrays of parents give the same masks as static ones."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specjax.topology import DynamicTopology, Topology, ancestors_of

PARENTS = st.integers(1, 9).flatmap(lambda n: st.tuples(*(st.integers(0, i) for i in range(n))))


def paths_of(topology):
    """The path of ranks to every node."""
    paths = {0: ()}
    for node, (parent, rank) in enumerate(zip(topology.parents, topology.ranks, strict=True), start=1):
        paths[node] = (*paths[parent], int(rank))
    return paths


@given(st.lists(st.integers(1, 3), max_size=4))
def test_a_shape_gives_every_node_its_children(shape):
    topology = Topology.from_shape(shape)
    assert topology.num_nodes == sum(int(np.prod(shape[: d + 1])) for d in range(len(shape)))
    assert topology.max_depth == len(shape) and (np.diff(topology.depths) >= 0).all()
    for node in range(topology.num_nodes + 1):
        children = topology.parents.count(node)
        depth = topology.depths[node]
        assert children == (shape[depth] if depth < len(shape) else 0)
    for depth in range(1, len(shape) + 1):
        assert (topology.depths[topology.level(depth)] == depth).all()
    assert Topology.from_paths(paths_of(topology).values()) == topology


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=3).map(tuple), min_size=1, max_size=5))
def test_paths_are_in_the_smallest_tree_that_holds_them(paths):
    topology = Topology.from_paths(paths)
    found = set(paths_of(topology).values())
    assert set(paths) <= found
    needed = {()}
    for path in paths:
        for depth, rank in enumerate(path):
            needed |= {(*path[:depth], lower) for lower in range(rank + 1)}
    assert found == needed


@given(PARENTS)
def test_arrays_of_parents_give_the_static_masks(parents):
    topology = Topology(parents)
    rows = jnp.asarray([parents, tuple(range(len(parents)))])
    masks = ancestors_of(rows, len(parents))
    np.testing.assert_array_equal(masks[0], topology.ancestors)
    np.testing.assert_array_equal(masks[1], np.tri(len(parents) + 1, dtype=bool))


def test_passengers_are_no_candidates():
    topology = Topology((0, 1, 0, 3, 4), passengers=3)
    assert topology.max_depth == 2 and not topology.is_chain
    assert topology.level(1).tolist() == [1] and topology.level(3).tolist() == []
    assert not Topology((0, 1), passengers=1).is_chain


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: Topology.from_shape((2, 0)), "at least 1; got \\(2, 0\\)"),
        (lambda: Topology.from_paths([(0, -1)]), "ranks from 0"),
        (lambda: Topology((0,), passengers=2), "passengers must be 0 to 1"),
        (lambda: DynamicTopology(3, 4), "max_depth must be 1 to 3"),
        (lambda: DynamicTopology(3, 2, 3), "passengers must be 0 to 2"),
    ],
)
def test_impossible_shapes(make, words):
    with pytest.raises(ValueError, match=words):
        make()
