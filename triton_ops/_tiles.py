# SPDX-License-Identifier: Apache-2.0
"""Device functions shared by the attention kernels, and the dtype names Triton uses.

Names in kernels: `i_*` program ids, `o_*` offsets, `m_*` masks, `p_*` pointers, `b_*` tiles.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
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
def visible_keys(p_mask, o_pos, m_n, stride, mask_len):
    """`m_n` and the padding mask at positions `o_pos`; positions past the mask are hidden."""
    m_in = m_n & (o_pos < mask_len)
    b_see = tl.load(p_mask + o_pos.to(tl.int64) * stride, mask=m_in, other=0)
    return m_in & (b_see != 0)


@triton.jit
def add_bias(b_s, p_bias, m_bias, KIND: tl.constexpr):
    """Scores with a bias tile: kind 1 adds a float, kind 2 hides where the byte is 0."""
    if KIND == 1:
        b_b = tl.load(p_bias, mask=m_bias, other=-float("inf")).to(tl.float32)
        b_s = b_s + b_b
    else:
        b_b = tl.load(p_bias, mask=m_bias, other=0)
        b_s = tl.where(b_b != 0, b_s, -float("inf"))
    return b_s


@triton.jit
def softmax_weights(b_s, b_m, GUARD: tl.constexpr):
    """One online softmax step in natural units: new maximum, weights and rescale factor.

    Natural units keep a bias of finfo.min finite (times log2(e) it would overflow). GUARD: the
    tile may hide every key, and (-inf) - (-inf) is NaN.
    """
    b_new = tl.maximum(b_m, tl.max(b_s, 1))
    b_ref = b_new
    if GUARD:
        b_ref = tl.where(b_new == -float("inf"), 0.0, b_new)
    b_p = tl.exp2((b_s - b_ref[:, None]) * LOG2E)
    b_scale = tl.exp2((b_m - b_ref) * LOG2E)
    return b_new, b_p, b_scale
