# SPDX-License-Identifier: Apache-2.0
"""Which part of a sequence stays hot."""

from __future__ import annotations

from typing import Any

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
    index: NDArray[np.signedinteger[Any]],
    worth: NDArray[np.float64],
    *,
    first: int,
    ratio: float,
    cap: int,
) -> NDArray[np.bool_]:
    """Which blocks of each row stay hot, after a window.

    As many as the first ``first`` blocks or ``ratio`` of the row, whichever is more, up to
    ``cap``. The first ones come first; then the two at the end, the last one before the other,
    which the next queries attend to most; then those that are worth most, because keeping cold
    ones would be a promise kept to nobody.

    Args:
        row: ``[N]`` row of each block.
        index: ``[N]`` its position in the row, no two alike.
        worth: ``[N]`` accesses to expect, none negative.
        first: blocks at the start that stay hot.
        ratio: share of a row that stays hot, 0 to 1.
        cap: blocks of a row that may be resident.

    Returns:
        ``[N]`` bool.
    """
    if not len(row):
        return np.zeros(0, dtype=bool)
    sizes = _lengths(row, index)
    wanted = np.minimum(np.maximum(first, np.ceil(ratio * sizes)), cap).astype(np.int64)
    start = np.minimum(first, wanted)
    end = np.clip(
        wanted - np.minimum(first, sizes), 0, np.minimum(2, sizes - np.minimum(first, sizes))
    )
    chosen = (index < start[row]) | ((index >= first) & (index >= (sizes - end)[row]))
    rest = wanted - start - end
    between = ~chosen & (index >= first)
    chosen[between] = _worth_most(row[between], index[between], worth[between], rest)
    return chosen


def _lengths(row: NDArray[np.int64], index: NDArray[np.signedinteger[Any]]) -> NDArray[np.int64]:
    """Blocks of each row, by the last one: a row may share its first ones with another row."""
    there = np.zeros((int(row.max()) + 1, int(index.max()) + 1), dtype=bool)
    there[row, index] = True
    lengths: NDArray[np.int64] = there.shape[1] - np.argmax(there[:, ::-1], axis=1)
    return np.where(there.any(axis=1), lengths, 0)


def _worth_most(
    row: NDArray[np.int64],
    index: NDArray[np.signedinteger[Any]],
    worth: NDArray[np.float64],
    wanted: NDArray[np.int64],
) -> NDArray[np.bool_]:
    """The ``wanted[r]`` blocks of each row ``r`` that are worth most, the earlier of equal ones."""
    if not len(row) or not (wanted > 0).any():
        return np.zeros(len(row), dtype=bool)
    # As a table of rows, which sorts much faster than one long list by row and worth does.
    table = np.full((len(wanted), int(index.max()) + 1), -1.0)
    table[row, index] = worth
    count = np.clip(wanted, 0, np.bincount(row, minlength=len(wanted)))
    ordered = np.sort(table, axis=1)[:, ::-1]
    bar = ordered[np.arange(len(count)), np.maximum(count, 1) - 1][:, None]
    above = table > bar
    equal = table == bar
    missing = (count - above.sum(axis=1))[:, None]
    taken: NDArray[np.bool_] = above & (count > 0)[:, None]
    taken |= equal & (np.cumsum(equal, axis=1) <= missing)
    return taken[row, index]
