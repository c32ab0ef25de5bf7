# SPDX-License-Identifier: Apache-2.0
"""Appends of a captured graph: a row without a ticket is not written, and says so."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import triton_ops
from tests.triton_ops.paged import ragged, row_ids
from triton_ops.reference import Tables, place_rows, row_blocks
from triton_ops.tickets import REFUSED, UNCHECKED, UNUSED, Tickets

CPU = torch.device("cpu")


def tables_of(*lengths: int, heads: int = 2) -> Tables:
    keys = ragged(list(lengths), heads, 16)
    return place_rows(keys, keys, 32, "cpu", fill=-1.0, spare_blocks=2)


def append(tables: Tables, tickets: Tickets, rows: torch.Tensor, n: int, heads: int = 2) -> None:
    new = torch.randn(len(rows), heads, n, 16)
    triton_ops.append(new, new, rows, tables.row_base, tables.row_len, 32, tickets)


def free_slots(tables: Tables, row: int, heads: int = 2) -> int:
    """Slots of keys and values that hold the filling."""
    return int((row_blocks(tables, row) == -1).sum()) // (2 * 16 * heads)


def status() -> torch.Tensor:
    return torch.full((1,), 77, dtype=torch.int32)


@pytest.mark.parametrize("n", [1, 3, 40])  # 40: several programs a head
@pytest.mark.parametrize("heads", [1, 2, 3])
def test_a_ticket_serves_one_append(n: int, heads: int) -> None:
    tables, tickets = tables_of(5, 7, heads=heads), Tickets.unchecked(2, CPU)
    rows, out = row_ids(0, 1), status()
    triton_ops.arm(rows, tickets, n, out)
    assert (out.item(), tickets.due.tolist()) == (0, [n, n])
    before = [free_slots(tables, row, heads) for row in (0, 1)]
    append(tables, tickets, rows, n, heads)
    assert [free_slots(tables, row, heads) for row in (0, 1)] == [b - n for b in before]
    assert tickets.due.tolist() == tickets.arrived.tolist() == tickets.fault.tolist() == [0, 0]
    held = [row_blocks(tables, row) for row in (0, 1)]
    append(tables, tickets, rows, n, heads)  # a replay that nobody reserved blocks for
    assert all(torch.equal(row_blocks(tables, row), held[row]) for row in (0, 1))
    assert tickets.fault.tolist() == [REFUSED, REFUSED]
    triton_ops.arm(rows, tickets, n, out)
    assert out.item() == REFUSED


@pytest.mark.parametrize("n", [2, 4])
def test_a_ticket_is_for_as_many_tokens_as_were_reserved(n: int) -> None:
    tables, tickets = tables_of(5), Tickets.unchecked(1, CPU)
    triton_ops.arm(row_ids(0), tickets, 3, status())
    before = row_blocks(tables, 0)
    append(tables, tickets, row_ids(0), n)
    assert torch.equal(row_blocks(tables, 0), before)
    assert (tickets.due.tolist(), tickets.fault.tolist()) == ([3], [REFUSED])
    append(tables, tickets, row_ids(0), 3)  # the right append still finds its ticket
    assert tickets.due.tolist() == [0]
    assert not torch.equal(row_blocks(tables, 0), before)


def test_a_ticket_that_is_left_is_a_fault_that_stays() -> None:
    tables, tickets, out = tables_of(5, 6), Tickets.unchecked(2, CPU), status()
    triton_ops.arm(row_ids(0, 1), tickets, 1, out)
    append(tables, tickets, row_ids(1), 1)
    triton_ops.arm(row_ids(1), tickets, 1, out)
    assert out.item() == 0  # of these rows only
    append(tables, tickets, row_ids(1), 1)
    for _ in range(3):
        triton_ops.arm(row_ids(0, 1), tickets, 1, out)
        assert out.item() == UNUSED
        append(tables, tickets, row_ids(0, 1), 1)
    assert tickets.fault.tolist() == [UNUSED, 0]


def test_rows_that_are_not_checked_are_written_as_before() -> None:
    tables, tickets = tables_of(5, 6), Tickets.unchecked(2, CPU)
    triton_ops.arm(row_ids(1), tickets, 1, status())
    before = free_slots(tables, 0)
    for n in (1, 4, 2):
        append(tables, tickets, row_ids(0), n)
    assert free_slots(tables, 0) == before - 4  # the same slots again: no length was changed
    assert tickets.due.tolist() == [UNCHECKED, 1]
    assert tickets.arrived.tolist() == tickets.fault.tolist() == [0, 0]


def test_a_mixed_call_writes_the_rows_that_may_be_written() -> None:
    tables, tickets = tables_of(5, 6, 7), Tickets.unchecked(3, CPU)
    triton_ops.arm(row_ids(0, 1), tickets, 1, status())
    append(tables, tickets, row_ids(0), 1)
    before = [free_slots(tables, row) for row in range(3)]
    append(tables, tickets, row_ids(0, 1, 2), 1)
    assert [free_slots(tables, row) - before[row] for row in range(3)] == [0, -1, -1]
    assert tickets.fault.tolist() == [REFUSED, 0, 0]
    append(tables, tickets, row_ids(-1), 1)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(-1, 2999), min_size=0, max_size=2500, unique=True), st.data())
def test_arm_against_plain_arithmetic(ids: list[int], data: st.DataObject) -> None:
    seed = data.draw(st.integers(0, 1 << 30))
    draw = torch.Generator().manual_seed(seed)
    tickets = Tickets.unchecked(3000, CPU)
    tickets.due.copy_(torch.randint(-1, 2, (3000,), generator=draw))
    tickets.fault.copy_(torch.randint(0, 400, (3000,), generator=draw).eq(0))
    due, fault, out = tickets.due.tolist(), tickets.fault.tolist(), status()
    triton_ops.arm(torch.tensor(ids, dtype=torch.int32), tickets, 9, out)
    want = 0
    for row in (i for i in ids if i >= 0):
        fault[row] |= UNUSED if due[row] > 0 else 0
        due[row] = 9
        want |= fault[row]
    assert (tickets.due.tolist(), tickets.fault.tolist(), out.item()) == (due, fault, want)


def test_what_is_refused() -> None:
    tickets, rows = Tickets.unchecked(4, CPU), row_ids(0)
    with pytest.raises(ValueError, match="-1 tokens"):
        triton_ops.arm(rows, tickets, -1, status())
    with pytest.raises(ValueError, match=r"status must be \[1\]"):
        triton_ops.arm(rows, tickets, 1, torch.zeros(2, dtype=torch.int32))
    with pytest.raises(TypeError, match="rows must be torch.int32"):
        triton_ops.arm(rows.long(), tickets, 1, status())
    with pytest.raises(TypeError, match="fault must be torch.int32"):
        triton_ops.arm(rows, tickets._replace(fault=torch.zeros(4)), 1, status())
    with pytest.raises(ValueError, match="arrived has 3 rows, due has 4"):
        triton_ops.arm(rows, tickets._replace(arrived=tickets.arrived[:3]), 1, status())
