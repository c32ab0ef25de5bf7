# SPDX-License-Identifier: Apache-2.0
"""attend_decode against the reference, one test for each case that concerns it."""

from __future__ import annotations

import math

import pytest
import torch

import triton_ops
from tests.triton_ops.paged import (
    check_decode,
    close,
    decode,
    expect,
    lse_close,
    ragged,
    row_ids,
)
from triton_ops.reference import aligned_empty, heat_reference, place_rows

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
GROUPS = [(12, 2), (28, 4), (14, 2), (7, 1), (40, 8), (5, 5)]
HEAD_DIMS = [16, 40, 64, 80, 96, 112, 128, 192, 256]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("splits", [1, 3, None])
def test_decode_equals_reference(dtype: torch.dtype, splits: int | None) -> None:
    keys, values = ragged([70, 1, 64, 200], 2, 64, dtype), ragged([70, 1, 64, 200], 2, 64, dtype)
    check_decode(torch.randn(4, 4, 1, 64).to(dtype), keys, values, 64, splits=splits)


@pytest.mark.parametrize("use_dot", [False, True])
@pytest.mark.parametrize("block_n", [32, 64, 128])
def test_every_config_gives_the_answer(use_dot: bool, block_n: int) -> None:
    config = triton_ops.DecodeConfig(block_n=block_n, use_dot=use_dot, splits=2)
    keys, values = ragged([129, 128, 5], 2, 24), ragged([129, 128, 5], 2, 16)
    q = torch.randn(3, 2, 1, 24)
    check_decode(q, keys, values, 128, config=config)
    mask = torch.rand(3, 130) > 0.5
    check_decode(q, keys, values, 128, config=config, kv_mask=mask)


def test_a_tile_halves_until_it_divides_the_block() -> None:
    keys = ragged([100, 96], 1, 16)
    check_decode(torch.randn(2, 2, 1, 16), keys, keys, 96, splits=2)


def test_the_new_token_is_counted_by_default() -> None:
    keys, values = ragged([33], 1, 16), ragged([33], 1, 16)
    tables = place_rows(keys, values, 32, "cpu")
    tables.row_len -= 1
    q = torch.randn(1, 2, 1, 16)
    out = triton_ops.attend_decode(
        q, row_ids(0), tables.row_base, tables.row_len, kv_heads=1, head_dim_v=16, block_size=32,
        scale=0.3,
    )  # fmt: skip
    close(out, expect(q, keys, values, 0.3)[0], torch.float32)


def test_blocks_of_another_dtype_than_the_query() -> None:
    for kv in (torch.float16, torch.bfloat16):
        keys, values = ragged([50], 2, 16, kv), ragged([50], 2, 16, kv)
        check_decode(torch.randn(1, 4, 1, 16), keys, values, kv_dtype=kv)


def test_encoding_bits_are_masked_off() -> None:
    keys, values = ragged([50], 1, 16), ragged([50], 1, 16)
    tables = place_rows(keys, values, 32, "cpu")
    tables.words += 5
    q = torch.randn(1, 1, 1, 16)
    close(decode(q, tables, 1, 16, 32, 0.2)[0], expect(q, keys, values, 0.2)[0], torch.float32)


@pytest.mark.parametrize("kind", ["bool", "inf", "min", "none_visible"])
def test_b08_fully_masked_row(kind: str) -> None:
    keys, values = ragged([40, 7, 70], 2, 16), ragged([40, 7, 70], 2, 16)
    q = torch.randn(3, 4, 1, 16)
    if kind == "none_visible":
        mask = torch.ones(3, 70, dtype=torch.bool)
        mask[0] = False
        out, lse = check_decode(q, keys, values, kv_mask=mask, splits=3)
    else:
        bias = torch.zeros(3, 1, 1, 70)
        bias[0] = torch.finfo(torch.float32).min if kind == "min" else -math.inf
        if kind == "bool":
            bias = bias == 0
        out, lse = check_decode(q, keys, values, bias=bias, splits=3)
    if kind == "min":
        mean = values[0].mean(1, keepdim=True).repeat_interleave(2, 0)
        close(out[0], mean, torch.float32)
    else:
        assert (out[0] == 0).all() and (lse[0] == -math.inf).all()


