# SPDX-License-Identifier: Apache-2.0
"""Does attention over cached latents beat making keys and values of them, at DeepSeek's sizes?

The absorbed form (queries into the latent space, `attend_latent`, values out of it) against the
expanded one (all cached latents through the up-projection, then SDPA with head sizes 192 and 128),
bf16, one sequence, blocks of 256 tokens in a random order: one query token, and chunks.

Both forms begin with the queries and end with the values of the heads, and the latents of the new
tokens are stored already. A round replays one CUDA graph of calls over several copies of latents
and weights that are together far larger than the L2. Speeds of one query are GB/s of latents and
rotary keys, each counted once however often a form reads them; those of chunks are queries a
second. Every result is checked against float64 before it is timed.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from benchmarks import ratios
from triton_ops.reference import aligned_empty, attend_reference, place_rows

pytest.importorskip("triton")
# After the line above, for it imports triton.
import triton_ops
from benchmarks.kernel_sweep import BLOCK, DTYPE, capture

pytest_plugins = ["benchmarks.ratios"]
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


class Layer(NamedTuple):
    """Widths of an attention layer: heads, and channels of a head and of the cache."""

    heads: int
    nope: int = 128
    rope: int = 64
    latent: int = 512
    value: int = 128


class Shape(NamedTuple):
    """What is measured: a layer, the tokens attended (the new ones among them) and the queries."""

    layer: Layer
    tokens: int
    queries: int

    @property
    def group(self) -> str:
        """The shape as the table writes it."""
        return f"heads, tokens, queries = {(self.layer.heads, self.tokens, self.queries)}"


SHAPES = [
    Shape(Layer(heads), tokens, queries)
    for heads in (16, 128)
    for tokens in (8192, 32768)
    for queries in (1, 128, 512)
]
BACKENDS = {
    "expanded, memory-efficient": SDPBackend.EFFICIENT_ATTENTION,
    "expanded, flash with V padded": SDPBackend.FLASH_ATTENTION,
    "expanded, cuDNN": SDPBackend.CUDNN_ATTENTION,
}
ABSORBED, KERNEL = "kvpass, absorbed", "kvpass, kernel alone"
# bf16 queries and outputs of the absorbed form are rounded once more in the latent space
TOLERANCE = 2e-2
# An H200 has 50 MiB of L2, so the copies pass through it many times over.
SET_BYTES = 2**30
ROUNDS = 24


class Problem:
    """One copy of a shape's inputs: queries, weights, and latents dense and as blocks."""

    def __init__(self, shape: Shape, device: str = "cuda") -> None:
        layer, tokens, n = self.shape = shape
        kwargs: Any = {"device": device, "dtype": DTYPE}
        self.scale = (layer.nope + layer.rope) ** -0.5
        self.q_nope = torch.randn(layer.heads, n, layer.nope, **kwargs)
        self.q_rope = torch.randn(layer.heads, n, layer.rope, **kwargs)
        self.c = torch.randn(tokens, layer.latent, **kwargs)
        self.r = torch.randn(tokens, layer.rope, **kwargs)
        width = layer.nope + layer.value
        # [heads, nope + value, latent]: one matrix, as checkpoints have it
        self.up = torch.randn(layer.heads, width, layer.latent, **kwargs) * layer.latent**-0.5
        self.up_k, self.up_v = self.up.split([layer.nope, layer.value], 1)
        past = tokens - n
        self.c_new, self.r_new = self.c[None, None, past:], self.r[None, None, past:]
        elems = BLOCK * (layer.latent + layer.rope)
        count = math.ceil(past / BLOCK) + 1
        pool = aligned_empty(count * elems, DTYPE, device).view(count, elems)
        order = torch.randperm(count).tolist()
        self.tables = place_rows(
            [self.c[None, :past]], [self.r[None, :past]], BLOCK, device,
            allocate=lambda size, dtype, i: pool[order[i]],
        )  # fmt: skip
        self.rows = torch.zeros(1, dtype=torch.int32, device=device)
        self.queries = torch.cat([self.to_latent(), self.q_rope[None]], -1)

    def to_latent(self) -> torch.Tensor:
        """The queries in the latent space, `[1, heads, n, latent]`."""
        return torch.bmm(self.q_nope, self.up_k)[None]

    def kernel(self, q: torch.Tensor | None = None) -> torch.Tensor:
        """`attend_latent` as kvpass calls it, counting heat where there is one query."""
        tables, heat = self.tables, self.shape.queries == 1
        out = triton_ops.attend_latent(
            self.queries if q is None else q, self.c_new, self.r_new, self.rows, tables.row_base,
            tables.row_len, block_size=BLOCK, scale=self.scale, causal=True,
            row_heat=tables.row_heat if heat else None, max_blocks=tables.max_blocks,
        )  # fmt: skip
        assert isinstance(out, torch.Tensor)
        return out

    def absorbed(self) -> torch.Tensor:
        """Values of the heads `[heads, n, value]`, attention in the latent space."""
        out = self.kernel(torch.cat([self.to_latent(), self.q_rope[None]], -1))
        return torch.bmm(out[0], self.up_v.transpose(1, 2))

    def expanded(self, pad: bool = False) -> torch.Tensor:
        """Values of the heads `[heads, n, value]`, all keys and values made first.

        Args:
            pad: widen V to the size of K, which the flash backend needs.
        """
        layer, tokens, n = self.shape
        kv = (self.c @ self.up.flatten(0, 1).t()).view(tokens, layer.heads, -1).transpose(0, 1)
        k_nope, v = kv.split([layer.nope, layer.value], -1)
        k = torch.cat([k_nope, self.r.expand(layer.heads, -1, -1)], -1)
        q = torch.cat([self.q_nope, self.q_rope], -1)
        if pad:
            v = F.pad(v, [0, layer.nope + layer.rope - layer.value])
        mask = causal_lower_right(n, tokens) if n > 1 else None
        out = F.scaled_dot_product_attention(
            q[None], k[None], v[None], attn_mask=mask, scale=self.scale
        )
        return out[0, :, :, : layer.value]

    def error(self, out: torch.Tensor) -> float:
        """Relative error of the first and last head against float64."""
        layer, tokens, n = self.shape
        worst = 0.0
        for h in {0, layer.heads - 1}:
            c, r = self.c.double(), self.r.double()
            k = torch.cat([c @ self.up_k[h].double().t(), r], -1)
            q = torch.cat([self.q_nope[h], self.q_rope[h]], -1)
            want, _ = attend_reference(
                q[None, None], k[None, None], (c @ self.up_v[h].double().t())[None, None],
                scale=self.scale, causal=True, q_offset=tokens - n,
            )  # fmt: skip
            worst = max(worst, ((out[h] - want[0, 0]).norm() / want.norm()).item())
        return worst if math.isfinite(worst) else math.inf

    @property
    def latent_bytes(self) -> int:
        """Bytes of the latents and rotary keys of all tokens."""
        return (self.c.numel() + self.r.numel()) * DTYPE.itemsize


