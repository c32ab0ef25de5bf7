# SPDX-License-Identifier: Apache-2.0
"""From products to weights, for all attention kernels: softcap, bias, masks, softmax, sinks.

The order is that of Gemma 2 and gpt-oss: the cap first, then bias and masks, and the sink as one
more logit of the softmax that has no value.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
_MINUS_2LOG2E = tl.constexpr(-2.8853900817779268)
# Below this the quotient loses digits; the series to x^7 is exact to 6e-8 of its value.
_SERIES = tl.constexpr(0.2)


@triton.jit
def cap_scores(b_x, softcap):
    """`softcap * tanh(b_x)` of fp32 scores that were divided by `softcap` already.

    exp2 of a negative number cannot overflow, so large scores of either sign give +-softcap; small
    ones keep their relative precision, however large the cap. NaN stays NaN.
    """
    b_a = tl.abs(b_x)
    b_e = tl.exp2(b_a * _MINUS_2LOG2E)
    b_t = (1.0 - b_e) / (1.0 + b_e)
    b_t = tl.where(b_x < 0, -b_t, b_t)
    b_2 = b_x * b_x
    b_series = b_x + b_x * b_2 * (-1.0 / 3 + b_2 * (2.0 / 15 - b_2 * (17.0 / 315)))
    return softcap * tl.where(b_a < _SERIES, b_series, b_t)


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


@triton.jit
def tile_weights(
    b_s, b_m, softcap, m_see, m_n, o_pos, m_r, p_mask, sm_t, mask_len, p_bias, sb_t, bias_len,
    HAS_MASK: tl.constexpr, BIAS: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Cap, bias, masks and one softmax step of the scaled products `[BM, BN]` of a tile."""
    if SOFTCAP:
        b_s = cap_scores(b_s, softcap)
    if BIAS != 0:
        m_b = m_r[:, None] & (m_n & (o_pos < bias_len))[None, :]
        b_s = add_bias(b_s, p_bias + o_pos.to(tl.int64)[None, :] * sb_t, m_b, BIAS)
    if HAS_MASK:
        m_see = m_see & visible_keys(p_mask, o_pos, m_n, sm_t, mask_len)[None, :]
    b_s = tl.where(m_see, b_s, -float("inf"))
    return softmax_weights(b_s, b_m, True)


@triton.jit
def add_sink(b_m, b_l, b_sink):
    """Maximum and sum of a softmax with one more logit, and the factor of its values so far.

    Done once for a query, after all of its keys. A sink of -inf changes nothing.
    """
    b_top = tl.maximum(b_m, b_sink)
    b_ref = tl.where(b_top == -float("inf"), 0.0, b_top)
    b_scale = tl.exp2((b_m - b_ref) * LOG2E)
    return b_top, b_l * b_scale + tl.exp2((b_sink - b_ref) * LOG2E), b_scale
