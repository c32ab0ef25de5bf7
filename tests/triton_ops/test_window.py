# SPDX-License-Identifier: Apache-2.0
"""Sliding windows: the edge, the tiles that are skipped, and what must not change beside them."""

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
    ragged,
    row_ids,
    visits,
)
from triton_ops.config import window_tiles
from triton_ops.reference import (
    Tables,
    aligned_empty,
    heat_reference,
    hot_blocks,
    place_rows,
)

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
BLOCK = 64
WINDOWS = [1, 2, 31, 32, 33, BLOCK - 1, BLOCK, BLOCK + 1, 150, 1000]
LENGTHS = [1, 31, 64, 65, 200, 256]


def chunk(
    batch: int, heads: int, kv_heads: int, n: int, dim: int, dtype: torch.dtype = torch.float32
) -> list[torch.Tensor]:
    """Random q, k_new and v_new."""
    return [torch.randn(batch, h, n, dim).to(dtype) for h in (heads, kv_heads, kv_heads)]


def ramp(start: int, end: int) -> torch.Tensor:
    """Values `[1, tokens, 16]` that are their position."""
    return torch.arange(float(start), float(end))[None, :, None].expand(1, end - start, 16)


def poison(tables: Tables, block: int, row: int, upto: int, size: int) -> None:
    """Point the first words of a row at a block full of NaN."""
    bad = aligned_empty(size, tables.keep[0].dtype).fill_(math.nan)
    tables.keep.append(bad)
    tables.words[row, : upto // block] = bad.data_ptr()


@pytest.mark.parametrize(("window", "splits"), chessboard(WINDOWS, [1, 2, 7]))
def test_decode(window: int, splits: int) -> None:
    keys, values = ragged(LENGTHS, 2, 16), ragged(LENGTHS, 2, 16)
    q = torch.randn(len(LENGTHS), 4, 1, 16)
    config = triton_ops.DecodeConfig(block_n=32)
    check_decode(q, keys, values, BLOCK, window=window, splits=splits, config=config)


@pytest.mark.parametrize(
    ("window", "cut_into"), chessboard(WINDOWS, [(1, 2), (5, 1), (5, 3), (70, 1)])
)
def test_extend(window: int, cut_into: tuple[int, int]) -> None:
    n, splits = cut_into
    lengths = [31, 130] if n > 5 else [0, 31, 64, 130]
    keys, values = ragged(lengths, 1, 16), ragged(lengths, 1, 16)
    config = triton_ops.ExtendConfig(block_m=64 if n > 5 else 16, block_n=32, splits=splits)
    q, k, v = chunk(len(lengths), 2, 1, n, 16)
    check_extend(q, k, v, keys, values, BLOCK, window=window, config=config)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(2, 2, 33), (4, 2, 80), (7, 1, 256)])
def test_dtypes_groups_and_dims(dtype: torch.dtype, heads: int, kv_heads: int, dim: int) -> None:
    lengths = [130, 64]
    keys, values = ragged(lengths, kv_heads, dim, dtype), ragged(lengths, kv_heads, dim, dtype)
    q, k, v = chunk(2, heads, kv_heads, 9, dim, dtype)
    features = {"window": 40, "softcap": 4.0, "sinks": torch.randn(heads), "scale": dim**-0.5}
    check_decode(q[:, :, :1], keys, values, **features)
    check_extend(q, k, v, keys, values, **features)


