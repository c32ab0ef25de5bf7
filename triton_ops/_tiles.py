# SPDX-License-Identifier: Apache-2.0
"""How kernels read blocks: pages of a tile, and the dtype names Triton uses.

Names in kernels: `i_*` program ids, `o_*` offsets, `m_*` masks, `p_*` pointers, `b_*` tiles.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

PAGE = tl.constexpr(32)

TL_DTYPE: dict[torch.dtype, Any] = {
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
}


def compute_dtype(q_dtype: torch.dtype, kv_dtype: torch.dtype, device: torch.device) -> Any:
    """Operand type of the dots: the common 16-bit type, else float32.

    Also float32 under the interpreter, whose 16-bit `tl.dot` returns wrong values.
    """
    if device.type == "cuda" and q_dtype == kv_dtype:
        return TL_DTYPE[q_dtype]
    return tl.float32


@triton.jit
def page_offsets(o_n, DIM: tl.constexpr, PAGE_ELEMS: tl.constexpr):
    """Element offset of token `o_n` of a tile that starts at a page: pages hold K, then V."""
    return (o_n // PAGE) * PAGE_ELEMS + (o_n % PAGE) * DIM


@triton.jit
def load_tile(p_tile, o_n, o_d, m_n, DIM: tl.constexpr, DIM_P: tl.constexpr, MASK_N: tl.constexpr):
    """Load `[BN, DIM_P]`; masked lanes are 0, so what lies in unused slots is never seen."""
    p = p_tile + o_n[:, None] + o_d[None, :]
    if MASK_N:
        if DIM == DIM_P:
            b = tl.load(p, mask=m_n[:, None], other=0.0)
        else:
            b = tl.load(p, mask=m_n[:, None] & (o_d < DIM)[None, :], other=0.0)
    else:
        if DIM == DIM_P:
            b = tl.load(p)
        else:
            b = tl.load(p, mask=(o_d < DIM)[None, :], other=0.0)
    return b


@triton.jit
def store_rows(
    b_m, b_l, b_acc, out, lse, part_acc, part_m, part_l, i_r, i_s, S, o_d, m_r, DIM: tl.constexpr,
    DIRECT: tl.constexpr,
):  # fmt: skip
    """Store the rows `i_r` of a program: results, or (not DIRECT) partials of its split `i_s`."""
    m_o = m_r[:, None] & (o_d < DIM)[None, :]
    if DIRECT:
        b_l = tl.where(b_l > 0, b_l, 1.0)
        b_o = b_acc / b_l[:, None]
        tl.store(out + i_r[:, None] * DIM + o_d[None, :], b_o.to(out.dtype.element_ty), mask=m_o)
        tl.store(lse + i_r, b_m + tl.log(b_l), mask=m_r)
    else:
        o_p = i_r * S + i_s
        tl.store(part_m + o_p, b_m, mask=m_r)
        tl.store(part_l + o_p, b_l, mask=m_r)
        m_a = m_o & (b_l > 0)[:, None]
        tl.store(part_acc + o_p[:, None] * DIM + o_d[None, :], b_acc, mask=m_a)
