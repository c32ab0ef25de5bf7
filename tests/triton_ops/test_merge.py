# SPDX-License-Identifier: Apache-2.0
"""The merge rule: empty parts drop out, whatever they hold."""

from __future__ import annotations

import math

import pytest
import torch

import triton_ops
from tests.triton_ops.paged import close, lse_close
from triton_ops.reference import merge_reference


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("parts", [1, 2, 5])
def test_merge_equals_reference(dtype: torch.dtype, parts: int) -> None:
    outs = torch.randn(parts, 2, 3, 4, 40).to(dtype)
    lses = torch.randn(parts, 2, 3, 4) * 5
    lses[0, 0] = -math.inf
    out, lse = triton_ops.merge(outs, lses)
    want, want_lse = merge_reference(outs, lses)
    assert out.dtype == dtype and lse.dtype == torch.float32
    close(out, want, dtype)
    lse_close(lse, want_lse)


@pytest.mark.parametrize("junk", [0.0, math.nan, math.inf, 1e30])
def test_b17_an_empty_part_changes_nothing(junk: float) -> None:
    out, lse = torch.randn(1, 3, 16), torch.randn(1, 3)
    outs = torch.cat([out, torch.full_like(out, junk)])
    lses = torch.cat([lse, torch.full_like(lse, -math.inf)])
    for order in ([0, 1], [1, 0]):
        got, got_lse = triton_ops.merge(outs[order], lses[order])
        close(got, out[0], torch.float32)
        lse_close(got_lse, lse[0])


def test_b17_all_parts_empty() -> None:
    out, lse = triton_ops.merge(torch.full((4, 3, 16), math.nan), torch.full((4, 3), -math.inf))
    assert (out == 0).all() and (lse == -math.inf).all()


def test_merge_of_no_rows() -> None:
    out, lse = triton_ops.merge(torch.empty(2, 0, 16), torch.empty(2, 0))
    assert out.shape == (0, 16) and lse.shape == (0,)


def test_merge_checks() -> None:
    with pytest.raises(ValueError, match=r"\[2, 3, 16\].*\[2, 4\]"):
        triton_ops.merge(torch.zeros(2, 3, 16), torch.zeros(2, 4))
    with pytest.raises(TypeError, match="float64"):
        triton_ops.merge(torch.zeros(2, 3, 16, dtype=torch.float64), torch.zeros(2, 3))
    with pytest.raises(TypeError, match="float16"):
        triton_ops.merge(torch.zeros(2, 3, 16), torch.zeros(2, 3, dtype=torch.float16))
