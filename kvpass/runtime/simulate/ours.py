# SPDX-License-Identifier: Apache-2.0
"""The runtime's own policy on a trace: the same functions, in the same order, at the same times."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from kvpass.config import MemoryConfig
from kvpass.runtime import policy
from kvpass.runtime.simulate.events import Tick
from kvpass.runtime.trace import Trace


@dataclass(frozen=True)
class Replay:
    """What a policy did on a trace.

    Attributes:
        hits: requests that found their block hot.
        moves: blocks copied into the hot tier.
        windows: ticks after which it decided; empty for a policy that decides at every request.
        thrash_events: times the threshold stepped down.
    """

    hits: int
    moves: int
    windows: tuple[int, ...] = ()
    thrash_events: int = 0


class _Blocks:
    """All blocks that a trace will ever have; those that exist so far, and those that are hot."""

    def __init__(self, trace: Trace) -> None:
        shape = trace.counts.shape
        self.wide = shape[3]
        self.rows = shape[1] * shape[2]
        count = self.rows * self.wide
        nothing = np.full(count, np.nan)
        self.known = policy.BlockArrays(
            frequency=nothing,
            heat=np.zeros(count, dtype=np.uint8),
            index=np.tile(np.arange(self.wide), self.rows),
            resident=np.zeros(count, dtype=bool),
            movable=np.zeros(count, dtype=bool),
        )
        self.row = np.repeat(np.arange(self.rows), self.wide)
        self.exists = np.zeros(count, dtype=bool)
        self.hot = np.zeros(count, dtype=bool)

    def forget_zone(self, cold: NDArray[np.int64]) -> None:
        self.hot[cold] = False
        self.known.protected[cold] = False
        self.known.demoted[cold] = 0


def replay_ours(trace: Trace, ticks: list[Tick], slots: int, memory: MemoryConfig) -> Replay:
    """The runtime's policy with the options of ``memory``.

    It decides at the ends of windows only, and gives slots to new blocks as they come. A promoted
    block is hot from the next step on: copies are taken to be done by then.

    Args:
        trace: what was recorded.
        ticks: its events.
        slots: of the hot arena.
        memory: block size is the trace's, sizes are given by ``slots``; the rest counts.
    """
    blocks = _Blocks(trace)
    threshold = policy.Threshold(memory.gpu_threshold)
    counts = trace.counts.reshape(len(ticks), -1)
    window = np.zeros(counts.shape[1])
    hits = moves = steps = 0
    length = 0
    windows: list[int] = []
    for number, tick in enumerate(ticks):
        if len(tick.created):
            _create(blocks, tick.created, slots, threshold, memory, trace.block_size)
        count = int(blocks.exists.sum())
        length = length or policy.next_window(0, 0.0, memory.heat_interval, count)
        hits += int(blocks.hot[tick.requests].sum())
        window += counts[number]
        steps += trace.interval
        if steps < length:
            continue
        missed = float(window[~blocks.hot].sum() / max(window.sum(), 1.0))
        length = policy.next_window(steps, missed, memory.heat_interval, count)
        threshold, promoted = _end_window(
            blocks, window, steps, slots, threshold, memory, trace.block_size
        )
        moves += promoted
        steps = 0
        window[:] = 0
        windows.append(number)
    return Replay(hits, moves, tuple(windows), threshold.events)


def _create(
    blocks: _Blocks,
    created: NDArray[np.int64],
    slots: int,
    threshold: policy.Threshold,
    memory: MemoryConfig,
    block_size: int,
) -> None:
    """As ``Reserver`` does: slots for new blocks, then relief."""
    known = blocks.known
    blocks.exists[created] = True
    sizes = np.bincount(blocks.row[blocks.exists], minlength=blocks.rows)
    last = known.index == sizes[blocks.row] - 1
    known.movable[:] = blocks.exists & ~last
    index = known.index[created]
    resident = policy.resident_blocks(
        memory.resident_tokens, block_size, slots, blocks.rows, int(index.max()) + 1
    )
    used = int(blocks.hot.sum())
    hot, short = policy.admit(index, last[created], resident, blocks.rows, slots - used)
    _demote_some(blocks, short, memory, pressure=True)
    known.resident[created] = index < resident
    room = slots - int(blocks.hot.sum())
    blocks.hot[created[hot][:room]] = True
    over = int(blocks.hot.sum()) - int(slots * threshold.value)
    _demote_some(blocks, over, memory, pressure=False)


def _demote_some(blocks: _Blocks, count: int, memory: MemoryConfig, *, pressure: bool) -> None:
    here = np.flatnonzero(blocks.hot)
    chosen = policy.victims(
        blocks.known.take(here), count, min_frequency=memory.min_frequency, pressure=pressure
    )
    blocks.forget_zone(here[chosen])


def _end_window(
    blocks: _Blocks,
    window: NDArray[np.float64],
    steps: int,
    slots: int,
    threshold: policy.Threshold,
    memory: MemoryConfig,
    block_size: int,
) -> tuple[policy.Threshold, int]:
    """As ``Manager`` does: fold the counts, mark residents, move. Returns promotions too."""
    there = np.flatnonzero(blocks.exists)
    known = policy.fold(
        blocks.known.take(there),
        window[there],
        steps=steps,
        interval=memory.heat_interval,
        min_frequency=memory.min_frequency,
    )
    known = replace(
        known,
        resident=policy.residents(
            blocks.row[there],
            known.index,
            policy.worth(known),
            first=-(-memory.resident_tokens // block_size),
            ratio=memory.resident_ratio,
            cap=policy.resident_cap(slots, blocks.rows, int((known.rate > 0).sum())),
        ),
    )
    hot = blocks.hot[there]
    used = int(hot.sum())
    plan = policy.plan(
        known,
        hot,
        slots=slots,
        room=slots - used,
        over=used - int(slots * threshold.value),
        level=threshold.level,
        min_frequency=memory.min_frequency,
        hot_zone_ratio=memory.hot_zone_ratio,
    )
    known = replace(known, protected=plan.protected)
    for name in ("frequency", "heat", "resident", "rate", "ages", "protected", "demoted"):
        getattr(blocks.known, name)[there] = getattr(known, name)
    left = [victim for _, victim in plan.promoted if victim >= 0]
    blocks.forget_zone(there[np.concatenate([plan.demoted, np.array(left, dtype=np.int64)])])
    blocks.hot[there[[block for block, _ in plan.promoted]]] = True
    return threshold.after(plan.bounces, slots), len(plan.promoted)
