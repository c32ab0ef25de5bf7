# SPDX-License-Identifier: Apache-2.0
"""Classic replacement policies. Each promotes on every miss, as a cache that must hold what it
reads does, and learns of every request at once.
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections import OrderedDict
from typing import Protocol


class Classic(Protocol):
    """A policy with a fixed number of slots."""

    def request(self, block: int) -> bool:
        """Whether the block was hot; it is afterwards."""
        ...

    def create(self, block: int) -> None:
        """A block appears; it is written, so it takes a slot, but nobody asked for it."""
        ...


class LRU:
    """Least recently used."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self._hot: OrderedDict[int, None] = OrderedDict()

    def request(self, block: int) -> bool:
        """See :class:`Classic`."""
        hit = block in self._hot
        self.create(block)
        return hit

    def create(self, block: int) -> None:
        """See :class:`Classic`."""
        self._hot[block] = None
        self._hot.move_to_end(block)
        if len(self._hot) > self.slots:
            self._hot.popitem(last=False)


class _Ranked(ABC):
    """The hot block of the lowest rank goes; ranks of blocks that left are remembered."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self._hot: set[int] = set()
        self._rank: dict[int, tuple[float, ...]] = {}
        self._heap: list[tuple[tuple[float, ...], int]] = []
        self._now = 0

    def request(self, block: int) -> bool:
        """See :class:`Classic`."""
        hit = block in self._hot
        self.create(block)
        return hit

    def create(self, block: int) -> None:
        """See :class:`Classic`."""
        if not self.slots:
            return
        self._now += 1
        if block not in self._hot and len(self._hot) >= self.slots:
            self._evict()
        self._hot.add(block)
        self._rank[block] = self._next(self._rank.get(block))
        heapq.heappush(self._heap, (self._rank[block], block))

    def _evict(self) -> None:
        while True:
            rank, block = heapq.heappop(self._heap)
            if block in self._hot and self._rank[block] == rank:
                self._hot.remove(block)
                return

    @abstractmethod
    def _next(self, rank: tuple[float, ...] | None) -> tuple[float, ...]:
        """Rank of a block after a request; the lowest is evicted first."""


class LFU(_Ranked):
    """Least frequently used, counted since the block's creation; ties go by recency."""

    def _next(self, rank: tuple[float, ...] | None) -> tuple[float, ...]:
        return ((rank[0] if rank else 0) + 1, self._now)


class LRU2(_Ranked):
    """LRU-K with K = 2 (O'Neil, O'Neil and Weikum, SIGMOD 1993): the oldest second-last access."""

    def _next(self, rank: tuple[float, ...] | None) -> tuple[float, ...]:
        return (rank[1] if rank else 0, self._now)


class ARC:
    """Adaptive replacement cache (Megiddo and Modha, FAST 2003), as its figure 4."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self._target = 0.0  # p: wanted size of t1
        self._t1: OrderedDict[int, None] = OrderedDict()  # seen once, hot
        self._t2: OrderedDict[int, None] = OrderedDict()  # seen again, hot
        self._b1: OrderedDict[int, None] = OrderedDict()  # seen once, left
        self._b2: OrderedDict[int, None] = OrderedDict()  # seen again, left

    def request(self, block: int) -> bool:
        """See :class:`Classic`."""
        hit = block in self._t1 or block in self._t2
        self.create(block)
        return hit

    def create(self, block: int) -> None:
        """See :class:`Classic`."""
        t1, t2, b1, b2 = self._t1, self._t2, self._b1, self._b2
        if not self.slots:
            return
        if block in t1 or block in t2:
            (t1 if block in t1 else t2).pop(block)
            t2[block] = None
        elif block in b1:
            self._target = min(self.slots, self._target + max(1.0, len(b2) / len(b1)))
            self._replace(block)
            del b1[block]
            t2[block] = None
        elif block in b2:
            self._target = max(0.0, self._target - max(1.0, len(b1) / len(b2)))
            self._replace(block)
            del b2[block]
            t2[block] = None
        else:
            self._first(block)

    def _first(self, block: int) -> None:
        t1, t2, b1, b2 = self._t1, self._t2, self._b1, self._b2
        if len(t1) + len(b1) == self.slots:
            if len(t1) < self.slots:
                b1.popitem(last=False)
                self._replace(block)
            else:
                t1.popitem(last=False)
        elif len(t1) + len(b1) < self.slots:
            total = len(t1) + len(t2) + len(b1) + len(b2)
            if total >= self.slots:
                if total == 2 * self.slots:
                    b2.popitem(last=False)
                self._replace(block)
        t1[block] = None

    def _replace(self, block: int) -> None:
        t1, t2 = self._t1, self._t2
        size = len(t1)
        if size and (size > self._target or (block in self._b2 and size == self._target)):
            left, _ = t1.popitem(last=False)
            self._b1[left] = None
        elif t2:
            left, _ = t2.popitem(last=False)
            self._b2[left] = None


CLASSICS: dict[str, type[LRU] | type[LFU] | type[ARC] | type[LRU2]] = {
    "LRU": LRU,
    "LFU": LFU,
    "ARC": ARC,
    "LRU-2": LRU2,
}
