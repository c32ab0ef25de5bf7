# SPDX-License-Identifier: Apache-2.0
"""Blocks between the tiers: write-through, demotion, promotion, and the accounting of copies."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Hashable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvpass.config import MemoryConfig
from kvpass.errors import KVPassError
from kvpass.runtime import policy
from kvpass.runtime.batch import Block
from kvpass.runtime.columns import Columns
from kvpass.runtime.geometry import BlockGeometry
from kvpass.runtime.metrics import Counters, LinkRate
from kvpass.runtime.migrate import Copier
from kvpass.runtime.move import Move
from kvpass.runtime.pool import Slot
from kvpass.runtime.ranges import ranged
from kvpass.runtime.retries import Retries
from kvpass.runtime.tiers import Tiers


def events_of(block: Block) -> list[Any]:
    """Events after the last steps that may have read or written a block."""
    return [owner[0].event for owner in block.owners if owner[0].event is not None]


def flow_of(block: Block) -> tuple[Hashable, float]:
    """Whose copies a block's are, and the weight of that batch on the link."""
    batch = block.owners[0][0]
    return batch.first_row, batch.service.weight * batch.size


def in_step(block: Block) -> bool:
    """Whether a sequence that owns the block is in a step."""
    # A loop, not any(...): this runs for every copy.
    for owner in block.owners:  # noqa: SIM110
        if owner[0].active is not None:
            return True
    return False


def movable(block: Block) -> bool:
    """Whether a block may change place now: written through, and nobody in a step with it."""
    return block.full and block.cold is not None and block.move is None and not in_step(block)


