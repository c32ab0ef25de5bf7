# SPDX-License-Identifier: Apache-2.0
"""What is decided when a window ends, in one function for the runtime and the simulator."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from kvpass.runtime.policy.arrays import BlockArrays
from kvpass.runtime.policy.choose import HYSTERESIS, promotions, victims
from kvpass.runtime.policy.thrash import BOUNCE_WINDOWS
from kvpass.runtime.policy.zones import next_protected

MOVES = 2
"""A window promotes at most one in this many of the arena's slots."""


@dataclass(frozen=True)
class Plan:
    """Moves after a window; indices are into the arrays they were planned for.

    Attributes:
        protected: ``[N]`` bool, blocks of the protected zone.
        demoted: blocks to demote.
        promoted: pairs (block to promote, block whose slot it takes or -1), in order.
        bounces: promotions of blocks that were demoted shortly before.
    """

    protected: NDArray[np.bool_]
    demoted: NDArray[np.int64]
    promoted: list[tuple[int, int]]
    bounces: int


def plan(
    blocks: BlockArrays,
    hot: NDArray[np.bool_],
    *,
    slots: int,
    room: int,
    over: int,
    level: int,
    min_frequency: float,
    hot_zone_ratio: float,
) -> Plan:
    """Zones, then demotion, then promotion.

    Demotion needs both: use above the threshold, and rare access. Promotion may fill the arena
    above the threshold, since only rarely accessed blocks have to stay below it.

    Args:
        blocks: all blocks of one size, the window folded in.
        hot: ``[N]`` those in the hot tier.
        slots: slots of the hot arena.
        room: of them free.
        over: of them in use above the threshold; negative below it.
        level: steps that thrashing has lowered the threshold by; each also doubles the margin that
            a promotion needs over the block it replaces.
        min_frequency: accesses a window below which a block may be demoted, and from which one is
            promoted.
        hot_zone_ratio: protected share of the arena.
    """
    # A promise to keep some of each sequence hot does not go beyond its share.
    blocks = replace(blocks, resident=blocks.resident & (blocks.over_share == 0))
    blocks = replace(blocks, protected=next_protected(blocks, hot, slots, hot_zone_ratio))
    here = np.flatnonzero(hot) if over > 0 else np.zeros(0, dtype=np.int64)
    demoted = here[victims(blocks.take(here), over, min_frequency=min_frequency, pressure=False)]
    leaves = np.zeros(len(blocks), dtype=bool)
    leaves[demoted] = True
    promoted = promotions(
        replace(blocks, movable=blocks.movable & ~leaves),
        hot,
        room=max(room, 0) + len(demoted),
        limit=max(1, slots // MOVES),
        min_frequency=min_frequency,
        margin=HYSTERESIS * 2**level,
    )
    bounces = sum(int(blocks.demoted[block]) <= BOUNCE_WINDOWS for block, _ in promoted)
    return Plan(blocks.protected, demoted, promoted, bounces)
