# SPDX-License-Identifier: Apache-2.0
"""Give the rows of a step their tickets, and look at what became of the last ones."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from triton_ops import _checks
from triton_ops.tickets import Tickets

_ROWS_AT_ONCE = 1024


@triton.jit(do_not_specialize=["n", "tokens"])
def _arm_kernel(rows, due, fault, status, n, tokens, R: tl.constexpr):
    b_seen = tl.zeros([R], tl.int32)
    for start in range(0, n, R):
        o_n = start + tl.arange(0, R)
        i_row = tl.load(rows + o_n, mask=o_n < n, other=-1).to(tl.int64)
        m_n = i_row >= 0
        b_due = tl.load(due + i_row, mask=m_n, other=0)
        b_fault = tl.load(fault + i_row, mask=m_n, other=0)
        b_fault = b_fault | tl.where(b_due > 0, 2, 0)
        b_seen = b_seen | b_fault
        tl.store(fault + i_row, b_fault, mask=m_n)
        tl.store(due + i_row, tokens, mask=m_n)
    tl.store(status, tl.max(b_seen & 1, 0) | tl.max(b_seen & 2, 0))


def arm(rows: torch.Tensor, tickets: Tickets, tokens: int, status: torch.Tensor) -> None:
    """Give rows a ticket for ``tokens`` tokens.

    Args:
        rows: int32 vector; -1 is passed over.
        tickets: of all rows; ``fault`` gets ``UNUSED`` where a ticket was left.
        tokens: of the next append, >= 0.
        status: int32 ``[1]``, gets the faults of all these rows, or-ed together.

    Raises:
        TypeError: a dtype other than int32.
        ValueError: shapes or devices that do not fit, or negative tokens.
    """
    tickets.check(rows.device)
    _checks.check_table("rows", rows, torch.int32, rows.device)
    _checks.check_table("status", status, torch.int32, rows.device)
    if status.numel() != 1:
        raise ValueError(f"status must be [1], got {list(status.shape)}")
    if tokens < 0:
        raise ValueError(f"a ticket for {tokens} tokens: give 0 or more")
    with _checks.device_guard(rows.device):
        _arm_kernel[(1,)](
            rows, tickets.due, tickets.fault, status, rows.numel(), tokens, R=_ROWS_AT_ONCE
        )
