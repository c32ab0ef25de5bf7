# SPDX-License-Identifier: Apache-2.0
"""What a manager's blocks are doing, read under its lock; nothing here changes anything."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvpass.runtime.metrics import BlockGroup, Counters, SequenceUse, Snapshot, TierUse

if TYPE_CHECKING:
    from kvpass.runtime.batch import Batch, Block
    from kvpass.runtime.columns import Columns
    from kvpass.runtime.manager import Manager

STATES = ("hot_unfinished", "hot_full", "hot_written_through", "cold_full", "cold_unfinished")


def count_accesses(
    counters: Counters,
    columns: Columns,
    blocks: NDArray[np.int64],
    frequency: NDArray[np.float64],
) -> None:
    """Count a window's accesses by the tier that the blocks are in.

    Args:
        counters: where to count.
        columns: what is known of the blocks.
        blocks: ids, ``[N]``, each once.
        frequency: ``[N]`` accesses in the window, averaged over KV heads.
    """
    hot = columns.has_hot[blocks]
    counters.hot_accesses += float(frequency[hot].sum())
    counters.cold_accesses += float(frequency[~hot].sum())
    # Once a window, not once a step: ten steps over four blocks look up four blocks.
    looked_up = columns.full[blocks] & (frequency > 0)
    counters.hot_lookups += int((looked_up & hot).sum())
    counters.cold_lookups += int((looked_up & ~hot).sum())


def state_of(block: Block) -> str:
    """Where a block is and how far, one of ``STATES``."""
    if block.hot is None:
        return "cold_full" if block.full else "cold_unfinished"
    if not block.full:
        return "hot_unfinished"
    return "hot_full" if block.cold is None else "hot_written_through"


class _Tally:
    """Sums over distinct blocks."""

    def __init__(self) -> None:
        self.groups = dict.fromkeys(STATES, 0)
        self.bytes = dict.fromkeys(STATES, 0)
        self.held = {"hot": 0, "cold": 0}
        self.stored = {"hot": 0, "cold": 0}
        self._shared: set[int] = set()

    def add(self, block: Block, tokens: int) -> None:
        """Count a block that holds ``tokens`` tokens, once however many sequences share it."""
        if len(block.owners) > 1:
            if id(block) in self._shared:
                return
            self._shared.add(id(block))
        geometry = block.geometry
        state = state_of(block)
        self.groups[state] += 1
        self.bytes[state] += geometry.block_bytes
        size = geometry.payload_bytes if block.full else tokens * geometry.token_bytes
        for tier, slot in (("hot", block.hot), ("cold", block.cold)):
            if slot is not None:
                self.held[tier] += geometry.block_bytes
                self.stored[tier] += size


def take(manager: Manager, batches: Sequence[Batch]) -> Snapshot:
    """A snapshot of a manager, whose lock the caller holds.

    Args:
        manager: what to look at.
        batches: its live batches.
    """
    tally = _Tally()
    sequences = [
        _sequence(batch, sequence, manager.tiers.hot.capacity, tally)
        for batch in batches
        for sequence in range(batch.size)
    ]
    mover = manager.mover
    for move in mover.in_flight:
        geometry = move.block.geometry
        target = "cold" if move.kind == "store" else "hot"
        tally.held[target] += geometry.block_bytes
        tally.stored[target] += geometry.payload_bytes
        if not move.block.owners:  # dropped while its copy was in flight: freed with it
            tally.add(move.block, 0)
    stored = sum(use.kv_bytes for use in sequences)
    hot = sum(use.hot_bytes for use in sequences)
    stores = sum(move.kind == "store" for move in mover.in_flight)
    tiers = {
        tier: TierUse(
            budget.capacity, budget.taken, budget.used, tally.held[tier], tally.stored[tier]
        )
        for tier, budget in (("hot", manager.tiers.hot), ("cold", manager.tiers.cold))
    }
    return Snapshot(
        kv_bytes=stored,
        hot_bytes=hot,
        cold_only_bytes=stored - hot,
        hot_capacity=tiers["hot"].capacity,
        hot_used=tiers["hot"].used,
        cold_used=tiers["cold"].used,
        sequences=len(sequences),
        counters=replace(manager.counters),
        manager=manager.number,
        device=str(manager.device),
        time=time.monotonic(),
        threshold=manager.tiers.threshold,
        tiers=tiers,
        blocks={state: BlockGroup(tally.groups[state], tally.bytes[state]) for state in STATES},
        stores_in_flight=stores,
        loads_in_flight=len(mover.in_flight) - stores,
        backlog=mover.backlog,
        link=replace(mover.link),
        by_sequence=sequences,
    )


def _sequence(batch: Batch, sequence: int, capacity: int, tally: _Tally) -> SequenceUse:
    """Bytes of one sequence in a hot tier of ``capacity``; its blocks are added to the tally."""
    kv = hot = held = 0
    for layer, row in enumerate(batch.blocks):
        geometry = batch.geometries[layer]
        if geometry is None:
            continue
        left = batch.lengths[layer]
        for block in row[sequence]:
            tokens = min(max(left, 0), geometry.block_size)
            left -= geometry.block_size
            kv += tokens * geometry.token_bytes
            if block.hot is not None:
                hot += tokens * geometry.token_bytes
                held += geometry.block_bytes
            tally.add(block, tokens)
    due = sum(float(shares[sequence]) for shares in batch.shares.values())
    known = bool(batch.shares) and capacity > 0
    return SequenceUse(
        batch.first_row, sequence, max(batch.lengths, default=0), kv, hot,
        due / capacity if known else None, held / capacity if known else None,
    )  # fmt: skip
