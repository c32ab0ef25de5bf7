# SPDX-License-Identifier: Apache-2.0
"""Does migration of other sequences' blocks slow a running sequence, and who gets the link?

A decode step of an 8B shape over 32,768 tokens, captured into a CUDA graph and replayed, while
blocks of other sequences move: one's are promoted and demoted again, another's written through to
host memory. Once with all blocks of the running sequence in device memory, once with every second
one in pinned host memory, which its kernels read in place over the same link. Rates are of the same
rounds; a round is 64 steps (hot) or 12 (streaming) of a load that has been running for some, after
which the sequence is cut back. What plain copies of the same bytes cost, without any of this code,
is measured beside it: writes to device memory disturb its readers more than their bytes say.
"""

from __future__ import annotations

import gc
import statistics
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
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
LEAD = 4  # steps before each round with the same load
STEPS = {"hot": 64, "streaming": 12}
ROOM = 2048  # blocks of others in the hot tier at most
RATE = 40e9
PIECE = 8 << 20


@dataclass(frozen=True)
class Scene:
    """What else happens while a sequence decodes.

    Attributes:
        load, store: blocks of 1 MiB that others move, each step.
        plain: bytes that plain copies move to the device, a second.
        qos, other: quality of service of the running and the other sequences.
        target: speed to keep.
    """

    load: int = 0
    store: int = 0
    plain: float = 0.0
    qos: float = 0.5
    other: float = 0.5
    target: float | None = None

    @property
    def busy(self) -> bool:
        return bool(self.load or self.store or self.plain)


# At 5.7 ms a step, 240 blocks of 1 MiB are 44 GB/s.
SCENES = {
    "hot": {
        "undisturbed, first": Scene(),
        "plain copies to the device": Scene(plain=RATE, target=1 / 1.03),
        "others are promoted": Scene(load=240, target=1 / 1.03),
        "others are promoted and written through": Scene(load=130, store=130, target=1 / 1.03),
        "undisturbed, last": Scene(),
    },
    "streaming": {
        "undisturbed, first": Scene(),
        "others are promoted, same priority": Scene(load=QUEUE_LIMIT),
        "others are promoted, low priority": Scene(
            load=QUEUE_LIMIT, qos=0.9, other=0.0, target=1 / 1.15
        ),
        "undisturbed, last": Scene(),
    },
}
BURST = 32
BURST_TOKENS = 2048


class Flood:
    """Moves blocks: promotes cold ones and demotes what arrived; writes hot ones through again."""

    def __init__(self, cold: Sequence, hot: Sequence) -> None:
        self.scene = Scene()
        self.cold = deque(block for row in cold.batch.blocks for block in row[0] if block.full)
        self.stored = deque(block for row in hot.batch.blocks for block in row[0] if block.full)
        self.hot: deque[Block] = deque()

    def before_step(self, manager: Manager, _: Batch | None) -> None:
        """Hook of the manager, under its lock."""
        for _ in range(len(self.hot) if self.scene.busy else 0):
            block = self.hot.popleft()
            if block.hot is not None and movable(block):
                manager.mover.demote(block)
                self.cold.append(block)
            else:
                self.hot.append(block)
        for _ in range(min(len(self.cold), self.scene.load, ROOM - len(self.hot))):
            block = self.cold[0]
            if not movable(block) or not manager.mover.promote(block):
                break
            self.hot.append(self.cold.popleft())
        for _ in range(max(0, self.scene.store - manager.mover.backlog)):
            if self.stored[0].hot is None or not movable(self.stored[0]):
                break
            manager.mover.forget_cold(self.stored[0])
            self.stored.rotate(-1)


