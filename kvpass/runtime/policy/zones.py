# SPDX-License-Identifier: Apache-2.0
"""Protected zone and probation of the hot arena: segmented LRU."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from kvpass.runtime.policy.arrays import NEVER, BlockArrays
from kvpass.runtime.policy.order import coldest


def next_protected(
    blocks: BlockArrays, hot: NDArray[np.bool_], slots: int, hot_zone_ratio: float
) -> NDArray[np.bool_]:
    """Which blocks are in the protected zone after a window.

    New and promoted blocks enter probation; an access in a second window moves them to the
    protected zone, the coldest of which fall back when it is full (segmented LRU: Karedla, Love
    and Wherry, IEEE Computer 1994). Unlike there, one whose 2-bit counter has run down falls back
    too: otherwise blocks that nobody uses any more would stay where nothing pushes them out.

    Args:
        blocks: all blocks, the window folded in.
        hot: ``[N]`` those in the hot tier.
        slots: slots of the hot arena.
        hot_zone_ratio: protected share of them.

    Returns:
        ``[N]`` bool, at most ``slots * hot_zone_ratio`` of them, only hot ones.
    """
    again = (blocks.ages[:, 0] == 0) & (blocks.ages[:, -1] < NEVER)
    stays = blocks.protected & (blocks.heat > 0)
    wanted = hot & (again | stays)
    excess = int(wanted.sum()) - int(slots * hot_zone_ratio)
    if excess > 0:
        # Only what the blocks are worth counts here, not the zone they come from.
        nowhere = np.zeros(len(blocks), dtype=bool)
        equal = replace(blocks, protected=nowhere, resident=nowhere)
        wanted[coldest(equal, np.flatnonzero(wanted), excess, ordered=False)] = False
    return wanted
