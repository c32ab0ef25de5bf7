# SPDX-License-Identifier: Apache-2.0
"""Latents as on a GPU, under the Triton interpreter: both forms against plain attention."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")
from kvpass import gpu_latent
from tests.test_ops import TOLERANCE, plain_attention
from triton_ops.reference import place_rows

HEADS, LATENT, ROTARY, NOPE, VALUES, BLOCK = 3, 32, 16, 24, 16, 32


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("limit", [2, 100])
@pytest.mark.parametrize("past", [(0, 0), (70, 33), (0, 64)])
@pytest.mark.parametrize("tokens", [1, 9])
def test_both_forms(monkeypatch, dtype, limit, past, tokens):
    """With a limit of 2, nine queries are attended in two parts."""
    monkeypatch.setattr(gpu_latent, "EXPANDED_QUERIES", limit)
    torch.manual_seed(0)
    key_weight = (torch.randn(HEADS, NOPE, LATENT) * LATENT**-0.5).to(dtype)
    value_weight = (torch.randn(HEADS, VALUES, LATENT) * LATENT**-0.5).to(dtype)
    old = [(torch.randn(1, n, LATENT), torch.randn(1, n, ROTARY)) for n in past]
    old = [(c.to(dtype), r.to(dtype)) for c, r in old]
    q = torch.randn(2, HEADS, tokens, NOPE + ROTARY).to(dtype)
    c, r = (torch.randn(2, 1, tokens, width).to(dtype) for width in (LATENT, ROTARY))
    placed = place_rows([c for c, _ in old], [r for _, r in old], BLOCK, "cpu", fill=math.nan)
    tables = SimpleNamespace(
        base=placed.row_base, length=placed.row_len, heat=None, max_blocks=placed.max_blocks
    )
    rows = torch.arange(2, dtype=torch.int32)
    out = gpu_latent.attend_latent(
        q, key_weight, value_weight, c, r, rows, tables, BLOCK, 0.2, True, None, None
    )
    assert out.dtype == dtype
    for b in range(2):
        latents = torch.cat((old[b][0], c[b]), 1).double()[None]
        rotary = torch.cat((old[b][1], r[b]), 1).double()[None]
        keys = latents @ key_weight.double().transpose(1, 2)
        keys = torch.cat((keys, rotary.expand(-1, HEADS, -1, -1)), -1)
        values = latents @ value_weight.double().transpose(1, 2)
        wanted = plain_attention(q[b : b + 1], keys, values, scale=0.2)
        assert (out[b].double() - wanted[0]).abs().max() <= 4 * TOLERANCE[dtype]


def test_a_mask_keeps_one_part(monkeypatch):
    """Positions of a mask count from the first stored token, which two parts would not."""
    monkeypatch.setattr(gpu_latent, "EXPANDED_QUERIES", 2)
    monkeypatch.setattr(gpu_latent, "_in_two_parts", lambda *args: pytest.fail("two parts"))
    placed = place_rows(
        [torch.randn(1, 40, LATENT)], [torch.randn(1, 40, ROTARY)], BLOCK, "cpu", fill=math.nan
    )
    tables = SimpleNamespace(base=placed.row_base, length=placed.row_len, heat=None, max_blocks=9)
    out = gpu_latent.attend_latent(
        torch.randn(1, HEADS, 9, NOPE + ROTARY), torch.randn(HEADS, NOPE, LATENT),
        torch.randn(HEADS, VALUES, LATENT), torch.randn(1, 1, 9, LATENT),
        torch.randn(1, 1, 9, ROTARY), torch.zeros(1, dtype=torch.int32), tables, BLOCK, 0.2, True,
        torch.ones(1, 49, dtype=torch.bool), None,
    )  # fmt: skip
    assert out.isfinite().all()
