"""The best static tree of N nodes for measured acceptance rates: Sequoia's dynamic programme, plain numpy.

rates[d, r] is the probability that the child of rank r, d + 1 levels below the root, is the accepted one, given that
its parent was accepted. Siblings exclude each other, so the expected number of accepted tokens is the sum over all
nodes of the product of the rates along their paths.

Reference:
    Chen et al., Sequoia: Scalable, Robust, and Hardware-aware Speculative Decoding, 2024 (arXiv 2402.12374), section 3.
"""

import numpy as np
from numpy.typing import ArrayLike

from specjax.topology import Topology


def optimal_tree(rates: ArrayLike, num_nodes: int) -> Topology:
    """The tree of exactly `num_nodes` nodes with the most expected accepted tokens.

    Let F(d, n) be the most that n nodes below an accepted node at depth d can add, and G(d, r, n) the same when only
    children of rank r and above are left to place. Giving m of the n nodes to the child of rank r and what hangs on it,

        G(d, r, n) = max over 1 <= m <= n of  rates[d, r] (1 + F(d + 1, m - 1)) + G(d, r + 1, n - m),
        F(d, n) = G(d, 0, n),

    which is exact for any rates, also for measured ones that do not fall with the rank. D R N² steps.

    Args:
        rates: [D, R]; the tree is at most D deep and R wide.
        num_nodes: N >= 1.

    Raises:
        ValueError: rates that are no table of probabilities, or more nodes than a tree of that depth and width holds.
    """
    rates = _checked(rates)
    depth, ranks = rates.shape
    room = sum(ranks**d for d in range(1, depth + 1))
    if not 1 <= num_nodes <= room:
        raise ValueError(
            f"num_nodes must be 1 to {room}, what rates of shape {rates.shape} have room for; got {num_nodes}"
        )
    nothing = np.full(num_nodes + 1, -np.inf)
    nothing[0] = 0
    below = nothing  # F(d + 1, ·)
    given = np.zeros((depth, ranks, num_nodes + 1), int)  # the best m
    for d in reversed(range(depth)):
        rest = nothing  # G(d, r + 1, ·)
        for r in reversed(range(ranks)):
            gain = np.full(num_nodes, -np.inf)  # of m = 1..N nodes
            possible = np.isfinite(below[:-1])
            gain[possible] = rates[d, r] * (1 + below[:-1][possible])
            best = nothing.copy()
            for n in range(1, num_nodes + 1):
                values = gain[:n] + rest[n - 1 :: -1]
                given[d, r, n] = 1 + np.argmax(values)
                best[n] = values[given[d, r, n] - 1]
            rest = best
        below = rest
    paths, open_nodes = [], [((), num_nodes)]
    while open_nodes:
        path, left = open_nodes.pop()
        for r in range(ranks):
            if left == 0:
                break
            m = int(given[len(path), r, left])
            paths.append((*path, r))
            open_nodes.append(((*path, r), m - 1))
            left -= m
    return Topology.from_paths(paths)


def expected_accepted(topology: Topology, rates: ArrayLike) -> float:
    """Expected accepted tokens per round of a static tree (τ is one more), from rates [D, R].

    Raises:
        ValueError: rates that are no table of probabilities, or a tree deeper or wider than they are.
    """
    rates = _checked(rates)
    depths, ranks = topology.depths[1:] - 1, topology.ranks
    if topology.num_nodes and (depths.max() >= rates.shape[0] or ranks.max() >= rates.shape[1]):
        raise ValueError(
            f"a tree {depths.max() + 1} deep and {ranks.max() + 1} wide needs rates of at least that shape; "
            f"got {rates.shape}"
        )
    value = np.ones(topology.num_nodes + 1)
    for node, parent in enumerate(topology.parents, start=1):
        value[node] = value[parent] * rates[depths[node - 1], ranks[node - 1]]
    return float(value[1:].sum())


def _checked(rates):
    rates = np.asarray(rates, float)
    if rates.ndim != 2 or not rates.size or not np.all((rates >= 0) & (rates <= 1)):
        raise ValueError(f"rates must be a table [depth, rank] of probabilities; got {rates.tolist()}")
    return rates