@pytest.mark.parametrize("fill", [math.nan, math.inf, 1e4])
def test_b14_stale_tail(fill: float) -> None:
    for length in (13, 31, 33, 64):
        keys, values = ragged([length], 1, 16), ragged([length], 1, 16)
        q = torch.randn(1, 2, 1, 16)
        check_decode(q, keys, values, 32, fill=fill)
        tables = place_rows(keys, values, 64, "cpu", fill=fill, spare_blocks=2)
        out, _ = decode(q, tables, 1, 16, 64, 0.25, splits=2)
        close(out, expect(q, keys, values, 0.25)[0], torch.float32)


def test_b14_uniform_probe_counts_no_padding() -> None:
    lengths = [31, 32, 33, 63, 64, 65, 100]
    keys = [torch.zeros(1, n, 16) for n in lengths]
    values = [torch.ones(1, n, 16) for n in lengths]
    tables = place_rows(keys, values, 32, "cpu", fill=0.0, spare_blocks=61)
    out, lse = decode(torch.randn(7, 2, 1, 16), tables, 1, 16, 32, 1.0)
    assert (out == 1.0).all()
    lse_close(lse, torch.tensor(lengths).double().log()[:, None, None].expand(7, 2, 1))


@pytest.mark.parametrize("splits", [1, 4])
def test_b16_zero_lengths(splits: int) -> None:
    keys, values = ragged([0, 5, 0], 2, 16), ragged([0, 5, 0], 2, 16)
    out, lse = check_decode(torch.randn(3, 4, 1, 16), keys, values, splits=splits)
    for row in (0, 2):
        assert (out[row] == 0).all() and (lse[row] == -math.inf).all()


def test_b16_zero_batch() -> None:
    tables = place_rows(ragged([5], 1, 16), ragged([5], 1, 16), 32, "cpu")
    out, lse = decode(torch.randn(0, 4, 1, 16), tables, 1, 16, 32, 1.0)
    assert out.shape == (0, 4, 1, 16) and lse.shape == (0, 4, 1)


@pytest.mark.parametrize("splits", [1, 4])
def test_b16_a_row_of_minus_one_reads_no_table(splits: int) -> None:
    keys, values = ragged([40], 1, 16), ragged([40], 1, 16)
    tables = place_rows(keys, values, 32, "cpu")
    q = torch.randn(3, 2, 1, 16)
    out, lse = decode(
        q, tables, 1, 16, 32, 0.25, rows=row_ids(-1, 0, -1), splits=splits,
        row_heat=tables.row_heat, max_blocks=tables.max_blocks,
    )  # fmt: skip
    close(out[1:2], expect(q[1:2], keys, values, 0.25)[0], torch.float32)
    for row in (0, 2):
        assert (out[row] == 0).all() and (lse[row] == -math.inf).all()


@pytest.mark.parametrize("splits", [1, 4, 16])
def test_b17_more_splits_than_keys(splits: int) -> None:
    keys, values = ragged([3, 33], 1, 16), ragged([3, 33], 1, 16)
    check_decode(torch.randn(2, 2, 1, 16), keys, values, splits=splits)


def test_b17_one_split_all_masked() -> None:
    keys, values = ragged([128], 1, 16), ragged([128], 1, 16)
    mask = torch.ones(1, 128, dtype=torch.bool)
    mask[:, 32:64] = False
    check_decode(torch.randn(1, 2, 1, 16), keys, values, kv_mask=mask, splits=4)
    mask[:, :96] = False
    check_decode(torch.randn(1, 2, 1, 16), keys, values, kv_mask=mask.byte(), splits=4)


@pytest.mark.parametrize("kind", ["fused", "transpose", "expand", "stride2"])
def test_b20_strided_query(kind: str) -> None:
    keys, values = ragged([40, 20], 2, 16), ragged([40, 20], 2, 16)
    q = {
        "fused": torch.randn(2, 1, 3, 4, 16)[:, :, 0].transpose(1, 2),
        "transpose": torch.randn(2, 1, 4, 16).transpose(1, 2),
        "expand": torch.randn(2, 1, 1, 16).expand(2, 4, 1, 16),
        "stride2": torch.randn(2, 4, 1, 32)[..., ::2],
    }[kind]
    out, _ = check_decode(q, keys, values)
    assert torch.equal(out, check_decode(q.contiguous(), keys, values)[0])


