# SPDX-License-Identifier: Apache-2.0
"""Which blocks start in the hot tier, which leave it, and which are brought in."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvpass.runtime.policy.arrays import BlockArrays
from kvpass.runtime.policy.heat import coldest_first, worth

HYSTERESIS = 1.1
"""A cold block must be accessed this many times as often as the hot one it replaces."""


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


def admit(
    index: NDArray[np.int64], unfinished: NDArray[np.bool_], resident: int, rows: int, free: int
) -> tuple[NDArray[np.bool_], int]:
    """Where new blocks start, and how many hot ones must give up their slots for them.

    Full blocks take what is free but a slot for the next block of each row: demoting is cheap, so
    an arena kept empty would only make misses. Unfinished blocks are written every step: they may
    use the rest too, and after that the slots of the coldest blocks.

    Args:
        index: ``[N]`` position of each new block in its row.
        unfinished: ``[N]`` whether it is the unfinished block at the end of its row.
        resident: blocks at the start of a row that are always hot.
        rows: live rows (layers x sequences) that share the arena.
        free: hot slots that can be had without a demotion.

    Returns:
        ``[N]`` bool, hot from the start; and the slots to be freed under pressure.
    """
    hot = place(index, unfinished, resident, free - rows) | unfinished
    return hot, max(int(hot.sum()) - free, 0)


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
    order = coldest_first(blocks)
    return order[allowed[order]][: max(count, 0)]


def promotions(
    hot: BlockArrays,
    cold: BlockArrays,
    *,
    room: int,
    limit: int,
    min_frequency: float,
    margin: float = HYSTERESIS,
) -> list[tuple[int, int]]:
    """Which cold blocks to bring into the hot tier, and whose slots they take.

    Args:
        hot: blocks in the hot tier.
        cold: blocks whose only copy is cold.
        room: hot slots that may be filled without a demotion.
        limit: moves at most.
        min_frequency: accesses a window that a block needs to be promoted.
        margin: how many times the worth of the block that it replaces a cold block must have.

    Returns:
        Pairs (index into cold, index into hot or -1 for a free slot), hottest first.
    """
    cold_worth, hot_worth = worth(cold), worth(hot)
    with np.errstate(invalid="ignore"):
        wanted = np.flatnonzero(cold.movable & (cold.rate >= min_frequency))
    wanted = wanted[np.lexsort((cold.index[wanted], -cold_worth[wanted], cold.over_share[wanted]))]
    order = coldest_first(hot)
    givable = order[(hot.movable & ~hot.resident & ~np.isnan(hot.rate))[order]]
    pairs: list[tuple[int, int]] = []
    taken = 0
    for candidate in wanted[: max(limit, 0)]:
        if room > 0:
            room -= 1
            pairs.append((int(candidate), -1))
        elif taken < len(givable):
            victim = givable[taken]
            if cold_worth[candidate] < margin * hot_worth[victim]:
                break
            taken += 1
            pairs.append((int(candidate), int(victim)))
        else:
            break
    return pairs
