# SPDX-License-Identifier: Apache-2.0
"""Thrashing: blocks that bounce between the tiers, and the threshold that steps down for it."""

from __future__ import annotations

from dataclasses import dataclass, replace

BOUNCE_WINDOWS = 4
"""A promotion this many windows after the block's demotion, or fewer, is a bounce."""

THRASH_SHARE = 1 / 16
"""Bounces in a window, of the arena's slots, that are thrashing."""

CALM_SHARE = 1 / 64
"""Bounces in a window, of the arena's slots, up to which it was calm."""

CALM_WINDOWS = 4
"""Calm windows in a row after which the threshold goes one step back up."""

STEP = 0.1
"""Of the threshold."""

MAX_LEVEL = 3
"""Steps down at most: from 0.8 to 0.5."""


@dataclass(frozen=True)
class Threshold:
    """The share of the hot arena in use at which demotion starts.

    Attributes:
        base: as configured, 0 to 1.
        level: steps it is below that.
        calm: calm windows in a row.
        events: windows that thrashed.
    """

    base: float
    level: int = 0
    calm: int = 0
    events: int = 0

    @property
    def value(self) -> float:
        """The threshold now; never below a step, nor above what was configured."""
        return min(self.base, max(self.base - self.level * STEP, STEP))

    def after(self, bounces: int, slots: int) -> Threshold:
        """The threshold after a window.

        It steps down when many blocks bounced, and back up only after several windows in which few
        did; between the two bounds it stays, so that it does not swing.

        Args:
            bounces: promotions of blocks that were demoted shortly before.
            slots: of the hot arena.
        """
        if bounces >= max(2.0, slots * THRASH_SHARE):
            level = min(self.level + 1, MAX_LEVEL)
            return replace(self, level=level, calm=0, events=self.events + 1)
        if bounces > slots * CALM_SHARE:
            return replace(self, calm=0)
        if self.calm + 1 >= CALM_WINDOWS:
            return replace(self, level=max(self.level - 1, 0), calm=0)
        return replace(self, calm=self.calm + 1)
