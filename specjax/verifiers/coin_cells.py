"""Every outcome of a round's coins: a coin of threshold h falls into [0, h) or [h, 1), and one probe in each tells all.

A cell of one draft is one such choice for every coin. Whether the declared threshold is the one that the coins really
meet is probed at the ends of the intervals, for one coin at a time.
"""

import dataclasses
import itertools

import numpy as np


@dataclasses.dataclass
class Coins:
    """R rows of coins: one for each cell of positive probability, then probes, then one of given coins for each draft.

    Attributes:
        draft: [R] which of the D drafts.
        cell: [R] the row, among the first `num_cells`, of the cell that the coins lie in.
        coins: [R, N].
        weight: [num_cells] probability of each cell, given its draft.
        num_cells: number of cells.
    """

    draft: np.ndarray
    cell: np.ndarray
    coins: np.ndarray
    weight: np.ndarray
    num_cells: int


def coin_cells(accept: np.ndarray, uniforms: np.ndarray, rng: np.random.Generator) -> Coins:
    """Rows for the thresholds [D, N] of D drafts, and coins [D, N] for the last rows.

    In the row that stands for its cell, each coin lies at a random end of its side.
    """
    num_drafts, nodes = accept.shape
    h = np.clip(np.nan_to_num(accept), 0, 1)
    # [D, N, success, end]: failure is [h, 1), success [0, h).
    ends = np.stack([h, np.full_like(h, np.nextafter(1, 0)), np.zeros_like(h), np.nextafter(h, -1)], -1)
    ends = ends.reshape(num_drafts, nodes, 2, 2)
    chance = np.stack([1 - h, h], -1)
    column, power = np.arange(nodes), 2 ** np.arange(nodes)
    sides = np.array(list(itertools.product(range(2), repeat=nodes)), int).reshape(2**nodes, nodes)
    probability = chance[:, column, sides].prod(-1)  # [D, 2^N]
    draft, which = np.nonzero(probability > 0)
    coins = ends[draft[:, None], column, sides[which], rng.integers(2, size=(len(draft), nodes))]
    row_of = np.full((num_drafts, 2**nodes), -1)
    row_of[draft, sides[which] @ power] = np.arange(len(draft))

    # Both ends of both sides of one coin, the others at random; then the given ones.
    probed, node, side, end = (x.reshape(-1) for x in np.indices((num_drafts, nodes, 2, 2)))
    possible = chance[probed, node, side] > 0
    probed, node, side, end = (x[possible] for x in (probed, node, side, end))
    probes = rng.random((len(probed), nodes))
    probes[np.arange(len(probed)), node] = ends[probed, node, side, end]
    probed = np.concatenate([probed, np.arange(num_drafts)])
    probes = np.concatenate([probes, uniforms])
    return Coins(
        draft=np.concatenate([draft, probed]),
        cell=np.concatenate([np.arange(len(draft)), row_of[probed, (probes < h[probed]) @ power]]),
        coins=np.concatenate([coins, probes]),
        weight=probability[draft, which],
        num_cells=len(draft),
    )
