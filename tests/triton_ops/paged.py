# SPDX-License-Identifier: Apache-2.0
"""Inputs, poisoned outputs and the reference for the kernel tests."""

from __future__ import annotations

import math

import pytest
import torch

import triton_ops
from triton_ops import _checks
from triton_ops.reference import Tables, attend_reference, place_rows

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def close(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    """Compare with the float64 reference at the tolerance of `dtype`; NaN never passes."""
    tol = TOLERANCE[dtype]
    torch.testing.assert_close(actual.double(), expected.double(), atol=tol, rtol=tol)


def lse_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Compare log-sums; both -inf is equal."""
    torch.testing.assert_close(actual.double(), expected.double(), atol=1e-4, rtol=1e-5)


def ragged(
    lengths: list[int], heads: int, dim: int, dtype: torch.dtype = torch.float32
) -> list[torch.Tensor]:
    """Random `[heads, T, dim]` for each length."""
    return [torch.randn(heads, length, dim).to(dtype) for length in lengths]


def row_ids(*rows: int) -> torch.Tensor:
    """A `rows` operand."""
    return torch.tensor(rows, dtype=torch.int32)


def poisoned(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """An output full of NaN."""
    return torch.full(shape, math.nan, dtype=dtype)


def decode(
    q: torch.Tensor,
    tables: Tables,
    kv_heads: int,
    head_dim_v: int,
    block_size: int,
    scale: float,
    **kwargs: object,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`attend_decode` over what is stored already, into a poisoned output."""
    rows = kwargs.pop("rows", None)
    if rows is None:
        rows = torch.arange(q.shape[0], dtype=torch.int32)
    kwargs.setdefault("new_tokens", 0)
    out = poisoned(q.shape[0], q.shape[1], 1, head_dim_v, dtype=q.dtype)
    return triton_ops.attend_decode(
        q, rows, tables.row_base, tables.row_len, kv_heads=kv_heads, head_dim_v=head_dim_v,
        block_size=block_size, scale=scale, return_lse=True, out=out, **kwargs,
    )  # fmt: skip


def extend(
    q: torch.Tensor,
    k_new: torch.Tensor | None,
    v_new: torch.Tensor | None,
    tables: Tables,
    block_size: int,
    scale: float,
    causal: bool = True,
    **kwargs: object,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`attend_extend` into a poisoned output."""
    rows = kwargs.pop("rows", None)
    if rows is None:
        rows = torch.arange(q.shape[0], dtype=torch.int32)
    dim_v = kwargs["head_dim_v"] if v_new is None else v_new.shape[3]
    out = poisoned(*q.shape[:3], dim_v, dtype=q.dtype)
    return triton_ops.attend_extend(
        q, k_new, v_new, rows, tables.row_base, tables.row_len, block_size=block_size, scale=scale,
        causal=causal, return_lse=True, out=out, **kwargs,
    )  # fmt: skip


def expect(
    q: torch.Tensor, keys: list[torch.Tensor], values: list[torch.Tensor], scale: float,
    causal: bool = False, kv_mask: torch.Tensor | None = None, bias: torch.Tensor | None = None,
    **scoring: object,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """The reference, row by row because lengths differ; queries are the last tokens."""
    outs, lses = [], []
    for b, (k, v) in enumerate(zip(keys, values, strict=True)):
        row_bias = None if bias is None else bias[min(b, bias.shape[0] - 1)][None]
        out, lse = attend_reference(
            q[b : b + 1], k[None], v[None], scale=scale, causal=causal,
            q_offset=k.shape[1] - q.shape[2],
            kv_mask=None if kv_mask is None else kv_mask[b : b + 1], bias=row_bias, **scoring,
        )  # fmt: skip
        outs.append(out)
        lses.append(lse)
    return torch.cat(outs), torch.cat(lses)


def scoring(kwargs: dict[str, object]) -> dict[str, object]:
    """Those arguments that the reference takes too."""
    names = ("kv_mask", "bias", "softcap", "window", "chunk", "sinks")
    return {name: kwargs[name] for name in names if name in kwargs}


def visits(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Workspaces of the launches to come, NaN until a kernel writes to them."""
    seen: list[torch.Tensor] = []

    def workspace(device: torch.device, *shape: int) -> torch.Tensor:
        seen.append(poisoned(*shape))
        return seen[-1]

    monkeypatch.setattr(_checks, "workspace", workspace)
    return seen


def check_decode(
    q: torch.Tensor, keys: list[torch.Tensor], values: list[torch.Tensor], block_size: int = 32,
    scale: float = 0.25, fill: float = math.nan, **kwargs: object,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Store, decode and compare with the reference."""
    tables = place_rows(keys, values, block_size, "cpu", fill=fill)
    heads, _, dim_v = values[0].shape
    out, lse = decode(q, tables, heads, dim_v, block_size, scale, **kwargs)
    want, want_lse = expect(q, keys, values, scale, causal=True, **scoring(kwargs))
    close(out, want, q.dtype)
    lse_close(lse, want_lse)
    return out, lse


def check_extend(
    q: torch.Tensor, k_new: torch.Tensor, v_new: torch.Tensor, keys: list[torch.Tensor],
    values: list[torch.Tensor], block_size: int = 32, scale: float = 0.25, causal: bool = True,
    **kwargs: object,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Store, extend and compare with the reference."""
    tables = place_rows(keys, values, block_size, "cpu")
    out, lse = extend(q, k_new, v_new, tables, block_size, scale, causal, **kwargs)
    all_k = [torch.cat([k, new], 1) for k, new in zip(keys, k_new, strict=True)]
    all_v = [torch.cat([v, new], 1) for v, new in zip(values, v_new, strict=True)]
    want, want_lse = expect(q, all_k, all_v, scale, causal, **scoring(kwargs))
    close(out, want, q.dtype)
    lse_close(lse, want_lse)
    return out, lse
