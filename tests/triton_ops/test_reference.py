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
