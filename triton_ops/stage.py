# SPDX-License-Identifier: Apache-2.0
"""Bring cold blocks of a decode step to device memory before its attention reads them.

Attention reads cold blocks over the link, which rests while a model computes anything else. A few
programs that copy the next layer's cold blocks meanwhile, on another stream, let link and HBM work
at once. What is copied is what attention would have read, so no bit of its result changes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from triton_ops import _checks
from triton_ops.words import COLD

PROGRAMS = 32
"""That copy: enough to fill the link, few enough to leave the SMs to the model."""

_TILE = 2048  # int64 words that a program copies at once: 16 KiB
_SCAN = 128  # block words that it looks at once
_COLD = tl.constexpr(COLD)


@triton.jit(do_not_specialize=["window", "width", "room"])
def _stage_kernel(
    rows, row_base, row_len, copies, table, window, width, room, BLOCK: tl.constexpr,
    ELEMS: tl.constexpr, WINDOW: tl.constexpr, SCAN: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    i_b = tl.program_id(0).to(tl.int64)
    i_p = tl.program_id(1)
    i_row = tl.load(rows + i_b).to(tl.int64)
    if i_row >= 0:
        length = tl.load(row_len + i_row)
        p_words = tl.load(row_base + i_row).to(tl.pointer_type(tl.int64))
        # the query's own token is appended to the last block while this runs
        full = length // BLOCK
        blocks = tl.minimum(full + 1, width)
        first = 0
        if WINDOW == 1:
            first = tl.maximum(length + 1 - window, 0) // BLOCK
        if WINDOW == 2:
            first = length // window * window // BLOCK
        p_own = copies + i_b * room * ELEMS
        taken = 0
        for start in range(0, blocks, SCAN):
            o_w = start + tl.arange(0, SCAN)
            b_word = tl.load(p_words + o_w, mask=o_w < blocks, other=0)
            m_cold = ((b_word & _COLD) != 0) & (o_w >= first) & (o_w < full)
            o_own = taken + tl.cumsum(m_cold.to(tl.int32), 0) - 1
            m_own = m_cold & (o_own < room)
            b_own = p_own.to(tl.int64) + o_own.to(tl.int64) * (ELEMS * 8)
            if i_p == 0:
                b_new = tl.where(m_own, b_own, b_word)
                tl.store(table + i_b * width + o_w, b_new, mask=o_w < blocks)
            end = tl.minimum(taken + tl.sum(m_cold.to(tl.int32), 0), room)
            for own in range(taken, end):
                m_one = m_own & (o_own == own)
                source = tl.sum(tl.where(m_one, b_word & -16, 0), 0)
                target = tl.sum(tl.where(m_one, b_own, 0), 0)
                p_from = tl.multiple_of(source.to(tl.pointer_type(tl.int64)), 16)
                p_to = tl.multiple_of(target.to(tl.pointer_type(tl.int64)), 16)
                for at in range(i_p * TILE, ELEMS, tl.num_programs(1) * TILE):
                    o_e = at + tl.arange(0, TILE)
                    b_e = tl.load(p_from + o_e, mask=o_e < ELEMS)
                    tl.store(p_to + o_e, b_e, mask=o_e < ELEMS)
            taken = end


def stage(
    rows: torch.Tensor,
    row_base: torch.Tensor,
    row_len: torch.Tensor,
    copies: torch.Tensor,
    table: torch.Tensor,
    *,
    block_size: int,
    block_bytes: int,
    window: int = 0,
    chunk: int = 0,
    programs: int = PROGRAMS,
) -> None:
    """Copy cold blocks of rows, and make tables that name the copies.

    The first cold blocks of each row that the next token sees, as many as there is room for, all
    but the block that the token itself is appended to. Other words are those of the row.

    Args:
        rows: int32 `[B]`; -1 is passed over.
        row_base: int64 `[R]`, address of each row's table of block words.
        row_len: int32 `[R]`, tokens of each row.
        copies: contiguous, a multiple of 16 bytes; gets `len(copies) // block_bytes // B` blocks of
            each row.
        table: int64 `[B, W]` contiguous; gets the first W words of each row, as many as it has.
        block_size: tokens in a block, a multiple of 32.
        block_bytes: of one block, a multiple of 16.
        window: the token sees only the last `window` tokens, itself among them; 0 = all.
        chunk: it sees only tokens with the same position // chunk; 0 = all. Not with a window.
        programs: that copy.

    Raises:
        ValueError: shapes or devices that do not fit.
        TypeError: a dtype other than those named.
    """
    device = copies.device
    _checks.check_block_size(block_size)
    _checks.check_rows(rows.shape[0], device, rows, row_base, row_len)
    _checks.check_words(table, rows.shape[0], device)
    if block_bytes <= 0 or block_bytes % 16:
        raise ValueError(f"block_bytes must be a positive multiple of 16, got {block_bytes}")
    if not copies.is_contiguous() or copies.data_ptr() % 16:
        raise ValueError("copies must be contiguous and start at a multiple of 16 bytes")
    span = _checks.span_operand(window, chunk)
    size = rows.shape[0]
    if not size or not table.shape[1]:
        return
    room = copies.numel() * copies.element_size() // block_bytes // size
    with _checks.device_guard(device):
        _stage_kernel[(size, max(1, programs // size))](
            rows,
            row_base,
            row_len,
            copies.view(torch.uint8).flatten()[: room * size * block_bytes].view(torch.int64),
            table,
            span.size,
            table.shape[1],
            room,
            BLOCK=block_size,
            ELEMS=block_bytes // 8,
            WINDOW=span.kind,
            SCAN=_SCAN,
            TILE=_TILE,
            num_warps=4,
        )
