# SPDX-License-Identifier: Apache-2.0
"""The simulator: its bounds bound, its classics are the classics, and ours is the runtime's."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kvpass
from kvpass.config import Config
from kvpass.errors import ConfigError
from kvpass.runtime.simulate import compare, hot_slots
from kvpass.runtime.simulate.classic import ARC, CLASSICS, LFU, LRU, LRU2
from kvpass.runtime.simulate.events import Tick, events
from kvpass.runtime.simulate.optimum import optimum_hits
from kvpass.runtime.simulate.ours import replay_ours
from kvpass.runtime.trace import Recorder, Trace, load_trace
from tests.runtime.harness import BLOCK

TRACES = Path(__file__).parents[2] / "benchmarks" / "traces"
MEMORY = Config().memory


def random_trace(seed: int, ticks: int, layers: int = 2, wide: int = 6) -> Trace:
    rng = np.random.default_rng(seed)
    blocks = 2 + np.arange(ticks) * (wide - 2) // max(ticks, 1)
    blocks = np.broadcast_to(blocks[:, None, None], (ticks, layers, 1)).astype(np.int32)
    counts = rng.poisson(rng.gamma(0.5, 1.0, (layers, 1, wide)), (ticks, layers, 1, wide))
    counts[np.arange(wide) >= blocks[..., None]] = 0
    return Trace(
        "random", 64, (2,) * layers, (4096,) * layers, 128, 128 + ticks, 1, counts, blocks[0],
        blocks,
    )  # fmt: skip


@settings(max_examples=40)
@given(
    st.integers(0, 10**6),
    st.integers(1, 90),
    st.integers(1, 12),
    st.integers(1, 16),
    st.integers(0, 300),
)
def test_no_policy_beats_the_optimum(seed, ticks, slots, interval, resident):
    trace = random_trace(seed, ticks)
    happens = events(trace)
    best = optimum_hits(happens, slots)
    for make in CLASSICS.values():
        policy = make(slots)
        hits = 0
        for tick in happens:
            for block in tick.created.tolist():
                policy.create(block)
            hits += sum(policy.request(block) for block in tick.requests.tolist())
        assert hits <= best
    memory = Config(heat_interval=interval, resident_tokens=resident).memory
    ours = replay_ours(trace, happens, slots, memory)
    ahead = optimum_hits(happens, slots, ours.windows)
    assert max(ours.hits, best) <= ahead


@given(
    st.lists(st.sampled_from("abcd"), min_size=1, max_size=9),
    st.integers(1, 3),
)
def test_the_optimum_is_what_trying_everything_finds(requests, slots):
    """Against a search of all choices: which block to drop, or to drop none and bypass."""
    order = [ord(c) - ord("a") for c in requests]
    ticks = [Tick(np.arange(4), np.array(order))]

    def best(position: int, hot: frozenset[int]) -> int:
        if position == len(order):
            return 0
        block = order[position]
        hit = block in hot
        pool = hot | {block}
        return hit + max(
            best(position + 1, frozenset(keep))
            for size in range(min(slots, len(pool)) + 1)
            for keep in itertools.combinations(sorted(pool), size)
            if size == min(slots, len(pool))
        )

    start = max(best(0, frozenset(hot)) for hot in itertools.combinations(range(4), slots))
    assert optimum_hits(ticks, slots) == start


def hits_of(policy, text: str) -> str:
    return "".join("h" if policy.request(ord(c)) else "." for c in text)


def test_classics_do_as_their_papers_say():
    assert hits_of(LRU(2), "abacab") == "..h.h."
    assert hits_of(LFU(2), "aabcacb") == ".h..hh."
    assert hits_of(LRU2(2), "aabcacb") == ".h..hh.", "blocks seen once leave first"
    scan = "aabb" + "cdefgh" + "ab"
    assert hits_of(LRU(4), scan)[-2:] == ".."
    assert hits_of(ARC(4), scan)[-2:] == "hh", "a scan does not wash out what was seen twice"
    assert hits_of(LRU(0), "aa") == hits_of(LFU(0), "aa") == hits_of(ARC(0), "aa") == ".."


@settings(max_examples=30)
@given(st.lists(st.integers(0, 12), max_size=200), st.integers(1, 6))
def test_classics_hold_no_more_than_their_slots(requests, slots):
    arc, lru, lfu = ARC(slots), LRU(slots), LFU(slots)
    for block in requests:
        for policy in (arc, lru, lfu):
            policy.request(block)
        assert len(arc._t1) + len(arc._t2) <= slots
        assert len(arc._t1) + len(arc._b1) <= slots
        assert len(arc._t1) + len(arc._t2) + len(arc._b1) + len(arc._b2) <= 2 * slots
        assert max(len(lru._hot), len(lfu._hot)) <= slots


@pytest.mark.parametrize("slots", [14, 22])
def test_ours_is_what_the_runtime_does(slots):
    """The same blocks hot at every step, and the same moves, as a real cache of that size."""

    class Model:
        num_hidden_layers = 2

    torch.manual_seed(slots)
    size = 2 * BLOCK * 2 * 16 * 4
    options = {"hot": slots * size, "heat_interval": 8, "resident_tokens": 2 * BLOCK}
    cache = kvpass.TieredCache(Model(), 1000, block_size=BLOCK, **options)
    state = cache._state
    places: list[np.ndarray] = []

    def forward(tokens: int, keys: torch.Tensor, queries: torch.Tensor) -> None:
        from kvpass.runtime.geometry import BlockGeometry

        geometry = BlockGeometry(2, 16, 16, torch.float32, BLOCK)
        manager, batch = state.bind(1, torch.device("cpu"), {0: geometry, 1: geometry}, tokens)
        with manager.step(batch, tokens, [0, 1]) as rows:
            places.append(np.array([[b.hot is not None for b in row[0]] for row in batch.blocks]))
            for layer in range(2):
                token = torch.ops.kvpass.append(keys, keys, rows, layer, BLOCK)
                torch.ops.kvpass.attend(
                    queries, keys, keys, token, rows, layer, BLOCK, 1.0, True, None, None
                )
        manager.settle()

    themes = torch.randn(20, 16)
    with Recorder(cache) as recorder:
        prompt = themes.repeat_interleave(BLOCK, 0)[: 19 * BLOCK + 5]
        keys = prompt.expand(1, 2, -1, 16).contiguous()
        forward(len(prompt), keys, keys)
        places.clear()
        for step in range(120):
            about = themes[(step // 25 * 5) % 20] + themes[(step // 7) % 20]
            query = (about + 0.3 * torch.randn(16)).expand(1, 4, 1, 16).contiguous()
            forward(1, torch.zeros(1, 2, 1, 16), query)
    trace = recorder.trace()
    memory = cache.kvpass_config.memory
    ticks = events(trace)
    assert trace.prompt_tokens == len(prompt)
    ours = replay_ours(trace, ticks, slots, memory)
    wide = trace.counts.shape[3]
    real = 0
    for tick, place in zip(ticks, places, strict=True):
        real += int(place[tick.requests // wide, tick.requests % wide].sum())
    total = sum(len(tick.requests) for tick in ticks)
    counters = cache.manager.counters
    assert counters.loaded_blocks > 5
    assert counters.spilled_blocks == 0
    assert (ours.hits, ours.moves) == (real, counters.loaded_blocks)
    assert 0 < real < total


def test_hot_sizes_are_shares_or_bytes():
    trace = random_trace(0, 30)
    assert hot_slots("50%", trace) == 6 * trace.blocks[-1].sum() // 12
    assert hot_slots("8KiB", trace) == 2
    for wrong in ("0%", "101%", "nan%", "x%", "-5%", "", "5", "1KiB", "1%"):
        with pytest.raises(ConfigError, match="--hot"):
            hot_slots(wrong, trace)


def test_a_recorded_trace_replays_and_kvpass_keeps_up_with_the_classics():
    trace = load_trace(TRACES / "law.npz")
    for hot in ("25%", "50%"):
        result = compare(trace, hot, MEMORY)
        ratio = {row.policy: row.hit_ratio for row in result.rows}
        best = max(ratio[name] for name in CLASSICS)
        assert best - 0.01 <= ratio["kvpass"] <= ratio["Belady + windows"] <= 1
        assert best <= ratio["Belady"]
        moves = {row.policy: row.moves for row in result.rows}
        assert moves["kvpass"] < moves["LRU-2"]


def test_a_policy_that_never_learns_does_worse():
    """The comparison above can fail: here no count of any block is read."""
    trace = load_trace(TRACES / "law.npz")
    slow = Config(heat_interval=10**6, min_frequency=10**9).memory
    ratio = {row.policy: row.hit_ratio for row in compare(trace, "25%", slow).rows}
    assert ratio["kvpass"] < ratio["LRU"] - 0.01


def test_several_steps_a_tick_are_fewer_requests():
    trace = random_trace(3, 40)
    coarse = replace(
        trace,
        interval=4,
        counts=trace.counts.reshape(10, 4, *trace.counts.shape[1:]).sum(1),
        blocks=trace.blocks[3::4],
    )
    fine = compare(trace, "50%", MEMORY)
    result = compare(coarse, "50%", MEMORY)
    assert 0 < result.requests < fine.requests
