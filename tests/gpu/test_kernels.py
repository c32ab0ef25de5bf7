# SPDX-License-Identifier: Apache-2.0
"""The kernels on a CUDA GPU at real sizes: numbers, placement, heat and graph capture."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

import triton_ops
from triton_ops.reference import (
    Tables,
    aligned_empty,
    attend_reference,
    block_elems,
    gather_blocks,
    heat_reference,
    place_rows,
    row_blocks,
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
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
HEAD_DIMS = [16, 40, 64, 80, 96, 112, 128, 192, 256]
GROUPS = [(12, 2), (28, 4), (14, 2), (7, 1), (40, 8), (5, 5)]


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


def ragged(lengths: list[int], heads: int, dim: int, dtype: torch.dtype) -> list[torch.Tensor]:
    return [randn(heads, n, dim, dtype=dtype) for n in lengths]


def ids(*rows: int) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int32, device="cuda")


def decode(
    q: torch.Tensor, tables: Tables, heads: int, dv: int, scale: float, block: int = BLOCK,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    out = torch.full((q.shape[0], q.shape[1], 1, dv), math.nan, dtype=q.dtype, device="cuda")
    rows = kwargs.pop("rows", None)
    rows = ids(*range(q.shape[0])) if rows is None else rows
    kwargs.setdefault("new_tokens", 0)
    return triton_ops.attend_decode(
        q, rows, tables.row_base, tables.row_len, kv_heads=heads, head_dim_v=dv, block_size=block,
        scale=scale, return_lse=True, out=out, **kwargs,
    )  # fmt: skip


def extend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tables: Tables, scale: float,
    causal: bool = True, block: int = BLOCK, **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    out = torch.full((*q.shape[:3], v.shape[3]), math.nan, dtype=q.dtype, device="cuda")
    rows = kwargs.pop("rows", None)
    rows = ids(*range(q.shape[0])) if rows is None else rows
    return triton_ops.attend_extend(
        q, k, v, rows, tables.row_base, tables.row_len, block_size=block, scale=scale,
        causal=causal, return_lse=True, out=out, **kwargs,
    )  # fmt: skip


def expect(
    q: torch.Tensor, keys: list[torch.Tensor], values: list[torch.Tensor], scale: float,
    causal: bool = False, kv_mask: torch.Tensor | None = None, bias: torch.Tensor | None = None,
    **scoring: Any,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    parts = [
        attend_reference(
            q[b : b + 1], k[None], v[None], scale=scale, causal=causal,
            q_offset=k.shape[1] - q.shape[2],
            kv_mask=None if kv_mask is None else kv_mask[b : b + 1],
            bias=None if bias is None else bias[min(b, bias.shape[0] - 1)][None],
            **scoring,
        )
        for b, (k, v) in enumerate(zip(keys, values, strict=True))
    ]  # fmt: skip
    return torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])


def joined(olds: list[torch.Tensor], news: torch.Tensor) -> list[torch.Tensor]:
    return [torch.cat([old, new], 1) for old, new in zip(olds, news, strict=True)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_append_decode_extend(dtype: torch.dtype, dim: int) -> None:
    """One life of four rows: a chunk is attended and appended, then a token is decoded."""
    heads, kv_heads, n, scale = 8, 2, 150, dim**-0.5
    lengths = [0, 255, 1024, 3000]
    keys, values = ragged(lengths, kv_heads, dim, dtype), ragged(lengths, kv_heads, dim, dtype)
    tables = place_rows(keys, values, BLOCK, "cuda")
    q = randn(4, heads, n, dim, dtype=dtype)
    k, v = (randn(4, kv_heads, n, dim, dtype=dtype) for _ in range(2))
    out, lse = extend(q, k, v, tables, scale)
    all_k, all_v = joined(keys, k), joined(values, v)
    want, want_lse = expect(q, all_k, all_v, scale, causal=True)
    close(out, want, dtype)
    lse_close(lse, want_lse)
    triton_ops.append(k, v, ids(0, 1, 2, 3), tables.row_base, tables.row_len, BLOCK)
    for row, (want_k, want_v) in enumerate(zip(all_k, all_v, strict=True)):
        got = gather_blocks(row_blocks(tables, row), want_k.shape[1], kv_heads, dim, dim, BLOCK)
        assert torch.equal(got[0], want_k.cpu()) and torch.equal(got[1], want_v.cpu())
    # the last query sees what a decode of it sees
    out, lse = decode(q[:, :, -1:], tables, kv_heads, dim, scale, new_tokens=n)
    close(out, want[:, :, -1:], dtype)
    lse_close(lse, want_lse[:, :, -1:])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("splits", [1, 2, 7, 128])
def test_decode_split_counts(dtype: torch.dtype, splits: int) -> None:
    lengths = [1, 31, 256, 257, 8000]
    keys, values = ragged(lengths, 8, 128, dtype), ragged(lengths, 8, 128, dtype)
    tables = place_rows(keys, values, BLOCK, "cuda")
    q = randn(5, 32, 1, 128, dtype=dtype)
    out, lse = decode(q, tables, 8, 128, 128**-0.5, splits=splits)
    want, want_lse = expect(q, keys, values, 128**-0.5)
    close(out, want, dtype)
    lse_close(lse, want_lse)


CONFIGS = [
    triton_ops.DecodeConfig(block_n=n, num_warps=w, num_stages=s)
    for n, w, s in (
        (32, 2, 4), (64, 4, 2), (64, 4, 4), (64, 8, 3), (128, 4, 2), (128, 8, 3),
    )
]  # fmt: skip


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_decode_configs(config: triton_ops.DecodeConfig) -> None:
    keys, values = (ragged([777, 2048], 4, 128, torch.bfloat16) for _ in range(2))
    tables = place_rows(keys, values, BLOCK, "cuda")
    q = randn(2, 16, 1, 128, dtype=torch.bfloat16)
    out, _ = decode(q, tables, 4, 128, 0.09, config=config)
    close(out, expect(q, keys, values, 0.09)[0], torch.bfloat16)


@pytest.mark.parametrize("use_dot", [False, True])
def test_decode_one_query_head_a_kv_head(use_dot: bool) -> None:
    keys, values = (ragged([777, 2048], 10, 128, torch.bfloat16) for _ in range(2))
    tables = place_rows(keys, values, BLOCK, "cuda")
    q = randn(2, 10, 1, 128, dtype=torch.bfloat16)
    config = triton_ops.DecodeConfig(use_dot=use_dot)
    out, _ = decode(q, tables, 10, 128, 0.09, config=config)
    close(out, expect(q, keys, values, 0.09)[0], torch.bfloat16)


def test_blocks_of_another_dtype_than_the_query() -> None:
    keys, values = (ragged([777], 2, 64, torch.bfloat16) for _ in range(2))
    tables = place_rows(keys, values, BLOCK, "cuda")
    q = randn(1, 8, 4, 64)
    out, _ = decode(q[:, :, :1], tables, 2, 64, 0.1, kv_dtype=torch.bfloat16)
    close(out, expect(q[:, :, :1], keys, values, 0.1)[0], torch.float32)
    k, v = (randn(1, 2, 4, 64, dtype=torch.bfloat16) for _ in range(2))
    out, _ = extend(q, k, v, tables, 0.1)
    want, _ = expect(q, joined(keys, k), joined(values, v), 0.1, causal=True)
    close(out, want, torch.float32)


@pytest.mark.parametrize("kind", ["float", "bool", "shared"])
def test_mask_and_bias(kind: str) -> None:
    keys, values = (ragged([500, 40], 2, 64, torch.float16) for _ in range(2))
    tables = place_rows(keys, values, BLOCK, "cuda")
    q, k, v = (randn(2, h, 20, 64, dtype=torch.float16) for h in (8, 2, 2))
    bias = randn(2, 8, 20, 520)
    if kind == "bool":
        bias = bias > -1
    elif kind == "shared":
        bias = bias[:1, :1].half()
    mask = torch.rand(2, 530, device="cuda") > 0.2
    out, lse = extend(q, k, v, tables, 0.1, bias=bias, kv_mask=mask)
    want = expect(q, joined(keys, k), joined(values, v), 0.1, True, mask, bias)
    close(out, want[0], torch.float16)
    lse_close(lse, want[1])
    row = bias[:, :, :1]
    out, lse = decode(q[:, :, :1], tables, 2, 64, 0.1, bias=row, kv_mask=mask)
    want = expect(q[:, :, :1], keys, values, 0.1, kv_mask=mask, bias=row)
    close(out, want[0], torch.float16)
    lse_close(lse, want[1])


def test_b04_cached_continuation_is_aligned_lower_right() -> None:
    ramp = torch.arange(8.0, device="cuda")[None, :, None].expand(1, 8, 64)
    tables = place_rows([torch.zeros(1, 5, 64)], [ramp[:, :5].cpu()], BLOCK, "cuda")
    out, _ = extend(randn(1, 1, 3, 64), torch.zeros_like(ramp[None, :, 5:]), ramp[None, :, 5:],
                    tables, 1.0)  # fmt: skip
    want = torch.tensor([2.5, 3.0, 3.5], device="cuda")[:, None].expand(3, 64)
    close(out[0, 0], want, torch.float32)


def test_b08_no_visible_key_and_finfo_min() -> None:
    keys, values = (ragged([300, 300], 2, 64, torch.float32) for _ in range(2))
    tables = place_rows(keys, values, BLOCK, "cuda")
    q = randn(2, 4, 1, 64)
    bias = torch.zeros(2, 1, 1, 300, device="cuda")
    bias[0], bias[1] = -math.inf, torch.finfo(torch.float32).min
    out, lse = decode(q, tables, 2, 64, 0.1, bias=bias)
    assert (out[0] == 0).all() and (lse[0] == -math.inf).all()
    close(out[1], values[1].mean(1, keepdim=True).repeat_interleave(2, 0), torch.float32)


@pytest.mark.parametrize("fill", [math.nan, math.inf, 1e4])
def test_b14_stale_tail(fill: float) -> None:
    lengths = [13, 255, 256, 257, 100]
    keys, values = (ragged(lengths, 2, 128, torch.bfloat16) for _ in range(2))
    tables = place_rows(keys, values, BLOCK, "cuda", fill=fill, spare_blocks=7)
    q = randn(5, 8, 1, 128, dtype=torch.bfloat16)
    out, _ = decode(q, tables, 2, 128, 0.1)
    close(out, expect(q, keys, values, 0.1)[0], torch.bfloat16)
    k, v = (randn(5, 2, 3, 128, dtype=torch.bfloat16) for _ in range(2))
    q = randn(5, 8, 3, 128, dtype=torch.bfloat16)
    out, _ = extend(q, k, v, tables, 0.1)
    want, _ = expect(q, joined(keys, k), joined(values, v), 0.1, causal=True)
    close(out, want, torch.bfloat16)


def test_b16_empty_rows_skipped_rows_and_empty_batch() -> None:
    keys, values = (ragged([0, 5, 900], 2, 64, torch.float16) for _ in range(2))
    tables = place_rows(keys, values, BLOCK, "cuda")
    q = randn(3, 4, 1, 64, dtype=torch.float16)
    for splits in (1, 4):
        out, lse = decode(q, tables, 2, 64, 0.1, rows=ids(0, -1, 2), splits=splits)
        assert (out[:2] == 0).all() and (lse[:2] == -math.inf).all()
        close(out[2:], expect(q[2:], keys[2:], values[2:], 0.1)[0], torch.float16)
    out, lse = decode(q[:0], tables, 2, 64, 0.1)
    assert out.shape == (0, 4, 1, 64) and lse.shape == (0, 4, 1)
    before = [row_blocks(tables, r).nan_to_num(7.0) for r in range(3)]
    new = randn(3, 2, 4, 64, dtype=torch.float16)
    triton_ops.append(new, new, ids(-1, -1, -1), tables.row_base, tables.row_len, BLOCK)
    after = [row_blocks(tables, r).nan_to_num(7.0) for r in range(3)]
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))


def test_b17_merge() -> None:
    out, lse = randn(1, 3, 128), randn(1, 3)
    outs = torch.cat([torch.full_like(out, math.nan), out])
    lses = torch.cat([torch.full_like(lse, -math.inf), lse])
    got, got_lse = triton_ops.merge(outs, lses)
    close(got, out[0], torch.float32)
    lse_close(got_lse, lse[0])
    got, got_lse = triton_ops.merge(outs[:1], lses[:1])
    assert (got == 0).all() and (got_lse == -math.inf).all()


def test_b19_a_pool_past_four_gib() -> None:
    stride, pages = 480 * 576, 8000
    pool = torch.empty(stride * pages, dtype=torch.bfloat16, device="cuda").view(pages, stride)
    size = block_elems(2, 128, 128, BLOCK)
    keys, values = (ragged([4 * BLOCK], 2, 128, torch.bfloat16) for _ in range(2))
    q = randn(1, 8, 1, 128, dtype=torch.bfloat16)
    results = []
    for at in (0, 7990):
        tables = place_rows(keys, values, BLOCK, "cuda", spare_blocks=0,
                            allocate=lambda n, d, i, at=at: pool[at + i, :size])  # fmt: skip
        results.append(decode(q, tables, 2, 128, 0.1))
    assert torch.equal(results[0][0], results[1][0])
    close(results[1][0], expect(q, keys, values, 0.1)[0], torch.bfloat16)


def test_b20_fused_qkv_with_offsets_past_int32() -> None:
    total, heads, dim = 100_000, 56, 128
    qkv = torch.empty(1, total, 3, heads, dim, dtype=torch.bfloat16, device="cuda")
    tail = qkv[:, -64:]
    tail.copy_(randn(*tail.shape))
    assert qkv.stride(1) * (total - 64) > 2**31
    # a "batch" of two rows whose stride is the distance from the first token to the tail
    qkv[:, :64].copy_(randn(*tail.shape))
    step = qkv.stride(1) * (total - 64)
    shape, strides = (2, heads, 64, dim), (step, dim, qkv.stride(1), 1)
    q, k, v = (
        qkv.as_strided(shape, strides, qkv.storage_offset() + i * heads * dim) for i in range(3)
    )
    empty = [torch.empty(heads, 0, dim, dtype=torch.bfloat16, device="cuda")] * 2
    tables = place_rows(empty, empty, BLOCK, "cuda")
    out, _ = extend(q, k, v, tables, 0.09)
    dense = [x.contiguous() for x in (q, k, v)]
    assert torch.equal(out, extend(*dense, tables, 0.09)[0])
    close(out, expect(q, list(k), list(v), 0.09, causal=True)[0], torch.bfloat16)
    triton_ops.append(k, v, ids(0, 1), tables.row_base, tables.row_len, BLOCK)
    got, _ = gather_blocks(row_blocks(tables, 1), 64, heads, dim, dim, BLOCK)
    assert torch.equal(got, k[1].cpu())


@pytest.mark.parametrize(("heads", "kv_heads"), GROUPS)
def test_b22_gqa_groups(heads: int, kv_heads: int) -> None:
    keys, values = (ragged([600, 9], kv_heads, 128, torch.bfloat16) for _ in range(2))
    tables = place_rows(keys, values, BLOCK, "cuda")
    q, k, v = (randn(2, h, 5, 128, dtype=torch.bfloat16) for h in (heads, kv_heads, kv_heads))
    out, _ = decode(q[:, :, :1], tables, kv_heads, 128, 0.09)
    close(out, expect(q[:, :, :1], keys, values, 0.09)[0], torch.bfloat16)
    out, _ = extend(q, k, v, tables, 0.09)
    want, _ = expect(q, joined(keys, k), joined(values, v), 0.09, causal=True)
    close(out, want, torch.bfloat16)


@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_b23_signal_in_the_last_channel(dim: int) -> None:
    # shapes of test_append_decode_extend, so that the kernel is compiled already
    keys, values = [torch.zeros(2, 600, dim).half()], ragged([600], 2, dim, torch.float16)
    keys[0][:, 417, dim - 1] = 1.0
    q = torch.zeros(1, 8, 1, dim, dtype=torch.float16, device="cuda")
    q[..., dim - 1] = 1.0
    tables = place_rows([keys[0].cuda()], values, BLOCK, "cuda")
    guarded = torch.full((3, 8, 1, dim), 77.0, dtype=torch.float16, device="cuda")
    triton_ops.attend_decode(
        q, ids(0), tables.row_base, tables.row_len, kv_heads=2, head_dim_v=dim, block_size=BLOCK,
        scale=100.0, new_tokens=0, out=guarded[1:2],
    )  # fmt: skip
    close(guarded[1, :, 0], values[0][:, 417].repeat_interleave(4, 0), torch.float16)
    assert (guarded[0] == 77.0).all() and (guarded[2] == 77.0).all()


@pytest.mark.parametrize(("dk", "dv"), [(192, 128), (40, 16)])
def test_b24_k_and_v_of_different_dims(dk: int, dv: int) -> None:
    keys, values = ragged([700], 2, dk, torch.bfloat16), ragged([700], 2, dv, torch.bfloat16)
    tables = place_rows(keys, values, BLOCK, "cuda")
    q, k = (randn(1, h, 9, dk, dtype=torch.bfloat16) for h in (8, 2))
    v = randn(1, 2, 9, dv, dtype=torch.bfloat16)
    out, _ = decode(q[:, :, :1], tables, 2, dv, dk**-0.5)
    close(out, expect(q[:, :, :1], keys, values, dk**-0.5)[0], torch.bfloat16)
    out, _ = extend(q, k, v, tables, dk**-0.5)
    want, _ = expect(q, joined(keys, k), joined(values, v), dk**-0.5, causal=True)
    close(out, want, torch.bfloat16)


def test_b27_fp32_is_not_tf32() -> None:
    keys, values = ([randn(2, 2048, 128) * 0.2 + 0.4] for _ in range(2))
    tables = place_rows(keys, values, BLOCK, "cuda")
    q, k, v = (randn(1, h, 150, 128) * 0.2 + 0.4 for h in (8, 2, 2))
    out, _ = decode(q[:, :, :1], tables, 2, 128, 128**-0.5)
    assert (out - expect(q[:, :, :1], keys, values, 128**-0.5)[0]).abs().max() < 1e-5
    out, _ = extend(q, k, v, tables, 128**-0.5)
    want, _ = expect(q, joined(keys, k), joined(values, v), 128**-0.5, causal=True)
    assert (out - want).abs().max() < 1e-5


def test_placement_does_not_change_a_bit() -> None:
    lengths = [5000, 777]
    keys, values = (ragged(lengths, 8, 128, torch.bfloat16) for _ in range(2))
    q = randn(2, 32, 1, 128, dtype=torch.bfloat16)
    more, k, v = (randn(2, h, 6, 128, dtype=torch.bfloat16) for h in (32, 8, 8))

    def host(n: int, dtype: torch.dtype, i: int) -> torch.Tensor:
        return aligned_empty(n, dtype, pin=True)

    def mixed(n: int, dtype: torch.dtype, i: int) -> torch.Tensor:
        return aligned_empty(n, dtype, "cpu" if i % 2 else "cuda", pin=bool(i % 2))

    places: list[Callable[[int, torch.dtype, int], torch.Tensor] | None] = [None, host, mixed]
    results = []
    for allocate in places:
        tables = place_rows(keys, values, BLOCK, "cuda", allocate=allocate)
        heat = {"row_heat": tables.row_heat, "max_blocks": tables.max_blocks}
        results.append((
            *decode(q, tables, 8, 128, 0.09), *decode(q, tables, 8, 128, 0.09, **heat),
            *extend(more, k, v, tables, 0.09), tables.heat,
        ))  # fmt: skip
        triton_ops.append(k, v, ids(0, 1), tables.row_base, tables.row_len, BLOCK)
        torch.cuda.synchronize()
        for row in (0, 1):
            got, _ = gather_blocks(row_blocks(tables, row), lengths[row] + 6, 8, 128, 128, BLOCK)
            assert torch.equal(got[:, lengths[row] :], k[row].cpu())
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(other, results[0], strict=True))
    close(results[0][0], expect(q, keys, values, 0.09)[0], torch.bfloat16)


@pytest.mark.parametrize("splits", [1, 8])
def test_heat_counts_the_blocks_the_reference_names(splits: int) -> None:
    lengths = [40 * BLOCK + 3, 100, 70 * BLOCK]
    keys = [k * 2 for k in ragged(lengths, 8, 128, torch.bfloat16)]
    tables = place_rows(keys, keys, BLOCK, "cuda")
    q = randn(3, 32, 1, 128, dtype=torch.bfloat16)
    want, unsure = torch.zeros_like(tables.heat), torch.zeros_like(tables.heat)
    for b, k in enumerate(keys):
        shares = heat_reference(q[b, :, 0], k, scale=0.1, block_size=BLOCK)
        blocks = shares.shape[1]
        want[b, :blocks] = (shares * blocks >= 1 - 1e-9).sum(0).int()
        # the only block of a row has all of the softmax: that is sure
        if blocks > 1:
            unsure[b, :blocks] = ((shares * blocks - 1).abs() < 1e-3).sum(0).int()
    assert 0 < want.sum() < 8 * sum(-(-n // BLOCK) for n in lengths)
    for step in (1, 2, 3):
        decode(q, tables, 8, 128, 0.1, splits=splits, row_heat=tables.row_heat,
               max_blocks=tables.max_blocks)  # fmt: skip
        assert ((tables.heat - step * want).abs() <= step * unsure).all()
    assert unsure.sum() < 0.1 * want.sum()


def test_a_captured_step_follows_lengths_and_tables() -> None:
    """Append and decode in one CUDA graph; lengths grow and blocks move between replays."""
    keys, values = (ragged([250], 2, 128, torch.bfloat16) for _ in range(2))
    tables = place_rows(keys, values, BLOCK, "cuda")
    q = randn(1, 8, 1, 128, dtype=torch.bfloat16)
    k, v = (randn(1, 2, 1, 128, dtype=torch.bfloat16) for _ in range(2))
    rows = ids(0)

    def step() -> torch.Tensor:
        triton_ops.append(k, v, rows, tables.row_base, tables.row_len, BLOCK)
        return triton_ops.attend_decode(
            q, rows, tables.row_base, tables.row_len, kv_heads=2, head_dim_v=128,
            block_size=BLOCK, scale=0.09, row_heat=tables.row_heat, max_blocks=tables.max_blocks,
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
        k.normal_()
        v.normal_()
        q.normal_()
        keys, values = [torch.cat([keys[0], k[0]], 1)], [torch.cat([values[0], v[0]], 1)]
        graph.replay()
        close(out, expect(q, keys, values, 0.09)[0], torch.bfloat16)
        tables.row_len += 1
        if i == 4:
            moved = aligned_empty(tables.keep[0].numel(), torch.bfloat16, pin=True)
            moved.copy_(tables.keep[0])
            tables.words[0, 0] = moved.data_ptr()


def test_a_launch_reads_nothing_back() -> None:
    keys, values = (ragged([500], 2, 128, torch.bfloat16) for _ in range(2))
    tables = place_rows(keys, values, BLOCK, "cuda")
    q, k = (randn(1, h, 1, 128, dtype=torch.bfloat16) for h in (8, 2))
    rows = ids(0)
    torch.cuda.set_sync_debug_mode("error")
    try:
        triton_ops.append(k, k, rows, tables.row_base, tables.row_len, BLOCK)
        decode(q, tables, 2, 128, 0.09, rows=rows, row_heat=tables.row_heat,
               max_blocks=tables.max_blocks)  # fmt: skip
        extend(q, k, k, tables, 0.09, rows=rows)
    finally:
        torch.cuda.set_sync_debug_mode("default")