def test_b12_prefill_then_decode() -> None:
    empty = [torch.empty(1, 0, 16)]
    zeros = torch.zeros(1, 1, 9, 16)
    for n, want in ((3, 1.0), (4, 1.5), (5, 2.5), (9, 6.5)):
        tables = place_rows(empty, empty, 32, "cpu")
        new = zeros[:, :, :n]
        out, _ = extend(new, new, ramp(0, n)[None], tables, 32, 1.0, window=4)
        close(out[0, 0, -1, 0], torch.tensor(want), torch.float32)
    close(out[0, 0, 2, 0], torch.tensor(1.0), torch.float32)
    # 3 + 3 + 3 gives the same rows; then position p sees p - 3 to p
    tables = place_rows(empty, empty, 32, "cpu", spare_blocks=2)
    tail = []
    one = zeros[:, :, :1]
    for p in [0, 3, 6, *range(9, 40)]:
        n = 3 if p < 9 else 1
        new, values = zeros[:, :, :n], ramp(p, p + n)[None]
        triton_ops.append(new, values, row_ids(0), tables.row_base, tables.row_len, 32)
        if n == 3:
            tail.append(extend(new, new, values, tables, 32, 1.0, window=4)[0])
        else:
            got, _ = decode(one, tables, 1, 16, 32, 1.0, new_tokens=1, window=4, splits=2)
            close(got[0, 0, 0], torch.full((16,), p - 1.5), torch.float32)
        tables.row_len += n
    close(torch.cat(tail, 2), out, torch.float32)


@pytest.mark.parametrize("size", [1, 7, 33])
def test_chunks_across_the_edge_equal_one_prefill(size: int) -> None:
    empty = [torch.empty(2, 0, 16)]
    tables = place_rows(empty, empty, 32, "cpu", spare_blocks=4)
    q, k, v = chunk(1, 4, 2, 70, 16)
    whole, _ = expect(q, list(k), list(v), 0.3, True, window=40)
    # all chunks, or only the tokens about the edge one by one
    for start in range(0, 70, size) if size > 1 else [0, *range(36, 44)]:
        part = slice(start, min(start + size, 70) if start or size > 1 else 36)
        qp, kp, vp = q[:, :, part], k[:, :, part], v[:, :, part]
        triton_ops.append(kp, vp, row_ids(0), tables.row_base, tables.row_len, 32)
        if qp.shape[2] == 1:
            out, _ = decode(qp, tables, 2, 16, 32, 0.3, new_tokens=1, window=40)
        else:
            out, _ = extend(qp, kp, vp, tables, 32, 0.3, window=40)
        close(out, whole[:, :, part], torch.float32)
        tables.row_len += qp.shape[2]


@pytest.mark.parametrize("kind", ["padding", "float", "bool", "shared"])
def test_masks_and_biases_count_from_the_first_token(kind: str) -> None:
    keys, values = ragged([130, 70], 2, 16), ragged([130, 70], 2, 16)
    q, k, v = chunk(2, 4, 2, 6, 16)
    operands: dict[str, torch.Tensor] = {"kv_mask": torch.rand(2, 140) > 0.4}
    operands["kv_mask"][1, 40:] = False  # the second row's window holds nothing visible
    if kind != "padding":
        operands["bias"] = torch.randn(2, 4, 6, 136) * 3
    if kind == "bool":
        operands["bias"] = operands["bias"] > -2
    elif kind == "shared":
        operands["bias"] = operands["bias"][:1, :1, :1]
    out, lse = check_extend(q, k, v, keys, values, window=20, **operands)
    assert (out[1] == 0).all() and (lse[1] == -math.inf).all()
    if "bias" in operands:
        operands["bias"] = operands["bias"][:, :, :1]
    out, lse = check_decode(q[:, :, :1], keys, values, window=20, splits=3, **operands)
    assert (out[1] == 0).all() and (lse[1] == -math.inf).all()


@pytest.mark.parametrize("splits", [1, 5])
def test_a_window_over_everything_changes_no_bit(splits: int) -> None:
    keys, values = ragged([100, 0], 1, 16), ragged([100, 0], 1, 16)
    tables = place_rows(keys, values, 32, "cpu")
    q, k, v = chunk(2, 2, 1, 10, 16)
    config = triton_ops.ExtendConfig(block_m=16, block_n=32, splits=splits)
    for window in (110, 1 << 40):
        for call in (
            lambda w: decode(q[:, :, :1], tables, 1, 16, 32, 0.3, splits=splits, window=w),
            lambda w: extend(q, k, v, tables, 32, 0.3, config=config, window=w),
        ):
            a, b = call(0), call(window)
            assert torch.equal(a[0], b[0]) and torch.equal(a[1], b[1])


