# SPDX-License-Identifier: Apache-2.0
"""From counts of accesses to what they say of the next window."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from kvpass.runtime.policy.arrays import NEVER, BlockArrays

MAX_HEAT = 3
"""Top of the 2-bit saturating heat counter."""

SMOOTHING = 0.98
"""Weight of a full window in the smoothed rate: half of it is a sixth of a window old."""

SHORTEST = 32
"""The shortest window is this many times shorter than a full one."""

STEPS_A_DECISION = 3
"""Decode steps that pay for a decision on no blocks."""

BLOCKS_A_STEP = 900
"""Blocks that one more step of the window pays for.

A decision without moves takes the host 0.4 ms and 0.2 us a block: 0.6 ms for 512, 1.1 ms for 4,096,
6.5 ms for 32,768 (one core of a busy x86 server). With these two numbers that is under 3 % of the
steps of a window where each takes 6 ms, as of an 8B model at 32k tokens.
"""

MOST_RETENTION = 64.0
"""Doublings of the accesses that a retention can stand for."""

MISSES = 0.0005
"""Share of accesses to cold blocks above which the next window is shorter."""


def price(blocks: int) -> int:
    """Decode steps that pay for a decision on ``blocks``."""
    return STEPS_A_DECISION - -blocks // BLOCKS_A_STEP


def pays(steps: int, blocks: int, interval: int) -> bool:
    """Whether a decision may be taken now.

    Every sequence has its own windows, and a decision concerns the blocks of all of them: where
    there are so many that a full window does not pay for it, it waits until steps of any do.

    Args:
        steps: of all sequences since the last decision.
        blocks: of all sequences.
        interval: steps in a full window.
    """
    return price(blocks) <= interval or steps >= price(blocks)


def next_window(steps: int, missed: float, interval: int, blocks: int) -> int:
    """Decode steps in the window after one.

    While hardly any access goes to a cold block there is nothing to decide, so windows double up to
    ``interval``; otherwise they halve, down to a thirty-second of it, or to as many steps as pay
    for a decision on ``blocks``. The first one after a prompt is one step, since a prompt says
    nothing of heat.

    Args:
        steps: in the window that ended; 0 for a prompt.
        missed: share of its accesses that went to cold blocks, 0 to 1.
        interval: steps in a full window.
        blocks: blocks to decide on.
    """
    shortest = min(max(interval // SHORTEST, price(blocks)), interval)
    if missed > MISSES or not steps:
        return max(steps // 2, min(shortest, 2 * steps), 1)
    return min(2 * steps, interval)


def next_heat(
    heat: NDArray[np.uint8], frequency: NDArray[np.float64], min_frequency: float
) -> NDArray[np.uint8]:
    """Heat after a window: up by one where the block was accessed often enough, else down by one.

    Args:
        heat: ``[N]`` uint8, 0 to 3.
        frequency: ``[N]`` accesses in the window.
        min_frequency: accesses that count as often.

    Returns:
        ``[N]`` uint8, 0 to 3.
    """
    hot = frequency >= min_frequency
    return np.where(hot, np.minimum(heat + 1, MAX_HEAT), np.maximum(heat, 1) - 1).astype(np.uint8)


def next_ages(ages: NDArray[np.int64], accessed: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Ages of the last K windows with an access, after one more window.

    The history of LRU-K (O'Neil, O'Neil and Weikum, SIGMOD 1993) with a window as the unit of
    time, so accesses within one window are one reference, as its correlated reference period asks.

    Args:
        ages: int64 ``[N, K]``, newest first.
        accessed: ``[N]``, in the window that ended.

    Returns:
        int64 ``[N, K]``: 0 is the window that ended.
    """
    older = np.minimum(ages + 1, NEVER)
    newest = np.zeros((len(ages), 1), dtype=np.int64)
    return np.where(accessed[:, None], np.hstack([newest, older[:, :-1]]), older)


def next_rate(
    rate: NDArray[np.float64], frequency: NDArray[np.float64], share: float
) -> NDArray[np.float64]:
    """Smoothed accesses a window, after one more window.

    Args:
        rate: ``[N]``, NaN before a window has passed.
        frequency: ``[N]`` accesses, as of a full window.
        share: length of the window, of a full one.
    """
    weight = 1.0 - (1.0 - SMOOTHING) ** share
    return np.where(np.isnan(rate), frequency, rate + weight * (frequency - rate))


def fold(
    blocks: BlockArrays,
    counts: NDArray[np.float64],
    *,
    steps: int,
    interval: int,
    min_frequency: float,
) -> BlockArrays:
    """What is known of blocks after a window.

    Args:
        blocks: before it.
        counts: ``[N]`` accesses in it, summed over KV heads.
        steps: decode steps in it.
        interval: steps in a full window, which frequencies are of.
        min_frequency: accesses in a full window that count as often.
    """
    frequency = counts * (interval / steps)
    return replace(
        blocks,
        frequency=frequency if steps >= interval else blocks.frequency,
        heat=next_heat(blocks.heat, frequency, min_frequency),
        rate=next_rate(blocks.rate, frequency, steps / interval),
        ages=next_ages(blocks.ages, counts > 0),
        demoted=np.minimum(blocks.demoted + 1, NEVER),
    )


def worth(blocks: BlockArrays) -> NDArray[np.float64]:
    """Accesses a window to expect of each block, weighted by its retention.

    A retention beyond 64 counts as 64: no count of accesses outweighs that, and worth is finite.

    Returns:
        ``[N]``, infinite where no window has passed: a new block is not cold.
    """
    expected: NDArray[np.float64] = np.where(np.isnan(blocks.rate), np.inf, blocks.rate)
    return expected * np.exp2(np.clip(blocks.retention, -MOST_RETENTION, MOST_RETENTION))
