# SPDX-License-Identifier: Apache-2.0
"""Each check on a healthy pair of snapshots, and on one for every fault that it knows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpass import health
from kvpass.metrics.page import Page, page, read_page, write_page
from kvpass.runtime import migrate
from kvpass.runtime.metrics import (
    BlockGroup,
    Counters,
    LinkRate,
    SequenceUse,
    Snapshot,
    TierUse,
)

MIB = 1 << 20


def snapshot(time: float = 0.0, tokens: int = 1000, **changes: Any) -> Snapshot:
    counters = changes.pop("counters", Counters())
    base = Snapshot(
        kv_bytes=100 * MIB,
        hot_bytes=50 * MIB,
        cold_only_bytes=50 * MIB,
        hot_capacity=100 * MIB,
        hot_used=50 * MIB,
        cold_used=80 * MIB,
        sequences=1,
        counters=counters,
        manager=1,
        time=time,
        threshold=0.8,
        tiers={
            "hot": TierUse(100 * MIB, 60 * MIB, 50 * MIB, 50 * MIB, 49 * MIB),
            "cold": TierUse(900 * MIB, 96 * MIB, 80 * MIB, 80 * MIB, 80 * MIB),
        },
        blocks={"hot_full": BlockGroup(1, MIB)},
        link=LinkRate(10e9, 10e9),
        by_sequence=[SequenceUse(1, 0, tokens, 100 * MIB, 50 * MIB)],
    )
    return replace(base, **changes)


def accessed(hot: float, cold: float, **more: Any) -> Counters:
    return Counters(hot_accesses=hot, cold_accesses=cold, **more)


def check(found: health.Finding, status: str, *words: str) -> None:
    assert found.status == status, found
    text = f"{found.value} {found.cause} {found.remedy}"
    assert all(word in text for word in words), (found, words)
    assert bool(found.cause) == bool(found.remedy) == (status in ("warn", "fail"))
    assert found.check and found.value and found.range


def test_hit_ratio() -> None:
    start, full = snapshot(), {"hot_used": 80 * MIB}
    check(health.hit_ratio(start, snapshot(counters=accessed(85, 15))), "ok", "85.0%")
    low = health.hit_ratio(start, snapshot(counters=accessed(84, 16), **full))
    check(low, "warn", "84.0%", "holds 50%", "raise hot above 100 MiB")
    roomy = health.hit_ratio(start, snapshot(counters=accessed(84, 16)))
    check(roomy, "warn", "has room", "lower min_frequency")
    check(health.hit_ratio(start, start), "unknown", "no window")
    # What happened before the first sample does not hide what happens now.
    old = snapshot(counters=accessed(1000, 0))
    check(health.hit_ratio(old, snapshot(counters=accessed(1010, 90))), "warn", "10.0%")
    check(health.hit_ratio(old, old), "ok", "100.0% since the start")


def moved(seconds: float, size: int = 10**9) -> Counters:
    return Counters(stored_bytes=size, store_seconds=seconds)


def test_migration_rate_on_a_gpu() -> None:
    start = snapshot(device="cuda:0")
    for seconds, status in ((0.05, "ok"), (1 / 55, "ok"), (0.04, "ok"), (0.06, "warn")):
        found = health.migration_rate(start, snapshot(device="cuda:0", counters=moved(seconds)))
        check(found, status, "store", "GB/s")
    check(found, "warn", "16.67", "raise block_size")
    check(health.migration_rate(start, start), "unknown", "nothing moved")


def test_migration_rate_on_a_cpu_is_against_its_own_fastest() -> None:
    start = snapshot()
    check(health.migration_rate(start, snapshot(counters=moved(0.3))), "ok", "3.33", "10.00")
    check(health.migration_rate(start, snapshot(counters=moved(0.5))), "warn", "cold_dir")
    both = Counters(loaded_bytes=10**9, load_seconds=5.0, stored_bytes=10**9, store_seconds=0.1)
    check(health.migration_rate(start, snapshot(counters=both)), "warn", "load 0.20", "store 10.00")


def balanced(*pairs: tuple[float, float]) -> Snapshot:
    uses = [SequenceUse(1, i, 10, 10, 10, fair, held) for i, (fair, held) in enumerate(pairs)]
    return snapshot(by_sequence=uses)


def test_weight_balance() -> None:
    check(health.weight_balance(balanced((0.5, 0.46), (0.5, 0.54))), "ok", "0.92 to 1.08")
    check(health.weight_balance(balanced((0.5, 0.4), (0.5, 0.5))), "warn", "0.80 to 1.00", "qos")
    check(health.weight_balance(balanced((0.5, 0.5), (0.5, 0.6))), "warn", "1.20")
    check(health.weight_balance(snapshot()), "unknown", "no shares")
    check(health.weight_balance(balanced((0.0, 0.0))), "unknown")


def test_link_use() -> None:
    busy = {"stores_in_flight": 3, "backlog": 2}

    def use(size: float) -> health.Finding:
        return health.link_use(
            snapshot(0.0, **busy), snapshot(1.0, counters=Counters(stored_bytes=int(size)), **busy)
        )

    check(use(6e9), "ok", "60%")
    check(use(5e9), "warn", "50%", "between steps")
    check(health.link_use(snapshot(0.0, **busy), snapshot(1.0)), "unknown", "no copies wait")
    none = {**busy, "link": LinkRate()}
    check(health.link_use(snapshot(**none), snapshot(1.0, **none)), "unknown", "no copy")


def depths(*queue: int, **changes: Any) -> list[Snapshot]:
    return [snapshot(float(i), backlog=n, **changes) for i, n in enumerate(queue)]


def test_queue_depth() -> None:
    assert health.QUEUE_LIMIT == migrate.QUEUE_LIMIT
    check(health.queue_depth(depths(0, 0, 0)), "ok", "0 -> 0 -> 0")
    check(health.queue_depth(depths(3, 500, 20)), "ok")
    check(health.queue_depth(depths(3, 5)), "ok")
    check(health.queue_depth(depths(3, 5, 9)), "warn", "faster than they are copied")
    check(health.queue_depth(depths(900, 800, 700)), "warn", "700")
    full = {"hot": TierUse(), "cold": TierUse(100, 100, 99, 99, 99)}
    check(health.queue_depth(depths(3, 5, 9, tiers=full)), "warn", "raise cold")


@given(st.lists(st.integers(0, 10**6), min_size=3, max_size=6))
def test_queue_depth_warns_of_growth_and_of_nothing_else(queue: list[int]) -> None:
    grows = queue == sorted(set(queue))
    found = health.queue_depth(depths(*queue))
    assert (found.status == "warn") == (grows or queue[-1] > health.QUEUE_LIMIT)


def test_lost_blocks() -> None:
    check(health.lost_blocks(snapshot()), "ok")
    tiers = {"hot": TierUse(9 * MIB, 4 * MIB, 2 * MIB, 0, 0), "cold": TierUse(9, 0, 0, 0, 0)}
    found = health.lost_blocks(snapshot(tiers=tiers, by_sequence=[], sequences=0))
    check(found, "fail", "hot 2 MiB", "0 sequences are alive")


def grown(hot: int = 0, cold: int = 0, **changes: Any) -> Snapshot:
    base = snapshot().tiers
    tiers = {
        "hot": replace(base["hot"], used=base["hot"].used + hot),
        "cold": replace(base["cold"], used=base["cold"].used + cold),
    }
    return snapshot(1.0, tiers=tiers, **changes)


def test_tier_growth() -> None:
    start = snapshot()
    check(health.tier_growth(start, snapshot(1.0)), "ok")
    check(health.tier_growth(start, grown(cold=MIB)), "fail", "cold +1 MiB", "1000 tokens")
    check(health.tier_growth(start, grown(hot=MIB)), "fail", "hot +1 MiB")
    check(health.tier_growth(start, grown(hot=MIB, tokens=1001)), "unknown")
    check(health.tier_growth(start, grown(hot=MIB, backlog=1)), "unknown")
    promoted = grown(hot=MIB, counters=Counters(loaded_bytes=MIB))
    check(health.tier_growth(start, promoted), "ok")


def test_memory_growth() -> None:
    def at(memory: int, *managers: Snapshot) -> Page:
        return Page("1", 1, memory, list(managers))

    before = at(1000 * MIB, snapshot())
    check(health.memory_growth(before, at(1064 * MIB, snapshot(1.0))), "ok")
    check(health.memory_growth(before, at(1065 * MIB, snapshot(1.0))), "warn", "+65 MiB", "kept")
    check(health.memory_growth(before, at(1080 * MIB, grown(hot=20 * MIB))), "ok")
    check(health.memory_growth(before, at(900 * MIB, snapshot(1.0))), "ok", "+0 B")
    check(health.memory_growth(at(0), at(0)), "unknown")


def three(
    steps: tuple[int, int], hits: tuple[float, float], thrash: tuple[int, int] = (0, 0), **now: Any
) -> list[Snapshot]:
    """Snapshots a second apart; steps, hit ratio and windows that thrashed of both halves."""
    first = Counters(steps=10)
    middle = Counters(
        steps=10 + steps[0],
        hot_accesses=100 * hits[0],
        cold_accesses=100 - 100 * hits[0],
        thrash_events=thrash[0],
    )
    last = Counters(
        steps=middle.steps + steps[1],
        hot_accesses=middle.hot_accesses + 100 * hits[1],
        cold_accesses=middle.cold_accesses + 100 - 100 * hits[1],
        thrash_events=sum(thrash),
    )
    return [snapshot(float(i), counters=c, **now) for i, c in enumerate((first, middle, last))]


@pytest.mark.parametrize(
    ("history", "status", "words"),
    [
        (three((100, 80), (0.9, 0.5)), "ok", "100.0 -> 80.0 steps/s"),
        (three((100, 60), (0.9, 0.5), hot_used=80 * MIB), "warn", "hot is too small|raise hot"),
        (three((100, 60), (0.9, 0.5)), "warn", "stays hot|raise resident_ratio, e.g. from 0.2"),
        (three((100, 60), (0.9, 0.9), (2, 9)), "warn", "2 -> 9 windows|at 0.80|raise hot above"),
        (three((100, 60), (0.9, 0.5), (2, 9)), "warn", "2 -> 9 windows"),
        (three((100, 60), (0.9, 0.9), (9, 9)), "warn", "not the cache|other work"),
        (three((100, 0), (0.9, 0.9)), "warn", "no step ended"),
        (three((0, 10), (0.9, 0.9)), "unknown", "too few steps"),
    ],
)  # fmt: skip
def test_slow_down(history: list[Snapshot], status: str, words: str) -> None:
    check(health.slow_down(*history), status, *words.split("|"))


def test_slow_down_without_counts_of_accesses() -> None:
    plain = [
        snapshot(float(i), counters=Counters(steps=steps)) for i, steps in enumerate((0, 100, 150))
    ]
    check(health.slow_down(*plain), "warn", "not the cache")
    check(health.slow_down(plain[0], plain[0], plain[1]), "unknown")


def test_judge_names_caches_where_there_are_several() -> None:
    def at(second: float, *managers: int) -> Page:
        return Page("1", 1, 10 * MIB, [snapshot(second, manager=m) for m in managers])

    alone = health.judge([at(0, 4), at(1, 4), at(2, 4, 5)])
    assert "hit ratio" in [finding.check for finding in alone]
    both = [finding.check for finding in health.judge([at(0, 4, 5), at(1, 4, 5)])]
    assert {"cache 4: speed", "cache 5: speed", "host memory"} <= set(both)
    assert len(both) == 1 + 2 * 8
    none = health.judge([at(0), at(1, 4)])
    assert [finding.status for finding in none] == ["ok", "unknown"]
    with pytest.raises(ValueError, match="two or more"):
        health.judge([at(0, 4)])


def test_a_page_survives_json() -> None:
    content = Page("1", 7, 5, [balanced((0.5, 0.25)), snapshot()])
    assert read_page(write_page(content)) == content
    assert read_page(write_page(page())).process == page().process
