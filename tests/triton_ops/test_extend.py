# SPDX-License-Identifier: Apache-2.0
"""attend_extend against the reference, one test for each case that concerns it."""

from __future__ import annotations

import math

import pytest
import torch

import triton_ops
from tests.triton_ops.paged import (
    check_extend,
    close,
    decode,
    expect,
    extend,
    ragged,
    row_ids,
)
from triton_ops.reference import aligned_empty, place_rows

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
GROUPS = [(12, 2), (28, 4), (14, 2), (7, 1), (40, 8), (5, 5)]
HEAD_DIMS = [16, 40, 64, 80, 96, 112, 128, 192, 256]


def chunk(batch: int, heads: int, kv_heads: int, n: int, dk: int, dv: int,
          dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """Random q, k_new and v_new."""
    shapes = ((heads, dk), (kv_heads, dk), (kv_heads, dv))
    return tuple(torch.randn(batch, h, n, d).to(dtype) for h, d in shapes)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("n", [1, 70])
def test_extend_equals_reference(dtype: torch.dtype, causal: bool, n: int) -> None:
    keys, values = ragged([70, 0, 64], 2, 24, dtype), ragged([70, 0, 64], 2, 40, dtype)
    q, k, v = chunk(3, 4, 2, n, 24, 40, dtype)
    check_extend(q, k, v, keys, values, 64, causal=causal)


@pytest.mark.parametrize("splits", [2, 5])
@pytest.mark.parametrize("causal", [False, True])
def test_splits_share_cached_and_new_keys(splits: int, causal: bool) -> None:
    config = triton_ops.ExtendConfig(block_m=16, block_n=32, splits=splits)
    keys, values = ragged([70, 3], 1, 16), ragged([70, 3], 1, 16)
    q, k, v = chunk(2, 3, 1, 33, 16, 16)
    check_extend(q, k, v, keys, values, causal=causal, config=config)


def test_new_keys_are_not_read_from_the_cache() -> None:
    # the slots of the chunk hold NaN, before append and whatever append wrote later
    keys, values = ragged([10], 1, 16), ragged([10], 1, 16)
    tables = place_rows(keys, values, 32, "cpu")
    q, k, v = chunk(1, 2, 1, 9, 16, 16)
    before, _ = extend(q, k, v, tables, 32, 0.3)
    triton_ops.append(k * 3, v * 3, row_ids(0), tables.row_base, tables.row_len, 32)
    after, _ = extend(q, k, v, tables, 32, 0.3)
    assert torch.equal(before, after)


def test_blocks_of_another_dtype_than_the_query() -> None:
    keys, values = ragged([50], 2, 16, torch.float16), ragged([50], 2, 16, torch.float16)
    q, k, v = chunk(1, 4, 2, 6, 16, 16)
    check_extend(q, k.half(), v.half(), keys, values)


def test_b04_cached_continuation_is_aligned_lower_right() -> None:
    keys = [torch.zeros(1, 5, 16)]
    values = [torch.arange(5.0)[None, :, None].expand(1, 5, 16)]
    tables = place_rows(keys, values, 32, "cpu")
    v = torch.arange(5.0, 8.0)[None, None, :, None].expand(1, 1, 3, 16)
    out, _ = extend(torch.randn(1, 1, 3, 16), torch.zeros(1, 1, 3, 16), v, tables, 32, 1.0)
    close(out[0, 0], torch.tensor([2.5, 3.0, 3.5])[:, None].expand(3, 16), torch.float32)


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_b04_chunks_equal_one_prefill(size: int) -> None:
    empty = [torch.empty(2, 0, 16)]
    tables = place_rows(empty, empty, 32, "cpu")
    q, k, v = chunk(1, 4, 2, 20, 16, 16)
    whole, _ = extend(q, k, v, tables, 32, 0.3)
    parts = []
    for start in range(0, 20, size):
        part = slice(start, min(start + size, 20))
        qp, kp, vp = q[:, :, part], k[:, :, part], v[:, :, part]
        triton_ops.append(kp, vp, row_ids(0), tables.row_base, tables.row_len, 32)
        if size == 1:
            parts.append(decode(qp, tables, 2, 16, 32, 0.3, new_tokens=1)[0])
        else:
            parts.append(extend(qp, kp, vp, tables, 32, 0.3)[0])
        tables.row_len += qp.shape[2]
    close(torch.cat(parts, 2), whole, torch.float32)


@pytest.mark.parametrize("kind", ["bool", "inf", "min"])
def test_b08_fully_masked_row(kind: str) -> None:
    empty = [torch.empty(1, 0, 16)]
    q, k, v = chunk(1, 2, 1, 3, 16, 16)
    bias = torch.zeros(1, 1, 3, 3)
    bias[:, :, 0] = torch.finfo(torch.float32).min if kind == "min" else -math.inf
    if kind == "bool":
        bias = bias == 0
    out, lse = check_extend(q, k, v, empty, empty, causal=False, bias=bias)
    if kind == "min":
        close(out[0, :, 0], v[0, 0].mean(0).expand(2, 16), torch.float32)
    else:
        assert (out[:, :, 0] == 0).all() and (lse[:, :, 0] == -math.inf).all()


def test_b08_left_padding_then_a_second_layer() -> None:
    empty = [torch.empty(1, 0, 16)] * 2
    tables = place_rows(empty, empty, 32, "cpu")
    mask = torch.tensor([[0, 0, 0, 1, 1], [1, 1, 1, 1, 1]], dtype=torch.bool)
    q, k, v = chunk(2, 1, 1, 5, 16, 16)
    first, _ = extend(q, k, v, tables, 32, 0.3, kv_mask=mask)
    assert (first[0, :, :3] == 0).all()
    second, _ = extend(first, first, first, tables, 32, 0.3, kv_mask=mask)
    assert second.isfinite().all()
    alone, _ = extend(q[:1, :, 3:], k[:1, :, 3:], v[:1, :, 3:], tables, 32, 0.3)
    close(first[:1, :, 3:], alone, torch.float32)


@pytest.mark.parametrize("fill", [math.nan, math.inf, 1e4])
def test_b14_stale_tail(fill: float) -> None:
    for length in (13, 31, 32, 33):
        keys, values = ragged([length], 1, 16), ragged([length], 1, 16)
        tables = place_rows(keys, values, 32, "cpu", fill=fill)
        q, k, v = chunk(1, 2, 1, 3, 16, 16)
        out, _ = extend(q, k, v, tables, 32, 0.3)
        want, _ = expect(q, [torch.cat([keys[0], k[0]], 1)], [torch.cat([values[0], v[0]], 1)],
                         0.3, causal=True)  # fmt: skip
        close(out, want, torch.float32)


def test_b16_zero_batch_zero_chunk_and_skipped_rows() -> None:
    keys, values = ragged([0, 5, 0], 1, 16), ragged([0, 5, 0], 1, 16)
    tables = place_rows(keys, values, 32, "cpu")
    q, k, v = chunk(0, 2, 1, 4, 16, 16)
    out, lse = extend(q, k, v, tables, 32, 1.0)
    assert out.shape == (0, 2, 4, 16) and lse.shape == (0, 2, 4)
    q, k, v = chunk(3, 2, 1, 0, 16, 16)
    out, lse = extend(q, k, v, tables, 32, 1.0)
    assert out.shape == (3, 2, 0, 16) and lse.shape == (3, 2, 0)
    q, k, v = chunk(3, 2, 1, 4, 16, 16)
    for splits in (1, 3):
        config = triton_ops.ExtendConfig(block_m=16, block_n=32, splits=splits)
        out, lse = extend(q, k, v, tables, 32, 0.3, rows=row_ids(-1, 1, -1), config=config)
        want, _ = expect(q[1:2], [torch.cat([keys[1], k[1]], 1)],
                         [torch.cat([values[1], v[1]], 1)], 0.3, causal=True)  # fmt: skip
        close(out[1:2], want, torch.float32)
        for row in (0, 2):
            assert (out[row] == 0).all() and (lse[row] == -math.inf).all()


@pytest.mark.parametrize("kind", ["fused", "transpose", "expand", "stride2"])
def test_b20_strided_operands(kind: str) -> None:
    keys, values = ragged([40, 0], 2, 16), ragged([40, 0], 2, 16)
    if kind == "fused":
        q, k, v = torch.randn(2, 6, 3, 2, 16).unbind(2)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    elif kind == "transpose":
        q, k, v = (torch.randn(2, 6, h, 16).transpose(1, 2) for h in (4, 2, 2))
    elif kind == "expand":
        q, k, v = torch.randn(2, 4, 6, 16), torch.randn(2, 1, 6, 16), torch.randn(2, 1, 1, 16)
        k, v = k.expand(2, 2, 6, 16), v.expand(2, 2, 6, 16)
    else:
        q, k, v = (torch.randn(2, h, 6, 32)[..., ::2] for h in (4, 2, 2))
    out, _ = check_extend(q, k, v, keys, values)
    dense = [x.contiguous() for x in (q, k, v)]
    assert torch.equal(out, check_extend(*dense, keys, values)[0])


def test_b20_strided_mask_and_bias() -> None:
    keys, values = ragged([40, 33], 2, 16), ragged([40, 33], 2, 16)
    q, k, v = chunk(2, 4, 2, 6, 16, 16)
    bias = torch.randn(2, 1, 100, 6)[:, :, ::2].transpose(2, 3)
    mask = (torch.rand(100, 2) > 0.3).t()[:, ::2]
    for b in (bias, bias[:1], bias.half(), bias.expand(2, 4, 6, 50) > -1, bias[:, :, :1]):
        check_extend(q, k, v, keys, values, bias=b, kv_mask=mask)


@pytest.mark.parametrize(("heads", "kv_heads"), GROUPS)
def test_b22_gqa_groups(heads: int, kv_heads: int) -> None:
    keys, values = ragged([40], kv_heads, 16), ragged([40], kv_heads, 16)
    q, k, v = chunk(1, heads, kv_heads, 5, 16, 16)
    check_extend(q, k, v, keys, values)
    ids = torch.arange(kv_heads).float()[:, None, None]
    tables = place_rows(keys, [ids.expand(kv_heads, 40, 16)], 32, "cpu")
    out, _ = extend(q, k, ids[None].expand(1, kv_heads, 5, 16), tables, 32, 1.0)
    want = (torch.arange(heads) // (heads // kv_heads)).float()[:, None].expand(heads, 5)
    close(out[0, :, :, 0], want, torch.float32)


@pytest.mark.parametrize("dim", HEAD_DIMS)
@pytest.mark.parametrize("where", ["cached", "new"])
def test_b23_signal_in_the_last_channel(dim: int, where: str) -> None:
    keys, values = [torch.zeros(1, 40, dim)], ragged([40], 1, dim)
    q, k, v = (torch.zeros(1, h, 2, dim) for h in (2, 1, 1))
    v.normal_()
    q[..., dim - 1] = 1.0
    if where == "cached":
        keys[0][0, 17, dim - 1] = 1.0
        want = values[0][0, 17]
    else:
        k[0, 0, 0, dim - 1] = 1.0
        want = v[0, 0, 0]
    tables = place_rows(keys, values, 32, "cpu")
    guarded = torch.full((3, 2, 2, dim), math.nan)
    guarded[1:] = 77.0
    triton_ops.attend_extend(
        q, k, v, row_ids(0), tables.row_base, tables.row_len, block_size=32, scale=100.0,
        causal=True, out=guarded[:1],
    )  # fmt: skip
    close(guarded[0], want.expand(2, 2, dim), torch.float32)
    assert (guarded[1:] == 77.0).all()


@pytest.mark.parametrize(("dk", "dv"), [(192, 128), (16, 80), (24, 200)])
def test_b24_k_and_v_of_different_dims(dk: int, dv: int) -> None:
    keys, values = ragged([70], 2, dk), ragged([70], 2, dv)
    q, k, v = chunk(1, 4, 2, 9, dk, dv)
    check_extend(q, k, v, keys, values, scale=dk**-0.5)


def test_b24_layers_of_alternating_head_dim() -> None:
    for dim in (64, 128, 64, 128):
        keys, values = ragged([33], 1, dim), ragged([33], 1, dim)
        check_extend(*chunk(1, 2, 1, 4, dim, dim), keys, values, scale=dim**-0.5)


def test_b27_fp32_is_not_tf32() -> None:
    keys, values = [torch.randn(1, 2048, 128) * 0.2 + 0.4], [torch.randn(1, 2048, 128) * 0.2 + 0.4]
    q, k, v = (x * 0.2 + 0.4 for x in chunk(1, 1, 1, 4, 128, 128))
    tables = place_rows(keys, values, 256, "cpu")
    out, _ = extend(q, k, v, tables, 256, 128**-0.5)
    want, _ = expect(q, [torch.cat([keys[0], k[0]], 1)], [torch.cat([values[0], v[0]], 1)],
                     128**-0.5, causal=True)  # fmt: skip
    assert (out - want).abs().max() < 1e-5


def test_placement_does_not_change_a_bit() -> None:
    keys, values = ragged([150, 77], 2, 40, torch.float16), ragged([150, 77], 2, 40, torch.float16)
    q, k, v = chunk(2, 6, 2, 5, 40, 40, torch.float16)
    size = 2 * 32 * 80
    pool = aligned_empty(40 * size, torch.float16).view(40, size)
    there = torch.randperm(40).tolist()
    results = []
    for allocate in (None, lambda n, d, i: pool[there[i]]):
        tables = place_rows(keys, values, 32, "cpu", allocate=allocate)
        results.append(extend(q, k, v, tables, 32, 0.2))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
