# SPDX-License-Identifier: Apache-2.0
"""Tiers behind one interface: budgets in bytes, arenas that hand out slots of one size.

An arena grows and shrinks by slabs at run time (a slab allocator, Bonwick 1994). A tier may be made
smaller than what it holds: then nothing more is handed out, and the mover empties slabs.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from kvpass.errors import OutOfMemoryError
from kvpass.runtime.memory import SLAB_BYTES, MemorySource

MAX_WASTE = 0.05
"""Share of a slab that may be left over by slots that do not divide it."""

MAX_PAGES = 16
"""Pages in a slab at most, unless one slot needs more."""


@dataclass
class Budget:
    """Bytes that one tier may hold; shared by its arenas.

    Attributes:
        capacity: bytes that may be in use; less than ``promised`` while the memory is short.
        taken: bytes of slabs taken so far.
        used: bytes of slots in use.
        promised: bytes that were asked for.
    """

    capacity: int
    taken: int = 0
    used: int = 0
    promised: int = 0

    def __post_init__(self) -> None:
        """What is promised is what the budget starts with."""
        self.promised = self.promised or self.capacity

    @property
    def usage(self) -> float:
        """Share of the capacity in use, 0 to 1."""
        return self.used / self.capacity if self.capacity else 1.0

    @property
    def excess(self) -> int:
        """Bytes of slabs above the capacity, to be given back."""
        return max(0, self.taken - self.capacity)


class Slot:
    """Room for one block.

    Attributes:
        raw: uint8 ``[size]``, the bytes.
        address: of the first byte, a multiple of 128.
        slab: the slab it is a part of.
        index: position in the slab.
        block: the block that lies here, or None.
        fences: CUDA events that must have passed before the slot is written again.
    """

    __slots__ = ("address", "arena", "block", "fences", "index", "raw", "slab")

    def __init__(self, arena: Arena, slab: Slab, index: int) -> None:
        size = arena.slot_bytes
        self.arena = arena
        self.slab = slab
        self.index = index
        self.raw = slab.raw[index * size : (index + 1) * size]
        self.address: int = self.raw.data_ptr()
        self.block: Any = None
        self.fences: list[Any] = []

    def __lt__(self, other: Slot) -> bool:
        """Order of addresses within a slab, from the last to the first."""
        return self.index > other.index


class Slab:
    """Memory of one allocation, divided into slots.

    Attributes:
        raw: uint8 ``[size]``.
        slots: all its slots.
        free: those not in use, the one with the lowest address last.
    """

    __slots__ = ("free", "raw", "size", "slots")

    def __init__(self, arena: Arena, raw: torch.Tensor, size: int, count: int) -> None:
        self.raw = raw
        self.size = size
        self.slots = [Slot(arena, self, i) for i in range(count)]
        self.free = self.slots[::-1]

    @property
    def empty(self) -> bool:
        """No slot is in use."""
        return len(self.free) == len(self.slots)

    @property
    def live(self) -> list[Slot]:
        """Slots in use."""
        free = {slot.index for slot in self.free}
        return [slot for slot in self.slots if slot.index not in free]

    def drop(self) -> None:
        """Let go of the memory now: slots and slab refer to each other."""
        for slot in self.slots:
            del slot.raw
        del self.raw
        self.slots = self.free = []


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
        if slab is None:
            return None
        self.budget.used += self.slot_bytes
        self.free_slots -= 1
        slot = slab.free.pop()
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
        slot.block = None
        bisect.insort(slab.free, slot)
        self.free_slots += 1
        self._open[slab] = None
        self.budget.used -= self.slot_bytes
        if slab.empty and (len(self._open) > 1 or self.budget.excess):
            self.give_back(slab)

    def give_back(self, slab: Slab) -> bool:
        """Return the memory of an empty slab; False while a stream may still use it."""
        assert slab.empty, "a slab with slots in use"
        if not all(event.query() for slot in slab.slots for event in slot.fences):
            return False
        del self.slabs[slab], self._open[slab]
        self.free_slots -= len(slab.slots)
        self.budget.taken -= slab.size
        slab.drop()
        return True

    def empty_slabs(self) -> Iterator[Slab]:
        """Slabs without a slot in use."""
        return (slab for slab in list(self._open) if slab.empty)

    def by_live(self) -> list[Slab]:
        """Slabs, those with the fewest slots in use first: the cheapest to empty."""
        return sorted(self.slabs, key=lambda slab: len(slab.slots) - len(slab.free))

    def _grow(self) -> Slab | None:
        left = self.budget.capacity - self.budget.taken
        size, count = self._slab_size(left)
        if count < 1:
            return None
        try:
            raw = self.source.slab(size)
        except OutOfMemoryError:
            if self.slabs or self.budget.taken:
                # What is there goes on serving; the tier is smaller until memory is free again.
                self.budget.capacity = self.budget.taken
                return None
            raise
        slab = Slab(self, raw, size, count)
        self.slabs[slab] = self._open[slab] = None
        self.free_slots += count
        self.budget.taken += size
        return slab

    def _slab_size(self, left: int) -> tuple[int, int]:
        """Bytes and slots of the next slab, of the ``left`` bytes that may be taken."""
        # A sixteenth of the tier at most, so that layers of other shapes find room too.
        wanted = min(
            slab_bytes(self.slab_bytes, self.slot_bytes),
            max(self.slot_bytes, self.budget.capacity // 16),
        )
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
