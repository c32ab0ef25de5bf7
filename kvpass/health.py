# SPDX-License-Identifier: Apache-2.0
"""Is a running cache healthy? Pure functions over snapshots taken some seconds apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from kvpass.metrics.page import Page
from kvpass.runtime.metrics import Snapshot, ratio
from kvpass.sizes import format_size

Status = Literal["ok", "warn", "fail", "unknown"]

HIT_RATIO = 0.85
GPU_RATE = (20e9, 50e9)
"""Bytes a second of a healthy link; PCIe 4 x16 to 5 x16."""
CPU_RATE = 0.25
"""Of the fastest copy of the same process: below it, something holds copies up."""
BALANCE = (0.9, 1.1)
LINK_USE = 0.6
QUEUE_LIMIT = 512
"""Copies in flight at most, of runtime/migrate.py."""
MEMORY_GROWTH = 64 << 20
SLOWER = 0.8
"""Steps a second, later over earlier, below which a run has slowed down."""


@dataclass(frozen=True)
class Finding:
    """One row.

    Attributes:
        check: what was looked at.
        value: what was found.
        range: what is healthy.
        status: ``ok``, ``warn``, ``fail``, or ``unknown`` when there was nothing to judge.
        cause: why it may be so; empty unless warn or fail.
        remedy: what to change; likewise.
    """

    check: str
    value: str
    range: str
    status: Status
    cause: str = ""
    remedy: str = ""


def judge(pages: Sequence[Page]) -> list[Finding]:
    """All checks of a process.

    Args:
        pages: two or more of one process, oldest first.

    Raises:
        ValueError: fewer than two.
    """
    if len(pages) < 2:
        raise ValueError(f"{len(pages)} pages: two or more are needed")
    findings = [memory_growth(pages[0], pages[-1])]
    histories = [
        [next((s for s in page.managers if s.manager == last.manager), None) for page in pages]
        for last in pages[-1].managers
    ]
    whole = [[s for s in history if s is not None] for history in histories if None not in history]
    if not whole:
        nothing = "no cache lived through all samples"
        return [*findings, Finding("caches", nothing, "one or more", "unknown")]
    for history in whole:
        found = judge_manager(history)
        if len(whole) > 1:
            prefix = f"cache {history[0].manager}: "
            found = [replace(finding, check=prefix + finding.check) for finding in found]
        findings += found
    return findings


def judge_manager(history: Sequence[Snapshot]) -> list[Finding]:
    """All checks of one manager's snapshots, two or more, oldest first."""
    first, last = history[0], history[-1]
    return [
        hit_ratio(first, last),
        migration_rate(first, last),
        weight_balance(last),
        link_use(first, last),
        queue_depth(history),
        lost_blocks(last),
        tier_growth(first, last),
        slow_down(first, history[len(history) // 2], last),
    ]


# ------------------------------------------------------------------ helpers


def recent_hit_ratio(before: Snapshot, after: Snapshot) -> float | None:
    """Share of the accesses between two snapshots that found their block hot, or None."""
    hot = after.counters.hot_accesses - before.counters.hot_accesses
    cold = after.counters.cold_accesses - before.counters.cold_accesses
    return ratio(hot, hot + cold)


def rates(before: Snapshot, after: Snapshot) -> dict[str, float | None]:
    """Bytes a second while copying, ``store`` and ``load``, between two snapshots."""
    a, b = before.counters, after.counters
    return {
        "store": ratio(b.stored_bytes - a.stored_bytes, b.store_seconds - a.store_seconds),
        "load": ratio(b.loaded_bytes - a.loaded_bytes, b.load_seconds - a.load_seconds),
    }


def throughput(before: Snapshot, after: Snapshot) -> dict[str, float]:
    """Bytes a second of wall clock, ``store`` and ``load``, between two snapshots."""
    seconds = after.time - before.time
    a, b = before.counters, after.counters
    moved = {
        "store": b.stored_bytes - a.stored_bytes,
        "load": b.loaded_bytes - a.loaded_bytes,
    }
    return {name: size / seconds if seconds > 0 else 0.0 for name, size in moved.items()}


def steps_a_second(before: Snapshot, after: Snapshot) -> float | None:
    """Forward passes a second between two snapshots, or None."""
    return ratio(after.counters.steps - before.counters.steps, after.time - before.time)


def _thrash(before: Snapshot, after: Snapshot) -> int:
    """Windows between two snapshots in which blocks bounced."""
    return after.counters.thrash_events - before.counters.thrash_events


def _pressed(snapshot: Snapshot) -> bool:
    """Whether the hot tier is about as full as its threshold allows."""
    return snapshot.hot_used >= 0.9 * snapshot.threshold * snapshot.hot_capacity


def _gigabytes(rate: float) -> str:
    return f"{rate / 1e9:.2f} GB/s"


# ------------------------------------------------------------------- checks


def hit_ratio(before: Snapshot, after: Snapshot) -> Finding:
    """Accesses that found their block hot: between the samples, else since the start."""
    check, healthy = "hit ratio", f"at least {HIT_RATIO:.0%}"
    found, since = recent_hit_ratio(before, after), ""
    if found is None:
        found, since = after.counters.hit_ratio, " since the start"
    if found is None:
        return Finding(check, "no window of accesses has ended yet", healthy, "unknown")
    value = f"{found:.1%}{since}"
    if found >= HIT_RATIO:
        return Finding(check, value, healthy, "ok")
    if _pressed(after):
        share = after.hot_bytes / max(after.kv_bytes, 1)
        cause = f"the hot tier is full up to its threshold and holds {share:.0%} of the KV cache"
        remedy = f"raise hot above {format_size(after.hot_capacity)}"
    else:
        cause = "the hot tier has room, but blocks that are read are cold"
        remedy = "lower min_frequency or heat_interval, so that blocks are promoted sooner"
    return Finding(check, value, healthy, "warn", cause, remedy)


def migration_rate(before: Snapshot, after: Snapshot) -> Finding:
    """Rate of the copies between the samples, while they ran."""
    check = "migration rate"
    found = {name: rate for name, rate in rates(before, after).items() if rate is not None}
    gpu = after.device.startswith("cuda")
    healthy = (
        f"{GPU_RATE[0] / 1e9:.0f} to {GPU_RATE[1] / 1e9:.0f} GB/s or more"
        if gpu
        else f"at least {CPU_RATE:.0%} of the fastest copy"
    )
    if not found:
        return Finding(check, "nothing moved between the samples", healthy, "unknown")
    limits = {name: GPU_RATE[0] if gpu else CPU_RATE * getattr(after.link, name) for name in found}
    value = ", ".join(
        f"{name} {_gigabytes(rate)}"
        + ("" if gpu else f" (fastest {_gigabytes(getattr(after.link, name))})")
        for name, rate in found.items()
    )
    if all(rate >= limits[name] for name, rate in found.items()):
        return Finding(check, value, healthy, "ok")
    if gpu:
        cause = "copies are small, or the link is narrow or shared"
        remedy = "raise block_size; see kvpass doctor for the link's own rate"
    else:
        cause = "the cold tier's disk is slow, or other work holds the cores"
        remedy = "set cold_dir to a faster disk, or leave a core free (torch.set_num_threads)"
    return Finding(check, value, healthy, "warn", cause, remedy)


def weight_balance(after: Snapshot) -> Finding:
    """Hot share held over fair share, of every sequence."""
    check, healthy = "weight balance", f"{BALANCE[0]} to {BALANCE[1]}"
    found = [use.balance for use in after.by_sequence]
    known = sorted(balance for balance in found if balance is not None)
    if not known:
        return Finding(check, "no shares are kept", healthy, "unknown")
    plural = "s" if len(known) > 1 else ""
    value = f"{known[0]:.2f} to {known[-1]:.2f} over {len(known)} sequence{plural}"
    if BALANCE[0] <= known[0] and known[-1] <= BALANCE[1]:
        return Finding(check, value, healthy, "ok")
    cause = "some sequences hold more of the hot tier than they are due, others less"
    remedy = "wait for the next windows; if it stays, see qos of their caches, or raise hot"
    return Finding(check, value, healthy, "warn", cause, remedy)


def link_use(before: Snapshot, after: Snapshot) -> Finding:
    """Bytes moved over what the link could have moved, while copies wait."""
    check, healthy = "link use", f"at least {LINK_USE:.0%} while copies wait"
    if not (before.queue and after.queue):
        return Finding(check, "no copies wait", healthy, "unknown")
    moved = throughput(before, after)
    uses = [
        moved[name] / getattr(after.link, name)
        for name in ("store", "load")
        if getattr(after.link, name) > 0
    ]
    if not uses:
        return Finding(check, "no copy has ended yet", healthy, "unknown")
    value = f"{max(uses):.0%}"
    if max(uses) >= LINK_USE:
        return Finding(check, value, healthy, "ok")
    cause = "copies wait although the link is idle: they are started and published between steps"
    remedy = "a larger block_size makes fewer of them; or the cold tier is full: raise cold"
    return Finding(check, value, healthy, "warn", cause, remedy)


def queue_depth(history: Sequence[Snapshot]) -> Finding:
    """Copies in flight and waiting: bounded, and not growing from sample to sample."""
    check, healthy = "queue depth", f"at most {QUEUE_LIMIT}, not growing"
    depths = [snapshot.queue for snapshot in history]
    value = " -> ".join(map(str, depths))
    # Two samples say little; a rise over all three or more does.
    grows = len(depths) > 2 and all(a < b for a, b in zip(depths, depths[1:], strict=False))
    if depths[-1] <= QUEUE_LIMIT and not grows:
        return Finding(check, value, healthy, "ok")
    last = history[-1]
    cold = last.tiers.get("cold")
    if cold is not None and cold.capacity - cold.used < cold.capacity // 50:
        cause, remedy = "the cold tier is full, so nothing can be written through", "raise cold"
    else:
        cause = "blocks become full faster than they are copied"
        remedy = "shorter prompts at a time, or a faster cold tier (cold_dir, a wider link)"
    return Finding(check, value, healthy, "warn", cause, remedy)


def lost_blocks(after: Snapshot) -> Finding:
    """Slots in use that no live sequence and no copy in flight holds."""
    lost = {name: use.used - use.held for name, use in after.tiers.items() if use.used != use.held}
    check, healthy = "lost blocks", "0 B"
    if not lost:
        return Finding(check, "0 B", healthy, "ok")
    value = ", ".join(f"{name} {format_size(size)}" for name, size in lost.items())
    cause = f"slots were not given back; {after.sequences} sequences are alive"
    remedy = "release the cache, or restart; please report it with kvpass metrics --json"
    return Finding(check, value, healthy, "fail", cause, remedy)


def tier_growth(before: Snapshot, after: Snapshot) -> Finding:
    """Slots in use that grow while the stored tokens do not."""
    check, healthy = "tier growth", "do not grow"
    if after.tokens > before.tokens or before.queue or after.queue:
        return Finding(check, "tokens or copies come in", healthy, "unknown")
    grown = {
        name: use.used - before.tiers[name].used
        for name, use in after.tiers.items()
        if name in before.tiers and use.used > before.tiers[name].used
    }
    # What a promotion takes of the hot tier is no growth: the block had its place below already.
    loaded = after.counters.loaded_bytes - before.counters.loaded_bytes
    if loaded >= grown.get("hot", 0):
        grown.pop("hot", None)
    if not grown:
        return Finding(check, "as before", healthy, "ok")
    value = ", ".join(f"{name} +{format_size(size)}" for name, size in grown.items())
    cause = f"{after.tokens} tokens need more room than {before.tokens} did"
    remedy = "release caches that are no longer used; please report it if there are none"
    return Finding(check, value, healthy, "fail", cause, remedy)


def memory_growth(before: Page, after: Page) -> Finding:
    """Host memory of the process that grows by more than the tiers took."""
    healthy = f"at most +{format_size(MEMORY_GROWTH)} beyond the tiers"
    if not (before.host_memory and after.host_memory):
        return Finding("host memory", "not known on that system", healthy, "unknown")
    taken = [
        sum(use.used for s in page.managers for use in s.tiers.values()) for page in (before, after)
    ]
    grown = after.host_memory - before.host_memory - max(0, taken[1] - taken[0])
    value = f"{format_size(after.host_memory)}, +{format_size(max(grown, 0))} beyond the tiers"
    if grown <= MEMORY_GROWTH:
        return Finding("host memory", value, healthy, "ok")
    cause = "something outside the tiers grows: compilation, or tensors that are kept"
    remedy = "look again when the model has compiled; if it goes on, look for kept outputs"
    return Finding("host memory", value, healthy, "warn", cause, remedy)


def slow_down(first: Snapshot, middle: Snapshot, last: Snapshot) -> Finding:
    """Steps a second that fall while more blocks are read cold or move to and fro."""
    check, healthy = "speed", f"at least {SLOWER:.0%} of before"
    earlier, later = steps_a_second(first, middle), steps_a_second(middle, last)
    if not earlier or later is None or middle is first or middle is last:
        return Finding(check, "too few steps to compare", healthy, "unknown")
    value = f"{earlier:.1f} -> {later:.1f} steps/s"
    if later >= SLOWER * earlier:
        return Finding(check, value, healthy, "ok")
    hits = recent_hit_ratio(first, middle), recent_hit_ratio(middle, last)
    thrash = _thrash(first, middle), _thrash(middle, last)
    fewer_hits = None not in hits and (hits[1] or 0) < (hits[0] or 0) - 0.02
    if thrash[1] > thrash[0]:
        cause = (
            f"blocks move to and fro (in {thrash[0]} -> {thrash[1]} windows); demotion starts at "
            f"{last.threshold:.2f} of the hot tier by now"
        )
        remedy = f"raise hot above {format_size(last.hot_capacity)}, or raise heat_interval"
    elif fewer_hits and _pressed(last):
        cause = f"hot is too small: hits fell from {hits[0]:.0%} to {hits[1]:.0%}"
        remedy = f"raise hot above {format_size(last.hot_capacity)}"
    elif fewer_hits:
        cause = f"too little of each sequence stays hot: hits fell to {hits[1]:.0%}"
        remedy = "raise resident_ratio, e.g. from 0.2 to 0.3"
    elif last.counters.steps == middle.counters.steps:
        cause = "no step ended in the second half: the run is over, or in a long prompt"
        remedy = "take the samples while it decodes"
    else:
        cause = "not the cache: hits and moves are as before"
        remedy = "look for other work on this machine, or a longer prompt"
    return Finding(check, value, healthy, "warn", cause, remedy)
