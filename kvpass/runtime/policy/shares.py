# SPDX-License-Identifier: Apache-2.0
"""Fair shares of the hot arena: how many slots each sequence is due, and which blocks exceed it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvpass.runtime.policy.arrays import BlockArrays
from kvpass.runtime.policy.heat import worth


def fair_shares(
    weights: NDArray[np.float64], demand: NDArray[np.float64], slots: float
) -> NDArray[np.float64]:
    """Weighted max-min fair shares (Bertsekas and Gallager, Data Networks, 1992, section 6.5.2).

    Slots go out by weight; what a sequence does not want goes to the others by theirs.

    Args:
        weights: ``[S]`` of the sequences, positive.
        demand: ``[S]`` slots that each wants.
        slots: of the arena.

    Returns:
        ``[S]`` slots, at most the demand, and all of ``slots`` where demand exceeds them.
    """
    shares = np.zeros(len(weights))
    left, weight = float(slots), float(weights.sum())
    # By how little each wants of its weight: once one wants more than its part, so do all after it.
    for i in np.argsort(demand / weights, kind="stable"):
        shares[i] = min(demand[i], left * weights[i] / weight if weight > 0 else left)
        left -= shares[i]
        weight -= weights[i]
    return shares


def demand(
    blocks: BlockArrays, sequence: NDArray[np.int64], sequences: int, min_frequency: float
) -> NDArray[np.float64]:
    """Slots that each sequence has a use for: blocks accessed often enough, new ones, residents.

    Args:
        blocks: ``[N]`` what is known of them.
        sequence: ``[N]`` whose each is.
        sequences: how many there are.
        min_frequency: accesses a window that are often.

    Returns:
        ``[S]`` slots.
    """
    useful = blocks.resident | np.isnan(blocks.rate) | (blocks.rate >= min_frequency)
    return np.bincount(sequence[useful], minlength=sequences).astype(np.float64)


def over_share(
    blocks: BlockArrays,
    sequence: NDArray[np.int64],
    hot: NDArray[np.bool_],
    shares: NDArray[np.float64],
) -> NDArray[np.float64]:
    """How far each block is beyond the share of its sequence.

    A sequence's blocks count from its warmest hot one to its coldest, then on from its warmest cold
    one: a hot block beyond the share is one to give up, a cold one beyond it one not to bring in.

    Args:
        blocks: ``[N]`` what is known of them; residents are warmer than others.
        sequence: ``[N]`` index into ``shares``.
        hot: ``[N]`` whether the block is in the hot arena.
        shares: ``[S]`` slots that each sequence is due.

    Returns:
        ``[N]``: 0 within the share, else slots beyond it, in shares.
    """
    over = np.zeros(len(sequence))
    counts = np.bincount(sequence, minlength=len(shares))
    if (counts <= shares).all():
        return over
    # Three keys in one: each more is another sort of all blocks.
    group = sequence * 4 + 2 * ~hot + ~blocks.resident
    order = np.lexsort((blocks.index, -worth(blocks), group))
    first = np.cumsum(counts) - counts
    owner = sequence[order]
    place = np.arange(1, len(order) + 1) - first[owner]
    over[order] = np.maximum(place - shares[owner], 0.0) / np.maximum(shares[owner], 1.0)
    return over
