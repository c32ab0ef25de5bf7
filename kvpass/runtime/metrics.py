# SPDX-License-Identifier: Apache-2.0
"""Counters of what the runtime did, and a snapshot of where blocks lie."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvpass.runtime.move import Move


@dataclass
class Counters:
    """Monotonic counts of one manager.

    Attributes:
        stored_blocks: blocks copied from the hot tier to the cold one (write-through).
        stored_bytes: bytes of them.
        store_seconds: how long these copies took, without their wait in the queue.
        loaded_blocks: blocks copied from the cold tier to the hot one (promotion).
        loaded_bytes: bytes of them.
        load_seconds: how long these copies took.
        demoted_blocks: blocks whose hot copy was given up; moves no bytes.
        placed_cold_blocks: blocks written to the cold tier directly, for want of hot room.
        spilled_blocks: unfinished blocks that had to live in the cold tier.
        copied_blocks: copies on write.
        failed_moves: copies between the tiers that failed; the block stays where it was.
        cancelled_moves: copies called off because nobody needs the block any more.
        steps: forward passes.
        hot_accesses: accesses (a decode step in which a block got its share of a head's softmax,
            averaged over KV heads) to blocks that were hot when their window ended.
        cold_accesses: those to blocks that were not.
        hot_lookups: full blocks accessed in a window, each counted once a window, that were hot.
        cold_lookups: those that were not.
        thrash_events: windows in which many blocks bounced between the tiers.
    """

    stored_blocks: int = 0
    stored_bytes: int = 0
    store_seconds: float = 0.0
    loaded_blocks: int = 0
    loaded_bytes: int = 0
    load_seconds: float = 0.0
    demoted_blocks: int = 0
    placed_cold_blocks: int = 0
    spilled_blocks: int = 0
    copied_blocks: int = 0
    failed_moves: int = 0
    cancelled_moves: int = 0
    steps: int = 0
    hot_accesses: float = 0.0
    cold_accesses: float = 0.0
    hot_lookups: int = 0
    cold_lookups: int = 0
    thrash_events: int = 0

    @property
    def hit_ratio(self) -> float | None:
        """Share of accesses that found the block hot; None before the first window."""
        return ratio(self.hot_accesses, self.hot_accesses + self.cold_accesses)


def ratio(part: float, whole: float) -> float | None:
    """``part / whole``, or None where there is nothing to divide."""
    return part / whole if whole else None


@dataclass
class LinkRate:
    """Bytes a second of the fastest copy so far, each way; 0 before the first.

    Attributes:
        store: hot to cold.
        load: cold to hot.
    """

    store: float = 0.0
    load: float = 0.0

    def note(self, move: Move) -> float:
        """Take a finished copy into account; returns its seconds."""
        seconds = move.seconds
        if seconds > 0 and (rate := move.size / seconds) > getattr(self, move.kind):
            setattr(self, move.kind, rate)
        return seconds


@dataclass(frozen=True)
class TierUse:
    """What the arenas of one tier hold; bytes.

    Attributes:
        capacity: what they may take.
        taken: slabs taken from memory or disk.
        used: slots in use.
        held: slots that live blocks and copies in flight hold; less than ``used`` is a leak.
        stored: K and V of stored tokens in them.
    """

    capacity: int = 0
    taken: int = 0
    used: int = 0
    held: int = 0
    stored: int = 0

    @property
    def internal_fragmentation(self) -> float:
        """Share of the slots in use that holds no tokens (unfinished blocks, alignment)."""
        return max(0.0, 1 - self.stored / self.used) if self.used else 0.0

    @property
    def external_fragmentation(self) -> float:
        """Share of the slabs that is not in use."""
        return 1 - self.used / self.taken if self.taken else 0.0


@dataclass(frozen=True)
class BlockGroup:
    """Blocks of one state, shared ones counted once.

    Attributes:
        blocks: how many.
        bytes: of their slots in the tier.
    """

    blocks: int = 0
    bytes: int = 0


@dataclass(frozen=True)
class SequenceUse:
    """One live sequence.

    Attributes:
        batch: number of the batch it belongs to, unique among live ones.
        sequence: its index in the batch.
        tokens: stored, of its longest layer.
        kv_bytes: K and V of them, all layers.
        hot_bytes: those with a copy in the hot tier.
        fair_share: share of the hot tier that it was due at the end of the last window, 0 to 1;
            None before the first.
        held_share: share of the hot tier that it held then, likewise.
    """

    batch: int
    sequence: int
    tokens: int
    kv_bytes: int
    hot_bytes: int
    fair_share: float | None = None
    held_share: float | None = None

    @property
    def balance(self) -> float | None:
        """Held share over fair share; None where either is not known."""
        if self.fair_share is None or self.held_share is None:
            return None
        return ratio(self.held_share, self.fair_share)


@dataclass(frozen=True)
class Snapshot:
    """Where the KV bytes of a manager are now, and what it did; sizes in bytes.

    Attributes:
        kv_bytes: K and V bytes of all stored tokens.
        hot_bytes: those with a copy in the hot tier.
        cold_only_bytes: those whose only readable copy is outside the hot tier.
        hot_capacity: size of the hot arena.
        hot_used: bytes of hot slots in use.
        cold_used: bytes of cold slots in use.
        sequences: live sequences.
        counters: see :class:`Counters`.
        manager: number of the manager, never used twice in a process.
        device: where attention is computed, ``cpu`` or ``cuda:0``.
        time: seconds of a clock that only runs forward, for rates between two snapshots.
        threshold: share of the hot arena in use at which demotion starts now; lower than configured
            while blocks thrash.
        tiers: ``hot`` and ``cold``.
        blocks: by place and state: ``hot_unfinished``, ``hot_full`` (not in the cold tier yet),
            ``hot_written_through`` (in both tiers), ``cold_full`` and ``cold_unfinished`` (in the
            cold tier only).
        stores_in_flight: copies hot to cold that were started and are not accounted for.
        loads_in_flight: copies cold to hot, likewise.
        backlog: full blocks that wait for a copy to the cold tier to be started.
        link: see :class:`LinkRate`.
        by_sequence: the live sequences.
    """

    kv_bytes: int
    hot_bytes: int
    cold_only_bytes: int
    hot_capacity: int
    hot_used: int
    cold_used: int
    sequences: int
    counters: Counters
    manager: int = 0
    device: str = "cpu"
    time: float = 0.0
    threshold: float = 0.0
    tiers: dict[str, TierUse] = field(default_factory=dict)
    blocks: dict[str, BlockGroup] = field(default_factory=dict)
    stores_in_flight: int = 0
    loads_in_flight: int = 0
    backlog: int = 0
    link: LinkRate = field(default_factory=LinkRate)
    by_sequence: list[SequenceUse] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        """Stored tokens of all sequences."""
        return sum(use.tokens for use in self.by_sequence)

    @property
    def queue(self) -> int:
        """Copies in flight and waiting."""
        return self.stores_in_flight + self.loads_in_flight + self.backlog

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)
