# SPDX-License-Identifier: Apache-2.0
"""Softcap and sinks of both attention kernels against the reference."""

from __future__ import annotations

import math

import pytest
import torch

import triton_ops
from tests.matrices import chessboard
from tests.triton_ops.paged import (
    check_decode,
    check_extend,
    close,
    decode,
    expect,
    extend,
    lse_close,
    ragged,
)
from triton_ops.reference import attend_reference, place_rows

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
GROUPS = [(2, 2), (4, 2), (7, 1)]
DIMS = [16, 33, 80, 256]
SPLITS = [1, 2, 7]


def chunk(
    batch: int, heads: int, kv_heads: int, n: int, dim: int, dtype: torch.dtype = torch.float32
) -> list[torch.Tensor]:
    """Random q, k_new and v_new."""
    return [torch.randn(batch, h, n, dim).to(dtype) for h in (heads, kv_heads, kv_heads)]


def split_config(splits: int) -> triton_ops.ExtendConfig:
    return triton_ops.ExtendConfig(block_m=16, block_n=32, splits=splits)


def test_b03_two_keys() -> None:
    keys = [torch.zeros(1, 2, 16)]
    keys[0][0, 1] = 1.0
    values = [torch.tensor([0.0, 1.0])[None, :, None].expand(1, 2, 16)]
    q = torch.full((1, 1, 1, 16), 4.0)
    tables = place_rows(keys, values, 32, "cpu")
    for cap, want in ((2.0, 0.8730), (0.0, 0.9820)):
        out, _ = decode(q, tables, 1, 16, 32, 1 / 16, softcap=cap)
        assert (out - want).abs().max() < 5e-5
        more = q.expand(1, 1, 3, 16)
        out, _ = extend(more, None, None, tables, 32, 1 / 16, False, softcap=cap, kv_heads=1,
                        head_dim_v=16)  # fmt: skip
        assert (out - want).abs().max() < 5e-5


@pytest.mark.parametrize("cap", [1e-3, 0.5, 30.0, 1e6])
def test_the_cap_keeps_sign_and_precision_at_every_size(cap: float) -> None:
    # with one key the log-sum is the score itself
    sizes = torch.logspace(-6, 15, 43)
    scores = torch.cat([sizes, -sizes])
    q = torch.zeros(len(scores), 1, 1, 16)
    q[:, 0, 0, 5] = scores
    key = torch.zeros(1, 1, 16)
    key[..., 5] = 1.0
    tables = place_rows([key], [torch.ones(1, 1, 16)], 32, "cpu")
    rows = torch.zeros(len(scores), dtype=torch.int32)
    out, lse = decode(q, tables, 1, 16, 32, 1.0, rows=rows, softcap=cap, splits=1)
    want = cap * torch.tanh(q[:, :, 0, 5].double() / cap)
    assert (out == 1.0).all()
    torch.testing.assert_close(lse[:, :, 0].double(), want, rtol=2e-6, atol=1e-30)
    _, lse = extend(q[..., None, :, 0, :], None, None, tables, 32, 1.0, False, rows=rows,
                    softcap=cap, kv_heads=1, head_dim_v=16)  # fmt: skip
    torch.testing.assert_close(lse[:, :, 0].double(), want, rtol=2e-6, atol=1e-30)


def test_the_cap_hides_no_nan() -> None:
    keys = [torch.full((1, 3, 16), math.nan)]
    tables = place_rows(keys, keys, 32, "cpu")
    out, _ = decode(torch.ones(1, 1, 1, 16), tables, 1, 16, 32, 1.0, softcap=5.0, splits=1)
    assert out.isnan().all()


@pytest.mark.parametrize(("dtype", "group", "splits"), chessboard(DTYPES, GROUPS, SPLITS))
def test_softcap_and_sinks(dtype: torch.dtype, group: tuple[int, int], splits: int) -> None:
    heads, kv_heads = group
    lengths = [70, 0, 1, 64]
    keys, values = ragged(lengths, kv_heads, 80, dtype), ragged(lengths, kv_heads, 80, dtype)
    features = {"softcap": 3.0, "sinks": torch.randn(heads).to(dtype) * 3}
    q, k, v = chunk(4, heads, kv_heads, 5, 80, dtype)
    check_decode(q[:, :, :1], keys, values, splits=splits, **features)
    check_extend(q, k, v, keys, values, config=split_config(splits), **features)


