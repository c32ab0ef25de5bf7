# SPDX-License-Identifier: Apache-2.0
"""Which blocks start in the hot tier, which leave it, and which are brought in."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvpass.runtime.policy.arrays import BlockArrays
from kvpass.runtime.policy.heat import worth
from kvpass.runtime.policy.order import coldest

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
    if count <= 0:
        return np.zeros(0, dtype=np.int64)
    allowed = blocks.movable.copy()
    if not pressure:
        with np.errstate(invalid="ignore"):
            allowed &= ~blocks.resident & (blocks.frequency < min_frequency)
    return coldest(blocks, np.flatnonzero(allowed), count)


def promotions(
    blocks: BlockArrays,
    hot: NDArray[np.bool_],
    *,
    room: int,
    limit: int,
    min_frequency: float,
    margin: float = HYSTERESIS,
) -> list[tuple[int, int]]:
    """Which cold blocks to bring into the hot tier, and whose slots they take.

    A block within the share of its sequence takes the slot of one beyond the share of its own,
    whatever the two are worth; never the other way round.

    Args:
        blocks: hot and cold ones.
        hot: ``[N]`` those in the hot tier.
        room: hot slots that may be filled without a demotion.
        limit: moves at most.
        min_frequency: accesses a window that a block needs to be promoted.
        margin: how many times the worth of the block that it replaces a cold block must have.

    Returns:
        Pairs (block, block whose slot it takes or -1 for a free slot), those worth most first.
    """
    value = worth(blocks)
    wanted = np.flatnonzero(~hot & blocks.movable & (blocks.rate >= min_frequency))
    limit = min(limit, len(wanted))
    room = min(max(room, 0), limit)
    givable = np.zeros(0, dtype=np.int64)
    if room < limit:
        givable = np.flatnonzero(hot & blocks.movable & ~blocks.resident & ~np.isnan(blocks.rate))
        # Only what is worth more than the least of them can take a slot: few, when all is calm.
        least = value[givable].min(initial=np.inf)
        worthy = value[wanted] >= margin * least
        if (blocks.over_share[givable] > 0).any():
            worthy |= blocks.over_share[wanted] == 0
        limit = min(limit, room + int(worthy.sum()))
    if limit <= 0:
        return []
    wanted = wanted[_hottest(value[wanted], blocks.index[wanted], blocks.over_share[wanted], limit)]
    pairs = [(int(block), -1) for block in wanted[:room]]
    givable = coldest(blocks, givable, limit - room)
    for block, victim in zip(wanted[room:].tolist(), givable.tolist(), strict=False):
        due, beyond = blocks.over_share[block] == 0, blocks.over_share[victim] > 0
        if not due and not beyond:
            break
        if not (due and beyond) and value[block] < margin * value[victim]:
            break
        pairs.append((block, victim))
    return pairs


def _hottest(
    value: NDArray[np.float64],
    index: NDArray[np.signedinteger[Any]],
    over_share: NDArray[np.float64],
    count: int,
) -> NDArray[np.int64]:
    """The ``count`` that are promoted first: within their share, worth most, earliest."""
    likely = np.arange(len(value))
    if count < len(value) and (over_share == over_share[0]).all():
        bar = np.partition(value, len(value) - count)[len(value) - count]
        likely = np.flatnonzero(value >= bar)
    order = np.lexsort((index[likely], -value[likely], over_share[likely]))
    return likely[order[:count]]
