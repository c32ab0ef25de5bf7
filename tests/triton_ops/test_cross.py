# SPDX-License-Identifier: Apache-2.0
"""Cross attention: queries over stored keys that are not theirs, with other new keys or none."""

from __future__ import annotations

import math

import pytest
import torch

import triton_ops
from tests.triton_ops.paged import (
    check_decode,
    check_extend,
    close,
    decode,
    expect,
    extend,
    lse_close,
    ragged,
    row_ids,
)
from triton_ops.reference import place_rows

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [1, 2, 5, 40])
@pytest.mark.parametrize("splits", [1, 3])
def test_stored_keys_only(dtype: torch.dtype, n: int, splits: int) -> None:
    lengths = [70, 0, 64]
    keys, values = ragged(lengths, 2, 24, dtype), ragged(lengths, 2, 40, dtype)
    tables = place_rows(keys, values, 64, "cpu")
    q = torch.randn(3, 6, n, 24).to(dtype)
    config = triton_ops.ExtendConfig(block_m=32, block_n=32, splits=splits)
    out, lse = extend(q, None, None, tables, 64, 0.25, False, kv_heads=2, head_dim_v=40,
                      config=config)  # fmt: skip
    want, want_lse = expect(q, keys, values, 0.25)
    close(out, want, dtype)
    lse_close(lse, want_lse)
    assert (out[1] == 0).all() and (lse[1] == -math.inf).all()
    if n == 1:
        check_decode(q, keys, values, 64, splits=splits)


@pytest.mark.parametrize(("n", "m"), [(1, 4), (3, 40), (40, 3), (5, 0), (2, 1)])
@pytest.mark.parametrize("splits", [1, 3])
def test_other_numbers_of_new_keys(n: int, m: int, splits: int) -> None:
    keys, values = ragged([70, 0], 2, 16), ragged([70, 0], 2, 16)
    q, k, v = (torch.randn(2, h, t, 16) for h, t in ((4, n), (2, m), (2, m)))
    mask = torch.rand(2, 70 + m) > 0.3
    bias = torch.randn(2, 4, n, 70 + m)
    config = triton_ops.ExtendConfig(block_m=32, block_n=32, splits=splits)
    check_extend(q, k, v, keys, values, causal=False, config=config)
    features = {"kv_mask": mask, "bias": bias, "softcap": 2.0, "sinks": torch.randn(4)}
    check_extend(q, k, v, keys, values, causal=False, config=config, **features)


def test_blocks_of_another_dtype_than_the_query() -> None:
    keys, values = ragged([50], 2, 16, torch.float16), ragged([50], 2, 16, torch.float16)
    tables = place_rows(keys, values, 32, "cpu")
    q = torch.randn(1, 4, 3, 16)
    out, _ = extend(q, None, None, tables, 32, 0.25, False, kv_heads=2, head_dim_v=16,
                    kv_dtype=torch.float16)  # fmt: skip
    close(out, expect(q, keys, values, 0.25)[0], torch.float32)


def test_b25_every_step_sees_the_whole_encoder() -> None:
    ramp = torch.arange(10.0)[None, None, :, None].expand(1, 1, 10, 16)
    empty = [torch.empty(1, 0, 16)]
    tables = place_rows(empty, empty, 32, "cpu")
    zeros = torch.zeros(1, 1, 10, 16)
    q = torch.randn(1, 2, 4, 16)
    first, _ = extend(q, zeros, ramp, tables, 32, 1.0, False)
    triton_ops.append(zeros, ramp, row_ids(0), tables.row_base, tables.row_len, 32)
    one, _ = decode(q[:, :, :1], tables, 1, 16, 32, 1.0, new_tokens=10)
    tables.row_len += 10
    outs = [first, one]
    for _ in range(6):
        outs.append(decode(torch.randn(1, 2, 1, 16), tables, 1, 16, 32, 1.0)[0])
    outs.append(extend(q, None, None, tables, 32, 1.0, False, kv_heads=1, head_dim_v=16)[0])
    close(torch.cat(outs, 2), torch.full((1, 2, 15, 16), 4.5), torch.float32)
