# SPDX-License-Identifier: Apache-2.0
"""What does a prompt cost whose KV cache does not fit, and how long may it be?

A prompt of 32,768 tokens through transformers' Llama, of the sizes that `models` names (bf16),
logits of the last token only: with SDPA and a `DynamicCache`, as it is and compiled by Inductor,
and with kvpass, all blocks in device memory, and a tenth of them, the rest being written to host
memory while later layers compute. Whole, and in pieces of 8,192, which read back what is cold.
Peak memory is of all tensors but the weights.

The longest prompt: under a limit of 24 GiB for the process, of transformers and of kvpass, in
pieces of 8,192, one after the other until one fails; then one token more is decoded.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import kvpass
from benchmarks import ratios
from benchmarks.models import (
    CHUNK,
    DEVICE,
    LAYERS,
    LONGEST,
    REAL,
    RUNS,
    TINY,
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
from kvpass.errors import OutOfMemoryError

transformers = pytest.importorskip("transformers")

pytest_plugins = ["benchmarks.ratios"]
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not RUNS, reason="needs a CUDA GPU"),
    # A model that is not rewritten would be measured for one that is.
    pytest.mark.filterwarnings("error:a TieredCache is used outside"),
]
TOKENS = 4096 if REAL else 32768
ROUNDS = 5
CAP = 24 << 30
STEP = 16384
HOST = int(os.environ.get("KVPASS_BENCH_HOST_GIB", "48")) << 30
"""Host memory that the cold tier may take."""


@dataclass(frozen=True)
class Way:
    """How a prompt is stored.

    Attributes:
        compiled: ``None``, ``"inductor"`` or ``"kvpass"``.
        hot: share of the KV cache in device memory, of kvpass.
        pieces: whether in pieces of 8,192 tokens.
    """

    compiled: str | None = None
    hot: float = 1.0
    pieces: bool = False
    target: float | None = None


PLAIN = "transformers, SDPA"
WAYS = {
    PLAIN: Way(),
    "transformers, SDPA, Inductor": Way("inductor"),
    "kvpass, all hot": Way("kvpass"),
    "kvpass, a tenth hot": Way("kvpass", 0.1, target=1 / 1.05),
    "transformers, SDPA, in pieces": Way(pieces=True),
    "kvpass, all hot, in pieces": Way("kvpass", pieces=True),
    "kvpass, a tenth hot, in pieces": Way("kvpass", 0.1, pieces=True),
}


class Bench:
    """The model, compiled in one way at a time."""

    def __init__(self) -> None:
        self.model = make()
        self._compiled: str | None = None
        self.step: Callable[..., Any] = self.model.forward

    def use(self, compiled: str | None) -> None:
        """Compile as asked."""
        if compiled == self._compiled:
            return
        torch._dynamo.reset()
        self._compiled = compiled
        self.step = (
            self.model.forward
            if compiled is None
            else torch.compile(
                self.model, backend=kvpass.backend if compiled == "kvpass" else compiled
            )
        )

    @torch.no_grad()
    def store(self, ids: Tensor, cache: Any, piece: int) -> Tensor:
        """The prompt; returns the logits of its last token."""
        for first in range(0, ids.shape[1], piece):
            out = self.step(ids[:, first : first + piece], past_key_values=cache, logits_to_keep=1)
        return out.logits


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    yield Bench()
    torch._dynamo.reset()


def cache_of(bench: Bench, way: Way, count: int) -> Any:
    """An empty one."""
    if way.compiled != "kvpass":
        return transformers.DynamicCache(config=bench.model.config)
    need = (count + 256) * bytes_of_token()
    # A fifth of the hot tier is kept free, so what must all fit is given a quarter more.
    hot = need * 13 // 10 if way.hot == 1.0 else int(need * way.hot)
    return kvpass.TieredCache(bench.model.config, count + 64, hot=hot, cold=2 * need)


@pytest.mark.parametrize("name", WAYS)
def test_prompt(benchmark: Any, request: pytest.FixtureRequest, bench: Bench, name: str) -> None:
    way = WAYS[name]
    count = tokens(TOKENS)
    ids = prompt(1, count)
    bench.use(way.compiled)
    group = benchmark.group = named(f"prompt of {TOKENS} tokens")
    caches: list[Any] = []

    def fresh() -> tuple[tuple[Any], dict[str, Any]]:
        if caches and isinstance(caches[0], kvpass.TieredCache):
            caches[0].truncate(0)  # pinned memory takes longer to get than a prompt
        else:
            caches.clear()
            free()
            caches.append(cache_of(bench, way, count))
        return (caches[0],), {}

    def run(cache: Any) -> None:
        bench.store(ids, cache, CHUNK if way.pieces else count)
        synchronize()

    peak = Peak()
    fresh()
    run(caches[0])  # compiles
    peak.forget()
    benchmark.pedantic(run, setup=fresh, rounds=ROUNDS, iterations=1, warmup_rounds=1)
    if benchmark.stats is None:
        return
    facts = {"peak": f"{peak.gib():.2f} GiB"}
    cache = caches[0]
    if isinstance(cache, kvpass.TieredCache):
        found = cache.snapshot()
        assert found is not None
        facts["cold"] = f"{found.cold_only_bytes / found.kv_bytes:.0%}"
        facts["hot tier"] = f"{found.hot_capacity / 2**30:.2f} GiB"
    seconds = benchmark.stats.stats.median
    benchmark.extra_info.update(layers=LAYERS, device=str(DEVICE), **facts)
    line = ratios.Line(
        group, name, count / seconds, "tokens/s", against="SDPA prompt",
        is_reference=name == PLAIN, ours=way.compiled == "kvpass", target=way.target, facts=facts,
    )  # fmt: skip
    ratios.note(request.config, benchmark.fullname, line)


@pytest.mark.parametrize("name", ["transformers, SDPA", "kvpass"])
def test_longest_prompt(
    benchmark: Any, request: pytest.FixtureRequest, bench: Bench, name: str
) -> None:
    way = Way("kvpass", 0.1) if name == "kvpass" else Way()
    bench.use(way.compiled)
    free()
    if DEVICE.type == "cuda":
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(CAP / total)
    step, most = tokens(STEP), 4 * tokens(STEP) if TINY else HOST // (2 * bytes_of_token())
    if most > LONGEST:
        pytest.skip(f"the model takes {LONGEST} tokens")
    longest, seconds = 0, float("nan")

    def search() -> None:
        """Longer and longer ones; kvpass, which needs no doubling of keys, from the far end."""
        nonlocal longest, seconds
        lengths = range(step, most, step) if way.compiled is None else range(most, step, -step)
        for count in lengths:
            begun = time.perf_counter()
            fits = stores(bench, way, count)
            if fits:
                longest, seconds = count, time.perf_counter() - begun
            if fits is not (way.compiled is None):
                return

    try:
        benchmark.pedantic(search, rounds=1, iterations=1)
    finally:
        if DEVICE.type == "cuda":
            torch.cuda.set_per_process_memory_fraction(1.0)
        free()
    group = benchmark.group = named("longest prompt, in thousands of tokens")
    facts = {"prompt and a token": f"{seconds:.1f} s"}
    benchmark.extra_info.update(layers=LAYERS, tokens=longest, **facts)
    line = ratios.Line(
        group, name, longest / 1024, "Ki tokens", against="transformers under the limit",
        is_reference=way.compiled is None, ours=way.compiled is not None, facts=facts,
        target=None if way.compiled is None else 3.0,
    )  # fmt: skip
    ratios.note(request.config, benchmark.fullname, line)


def stores(bench: Bench, way: Way, count: int) -> bool:
    """Whether a prompt, and a token behind it, fit."""
    free()
    ids = prompt(1, count)
    cache = None
    try:
        if way.compiled is None:
            cache = transformers.DynamicCache(config=bench.model.config)
        else:
            cold = (count + 512) * bytes_of_token() * 5 // 4
            cache = kvpass.TieredCache(bench.model.config, count + 64, hot="1GiB", cold=cold)
        token = bench.store(ids, cache, CHUNK)[:, -1:].argmax(-1)
        with torch.no_grad():
            out = bench.step(token, past_key_values=cache, logits_to_keep=1)
        return bool(out.logits.isfinite().all())
    except (torch.OutOfMemoryError, OutOfMemoryError):
        return False
    finally:
        del cache
        free()
