# SPDX-License-Identifier: Apache-2.0
"""Tiers behind one interface: budgets in bytes, arenas that hand out slots of one size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from kvpass.errors import OutOfMemoryError
from kvpass.runtime.memory import SLAB_BYTES, MemorySource


@dataclass
class Budget:
    """Bytes that one tier may hold; shared by its arenas.

    Attributes:
        capacity: bytes that may be taken from the memory source.
        taken: bytes of slabs taken so far.
        used: bytes of slots in use.
    """

    capacity: int
    taken: int = 0
    used: int = 0

    @property
    def usage(self) -> float:
        """Share of the capacity in use, 0 to 1."""
        return self.used / self.capacity if self.capacity else 1.0


class Slot:
    """Room for one block.

    Attributes:
        raw: uint8 ``[size]``, the bytes.
        address: of the first byte, a multiple of 128.
        fences: CUDA events that must have passed before the slot is written again.
    """

    __slots__ = ("address", "arena", "fences", "raw", "slab")

    def __init__(self, arena: Arena, slab: _Slab, raw: torch.Tensor) -> None:
        self.arena = arena
        self.slab = slab
        self.raw = raw
        self.address: int = raw.data_ptr()
        self.fences: list[Any] = []


class _Slab:
    __slots__ = ("free", "size", "total")

    def __init__(self, size: int, total: int) -> None:
        self.size = size
        self.total = total
        self.free: list[Slot] = []


class Arena:
    """Slots of one size in one tier. Not thread-safe: the manager holds its lock.

    Args:
        source: where slabs come from.
        budget: limit shared with the other arenas of the tier.
        slot_bytes: bytes of a slot, a multiple of 128.
    """

    def __init__(self, source: MemorySource, budget: Budget, slot_bytes: int) -> None:
        self.source = source
        self.budget = budget
        self.slot_bytes = slot_bytes
        self._slabs: list[_Slab] = []

    def allocate(self) -> Slot | None:
        """A slot, or None when the budget is spent.

        Raises:
            OutOfMemoryError: the budget allows it but the memory source has no room.
        """
        for slab in self._slabs:
            if slab.free:
                break
        else:
            grown = self._grow()
            if grown is None:
                return None
            slab = grown
        self.budget.used += self.slot_bytes
        return slab.free.pop()

    def room(self) -> int:
        """Slots that can be had within the budget."""
        free = sum(len(slab.free) for slab in self._slabs)
        return free + max(0, self.budget.capacity - self.budget.taken) // self.slot_bytes

    def free(self, slot: Slot) -> None:
        """Take a slot back; gives a slab back when it is empty and others have room."""
        slab = slot.slab
        slab.free.append(slot)
        self.budget.used -= self.slot_bytes
        if len(slab.free) == slab.total and any(s.free for s in self._slabs if s is not slab):
            self._slabs.remove(slab)
            self.budget.taken -= slab.size

    def _grow(self) -> _Slab | None:
        left = self.budget.capacity - self.budget.taken
        # A sixteenth of the tier at a time, so that layers of other shapes find room too.
        wanted = min(SLAB_BYTES, max(self.slot_bytes, self.budget.capacity // 16))
        count = min(left, wanted) // self.slot_bytes
        if count < 1:
            return None
        size = count * self.slot_bytes
        if self.source.name.startswith("pinned"):
            size = 1 << (size - 1).bit_length()  # torch pins powers of two: use all of it
            if size > left:
                size >>= 1
            if size < self.slot_bytes:
                return None
            count = size // self.slot_bytes
        try:
            raw = self.source.slab(size)
        except OutOfMemoryError:
            if self._slabs or self.budget.taken:
                # What is there goes on serving; the tier is simply smaller than it was promised.
                self.budget.capacity = self.budget.taken
                return None
            raise
        slab = _Slab(size, count)
        slab.free = [
            Slot(self, slab, raw[i * self.slot_bytes : (i + 1) * self.slot_bytes])
            for i in reversed(range(count))
        ]
        self._slabs.append(slab)
        self.budget.taken += size
        return slab
