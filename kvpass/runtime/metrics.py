# SPDX-License-Identifier: Apache-2.0
"""Counters of what the runtime did, and a snapshot of where blocks lie."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass
class Counters:
    """Monotonic counts of one manager.

    Attributes:
        stored_blocks: blocks copied from the hot tier to the cold one (write-through).
        stored_bytes: bytes of them.
        loaded_blocks: blocks copied from the cold tier to the hot one (promotion).
        loaded_bytes: bytes of them.
        demoted_blocks: blocks whose hot copy was given up; moves no bytes.
        placed_cold_blocks: blocks written to the cold tier directly, for want of hot room.
        spilled_blocks: unfinished blocks that had to live in the cold tier.
        copied_blocks: copies on write.
        failed_moves: copies between the tiers that failed; the block stays where it was.
        steps: forward passes.
        thrash_events: windows in which many blocks bounced between the tiers.
    """

    stored_blocks: int = 0
    stored_bytes: int = 0
    loaded_blocks: int = 0
    loaded_bytes: int = 0
    demoted_blocks: int = 0
    placed_cold_blocks: int = 0
    spilled_blocks: int = 0
    copied_blocks: int = 0
    failed_moves: int = 0
    steps: int = 0
    thrash_events: int = 0


@dataclass(frozen=True)
class Snapshot:
    """Where the KV bytes of a manager are now; sizes in bytes.

    Attributes:
        kv_bytes: K and V bytes of all stored tokens.
        hot_bytes: those with a copy in the hot tier.
        cold_only_bytes: those whose only readable copy is outside the hot tier.
        hot_capacity: size of the hot arena.
        hot_used: bytes of hot slots in use.
        cold_used: bytes of cold slots in use.
        sequences: live sequences.
        threshold: share of the hot arena in use at which demotion starts now; lower than configured
            while blocks thrash.
        counters: see :class:`Counters`.
    """

    kv_bytes: int
    hot_bytes: int
    cold_only_bytes: int
    hot_capacity: int
    hot_used: int
    cold_used: int
    sequences: int
    threshold: float
    counters: Counters

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)