@pytest.mark.parametrize("dim", DIMS)
def test_head_dims(dim: int) -> None:
    keys, values = ragged([70, 33], 1, dim), ragged([70, 33], 1, dim)
    features = {"softcap": 2.0, "sinks": torch.randn(2)}
    q, k, v = chunk(2, 2, 1, 3, dim)
    check_decode(q[:, :, :1], keys, values, scale=dim**-0.5, **features)
    check_extend(q, k, v, keys, values, scale=dim**-0.5, **features)


def test_one_query_head_a_kv_head_without_dots() -> None:
    keys, values = ragged([129, 5], 2, 24), ragged([129, 5], 2, 16)
    config = triton_ops.DecodeConfig(use_dot=False, splits=2)
    q = torch.randn(2, 2, 1, 24)
    check_decode(q, keys, values, config=config, softcap=1.5, sinks=torch.randn(2))


@pytest.mark.parametrize("kind", ["float", "bool", "min"])
def test_the_cap_comes_before_bias_and_masks(kind: str) -> None:
    keys, values = ragged([70, 40], 2, 16), ragged([70, 40], 2, 16)
    q, k, v = chunk(2, 4, 2, 6, 16)
    bias = torch.randn(2, 4, 6, 76) * 8
    if kind == "bool":
        bias = bias > 0
    elif kind == "min":
        bias[:, :, :, ::2] = torch.finfo(torch.float32).min
        bias[0, 1] = torch.finfo(torch.float32).min
    mask = torch.rand(2, 80) > 0.3
    for operands in ({"bias": bias}, {"bias": bias, "kv_mask": mask}):
        check_extend(q * 4, k, v, keys, values, softcap=2.0, **operands)
        operands["bias"] = bias[:, :, :1]
        check_decode(q[:, :, :1] * 4, keys, values, softcap=2.0, splits=3, **operands)


@pytest.mark.parametrize(("dtype", "splits"), chessboard(DTYPES, SPLITS))
def test_b11_a_sink_counts_once(dtype: torch.dtype, splits: int) -> None:
    # a sink of ln 8 beside 8 keys of score 0 takes half, however the keys are shared out
    keys, values = [torch.zeros(2, 8, 16, dtype=dtype)], [torch.ones(2, 8, 16, dtype=dtype)]
    tables = place_rows(keys, values, 32, "cpu")
    sinks = torch.full((4,), math.log(8.0))
    q = torch.randn(1, 4, 3, 16).to(dtype)
    for heat in ({}, {"row_heat": tables.row_heat, "max_blocks": tables.max_blocks}):
        out, lse = decode(q[:, :, :1], tables, 2, 16, 32, 1.0, sinks=sinks, splits=splits, **heat)
        close(out, torch.full_like(out, 0.5), torch.float32)
        lse_close(lse, torch.full_like(lse, math.log(16.0)))
    out, lse = extend(q, None, None, tables, 32, 1.0, False, sinks=sinks, kv_heads=2,
                      head_dim_v=16, config=split_config(splits))  # fmt: skip
    close(out, torch.full_like(out, 0.5), torch.float32)
    # spread over more tiles than splits: 256 keys, one each 32 visible
    keys, values = [torch.zeros(2, 256, 16, dtype=dtype)], [torch.ones(2, 256, 16, dtype=dtype)]
    tables = place_rows(keys, values, 32, "cpu")
    mask = (torch.arange(256) % 32 == 0)[None]
    out, _ = decode(q[:, :, :1], tables, 2, 16, 32, 1.0, sinks=sinks, splits=splits, kv_mask=mask)
    close(out, torch.full_like(out, 0.5), torch.float32)


