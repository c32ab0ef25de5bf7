# SPDX-License-Identifier: Apache-2.0
"""Does migration of other sequences' blocks slow a running sequence, and who gets the link?

A decode step of an 8B shape over 32,768 tokens, captured into a CUDA graph and replayed, while the
blocks of another sequence are promoted as fast as the link takes them and demoted again. Once with
all blocks of the running sequence in device memory, once with every second one in pinned host
memory, which its kernels read in place over the same link. Rates are of the same rounds; a round is
64 steps (hot) or 12 (streaming), after which the sequence is cut back.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from benchmarks import ratios

pytest.importorskip("triton")
from benchmarks.decode_8b import GEOMETRY, LAYERS, Sequence, Weights
from kvpass.runtime.batch import Batch, Block
from kvpass.runtime.manager import Manager
from kvpass.runtime.migrate import QUEUE_LIMIT
from kvpass.runtime.mover import movable

pytest_plugins = ["benchmarks.ratios"]
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

TOKENS = 32768
ROUNDS = 8
AHEAD = 1  # steps the host launches ahead of the one that runs, as a loop that reads tokens does
MOVES = {"hot": 288, "streaming": QUEUE_LIMIT}  # a step, of 1 MiB: 288 are 50 GB/s at 6 ms
STEPS = {"hot": 64, "streaming": 12}
# scenario -> (others migrate, quality of service of the running and the other sequence, target)
SCENES: dict[str, dict[str, tuple[bool, float, float, float | None]]] = {
    "hot": {
        "undisturbed, first": (False, 0.5, 0.5, None),
        "others migrate": (True, 0.5, 0.5, 1 / 1.03),
        "undisturbed, last": (False, 0.5, 0.5, None),
    },
    "streaming": {
        "undisturbed, first": (False, 0.5, 0.5, None),
        "others migrate, same priority": (True, 0.5, 0.5, None),
        "others migrate, low priority": (True, 0.9, 0.0, 1 / 1.15),
        "undisturbed, last": (False, 0.5, 0.5, None),
    },
}
BURST = 32
BURST_TOKENS = 2048


class Flood:
    """Keeps the queue of copies full: promotes a sequence's blocks, and demotes what arrived."""

    def __init__(self, sequence: Sequence, moves: int) -> None:
        self.moves = moves
        self.cold: deque[Block] = deque(
            block for row in sequence.batch.blocks for block in row[0] if block.full
        )
        self.hot: deque[Block] = deque()
        self.on = False

    def before_step(self, manager: Manager, _: Batch) -> None:
        """Hook of the manager, under its lock."""
        if not self.on:
            return
        for _ in range(len(self.hot)):
            block = self.hot.popleft()
            if block.hot is not None and movable(block):
                manager.mover.demote(block)
                self.cold.append(block)
            else:
                self.hot.append(block)
        for _ in range(min(len(self.cold), self.moves)):
            block = self.cold[0]
            if not movable(block) or not manager.mover.promote(block):
                break
            self.hot.append(self.cold.popleft())


@pytest.fixture(scope="module")
def weights() -> Iterator[Weights]:
    torch.manual_seed(0)
    yield Weights()


class Pair:
    """A running sequence and another one whose blocks are all in host memory."""

    def __init__(self, weights: Weights, kind: str) -> None:
        self.manager = Manager(
            device="cuda", hot="5632MiB", cold="10GiB", gpu_threshold=1.0, resident_tokens=0,
            min_frequency=1e9,  # nothing moves but what the flood moves
        )  # fmt: skip
        self.running = Sequence(self.manager, TOKENS)
        self.other = Sequence(self.manager, TOKENS)
        self.manager.place(self.other.batch, lambda *_: False)
        self.manager.place(self.running.batch, lambda _, __, i: kind == "hot" or i % 2 == 0)
        self.running.capture(weights)
        self.flood = Flood(self.other, MOVES[kind])
        self.manager.before_step = self.flood.before_step

    def serve(self, qos: float, other: float) -> None:
        for sequence, value in ((self.running, qos), (self.other, other)):
            sequence.batch.service.qos = value
            sequence.batch.service.window(1.0)


