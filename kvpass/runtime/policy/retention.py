# SPDX-License-Identifier: Apache-2.0
"""Which part of a sequence stays hot."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def resident_cap(hot_slots: int, rows: int, used: int = 0) -> int:
    """Blocks of each row that may be resident.

    At most half of the hot arena: the rest is left to recent blocks and to those that heat brings
    in. Where more blocks are accessed than the other half holds, residents yield to them, down to
    the first block of each row, which nearly every query attends to (attention sinks: Xiao
    et al., ICLR 2024): a slot that holds what nobody reads makes a miss of every access elsewhere.

    Args:
        hot_slots: slots of the hot arena.
        rows: live rows (layers x sequences) that share it.
        used: blocks that are accessed at all, 0 before a window has passed.
    """
    rows = max(rows, 1)
    return min(hot_slots // 2, max(hot_slots - used, rows)) // rows


def resident_blocks(
    resident_tokens: int, block_size: int, hot_slots: int, rows: int, blocks: int
) -> int:
    """Blocks at the start of each row that are hot from the start.

    The first ``resident_tokens`` tokens, as far as they fit into half of the hot arena.

    Args:
        resident_tokens: configured number of tokens.
        block_size: tokens of a block.
        hot_slots: slots of the hot arena.
        rows: live rows (layers x sequences) that share it.
        blocks: blocks of the row.
    """
    wanted = -(-resident_tokens // block_size)
    return min(wanted, resident_cap(hot_slots, rows), blocks)


def residents(
    row: NDArray[np.int64],
    index: NDArray[np.int64],
    worth: NDArray[np.float64],
    *,
    first: int,
    ratio: float,
    cap: int,
) -> NDArray[np.bool_]:
    """Which blocks of each row stay hot, after a window.

    As many as the first ``first`` blocks or ``ratio`` of the row, whichever is more, up to
    ``cap``. The first ones come first; then the two at the end, which the next queries attend to
    most; then those that are worth most, because keeping cold ones would be a promise kept to
    nobody.

    Args:
        row: ``[N]`` row of each block.
        index: ``[N]`` its position in the row.
        worth: ``[N]`` accesses to expect.
        first: blocks at the start that stay hot.
        ratio: share of a row that stays hot, 0 to 1.
        cap: blocks of a row that may be resident.

    Returns:
        ``[N]`` bool.
    """
    if not len(row):
        return np.zeros(0, dtype=bool)
    sizes = np.bincount(row)
    wanted = np.minimum(np.maximum(first, np.ceil(ratio * sizes)), cap)
    rank = np.where(index < first, 0, np.where(index >= sizes[row] - 2, 1, 2))
    order = np.lexsort((np.where(rank == 0, index, -worth), rank, row))
    place = np.empty(len(row), dtype=np.int64)
    starts = np.cumsum(sizes) - sizes
    place[order] = np.arange(len(row)) - starts[row[order]]
    return place < wanted[row]
