# SPDX-License-Identifier: Apache-2.0
"""Room for new tokens: which tier a new block starts in, copies on write, and giving blocks up."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from kvpass.runtime import policy, unfinished
from kvpass.runtime.batch import Batch, Block
from kvpass.runtime.geometry import BlockGeometry
from kvpass.runtime.metrics import Counters
from kvpass.runtime.mover import Mover, events_of
from kvpass.runtime.pool import Slot
from kvpass.runtime.tiers import Tiers


class Reserver:
    """Gives rows their blocks and takes them back. Needs the manager's lock.

    Args:
        tiers: the slots.
        mover: demotes when room is needed.
        counters: counts what was done.
        batches: all live batches, which share the hot tier.
        resident_tokens: first tokens of a sequence that stay hot.
    """

    def __init__(
        self,
        tiers: Tiers,
        mover: Mover,
        counters: Counters,
        batches: list[Batch],
        resident_tokens: int,
    ) -> None:
        self.tiers = tiers
        self.mover = mover
        self.counters = counters
        self.batches = batches
        self.resident_tokens = resident_tokens

    def reserve(self, batch: Batch, tokens: int, layers: Sequence[int]) -> None:
        """Blocks for ``tokens`` more tokens, and tables that name them; all or nothing."""
        if batch.guard is not None:
            batch.guard.check()
        unfinished.check(batch, layers)
        made: list[tuple[int, int]] = []
        try:
            if not self._is_ready(batch, tokens, layers):
                self._make_ready(batch, tokens, layers, made)
            batch.upload()
            if batch.guard is not None:
                batch.guard.arm(tokens, layers)
        except BaseException:
            for layer, sequence in reversed(made):
                self.drop(batch, layer, sequence, len(batch.blocks[layer][sequence]) - 1)
            unfinished.note(batch, layers)
            raise

    @staticmethod
    def _is_ready(batch: Batch, tokens: int, layers: Sequence[int]) -> bool:
        """Whether the last blocks take the tokens as they are, as they do at most decode steps."""
        if batch.ready is None or batch.dirty or batch.ready[0] != tuple(layers):
            return False
        return max(batch.lengths) + tokens <= batch.ready[1]

    def _make_ready(
        self, batch: Batch, tokens: int, layers: Sequence[int], made: list[tuple[int, int]]
    ) -> None:
        batch.reserve_words(max((batch.lengths[layer] + tokens for layer in layers), default=0))
        if tokens:
            self._unshare(batch, layers)
        wanted: list[tuple[int, int, int, bool]] = []
        for layer in layers:
            total = batch.lengths[layer] + tokens
            count = -(-total // batch.block_size)
            for sequence, row in enumerate(batch.blocks[layer]):
                wanted.extend(
                    (layer, sequence, i, i == count - 1 and total % batch.block_size > 0)
                    for i in range(len(row), count)
                )
        if wanted:
            self._reserve_blocks(batch, wanted, made)
            self.mover.relieve()
        if batch.dirty:
            batch.cold_bytes = self.mover.columns.cold_bytes(batch.ids)
        longest = {batch.lengths[layer] for layer in layers}
        if tokens and len(longest) == 1:
            blocks = -(-(longest.pop() + tokens) // batch.block_size)
            batch.ready = tuple(layers), blocks * batch.block_size

    def _reserve_blocks(
        self, batch: Batch, wanted: list[tuple[int, int, int, bool]], made: list[tuple[int, int]]
    ) -> None:
        geometry = max(
            (batch.geometry(layer) for layer in {layer for layer, *_ in wanted}),
            key=lambda g: g.block_bytes,
        )
        index = np.array([i for _, _, i, _ in wanted], dtype=np.int64)
        unfinished = np.array([u for *_, u in wanted], dtype=bool)
        rows = sum(b.layers * b.size for b in self.batches)
        resident = policy.resident_blocks(
            self.resident_tokens,
            batch.block_size,
            self.tiers.hot_slots(geometry.block_bytes),
            rows,
            int(index.max()) + 1,
        )
        free = self.tiers.free_hot(geometry)
        hot, short = policy.admit(index, unfinished, resident, rows, free)
        if short > 0:
            self.mover.demote_some(geometry.block_bytes, short, pressure=True)
        for (layer, sequence, position, is_unfinished), is_hot in zip(wanted, hot, strict=True):
            block = self._new_block(
                batch.geometry(layer), position, hot=bool(is_hot), unfinished=is_unfinished
            )
            block.resident = position < resident
            batch.attach(layer, sequence, block)
            made.append((layer, sequence))
            block.publish()

    def _new_block(
        self, geometry: BlockGeometry, index: int, *, hot: bool, unfinished: bool
    ) -> Block:
        block = Block(self.mover.columns, geometry, index)
        try:
            self._give_slot(block, hot=hot, unfinished=unfinished)
        except BaseException:
            block.retire()
            raise
        return block

    def _give_slot(self, block: Block, *, hot: bool, unfinished: bool) -> None:
        """A slot for a new block: hot if asked for and possible, else cold, else whatever is left.

        Raises:
            OutOfMemoryError: both tiers are full.
        """
        slot = self.tiers.take_hot(block.geometry) if hot else None
        if slot is not None:
            block.hot = self.tiers.ready(slot)
            return
        slot = self.tiers.take_cold(block.geometry) or self.mover.spare_cold(block.geometry)
        if slot is not None:
            block.cold = self.tiers.ready(slot)
            self.counters.placed_cold_blocks += 1
            self.counters.spilled_blocks += unfinished
            return
        slot = self.tiers.take_hot(block.geometry) or self._wait_for_hot(block.geometry)
        if slot is None:
            raise self.tiers.full()
        block.hot = self.tiers.ready(slot)

    def _wait_for_hot(self, geometry: BlockGeometry) -> Slot | None:
        """A hot slot of a block that may leave once its copy is done: better late than refused."""
        if not self.mover.in_flight:
            return None
        self.mover.settle()
        slot = self.tiers.take_hot(geometry)
        if slot is None and self.mover.demote_some(geometry.block_bytes, 1, pressure=True):
            slot = self.tiers.take_hot(geometry)
        return slot

    def _unshare(self, batch: Batch, layers: Sequence[int]) -> None:
        """Copy on write: the block that the next token goes to must be this sequence's own."""
        for layer in layers:
            position, used = divmod(batch.lengths[layer], batch.block_size)
            if not used:
                continue
            for sequence, row in enumerate(batch.blocks[layer]):
                block = row[position]
                if len(block.owners) == 1:
                    self.mover.make_mutable(block)
                    continue
                copy = self._new_block(block.geometry, position, hot=True, unfinished=True)
                copy.resident = block.resident
                try:
                    waiting = events_of(block)
                    on_host = not (copy.slot.raw.is_cuda or block.slot.raw.is_cuda)
                    if on_host and self.tiers.device.type == "cuda":
                        # The host copies now, whatever streams were told to wait for.
                        for event in waiting:
                            event.synchronize()
                        torch.cuda.current_stream(self.tiers.device).synchronize()
                    copy.slot.raw.copy_(block.slot.raw, non_blocking=True)
                    batch.exchange(layer, sequence, position, copy)
                    copy.publish()
                except BaseException:
                    try:
                        if row[position] is copy:
                            batch.exchange(layer, sequence, position, block)
                            block.publish()  # no table may go on naming the slot, which is freed
                    finally:
                        self.mover.discard(copy)
                    raise
                self.counters.copied_blocks += 1
                if copy.slot.raw.is_cuda or block.slot.raw.is_cuda:
                    waiting.append(torch.cuda.current_stream(self.tiers.device).record_event())
                self.mover.leave(block, waiting)

    def give_back(self, batch: Batch, layers: Sequence[int]) -> None:
        """Forget the blocks of a step of these layers that failed."""
        for layer in layers:
            self.trim(batch, layer, batch.lengths[layer])
        unfinished.note(batch, layers)

    def trim(self, batch: Batch, layer: int, tokens: int) -> None:
        """Forget the blocks of a layer beyond its first ``tokens`` tokens."""
        for sequence in range(batch.size):
            self.drop(batch, layer, sequence, -(-tokens // batch.block_size))

    def drop(self, batch: Batch, layer: int, sequence: int, keep: int) -> None:
        """Forget the blocks of a row from position ``keep`` on."""
        row = batch.blocks[layer][sequence]
        while len(row) > keep:
            waiting = events_of(row[-1])
            block = batch.detach(layer, sequence)
            if not block.owners and block.move is None:
                self.mover.discard(block, waiting)
                continue
            if not block.owners:
                block.move.cancel()  # the block is freed when the copy is done or called off
            self.mover.leave(block, waiting)