def test_b20_strided_mask_and_bias() -> None:
    keys, values = ragged([40, 33], 2, 16), ragged([40, 33], 2, 16)
    q = torch.randn(2, 4, 1, 16)
    bias = torch.randn(1, 1, 1, 90)[..., ::2]
    mask = (torch.rand(90, 2) > 0.3).t()[:, ::2]
    for b in (bias, bias.expand(2, 4, 1, 45).half(), bias.expand(2, 1, 1, 45) > 0):
        check_decode(q, keys, values, bias=b, kv_mask=mask)


def test_b21_scattered_blocks_in_order() -> None:
    # slots of [N, layers, K and V interleaved by head]: order 7, 2, 9; each filled with its id
    size = 2 * 32 * (16 + 16)
    slots = aligned_empty(10 * 3 * size, torch.float32).fill_(math.nan).view(10, 3, size)
    order = [7, 2, 9]
    keys, values = ragged([90], 2, 16), ragged([90], 2, 16)
    tables = place_rows(
        keys, values, 32, "cpu", spare_blocks=0, allocate=lambda n, d, i: slots[order[i], 1]
    )
    q = torch.randn(1, 4, 1, 16)
    out, _ = decode(q, tables, 2, 16, 32, 0.25)
    close(out, expect(q, keys, values, 0.25)[0], torch.float32)
    # a query that picks one position only: the value must be its block's
    one_hot = torch.zeros(2, 96, 16)
    one_hot[:, torch.arange(96), torch.arange(96) // 32] = 50.0
    ids = torch.tensor(order).repeat_interleave(32)[None, :, None].expand(2, 96, 16).float()
    tables = place_rows(
        [one_hot], [ids], 32, "cpu", spare_blocks=0, allocate=lambda n, d, i: slots[order[i], 1]
    )
    for block, slot in enumerate(order):
        q = torch.zeros(1, 2, 1, 16)
        q[..., block] = 1.0
        assert decode(q, tables, 2, 16, 32, 1.0)[0].eq(slot).all()


@pytest.mark.parametrize(("heads", "kv_heads"), GROUPS)
def test_b22_gqa_groups(heads: int, kv_heads: int) -> None:
    keys, values = ragged([40, 9], kv_heads, 16), ragged([40, 9], kv_heads, 16)
    q = torch.randn(2, heads, 1, 16)
    check_decode(q, keys, values)
    ids = torch.arange(kv_heads).float()[:, None, None].expand(kv_heads, 40, 16)
    tables = place_rows([keys[0]], [ids], 32, "cpu")
    out, _ = decode(q[:1], tables, kv_heads, 16, 32, 1.0)
    want = (torch.arange(heads) // (heads // kv_heads)).float()
    close(out[0, :, 0, 0], want, torch.float32)


@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_b23_signal_in_the_last_channel(dim: int) -> None:
    values = ragged([40], 1, dim)
    keys = [torch.zeros(1, 40, dim)]
    keys[0][0, 17, dim - 1] = 1.0
    q = torch.zeros(1, 2, 1, dim)
    q[..., dim - 1] = 1.0
    tables = place_rows(keys, values, 32, "cpu")
    guarded = torch.full((3, 2, 1, dim), math.nan)
    guarded[1:] = 77.0
    triton_ops.attend_decode(
        q, row_ids(0), tables.row_base, tables.row_len, kv_heads=1, head_dim_v=dim, block_size=32,
        scale=100.0, new_tokens=0, out=guarded[:1],
    )  # fmt: skip
    close(guarded[0, :, 0], values[0][:, 17].expand(2, dim), torch.float32)
    assert (guarded[1:] == 77.0).all()


@pytest.mark.parametrize(("dk", "dv"), [(192, 128), (16, 80), (40, 16), (24, 200)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_b24_k_and_v_of_different_dims(dk: int, dv: int, dtype: torch.dtype) -> None:
    keys, values = ragged([70, 33], 2, dk, dtype), ragged([70, 33], 2, dv, dtype)
    check_decode(torch.randn(2, 4, 1, dk).to(dtype), keys, values, scale=dk**-0.5)


def test_b27_fp32_is_not_tf32() -> None:
    keys = [torch.randn(1, 2048, 128) * 0.2 + 0.4]
    values = [torch.randn(1, 2048, 128) * 0.2 + 0.4]
    q = torch.randn(1, 1, 1, 128) * 0.2 + 0.4
    tables = place_rows(keys, values, 256, "cpu")
    out, _ = decode(q, tables, 1, 128, 256, 128**-0.5)
    assert (out - expect(q, keys, values, 128**-0.5)[0]).abs().max() < 1e-5


def test_placement_does_not_change_a_bit() -> None:
    keys, values = ragged([150, 77], 2, 40, torch.float16), ragged([150, 77], 2, 40, torch.float16)
    q = torch.randn(2, 6, 1, 40).half()
    size = 2 * 32 * 80
    pool = aligned_empty(40 * size, torch.float16).view(40, size)
    there = torch.randperm(40).tolist()
    results = []
    for allocate in (None, lambda n, d, i: pool[i], lambda n, d, i: pool[there[i]]):
        tables = place_rows(keys, values, 32, "cpu", allocate=allocate)
        results.append(decode(q, tables, 2, 40, 32, 0.2, splits=3))
    for out, lse in results[1:]:
        assert torch.equal(out, results[0][0]) and torch.equal(lse, results[0][1])


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("block_size", [32, 128])
def test_heat_counts_the_blocks_the_reference_names(splits: int, block_size: int) -> None:
    lengths = [290, 33, 256]
    keys = [k * 2 for k in ragged(lengths, 2, 16)]
    tables = place_rows(keys, keys, block_size, "cpu")
    q = torch.randn(3, 6, 1, 16)
    want = torch.zeros_like(tables.heat)
    unsure = torch.zeros_like(tables.heat)
    for b, k in enumerate(keys):
        shares = heat_reference(q[b, :, 0], k, scale=0.5, block_size=block_size)
        blocks = shares.shape[1]
        want[b, :blocks] = (shares * blocks >= 1 - 1e-9).sum(0).int()
        # the only block of a row has all of the softmax: that is sure
        if blocks > 1:
            unsure[b, :blocks] = ((shares * blocks - 1).abs() < 1e-3).sum(0).int()
    if block_size == 32:
        assert 0 < want.sum() < 2 * want.numel()
    plain = decode(q, tables, 2, 16, block_size, 0.5, splits=splits)
    assert (tables.heat == 0).all()
    for step in (1, 2):
        out = decode(q, tables, 2, 16, block_size, 0.5, splits=splits, row_heat=tables.row_heat,
                     max_blocks=tables.max_blocks)  # fmt: skip
        assert ((tables.heat - step * want).abs() <= step * unsure).all()
    close(out[0], plain[0], torch.float32)


def test_heat_of_equal_blocks_counts_all_and_an_address_of_zero_none() -> None:
    keys = [torch.zeros(1, 96, 16), torch.zeros(1, 96, 16)]
    tables = place_rows(keys, keys, 32, "cpu")
    tables.row_heat[1] = 0
    decode(torch.randn(2, 3, 1, 16), tables, 1, 16, 32, 0.5, row_heat=tables.row_heat,
           max_blocks=tables.max_blocks)  # fmt: skip
    assert tables.heat[:, :4].tolist() == [[1, 1, 1, 0], [0, 0, 0, 0]]


def test_heat_stays_inside_max_blocks() -> None:
    keys = [torch.zeros(1, 96, 16)]
    tables = place_rows(keys, keys, 32, "cpu")
    q = torch.randn(1, 3, 1, 16)
    out, _ = decode(q, tables, 1, 16, 32, 0.5, row_heat=tables.row_heat, max_blocks=2)
    assert tables.heat[:, :4].tolist() == [[1, 1, 0, 0]]
    close(out, torch.zeros(1, 3, 1, 16), torch.float32)
