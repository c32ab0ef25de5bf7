# SPDX-License-Identifier: Apache-2.0
"""Does decode over scattered blocks keep up with the best dense attention, and which tiles do it?

Times SDPA (flash, cuDNN) on contiguous K and V and `attend_decode` on blocks in HBM, in pinned host
memory and half in each, over a grid of configs. Every call is captured in a CUDA graph first, so
Python's launch cost is in none of the numbers; `do_bench` clears the L2 before each replay, and the
median counts. Bytes are those of K and V, read once. Results are checked against the float64
reference before anything is timed.

Host blocks: one pinned buffer of at most --host-gib serves every shape. A shape that needs more
points several rows at the same host blocks; such a line is marked "shared" and not checked.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import math
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import triton
from torch.nn.attention import SDPBackend, sdpa_kernel
from triton.testing import do_bench

import triton_ops
from triton_ops.config import decode_config
from triton_ops.reference import aligned_empty, attend_reference, block_elems

# (batch, query heads, KV heads, tokens)
SHAPES = [
    (1, 32, 8, 32768),
    (1, 32, 8, 131072),
    (8, 32, 8, 8192),
    (16, 32, 8, 32768),
    (64, 32, 8, 8192),
    (4, 40, 40, 8192),
    (1, 40, 40, 16384),
    (1, 28, 4, 32768),
]
DIM = 128
BLOCK = 256
DTYPE = torch.bfloat16
SCALE = DIM**-0.5
TOLERANCE = 1e-2
# (tokens in a tile, warps, stages), likely ones first: the budget may end the list early
TILES = [
    *((64, 4, 3), (64, 4, 4), (64, 8, 3), (128, 4, 2), (128, 8, 3), (64, 4, 2)),
    *((64, 4, 5), (128, 8, 2), (128, 4, 3), (32, 4, 4), (32, 2, 4), (64, 2, 3)),
]


class OutOfTime(Exception):
    """The budget is used up: stop measuring and report what there is."""


@dataclass
class Clock:
    """Wall time left: for the whole run, and for the shape at hand."""

    end: float
    shape_end: float = math.inf

    def check(self) -> None:
        """Raise OutOfTime past either limit."""
        if time.monotonic() > min(self.end, self.shape_end):
            raise OutOfTime


class Problem:
    """Inputs of one shape, dense and as blocks in device memory, in a random order of slots."""

    def __init__(
        self, shape: tuple[int, int, int, int], device: str = "cuda", block: int = BLOCK
    ) -> None:
        self.block = block
        self.batch, self.heads, self.kv_heads, self.tokens = shape
        size = (self.batch, self.kv_heads, self.tokens, DIM)
        self.q = torch.randn(self.batch, self.heads, 1, DIM, device=device, dtype=DTYPE)
        self.k = torch.randn(size, device=device, dtype=DTYPE)
        self.v = torch.randn(size, device=device, dtype=DTYPE)
        self.bytes = 2 * self.k.numel() * self.k.element_size()
        self.width = self.tokens // block
        self.count = self.batch * self.width
        self.elems = block_elems(self.kv_heads, DIM, DIM, block)
        pool = torch.empty(self.count * self.elems, dtype=DTYPE, device=device)
        paged = pool.view(self.batch, self.width, self.kv_heads, block // 32, 2, 32 * DIM)
        for i, dense in enumerate((self.k, self.v)):
            split = dense.view(self.batch, self.kv_heads, self.width, block // 32, 32 * DIM)
            paged[..., i, :] = split.transpose(1, 2)
        # a random order of slots, as a cache has after a while
        self.slot_of = torch.randperm(self.count, device=device)
        shuffled = aligned_empty(self.count * self.elems, DTYPE, device)
        self.slots = shuffled.view(self.count, self.elems)
        self.slots[self.slot_of] = pool.view(self.count, self.elems)
        self.hot_words = shuffled.data_ptr() + self.slot_of * self.elems * DTYPE.itemsize
        self.rows = torch.arange(self.batch, dtype=torch.int32, device=device)
        self.row_len = torch.full((self.batch,), self.tokens - 1, dtype=torch.int32, device=device)
        self.words = self.hot_words.clone().view(self.batch, self.width)
        steps = torch.arange(self.batch, dtype=torch.int64, device=device) * self.width
        self.row_base = self.words.data_ptr() + steps * 8
        self.heat = torch.zeros(self.batch, self.width, dtype=torch.int32, device=device)
        self.row_heat = self.heat.data_ptr() + steps * 4

    def attend(
        self, config: triton_ops.DecodeConfig | None = None, heat: bool = False
    ) -> torch.Tensor:
        """One decode call; without a config, as kvpass calls it."""
        out = triton_ops.attend_decode(
            self.q, self.rows, self.row_base, self.row_len, kv_heads=self.kv_heads, head_dim_v=DIM,
            block_size=self.block, scale=SCALE, config=config,
            row_heat=self.row_heat if heat else None, max_blocks=self.width,
        )  # fmt: skip
        assert isinstance(out, torch.Tensor)
        return out

    def copy_to_host(self, host: torch.Tensor) -> tuple[torch.Tensor, bool]:
        """Copy the blocks to `host`, a vector of DTYPE that the device can read in place.

        Returns:
            The words of the copies, int64 `[blocks]`, and whether blocks share a copy for want of
            room.
        """
        fit = min(host.numel() // self.elems, self.count)
        place = host[: fit * self.elems].view(fit, self.elems)
        for i in range(fit):
            place[i].copy_(self.slots[self.slot_of[i]], non_blocking=True)
        index = torch.arange(self.count, device=self.q.device)
        if self.q.is_cuda:
            torch.cuda.synchronize()
        return host.data_ptr() + (index % fit) * self.elems * DTYPE.itemsize, fit < self.count

    def use(self, words: torch.Tensor) -> None:
        """Make the table point at other copies of the blocks."""
        self.words.copy_(words.view_as(self.words))

    def sdpa(self) -> torch.Tensor:
        """The dense rival."""
        return F.scaled_dot_product_attention(self.q, self.k, self.v, scale=SCALE, enable_gqa=True)

    def error(self, out: torch.Tensor) -> float:
        """Relative error of the first and last row against float64."""
        worst = 0.0
        for b in {0, self.batch - 1}:
            one = slice(b, b + 1)
            want, _ = attend_reference(self.q[one], self.k[one], self.v[one], scale=SCALE)
            worst = max(worst, ((out[one] - want).norm() / want.norm()).item())
        return worst if math.isfinite(worst) else math.inf


def capture(call: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    """A CUDA graph of a call, which is made once before, to compile and to allocate."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


