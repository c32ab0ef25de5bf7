# SPDX-License-Identifier: Apache-2.0
"""Another size for a tier at run time: what has to leave it, and how its slabs are emptied.

A tier that becomes smaller first gives up bytes, then slabs. Copies that are there twice are
dropped; what is left is copied to the other tier. Then neighbouring slabs with the fewest slots in
use are closed, their blocks move to slots of the others, and their memory goes back. Blocks of a
sequence in a step stay until the step has ended, and so do slots that a stream may still read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch

from kvpass.errors import OutOfMemoryError
from kvpass.runtime.batch import Block
from kvpass.runtime.geometry import BlockGeometry
from kvpass.runtime.mover import Mover, events_of, movable
from kvpass.runtime.pool import Slab, Slot
from kvpass.runtime.tiers import Tier, Tiers
from kvpass.sizes import format_size


def _idle(block: Block) -> bool:
    """Whether a block may change its slot: no copy in flight, and nobody in a step with it."""
    return block.move is None and all(owner[0].active is None for owner in block.owners)


class Resizer:
    """Grows and shrinks the tiers of a manager. Needs the manager's lock.

    Args:
        tiers: the slots.
        mover: demotes, and has the copies in flight.
        blocks: gives all live blocks.
    """

    def __init__(self, tiers: Tiers, mover: Mover, blocks: Callable[[], list[Block]]) -> None:
        self.tiers = tiers
        self.mover = mover
        self.blocks = blocks

    @property
    def pending(self) -> bool:
        """Whether a tier still holds more than it may."""
        return self.tiers.hot.crowded or self.tiers.cold.crowded

    def resize(self, tier: Tier, capacity: int) -> None:
        """Let a tier hold ``capacity`` bytes from now on, and shrink it as far as possible now.

        Raises:
            OutOfMemoryError: the other tier has no room for what has to leave; nothing changed.
        """
        budget = self.tiers.budget(tier)
        before, budget.capacity = budget.capacity, capacity
        self._reopen(tier)
        try:
            if budget.crowded:
                self.mover.settle()
            self.shrink(tier)
        except BaseException:
            budget.capacity = max(before, budget.used)
            self._reopen(tier)
            raise
        over = budget.used - capacity
        if over > 0 and all(map(_idle, self.blocks())):
            budget.capacity = before
            self._reopen(tier)
            other: Tier = "cold" if tier == "hot" else "hot"
            raise OutOfMemoryError(
                f"{tier} = {format_size(capacity)} is too small by {format_size(over)}: {other} "
                f"({format_size(self.tiers.budget(other).capacity)}) has no room for what would "
                f"have to leave; raise {other} first, or release caches"
            )

    def resize_all(self, sizes: Mapping[Tier, int]) -> None:
        """Resize several tiers; what grows makes room for what has to leave the other.

        Raises:
            OutOfMemoryError: as :meth:`resize`; tiers before it keep their new size.
        """
        order = [(size < self.tiers.budget(tier).capacity, tier) for tier, size in sizes.items()]
        for _, tier in sorted(order):
            self.resize(tier, sizes[tier])

    def go_on(self) -> None:
        """What could not be done before, because a step was running; waits for nothing."""
        tiers: tuple[Tier, ...] = ("hot", "cold")
        for tier in tiers:
            budget = self.tiers.budget(tier)
            try:
                self.shrink(tier)
            except Exception:  # every block is still where it was: the next step tries again
                self.mover.counters.failed_moves += 1
                continue
            if budget.crowded and not budget.emptied and all(map(_idle, self.blocks())):
                # Nothing more can leave: what is there goes on serving.
                budget.capacity = max(budget.used, budget.taken)
                self._reopen(tier)

    def relieve(self, size: int) -> int:
        """Give ``size`` bytes of the device back, as far as nothing uses them now.

        Returns:
            Bytes given back; the rest follows when steps end.
        """
        budget = self.tiers.hot
        before = budget.taken
        budget.capacity = max(0, min(budget.capacity, before) - size)
        self.mover.settle()
        self.shrink("hot")
        return before - budget.taken

    def shrink(self, tier: Tier) -> None:
        """Give up bytes, then slabs, of a tier that holds more than its capacity."""
        budget = self.tiers.budget(tier)
        if not budget.crowded:
            return
        if budget.used > budget.capacity:
            self._drop_copies(tier)
        if budget.used > budget.capacity:
            self._move_out(tier)
        budget.reclaim()
        if budget.excess:
            self._empty_slabs(tier)
            budget.reclaim()

    def _reopen(self, tier: Tier) -> None:
        for arena in self.tiers.arenas(tier):
            arena.reopen()

    # ------------------------------------------------------------ giving up bytes

    def _drop_copies(self, tier: Tier) -> None:
        """Give up copies of blocks that the other tier has too; of the hot tier, the coldest."""
        budget = self.tiers.budget(tier)
        if tier == "hot":
            for geometry in self._geometries():
                over = -(-(budget.used - budget.capacity) // geometry.block_bytes)
                if over > 0:
                    self.mover.demote_some(geometry.block_bytes, over, pressure=True)
            return
        for block in self.blocks():
            if budget.used <= budget.capacity:
                return
            if block.hot is not None and movable(block):
                self.mover.forget_cold(block)

    def _geometries(self) -> Iterable[BlockGeometry]:
        return {block.geometry.block_bytes: block.geometry for block in self.blocks()}.values()

    def _move_out(self, tier: Tier) -> None:
        """Copy what only this tier has to the other one: the last tokens of a sequence first."""
        budget = self.tiers.budget(tier)
        mine = [block for block in self.blocks() if _idle(block) and _only_in(block, tier)]
        for block in sorted(mine, key=lambda block: block.full):
            if budget.used <= budget.capacity:
                return
            take = self.tiers.take_cold if tier == "hot" else self.tiers.take_hot
            target = take(block.geometry)
            if target is None:
                return
            self._relocate(block, tier, "cold" if tier == "hot" else "hot", target)

    # ------------------------------------------------------------ giving up slabs

    def _empty_slabs(self, tier: Tier) -> None:
        """Close the neighbours with the fewest slots in use; move their blocks to other slabs."""
        budget = self.tiers.budget(tier)
        slabs = [slab for arena in self.tiers.arenas(tier) for slab in arena.slabs]
        closed = _neighbours(slabs, budget.excess)
        for slab in closed:
            slab.arena.close(slab)
        users = {
            id(slot): block
            for block in self.blocks()
            if (slot := block.hot if tier == "hot" else block.cold) is not None
        }
        for slab in closed:
            for slot in slab.in_use:
                block = users.get(id(slot))
                if block is not None and _idle(block):
                    self._leave(block, slot, tier)

    def _leave(self, block: Block, slot: Slot, tier: Tier) -> None:
        """Take a block out of a closed slab, if there is anywhere to go."""
        target = slot.arena.spare()
        if target is not None:
            self._relocate(block, tier, tier, target)
        elif tier == "hot" and movable(block):
            self.mover.demote(block)
        elif tier == "cold" and block.hot is not None and movable(block):
            self.mover.forget_cold(block)
        elif _only_in(block, tier):
            take = self.tiers.take_cold if tier == "hot" else self.tiers.take_hot
            target = take(block.geometry)
            if target is not None:
                self._relocate(block, tier, "cold" if tier == "hot" else "hot", target)

    # -------------------------------------------------------------------- copies

    def _relocate(self, block: Block, source: Tier, target: Tier, slot: Slot) -> None:
        """Copy a block to another slot now, in order of what reads and writes it."""
        old: Slot = getattr(block, source)
        waiting = events_of(block)
        try:
            event = self._copy(block, old, slot, waiting)
        except BaseException:
            self.tiers.free(slot)
            raise
        setattr(block, source, None)
        setattr(block, target, slot)
        block.publish()
        self.mover.store_again(block)
        self.tiers.free(old, [event, *waiting])

    def _copy(self, block: Block, old: Slot, slot: Slot, waiting: list[Any]) -> Any:
        """Copy a block after what it waits for; returns the event after the copy, None on a CPU."""
        if not (old.raw.is_cuda or slot.raw.is_cuda):
            for before in (*waiting, *old.fences, *slot.fences):
                before.synchronize()
            slot.fences = []
            np.copyto(slot.raw.numpy(), old.raw.numpy())
            return None
        stream = torch.cuda.current_stream(self.tiers.device)
        for before in (*waiting, *old.fences):
            stream.wait_event(before)
        self.tiers.ready(slot).raw.copy_(old.raw, non_blocking=True)
        event = torch.cuda.Event()
        event.record(stream)
        for batch in {owner[0] for owner in block.owners}:
            batch.event = event  # its next step may run on another stream
        return event


def _neighbours(slabs: list[Slab], size: int) -> list[Slab]:
    """The run of slabs with ``size`` bytes or more that has the least in use.

    Neighbours in memory, because a device takes back whole segments only, which hold several.
    """
    ordered = sorted(slabs, key=lambda slab: slab.raw.data_ptr())
    costs = [
        -1 if slab.closed else (len(slab.slots) - len(slab.free)) * slab.arena.slot_bytes
        for slab in ordered
    ]
    best, least = ordered, math.inf
    first = total = cost = 0
    for last, slab in enumerate(ordered):
        total += slab.size
        cost += costs[last]
        while total - ordered[first].size >= size:
            total -= ordered[first].size
            cost -= costs[first]
            first += 1
        if total >= size and cost < least:
            best, least = ordered[first : last + 1], cost
    return best


def _only_in(block: Block, tier: Tier) -> bool:
    return (block.cold if tier == "hot" else block.hot) is None
