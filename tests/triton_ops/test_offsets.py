# SPDX-License-Identifier: Apache-2.0
"""B19 and B20: offsets past 2**31 elements, in memory that is reserved but hardly touched."""

from __future__ import annotations

import pytest
import torch

import triton_ops
from tests.triton_ops.paged import close, decode, expect, extend, ragged, row_ids
from triton_ops.reference import gather_blocks, place_rows, row_blocks

FAR = 2**31 + 64


@pytest.fixture(scope="module")
def vast() -> torch.Tensor:
    """More than 2**32 bytes of fp16; only the pages that a test writes become real."""
    return torch.empty(2147696640 + 2**16, dtype=torch.float16)


def far_apart(vast: torch.Tensor, shape: tuple[int, ...], dim: int) -> torch.Tensor:
    """A view of `shape` (2 long in `dim`) whose step along `dim` is past 2**31 elements."""
    strides, step = [0] * len(shape), 1
    for i in reversed(range(len(shape))):
        strides[i] = FAR if i == dim else step
        step *= 1 if i == dim else shape[i]
    view = vast.as_strided(shape, strides)
    view.copy_(torch.randn(shape))
    return view


def test_b19_page_id_times_stride_is_64_bit(vast: torch.Tensor) -> None:
    # the vLLM figures: page id 7768 with a stride of 276480 elements wraps in int32
    assert 7768 * 276480 == 2147696640 > 2**31 - 1
    keys, values = ragged([20], 1, 16, torch.float16), ragged([20], 1, 16, torch.float16)
    near = place_rows(keys, values, 32, "cpu", spare_blocks=0)
    start = (-vast[2147696640:].data_ptr() % 128) // 2
    size = 32 * 32
    spot = vast[2147696640 + start :][:size]
    far = place_rows(keys, values, 32, "cpu", spare_blocks=0, allocate=lambda n, d, i: spot)
    q = torch.randn(1, 2, 1, 16).half()
    a, b = (decode(q, t, 1, 16, 32, 0.3) for t in (near, far))
    assert torch.equal(a[0], b[0]) and torch.equal(a[1], b[1])


@pytest.mark.parametrize("dim", [0, 1])
def test_b20_decode_query_stride(vast: torch.Tensor, dim: int) -> None:
    keys = ragged([20, 5], 1, 16, torch.float16)
    tables = place_rows(keys, keys, 32, "cpu")
    q = far_apart(vast, (2, 2, 1, 16), dim)
    close(decode(q, tables, 1, 16, 32, 0.3)[0], expect(q, keys, keys, 0.3)[0], torch.float16)


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_b20_extend_and_append_strides(vast: torch.Tensor, dim: int) -> None:
    old = ragged([20, 5], 2, 16, torch.float16)
    tables = place_rows(old, old, 32, "cpu")
    q, k = torch.randn(2, 2, 2, 16).half(), far_apart(vast, (2, 2, 2, 16), dim)
    out, _ = extend(q, k, k, tables, 32, 0.3)
    whole = [torch.cat([a, b], 1) for a, b in zip(old, k, strict=True)]
    close(out, expect(q, whole, whole, 0.3, causal=True)[0], torch.float16)
    out, _ = extend(k, q, q, tables, 32, 0.3)
    other = [torch.cat([a, b], 1) for a, b in zip(old, q, strict=True)]
    close(out, expect(k, other, other, 0.3, causal=True)[0], torch.float16)
    triton_ops.append(k, k, row_ids(0, 1), tables.row_base, tables.row_len, 32)
    for row, length in enumerate((20, 5)):
        got, _ = gather_blocks(row_blocks(tables, row), length + 2, 2, 16, 16, 32)
        assert torch.equal(got[:, length:], k[row])


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_b20_bias_stride(vast: torch.Tensor, dim: int) -> None:
    old = ragged([20, 5], 1, 16, torch.float16)
    tables = place_rows(old, old, 32, "cpu")
    q, k, v = (torch.randn(2, h, 2, 16).half() for h in (2, 1, 1))
    bias = far_apart(vast, (2, 2, 2, 22), dim)
    out, _ = extend(q, k, v, tables, 32, 0.3, bias=bias)
    keys = [torch.cat([a, b], 1) for a, b in zip(old, k, strict=True)]
    values = [torch.cat([a, b], 1) for a, b in zip(old, v, strict=True)]
    want, _ = expect(q, keys, values, 0.3, causal=True, bias=bias)
    close(out, want, torch.float16)
    if dim != 2:
        row = bias[:, :, :1]
        out, _ = decode(q[:, :, :1], tables, 1, 16, 32, 0.3, bias=row)
        close(out, expect(q[:, :, :1], old, old, 0.3, bias=row)[0], torch.float16)
