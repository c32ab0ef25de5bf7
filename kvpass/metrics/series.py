# SPDX-License-Identifier: Apache-2.0
"""The series: name, type, help, labels, and how each is read from a snapshot.

Names follow https://prometheus.io/docs/practices/naming/: base units, ``_total`` on counters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from kvpass.runtime.metrics import Snapshot, TierUse

Values = Iterable[tuple[tuple[str, ...], float | None]]


@dataclass(frozen=True)
class Series:
    """One series.

    Attributes:
        name: without ``_total``.
        kind: type of Prometheus.
        help: one line.
        labels: besides ``manager`` and ``device``, which all have.
        values: (label values, number) pairs of a snapshot; a number that is None is left out.
    """

    name: str
    kind: Literal["counter", "gauge"]
    help: str
    labels: tuple[str, ...]
    values: Callable[[Snapshot], Values]

    @property
    def shown(self) -> str:
        """The name as it stands on the page."""
        return f"{self.name}_total" if self.kind == "counter" else self.name


def _one(read: Callable[[Snapshot], float | None]) -> Callable[[Snapshot], Values]:
    return lambda snapshot: [((), read(snapshot))]


def _each(
    names: tuple[str, str], read: Callable[[Snapshot], tuple[float | None, float | None]]
) -> Callable[[Snapshot], Values]:
    return lambda snapshot: [
        ((name,), number) for name, number in zip(names, read(snapshot), strict=True)
    ]


def _tiers(read: Callable[[TierUse], float]) -> Callable[[Snapshot], Values]:
    return lambda snapshot: [((name,), read(use)) for name, use in snapshot.tiers.items()]


def _states(attribute: str) -> Callable[[Snapshot], Values]:
    def values(snapshot: Snapshot) -> Values:
        for name, group in snapshot.blocks.items():
            tier, _, state = name.partition("_")
            yield (tier, state), float(getattr(group, attribute))

    return values


def _both(store: str, load: str) -> Callable[[Snapshot], Values]:
    def read(snapshot: Snapshot) -> tuple[float, float]:
        return getattr(snapshot.counters, store), getattr(snapshot.counters, load)

    return _each(("store", "load"), read)


def _count(name: str) -> Callable[[Snapshot], Values]:
    return _one(lambda s: float(getattr(s.counters, name)))


SERIES: tuple[Series, ...] = (
    Series(
        "kvpass_accesses",
        "counter",
        "Accesses to blocks, by the tier the block was in when its window ended.",
        ("tier",),
        _each(("hot", "cold"), lambda s: (s.counters.hot_accesses, s.counters.cold_accesses)),
    ),
    Series(
        "kvpass_lookups",
        "counter",
        "Full blocks accessed in a window, each once a window, by the tier it was in.",
        ("tier",),
        _each(("hot", "cold"), lambda s: (s.counters.hot_lookups, s.counters.cold_lookups)),
    ),
    Series(
        "kvpass_hit_ratio",
        "gauge",
        "Share of all accesses so far that found the block hot; absent before the first window.",
        (),
        _one(lambda s: s.counters.hit_ratio),
    ),
    Series(
        "kvpass_migration_bytes",
        "counter",
        "Bytes copied between the tiers: store is hot to cold, load is cold to hot.",
        ("direction",),
        _both("stored_bytes", "loaded_bytes"),
    ),
    Series(
        "kvpass_migration_seconds",
        "counter",
        "Time that these copies took, without their wait in the queue.",
        ("direction",),
        _both("store_seconds", "load_seconds"),
    ),
    Series(
        "kvpass_migration_blocks",
        "counter",
        "Blocks copied between the tiers.",
        ("direction",),
        _both("stored_blocks", "loaded_blocks"),
    ),
    Series(
        "kvpass_link_bytes_per_second",
        "gauge",
        "Rate of the fastest copy so far; 0 before the first.",
        ("direction",),
        _each(("store", "load"), lambda s: (s.link.store, s.link.load)),
    ),
    Series(
        "kvpass_demoted_blocks",
        "counter",
        "Blocks whose hot copy was given up; moves no bytes.",
        (),
        _count("demoted_blocks"),
    ),
    Series(
        "kvpass_copy_failures",
        "counter",
        "Copies between the tiers that failed; the block stayed where it was.",
        (),
        _count("failed_moves"),
    ),
    Series(
        "kvpass_moves_in_flight",
        "gauge",
        "Copies that were started and are not accounted for yet.",
        ("direction",),
        _each(("store", "load"), lambda s: (s.stores_in_flight, s.loads_in_flight)),
    ),
    Series(
        "kvpass_backlog_blocks",
        "gauge",
        "Full blocks that wait for a copy to the cold tier to be started.",
        (),
        _one(lambda s: s.backlog),
    ),
    Series(
        "kvpass_blocks",
        "gauge",
        "Blocks by the tier that is read and their state; shared ones count once.",
        ("tier", "state"),
        _states("blocks"),
    ),
    Series(
        "kvpass_block_bytes",
        "gauge",
        "Bytes of these blocks' slots in that tier.",
        ("tier", "state"),
        _states("bytes"),
    ),
    Series(
        "kvpass_arena_capacity_bytes",
        "gauge",
        "Bytes that the arenas of a tier may take.",
        ("tier",),
        _tiers(lambda use: use.capacity),
    ),
    Series(
        "kvpass_arena_taken_bytes",
        "gauge",
        "Bytes of slabs taken from memory or disk.",
        ("tier",),
        _tiers(lambda use: use.taken),
    ),
    Series(
        "kvpass_arena_used_bytes",
        "gauge",
        "Bytes of slots in use.",
        ("tier",),
        _tiers(lambda use: use.used),
    ),
    Series(
        "kvpass_internal_fragmentation_ratio",
        "gauge",
        "Share of the slots in use that holds no tokens.",
        ("tier",),
        _tiers(lambda use: use.internal_fragmentation),
    ),
    Series(
        "kvpass_external_fragmentation_ratio",
        "gauge",
        "Share of the slabs taken that is not in use.",
        ("tier",),
        _tiers(lambda use: use.external_fragmentation),
    ),
    Series(
        "kvpass_kv_bytes", "gauge", "K and V of all stored tokens.", (), _one(lambda s: s.kv_bytes)
    ),
    Series("kvpass_tokens", "gauge", "Stored tokens.", (), _one(lambda s: s.tokens)),
    Series("kvpass_sequences", "gauge", "Live sequences.", (), _one(lambda s: s.sequences)),
    Series("kvpass_steps", "counter", "Forward passes.", (), _count("steps")),
    Series(
        "kvpass_demotion_threshold_ratio",
        "gauge",
        "Share of the hot arena in use at which demotion starts, now.",
        (),
        _one(lambda s: s.threshold),
    ),
    Series(
        "kvpass_thrash_events",
        "counter",
        "Windows in which many blocks bounced between the tiers; each lowers the threshold.",
        (),
        _count("thrash_events"),
    ),
)