@pytest.mark.parametrize("splits", SPLITS)
def test_a_sink_of_minus_infinity_changes_no_bit(splits: int) -> None:
    keys, values = ragged([70, 0, 33], 1, 16), ragged([70, 0, 33], 1, 16)
    tables = place_rows(keys, values, 32, "cpu")
    q, k, v = chunk(3, 2, 1, 5, 16)
    none = torch.full((2,), -math.inf)
    pairs = [
        [decode(q[:, :, :1], tables, 1, 16, 32, 0.3, splits=splits, sinks=s) for s in (None, none)],
        [extend(q, k, v, tables, 32, 0.3, config=split_config(splits), sinks=s)
         for s in (None, none)],
    ]  # fmt: skip
    for a, b in pairs:
        assert torch.equal(a[0], b[0]) and torch.equal(a[1], b[1])


@pytest.mark.parametrize(("splits", "size"), chessboard(SPLITS, [-1e30, -200.0, 200.0, 1e30]))
def test_sinks_far_from_the_scores(splits: int, size: float) -> None:
    keys, values = ragged([70, 40], 1, 16), ragged([70, 40], 1, 16)
    q, k, v = chunk(2, 2, 1, 5, 16)
    sinks = torch.tensor([size, 0.5])
    check_decode(q[:, :, :1], keys, values, splits=splits, sinks=sinks)
    check_extend(q, k, v, keys, values, config=split_config(splits), sinks=sinks)
    bias = torch.full((1, 1, 1, 75), torch.finfo(torch.float32).min)
    check_decode(q[:, :, :1], keys, values, splits=splits, sinks=sinks, bias=bias)


@pytest.mark.parametrize("splits", SPLITS)
def test_a_query_without_a_visible_key_gives_zero_and_the_sink(splits: int) -> None:
    keys, values = ragged([0, 40], 2, 16), ragged([0, 40], 2, 16)
    sinks = torch.tensor([0.5, -3.0, 7.0, -math.inf])
    mask = torch.zeros(2, 50, dtype=torch.bool)
    q, k, v = chunk(2, 4, 2, 3, 16)
    out, lse = check_decode(q[:, :, :1], keys, values, kv_mask=mask, sinks=sinks, splits=splits)
    assert (out == 0).all() and (lse == sinks[None, :, None]).all()
    out, lse = check_extend(
        q, k, v, keys, values, kv_mask=mask, sinks=sinks, config=split_config(splits)
    )
    assert (out == 0).all() and (lse == sinks[None, :, None]).all()


def test_strided_sinks() -> None:
    keys, values = ragged([70], 1, 16), ragged([70], 1, 16)
    q = torch.randn(1, 3, 1, 16)
    for sinks in (torch.randn(6)[::2], torch.randn(1).expand(3), torch.randn(3, 2).half()[:, 1]):
        check_decode(q, keys, values, sinks=sinks, splits=2)


def test_heat_does_not_see_the_sink() -> None:
    keys = [torch.randn(1, 300, 16) * 2]
    tables = place_rows(keys, keys, 32, "cpu")
    q = torch.randn(1, 3, 1, 16)
    counts = []
    for sinks in (None, torch.full((3,), 30.0)):
        tables.heat.zero_()
        out, _ = decode(q, tables, 1, 16, 32, 0.5, sinks=sinks, row_heat=tables.row_heat,
                        max_blocks=tables.max_blocks)  # fmt: skip
        close(out, expect(q, keys, keys, 0.5, sinks=sinks)[0], torch.float32)
        counts.append(tables.heat.clone())
    assert torch.equal(*counts) and counts[0].sum() > 0


def test_a_sink_is_a_key_without_a_value() -> None:
    # the same softmax, with the sink as a real key whose value is 0
    q, k, v = chunk(1, 1, 1, 20, 16)
    k[:, :, 0] = 0.0
    v[:, :, 0] = 0.0
    want, want_lse = attend_reference(q[:, :, -1:], k, v, scale=0.3)
    out, lse = check_decode(
        q[:, :, -1:], [k[0, :, 1:]], [v[0, :, 1:]], scale=0.3, sinks=torch.zeros(1), splits=2
    )
    close(out, want, torch.float32)
    lse_close(lse, want_lse)
