# SPDX-License-Identifier: Apache-2.0
"""append writes the right slots, all of them, and nothing else."""

from __future__ import annotations

import pytest
import torch

import triton_ops
from tests.triton_ops.paged import ragged, row_ids
from triton_ops.reference import Tables, aligned_empty, gather_blocks, place_rows, row_blocks
from triton_ops.tickets import Tickets


def stored(tables: Tables, row: int, length: int, k: torch.Tensor, v: torch.Tensor,
           block_size: int) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Read a row back."""
    blocks = row_blocks(tables, row)
    return gather_blocks(blocks, length, k.shape[0], k.shape[2], v.shape[2], block_size)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("dk", "dv"), [(16, 16), (40, 24), (128, 80)])
@pytest.mark.parametrize("n", [1, 5, 70])
def test_append_stores_old_and_new_tokens(dtype: torch.dtype, dk: int, dv: int, n: int) -> None:
    lengths = [0, 31, 64]
    keys, values = ragged(lengths, 2, dk, dtype), ragged(lengths, 2, dv, dtype)
    tables = place_rows(keys, values, 64, "cpu", spare_blocks=2)
    k, v = torch.randn(3, 2, n, dk).to(dtype), torch.randn(3, 2, n, dv).to(dtype)
    # rows need not be in order
    order = [2, 0, 1]
    triton_ops.append(k, v, row_ids(*order), tables.row_base, tables.row_len, 64)
    assert tables.row_len.tolist() == lengths
    for b, row in enumerate(order):
        got_k, got_v = stored(tables, row, lengths[row] + n, keys[row], values[row], 64)
        assert torch.equal(got_k, torch.cat([keys[row], k[b]], 1))
        assert torch.equal(got_v, torch.cat([values[row], v[b]], 1))
        # every other slot still holds the NaN it was filled with
        free = row_blocks(tables, row).isnan().sum().item()
        capacity = row_blocks(tables, row).shape[0] * 64
        assert free == 2 * (capacity - lengths[row] - n) * (dk + dv)


def test_b09_rows_of_unequal_length_get_their_own_slots() -> None:
    keys = [torch.zeros(1, n, 16) for n in (1, 4)]
    tables = place_rows(keys, keys, 32, "cpu", fill=-1.0, spare_blocks=0)
    new = torch.ones(2, 1, 1, 16)
    triton_ops.append(new, new, row_ids(0, 1), tables.row_base, tables.row_len, 32)
    for row, slot in ((0, 1), (1, 4)):
        k = row_blocks(tables, row)[0, : 32 * 16].view(32, 16)[:, 0]
        assert (k == 1).nonzero().flatten().tolist() == [slot]


@pytest.mark.parametrize("programs", [1, 5, 16, 1000])
@pytest.mark.parametrize("n", [1, 31, 200])
def test_few_programs_write_the_same(programs: int, n: int) -> None:
    keys = ragged([5, 40], 2, 16)
    k = torch.randn(2, 2, n, 16)
    stored_by = []
    for number in (0, programs):
        tables = place_rows(keys, keys, 32, "cpu", fill=7.0, spare_blocks=8)
        tickets = Tickets.unchecked(2, torch.device("cpu"))
        triton_ops.arm(row_ids(0, 1), tickets, n, torch.zeros(1, dtype=torch.int32))
        triton_ops.append(
            k, -k, row_ids(1, 0), tables.row_base, tables.row_len, 32, tickets, number
        )
        assert tickets.due.tolist() == tickets.arrived.tolist() == [0, 0]
        stored_by.append([row_blocks(tables, row) for row in (0, 1)])
    assert all(torch.equal(a, b) for a, b in zip(*stored_by, strict=True))


def test_a_row_of_minus_one_writes_nothing() -> None:
    keys = ragged([5, 5], 1, 16)
    tables = place_rows(keys, keys, 32, "cpu")
    before = row_blocks(tables, 0).nan_to_num(7.0)
    new = torch.randn(2, 1, 3, 16)
    triton_ops.append(new, new, row_ids(-1, 1), tables.row_base, tables.row_len, 32)
    assert torch.equal(row_blocks(tables, 0).nan_to_num(7.0), before)
    got, _ = stored(tables, 1, 8, keys[1], keys[1], 32)
    assert torch.equal(got[:, 5:], new[1])


def test_encoding_bits_of_a_word_are_not_part_of_the_address() -> None:
    keys = ragged([5], 1, 16)
    tables = place_rows(keys, keys, 32, "cpu")
    tables.words += 3
    new = torch.randn(1, 1, 2, 16)
    triton_ops.append(new, new, row_ids(0), tables.row_base, tables.row_len, 32)
    tables.words -= 3
    got, _ = stored(tables, 0, 7, keys[0], keys[0], 32)
    assert torch.equal(got, torch.cat([keys[0], new[0]], 1))


@pytest.mark.parametrize("shape", [(0, 2, 3, 16), (1, 2, 0, 16)])
def test_b16_nothing_to_append(shape: tuple[int, ...]) -> None:
    keys = ragged([5], 2, 16)
    tables = place_rows(keys, keys, 32, "cpu")
    before = row_blocks(tables, 0).nan_to_num(7.0)
    new = torch.randn(shape)
    rows = torch.zeros(shape[0], dtype=torch.int32)
    triton_ops.append(new, new, rows, tables.row_base, tables.row_len, 32)
    assert torch.equal(row_blocks(tables, 0).nan_to_num(7.0), before)


def views(kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V `[2, 2, 6, 16]` as views of another layout."""
    if kind == "fused":
        qkv = torch.randn(2, 6, 3, 2, 16)
        return qkv[:, :, 1].transpose(1, 2), qkv[:, :, 2].transpose(1, 2)
    if kind == "transpose":
        return (torch.randn(2, 6, 2, 16).transpose(1, 2) for _ in range(2))
    if kind == "expand":
        return torch.randn(2, 1, 6, 16).expand(2, 2, 6, 16), torch.randn(2, 2, 6, 16)
    return torch.randn(2, 2, 6, 32)[..., ::2], torch.randn(2, 2, 6, 33)[..., 1::2]


