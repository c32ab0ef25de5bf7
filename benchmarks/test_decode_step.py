# SPDX-License-Identifier: Apache-2.0
"""How long does a decode step of a real model take on a CPU, and what does a cold tier cost?

SmolLM2-135M, fp32, one sequence. Every case reads the same prompt, then a round decodes one token
greedily, so the context grows by one a round; the rounds hold one reading of the heat counters
and, at 4,000 tokens, the filling of a block, which show in the slowest round. The reference,
transformers as it comes, is measured first, in the middle and last: the spread of the three is how
far this run can be trusted.

`BENCH_CONTEXT` and `BENCH_ROUNDS` make smaller runs; results of different settings are never
compared.
"""

from __future__ import annotations

import copy
import gc
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from importlib import resources
from typing import Any

import pytest
import torch
from torch import Tensor

import kvpass
import model_zoo
from benchmarks import ratios
from kvpass.cli import running
from kvpass.runtime.metrics import Snapshot

transformers = pytest.importorskip("transformers")
pytest_plugins = ["benchmarks.ratios"]
# Prefill and Inductor come before the first round and may take minutes on a slow machine.
pytestmark = [pytest.mark.checkpoint, pytest.mark.slow, pytest.mark.timeout(1800)]

CONTEXT = int(os.environ.get("BENCH_CONTEXT", "4000"))
# Passes a heat window of 64 tokens, and the block boundary at 4,096.
ROUNDS = int(os.environ.get("BENCH_ROUNDS", "96"))
WARMUP = 3  # compiles for one token, then for a past that grows, then runs once
COLD_HOT_SHARE = 0.25
REFERENCE = "transformers uncompiled"
GROUP = f"decode step, SmolLM2-135M fp32, {CONTEXT} tokens, {ROUNDS} rounds"


@dataclass(frozen=True)
class Case:
    """A way to decode.

    Attributes:
        model: whose module, "transformers" or "own".
        cache: "dynamic", "static" or "tiered".
        inner: compiler, None = uncompiled; with a tiered cache the inner compiler of kvpass.
        hot_share: size of the hot tier over the KV bytes at the end; None = all blocks are hot.
        target: ratio to the reference that is asked for.
    """

    model: str
    cache: str
    inner: str | None = None
    hot_share: float | None = None
    target: float | None = None


def tiered(model: str, inner: str) -> dict[str, Case]:
    """The two placements of one model and inner compiler."""
    name = {"transformers": "kvpass, transformers' Llama", "own": "kvpass, own decoder"}[model]
    hot = Case(model, "tiered", inner, target=1.0)
    cold = Case(model, "tiered", inner, COLD_HOT_SHARE, target=1 / 1.5)
    return {f"{name}, {inner}, all hot": hot, f"{name}, {inner}, hot tier 25 %": cold}


CASES = {
    f"{REFERENCE}, first": Case("transformers", "dynamic"),
    "transformers inductor, StaticCache": Case("transformers", "static", "inductor"),
    "transformers inductor, DynamicCache": Case("transformers", "dynamic", "inductor"),
    **tiered("transformers", "eager"),
    **tiered("transformers", "inductor"),
    f"{REFERENCE}, middle": Case("transformers", "dynamic"),
    **tiered("own", "eager"),
    **tiered("own", "inductor"),
    f"{REFERENCE}, last": Case("transformers", "dynamic"),
}


class Bench:
    """The prompt, the two modules, and what they share."""

    def __init__(self) -> None:
        self.loaded = model_zoo.load("smollm2-135m")
        self.config = self.loaded.config
        document = resources.files("kvpass").joinpath("data/document.txt").read_text("utf-8")
        ids = self.loaded.tokenizer.encode(document)
        if len(ids) < CONTEXT:
            raise ValueError(f"BENCH_CONTEXT={CONTEXT}: the document has {len(ids)} tokens")
        self.prompt = torch.tensor([ids[:CONTEXT]])
        self._compiled_for: tuple[str, str, str | None] | None = None

    @property
    def capacity(self) -> int:
        """Tokens at the end of a case."""
        return CONTEXT + WARMUP + ROUNDS

    @property
    def token_bytes(self) -> int:
        """K and V of one token in all layers, bytes."""
        config = self.config
        return config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 2 * 4

    @cached_property
    def hf(self) -> Any:
        """The module of transformers."""
        return running.load_transformers(str(self.loaded.path))

    @cached_property
    def dense(self) -> tuple[Any, int]:
        """A DynamicCache after the prompt, and the next token."""
        cache = transformers.DynamicCache(config=self.hf.config)
        return cache, first_token(running.transformers_step(self.hf, cache), self.prompt)

    @cached_property
    def expected(self) -> list[int]:
        """The tokens that every case has to decode."""
        cache, token = self.dense
        decoding = Decoding(running.transformers_step(self.hf, copy.deepcopy(cache)), token)
        for _ in range(WARMUP + ROUNDS):
            decoding()
        return decoding.tokens

    def start(self, case: Case) -> tuple[Callable[[Tensor], Tensor], Any, int]:
        """Read the prompt; returns the step, its cache and the first new token."""
        key = (case.model, case.cache, case.inner)
        if key != self._compiled_for:
            # Graphs of other cases on the same code would use up Dynamo's limit of recompiles.
            torch._dynamo.reset()
            self._compiled_for = key
        if case.cache == "tiered":
            return self._tiered(case)
        module = self.hf
        if case.inner is not None:
            module = torch.compile(self.hf, backend=case.inner, dynamic=case.cache == "dynamic")
        if case.cache == "dynamic":
            cache, token = self.dense
            cache = copy.deepcopy(cache)
        else:
            cache = transformers.StaticCache(config=self.hf.config, max_cache_len=self.capacity)
            token = first_token(running.transformers_step(self.hf, cache), self.prompt)
        return running.transformers_step(module, cache), cache, token

    def _tiered(self, case: Case) -> tuple[Callable[[Tensor], Tensor], Any, int]:
        assert case.inner is not None
        if case.hot_share is None:
            # Whole blocks, and half as much again: a fifth of the hot tier is kept free.
            hot = (self.capacity + 256) * self.token_bytes * 3 // 2
        else:
            hot = int(self.capacity * self.token_bytes * case.hot_share)
        module: Any = self.loaded.decoder
        step: Callable[[Any, Any], Callable[[Tensor], Tensor]] = running.own_step
        if case.model == "transformers":
            module, step = self.hf, running.transformers_step
        cache = kvpass.TieredCache(module.config, self.capacity, hot=hot)
        # The prompt needs no Inductor: where its blocks go does not depend on it.
        token = first_token(step(running.compiled(module, "eager"), cache), self.prompt)
        assert cache.manager is not None
        cache.manager.settle()  # the prompt's write-through is not a decode step's work
        return step(running.compiled(module, case.inner), cache), cache, token