def timed(call: Callable[[], Any], rep_ms: int = 60) -> float:
    """Median milliseconds of a call, replayed from a CUDA graph with a cold L2."""
    graph = capture(call)
    return do_bench(graph.replay, warmup=10, rep=rep_ms, return_mode="median")


class Run:
    """All measurements of a run."""

    def __init__(self, clock: Clock, host: torch.Tensor | None) -> None:
        self.clock = clock
        self.host = host
        self.lines: list[dict[str, Any]] = []

    def add(
        self, problem: Problem, what: str, call: Callable[[], Any], rep_ms: int = 60, **info: Any
    ) -> float:
        """Time a call; GB/s, or 0 where it cannot run (the error is kept in its line)."""
        self.clock.check()
        shape = [problem.batch, problem.heads, problem.kv_heads, problem.tokens]
        line: dict[str, Any] = {"shape": shape, "what": what, **info}
        self.lines.append(line)
        try:
            line["ms"] = timed(call, rep_ms)
        except (RuntimeError, triton.runtime.errors.OutOfResources) as error:
            line["error"] = str(error).splitlines()[0][:160]
            return 0.0
        line["gbps"] = problem.bytes / line["ms"] / 1e6
        return line["gbps"]

    def rivals(self, p: Problem) -> None:
        """SDPA on contiguous K and V."""
        for name, backend in (
            ("sdpa flash", SDPBackend.FLASH_ATTENTION),
            ("sdpa cudnn", SDPBackend.CUDNN_ATTENTION),
        ):
            with sdpa_kernel(backend):
                self.add(p, name, p.sdpa)

    def hot(self, p: Problem, quick: bool) -> triton_ops.DecodeConfig:
        """Tiles at the default splits, then splits at the best two tiles; returns the best."""
        pairs = p.batch * p.kv_heads
        default = decode_config(DTYPE, DTYPE, DIM, DIM, p.heads // p.kv_heads, None, pairs, BLOCK)
        splits = triton_ops.splits_for(p.batch, p.kv_heads, p.q.device, default.programs_per_sm)
        default = replace(default, splits=splits)
        error = p.error(p.attend(default))
        if not error < TOLERANCE:
            raise SystemExit(f"wrong result at {(p.batch, p.heads, p.kv_heads, p.tokens)}: {error}")
        speeds: dict[triton_ops.DecodeConfig, float] = {}

        def measure(config: triton_ops.DecodeConfig) -> None:
            if config not in speeds:
                what = "hot default" if config == default else "hot"
                speeds[config] = self.add(p, what, lambda: p.attend(config), config=asdict(config))

        measure(default)
        try:
            for block_n, warps, stages in TILES[: 4 if quick else None]:
                measure(replace(default, block_n=block_n, num_warps=warps, num_stages=stages))
            if p.heads == p.kv_heads:
                for block_n, warps, stages in ((64, 4, 3), (32, 4, 4), (64, 8, 3), (32, 2, 4)):
                    measure(
                        triton_ops.DecodeConfig(
                            block_n, warps, stages, default.splits, use_dot=False
                        )
                    )
            best = sorted(speeds, key=lambda c: -speeds[c])[:2]
            sms = torch.cuda.get_device_properties(0).multi_processor_count
            pairs = p.batch * p.kv_heads
            splits = {max(1, round(sms * per / pairs)) for per in (1, 1.5, 2, 3, 4, 6, 8)}
            splits |= {max(1, sms * per // pairs) for per in (1, 2, 3, 4)} | {1}
            for config, count in itertools.product(best, sorted(splits)):
                if count <= 128:
                    measure(replace(config, splits=count))
        except OutOfTime:
            if time.monotonic() > self.clock.end:
                raise
        winner = max(speeds, key=lambda c: speeds[c])
        if not p.error(p.attend(winner)) < TOLERANCE:
            raise SystemExit(f"wrong result of the fastest config {winner}")
        self.clock.shape_end = math.inf
        self.add(p, "hot best", lambda: p.attend(winner), config=asdict(winner))
        self.add(p, "hot best, heat", lambda: p.attend(winner, True), config=asdict(winner))
        return winner

    def cold(self, p: Problem, best: triton_ops.DecodeConfig) -> None:
        """Every block, then every second block, in pinned host memory."""
        if self.host is None:
            return
        host_words, shared = p.copy_to_host(self.host)
        index = torch.arange(p.count, device="cuda")
        tiles = [best, replace(best, splits=1), replace(best, splits=max(1, best.splits // 4)),
                 replace(best, splits=best.splits * 2)]  # fmt: skip
        rep = 60 if p.bytes < 1e9 else 1
        for what, words in (
            ("host", host_words),
            ("half host", torch.where(index % 2 == 0, p.hot_words, host_words)),
        ):
            hot = p.attend(best)
            p.use(words)
            if not shared and not torch.equal(p.attend(best), hot):
                raise SystemExit(f"{what}: the place of the blocks changed the result")
            # a config that is listed twice is timed once
            for config in dict.fromkeys(tiles):
                call = functools.partial(p.attend, config)
                self.add(p, what, call, rep, config=asdict(config), shared=shared)
            p.use(p.hot_words)


def measure_shape(run: Run, shape: tuple[int, int, int, int], quick: bool) -> None:
    """All measurements of one shape; its memory is free again on return."""
    problem = Problem(shape)
    run.rivals(problem)
    run.cold(problem, run.hot(problem, quick))


def memcpy_rate() -> float:
    """GB/s of one copy of 1 GiB from pinned memory."""
    source = torch.empty(2**30, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    ms = do_bench(lambda: target.copy_(source, non_blocking=True), warmup=20, rep=150,
                  return_mode="median")  # fmt: skip
    return 2**30 / ms / 1e6


def table(lines: list[dict[str, Any]], link: float) -> str:
    """One line a shape and kind: the fastest config of each."""
    rows = []
    for shape in dict.fromkeys(tuple(line["shape"]) for line in lines):
        mine = [x for x in lines if tuple(x["shape"]) == shape and "gbps" in x]
        rival = max((x["gbps"] for x in mine if x["what"].startswith("sdpa")), default=math.nan)
        for what in dict.fromkeys(x["what"] for x in mine):
            if what == "hot":
                continue
            top = max((x for x in mine if x["what"] == what), key=lambda x: x["gbps"])
            base = link if "host" in what else rival
            c = top.get("config")
            tile = (
                f"BN{c['block_n']} w{c['num_warps']} st{c['num_stages']} sp{c['splits']} "
                f"{'dot' if c['use_dot'] else 'sum'}"
                if c
                else ""
            )
            rows.append(f"{shape!s:22} {what:15} {top['ms'] * 1e3:10.1f} us {top['gbps']:8.1f} GB/s"
                        f" {top['gbps'] / base:6.3f}x  {tile}")  # fmt: skip
    failed = sum("error" in x for x in lines)
    rows.append(f"memcpy from pinned memory: {link:.1f} GB/s; x is against the best SDPA, or this")
    rows.append(f"{len(lines)} measurements, {failed} could not run")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description="decode kernel sweep")
    parser.add_argument("--out", type=Path, default=Path("kernel_sweep.json"))
    parser.add_argument("--budget-s", type=float, default=280.0, help="stop early after this")
    parser.add_argument("--host-gib", type=float, default=2.25, help="pinned memory, at most 8")
    parser.add_argument("--shapes", type=int, nargs="*", help="indexes into the list of shapes")
    parser.add_argument("--quick", action="store_true", help="a third of the tiles")
    parser.add_argument("--no-cold", action="store_true", help="HBM only")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("kernel_sweep needs a CUDA GPU")
    torch.manual_seed(0)
    clock = Clock(time.monotonic() + args.budget_s)
    host = None
    if not args.no_cold:
        gib = min(args.host_gib, 8.0)
        host = aligned_empty(int(gib * 2**30) // DTYPE.itemsize, DTYPE, pin=True)
    link = memcpy_rate()
    run = Run(clock, host)
    chosen = [SHAPES[i] for i in (args.shapes or range(len(SHAPES)))]
    stopped = False
    for done, shape in enumerate(chosen):
        now = time.monotonic()
        # the sweep over tiles may use 70 % of the shape's share, the cold runs need the rest
        clock.shape_end = now + 0.7 * (clock.end - now) / (len(chosen) - done)
        try:
            measure_shape(run, shape, args.quick)
        except OutOfTime:
            stopped = True
        torch.cuda.empty_cache()
        if time.monotonic() > clock.end:
            stopped = True
            break
    machine = {
        "gpu": torch.cuda.get_device_name(0), "torch": torch.__version__,
        "triton": triton.__version__, "python": platform.python_version(),
    }  # fmt: skip
    args.out.parent.mkdir(parents=True, exist_ok=True)
    result = {"machine": machine, "memcpy_gbps": link, "stopped": stopped, "lines": run.lines}
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(table(run.lines, link))
    print(", ".join(f"{k} {v}" for k, v in machine.items()), "| stopped early" if stopped else "")


if __name__ == "__main__":
    main()
