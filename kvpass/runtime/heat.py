# SPDX-License-Identifier: Apache-2.0
"""From a batch's access counters to what its blocks know of themselves."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvpass.config import MemoryConfig
from kvpass.runtime import observe, policy
from kvpass.runtime.batch import Batch, Block
from kvpass.runtime.metrics import Counters
from kvpass.runtime.mover import arrays


def learn(
    batch: Batch,
    counts: NDArray[Any],
    memory: MemoryConfig,
    counters: Counters,
    *,
    slots: int,
    rows: int,
    others: Iterable[Block],
) -> None:
    """Fold a finished window into the blocks of a batch, and choose the length of the next one.

    Args:
        batch: whose window ended, after ``batch.steps_read`` steps.
        counts: int ``[L, B, blocks]`` accesses in it, summed over KV heads.
        memory: options of the policy.
        counters: where accesses are counted.
        slots: of the hot arena.
        rows: live rows (layers x sequences) that share it.
        others: all live blocks; those of other batches count as users of the arena.
    """
    blocks: list[Block] = []
    row: list[int] = []
    parts: list[NDArray[Any]] = []
    for layer, sequences in enumerate(batch.blocks):
        for sequence, here in enumerate(sequences):
            blocks += here
            row += [layer * batch.size + sequence] * len(here)
            parts.append(counts[layer, sequence, : len(here)])
            if here:
                heads = batch.geometry(layer).kv_heads
                observe.count_accesses(counters, here, parts[-1] / heads)
    if not blocks:
        return
    accesses = np.concatenate(parts).astype(np.float64)
    known = policy.fold(
        arrays(blocks),
        accesses,
        steps=batch.steps_read,
        interval=memory.heat_interval,
        min_frequency=memory.min_frequency,
    )
    mine = {id(block) for block in blocks}
    used = int((known.rate > 0).sum()) + sum(b.rate > 0 for b in others if id(b) not in mine)
    known = replace(
        known,
        resident=policy.residents(
            np.array(row),
            known.index,
            policy.worth(known),
            first=-(-memory.resident_tokens // batch.block_size),
            ratio=memory.resident_ratio,
            cap=policy.resident_cap(slots, rows, used),
        ),
    )
    _write_back(blocks, known)
    cold = np.array([block.hot is None for block in blocks], dtype=bool)
    missed = float(accesses[cold].sum() / max(accesses.sum(), 1.0))
    batch.window = policy.next_window(batch.steps_read, missed, memory.heat_interval, len(blocks))


def _write_back(blocks: list[Block], known: policy.BlockArrays) -> None:
    """Into each block what is now known of it."""
    columns = (known.frequency, known.rate, known.heat, known.resident, known.demoted, known.ages)
    for block, frequency, rate, heat, resident, demoted, ages in zip(
        blocks, *(column.tolist() for column in columns), strict=True
    ):
        block.frequency = frequency
        block.rate = rate
        block.heat = heat
        block.resident = resident
        block.demoted = demoted
        block.ages = ages
