# SPDX-License-Identifier: Apache-2.0
"""Which block size is best: how do decode attention and copies fare from 32 to 1,024 tokens?

`attend_decode` as kvpass calls it (heat counting on), bf16, head dim 128, blocks in a random order:
all of them in device memory, and all in pinned host memory, over two shapes. Copies: as many bytes
as a block of one layer has, from random places of pinned memory, one call each, as the copy engine
does with blocks that have no neighbours in common. Speeds are divided by those of blocks of 256
tokens, the default.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from benchmarks import ratios
from triton_ops.reference import aligned_empty

pytest.importorskip("triton")
# After the line above, for they import triton.
from benchmarks.kernel_sweep import BLOCK, DIM, DTYPE, TOLERANCE, Problem
from benchmarks.test_attend_gpu import GIB, Shape, measure, sets_of

pytest_plugins = ["benchmarks.ratios"]
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
SIZES = (256, 32, 64, 128, 512, 1024)
SHAPES: list[Shape] = [(1, 32, 8, 32768), (8, 32, 8, 8192)]
KV_HEADS = 8
COPIED = GIB


@pytest.fixture(scope="module")
def host() -> Iterator[torch.Tensor]:
    """Pinned memory for all blocks of a shape's copies."""
    yield aligned_empty(COPIED * 5 // 4 // DTYPE.itemsize, DTYPE, pin=True)


def note(request: pytest.FixtureRequest, benchmark: Any, what: str, size: int, rate: float) -> None:
    """Keep a measurement for the table of ratios."""
    if benchmark.stats is None:
        return
    line = ratios.Line(
        what,
        f"blocks of {size:,} tokens",
        rate,
        "GB/s",
        against="blocks of 256 tokens",
        is_reference=size == BLOCK,
        ours=True,
    )
    ratios.note(request.config, benchmark.fullname, line)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("place", ["hot", "cold"])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape)))
def test_attend(
    benchmark: Any,
    request: pytest.FixtureRequest,
    host: torch.Tensor,
    shape: Shape,
    place: str,
    size: int,
) -> None:
    torch.manual_seed(0)
    problems = [Problem(shape, block=size) for _ in range(sets_of(shape))]
    if place == "cold":
        elems = problems[0].count * problems[0].elems
        for i, problem in enumerate(problems):
            words, shared = problem.copy_to_host(host[i * elems : (i + 1) * elems])
            assert not shared
            problem.use(words)
    assert problems[0].error(problems[0].attend(heat=True)) < TOLERANCE
    group = benchmark.group = f"attend, all {place}, batch, heads, KV heads, tokens = {shape}"
    kind = "link" if place == "cold" else "hbm"
    rate = measure(benchmark, problems, lambda p: p.attend(heat=True), kind, 1.0)
    note(request, benchmark, group, size, rate)


@pytest.mark.parametrize("size", SIZES)
def test_copies(
    benchmark: Any, request: pytest.FixtureRequest, host: torch.Tensor, size: int
) -> None:
    elems = 2 * KV_HEADS * size * DIM
    count = min(COPIED // (elems * DTYPE.itemsize), 2048)
    source = host[: count * elems].view(count, elems)
    target = torch.empty_like(source, device="cuda")
    order = torch.randperm(count).tolist()
    pairs = [(target[i], source[j]) for i, j in enumerate(order)]

    def copy() -> None:
        for to, come_from in pairs:
            to.copy_(come_from, non_blocking=True)
        torch.cuda.synchronize()

    benchmark.group = "copies from pinned memory, 8 KV heads, one block of one layer each"
    benchmark.pedantic(copy, rounds=8, iterations=1, warmup_rounds=2)
    if benchmark.stats is None:
        return
    rate = source.numel() * DTYPE.itemsize / benchmark.stats.stats.median / 1e9
    benchmark.extra_info["gb_per_s"] = rate
    note(request, benchmark, benchmark.group, size, rate)
