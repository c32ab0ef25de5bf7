# SPDX-License-Identifier: Apache-2.0
"""Which blocks live in the hot tier: pure functions over arrays of block metadata.

No device work is done here, so that a simulator can drive the same functions with recorded traces.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

MAX_HEAT = 3
"""Top of the 2-bit saturating heat counter."""

HYSTERESIS = 1.25
"""A cold block must be accessed this many times as often as the hot one it replaces."""


@dataclass(frozen=True)
class BlockArrays:
    """Metadata of N blocks, one array a property, each ``[N]``.

    Attributes:
        frequency: accesses in the last window; NaN before a window has passed.
        heat: 2-bit saturating counter.
        index: position of the block in its sequence.
        resident: within the first tokens that always stay hot.
        movable: full, written through, and its sequence not in a step: may be demoted.
    """

    frequency: NDArray[np.float64]
    heat: NDArray[np.uint8]
    index: NDArray[np.int64]
    resident: NDArray[np.bool_]
    movable: NDArray[np.bool_]


def next_heat(
    heat: NDArray[np.uint8], frequency: NDArray[np.float64], min_frequency: float
) -> NDArray[np.uint8]:
    """Heat after a window: up by one where the block was accessed often enough, else down by one.

    Args:
        heat: ``[N]`` uint8, 0 to 3.
        frequency: ``[N]`` accesses in the window.
        min_frequency: accesses that count as often.

    Returns:
        ``[N]`` uint8, 0 to 3.
    """
    hot = frequency >= min_frequency
    return np.where(hot, np.minimum(heat + 1, MAX_HEAT), np.maximum(heat, 1) - 1).astype(np.uint8)


def resident_blocks(
    resident_tokens: int, block_size: int, hot_slots: int, rows: int, blocks: int
) -> int:
    """Blocks at the start of each row that are always hot.

    The first ``resident_tokens`` tokens, as far as they fit into half of the hot arena: the rest is
    left to recent blocks and to those that heat brings in.

    Args:
        resident_tokens: configured number of tokens.
        block_size: tokens of a block.
        hot_slots: slots of the hot arena.
        rows: live rows (layers x sequences) that share it.
        blocks: blocks of the row.
    """
    wanted = -(-resident_tokens // block_size)
    fair = hot_slots // (2 * max(rows, 1))
    return min(wanted, fair, blocks)


def place(
    index: NDArray[np.int64], last: NDArray[np.bool_], resident: int, room: int
) -> NDArray[np.bool_]:
    """Which new blocks start in the hot tier.

    Unfinished blocks first (they are written every step), then residents, then the most recent.

    Args:
        index: ``[N]`` position of each new block in its row.
        last: ``[N]`` whether it is the unfinished block at the end of its row.
        resident: blocks at the start of a row that are always hot.
        room: hot slots that may be filled.

    Returns:
        ``[N]`` bool.
    """
    rank = np.where(last, 0, np.where(index < resident, 1, 2))
    order = np.lexsort((-index, rank))
    hot = np.zeros(len(index), dtype=bool)
    hot[order[: max(room, 0)]] = True
    return hot


def victims(
    blocks: BlockArrays, count: int, *, min_frequency: float, pressure: bool
) -> NDArray[np.int64]:
    """Which hot blocks to demote, coldest first.

    Args:
        blocks: the hot blocks.
        count: how many at most.
        min_frequency: accesses a window below which a block may be demoted.
        pressure: a slot is needed now, so frequency and residency no longer protect, they only
            order; otherwise only blocks known to be accessed too rarely are returned.

    Returns:
        Indices into the arrays.
    """
    allowed = blocks.movable.copy()
    if not pressure:
        with np.errstate(invalid="ignore"):
            allowed &= ~blocks.resident & (blocks.frequency < min_frequency)
    chosen = np.flatnonzero(allowed)
    frequency = np.nan_to_num(blocks.frequency[chosen], nan=np.inf)
    order = np.lexsort(
        (blocks.index[chosen], frequency, blocks.heat[chosen], blocks.resident[chosen])
    )
    return chosen[order[: max(count, 0)]]


def promotions(
    hot: BlockArrays, cold: BlockArrays, *, room: int, limit: int, min_frequency: float
) -> list[tuple[int, int]]:
    """Which cold blocks to bring into the hot tier, and whose slots they take.

    Args:
        hot: blocks in the hot tier.
        cold: blocks whose only copy is cold.
        room: hot slots that may be filled without a demotion.
        limit: moves at most.
        min_frequency: accesses a window that a block needs to be promoted.

    Returns:
        Pairs (index into cold, index into hot or -1 for a free slot), hottest first.
    """
    with np.errstate(invalid="ignore"):
        wanted = np.flatnonzero(cold.movable & (cold.frequency >= min_frequency))
    wanted = wanted[np.lexsort((cold.index[wanted], -cold.frequency[wanted]))]
    with np.errstate(invalid="ignore"):
        givable = np.flatnonzero(hot.movable & ~hot.resident & ~np.isnan(hot.frequency))
    givable = givable[np.lexsort((hot.index[givable], hot.frequency[givable]))]
    pairs: list[tuple[int, int]] = []
    taken = 0
    for candidate in wanted[: max(limit, 0)]:
        if room > 0:
            room -= 1
            pairs.append((int(candidate), -1))
        elif taken < len(givable):
            victim = givable[taken]
            if cold.frequency[candidate] < HYSTERESIS * hot.frequency[victim]:
                break
            taken += 1
            pairs.append((int(candidate), int(victim)))
        else:
            break
    return pairs
