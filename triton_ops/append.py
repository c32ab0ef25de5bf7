# SPDX-License-Identifier: Apache-2.0
"""Write new keys and values into the blocks of their rows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from triton_ops import _checks
from triton_ops._tiles import PAGE, TL_DTYPE
from triton_ops.tickets import Tickets

_TOKENS_PER_PROGRAM = 16
_TOKENS_OF_FEW = 64
"""Tokens at once where few programs do it all: a store over the link takes long to begin."""


@triton.jit(do_not_specialize=["n"])
def _append_kernel(
    k,
    v,
    rows,
    row_base,
    row_len,
    due,
    arrived,
    fault,
    n,
    sk_b,
    sk_h,
    sk_n,
    sk_d,
    sv_b,
    sv_h,
    sv_n,
    sv_d,
    HKV: tl.constexpr,
    DK: tl.constexpr,
    DK_P: tl.constexpr,
    DV: tl.constexpr,
    DV_P: tl.constexpr,
    BLOCK: tl.constexpr,
    BT: tl.constexpr,
    KV: tl.constexpr,
    CHECKED: tl.constexpr,
):
    i_b = (tl.program_id(0) // HKV).to(tl.int64)
    i_h = (tl.program_id(0) % HKV).to(tl.int64)
    i_row = tl.load(rows + i_b).to(tl.int64)
    m_row = i_row >= 0
    b_due = -1
    if CHECKED:
        b_due = tl.load(due + i_row, mask=m_row, other=-1)
        m_due = (b_due == -1) | (b_due == n)
        p_fault = fault + i_row
        tl.store(p_fault, tl.load(p_fault, mask=m_row, other=0) | 1, mask=m_row & ~m_due)
        m_row = m_row & m_due
    if m_row:
        p_words = tl.load(row_base + i_row).to(tl.pointer_type(tl.int64))
        start = tl.load(row_len + i_row)
        for i_t in range(tl.program_id(1), tl.cdiv(n, BT), tl.num_programs(1)):
            o_n = i_t * BT + tl.arange(0, BT).to(tl.int64)
            m_n = o_n < n
            o_pos = start + o_n
            # [BT] a tile may cross blocks, so every token has its own word
            b_word = tl.load(p_words + o_pos // BLOCK, mask=m_n, other=0) & -16
            p_block = tl.multiple_of(b_word.to(tl.pointer_type(KV)), 16)
            o_page = i_h * (BLOCK // PAGE) + (o_pos % BLOCK) // PAGE
            p_page = p_block + o_page * (PAGE * (DK + DV))
            o_slot = o_pos % PAGE
            # [BT, DK]
            o_d = tl.arange(0, DK_P)
            m_d = m_n[:, None] & (o_d < DK)[None, :]
            p_k = (
                k + i_b * sk_b + i_h * sk_h + o_n[:, None] * sk_n + o_d.to(tl.int64)[None, :] * sk_d
            )
            b_k = tl.load(p_k, mask=m_d)
            tl.store(p_page[:, None] + (o_slot * DK)[:, None] + o_d[None, :], b_k, mask=m_d)
            # [BT, DV]
            o_d = tl.arange(0, DV_P)
            m_d = m_n[:, None] & (o_d < DV)[None, :]
            p_v = (
                v + i_b * sv_b + i_h * sv_h + o_n[:, None] * sv_n + o_d.to(tl.int64)[None, :] * sv_d
            )
            b_v = tl.load(p_v, mask=m_d)
            o_v = PAGE * DK + o_slot * DV
            tl.store(p_page[:, None] + o_v[:, None] + o_d[None, :], b_v, mask=m_d)
        if CHECKED:
            # the last program takes the ticket: all others, with all their warps, have seen it
            tl.debug_barrier()
            m_due = b_due != -1
            b_before = tl.atomic_add(arrived + i_row, 1, mask=m_due)
            m_last = m_due & (b_before == HKV * tl.num_programs(1) - 1)
            tl.store(arrived + i_row, 0, mask=m_last)
            tl.store(due + i_row, 0, mask=m_last)


def append(
    k: torch.Tensor,
    v: torch.Tensor,
    rows: torch.Tensor,
    row_base: torch.Tensor,
    row_len: torch.Tensor,
    block_size: int,
    tickets: Tickets | None = None,
    programs: int = 0,
) -> None:
    """Write token i of row b at position `row_len[rows[b]] + i`; `row_len` is not changed.

    Args:
        k: `[B, Hkv, n, Dk]` fp32, fp16 or bf16, any strides.
        v: `[B, Hkv, n, Dv]`, dtype of `k`, any strides.
        rows: int32 `[B]`; -1 writes nothing.
        row_base: int64 `[R]`, address of each row's table of block words.
        row_len: int32 `[R]`, tokens stored before this call.
        block_size: tokens in a block, a multiple of 32. The words of every block that is written
            must be in the table already.
        tickets: of all rows; a row that is checked and has no ticket for n tokens is not written,
            and its fault says so. None: no row is checked.
        programs: that share the tokens, at least one for each KV head of a row; 0 = as many as
            there are tiles. A few fill the link to host memory and leave the device to others.

    Raises:
        ValueError: shapes, devices or head dims (16..512 of `k`, 16..256 of `v`) that do not fit.
        TypeError: a dtype other than those named.
    """
    _checks.check_rank4("k", k)
    _checks.check_rank4("v", v)
    _checks.check_dtype("k", k.dtype)
    if v.dtype != k.dtype:
        raise TypeError(f"k and v must have one dtype, got {k.dtype} and {v.dtype}")
    if k.shape[:3] != v.shape[:3]:
        raise ValueError(f"k and v differ: {list(k.shape)} and {list(v.shape)}")
    if v.device != k.device:
        raise ValueError(f"k is on {k.device}, v on {v.device}")
    batch, kv_heads, n, dk = k.shape
    dv = v.shape[3]
    _checks.check_head_dim("head_dim_k", dk, _checks.MAX_LATENT_DIM)
    _checks.check_head_dim("head_dim_v", dv)
    _checks.check_block_size(block_size)
    _checks.check_rows(batch, k.device, rows, row_base, row_len)
    if tickets is not None:
        tickets.check(k.device)
    if batch == 0 or n == 0 or kv_heads == 0:
        return
    tile = min(_TOKENS_OF_FEW if programs else _TOKENS_PER_PROGRAM, _checks.next_power_of_2(n))
    pieces = triton.cdiv(n, tile)
    if programs:
        pieces = min(pieces, max(1, programs // (batch * kv_heads)))
    with _checks.device_guard(k.device):
        _append_kernel[(batch * kv_heads, pieces)](
            k,
            v,
            rows,
            row_base,
            row_len,
            *(tickets or (row_len, row_len, row_len)),
            n,
            *k.stride(),
            *v.stride(),
            HKV=kv_heads,
            DK=dk,
            DK_P=_checks.next_power_of_2(dk),
            DV=dv,
            DV_P=_checks.next_power_of_2(dv),
            BLOCK=block_size,
            BT=tile,
            KV=TL_DTYPE[k.dtype],
            CHECKED=tickets is not None,
            num_warps=1 if tile == 1 else 8 if programs else 4,
        )
