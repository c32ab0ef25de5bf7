# SPDX-License-Identifier: Apache-2.0
"""The clairvoyant optimum: as many requests as possible that find their block hot."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

from kvpass.runtime.simulate.events import Tick


def optimum_hits(ticks: Sequence[Tick], slots: int, free: Sequence[int] = ()) -> int:
    """Hits of the best choice that knows the future (Belady, IBM Systems Journal 1966).

    A miss need not promote. Besides, a block may be made hot when it is created, and every block
    after the ticks in ``free``, which is where a policy that decides at the ends of windows may;
    so no policy of either kind has more hits.

    A request hits if its block stays hot since its last chance to become so. These stretches want
    slots, at most ``slots`` at a time; when there are too many, the one that ends last is given up,
    which is Belady's rule, and optimal for intervals that count the same.

    Args:
        ticks: what happens.
        slots: of the hot tier.
        free: ticks after which any block may become hot, ascending.
    """
    may, chance = set(free), -1
    since: dict[int, int] = {}
    begins: list[int] = []
    ends: list[int] = []
    now = 0
    for number, tick in enumerate(ticks):
        for block in tick.created.tolist():
            since[block] = now
        now += 1
        for block in tick.requests.tolist():
            begins.append(max(since[block], chance))
            ends.append(now)
            since[block] = now
            now += 1
        if number in may:
            chance = now
            now += 1
    return _most_intervals(begins, ends, slots)


def _most_intervals(begins: list[int], ends: list[int], slots: int) -> int:
    """Intervals that can be kept with at most ``slots`` at a time; ``ends`` ascend."""
    dropped = np.zeros(len(ends), dtype=bool)
    open_now: list[tuple[int, int]] = []  # the one that ends last on top
    count = oldest = 0
    for which in np.argsort(np.array(begins, dtype=np.int64), kind="stable").tolist():
        while ends[oldest] <= begins[which]:
            count -= not dropped[oldest]
            oldest += 1
        heapq.heappush(open_now, (-ends[which], which))
        count += 1
        if count > slots:
            _, last = heapq.heappop(open_now)
            dropped[last] = True
            count -= 1
    return int((~dropped).sum())
