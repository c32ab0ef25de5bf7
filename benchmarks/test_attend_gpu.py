# SPDX-License-Identifier: Apache-2.0
"""Does decode attention over scattered blocks keep up with dense SDPA, and with the link?

`attend_decode` as kvpass calls it (default tiles, heat counting on) against the best of SDPA's
flash and cuDNN backends on contiguous K and V, bf16, head dim 128, blocks of 256 tokens in a random
order: all blocks in device memory, all in pinned host memory, and every second one.

A round replays one CUDA graph of many calls and synchronises, so launch costs are spread thin. The
calls go over several copies of the inputs that are together far larger than the L2. GB/s are bytes
of K and V, each counted once; with blocks in host memory only the bytes that cross the link count,
and the reference is the rate of a large copy from pinned memory in the same run. Every result is
checked against float64 before it is timed, and placement must not change a bit.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import flex_attention

from benchmarks import ratios
from triton_ops.reference import aligned_empty

pytest.importorskip("triton")
# After the line above, for it imports triton.
from benchmarks.kernel_sweep import DIM, DTYPE, SHAPES, TOLERANCE, Problem, capture

pytest_plugins = ["benchmarks.ratios"]
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

GIB = 2**30
Shape = tuple[int, int, int, int]
BACKENDS = {
    "SDPA flash": SDPBackend.FLASH_ATTENTION,
    "SDPA cuDNN": SDPBackend.CUDNN_ATTENTION,
}
FLEX = "flex_attention"
# place -> (share of the blocks in host memory, ratio asked for)
PLACES: dict[str, tuple[float, float | None]] = {
    "all hot": (0.0, 0.95),
    "all hot, heat not counted": (0.0, None),
    "all in host memory": (1.0, 0.85),
    "half in host memory": (0.5, None),
}
# An H200 has 50 MiB of L2, so copies of the inputs pass through it many times over.
SET_BYTES = 1 * GIB
# A round's work: some milliseconds in device memory, tens of them over a link.
ROUND_BYTES = {"hbm": 8 * GIB, "link": 1 * GIB}
ROUNDS = {"hbm": 24, "link": 12}
LINK_GROUP = "copy from pinned memory"


def kv_elems(shape: Shape) -> int:
    """Elements of K and V."""
    batch, _, kv_heads, tokens = shape
    return 2 * batch * kv_heads * tokens * DIM


def sets_of(shape: Shape) -> int:
    """Copies of the inputs that calls go over in turn."""
    return max(1, math.ceil(SET_BYTES / (kv_elems(shape) * DTYPE.itemsize)))


def host_elems(shape: Shape) -> int:
    """Elements of pinned memory that hold every block of a shape's copies."""
    return kv_elems(shape) * sets_of(shape)


class Inputs:
    """Copies of one shape's inputs, and the pinned memory that all shapes use in turn."""

    def __init__(self) -> None:
        self.shape: Shape | None = None
        self.problems: list[Problem] = []
        self.host = torch.empty(0)
        self.host_words: list[torch.Tensor] = []

    def take(self, shape: Shape) -> list[Problem]:
        """The inputs of a shape, in place of those of the shape before."""
        if shape != self.shape:
            self.clear()
            torch.manual_seed(0)
            self.problems = [Problem(shape) for _ in range(sets_of(shape))]
            self.shape = shape
        return self.problems

    def place(self, share: float) -> None:
        """Put this share of the blocks, evenly spread, in host memory."""
        if share and not self.host_words:
            self._copy_to_host()
        for i, problem in enumerate(self.problems):
            words = problem.hot_words
            if share:
                index = torch.arange(problem.count, device=words.device)
                cold = (index * share).floor() != ((index + 1) * share).floor()
                words = torch.where(cold, self.host_words[i], words)
            problem.use(words)

    def _copy_to_host(self) -> None:
        elems = self.problems[0].count * self.problems[0].elems
        # A block starts at a multiple of 128 bytes, because its size is one.
        if not self.host.numel():
            self.host = aligned_empty(max(map(host_elems, SHAPES)), DTYPE, pin=True)
        for i, problem in enumerate(self.problems):
            words, shared = problem.copy_to_host(self.host[i * elems : (i + 1) * elems])
            assert not shared
            self.host_words.append(words)

    def clear(self) -> None:
        """Free the device memory."""
        self.shape = None
        self.problems = []
        self.host_words = []
        gc.collect()
        torch.cuda.empty_cache()


@pytest.fixture(scope="module")
def inputs() -> Iterator[Inputs]:
    made = Inputs()
    yield made
    made.clear()


def name_of(shape: Shape) -> str:
    """The shape as the table writes it."""
    return f"batch, heads, KV heads, tokens = {shape}"