@pytest.fixture(scope="module")
def pairs(weights: Weights) -> Iterator[dict[str, Pair]]:
    made: dict[str, Pair] = {}
    yield made
    made.clear()
    gc.collect()


@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind, scenes in SCENES.items() for name in scenes]
)
def test_step(
    benchmark: Any, request: pytest.FixtureRequest, weights: Weights, pairs: dict[str, Pair],
    kind: str, name: str,
) -> None:  # fmt: skip
    if kind not in pairs:
        pairs.clear()
        gc.collect()
        torch.cuda.empty_cache()
        pairs[kind] = Pair(weights, kind)
    pair = pairs[kind]
    on, qos, other, target = SCENES[kind][name]
    pair.serve(qos, other)
    pair.running.step()
    torch.cuda.synchronize()
    before = pair.running.logits.clone()
    pair.running.rewind()
    rates: list[float] = []
    counters = pair.manager.counters

    def setup() -> None:
        pair.flood.on = False
        pair.running.rewind()
        pair.manager.settle()
        pair.flood.on = on

    def steps() -> None:
        loaded, begin = counters.loaded_bytes, time.perf_counter()
        launched: deque[torch.cuda.Event] = deque()
        for _ in range(STEPS[kind]):
            pair.running.step()
            launched.append(torch.cuda.current_stream().record_event())
            if len(launched) > AHEAD:
                launched.popleft().synchronize()
        torch.cuda.synchronize()
        rates.append((counters.loaded_bytes - loaded) / (time.perf_counter() - begin) / 1e9)

    benchmark.group = f"8B step, 32k, {kind}"
    benchmark.pedantic(steps, setup=setup, rounds=ROUNDS, iterations=1, warmup_rounds=2)
    pair.flood.on = False
    pair.running.rewind()
    pair.manager.settle()
    streamed = pair.running.cold_bytes
    pair.running.step()
    torch.cuda.synchronize()
    assert torch.equal(pair.running.logits, before), "migration changed a result"
    pair.running.rewind()
    if benchmark.stats is None:
        return
    seconds = benchmark.stats.stats.median / STEPS[kind]
    migrated = statistics.median(rates)
    benchmark.extra_info.update(
        ms_a_step=seconds * 1e3,
        migrated_gb_per_s=migrated,
        streamed_gb_per_s=streamed / seconds / 1e9,
        predicted_ratio=target,
    )
    facts = {
        "step": f"{seconds * 1e3:.2f} ms",
        "migrated": f"{migrated:.1f} GB/s",
        "streamed": f"{streamed / seconds / 1e9:.1f} GB/s",
    }
    line = ratios.Line(
        benchmark.group, name, 1 / seconds, "steps/s", "undisturbed",
        is_reference=name.startswith("undisturbed"), ours=on, target=target, facts=facts,
    )  # fmt: skip
    ratios.note(request.config, benchmark.fullname, line)


def test_burst(benchmark: Any) -> None:
    """Memory for 32 new sequences at once, in an arena that has to grow for them."""
    layers = range(LAYERS)
    managers = []

    def fresh() -> tuple[tuple[Manager], dict[str, Any]]:
        managers.clear()
        gc.collect()
        torch.cuda.empty_cache()
        size = BURST * LAYERS * (BURST_TOKENS // GEOMETRY.block_size) * GEOMETRY.block_bytes
        managers.append(Manager(device="cuda", hot=2 * size, cold="1GiB", gpu_threshold=1.0))
        return (managers[0],), {}

    def burst(manager: Manager) -> None:
        for _ in range(BURST):
            batch = manager.new_batch(1, LAYERS, BURST_TOKENS)
            for layer in layers:
                batch.define(layer, GEOMETRY)
            manager.begin(batch, BURST_TOKENS, layers)
            manager.abort(batch)
        torch.cuda.synchronize()

    benchmark.group = "burst"
    benchmark.pedantic(burst, setup=fresh, rounds=5, iterations=1)
    assert managers[0].snapshot().hot_used >= BURST * LAYERS * 8 * GEOMETRY.block_bytes
