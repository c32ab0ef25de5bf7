# SPDX-License-Identifier: Apache-2.0
"""Policies side by side on one trace."""

from __future__ import annotations

from dataclasses import dataclass

from kvpass.config import MemoryConfig
from kvpass.errors import ConfigError
from kvpass.runtime.simulate.classic import CLASSICS
from kvpass.runtime.simulate.events import Tick, events
from kvpass.runtime.simulate.optimum import optimum_hits
from kvpass.runtime.simulate.ours import replay_ours
from kvpass.runtime.trace import Trace
from kvpass.sizes import format_size, parse_size

OURS = "kvpass"


@dataclass(frozen=True)
class Row:
    """One policy at one hot size.

    Attributes:
        policy: its name.
        hit_ratio: requests that found the block hot, of all, 0 to 1.
        moves: blocks copied into the hot tier; None for a bound.
        gap: hit ratio of the clairvoyant optimum, less this one.
    """

    policy: str
    hit_ratio: float
    moves: int | None
    gap: float


@dataclass(frozen=True)
class Comparison:
    """All policies at one hot size.

    Attributes:
        hot: the size as it was asked for.
        slots: blocks it holds.
        blocks: blocks at the end of the trace.
        requests: requests in the trace.
        windows: windows that kvpass's policy decided after.
        thrash_events: times that its threshold stepped down.
        rows: one a policy.
    """

    hot: str
    slots: int
    blocks: int
    requests: int
    windows: int
    thrash_events: int
    rows: tuple[Row, ...]


def hot_slots(hot: str, trace: Trace) -> int:
    """Blocks that a hot size holds.

    Args:
        hot: ``"25%"`` of the blocks at the end of the trace, or a size as ``"64MiB"``.
        trace: the trace; of layers of several block sizes the largest counts.

    Raises:
        ConfigError: no size, or one that holds no block.
    """
    if hot.strip().endswith("%"):
        try:
            share = float(hot.strip()[:-1])
        except ValueError:
            share = float("nan")
        if not 0 < share <= 100:
            raise ConfigError(f"--hot {hot!r}: write a share of the blocks between 0% and 100%")
        slots = int(int(trace.blocks[-1].sum()) * share / 100)
    else:
        try:
            size = parse_size(hot)
        except ConfigError as error:
            raise ConfigError(f"--hot {hot!r}: {error}, or a share as '25%'") from None
        slots = size // max(trace.block_bytes)
    if slots < 1:
        raise ConfigError(
            f"--hot {hot!r} holds no block of {format_size(max(trace.block_bytes))}: give more"
        )
    return slots


def compare(trace: Trace, hot: str, memory: MemoryConfig) -> Comparison:
    """Replay a trace with every policy at one hot size.

    Args:
        trace: what was recorded.
        hot: see :func:`hot_slots`.
        memory: options of kvpass's own policy.

    Raises:
        ConfigError: no size, or one that holds no block.
    """
    slots = hot_slots(hot, trace)
    ticks = events(trace)
    requests = sum(len(tick.requests) for tick in ticks)
    ours = replay_ours(trace, ticks, slots, memory)
    best = optimum_hits(ticks, slots)
    done = {name: _classic(name, ticks, slots) for name in CLASSICS}
    done[OURS] = (ours.hits, ours.moves)
    total = max(requests, 1)
    rows = [
        Row(name, hits / total, moves, (best - hits) / total)
        for name, (hits, moves) in done.items()
    ]
    rows.append(Row("Belady", best / total, None, 0.0))
    ahead = optimum_hits(ticks, slots, ours.windows)
    rows.append(Row("Belady + windows", ahead / total, None, (best - ahead) / total))
    return Comparison(
        hot=hot,
        slots=slots,
        blocks=int(trace.blocks[-1].sum()),
        requests=requests,
        windows=len(ours.windows),
        thrash_events=ours.thrash_events,
        rows=tuple(rows),
    )


def _classic(name: str, ticks: list[Tick], slots: int) -> tuple[int, int]:
    """Hits and moves; every miss is a move, for the block is hot afterwards."""
    policy = CLASSICS[name](slots)
    hits = requests = 0
    for tick in ticks:
        for block in tick.created.tolist():
            policy.create(block)
        for block in tick.requests.tolist():
            hits += policy.request(block)
        requests += len(tick.requests)
    return hits, requests - hits