class Mover:
    """Changes where blocks lie. Needs the manager's lock.

    Args:
        tiers: the slots.
        copier: runs copies beside compute.
        counters: counts what was done.
        columns: what is known of the blocks.
        memory: options of the policy.
        link: where rates of copies are noted.

    Attributes:
        threshold: the share of the hot arena in use at which demotion starts, now.
    """

    def __init__(
        self,
        tiers: Tiers,
        copier: Copier,
        counters: Counters,
        columns: Columns,
        memory: MemoryConfig,
        link: LinkRate,
    ) -> None:
        self.tiers = tiers
        self.copier = copier
        self.counters = counters
        self.columns = columns
        self.link = link
        self.retries = Retries()
        self.min_frequency = memory.min_frequency
        self.hot_zone_ratio = memory.hot_zone_ratio
        self._interval = memory.heat_interval
        self._decided_at = 0
        self.threshold = policy.Threshold(memory.gpu_threshold)
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
        self.retries.tick()
        for _ in range(len(self._backlog)):
            block = next(iter(self._backlog))
            if block.full and block.cold is None and block.move is None:
                self._backlog.move_to_end(block)
                if not self.retries.due(block):
                    continue
                target = self._take_cold(block)
                if target is None:
                    # No room below: the block stays hot, and is tried again when a step ends.
                    break
                assert block.hot is not None
                move = Move("store", block, block.hot, target, events_of(block), *flow_of(block))
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
        return self._submit(Move("load", block, block.cold, target, [], *flow_of(block)))

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
        passed: dict[int, bool] = {}  # a piece has one event for all its moves
        moves, left = self._moves, []
        at = 0
        try:
            for move in moves:
                key = id(move.event)
                if move.event is None or key not in passed:
                    passed[key] = move.done()
                at += 1
                if not passed[key] or in_step(move.block):
                    left.append(move)
                else:
                    self._account(move)
        finally:
            self._moves = left + moves[at:]

    def _account(self, move: Move) -> None:
        block: Block = move.block
        block.move = None
        if move.error is None and block.owners and move.kind == "load":
            move.error = self._publish_load(block, move.target)
        if move.error is not None or not block.owners:
            # The old copy is untouched; a block nobody owns any more goes altogether.
            self.tiers.free(move.target)
            self.counters.cancelled_moves += move.cancelled
            failed = move.error is not None and not move.cancelled
            self.counters.failed_moves += failed
            if not block.owners:
                self.discard(block)
            elif move.kind == "store":
                if failed:
                    self.retries.failed(block, move.error)
                self._backlog[block] = None  # tried again when a step ends
        elif move.kind == "store":
            block.cold = move.target
            self.retries.forget(block)
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
            block.publish()  # no table may go on naming the slot, which is freed
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
        block.protected = False
        block.demoted = 0
        self.tiers.free(hot, events_of(block))
        self.counters.demoted_blocks += 1

    def demote_some(self, size: int, count: int, *, pressure: bool) -> int:
        """Demote up to ``count`` blocks of a size, the coldest first; returns how many."""
        if count <= 0:
            return 0
        ids = self.columns.owned(size)
        hot = ids[self.columns.has_hot[ids]]
        chosen = policy.victims(
            self.columns.arrays(hot), count, min_frequency=self.min_frequency, pressure=pressure
        )
        for i in hot[chosen].tolist():
            self.demote(self.columns.block(i))
        return len(chosen)

    def relieve(self) -> None:
        """Demote rarely accessed blocks while the hot tier is above its threshold."""
        for size in self.tiers.sizes:
            self.demote_some(size, -(-self.tiers.excess() // size), pressure=False)

    def rebalance(self) -> None:
        """What the policy decides at the end of a window: zones, demotions, promotions."""
        columns = self.columns
        since = self.counters.steps - self._decided_at
        if not policy.pays(since, columns.live, self._interval):
            return
        self._decided_at = self.counters.steps
        bounces = 0
        for size in self.tiers.sizes:
            ids = columns.owned(size)
            if not len(ids):
                continue
            blocks, hot = columns.arrays(ids), columns.has_hot[ids]
            plan = policy.plan(
                replace(blocks, over_share=self._over_share(ids, size, blocks, hot)),
                hot,
                slots=self.tiers.hot_slots(size),
                room=self.tiers.free_hot(columns.block(ids[0]).geometry),
                over=-(-self.tiers.excess() // size),
                level=self.threshold.level,
                min_frequency=self.min_frequency,
                hot_zone_ratio=self.hot_zone_ratio,
            )
            columns.protected[ids] = plan.protected
            for i in ids[plan.demoted].tolist():
                self.demote(columns.block(i))
            for candidate, victim in plan.promoted:
                if victim >= 0:
                    self.demote(columns.block(ids[victim]))
                if not self.promote(columns.block(ids[candidate])):
                    break
            bounces += plan.bounces
        self._watch(bounces)

    def _over_share(
        self,
        ids: NDArray[np.int64],
        size: int,
        blocks: policy.BlockArrays,
        hot: NDArray[np.bool_],
    ) -> NDArray[np.float64]:
        """How far these blocks, all of one size, are beyond the share of their sequence; kept."""
        columns = self.columns
        sequence, weights = columns.sequences(ids)
        shares = policy.fair_shares(
            weights,
            policy.demand(blocks, sequence, len(weights), self.min_frequency),
            self.tiers.hot_slots(size),
        )
        columns.note_shares(size, shares)
        # One alone may have it all: what it has no use for now is still better than nothing.
        alone = len(weights) < 2
        over = np.zeros(len(ids)) if alone else policy.over_share(blocks, sequence, hot, shares)
        columns.over_share[ids] = over
        return over

    def _watch(self, bounces: int) -> None:
        """Step the threshold down when blocks bounce, and back up when they do not."""
        slots = max((self.tiers.hot_slots(size) for size in self.tiers.sizes), default=0)
        before = self.threshold.events
        self.threshold = self.threshold.after(bounces, slots)
        self.tiers.threshold = self.threshold.value
        self.counters.thrash_events += self.threshold.events - before

    # -------------------------------------------------------------- end of life

    def spare_cold(self, geometry: BlockGeometry) -> Any:
        """A cold slot whose block has a hot copy too, for when the cold tier is full; or None."""
        ids = self.columns.owned(geometry.block_bytes)
        spare = np.flatnonzero(self.columns.has_hot[ids] & self.columns.movable(ids))
        if not len(spare):
            return None
        block = self.columns.block(ids[spare[0]])
        slot, block.cold = block.cold, None
        assert slot is not None
        slot.fences.extend(events_of(block))
        self._backlog[block] = None
        return slot

    def store_again(self, block: Block) -> None:
        """A full block has lost its cold copy: make another one when there is room."""
        if block.full and block.cold is None:
            self._backlog[block] = None

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
        self.retries.forget(block)
        for slot in (block.hot, block.cold):
            if slot is not None:
                self.tiers.free(slot, waiting)
        block.hot = block.cold = None
        self._backlog.pop(block, None)
        block.retire()

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
