"""The boolean operations on trees against walks in plain Python, on trees shared by all rows and one per row."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specjax.protocol import FIXED, Proposal
from specjax.topology import DynamicTopology, Topology
from specjax.verifiers.round_stream import Arithmetic
from specjax.verifiers.traversal import TraversalRule
from specjax.verifiers.tree_walk import (
    deepest,
    first_siblings,
    first_successes,
    in_subtree,
    last_node,
    path_to,
    whole_paths,
)
from tests.verifiers.trees import TREE, children, post_order

ROWS, NODES = 6, 7


def draw(seed, dynamic):
    """(proposal, the topology of each row, flags)."""
    rng = np.random.default_rng(seed)
    rows = [Topology(tuple(int(rng.integers(node)) for node in range(1, NODES + 1))) for _ in range(ROWS)]
    rows = rows if dynamic else rows[:1] * ROWS
    parents = jnp.asarray([row.parents for row in rows], jnp.int32) if dynamic else None
    topology = DynamicTopology(NODES, NODES) if dynamic else rows[0]
    tokens = jnp.zeros((ROWS, NODES), jnp.int32)
    return (
        Proposal(tokens, None, jnp.ones((ROWS, NODES), bool), topology, FIXED, parents),
        rows,
        rng.random((ROWS, NODES)) < rng.random(),
    )


def ancestry(topology, node):
    """The node and its ancestors, from the root's child down."""
    return [*ancestry(topology, topology.parents[node - 1]), node] if node else []


@pytest.mark.parametrize("dynamic", [False, True])
@given(st.integers(0, 10**6))
def test_masks_and_paths(dynamic, seed):
    proposal, rows, flags = draw(seed, dynamic)
    found = [f(jnp.asarray(flags), proposal) for f in (whole_paths, first_siblings, in_subtree)]
    best = deepest(found[0], proposal)
    length, path = path_to(best, proposal)
    np.testing.assert_array_equal(last_node(length, path), best)
    for b, topology in enumerate(rows):
        on = lambda node, b=b: bool(flags[b, node - 1])  # noqa: E731
        whole = [all(map(on, ancestry(topology, node))) for node in range(1, NODES + 1)]
        assert found[0][b].tolist() == whole
        assert found[1][b].tolist() == [
            on(node) and not any(on(s) for s in children(topology, topology.parents[node - 1]) if s < node)
            for node in range(1, NODES + 1)
        ]
        assert found[2][b].tolist() == [
            on(node) or any(map(on, post_order(topology, node))) for node in range(1, NODES + 1)
        ]
        expected = max((n for n in range(1, NODES + 1) if whole[n - 1]), key=lambda n: topology.depths[n], default=0)
        assert best[b] == expected
        assert path[b, : int(length[b])].tolist() == ancestry(topology, expected)


@pytest.mark.parametrize("dynamic", [False, True])
@given(st.integers(0, 10**6))
def test_decisions_are_the_walks_they_stand_for(dynamic, seed):
    """Top-down: one pass over the nodes that goes wherever a child succeeds. Bottom-up: first success in post-order."""
    proposal, rows, flags = draw(seed, dynamic)
    arithmetic, coins = Arithmetic(accept=jnp.asarray(flags, jnp.float32)), jnp.full((ROWS, NODES), 0.5)
    down = last_node(*first_successes(arithmetic, proposal, coins))
    up = last_node(*TraversalRule().decide(arithmetic, proposal, coins))
    for b, topology in enumerate(rows):
        at = 0
        for node in range(1, NODES + 1):
            if topology.parents[node - 1] == at and flags[b, node - 1]:
                at = node
        assert down[b] == at
        assert up[b] == next((node for node in post_order(topology) if flags[b, node - 1]), 0)


def test_invalid_nodes_never_succeed():
    valid = jnp.zeros((1, 7), bool).at[0, 1].set(True)
    proposal = Proposal(jnp.zeros((1, 7), jnp.int32), None, valid, TREE, FIXED)
    arithmetic = Arithmetic(accept=jnp.ones((1, 7)))
    for decide in (first_successes, TraversalRule().decide):
        n, path = decide(arithmetic, proposal, jnp.zeros((1, 7)))
        assert n[0] == 1 and path[0, 0] == 2


def test_a_tree_without_nodes():
    proposal = Proposal(jnp.zeros((2, 0), jnp.int32), None, jnp.ones((2, 0), bool), Topology(()), FIXED)
    n, path = first_successes(Arithmetic(accept=jnp.zeros((2, 0))), proposal, jnp.zeros((2, 0)))
    assert n.tolist() == [0, 0] and path.shape == (2, 0) and last_node(n, path).tolist() == [0, 0]
