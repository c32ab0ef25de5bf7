# SPDX-License-Identifier: Apache-2.0
"""From a batch's access counters to what its blocks know of themselves."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvpass.config import MemoryConfig
from kvpass.runtime import observe, policy
from kvpass.runtime.batch import Batch
from kvpass.runtime.columns import Columns
from kvpass.runtime.metrics import Counters


def learn(
    batch: Batch,
    counts: NDArray[Any],
    columns: Columns,
    memory: MemoryConfig,
    counters: Counters,
    *,
    slots: int,
    rows: int,
) -> None:
    """Fold a finished window into the blocks of a batch, and choose the length of the next one.

    A block that several sequences of the batch share was accessed by all of them: their accesses
    are added up.

    Args:
        batch: whose window ended, after ``batch.steps_read`` steps.
        counts: int ``[L, B, blocks]`` accesses in it, summed over KV heads.
        columns: what is known of the blocks.
        memory: options of the policy.
        counters: where accesses are counted.
        slots: of the hot arena.
        rows: live rows (layers x sequences) that share it.
    """
    named = batch.ids.reshape(-1)
    blocks = columns.distinct(named)
    if not len(blocks):
        return
    # Whoever comes last gives a shared block its row; the sequences of a batch are alike in length.
    row_of = np.empty(columns.capacity, dtype=np.int64)
    row_of[named] = np.repeat(np.arange(batch.layers * batch.size), batch.ids.shape[2])
    row = row_of[blocks]
    sums = np.bincount(named, weights=counts.reshape(-1), minlength=columns.capacity)
    accesses: NDArray[np.float64] = sums[blocks].astype(np.float64, copy=False)
    heads = np.array([1 if g is None else g.kv_heads for g in batch.geometries])
    observe.count_accesses(counters, columns, blocks, accesses / heads[row // batch.size])
    known = policy.fold(
        columns.arrays(blocks),
        accesses,
        steps=batch.steps_read,
        interval=memory.heat_interval,
        min_frequency=memory.min_frequency,
    )
    columns.learn(blocks, known)
    resident = policy.residents(
        row,
        known.index,
        policy.worth(known),
        first=-(-memory.resident_tokens // batch.block_size),
        ratio=memory.resident_ratio,
        cap=policy.resident_cap(slots, rows, int((columns.rate[columns.owned()] > 0).sum())),
    )
    columns.resident[blocks] = resident
    missed = float(accesses[~columns.has_hot[blocks]].sum() / max(accesses.sum(), 1.0))
    batch.window = policy.next_window(batch.steps_read, missed, memory.heat_interval, len(blocks))
