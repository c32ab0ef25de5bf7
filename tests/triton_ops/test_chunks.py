# SPDX-License-Identifier: Apache-2.0
"""Chunks: a query sees keys of its own chunk only, and no tile before it is read."""

from __future__ import annotations

import math

import pytest
import torch

import triton_ops
from tests.triton_ops.paged import check_decode, check_extend, close, decode, expect, extend, ragged
from triton_ops.reference import attend_reference, heat_reference, hot_blocks, place_rows

BLOCK = 64
CHUNKS = [1, 3, 32, 33, BLOCK, 100, 1000, 1 << 40]
LENGTHS = [1, 31, 64, 65, 200, 256]


def test_the_reference() -> None:
    q, k, v = (torch.randn(1, 2, n, 16) for n in (5, 9, 9))
    out, _ = attend_reference(q, k, v, scale=0.3, causal=True, q_offset=4, chunk=3)
    for i in range(5):
        p = 4 + i
        seen = [j for j in range(9) if j <= p and j // 3 == p // 3]
        weights = (q[:, :, i : i + 1].double() @ k[:, :, seen].double().mT * 0.3).softmax(-1)
        close(out[:, :, i : i + 1], weights @ v[:, :, seen].double(), torch.float32)
    with pytest.raises(ValueError, match=r"chunk \(3\) needs causal=True"):
        attend_reference(q, k, v, scale=0.3, chunk=3)


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("splits", [1, 3])
def test_decode(chunk: int, splits: int) -> None:
    keys, values = ragged(LENGTHS, 2, 16), ragged(LENGTHS, 2, 16)
    q = torch.randn(len(LENGTHS), 4, 1, 16)
    config = triton_ops.DecodeConfig(block_n=32)
    check_decode(q, keys, values, BLOCK, chunk=chunk, splits=splits, config=config)


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize(("n", "splits"), [(1, 2), (5, 1), (5, 3), (70, 1)])
def test_extend(chunk: int, n: int, splits: int) -> None:
    lengths = [31, 130] if n > 5 else [0, 31, 64, 130]
    keys, values = ragged(lengths, 1, 16), ragged(lengths, 1, 16)
    config = triton_ops.ExtendConfig(block_m=64 if n > 5 else 16, block_n=32, splits=splits)
    q, k, v = (torch.randn(len(lengths), h, n, 16) for h in (2, 1, 1))
    check_extend(q, k, v, keys, values, BLOCK, chunk=chunk, config=config)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_with_everything_else(dtype: torch.dtype) -> None:
    lengths = [130, 64]
    keys, values = ragged(lengths, 2, 33, dtype), ragged(lengths, 2, 33, dtype)
    q, k, v = (torch.randn(2, h, 9, 33).to(dtype) for h in (4, 2, 2))
    mask = torch.rand(2, 139) > 0.3
    features = {"chunk": 48, "softcap": 4.0, "sinks": torch.randn(4), "kv_mask": mask}
    check_decode(q[:, :, :1], keys, values, **features)
    check_extend(q, k, v, keys, values, **features)


@pytest.mark.parametrize("splits", [1, 2])
def test_keys_before_the_chunk_are_not_read(splits: int) -> None:
    """What lies in the blocks before may be anything."""
    keys, values = ragged([150], 1, 16), ragged([150], 1, 16)
    want, _ = expect(torch.zeros(1, 1, 1, 16), keys, values, 0.3, True, chunk=70)
    broken = [k.clone() for k in keys]
    broken[0][:, :128] = math.nan  # position 149 sees 140 and later
    tables = place_rows(broken, broken, 32, "cpu")
    tables_v = place_rows(broken, values, 32, "cpu")
    out, _ = decode(torch.zeros(1, 1, 1, 16), tables_v, 1, 16, 32, 0.3, chunk=70, splits=splits)
    close(out, want, torch.float32)
    new = torch.randn(1, 1, 3, 16)
    config = triton_ops.ExtendConfig(block_m=16, block_n=32, splits=splits)
    out, _ = extend(new, new, new, tables, 32, 0.3, chunk=70, config=config)
    joined = [torch.cat([k, new[0]], 1) for k in keys]
    want, _ = expect(new, joined, joined, 0.3, True, chunk=70)
    close(out, want, torch.float32)


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("chunk", [1, 64, 100, 1000])
def test_heat_counts_blocks_of_the_chunk(splits: int, chunk: int) -> None:
    lengths = [290, 33, 256]
    keys = [k * 2 for k in ragged(lengths, 2, 16)]
    tables = place_rows(keys, keys, 32, "cpu")
    q = torch.randn(3, 6, 1, 16)
    want, unsure = torch.zeros_like(tables.heat), torch.zeros_like(tables.heat)
    for b, k in enumerate(keys):
        window = (lengths[b] - 1) % chunk + 1  # what a chunk is for its last token
        shares = heat_reference(q[b, :, 0], k, scale=0.5, block_size=32, window=window)
        hot = hot_blocks(shares, lengths[b], 32, window)
        want[b, : shares.shape[1]] = (hot >= 1 - 1e-9).sum(0).int()
        unsure[b, : shares.shape[1]] = (((hot - 1).abs() < 1e-3) & (shares < 0.999)).sum(0).int()
    assert want.sum() > 0
    decode(q, tables, 2, 16, 32, 0.5, splits=splits, row_heat=tables.row_heat,
           max_blocks=tables.max_blocks, chunk=chunk)  # fmt: skip
    assert ((tables.heat - want).abs() <= unsure).all()
