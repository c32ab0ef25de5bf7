# SPDX-License-Identifier: Apache-2.0
"""Attention of a chunk: cached keys through the table, the chunk's own keys from dense tensors.

A program owns BM rows of one KV head, where a row is one query token of one query head, so a
cached tile is read once for the whole group. Its key tiles (cached ones first, then new ones) may
be shared by several programs, whose partials `merge` combines.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from triton_ops import _checks
from triton_ops._tiles import (
    PAGE,
    TL_DTYPE,
    add_bias,
    compute_dtype,
    load_tile,
    page_offsets,
    softmax_weights,
    visible_keys,
)
from triton_ops.config import ExtendConfig, extend_config, extend_splits, fit_tile
from triton_ops.merge import merge_splits

__all__ = ["ExtendConfig", "attend_extend"]


@triton.jit
def _extend_tile(
    b_q, b_k, b_v, b_m, b_l, b_acc, scale, m_see, m_n, o_pos, m_r, p_mask, sm_t, mask_len,
    p_bias, sb_t, bias_len, DOT: tl.constexpr, HAS_MASK: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    # [BM, BN]
    b_s = tl.dot(b_q, tl.trans(b_k), input_precision="ieee") * scale
    if BIAS != 0:
        m_b = m_r[:, None] & (m_n & (o_pos < bias_len))[None, :]
        b_s = add_bias(b_s, p_bias + o_pos.to(tl.int64)[None, :] * sb_t, m_b, BIAS)
    if HAS_MASK:
        m_see = m_see & visible_keys(p_mask, o_pos, m_n, sm_t, mask_len)[None, :]
    b_s = tl.where(m_see, b_s, -float("inf"))
    b_m, b_p, b_scale = softmax_weights(b_s, b_m, True)
    b_l = b_l * b_scale + tl.sum(b_p, 1)
    b_acc = tl.dot(b_p.to(DOT), b_v, b_acc * b_scale[:, None], input_precision="ieee")
    return b_m, b_l, b_acc


@triton.jit(do_not_specialize=["n", "sm_b", "mask_len", "sb_b", "sb_h", "sb_q", "bias_len"])
def _extend_kernel(
    q,
    k_new,
    v_new,
    rows,
    row_base,
    row_len,
    out,
    lse,
    part_acc,
    part_m,
    part_l,
    kv_mask,
    bias,
    scale,
    n,
    sq_b,
    sq_h,
    sq_n,
    sq_d,
    sk_b,
    sk_h,
    sk_n,
    sk_d,
    sv_b,
    sv_h,
    sv_n,
    sv_d,
    sm_b,
    sm_t,
    mask_len,
    sb_b,
    sb_h,
    sb_q,
    sb_t,
    bias_len,
    HKV: tl.constexpr,
    G: tl.constexpr,
    DK: tl.constexpr,
    DK_P: tl.constexpr,
    DV: tl.constexpr,
    DV_P: tl.constexpr,
    BLOCK: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    KV: tl.constexpr,
    DOT: tl.constexpr,
    CAUSAL: tl.constexpr,
    HAS_MASK: tl.constexpr,
    BIAS: tl.constexpr,
    DIRECT: tl.constexpr,
    STAGES: tl.constexpr,
):
    PAGE_ELEMS: tl.constexpr = PAGE * (DK + DV)
    TILES: tl.constexpr = BLOCK // BN
    scale = tl.cast(scale, tl.float32)
    i_bh = tl.program_id(1).to(tl.int64)
    i_s = tl.program_id(2)
    S = tl.num_programs(2)
    i_b = i_bh // HKV
    i_h = i_bh % HKV
    # row r of the tile is query token o_i of query head o_h
    o_r = tl.program_id(0) * BM + tl.arange(0, BM)
    o_i = o_r // G
    o_h = i_h * G + o_r % G
    m_r = o_i < n
    o_n = tl.arange(0, BN)
    o_d = tl.arange(0, DK_P)
    o_dv = tl.arange(0, DV_P)
    i_row = tl.load(rows + i_b).to(tl.int64)
    i_safe = tl.maximum(i_row, 0)
    past = tl.load(row_len + i_safe, mask=i_row >= 0, other=0)
    p_words = tl.load(row_base + i_safe, mask=i_row >= 0, other=0).to(tl.pointer_type(tl.int64))
    # [BM, DK]
    o_q = o_i.to(tl.int64) * sq_n + o_h * sq_h
    p_q = q + i_b * sq_b + o_q[:, None] + o_d.to(tl.int64)[None, :] * sq_d
    b_q = tl.load(p_q, mask=m_r[:, None] & (o_d < DK)[None, :], other=0.0).to(DOT)
    p_mask = kv_mask
    if HAS_MASK:
        p_mask = kv_mask + i_b * sm_b
    p_bias = bias
    if BIAS != 0:
        p_bias = bias + i_b * sb_b + (o_h * sb_h + o_i.to(tl.int64) * sb_q)[:, None]

    # key tiles: `cached` through the table, then `fresh` of the chunk up to the causal limit
    limit = n
    if CAUSAL:
        limit = tl.minimum(n, (tl.program_id(0) * BM + BM - 1) // G + 1)
    fresh = tl.where(i_row >= 0, tl.cdiv(limit, BN), 0)
    cached = tl.cdiv(past, BN)
    lo = ((cached + fresh) * i_s) // S
    hi = ((cached + fresh) * (i_s + 1)) // S
    b_m = tl.full([BM], -float("inf"), tl.float32)
    b_l = tl.zeros([BM], tl.float32)
    b_acc = tl.zeros([BM, DV_P], tl.float32)
    # the word of a tile is loaded one tile ahead: inside the pipeline it would halve its depth
    end = tl.minimum(hi, cached)
    last = tl.maximum(end - 1, 0)
    b_word = tl.load(p_words + lo // TILES, mask=lo < end, other=0)
    for t in tl.range(lo, end, num_stages=STAGES):
        p_block = tl.multiple_of((b_word & -16).to(tl.pointer_type(KV)), 16)
        b_word = tl.load(p_words + tl.minimum(t + 1, last) // TILES)
        o_pos = t * BN + o_n
        m_n = o_pos < past
        o_page = i_h * (BLOCK // PAGE) + (t % TILES) * (BN // PAGE)
        p_page = p_block + o_page * PAGE_ELEMS
        # [BN, DK] and [BN, DV]
        o_k = page_offsets(o_n, DK, PAGE_ELEMS)
        b_k = load_tile(p_page, o_k, o_d, m_n, DK, DK_P, True).to(DOT)
        o_v = page_offsets(o_n, DV, PAGE_ELEMS)
        b_v = load_tile(p_page + PAGE * DK, o_v, o_dv, m_n, DV, DV_P, True).to(DOT)
        b_m, b_l, b_acc = _extend_tile(
            b_q, b_k, b_v, b_m, b_l, b_acc, scale, m_n[None, :], m_n, o_pos, m_r, p_mask, sm_t,
            mask_len, p_bias, sb_t, bias_len, DOT, HAS_MASK, BIAS,
        )  # fmt: skip
    p_k = k_new + i_b * sk_b + i_h * sk_h + o_d.to(tl.int64)[None, :] * sk_d
    p_v = v_new + i_b * sv_b + i_h * sv_h + o_dv.to(tl.int64)[None, :] * sv_d
    for t in tl.range(tl.maximum(lo - cached, 0), hi - cached, num_stages=STAGES):
        o_j = t * BN + o_n
        m_n = o_j < n
        o_j64 = o_j.to(tl.int64)[:, None]
        b_k = tl.load(p_k + o_j64 * sk_n, mask=m_n[:, None] & (o_d < DK)[None, :], other=0.0)
        b_v = tl.load(p_v + o_j64 * sv_n, mask=m_n[:, None] & (o_dv < DV)[None, :], other=0.0)
        m_see = m_n[None, :]
        if CAUSAL:
            m_see = m_see & (o_j[None, :] <= o_i[:, None])
        b_m, b_l, b_acc = _extend_tile(
            b_q, b_k.to(DOT), b_v.to(DOT), b_m, b_l, b_acc, scale, m_see, m_n, past + o_j, m_r,
            p_mask, sm_t, mask_len, p_bias, sb_t, bias_len, DOT, HAS_MASK, BIAS,
        )  # fmt: skip

    i_r = (i_b * HKV * G + o_h) * n + o_i
    m_o = m_r[:, None] & (o_dv < DV)[None, :]
    if DIRECT:
        b_l = tl.where(b_l > 0, b_l, 1.0)
        b_o = b_acc / b_l[:, None]
        tl.store(out + i_r[:, None] * DV + o_dv[None, :], b_o.to(out.dtype.element_ty), mask=m_o)
        tl.store(lse + i_r, b_m + tl.log(b_l), mask=m_r)
    else:
        o_p = i_r * S + i_s
        tl.store(part_m + o_p, b_m, mask=m_r)
        tl.store(part_l + o_p, b_l, mask=m_r)
        m_a = m_o & (b_l > 0)[:, None]
        tl.store(part_acc + o_p[:, None] * DV + o_dv[None, :], b_acc, mask=m_a)


def attend_extend(
    q: torch.Tensor,
    k_new: torch.Tensor,
    v_new: torch.Tensor,
    rows: torch.Tensor,
    row_base: torch.Tensor,
    row_len: torch.Tensor,
    *,
    block_size: int,
    scale: float,
    causal: bool,
    kv_mask: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    return_lse: bool = False,
    config: ExtendConfig | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of n new tokens to the `row_len[row]` cached ones and to each other.

    The chunk's own keys come from `k_new` and `v_new`, whether or not they were appended already,
    so nothing just written is read back over the link.

    Args:
        q: `[B, Hq, n, Dk]` fp32, fp16 or bf16, any strides.
        k_new: `[B, Hkv, n, Dk]`, the dtype of the blocks, any strides.
        v_new: `[B, Hkv, n, Dv]`, dtype of `k_new`, any strides.
        rows: int32 `[B]`; -1 gives zeros and lse -inf.
        row_base: int64 `[R]`, address of each row's table of block words.
        row_len: int32 `[R]`, cached tokens before the chunk.
        block_size: tokens in a block, a multiple of 32.
        scale: factor of the scores.
        causal: query i sees positions up to `row_len + i`; else all `row_len + n`.
        kv_mask: bool or uint8 `[B, T]`, True = may be seen; T covers every `row_len + n`, and
            positions past it are hidden.
        bias: additive float or bool (True = visible) `[B|1, Hq|1, n|1, T]`, any strides.
        return_lse: also return the natural log of the sum of exponentials.
        config: tile sizes for measurements.
        out: `[B, Hq, n, Dv]` contiguous, in the dtype of `q`; default a new tensor.

    Returns:
        out `[B, Hq, n, Dv]`, or `(out, lse)` with lse fp32 `[B, Hq, n]`. A query without a
        visible key gives 0 and -inf.

    Raises:
        ValueError: shapes, devices, head dims or head counts that do not fit.
        TypeError: a dtype that is not supported.
    """
    for name, tensor in (("q", q), ("k_new", k_new), ("v_new", v_new)):
        _checks.check_rank4(name, tensor)
        _checks.check_dtype(name, tensor.dtype)
        if tensor.device != q.device:
            raise ValueError(f"{name} is on {tensor.device}, q on {q.device}")
    batch, heads, n, dk = q.shape
    kv_heads, dv = k_new.shape[1], v_new.shape[3]
    group = _checks.group_size(heads, kv_heads)
    if k_new.shape != (batch, kv_heads, n, dk):
        raise ValueError(
            f"k_new must be {[batch, kv_heads, n, dk]} for q {list(q.shape)}, "
            f"got {list(k_new.shape)}"
        )
    if v_new.shape[:3] != k_new.shape[:3]:
        raise ValueError(f"k_new and v_new differ: {list(k_new.shape)} and {list(v_new.shape)}")
    if v_new.dtype != k_new.dtype:
        raise TypeError(f"k_new and v_new must have one dtype: {k_new.dtype} and {v_new.dtype}")
    _checks.check_head_dim("head_dim_k", dk)
    _checks.check_head_dim("head_dim_v", dv)
    _checks.check_block_size(block_size)
    _checks.check_rows(batch, q.device, rows, row_base, row_len)
    out = _checks.check_out(out, (batch, heads, n, dv), q.dtype, q.device)
    lse = torch.empty((batch, heads, n), dtype=torch.float32, device=q.device)
    mask = _checks.kv_mask_operand(kv_mask, batch, q.device)
    add = _checks.bias_operand(bias, batch, heads, n, q.device)
    if batch == 0 or n == 0:
        return (out, lse) if return_lse else out

    operands = kv_mask is not None or bias is not None
    cfg = config or extend_config(q.dtype, k_new.dtype, dk, dv, n * group, operands)
    row_tiles = triton.cdiv(n * group, cfg.block_m)
    splits = cfg.splits or extend_splits(row_tiles * batch * kv_heads, q.device)
    part_acc = part_m = part_l = None
    if splits > 1:
        part_acc = _checks.workspace(q.device, batch, heads, n, splits, dv)
        part_ml = _checks.workspace(q.device, 2, batch, heads, n, splits)
        part_m, part_l = part_ml[0], part_ml[1]
    with _checks.device_guard(q.device):
        _extend_kernel[(row_tiles, batch * kv_heads, splits)](
            q,
            k_new,
            v_new,
            rows,
            row_base,
            row_len,
            out,
            lse,
            part_acc,
            part_m,
            part_l,
            mask.tensor,
            add.tensor,
            float(scale),
            n,
            *q.stride(),
            *k_new.stride(),
            *v_new.stride(),
            *mask.strides,
            mask.length,
            *add.strides,
            add.length,
            HKV=kv_heads,
            G=group,
            DK=dk,
            DK_P=_checks.next_power_of_2(dk),
            DV=dv,
            DV_P=_checks.next_power_of_2(dv),
            BLOCK=block_size,
            BM=cfg.block_m,
            BN=fit_tile(cfg.block_n, block_size),
            KV=TL_DTYPE[k_new.dtype],
            DOT=compute_dtype(q.dtype, k_new.dtype, q.device),
            CAUSAL=causal,
            HAS_MASK=mask.tensor is not None,
            BIAS=add.kind,
            DIRECT=splits == 1,
            STAGES=cfg.num_stages,
            num_warps=cfg.num_warps,
        )
        if part_acc is not None:
            merge_splits(part_acc, part_ml, out, lse)
    return (out, lse) if return_lse else out
