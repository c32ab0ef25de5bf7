# SPDX-License-Identifier: Apache-2.0
"""Room for new tokens: which tier a new block starts in, copies on write, and giving blocks up."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from kvpass.runtime import policy
from kvpass.runtime.batch import Batch, Block
from kvpass.runtime.metrics import Counters
from kvpass.runtime.mover import Mover, events_of
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
        """Blocks for ``tokens`` more tokens; all or nothing."""
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
        if not wanted:
            return
        made: list[list[Block]] = []
        try:
            self._reserve_blocks(batch, wanted, made)
        except BaseException:
            for row in reversed(made):
                self.drop(batch, row, len(row) - 1)
            raise
        self.mover.relieve()

    def _reserve_blocks(
        self, batch: Batch, wanted: list[tuple[int, int, int, bool]], made: list[list[Block]]
    ) -> None:
        geometry = max(
            (batch.geometry(layer) for layer in {layer for layer, *_ in wanted}),
            key=lambda g: g.block_bytes,
        )
        index = np.array([i for _, _, i, _ in wanted], dtype=np.int64)
        unfinished = np.array([u for *_, u in wanted], dtype=bool)
        resident = policy.resident_blocks(
            self.resident_tokens,
            batch.block_size,
            self.tiers.hot_slots(geometry.block_bytes),
            sum(b.layers * b.size for b in self.batches),
            int(index.max()) + 1,
        )
        room = self.tiers.room(geometry.block_bytes)
        hot = policy.place(index, unfinished, resident, room)
        # Unfinished blocks are written every step: they may use what the threshold keeps free, and
        # after that the slots of the coldest blocks.
        hot |= unfinished
        short = int(hot.sum()) - self.tiers.free_hot(geometry)
        if short > 0:
            self.mover.demote_some(geometry, short, pressure=True)
        for (layer, sequence, position, is_unfinished), is_hot in zip(wanted, hot, strict=True):
            block = Block(batch.geometry(layer), position)
            block.resident = position < resident
            self._give_slot(block, hot=bool(is_hot), unfinished=is_unfinished)
            batch.attach(layer, sequence, block)
            made.append(batch.blocks[layer][sequence])
            block.publish()

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
        slot = self.tiers.take_hot(block.geometry)
        if slot is None:
            raise self.tiers.full()
        block.hot = self.tiers.ready(slot)

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
                copy = Block(block.geometry, position)
                copy.resident = block.resident
                owner = (batch, layer, sequence, position)
                self._give_slot(copy, hot=True, unfinished=True)
                try:
                    copy.slot.raw.copy_(block.slot.raw, non_blocking=True)
                    copy.owners.append(owner)
                    copy.publish()
                except BaseException:
                    self.mover.discard(copy)
                    raise
                self.counters.copied_blocks += 1
                waiting = events_of(block)
                if copy.slot.raw.is_cuda or block.slot.raw.is_cuda:
                    waiting.append(torch.cuda.current_stream(self.tiers.device).record_event())
                block.owners.remove(owner)
                self.mover.leave(block, waiting)
                row[position] = copy

    def drop(self, batch: Batch, row: list[Block], keep: int) -> None:
        """Forget the blocks of a row from position ``keep`` on."""
        while len(row) > keep:
            block = row.pop()
            owner = next(o for o in block.owners if o[0] is batch and o[3] == len(row))
            waiting = events_of(block)
            block.owners.remove(owner)
            batch.words[owner[1], owner[2], owner[3]] = 0
            batch.dirty = True
            # A block whose copy is in flight is freed when the copy is done.
            if not block.owners and block.move is None:
                self.mover.discard(block, waiting)
            else:
                self.mover.leave(block, waiting)
