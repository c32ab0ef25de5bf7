# SPDX-License-Identifier: Apache-2.0
"""Cold blocks are copied ahead of a decode step, and attention reads the same of the copies."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import triton_ops
from tests.triton_ops.paged import ragged, row_ids
from triton_ops.reference import Tables, aligned_empty, block_elems, place_rows
from triton_ops.words import COLD

BLOCK = 32


def placed(lengths: list[int], cold: set[tuple[int, int]]) -> Tables:
    """Rows of one KV head of 16 channels, some of whose blocks are marked as cold."""
    tables = place_rows(
        ragged(lengths, 1, 16), ragged(lengths, 1, 16), BLOCK, "cpu", spare_blocks=1
    )
    for row, index in cold:
        tables.words[row, index] |= COLD
    return tables


BYTES = block_elems(1, 16, 16, BLOCK) * 4


def staged(
    tables: Tables, rows: torch.Tensor, room: int, width: int | None = None, **kwargs: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The copies, poisoned before, and the new tables."""
    size = len(rows)
    copies = aligned_empty(room * size * BYTES // 4, torch.float32, "cpu").fill_(float("nan"))
    table = torch.full((size, width or tables.max_blocks), -1)
    triton_ops.stage(
        rows, tables.row_base, tables.row_len, copies, table, block_size=BLOCK, block_bytes=BYTES,
        **kwargs,
    )  # fmt: skip
    return copies, table


def content(word: int, tables: Tables, copies: torch.Tensor) -> torch.Tensor:
    """The block at an address."""
    at = (word & -16) - copies.data_ptr()
    if 0 <= at < copies.numel() * 4:
        return copies[at // 4 : (at + BYTES) // 4]
    return next(block for block in tables.keep if block.data_ptr() == word & -16)


@given(
    st.lists(st.integers(0, 200), min_size=1, max_size=3),
    st.integers(0, 2**21 - 1),
    st.integers(1, 7),
    st.sampled_from(
        [{}, {"window": 1}, {"window": 40}, {"window": 64}, {"chunk": 48}, {"chunk": 64}]
    ),
    st.sampled_from([1, 3, 32]),
)
def test_what_is_copied(lengths, bits, room, span, programs) -> None:
    cold = {(r, i) for r in range(len(lengths)) for i in range(7) if bits >> (7 * r + i) & 1}
    cold = {(r, i) for r, i in cold if i <= lengths[r] // BLOCK}
    tables = placed(lengths, cold)
    before = tables.words.clone()
    copies, table = staged(tables, row_ids(*range(len(lengths))), room, programs=programs, **span)
    assert torch.equal(tables.words, before)
    for row, length in enumerate(lengths):
        first = max(length + 1 - span["window"], 0) if "window" in span else 0
        if "chunk" in span:
            first = length // span["chunk"] * span["chunk"]
        due = [
            i for i in range(first // BLOCK, length // BLOCK) if (row, i) in cold
        ][:room]  # fmt: skip
        for i in range(length // BLOCK + 1):
            old, new = int(tables.words[row, i]), int(table[row, i])
            if i in due:
                slot = (new - copies.data_ptr()) // BYTES
                assert slot == row * room + due.index(i) and not new & 15
                want = content(old, tables, copies)
                assert torch.equal(content(new, tables, copies), want)
            else:
                assert new == old
        assert (table[row, length // BLOCK + 1 :] == -1).all(), "words the row does not have"


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("window", [0, 70])
def test_attention_reads_the_copies_to_the_same_bits(splits: int, window: int) -> None:
    lengths = [200, 64, 0, 130]
    tables = placed(lengths, {(0, i) for i in range(7)} | {(1, 0), (3, 2), (3, 4)})
    rows = row_ids(0, 1, 2, -1, 3)
    copies, table = staged(tables, rows, 3, window=window)
    assert copies.isfinite().any()
    q = torch.randn(5, 2, 1, 16)

    def attend(words: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        tables.heat.zero_()
        out = triton_ops.attend_decode(
            q, rows, tables.row_base, tables.row_len, kv_heads=1, head_dim_v=16, block_size=BLOCK,
            scale=0.3, new_tokens=0, window=window, splits=splits, words=words,
            row_heat=tables.row_heat, max_blocks=tables.max_blocks,
        )  # fmt: skip
        return out, tables.heat.clone()

    want, heat = attend(None)
    got, counted = attend(table)
    assert torch.equal(got, want) and torch.equal(counted, heat) and heat.any()
    for block in tables.keep:  # nothing that was copied is read again
        if block.data_ptr() in {int(w) & -16 for w in tables.words[0, :3]} and not window:
            block.fill_(float("nan"))
    assert torch.equal(attend(table)[0], want)


def test_rows_that_have_outgrown_the_tables_are_read_through_their_own() -> None:
    tables = placed([200, 60], {(0, 0), (0, 1), (1, 0)})
    rows, q = row_ids(0, 1), torch.randn(2, 2, 1, 16)
    _, table = staged(tables, rows, 3, width=2)

    def attend(words: torch.Tensor | None) -> torch.Tensor:
        out = triton_ops.attend_decode(
            q, rows, tables.row_base, tables.row_len, kv_heads=1, head_dim_v=16, block_size=BLOCK,
            scale=0.3, new_tokens=0, words=words,
        )  # fmt: skip
        assert isinstance(out, torch.Tensor)
        return out

    assert torch.equal(attend(table), attend(None))


def test_no_rows_no_room_and_bad_operands() -> None:
    tables = placed([100], {(0, 0), (0, 1)})
    rows = row_ids(0)
    copies, table = staged(tables, row_ids(), 1)
    assert table.shape == (0, tables.max_blocks)
    copies, table = torch.empty(0), torch.zeros(1, 4, dtype=torch.int64)
    triton_ops.stage(
        rows, tables.row_base, tables.row_len, copies, table,
        block_size=BLOCK, block_bytes=BYTES,
    )  # fmt: skip
    assert table[0].tolist() == tables.words[0, :4].tolist()

    def bad(match: str, error: type[Exception] = ValueError, **changes: object) -> None:
        operands = {
            "rows": rows, "row_base": tables.row_base, "row_len": tables.row_len,
            "copies": aligned_empty(64, torch.float32, "cpu"), "table": table,
            "block_size": BLOCK, "block_bytes": BYTES,
        } | changes  # fmt: skip
        with pytest.raises(error, match=match):
            triton_ops.stage(**operands)

    bad("block_bytes must be .* got 24", block_bytes=24)
    bad("block_bytes must be .* got -16", block_bytes=-16)
    bad("int64", TypeError, table=table.int())
    bad(r"\[1, W\]", table=table[0])
    bad("block_size", block_size=33)
    bad("window and chunk|not both|window", window=3, chunk=4)
    bad("start at a multiple of 16", copies=torch.empty(64, dtype=torch.uint8)[3:35])
    with pytest.raises(ValueError, match=r"\[1, W\]"):
        triton_ops.attend_decode(
            torch.randn(1, 1, 1, 16), rows, tables.row_base, tables.row_len, kv_heads=1,
            head_dim_v=16, block_size=BLOCK, scale=1.0, words=table[0],
        )  # fmt: skip
