# SPDX-License-Identifier: Apache-2.0
"""How long does a token take, by context, batch and place of the blocks, beside transformers?

The decode steps of transformers' Llama, of the sizes that `models` names (bf16), after a prompt:
with `kvpass.generate`, with stock `generate` over a `TieredCache` and over a `DynamicCache` that
kvpass rewrites, and with transformers' own caches: static with its own compilation, dynamic,
offloaded, offloaded static, quantised. Beside them the step that a specialist writes by hand: the
same products and cuDNN's attention over contiguous K and V in one CUDA graph.

A token's time is the time from one token that the host has seen to the next. Compilation, capture
and the first steps are left out; the prompt is the same for all, and is stored before the clock
starts. Tokens are checked against those of the uncompiled model where both are of one batch (in
bf16 a near tie may fall either way, so the share of equal tokens is a fact of the table, not a
test).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import kvpass
from benchmarks import ratios
from benchmarks.energy import EnergyCounter
from benchmarks.models import (
    CHUNK,
    DEVICE,
    LAYERS,
    LONGEST,
    REAL,
    RUNS,
    Peak,
    bytes_of_token,
    free,
    make,
    prompt,
    synchronize,
    tokens,
)
from benchmarks.models import (
    group as named,
)

transformers = pytest.importorskip("transformers")

pytest_plugins = ["benchmarks.ratios"]
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not RUNS, reason="needs a CUDA GPU"),
]
WARM = 12
"""Tokens before the clock starts: compilation, capture, what is read ahead."""


@dataclass(frozen=True)
class Way:
    """How tokens are generated.

    Attributes:
        count: tokens that are timed.
        hot: share of the KV cache in device memory, of kvpass.
        ahead: whether cold blocks are copied a layer ahead, as they are by default.
        against: key of :data:`benchmarks.ratios.REFERENCES`.
        targets: ratio that is asked for, by context length.
    """

    run: str
    count: int
    hot: float = 1.0
    ahead: bool = True
    against: str = "transformers static"
    targets: tuple[tuple[int, float], ...] = ()


STATIC = "transformers static, compiled"
DYNAMIC = "transformers dynamic"
WAYS = {
    STATIC: Way("static", 60),
    "hand-made graph, cuDNN": Way("hand", 100, against="hand-made graph"),
    "kvpass.generate": Way("kvpass", 200, targets=((8192, 1.6), (32768, 2.5))),
    "kvpass.generate, to the hand-made graph": Way(
        "kvpass", 200, against="hand-made graph", targets=((32768, 1 / 1.08),)
    ),
    "stock generate, TieredCache": Way("stock tiered", 100),
    "stock generate, DynamicCache": Way("stock dynamic", 60),
    "kvpass.generate, all cold, in place": Way("kvpass", 30, hot=0.0, ahead=False),
    "kvpass.generate, half cold, in place": Way("kvpass", 40, hot=0.5, ahead=False),
    "kvpass.generate, a tenth cold, in place": Way("kvpass", 100, hot=0.9, ahead=False),
    "kvpass.generate, all cold, read ahead": Way("kvpass", 30, hot=0.0),
    "kvpass.generate, half cold, read ahead": Way("kvpass", 40, hot=0.5),
    "kvpass.generate, a tenth cold, read ahead": Way("kvpass", 100, hot=0.9),
    DYNAMIC: Way("dynamic", 20),
    "transformers offloaded": Way("offloaded", 8),
    "transformers offloaded static": Way("offloaded static", 8),
    "transformers quantised": Way("quantised", 8),
}
ONE = [(4096 if REAL else 8192, 1), (32768, 1), (131072, 1)]
"""(tokens, batch) that everybody runs; the rest is for kvpass and the dynamic cache."""
MANY = [(8192, 8), (32768, 8), (8192, 32)]
BATCHED = ("kvpass.generate", DYNAMIC)
MINE = ("kvpass", "stock tiered", "stock dynamic")
NEED_A_GPU = ("hand", "offloaded", "offloaded static")


class Stamps:
    """The clock of a way: a time for each token, as the host sees it."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Any) -> None:
        """Called by `generate` of transformers; the first call brings the prompt."""
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Likewise."""

    def seen(self, index: int, new: list[int]) -> None:
        """Called by `kvpass.generate`."""
        if index == 0:
            self.times.append(time.perf_counter())

    def intervals(self, count: int) -> np.ndarray:
        """Seconds of each of the last ``count`` tokens."""
        return np.diff(np.array(self.times[-count - 1 :]))


class Bench:
    """The model, and what each way needs of it."""

    def __init__(self) -> None:
        self.model = make()
        self.compiled = ""

    def compile(self, ahead: bool) -> None:
        """Let kvpass compile it, once for each way to read; ways of transformers come before."""
        how = "ahead" if ahead else "in place"
        if self.compiled != how:
            torch._dynamo.reset()
            self.model.compile(backend=kvpass.backend, options={"prefetch": ahead})
            self.compiled = how

    def plain(self) -> None:
        """The model as transformers calls it."""
        if self.compiled:
            torch._dynamo.reset()
            self.model._compiled_call_impl = None
            self.compiled = ""

    @torch.no_grad()
    def store(self, cache: Any, ids: Tensor) -> None:
        """The prompt but its last token, in pieces, by the uncompiled model: that takes less time
        than to compile it, and what is stored is the same.
        """
        for first in range(0, ids.shape[1] - 1, CHUNK):
            part = ids[:, first : min(first + CHUNK, ids.shape[1] - 1)]
            self.model.forward(part, past_key_values=cache, logits_to_keep=1)
        synchronize()


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.plain()


def cache_of(way: Way, bench: Bench, batch: int, context: int, most: int) -> Any:
    """An empty cache of the kind that a way is for, of ``most`` tokens."""
    config = bench.model.config
    if way.run in ("kvpass", "stock tiered"):
        need = batch * (most + 512) * bytes_of_token()
        # A fifth of the hot tier is kept free, so what must all fit is given a quarter more.
        hot = need * 13 // 10
        if way.hot < 1.0:
            hot = batch * bytes_of_token() * max(int(context * way.hot), 32 * LAYERS)
        options: dict[str, Any] = {} if way.hot == 1.0 else {"resident_tokens": 0}
        return kvpass.TieredCache(config, most, hot=hot, cold=2 * need, **options)
    if way.run in ("static", "offloaded static"):
        return transformers.StaticCache(
            config=config, max_cache_len=most, offloading=way.run == "offloaded static"
        )
    if way.run == "quantised":
        return transformers.QuantizedCache("quanto", config)
    return transformers.DynamicCache(config=config, offloading=way.run == "offloaded")


def stock(bench: Bench, cache: Any, ids: Tensor, count: int) -> Stamps:
    """`generate` of transformers over a cache that holds all but the last token."""
    stamps = Stamps()
    offloaded = getattr(cache, "offloading", False)
    bench.model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        past_key_values=cache,
        max_new_tokens=count,
        min_new_tokens=count,
        do_sample=False,
        streamer=stamps if len(ids) == 1 else None,
        # transformers compiles steps over static caches by itself; over streams torch 2.11 crashes
        disable_compile=offloaded,
    )
    return stamps


def ours(bench: Bench, cache: Any, ids: Tensor, count: int) -> Stamps:
    """`kvpass.generate`, likewise."""
    stamps = Stamps()
    kvpass.generate(bench.model, ids[:, -1:], cache, max_new_tokens=count, on_tokens=stamps.seen)
    return stamps


def whole(run: Callable[[int], Any], count: int) -> np.ndarray:
    """Seconds a token of a way that tells no times: of many tokens less those of few."""
    spans = []
    for tokens_ in (WARM, WARM + count):
        synchronize()
        start = time.perf_counter()
        run(tokens_)
        synchronize()
        spans.append(time.perf_counter() - start)
    return np.full(count, (spans[1] - spans[0]) / count)


def decode(way: Way, bench: Bench, context: int, batch: int) -> tuple[np.ndarray, dict[str, str]]:
    """Seconds of each token, and what else there is to say."""
    ids = prompt(batch, context)
    count = way.count
    if way.run == "hand":
        from benchmarks.hand_made import HandMade

        return HandMade(batch, context).intervals(count, WARM), {}
    mine = way.run in MINE
    if mine:
        bench.compile(way.ahead)
    else:
        bench.plain()
    peak = Peak()
    cache = cache_of(way, bench, batch, context, context + 4 * WARM + 2 * count)
    bench.store(cache, ids)
    generate = ours if way.run == "kvpass" else stock

    def rest() -> None:
        """Forget what was generated, so that the next call begins where this one did."""
        over = cache.get_seq_length() - (context - 1)
        if over > 0:
            cache.truncate(context - 1) if hasattr(cache, "truncate") else cache.crop(-over)

    if way.run in ("static", "offloaded static"):
        # A static cache cannot be cut back: it goes on where it is.
        ids_of = [ids]

        def run(n: int) -> Stamps:
            stamps = stock(bench, cache, ids_of[0], n)
            ids_of[0] = torch.cat([ids_of[0], ids_of[0][:, :n]], 1)
            return stamps

    else:

        def run(n: int) -> Stamps:
            rest()
            return generate(bench, cache, ids, n)

    run(WARM)  # compiles, captures
    energy = EnergyCounter()
    start = time.perf_counter()
    if batch > 1 and generate is stock:
        seconds = whole(run, count)
    else:
        seconds = run(WARM + count).intervals(count)
    joules = energy.joules()
    facts = {"peak": f"{peak.gib():.2f} GiB"}
    if joules:
        # of all tokens of the call, those of the warm-up among them
        share = seconds.sum() / (time.perf_counter() - start)
        facts["tokens a joule"] = f"{count * batch / (joules * share):.3f}"
    if isinstance(cache, kvpass.TieredCache):
        found = cache.snapshot()
        assert found is not None
        facts["cold"] = f"{found.cold_only_bytes / found.kv_bytes:.0%}"
        if not way.hot and batch == 1 and DEVICE.type == "cuda":
            facts |= of_the_link(bench, float(np.median(seconds)), found.cold_only_bytes)
    return seconds, facts


def of_the_link(bench: Bench, seconds: float, cold: int) -> dict[str, str]:
    """How near reading what is cold comes to the rate of one large copy.

    Args:
        bench: the model, compiled.
        seconds: of a token.
        cold: bytes that each token reads over the link.
    """
    from benchmarks.kernel_sweep import memcpy_rate

    short = 256
    cache = kvpass.TieredCache(bench.model.config, short + 256, hot="1GiB", cold="1GiB")
    ids = prompt(1, short)
    bench.store(cache, ids)
    ours(bench, cache, ids, WARM)
    cache.truncate(short - 1)
    rest = float(np.median(ours(bench, cache, ids, WARM + 40).intervals(40)))
    link = memcpy_rate()
    rate = cold / (seconds - rest) / 1e9
    return {
        "without attention": f"{rest * 1e3:.2f} ms",
        "memcpy": f"{link:.1f} GB/s",
        "of memcpy": f"{rate / link:.3f}",
    }


def cells() -> Iterator[Any]:
    """Those of kvpass come last: the model is compiled once for all that read in the same way."""
    for mine, ahead in ((False, True), (True, True), (True, False)):
        for context, batch in [*ONE, *MANY]:
            for name, way in WAYS.items():
                if (way.run in MINE, way.ahead) != (mine, ahead):
                    continue
                if batch == 1 or name in BATCHED:
                    yield pytest.param(context, batch, name, id=f"{context}x{batch}-{name}")


@pytest.mark.parametrize(("context", "batch", "name"), list(cells()))
def test_decode(
    benchmark: Any,
    request: pytest.FixtureRequest,
    bench: Bench,
    context: int,
    batch: int,
    name: str,
) -> None:
    way = WAYS[name]
    if tokens(context) + 512 > LONGEST:
        pytest.skip(f"the model takes {LONGEST} tokens")
    if way.run in NEED_A_GPU and DEVICE.type != "cuda":
        pytest.skip(f"{name} needs a CUDA GPU")
    group = benchmark.group = named(f"{context} tokens, batch {batch}")
    found: dict[str, Any] = {}

    def once() -> None:
        found["seconds"], found["facts"] = decode(way, bench, tokens(context), batch)

    try:
        benchmark.pedantic(once, rounds=1, iterations=1)
    except (ImportError, torch.OutOfMemoryError) as error:  # what it needs is not there
        if way.run in MINE:
            raise
        pytest.skip(f"{name} cannot run: {type(error).__name__}: {str(error).splitlines()[0]}")
    finally:
        free()
    ms = found["seconds"] * 1e3
    facts = {"P50": f"{np.median(ms):.2f} ms", "P99": f"{np.quantile(ms, 0.99):.2f} ms"}
    facts |= found["facts"]
    benchmark.extra_info.update(
        layers=LAYERS, device=str(DEVICE), ms_a_token=ms.tolist(), **found["facts"]
    )
    line = ratios.Line(
        group,
        name,
        batch * 1e3 / float(np.median(ms)),
        "tokens/s",
        against=way.against if batch == 1 else DYNAMIC,
        is_reference=name == (STATIC if batch == 1 else DYNAMIC) or way.run == "hand",
        ours=way.run in MINE,
        target=dict(way.targets).get(context) if batch == 1 else None,
        facts=facts,
    )
    ratios.note(request.config, benchmark.fullname, line)
