# SPDX-License-Identifier: Apache-2.0
"""Tiers behind one interface: budgets in bytes, arenas that hand out slots of one size.

An arena grows and shrinks by slabs at run time (a slab allocator, Bonwick 1994).
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field
from typing import Any

import torch

from kvpass.errors import OutOfMemoryError
from kvpass.runtime.memory import SLAB_BYTES, MemorySource

MAX_WASTE = 0.05
"""Share of a slab that may be left over by slots that do not divide it."""

MAX_PAGES = 16
"""Pages in the first slabs at most, unless one slot needs more."""

GROWTH = 8
"""An arena grows by a part of this many of itself: slabs of a large one are large."""

SPARE = 4
"""Empty slabs are kept for the next blocks up to a part of this many of what is in use."""


@dataclass
class Budget:
    """Bytes that one tier may hold; shared by its arenas.

    Attributes:
        capacity: bytes that may be taken from the memory source.
        taken: bytes of slabs taken so far.
        used: bytes of slots in use.
        emptied: slabs that are given back as soon as no stream uses them.
        refused: what the memory behind it answered last, where it gave no slab; None since it did.
    """

    capacity: int
    taken: int = 0
    used: int = 0
    emptied: dict[Slab, None] = field(default_factory=dict)
    refused: OutOfMemoryError | None = None

    @property
    def usage(self) -> float:
        """Share of the capacity in use, 0 to 1."""
        return self.used / self.capacity if self.capacity else 1.0

    @property
    def excess(self) -> int:
        """Bytes of slabs above the capacity, to be given back."""
        return max(0, self.taken - self.capacity)

    @property
    def crowded(self) -> bool:
        """More is in use, or taken, than the capacity allows since it was lowered."""
        return self.used > self.capacity or self.taken > self.capacity

    def reclaim(self, *, all_: bool = False) -> None:
        """Give back emptied slabs, of whichever arena, that no stream uses any more.

        Args:
            all_: also those that are kept for the next blocks.
        """
        for slab in list(self.emptied):
            slab.arena.give_back(slab, all_=all_)


class Slot:
    """Room for one block.

    Attributes:
        raw: uint8 ``[size]``, the bytes.
        address: of the first byte, a multiple of 128.
        slab: the slab it is a part of.
        index: position in the slab.
        fences: CUDA events that must have passed before the slot is written again.
    """

    __slots__ = ("address", "arena", "fences", "index", "raw", "slab")

    def __init__(self, arena: Arena, slab: Slab, index: int) -> None:
        size = arena.slot_bytes
        self.arena = arena
        self.slab = slab
        self.index = index
        self.raw = slab.raw[index * size : (index + 1) * size]
        self.address: int = self.raw.data_ptr()
        self.fences: list[Any] = []


class Slab:
    """Memory of one allocation, divided into slots.

    Attributes:
        arena: whose it is.
        raw: uint8 ``[size]``.
        slots: all its slots.
        free: positions of those not in use, each as its complement, ascending: the slot with the
            lowest address comes last.
        closed: hands out no more slots, so that it can be given back once those in use are free.
    """

    __slots__ = ("arena", "closed", "free", "raw", "size", "slots")

    def __init__(self, arena: Arena, raw: torch.Tensor, size: int, count: int) -> None:
        self.arena = arena
        self.raw = raw
        self.size = size
        self.slots = [Slot(arena, self, i) for i in range(count)]
        self.free = [~i for i in range(count - 1, -1, -1)]
        self.closed = False

    @property
    def empty(self) -> bool:
        """No slot is in use."""
        return len(self.free) == len(self.slots)

    @property
    def in_use(self) -> list[Slot]:
        """Slots that hold something."""
        free = set(self.free)
        return [slot for slot in self.slots if ~slot.index not in free]

    def drop(self) -> None:
        """Let go of the memory now: slots and slab refer to each other."""
        for slot in self.slots:
            del slot.raw
        del self.raw
        self.slots, self.free = [], []


class Arena:
    """Slots of one size in one tier. Not thread-safe: the manager holds its lock.

    Args:
        source: where slabs come from.
        budget: limit shared with the other arenas of the tier.
        slot_bytes: bytes of a slot, a multiple of 128.
        slab_bytes: bytes by which the arena grows, as far as slots fit into it.
    """

    def __init__(
        self, source: MemorySource, budget: Budget, slot_bytes: int, slab_bytes: int = SLAB_BYTES
    ) -> None:
        self.source = source
        self.budget = budget
        self.slot_bytes = slot_bytes
        self.slab_bytes = slab_bytes
        self.free_slots = 0
        self.used_slots = 0
        self.slabs: dict[Slab, None] = {}  # in order of age
        self._open: dict[Slab, None] = {}  # those with a free slot

    def allocate(self) -> Slot | None:
        """A slot, or None when the budget is spent; neighbours follow each other.

        Raises:
            OutOfMemoryError: the budget allows it but the memory source has no room.
        """
        if self.budget.used + self.slot_bytes > self.budget.capacity:
            return None
        slab = next(iter(self._open), None) or self._grow()
        return None if slab is None else self._take(slab)

    def spare(self) -> Slot | None:
        """A slot of a slab that is not closed, for the bytes of one that is; grows nothing."""
        slab = next(iter(self._open), None)
        return None if slab is None else self._take(slab)

    def _take(self, slab: Slab) -> Slot:
        self.budget.used += self.slot_bytes
        self.free_slots -= 1
        self.used_slots += 1
        slot = slab.slots[~slab.free.pop()]
        self.budget.emptied.pop(slab, None)
        if not slab.free:
            del self._open[slab]
        return slot

    def room(self) -> int:
        """Slots that can be had within the budget."""
        unused = max(0, self.budget.capacity - self.budget.used) // self.slot_bytes
        can_grow = max(0, self.budget.capacity - self.budget.taken) // self.slot_bytes
        return min(unused, self.free_slots + can_grow)

    def free(self, slot: Slot) -> None:
        """Take a slot back; gives a slab back when it is empty and others have room."""
        slab = slot.slab
        bisect.insort(slab.free, ~slot.index)
        self.used_slots -= 1
        if not slab.closed:
            self.free_slots += 1
            self._open[slab] = None
        self.budget.used -= self.slot_bytes
        if slab.empty:
            self.budget.emptied[slab] = None
            self.budget.reclaim()

    def close(self, slab: Slab) -> None:
        """Hand out no more slots of a slab; it is given back once those in use are free."""
        if slab.closed:
            return
        slab.closed = True
        if slab.free:
            del self._open[slab]
            self.free_slots -= len(slab.free)
        if slab.empty:
            self.budget.emptied[slab] = None

    def reopen(self) -> None:
        """Hand out slots of closed slabs again."""
        for slab in self.slabs:
            if slab.closed:
                slab.closed = False
                self.free_slots += len(slab.free)
                if slab.free:
                    self._open[slab] = None

    def give_back(self, slab: Slab, *, all_: bool = False) -> None:
        """Return the memory of an empty slab, unless it is kept as room or a stream uses it.

        Args:
            slab: to give back.
            all_: also if it is kept for the next blocks.
        """
        assert slab.empty, "a slab with slots in use"
        others = self.free_slots - len(slab.slots)
        kept = others < max(1, self.used_slots // SPARE) and not (slab.closed or all_)
        if kept and not self.budget.excess:
            return
        if not all(event.query() for slot in slab.slots for event in slot.fences):
            return
        del self.slabs[slab], self.budget.emptied[slab]
        if not slab.closed:
            del self._open[slab]
            self.free_slots -= len(slab.slots)
        self.budget.taken -= slab.size
        slab.drop()

    def _grow(self) -> Slab | None:
        self.budget.reclaim()
        left = self.budget.capacity - self.budget.taken
        if left < self.slot_bytes:
            self.budget.reclaim(all_=True)
            left = self.budget.capacity - self.budget.taken
        size, count = self._slab_size(left)
        if count < 1:
            return None
        try:
            with torch.inference_mode(False):  # a later step may run outside inference mode
                slab = Slab(self, self.source.slab(size), size, count)
        except OutOfMemoryError as error:
            self.budget.refused = error
            if self.slabs or self.budget.taken:
                # What is there goes on serving; the tier is simply smaller than it was promised.
                self.budget.capacity = self.budget.taken
                return None
            raise
        self.budget.refused = None
        self.slabs[slab] = self._open[slab] = None
        self.free_slots += count
        self.budget.taken += size
        return slab

    def _slab_size(self, left: int) -> tuple[int, int]:
        """Bytes and slots of the next slab, of the ``left`` bytes that may be taken."""
        # A sixteenth of the tier at most, so that layers of other shapes find room too.
        first = slab_bytes(self.slab_bytes, self.slot_bytes)
        grown = min(sum(slab.size for slab in self.slabs) // GROWTH, SLAB_BYTES) // first * first
        wanted = min(max(first, grown), max(self.slot_bytes, self.budget.capacity // 16))
        count = min(left, wanted) // self.slot_bytes
        size = count * self.slot_bytes
        if count >= 1 and self.source.name.startswith("pinned"):
            size = 1 << (size - 1).bit_length()  # torch pins powers of two: use all of it
            if size > left:
                size >>= 1
            count = size // self.slot_bytes
        return size, count


def slab_bytes(page_size: int, slot_bytes: int) -> int:
    """Bytes of a slab: the fewest pages that slots fill up to ``MAX_WASTE``.

    Args:
        page_size: bytes by which an arena grows and shrinks.
        slot_bytes: bytes of a slot.

    Returns:
        A multiple of ``page_size``: with ``MAX_PAGES`` pages at most, or as many as one slot needs.
    """
    least = -(-slot_bytes // page_size)
    sizes = [pages * page_size for pages in range(least, max(least, MAX_PAGES) + 1)]
    for size in sizes:
        if size % slot_bytes <= MAX_WASTE * size:
            return size
    return min(sizes, key=lambda size: size % slot_bytes / size)
