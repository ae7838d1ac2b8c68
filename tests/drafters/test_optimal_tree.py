import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specjax.drafters.optimal_tree import expected_accepted, optimal_tree
from specjax.topology import Topology


def all_trees(depth, ranks, num_nodes):
    """Every tree of that many nodes as a set of paths, built node by node."""
    trees = {frozenset()}
    for _ in range(num_nodes):
        grown = set()
        for tree in trees:
            for path in [(), *tree]:
                rank = sum(1 for other in tree if len(other) == len(path) + 1 and other[: len(path)] == path)
                if len(path) < depth and rank < ranks:
                    grown.add(tree | {(*path, rank)})
        trees = grown
    return trees


@given(st.integers(0, 2**31), st.sampled_from([(1, 4), (2, 2), (3, 2), (2, 3), (5, 1)]), st.data())
def test_no_tree_of_that_size_is_better(seed, shape, data):
    depth, ranks = shape
    most = min(6, sum(ranks**d for d in range(1, depth + 1)))
    num_nodes = data.draw(st.integers(1, most))
    rates = np.random.default_rng(seed).random(shape) ** 2  # in no order of rank
    tree = optimal_tree(rates, num_nodes)
    best = max(expected_accepted(Topology.from_paths(paths), rates) for paths in all_trees(depth, ranks, num_nodes))
    assert tree.num_nodes == num_nodes
    assert expected_accepted(tree, rates) == pytest.approx(best, abs=1e-12)


def test_expected_accepted_is_the_sum_over_paths():
    rates = np.array([[0.6, 0.3], [0.5, 0.25], [0.4, 0.1]])
    assert expected_accepted(Topology.chain(3), rates) == pytest.approx(0.6 + 0.6 * 0.5 + 0.6 * 0.5 * 0.4)
    tree = Topology.from_paths([(0, 1), (1, 0)])  # nodes (0), (1), (0, 0), (0, 1), (1, 0)
    assert expected_accepted(tree, rates) == pytest.approx(0.6 + 0.3 + 0.6 * (0.5 + 0.25) + 0.3 * 0.5)
    assert expected_accepted(Topology(()), rates) == 0


def test_expected_accepted_is_what_a_simulation_counts():
    """50,000 rounds: the mean lies within 5 standard errors of the truth, so a false alarm has odds below 1e-6."""
    rates, rng = np.array([[0.5, 0.3, 0.1], [0.6, 0.2, 0.1]]), np.random.default_rng(0)
    tree = optimal_tree(rates, 7)
    counts = []
    children = {(parent, rank): node for node, (parent, rank) in enumerate(zip(tree.parents, tree.ranks), 1)}  # noqa: B905
    for _ in range(50_000):
        node, accepted = 0, 0
        while accepted < 2:
            rank = int(np.searchsorted(np.cumsum(rates[accepted]), rng.random()))
            if (node, rank) not in children:
                break
            node, accepted = children[node, rank], accepted + 1
        counts.append(accepted)
    error = np.std(counts) / np.sqrt(len(counts))
    assert abs(np.mean(counts) - expected_accepted(tree, rates)) < 5 * error


def test_the_shape_follows_the_rates():
    assert optimal_tree([[0.9, 0.05]] * 4, 4).is_chain  # sure of itself: deep
    assert optimal_tree([[0.3, 0.29, 0.28], [0.01] * 3], 3) == Topology.from_shape((3,))  # unsure: wide
    tree = optimal_tree(np.full((3, 2), 0.5), 14)
    assert tree == Topology.from_shape((2, 2, 2))  # all there is room for
    assert np.all(np.diff(optimal_tree(np.random.default_rng(1).random((4, 5)), 40).depths) >= 0)  # numbered by depth


def test_more_nodes_never_hurt():
    rates = np.random.default_rng(2).dirichlet(np.ones(6), 4)[:, :5]
    values = [expected_accepted(optimal_tree(rates, n), rates) for n in range(1, 33)]
    assert np.all(np.diff(values) >= 0) and values[-1] < 4


def test_nodes_that_are_worth_nothing_are_still_placed():
    assert optimal_tree([[0.5, 0.0], [0.0, 0.0]], 6).num_nodes == 6


@pytest.mark.parametrize(
    "rates, nodes, message",
    [
        ([[0.5, 1.5]], 1, "rates must be a table .* of probabilities"),
        ([0.5, 0.2], 1, "rates must be a table"),
        ([[np.nan]], 1, "rates must be a table"),
        ([[0.5, 0.2], [0.5, 0.2]], 7, "num_nodes must be 1 to 6, .*got 7"),
        ([[0.5]], 0, "num_nodes must be 1 to 1, .*got 0"),
    ],
)
def test_bad_rates_and_sizes_are_named(rates, nodes, message):
    with pytest.raises(ValueError, match=message):
        optimal_tree(rates, nodes)
    with pytest.raises(ValueError, match="3 deep and 1 wide needs rates of at least that shape"):
        expected_accepted(Topology.chain(3), [[0.5, 0.5], [0.5, 0.5]])