def first_token(step: Callable[[Tensor], Tensor], prompt: Tensor) -> int:
    """The token after the prompt."""
    with torch.no_grad():
        return int(step(prompt)[0].argmax())


class Decoding:
    """Greedy decoding, a token a call; counts graphs compiled after the warm-up."""

    def __init__(self, step: Callable[[Tensor], Tensor], token: int) -> None:
        self.step = step
        self.tokens = [token]
        self.graphs = 0

    def __call__(self) -> None:
        """One token."""
        if len(self.tokens) == WARMUP + 1:
            self.graphs = graphs_compiled()
        with torch.no_grad():
            logits = self.step(torch.tensor([[self.tokens[-1]]]))
            self.tokens.append(int(logits[0].argmax()))


def graphs_compiled() -> int:
    """Graphs that Dynamo has made in this process."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def end_migration() -> None:
    """Free the caches of the case before, and wait for their threads.

    A thread that has run a parallel region keeps OpenMP workers of its own; with more workers than
    cores libgomp stops spinning, and every later case in the process would be slower.
    """
    gc.collect()
    for thread in threading.enumerate():
        if thread.name == "kvpass-migrate":
            thread.join(timeout=10)
            assert not thread.is_alive(), "a cache of an earlier case is still in use"


@pytest.fixture(scope="session")
def bench() -> Bench:
    return Bench()


@pytest.mark.parametrize("name", CASES)
def test_decode_step(
    benchmark: Any, bench: Bench, name: str, request: pytest.FixtureRequest
) -> None:
    case = CASES[name]
    end_migration()
    step, cache, token = bench.start(case)
    decoding = Decoding(step, token)
    ours = case.cache == "tiered"
    before = cache.snapshot().counters.__dict__.copy() if ours else {}
    benchmark.group = GROUP
    benchmark.pedantic(decoding, rounds=ROUNDS, iterations=1, warmup_rounds=WARMUP)
    if benchmark.stats is None:  # --benchmark-disable
        return
    assert graphs_compiled() == decoding.graphs, "a measured round compiled a graph"
    same = decoding.tokens == bench.expected
    info: dict[str, Any] = {
        "context_tokens": [CONTEXT + WARMUP, CONTEXT + WARMUP + ROUNDS],
        "kv_bytes": (len(decoding.tokens) - 1 + CONTEXT) * bench.token_bytes,
        "cold_share": 0.0,
        "tokens_identical": same,
    }
    facts = {"tokens": "same" if same else "DIFFER"}
    if ours:
        assert same, "kvpass decoded other tokens than transformers: its time means nothing"
        info |= placement(cache.snapshot(), before)
        facts["cold"] = f"{info['cold_share']:.0%}"
        if case.hot_share is None:
            assert info["cold_share"] == 0.0
        else:
            assert info["cold_share"] >= 1 - case.hot_share - 0.01
    benchmark.extra_info.update(info)
    stats = benchmark.stats.stats
    facts |= {
        "median": f"{stats.median * 1e3:.1f} ms",
        "slowest": f"{stats.max * 1e3:.1f} ms",
    }
    line = ratios.Line(
        GROUP,
        name,
        1 / stats.median,
        "tokens/s",
        REFERENCE,
        is_reference=name.startswith(REFERENCE),
        ours=ours,
        target=case.target,
        facts=facts,
    )
    ratios.note(request.config, benchmark.fullname, line)


def placement(snapshot: Snapshot, before: dict[str, int]) -> dict[str, Any]:
    """Where the bytes were at the end, and what moved since the prompt."""
    moved = {key: value - before[key] for key, value in snapshot.counters.__dict__.items()}
    return {
        "kv_bytes": snapshot.kv_bytes,
        "hot_capacity_bytes": snapshot.hot_capacity,
        "cold_share": snapshot.cold_only_bytes / snapshot.kv_bytes,
        "since_prompt": moved,
    }