def test_skipped_rows_and_zero_lengths() -> None:
    keys, values = ragged([0, 50, 40], 1, 16), ragged([0, 50, 40], 1, 16)
    tables = place_rows(keys, values, 32, "cpu")
    q, k, v = chunk(3, 2, 1, 40, 16)
    heat = {"row_heat": tables.row_heat, "max_blocks": tables.max_blocks}
    for splits in (1, 3):
        out, lse = decode(q[:, :, :1], tables, 1, 16, 32, 0.3, rows=row_ids(0, -1, 2), window=9,
                          splits=splits, **heat)  # fmt: skip
        assert (out[:2] == 0).all() and (lse[:2] == -math.inf).all()
        close(out[2:], expect(q[2:, :, :1], keys[2:], values[2:], 0.3, True, window=9)[0],
              torch.float32)  # fmt: skip
        config = triton_ops.ExtendConfig(block_m=16, block_n=32, splits=splits)
        out, lse = extend(q, k, v, tables, 32, 0.3, rows=row_ids(-1, 1, -1), window=9,
                          config=config)  # fmt: skip
        want = expect(q[1:2], [torch.cat([keys[1], k[1]], 1)], [torch.cat([values[1], v[1]], 1)],
                      0.3, True, window=9)  # fmt: skip
        close(out[1:2], want[0], torch.float32)
        assert (out[::2] == 0).all() and (lse[::2] == -math.inf).all()