def sets_of(shape: Shape) -> int:
    """Copies of the inputs that calls go over in turn."""
    layer = shape.layer
    elems = shape.tokens * (layer.latent + layer.rope)
    elems += layer.heads * (layer.nope + layer.value) * layer.latent
    return max(1, math.ceil(SET_BYTES / (elems * DTYPE.itemsize)))


class Inputs:
    """The problems of the shape at hand."""

    def __init__(self) -> None:
        self.shape: Shape | None = None
        self.problems: list[Problem] = []

    def take(self, shape: Shape) -> list[Problem]:
        """The inputs of a shape, in place of those of the shape before."""
        if shape != self.shape:
            self.clear()
            torch.manual_seed(0)
            self.problems = [Problem(shape) for _ in range(sets_of(shape))]
            self.shape = shape
        return self.problems

    def clear(self) -> None:
        """Free the device memory."""
        self.shape = None
        self.problems = []
        gc.collect()
        torch.cuda.empty_cache()


@pytest.fixture(scope="module")
def inputs() -> Iterator[Inputs]:
    made = Inputs()
    yield made
    made.clear()


def measure(benchmark: Any, problems: list[Problem], call: Callable[[Problem], Any]) -> float:
    """Time rounds of one call for each problem; returns the median seconds of a call."""

    def round_trip() -> None:
        for problem in problems:
            call(problem)

    graph = capture(round_trip)

    def replay() -> None:
        graph.replay()
        torch.cuda.synchronize()

    benchmark.pedantic(replay, rounds=ROUNDS, iterations=1, warmup_rounds=3)
    if benchmark.stats is None:  # --benchmark-disable
        return math.nan
    return benchmark.stats.stats.median / len(problems)


@pytest.mark.parametrize("what", [*BACKENDS, ABSORBED, KERNEL])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"{s.layer.heads}x{s.tokens}x{s.queries}")
def test_latent(
    benchmark: Any, request: pytest.FixtureRequest, inputs: Inputs, shape: Shape, what: str
) -> None:
    problems = inputs.take(shape)
    benchmark.group = shape.group
    call: Callable[[Problem], torch.Tensor] = Problem.absorbed
    backend = BACKENDS.get(what)
    if backend is not None:
        pad = backend is SDPBackend.FLASH_ATTENTION

        def call(problem: Problem) -> torch.Tensor:
            with sdpa_kernel(backend):
                return problem.expanded(pad)

        try:
            out = call(problems[0])
        except torch.OutOfMemoryError:
            raise  # says nothing of what the rival can do
        except RuntimeError as error:
            pytest.skip(f"{what} cannot run this: {str(error).splitlines()[0]}")
    else:
        out = problems[0].absorbed()
        if shape.queries == 1:
            # Some block has at least the mean share of the softmax.
            assert problems[0].tables.heat.sum() > 0, "heat was not counted"
    assert problems[0].error(out) < TOLERANCE
    if what == KERNEL:
        call = Problem.kernel
    seconds = measure(benchmark, problems, call)
    if math.isnan(seconds):
        return
    one = shape.queries == 1
    speed = problems[0].latent_bytes / seconds / 1e9 if one else shape.queries / seconds
    benchmark.extra_info.update(
        latent_bytes=problems[0].latent_bytes, us_a_call=seconds * 1e6, input_sets=len(problems),
        speed=speed,
    )  # fmt: skip
    line = ratios.Line(
        shape.group, what, speed, "GB/s" if one else "queries/s", against="best SDPA",
        is_reference=backend is not None, ours=what == ABSORBED,
        facts={"call": f"{seconds * 1e6:.1f} us"},
    )  # fmt: skip
    ratios.note(request.config, benchmark.fullname, line)
