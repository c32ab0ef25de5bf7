# SPDX-License-Identifier: Apache-2.0
"""The references themselves: against PyTorch, and against the layout written out by hand."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from triton_ops.reference import (
    aligned_empty,
    attend_reference,
    build_tables,
    gather_blocks,
    heat_reference,
    hot_blocks,
    merge_reference,
    pack_blocks,
    place_rows,
    row_blocks,
)


@pytest.mark.parametrize("causal", [False, True])
def test_attend_reference_equals_sdpa(causal: bool) -> None:
    q, k, v = (torch.randn(2, h, 7, 16, dtype=torch.float64) for h in (4, 2, 2))
    out, lse = attend_reference(q, k, v, scale=0.3, causal=causal)
    want = F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=0.3, enable_gqa=True)
    torch.testing.assert_close(out, want)
    if not causal:
        scores = torch.matmul(q, k.repeat_interleave(2, 1).mT) * 0.3
        torch.testing.assert_close(lse, torch.logsumexp(scores, -1))


def test_attend_reference_without_keys() -> None:
    out, lse = attend_reference(
        torch.randn(1, 2, 3, 16), torch.empty(1, 2, 0, 16), torch.empty(1, 2, 0, 16), scale=1.0
    )
    assert (out == 0).all() and (lse == -math.inf).all()


@pytest.mark.parametrize("window", [1, 3, 7, 9])
def test_attend_reference_with_a_window_equals_sdpa(window: int) -> None:
    q, k, v = (torch.randn(2, h, t, 16, dtype=torch.float64) for h, t in ((4, 5), (2, 9), (2, 9)))
    out, _ = attend_reference(q, k, v, scale=0.3, causal=True, q_offset=4, window=window)
    band = torch.ones(5, 9, dtype=torch.bool).tril(4).triu(5 - window)
    want = F.scaled_dot_product_attention(q, k, v, attn_mask=band, scale=0.3, enable_gqa=True)
    torch.testing.assert_close(out, want)
    with pytest.raises(ValueError, match="causal"):
        attend_reference(q, k, v, scale=0.3, window=window)


def test_attend_reference_with_sinks_and_cap_by_hand() -> None:
    # B03 and B11: two keys of scores 0 and 4 capped at 2; eight keys beside a sink of ln 8
    k, v = torch.tensor([0.0, 4.0]).view(1, 1, 2, 1), torch.tensor([0.0, 1.0]).view(1, 1, 2, 1)
    q = torch.ones(1, 1, 1, 1)
    for cap, want in ((2.0, 0.8730), (0.0, 0.9820)):
        assert abs(attend_reference(q, k, v, scale=1.0, softcap=cap)[0].item() - want) < 5e-5
    keys, values = torch.zeros(1, 1, 8, 1), torch.ones(1, 1, 8, 1)
    sinks = torch.tensor([math.log(8.0)])
    out, lse = attend_reference(q, keys, values, scale=1.0, sinks=sinks)
    assert abs(out.item() - 0.5) < 1e-7 and abs(lse.item() - math.log(16.0)) < 1e-7
    mask = torch.zeros(1, 8, dtype=torch.bool)
    out, lse = attend_reference(q, keys, values, scale=1.0, sinks=sinks, kv_mask=mask)
    assert out.item() == 0 and lse.item() == sinks.double().item()


def test_pack_blocks_layout_by_the_formula() -> None:
    heads, total, dk, dv, block = 2, 150, 5, 3, 64
    k = torch.arange(heads * total * dk, dtype=torch.float32).view(heads, total, dk)
    v = -torch.arange(heads * total * dv, dtype=torch.float32).view(heads, total, dv)
    blocks = pack_blocks(k, v, block)
    assert blocks.shape == (3, heads * block * (dk + dv))
    page = 32 * (dk + dv)
    for h, pos in ((0, 0), (0, 31), (1, 32), (1, 63), (0, 64), (1, 149)):
        at = (h * (block // 32) + pos % block // 32) * page
        slot = pos % 32
        assert torch.equal(blocks[pos // block, at + slot * dk :][:dk], k[h, pos])
        assert torch.equal(blocks[pos // block, at + 32 * dk + slot * dv :][:dv], v[h, pos])
    back_k, back_v = gather_blocks(blocks, total, heads, dk, dv, block)
    assert torch.equal(back_k, k) and torch.equal(back_v, v)
    assert torch.isnan(blocks).sum() == heads * (3 * block - total) * (dk + dv)


def test_place_rows_round_trip_and_alignment() -> None:
    k, v = torch.randn(2, 40, 16), torch.randn(2, 40, 24)
    tables = place_rows([k], [v], 32, "cpu")
    assert all(int(word) % 128 == 0 for word in tables.words.flatten())
    blocks = row_blocks(tables, 0)
    assert blocks.shape[0] == 3
    back_k, back_v = gather_blocks(blocks, 40, 2, 16, 24, 32)
    assert torch.equal(back_k, k) and torch.equal(back_v, v)


def test_build_tables_refuses_a_misaligned_block() -> None:
    block = aligned_empty(64, torch.float32)[1:]
    with pytest.raises(ValueError, match="align"):
        build_tables([[block]], [1], "cpu")


def test_heat_reference_sums_to_one() -> None:
    shares = heat_reference(torch.randn(6, 16), torch.randn(2, 70, 16), scale=0.5, block_size=32)
    assert shares.shape == (2, 3)
    torch.testing.assert_close(shares.sum(1), torch.ones(2, dtype=torch.float64))


def test_heat_reference_of_a_window() -> None:
    q, k = torch.randn(6, 16), torch.randn(2, 100, 16)
    shares = heat_reference(q, k, scale=0.5, block_size=32, window=40)
    torch.testing.assert_close(shares.sum(1), torch.ones(2, dtype=torch.float64))
    assert (shares[:, 0] == 0).all() and (shares[:, 1:] > 0).all()
    hot = hot_blocks(shares, 100, 32, 40)
    torch.testing.assert_close(hot, shares * 3)
    assert (hot_blocks(shares, 100, 32, 1) > 0).sum() == 2
    alone = heat_reference(q, k[:, 60:], scale=0.5, block_size=40)
    torch.testing.assert_close(shares.sum(1, keepdim=True), alone)


def test_merge_reference_rebuilds_the_whole() -> None:
    q, k, v = torch.randn(1, 2, 1, 16), torch.randn(1, 2, 50, 16), torch.randn(1, 2, 50, 16)
    want, want_lse = attend_reference(q, k, v, scale=0.2)
    parts = [attend_reference(q, k[:, :, s], v[:, :, s], scale=0.2) for s in
             (slice(0, 20), slice(20, 20), slice(20, 50))]  # fmt: skip
    out, lse = merge_reference(
        torch.stack([p[0] for p in parts]), torch.stack([p[1] for p in parts])
    )
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(lse, want_lse)
