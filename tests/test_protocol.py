"""Topologies against walking from node to node, and the two look-ups that judge a node by its parent."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specjax.protocol import Proposal, node_laws, token_probabilities
from specjax.topology import DynamicTopology, Topology

PARENTS = st.integers(0, 8).flatmap(lambda n: st.tuples(*(st.integers(0, i) for i in range(n))))


def path_to_root(topology, node):
    path = [node]
    while path[-1]:
        path.append(topology.parents[path[-1] - 1])
    return path


@given(PARENTS)
def test_depths_and_ancestors_follow_the_parents(parents):
    topology = Topology(parents)
    assert topology.num_nodes == len(parents) and topology.ancestors.shape == (len(parents) + 1,) * 2
    for node in range(topology.num_nodes + 1):
        path = path_to_root(topology, node)
        assert topology.depths[node] == len(path) - 1
        assert set(np.flatnonzero(topology.ancestors[node])) == set(path)
    assert topology.max_depth == max(topology.depths)
    assert topology.is_chain == (topology == Topology.chain(len(parents)))
    assert hash(topology) == hash(Topology(parents))


@given(st.integers(0, 10))
def test_a_chain_sees_everything_before_it(length):
    chain = Topology.chain(length)
    assert chain.is_chain and chain.max_depth == chain.num_nodes == length
    np.testing.assert_array_equal(chain.ancestors, np.tri(length + 1, dtype=bool))
    np.testing.assert_array_equal(chain.depths, range(length + 1))


@pytest.mark.parametrize("parents", [(1,), (0, 2), (-1,), (0, 0, 5)])
def test_a_parent_comes_before_its_child(parents):
    with pytest.raises(ValueError, match="a parent must come before its child"):
        Topology(parents)


@given(PARENTS.filter(len), st.integers(0, 1000))
def test_a_node_is_judged_by_its_parents_law(parents, seed):
    rng = np.random.default_rng(seed)
    p = rng.random((2, len(parents) + 1, 5)).astype(np.float32)
    tokens = rng.integers(5, size=(2, len(parents)))
    proposal = Proposal(jnp.asarray(tokens), None, jnp.ones(tokens.shape, bool), Topology(parents))
    dynamic = proposal.replace(
        topology=DynamicTopology(len(parents), len(parents)), parents=jnp.broadcast_to(jnp.array(parents), tokens.shape)
    )
    laws = node_laws(jnp.asarray(p), proposal)
    np.testing.assert_array_equal(laws, node_laws(jnp.asarray(p), dynamic))
    for name in ("node_parents", "node_depths", "node_ancestors"):
        static = getattr(proposal, name)
        np.testing.assert_array_equal(np.broadcast_to(static, (2, *static.shape[1:])), getattr(dynamic, name))
    chosen = token_probabilities(laws, jnp.asarray(tokens))
    for row in range(2):
        for i, parent in enumerate(parents):
            np.testing.assert_array_equal(laws[row, i], p[row, parent])
            assert chosen[row, i] == p[row, parent, tokens[row, i]]