@contextmanager
def plain_copies(rate: float) -> Iterator[list[float]]:
    """Copies to the device beside the caller, ``rate`` bytes a second; yields what they reached."""
    rates: list[float] = []
    if not rate:
        yield rates
        return
    source = torch.empty(64 * PIECE, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(64 * PIECE, dtype=torch.uint8, device="cuda")
    end = threading.Event()

    def copy() -> None:
        stream = torch.cuda.Stream()
        ahead: deque[torch.cuda.Event] = deque()
        count, begin = 0, time.perf_counter()
        while not end.is_set():
            part = slice(count % 64 * PIECE, (count % 64 + 1) * PIECE)
            with torch.cuda.stream(stream):
                target[part].copy_(source[part], non_blocking=True)
            ahead.append(stream.record_event())
            if len(ahead) > 4:
                ahead.popleft().synchronize()
            count += 1
            time.sleep(max(0.0, begin + (count - 4) * PIECE / rate - time.perf_counter()))
        rates.append(count * PIECE / (time.perf_counter() - begin))

    thread = threading.Thread(target=copy)
    thread.start()
    try:
        yield rates
    finally:
        end.set()
        thread.join()


@contextmanager
def pump(pair: Pair, on: bool) -> Iterator[None]:
    """Keep the queue of copies full all the time, as many other sequences would."""
    end = threading.Event()

    def work() -> None:
        while not end.wait(2e-3):
            with pair.manager._section.lock:
                pair.manager.mover.collect()
                pair.flood.before_step(pair.manager, None)

    thread = threading.Thread(target=work)
    if on:
        thread.start()
    try:
        yield
    finally:
        end.set()
        if on:
            thread.join()


@pytest.fixture(scope="module")
def weights() -> Iterator[Weights]:
    torch.manual_seed(0)
    yield Weights()


class Pair:
    """A running sequence, one whose blocks are all in host memory, and one that is written."""

    def __init__(self, weights: Weights, kind: str) -> None:
        self.manager = Manager(
            device="cuda", hot="9GiB", cold="15GiB", gpu_threshold=1.0, resident_tokens=0,
            min_frequency=1e9,  # nothing moves but what the flood moves
        )  # fmt: skip
        self.running = Sequence(self.manager, TOKENS)
        self.others = [Sequence(self.manager, TOKENS), Sequence(self.manager, TOKENS // 2)]
        self.manager.place(self.others[0].batch, lambda *_: False)
        self.manager.place(self.others[1].batch, lambda *_: True)
        self.manager.place(self.running.batch, lambda _, __, i: kind == "hot" or i % 2 == 0)
        self.running.capture(weights)
        self.flood = Flood(*self.others)
        self.manager.before_step = self.flood.before_step

    def serve(self, scene: Scene) -> None:
        for sequence in (self.running, *self.others):
            sequence.batch.service.qos = scene.qos if sequence is self.running else scene.other
            sequence.batch.service.window(1.0)

    def moved(self) -> int:
        counters = self.manager.counters
        return counters.loaded_bytes + counters.stored_bytes


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
    scene = SCENES[kind][name]
    pair.serve(scene)
    pair.running.step()
    torch.cuda.synchronize()
    before = pair.running.logits.clone()
    pair.running.rewind()
    rates: list[float] = []
    launched: deque[torch.cuda.Event] = deque()

    def step() -> None:
        pair.running.step()
        launched.append(torch.cuda.current_stream().record_event())
        if len(launched) > AHEAD:
            launched.popleft().synchronize()

    def setup() -> None:
        pair.flood.scene = Scene()
        pair.running.rewind()
        pair.manager.settle()
        pair.flood.scene = scene
        for _ in range(LEAD):
            step()
        while launched:
            launched.popleft().synchronize()

    def steps() -> None:
        moved, begin = pair.moved(), time.perf_counter()
        for _ in range(STEPS[kind]):
            step()
        while launched:
            launched.popleft().synchronize()
        rates.append((pair.moved() - moved) / (time.perf_counter() - begin))

    benchmark.group = f"8B step, 32k, {kind}"
    with plain_copies(scene.plain) as plain, pump(pair, kind == "streaming" and scene.busy):
        benchmark.pedantic(steps, setup=setup, rounds=ROUNDS, iterations=1, warmup_rounds=2)
        pair.flood.scene = Scene()
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
    moved = statistics.median(plain or rates) / 1e9
    benchmark.extra_info.update(
        ms_a_step=seconds * 1e3,
        moved_gb_per_s=moved,
        streamed_gb_per_s=streamed / seconds / 1e9,
        predicted_ratio=scene.target,
    )
    facts = {
        "step": f"{seconds * 1e3:.2f} ms",
        "moved": f"{moved:.1f} GB/s",
        "streamed": f"{streamed / seconds / 1e9:.1f} GB/s",
    }
    line = ratios.Line(
        benchmark.group, name, 1 / seconds, "steps/s", "undisturbed",
        is_reference=name.startswith("undisturbed"), ours=bool(scene.load), target=scene.target,
        facts=facts,
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
            manager.begin(batch, BURST_TOKENS, layers)  # and never ends: a failed step would free
        torch.cuda.synchronize()

    benchmark.group = "burst"
    benchmark.pedantic(burst, setup=fresh, rounds=5, iterations=1)
    assert managers[0].snapshot().hot_used >= BURST * LAYERS * 8 * GEOMETRY.block_bytes
