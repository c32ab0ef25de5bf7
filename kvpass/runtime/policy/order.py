# SPDX-License-Identifier: Apache-2.0
"""In which order blocks give up their slots.

Sorting all blocks by all that counts would take most of a decision's time. A decision needs the
first few only, so they are found by the leading keys, in linear time, and only those are sorted
(partial sorting by quickselect: Hoare 1961; NumPy's ``partition`` is introselect, Musser 1997).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvpass.runtime.policy.arrays import NEVER, BlockArrays
from kvpass.runtime.policy.heat import worth


def coldest_first(blocks: BlockArrays) -> NDArray[np.int64]:
    """Order in which blocks give up their slots.

    Sequences above their fair share first; then blocks that may go before residents, probation
    before the protected zone, and less worth before more. Ties go by retention, the 2-bit counter,
    the K-th last access (LRU-K: the longer ago, the earlier) and the position in the sequence.

    Returns:
        ``[N]`` indices into the arrays.
    """
    keys = (blocks.retention, worth(blocks), _zone(blocks), -blocks.over_share)
    return np.lexsort((_ties(blocks), *(key for key in keys if _varies(key))))


def coldest(
    blocks: BlockArrays, among: NDArray[np.int64], count: int, *, ordered: bool = True
) -> NDArray[np.int64]:
    """The first ``count`` of :func:`coldest_first` of some blocks, or all if there are fewer.

    Args:
        blocks: what is known of all blocks.
        among: indices of those in question, ascending.
        count: how many.
        ordered: whether they have to come in order.

    Returns:
        Indices into the arrays.
    """
    certain, open_ = among[:0], among
    if 0 < count < len(among) and not _varies(blocks.over_share):
        # Numbers that are not negative are ordered as their bits; the last one is lost to the zone.
        bits = worth(blocks)[among].view(np.uint64) >> np.uint64(1)
        leading = bits | (_zone(blocks)[among].astype(np.uint64) << np.uint64(62))
        bar = np.partition(leading, count - 1)[count - 1]
        certain, open_ = among[leading < bar], among[leading == bar]
    if ordered:
        certain = _sorted(blocks, certain)
    return np.concatenate([certain, _sorted(blocks, open_)[: max(count - len(certain), 0)]])


def _sorted(blocks: BlockArrays, chosen: NDArray[np.int64]) -> NDArray[np.int64]:
    return chosen[coldest_first(blocks.take(chosen))] if len(chosen) > 1 else chosen


def _zone(blocks: BlockArrays) -> NDArray[np.uint8]:
    """0 for probation, 1 protected, 2 and 3 likewise for residents."""
    return 2 * blocks.resident.astype(np.uint8) + blocks.protected


def _ties(blocks: BlockArrays) -> NDArray[np.uint64]:
    """Counter, both ages and position in one number: 2, 16, 16 and 30 bits."""
    unused = (NEVER - blocks.ages).astype(np.uint64)
    ties = (blocks.heat.astype(np.uint64) << np.uint64(16)) | unused[:, -1]
    ties = (ties << np.uint64(16)) | unused[:, 0]
    return (ties << np.uint64(30)) | blocks.index.astype(np.uint64)


def _varies(key: NDArray[Any]) -> bool:
    return bool(len(key)) and bool((key != key[0]).any())