@pytest.mark.parametrize("kind", ["fused", "transpose", "expand", "stride2"])
def test_b20_strided_keys_and_values(kind: str) -> None:
    k, v = views(kind)
    keys, values = ragged([3, 30], 2, 16), ragged([3, 30], 2, 16)
    tables = place_rows(keys, values, 32, "cpu")
    triton_ops.append(k, v, row_ids(0, 1), tables.row_base, tables.row_len, 32)
    for row, length in enumerate((3, 30)):
        got_k, got_v = stored(tables, row, length + 6, keys[row], values[row], 32)
        assert torch.equal(got_k[:, length:], k[row]) and torch.equal(got_v[:, length:], v[row])


def test_b21_blocks_in_a_pool_of_all_layers() -> None:
    # slots [N, layers, elements]: the blocks of one layer are not adjacent
    size = 2 * 32 * (16 + 16)
    slots = aligned_empty(10 * 3 * size, torch.float32).fill_(torch.nan).view(10, 3, size)
    order = [7, 2, 9]
    empty = [torch.empty(2, 0, 16)]
    tables = place_rows(
        empty, empty, 32, "cpu", spare_blocks=3, allocate=lambda n, d, i: slots[order[i], 1]
    )
    new = torch.arange(96.0).view(1, 1, 96, 1).expand(1, 2, 96, 16)
    triton_ops.append(new, -new, row_ids(0), tables.row_base, tables.row_len, 32)
    for i, slot in enumerate(order):
        k, v = gather_blocks(slots[slot, 1][None], 32, 2, 16, 16, 32)
        want = torch.arange(32.0)[None, :, None].expand(2, 32, 16) + 32 * i
        assert torch.equal(k, want) and torch.equal(v, -want)
    # the neighbours are untouched
    used = torch.zeros(10, 3, dtype=torch.bool)
    used[order, 1] = True
    assert slots[~used].isnan().all()
