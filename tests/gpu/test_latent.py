# SPDX-License-Identifier: Apache-2.0
"""attend_latent on a CUDA GPU at DeepSeek's sizes: numbers, placement, heat and graph capture."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import triton_ops
from kvpass import gpu_latent
from triton_ops.reference import (
    Tables,
    aligned_empty,
    attend_reference,
    heat_reference,
    latent_reference,
    place_rows,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.skipif(
        os.environ.get("TRITON_INTERPRET") == "1",
        reason="the interpreter is on: unset the variable",
    ),
]

BLOCK = 256
DIM, ROPE = 512, 64
SCALE = 192**-0.5
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
Rows = list[torch.Tensor]


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(int.from_bytes(os.urandom(4), "little"))


def close(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    tol = TOLERANCE[dtype]
    torch.testing.assert_close(actual.double(), expected.double(), atol=tol, rtol=tol)


def lse_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual.double(), expected.double(), atol=2e-4, rtol=1e-5)


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, device="cuda").to(dtype)


def ids(*rows: int) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int32, device="cuda")


def cache(
    lengths: list[int], dtype: torch.dtype, dim: int = DIM, rope: int = ROPE
) -> tuple[Rows, Rows]:
    c, r = ([randn(1, n, width, dtype=dtype) for n in lengths] for width in (dim, rope))
    return c, r


def chunk(
    batch: int, heads: int, n: int, dtype: torch.dtype, dim: int = DIM, rope: int = ROPE
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    shapes = ((heads, n, dim + rope), (1, n, dim), (1, n, rope))
    q, c, r = (randn(batch, *shape, dtype=dtype) for shape in shapes)
    return q, c, r


def attend(
    q: torch.Tensor, c: torch.Tensor, r: torch.Tensor, tables: Tables, block: int = BLOCK,
    causal: bool = True, **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    out = torch.full((*q.shape[:3], c.shape[3]), math.nan, dtype=q.dtype, device="cuda")
    rows = kwargs.pop("rows", None)
    rows = ids(*range(q.shape[0])) if rows is None else rows
    return triton_ops.attend_latent(
        q, c, r, rows, tables.row_base, tables.row_len, block_size=block, scale=SCALE,
        causal=causal, return_lse=True, out=out, **kwargs,
    )  # fmt: skip


def joined(old: Rows, new: torch.Tensor) -> Rows:
    return [torch.cat([have, more], 1) for have, more in zip(old, new, strict=True)]


def expect(
    q: torch.Tensor, c: Rows, r: Rows, causal: bool = True, kv_mask: torch.Tensor | None = None,
    bias: torch.Tensor | None = None, **scoring: Any,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """The reference, a row and a few heads at a time: float64 scores of all would not fit."""
    outs, lses = [], []
    for b in range(q.shape[0]):
        parts = []
        for h in range(0, q.shape[1], 16):
            cut = bias
            if bias is not None:
                cut = bias[min(b, bias.shape[0] - 1)][None]
                cut = cut if cut.shape[1] == 1 else cut[:, h : h + 16]
            parts.append(
                latent_reference(
                    q[b : b + 1, h : h + 16], c[b][None], r[b][None], scale=SCALE, causal=causal,
                    q_offset=c[b].shape[1] - q.shape[2], bias=cut,
                    kv_mask=None if kv_mask is None else kv_mask[b : b + 1], **scoring,
                )
            )  # fmt: skip
        outs.append(torch.cat([part[0] for part in parts], 1))
        lses.append(torch.cat([part[1] for part in parts], 1))
    return torch.cat(outs), torch.cat(lses)


def check(
    q: torch.Tensor, c_new: torch.Tensor, r_new: torch.Tensor, c: Rows, r: Rows, **kwargs: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    tables = place_rows(c, r, BLOCK, "cuda")
    out, lse = attend(q, c_new, r_new, tables, **kwargs)
    names = ("causal", "kv_mask", "bias", "softcap", "window")
    scoring = {name: kwargs[name] for name in names if name in kwargs}
    want, want_lse = expect(q, joined(c, c_new), joined(r, r_new), **scoring)
    close(out, want, q.dtype)
    lse_close(lse, want_lse)
    return out, lse


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("n", [1, 2, 65, 300])
def test_deepseek(dtype: torch.dtype, heads: int, n: int) -> None:
    lengths = [5000] if n > 2 else [5000, 0, 777, 256]
    c, r = cache(lengths, dtype)
    check(*chunk(len(lengths), heads, n, dtype), c, r)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("dim", "rope"), [(96, 16), (500, 128), (512, 128), (256, 32), (16, 24)])
def test_other_widths(dtype: torch.dtype, dim: int, rope: int) -> None:
    c, r = cache([1000, 33], dtype, dim, rope)
    for n in (1, 40):
        check(*chunk(2, 6, n, dtype, dim, rope), c, r)


@pytest.mark.parametrize("heads", [1, 5, 20, 64])
def test_head_counts(heads: int) -> None:
    c, r = cache([1000, 33], torch.bfloat16)
    for n in (1, 7):
        check(*chunk(2, heads, n, torch.bfloat16), c, r)


@pytest.mark.parametrize("splits", [1, 2, 7, 128])
@pytest.mark.parametrize("heads", [16, 128])
def test_split_counts(heads: int, splits: int) -> None:
    lengths = [1, 31, 256, 257, 4000]
    c, r = cache(lengths, torch.bfloat16)
    config = triton_ops.LatentConfig(block_m=64, splits=splits, num_warps=8)
    for n in (1, 9):
        check(*chunk(5, heads, n, torch.bfloat16), c, r, config=config)


@pytest.mark.parametrize("n", [1, 33])
@pytest.mark.parametrize("kind", ["float", "bool", "shared"])
@pytest.mark.parametrize("heads", [16, 128])
def test_masks_bias_softcap_and_window(heads: int, kind: str, n: int) -> None:
    c, r = cache([900, 40], torch.bfloat16)
    bias = randn(2, heads, n, 940)
    if kind == "bool":
        bias = bias > -1
    elif kind == "shared":
        bias = bias[:1, :1].half()
    mask = torch.rand(2, 950, device="cuda") > 0.2
    new = chunk(2, heads, n, torch.bfloat16)
    check(*new, c, r, bias=bias, kv_mask=mask, softcap=20.0, window=300)
    check(*new, c, r, bias=bias, kv_mask=mask, causal=False)
    check(*new, c, r, window=300)


def test_no_new_tokens_and_another_dtype() -> None:
    c, r = cache([900], torch.bfloat16)
    tables = place_rows(c, r, BLOCK, "cuda")
    q = randn(1, 16, 3, DIM + ROPE)
    out = triton_ops.attend_latent(
        q, None, None, ids(0), tables.row_base, tables.row_len, block_size=BLOCK, scale=SCALE,
        causal=False, latent_dim=DIM, rope_dim=ROPE, kv_dtype=torch.bfloat16,
    )  # fmt: skip
    close(out, expect(q, c, r, causal=False)[0], torch.float32)


def test_fp32_is_not_tf32() -> None:
    c, r = ([x * 0.2 + 0.4 for x in rows] for rows in cache([2048], torch.float32))
    for n in (1, 40):
        q, c_new, r_new = (x * 0.2 + 0.4 for x in chunk(1, 16, n, torch.float32))
        out, _ = attend(q, c_new, r_new, place_rows(c, r, BLOCK, "cuda"))
        assert (out - expect(q, joined(c, c_new), joined(r, r_new))[0]).abs().max() < 1e-5


@pytest.mark.parametrize("n", [1, 6])
def test_empty_rows_and_skipped_rows(n: int) -> None:
    c, r = cache([0, 5, 900], torch.float16)
    tables = place_rows(c, r, BLOCK, "cuda", fill=math.nan)
    q, c_new, r_new = chunk(3, 16, n, torch.float16)
    heat = {"row_heat": tables.row_heat, "max_blocks": tables.max_blocks} if n == 1 else {}
    out, lse = attend(q, c_new, r_new, tables, rows=ids(0, -1, 2), **heat)
    assert (out[1] == 0).all() and (lse[1] == -math.inf).all() and (tables.heat[1] == 0).all()
    want, _ = expect(q, joined(c, c_new), joined(r, r_new))
    close(out[::2], want[::2], torch.float16)


@pytest.mark.parametrize("heads", [16, 128])
def test_placement_does_not_change_a_bit(heads: int) -> None:
    c, r = cache([5000, 777], torch.bfloat16)
    one, more = (chunk(2, heads, n, torch.bfloat16) for n in (1, 6))

    def host(n: int, dtype: torch.dtype, i: int) -> torch.Tensor:
        return aligned_empty(n, dtype, pin=True)

    def mixed(n: int, dtype: torch.dtype, i: int) -> torch.Tensor:
        return aligned_empty(n, dtype, "cpu" if i % 2 else "cuda", pin=bool(i % 2))

    places: list[Callable[[int, torch.dtype, int], torch.Tensor] | None] = [None, host, mixed]
    results = []
    for allocate in places:
        tables = place_rows(c, r, BLOCK, "cuda", allocate=allocate)
        heat = {"row_heat": tables.row_heat, "max_blocks": tables.max_blocks}
        results.append((
            *attend(*one, tables), *attend(*one, tables, **heat), *attend(*more, tables),
            tables.heat,
        ))  # fmt: skip
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(other, results[0], strict=True))
    close(results[0][0], expect(one[0], joined(c, one[1]), joined(r, one[2]))[0], torch.bfloat16)


@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("window", [0, 1000])
def test_heat_counts_the_blocks_the_reference_names(heads: int, window: int) -> None:
    lengths = [40 * BLOCK + 3, 100, 20 * BLOCK]
    c, r = cache(lengths, torch.bfloat16)
    # blocks that differ, for the mean over many heads is nearly flat
    c = [x * (1 + 2 * torch.rand(1, x.shape[1] // BLOCK + 1, 1, device="cuda")
              .repeat_interleave(BLOCK, 1)[:, : x.shape[1]].to(x.dtype)) for x in c]  # fmt: skip
    tables = place_rows(c, r, BLOCK, "cuda")
    q, c_new, r_new = chunk(3, heads, 1, torch.bfloat16)
    want, unsure = torch.zeros_like(tables.heat), torch.zeros_like(tables.heat)
    for b, (ck, rk) in enumerate(zip(joined(c, c_new), joined(r, r_new), strict=True)):
        total = lengths[b] + 1
        shares = heat_reference(
            q[b, :, 0], torch.cat([ck, rk], -1), scale=SCALE, block_size=BLOCK, window=window
        )  # fmt: skip
        first = max(total - window, 0) // BLOCK if window else 0
        share = shares[0, first:] * (shares.shape[1] - first)
        place = slice(first, first + len(share))
        want[b, place] = (share >= 1 - 1e-9).int()
        # the only block of a row has all of the softmax: that is sure
        if len(share) > 1:
            unsure[b, place] = ((share - 1).abs() < 2e-3).int()
    for step in (1, 2):
        attend(q, c_new, r_new, tables, window=window, row_heat=tables.row_heat,
               max_blocks=tables.max_blocks)  # fmt: skip
        assert ((tables.heat - step * want).abs() <= step * unsure).all()
    assert want.sum() > 0 and unsure.sum() < 0.2 * want.sum()


def test_a_captured_step_follows_lengths_and_tables() -> None:
    """One CUDA graph; lengths grow and blocks move between replays."""
    c, r = cache([250], torch.bfloat16)
    tables = place_rows(c, r, BLOCK, "cuda")
    raw = torch.stack(tables.keep)
    pages = raw.view(len(raw), BLOCK // 32, 32 * (DIM + ROPE))
    q, c_new, r_new = chunk(1, 128, 1, torch.bfloat16)
    rows = ids(0)
    for i in range(len(raw)):
        tables.words[0, i] = raw[i].data_ptr()

    def step() -> torch.Tensor:
        return triton_ops.attend_latent(
            q, c_new, r_new, rows, tables.row_base, tables.row_len, block_size=BLOCK, scale=SCALE,
            causal=True, row_heat=tables.row_heat, max_blocks=tables.max_blocks,
        )  # fmt: skip

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for i in range(10):
        for x in (q, c_new, r_new):
            x.normal_()
        at = 250 + i
        page, slot = pages[at // BLOCK, at % BLOCK // 32], at % 32
        page[slot * DIM : (slot + 1) * DIM] = c_new[0, 0, 0]
        page[32 * DIM + slot * ROPE : 32 * DIM + (slot + 1) * ROPE] = r_new[0, 0, 0]
        c, r = joined(c, c_new), joined(r, r_new)
        graph.replay()
        close(out, expect(q, c, r)[0], torch.bfloat16)
        tables.row_len += 1
        if i == 6:  # the block is full: what moves is not written again
            moved = aligned_empty(raw[0].numel(), torch.bfloat16, pin=True)
            moved.copy_(raw[0])
            tables.words[0, 0] = moved.data_ptr()


def test_a_launch_reads_nothing_back() -> None:
    tables = place_rows(*cache([500], torch.bfloat16), BLOCK, "cuda")
    one, more = (chunk(1, 16, n, torch.bfloat16) for n in (1, 20))
    rows = ids(0)
    torch.cuda.set_sync_debug_mode("error")
    try:
        attend(*one, tables, rows=rows, row_heat=tables.row_heat, max_blocks=tables.max_blocks)
        attend(*more, tables, rows=rows)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("past", [0, 1000])
@pytest.mark.parametrize("heads", [16, 128])
def test_long_chunks_of_all_heads(dtype: torch.dtype, past: int, heads: int) -> None:
    """New tokens expanded and stored ones absorbed, 192 channels of keys and 128 of values."""
    tokens = gpu_latent.EXPANDED_QUERIES + 70
    up_k = randn(heads, 128, 512, dtype=dtype) * 512**-0.5
    up_v = randn(heads, 128, 512, dtype=dtype) * 512**-0.5
    old_c, old_r = randn(1, past, 512, dtype=dtype), randn(1, past, 64, dtype=dtype)
    q = randn(1, heads, tokens, 192, dtype=dtype)
    c, r = randn(1, 1, tokens, 512, dtype=dtype), randn(1, 1, tokens, 64, dtype=dtype)
    placed = place_rows([old_c], [old_r], 256, "cuda", fill=math.nan)
    tables = SimpleNamespace(
        base=placed.row_base, length=placed.row_len, heat=None, max_blocks=placed.max_blocks
    )
    out = gpu_latent.attend_latent(
        q, up_k, up_v, c, r, ids(0), tables, 256, 192**-0.5, True, None, None
    )
    all_c, all_r = torch.cat([old_c, c[0]], 1).double(), torch.cat([old_r, r[0]], 1).double()
    for h in (0, heads - 1):
        keys = torch.cat([all_c @ up_k[h].double().t(), all_r], -1)[None]
        values = (all_c @ up_v[h].double().t())[None]
        want, _ = attend_reference(
            q[:, h : h + 1], keys, values, scale=192**-0.5, causal=True, q_offset=past
        )
        error = (out[:, h : h + 1].double() - want).norm() / want.norm()
        assert error < {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}[dtype]
