# SPDX-License-Identifier: Apache-2.0
"""Blocks between the tiers: write-through, demotion, promotion, and the accounting of copies."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from kvpass.errors import KVPassError
from kvpass.runtime import policy
from kvpass.runtime.batch import Block
from kvpass.runtime.geometry import BlockGeometry
from kvpass.runtime.metrics import Counters, LinkRate
from kvpass.runtime.migrate import Copier, Move
from kvpass.runtime.pool import Slot
from kvpass.runtime.ranges import ranged
from kvpass.runtime.tiers import Tiers


def events_of(block: Block) -> list[Any]:
    """Events after the last steps that may have read or written a block."""
    return [owner[0].event for owner in block.owners if owner[0].event is not None]


def movable(block: Block) -> bool:
    """Whether a block may change place now: written through, and nobody in a step with it."""
    return (
        block.full
        and block.cold is not None
        and block.move is None
        and all(owner[0].active is None for owner in block.owners)
    )


def arrays(blocks: list[Block]) -> policy.BlockArrays:
    """The metadata that policy decides on."""
    return policy.BlockArrays(
        frequency=np.array([b.frequency for b in blocks], dtype=np.float64),
        heat=np.array([b.heat for b in blocks], dtype=np.uint8),
        index=np.array([b.index for b in blocks], dtype=np.int64),
        resident=np.array([b.resident for b in blocks], dtype=bool),
        movable=np.array([movable(b) for b in blocks], dtype=bool),
    )


class Mover:
    """Changes where blocks lie. Needs the manager's lock.

    Args:
        tiers: the slots.
        copier: runs copies beside compute.
        counters: counts what was done.
        blocks: gives all live blocks.
        min_frequency: accesses a window below which a block may be demoted.
    """

    def __init__(
        self,
        tiers: Tiers,
        copier: Copier,
        counters: Counters,
        blocks: Callable[[], list[Block]],
        min_frequency: float,
    ) -> None:
        self.tiers = tiers
        self.copier = copier
        self.counters = counters
        self.blocks = blocks
        self.min_frequency = min_frequency
        self.link = LinkRate()
        self._moves: list[Move] = []
        self._backlog: OrderedDict[Block, None] = OrderedDict()

    # ------------------------------------------------------------------ copies

    @property
    def in_flight(self) -> list[Move]:
        """Copies that were started and are not accounted for yet."""
        return self._moves

    @property
    def backlog(self) -> int:
        """Full blocks that wait for a copy to the cold tier to be started."""
        return len(self._backlog)

    def write_through(self, blocks: Iterable[Block]) -> None:
        """Copy blocks that became full to the cold tier, in the background, once."""
        self._backlog.update(dict.fromkeys(block for block in blocks if block.cold is None))
        for _ in range(len(self._backlog)):
            block = next(iter(self._backlog))
            if block.full and block.cold is None and block.move is None:
                self._backlog.move_to_end(block)
                target = self._take_cold(block)
                if target is None:
                    # No room below: the block stays hot, and is tried again when a step ends.
                    break
                assert block.hot is not None
                move = Move("store", block, block.hot, target, events_of(block))
                if not self._submit(move):
                    break
            del self._backlog[block]

    def _take_cold(self, block: Block) -> Slot | None:
        """A cold slot for a copy that nobody waits for; None if there is none."""
        try:
            return self.tiers.take_cold(block.geometry)
        except KVPassError:  # the directory has gone: whoever needs the room is told
            self.counters.failed_moves += 1
            return None

    def promote(self, block: Block) -> bool:
        """Start to copy a cold block into the hot tier; False when there is no room."""
        assert block.cold is not None
        target = self.tiers.take_hot(block.geometry)
        if target is None:
            return False
        return self._submit(Move("load", block, block.cold, target, []))

    @ranged("kvpass::migrate")
    def _submit(self, move: Move) -> bool:
        queued = False
        try:
            queued = self.copier.submit(move)
        finally:
            if not queued:
                self.tiers.free(move.target)
        if not queued:
            return False
        move.block.move = move
        self._moves.append(move)
        return True

    @ranged("kvpass::publish")
    def collect(self) -> None:
        """Account for copies that are done; publish what they moved."""
        moves, self._moves = self._moves, []
        try:
            while moves:
                move = moves.pop(0)
                in_step = any(owner[0].active is not None for owner in move.block.owners)
                if in_step or not move.done():
                    self._moves.append(move)
                else:
                    self._account(move)
        finally:
            self._moves += moves

    def _account(self, move: Move) -> None:
        block: Block = move.block
        block.move = None
        if move.error is None and block.owners and move.kind == "load":
            move.error = self._publish_load(block, move.target)
        if move.error is not None or not block.owners:
            # The old copy is untouched; a block nobody owns any more goes altogether.
            self.tiers.free(move.target)
            self.counters.failed_moves += move.error is not None
            if not block.owners:
                self.discard(block)
            elif move.kind == "store":
                self._backlog[block] = None  # tried again when a step ends
        elif move.kind == "store":
            block.cold = move.target
            self.counters.stored_blocks += 1
            self.counters.stored_bytes += block.geometry.payload_bytes
            self.counters.store_seconds += self.link.note(move)
        else:
            self.counters.loaded_blocks += 1
            self.counters.loaded_bytes += block.geometry.payload_bytes
            self.counters.load_seconds += self.link.note(move)

    @staticmethod
    def _publish_load(block: Block, slot: Slot) -> BaseException | None:
        """Let readers use a copy that has arrived; on an error, they go on with the old one."""
        block.hot = slot
        try:
            block.publish()
        except Exception as error:
            block.hot = None
            return error
        return None

    def settle(self) -> None:
        """Wait for all copies in flight and account for them; those that fail are not repeated."""
        while True:
            before = list(self._moves)
            for move in before:
                move.wait()
            failed, arrived = self.counters.failed_moves, self._arrived
            self.collect()
            if self.counters.failed_moves > failed and self._arrived == arrived:
                return  # what fails is tried again when a step ends, not for ever here
            self.write_through(())
            if self._moves:
                if self._moves == before:
                    return  # their owners are in a step
            elif self._backlog and self.copier.depth():
                time.sleep(5e-4)  # the queue was full, and is not known to be empty yet
            else:
                return

    @property
    def _arrived(self) -> int:
        return self.counters.stored_blocks + self.counters.loaded_blocks

    # ---------------------------------------------------------- demotion, heat

    def demote(self, block: Block) -> None:
        """Give up the hot copy: the cold one was written long ago, so no byte moves."""
        assert block.hot is not None and block.cold is not None
        hot, block.hot = block.hot, None
        try:
            block.publish()
        except BaseException:
            block.hot = hot
            raise
        self.tiers.free(hot, events_of(block))
        self.counters.demoted_blocks += 1

    def demote_some(self, geometry: BlockGeometry, count: int, *, pressure: bool) -> int:
        """Demote up to ``count`` blocks of a size, the coldest first; returns how many."""
        hot = [
            block
            for block in self.blocks()
            if block.hot is not None and block.geometry.block_bytes == geometry.block_bytes
        ]
        chosen = policy.victims(
            arrays(hot), count, min_frequency=self.min_frequency, pressure=pressure
        )
        for i in chosen:
            self.demote(hot[i])
        return len(chosen)

    def relieve(self) -> None:
        """Demote rarely accessed blocks while the hot tier is above its threshold."""
        if self.tiers.excess() <= 0:
            return
        seen: dict[int, BlockGeometry] = {b.geometry.block_bytes: b.geometry for b in self.blocks()}
        for size, geometry in seen.items():
            over = self.tiers.excess()
            if over > 0:
                self.demote_some(geometry, -(-over // size), pressure=False)

    def promote_some(self) -> None:
        """Bring the hottest cold blocks in, into free slots or those of colder blocks."""
        blocks = self.blocks()
        for size in self.tiers.sizes:
            mine = [b for b in blocks if b.geometry.block_bytes == size]
            hot = [b for b in mine if b.hot is not None]
            cold = [b for b in mine if b.hot is None]
            pairs = policy.promotions(
                arrays(hot),
                arrays(cold),
                room=max(self.tiers.room(size), 0),
                limit=max(1, self.tiers.hot_slots(size) // 8),
                min_frequency=self.min_frequency,
            )
            for candidate, victim in pairs:
                if victim >= 0:
                    self.demote(hot[victim])
                if not self.promote(cold[candidate]):
                    break

    # -------------------------------------------------------------- end of life

    def spare_cold(self, geometry: BlockGeometry) -> Any:
        """A cold slot whose block has a hot copy too, for when the cold tier is full; or None."""
        for block in self.blocks():
            if (
                block.hot is not None
                and block.geometry.block_bytes == geometry.block_bytes
                and movable(block)
            ):
                slot, block.cold = block.cold, None
                assert slot is not None
                slot.fences.extend(events_of(block))
                self._backlog[block] = None
                return slot
        return None

    def forget_cold(self, block: Block) -> None:
        """Give up the cold copy of a block that is hot too, until there is room again."""
        slot, block.cold = block.cold, None
        assert slot is not None and block.hot is not None
        self.tiers.free(slot, events_of(block))
        self._backlog[block] = None

    def make_mutable(self, block: Block) -> None:
        """A block that was full and was cropped: its cold copy would go stale."""
        if block.move is not None:
            block.move.wait()
            self.collect()
        if block.move is not None:
            # A step inside another: nothing is published now, and later the copy would be stale.
            self._moves.remove(block.move)
            self.tiers.free(block.move.target)
            block.move = None
        block.full = False
        self._backlog.pop(block, None)
        if block.hot is not None and block.cold is not None:
            cold, block.cold = block.cold, None
            self.tiers.free(cold, events_of(block))

    def discard(self, block: Block, events: Iterable[Any] = ()) -> None:
        """Free the copies of a block that nobody owns."""
        waiting = list(events)
        for slot in (block.hot, block.cold):
            if slot is not None:
                self.tiers.free(slot, waiting)
        block.hot = block.cold = None
        block.forget()
        self._backlog.pop(block, None)

    def leave(self, block: Block, events: Iterable[Any]) -> None:
        """An owner gave the block up: what it launched must have passed before others write there.

        Args:
            block: still owned by others, or with a copy in flight.
            events: after the last steps of those who may have read it.
        """
        for slot in (block.hot, block.cold):
            if slot is not None:
                slot.fences = [event for event in slot.fences if not event.query()]
                slot.fences.extend(events)