@pytest.mark.parametrize("window", [1, 30, 32, 33, 100])
def test_decode_touches_no_block_outside(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = [300, 256, 33, 257]
    keys, values = ragged(lengths, 1, 16), ragged(lengths, 1, 16)
    tables = place_rows(keys, values, 32, "cpu")
    for row, length in enumerate(lengths):
        poison(tables, 32, row, max(length - window, 0), 32 * 32)
    q = torch.randn(4, 2, 1, 16)
    want, _ = expect(q, keys, values, 0.3, True, window=window)
    for splits in (1, 3):
        seen = visits(monkeypatch)
        out, _ = decode(q, tables, 1, 16, 32, 0.3, window=window, splits=splits,
                        row_heat=tables.row_heat, max_blocks=tables.max_blocks)  # fmt: skip
        close(out, want, torch.float32)
        # the sums of every visited tile are in the last workspace, [B, Hkv, tiles, G]
        visited = ~seen[-1][:, 0, :, 0].isnan()
        for row, length in enumerate(lengths):
            first, count = max(length - window, 0) // 32, -(-length // 32)
            assert visited[row].nonzero().flatten().tolist() == list(range(first, count))


@pytest.mark.parametrize("window", [1, 30, 33])
def test_extend_touches_no_block_outside(window: int) -> None:
    keys, values = ragged([300, 64], 1, 16), ragged([300, 64], 1, 16)
    tables = place_rows(keys, values, 32, "cpu")
    for row, length in enumerate((300, 64)):
        poison(tables, 32, row, max(length - window + 1, 0), 32 * 32)
    q, k, v = chunk(2, 1, 1, 90, 16)
    want, _ = expect(q, [torch.cat(pair, 1) for pair in zip(keys, k, strict=True)],
                     [torch.cat(pair, 1) for pair in zip(values, v, strict=True)],
                     0.3, True, window=window)  # fmt: skip
    for splits in (1, 3):
        config = triton_ops.ExtendConfig(block_m=16, block_n=32, splits=splits)
        out, _ = extend(q, k, v, tables, 32, 0.3, window=window, config=config)
        close(out, want, torch.float32)
        # and no tile of new keys before the window of a program's first query
        stale = v.clone()
        stale[:, :, :10] = math.nan
        out, _ = extend(q, k, stale, tables, 32, 0.3, window=window, config=config)
        late = 32 + (window + 15) // 16 * 16
        close(out[:, :, late:], want[:, :, late:], torch.float32)


def test_as_many_programs_as_a_window_has_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    for tokens in range(1, 200):
        most = max((at + tokens - 1) // 64 - at // 64 + 1 for at in range(64))
        assert window_tiles(tokens, 64) == most
    keys = ragged([600], 1, 16)
    tables = place_rows(keys, keys, 32, "cpu")
    seen = visits(monkeypatch)
    decode(torch.randn(1, 1, 1, 16), tables, 1, 16, 32, 0.3, window=33)
    assert seen[0].shape[2] == 2
    decode(torch.randn(1, 1, 1, 16), tables, 1, 16, 32, 0.3)
    assert seen[2].shape[2] == triton_ops.splits_for(1, 1, keys[0].device) > 2


def test_placement_does_not_change_a_bit() -> None:
    keys, values = ragged([150, 77], 2, 40, torch.float16), ragged([150, 77], 2, 40, torch.float16)
    q, k, v = chunk(2, 6, 2, 5, 40, torch.float16)
    size = 2 * 32 * 80
    pool = aligned_empty(40 * size, torch.float16).view(40, size)
    there = torch.randperm(40).tolist()
    features = {"window": 50, "softcap": 3.0, "sinks": torch.randn(6)}
    results = []
    for allocate in (None, lambda n, d, i: pool[there[i]]):
        tables = place_rows(keys, values, 32, "cpu", allocate=allocate)
        results.append([
            *decode(q[:, :, :1], tables, 2, 40, 32, 0.2, splits=3, **features),
            *extend(q, k, v, tables, 32, 0.2, **features),
        ])  # fmt: skip
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize(
    ("splits", "window", "block_size"), chessboard([1, 3], [1, 64, 100, 150, 1000], [32, 128])
)
def test_heat_counts_blocks_of_the_window(splits: int, window: int, block_size: int) -> None:
    lengths = [290, 33, 256]
    keys = [k * 2 for k in ragged(lengths, 2, 16)]
    tables = place_rows(keys, keys, block_size, "cpu")
    q = torch.randn(3, 6, 1, 16)
    want, unsure = torch.zeros_like(tables.heat), torch.zeros_like(tables.heat)
    for b, k in enumerate(keys):
        shares = heat_reference(
            q[b, :, 0], k, scale=0.5, block_size=block_size, window=window, softcap=3.0
        )
        blocks = shares.shape[1]
        hot = hot_blocks(shares, lengths[b], block_size, window)
        want[b, :blocks] = (hot >= 1 - 1e-9).sum(0).int()
        # the only block of a window has all of the softmax: that is sure
        unsure[b, :blocks] = (((hot - 1).abs() < 1e-3) & (shares < 0.999)).sum(0).int()
    assert want.sum() > 0
    for step in (1, 2):
        decode(q, tables, 2, 16, block_size, 0.5, splits=splits, row_heat=tables.row_heat,
               max_blocks=tables.max_blocks, window=window, softcap=3.0)  # fmt: skip
        assert ((tables.heat - step * want).abs() <= step * unsure).all()


def test_heat_of_equal_blocks_in_a_window() -> None:
    keys = [torch.zeros(1, 160, 16)]
    tables = place_rows(keys, keys, 32, "cpu")
    decode(torch.randn(1, 3, 1, 16), tables, 1, 16, 32, 0.5, row_heat=tables.row_heat,
           max_blocks=tables.max_blocks, window=96)  # fmt: skip
    assert tables.heat[0, :6].tolist() == [0, 0, 1, 1, 1, 0]