def measure(
    benchmark: Any, problems: list[Problem], call: Callable[[Problem], Any], kind: str, share: float
) -> float:
    """Time rounds of calls over all problems; returns the counted GB/s.

    Args:
        benchmark: the fixture.
        problems: what to call for, in turn.
        call: what is measured.
        kind: key of ROUNDS.
        share: of the K and V bytes that count.
    """
    counted = problems[0].bytes * share
    repeats = max(1, round(ROUND_BYTES[kind] / (counted * len(problems))))

    def round_trip() -> None:
        for _ in range(repeats):
            for problem in problems:
                call(problem)

    graph = capture(round_trip)

    def replay() -> None:
        graph.replay()
        torch.cuda.synchronize()

    benchmark.pedantic(replay, rounds=ROUNDS[kind], iterations=1, warmup_rounds=3)
    calls = repeats * len(problems)
    if benchmark.stats is None:  # --benchmark-disable
        return math.nan
    seconds = benchmark.stats.stats.median / calls
    benchmark.extra_info.update(
        kv_bytes=problems[0].bytes,
        counted_bytes=int(counted),
        calls_a_round=calls,
        input_sets=len(problems),
        us_a_call=seconds * 1e6,
        gb_per_s=counted / seconds / 1e9,
    )
    return counted / seconds / 1e9


def note(
    request: pytest.FixtureRequest, benchmark: Any, group: str, name: str, **facts: Any
) -> None:
    """Keep a measurement for the table of ratios."""
    info = benchmark.extra_info
    if benchmark.stats is None:
        return
    shown = {"call": f"{info['us_a_call']:.1f} us"} if "us_a_call" in info else {}
    line = ratios.Line(group, name, info["gb_per_s"], "GB/s", facts=shown, **facts)
    ratios.note(request.config, benchmark.fullname, line)


def copy_rate(benchmark: Any, request: pytest.FixtureRequest, name: str) -> None:
    """Time a copy of 1 GiB from pinned to device memory."""
    source = torch.empty(GIB, dtype=torch.uint8, pin_memory=True)
    source.random_()
    target = torch.empty(GIB, dtype=torch.uint8, device="cuda")

    def copy() -> None:
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()

    benchmark.group = LINK_GROUP
    benchmark.pedantic(copy, rounds=12, iterations=1, warmup_rounds=2)
    if benchmark.stats is not None:
        benchmark.extra_info["gb_per_s"] = GIB / benchmark.stats.stats.median / 1e9
    note(request, benchmark, LINK_GROUP, name, against="memcpy", is_reference=True)


def test_copy_first(benchmark: Any, request: pytest.FixtureRequest) -> None:
    copy_rate(benchmark, request, "memcpy, first")


@pytest.fixture(scope="module")
def flex() -> Callable[[Problem], torch.Tensor]:
    """flex_attention as torch.compile makes it, over contiguous K and V."""
    compiled = torch.compile(flex_attention, dynamic=False)

    def call(problem: Problem) -> torch.Tensor:
        found: torch.Tensor = compiled(
            problem.q, problem.k, problem.v, scale=DIM**-0.5,
            enable_gqa=problem.heads != problem.kv_heads,
        )  # fmt: skip
        return found

    return call


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape)))
def test_flex(
    benchmark: Any,
    request: pytest.FixtureRequest,
    inputs: Inputs,
    shape: Shape,
    flex: Callable[[Problem], torch.Tensor],
) -> None:
    problems = inputs.take(shape)
    group = benchmark.group = name_of(shape)
    try:
        out = flex(problems[0])
    except (RuntimeError, ValueError) as error:  # a rival that cannot run this shape
        pytest.skip(f"{FLEX} cannot run this: {str(error).splitlines()[0]}")
    assert problems[0].error(out) < TOLERANCE
    measure(benchmark, problems, flex, "hbm", 1.0)
    note(request, benchmark, group, FLEX, against="best SDPA")


@pytest.mark.parametrize("what", [*BACKENDS, *PLACES])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape)))
def test_attend(
    benchmark: Any, request: pytest.FixtureRequest, inputs: Inputs, shape: Shape, what: str
) -> None:
    problems = inputs.take(shape)
    group = benchmark.group = name_of(shape)
    if what in BACKENDS:
        with sdpa_kernel(BACKENDS[what]):
            try:
                out = problems[0].sdpa()
            except RuntimeError as error:
                pytest.skip(f"{what} cannot run this: {str(error).splitlines()[0]}")
            assert problems[0].error(out) < TOLERANCE
            measure(benchmark, problems, Problem.sdpa, "hbm", 1.0)
        note(request, benchmark, group, what, against="best SDPA", is_reference=True)
        return
    share, target = PLACES[what]
    counted = "not counted" not in what
    inputs.place(0.0)
    hot = problems[0].attend(heat=True)
    inputs.place(share)
    problems[0].heat.zero_()
    out = problems[0].attend(heat=counted)
    assert problems[0].error(out) < TOLERANCE
    assert torch.equal(out, hot), "the place of the blocks changed the result"
    # Some block of each row has at least the mean share of the softmax.
    assert bool((problems[0].heat.sum(1) > 0).all()) is counted, "heat was not counted, or was"
    kind = "link" if share else "hbm"
    measure(benchmark, problems, lambda p: p.attend(heat=counted), kind, share or 1.0)
    against = "memcpy" if share else "best SDPA"
    benchmark.extra_info.update(host_share=share, predicted_ratio=target)
    name = f"kvpass, {what}"
    note(request, benchmark, group, name, against=against, ours=True, target=target)


def test_copy_last(benchmark: Any, request: pytest.FixtureRequest) -> None:
    copy_rate(benchmark, request, "memcpy, last")
