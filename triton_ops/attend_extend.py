# SPDX-License-Identifier: Apache-2.0
"""Attention of a chunk: cached keys through the table, the chunk's own keys from dense tensors.

A program owns BM rows of one KV head, where a row is one query token of one query head, so a
cached tile is read once for the whole group. Its key tiles (cached ones first, then new ones) may
be shared by several programs, whose partials `merge` combines. With a window, or chunks, they
begin at the first tile that one of the program's queries sees. Cross attention has other numbers of
new keys than of queries, or none.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from triton_ops import _checks
from triton_ops._scores import add_sink, tile_weights
from triton_ops._tiles import (
    PAGE,
    TL_DTYPE,
    compute_dtype,
    load_tile,
    page_offsets,
    store_rows,
)
from triton_ops.config import (
    ExtendConfig,
    Tile,
    extend_config,
    extend_splits,
    fit_tile,
    window_tiles,
)
from triton_ops.merge import merge_splits

__all__ = ["ExtendConfig", "attend_extend"]


@triton.jit
def _extend_tile(
    b_q, b_k, b_v, b_m, b_l, b_acc, scale, softcap, m_see, m_n, o_pos, m_r, p_mask, sm_t, mask_len,
    p_bias, sb_t, bias_len, DOT: tl.constexpr, HAS_MASK: tl.constexpr, BIAS: tl.constexpr,
    SOFTCAP: tl.constexpr,
):  # fmt: skip
    # [BM, BN]
    b_s = tl.dot(b_q, tl.trans(b_k), input_precision="ieee") * scale
    b_m, b_p, b_scale = tile_weights(
        b_s, b_m, softcap, m_see, m_n, o_pos, m_r, p_mask, sm_t, mask_len, p_bias, sb_t, bias_len,
        HAS_MASK, BIAS, SOFTCAP,
    )  # fmt: skip
    b_l = b_l * b_scale + tl.sum(b_p, 1)
    b_acc = tl.dot(b_p.to(DOT), b_v, b_acc * b_scale[:, None], input_precision="ieee")
    return b_m, b_l, b_acc


@triton.jit(
    do_not_specialize=[
        "n", "m", "window", "sm_b", "mask_len", "sb_b", "sb_h", "sb_q", "bias_len"
    ]
)  # fmt: skip
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
    sinks,
    scale,
    softcap,
    n,
    m,
    window,
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
    SOFTCAP: tl.constexpr,
    WINDOW: tl.constexpr,
    SINKS: tl.constexpr,
    DIRECT: tl.constexpr,
    STAGES: tl.constexpr,
):
    PAGE_ELEMS: tl.constexpr = PAGE * (DK + DV)
    TILES: tl.constexpr = BLOCK // BN
    scale = tl.cast(scale, tl.float32)
    softcap = tl.cast(softcap, tl.float32)
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

    # key tiles: `first` to `cached` through the table, then `start` to `fresh` of the new keys
    limit = m
    if CAUSAL:
        limit = tl.minimum(m, (tl.program_id(0) * BM + BM - 1) // G + 1)
    fresh = tl.where(i_row >= 0, tl.cdiv(limit, BN), 0)
    cached = tl.cdiv(past, BN)
    first = 0
    start = 0
    if WINDOW:
        # first position that each row sees, and the program's first row
        p_0 = past + (tl.program_id(0) * BM) // G
        b_first = past + o_i - window + 1
        begin = tl.maximum(p_0 - window + 1, 0)
        if WINDOW == 2:
            b_first = (past + o_i) // window * window
            begin = p_0 // window * window
        first = tl.where(begin < past, begin // BN, cached)
        start = tl.minimum(tl.maximum(begin - past, 0) // BN, fresh)
    tiles = cached - first + fresh - start
    lo = first + (tiles * i_s) // S
    hi = first + (tiles * (i_s + 1)) // S
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
        m_see = m_n[None, :]
        if WINDOW:
            m_see = m_see & (o_pos[None, :] >= b_first[:, None])
        b_m, b_l, b_acc = _extend_tile(
            b_q, b_k, b_v, b_m, b_l, b_acc, scale, softcap, m_see, m_n, o_pos, m_r, p_mask, sm_t,
            mask_len, p_bias, sb_t, bias_len, DOT, HAS_MASK, BIAS, SOFTCAP,
        )  # fmt: skip
    p_k = k_new + i_b * sk_b + i_h * sk_h + o_d.to(tl.int64)[None, :] * sk_d
    p_v = v_new + i_b * sv_b + i_h * sv_h + o_dv.to(tl.int64)[None, :] * sv_d
    for t in tl.range(tl.maximum(lo - cached, 0) + start, hi - cached + start, num_stages=STAGES):
        o_j = t * BN + o_n
        m_n = o_j < m
        o_j64 = o_j.to(tl.int64)[:, None]
        b_k = tl.load(p_k + o_j64 * sk_n, mask=m_n[:, None] & (o_d < DK)[None, :], other=0.0)
        b_v = tl.load(p_v + o_j64 * sv_n, mask=m_n[:, None] & (o_dv < DV)[None, :], other=0.0)
        m_see = m_n[None, :]
        if CAUSAL:
            m_see = m_see & (o_j[None, :] <= o_i[:, None])
        if WINDOW:
            m_see = m_see & ((past + o_j)[None, :] >= b_first[:, None])
        b_m, b_l, b_acc = _extend_tile(
            b_q, b_k.to(DOT), b_v.to(DOT), b_m, b_l, b_acc, scale, softcap, m_see, m_n, past + o_j,
            m_r, p_mask, sm_t, mask_len, p_bias, sb_t, bias_len, DOT, HAS_MASK, BIAS, SOFTCAP,
        )  # fmt: skip

    i_r = (i_b * HKV * G + o_h) * n + o_i
    if DIRECT and SINKS:
        b_sink = tl.load(sinks + o_h, mask=m_r, other=0.0).to(tl.float32)
        b_m, b_l, b_scale = add_sink(b_m, b_l, b_sink)
        b_acc = b_acc * b_scale[:, None]
    store_rows(
        b_m, b_l, b_acc, out, lse, part_acc, part_m, part_l, i_r, i_s, S, o_dv, m_r, DV, DIRECT
    )  # fmt: skip


def attend_extend(
    q: torch.Tensor,
    k_new: torch.Tensor | None,
    v_new: torch.Tensor | None,
    rows: torch.Tensor,
    row_base: torch.Tensor,
    row_len: torch.Tensor,
    *,
    block_size: int,
    scale: float,
    causal: bool,
    kv_mask: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    softcap: float = 0.0,
    window: int = 0,
    chunk: int = 0,
    sinks: torch.Tensor | None = None,
    kv_heads: int | None = None,
    head_dim_v: int | None = None,
    kv_dtype: torch.dtype | None = None,
    return_lse: bool = False,
    config: ExtendConfig | None = None,
    tile: Tile | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of n query tokens to the `row_len[row]` cached ones and to m new ones.

    The new keys come from `k_new` and `v_new`, whether or not they were appended already, so
    nothing just written is read back over the link. A chunk has m = n; cross attention may have
    any m, or no new keys at all.

    Args:
        q: `[B, Hq, n, Dk]` fp32, fp16 or bf16, any strides.
        k_new: `[B, Hkv, m, Dk]`, the dtype of the blocks, any strides; None: m = 0.
        v_new: `[B, Hkv, m, Dv]`, dtype of `k_new`, any strides; None with `k_new`.
        rows: int32 `[B]`; -1 gives zeros and lse -inf (the sink where there is one).
        row_base: int64 `[R]`, address of each row's table of block words.
        row_len: int32 `[R]`, cached tokens before the new ones.
        block_size: tokens in a block, a multiple of 32.
        scale: factor of the scores.
        causal: query i sees positions up to `row_len + i`, which needs m = n; else all
            `row_len + m`.
        kv_mask: bool or uint8 `[B, T]`, True = may be seen; T covers every `row_len + m`, and
            positions past it are hidden.
        bias: additive float or bool (True = visible) `[B|1, Hq|1, n|1, T]`, any strides.
        softcap: scores become `softcap * tanh(scores / softcap)` before bias and masks; 0 = none.
        window: query i sees only the last `window` positions up to `row_len + i`, its own among
            them; 0 = all. Needs `causal`. Tiles that no query of a program sees are not read.
        chunk: query i sees only positions of its own chunk, those with the same position // chunk;
            0 = all. Needs `causal`; not with a window.
        sinks: fp32, fp16 or bf16 `[Hq]`, one more logit of each head's softmax, without a value.
        kv_heads: Hkv, read only where `k_new` is None.
        head_dim_v: Dv, read only where `k_new` is None.
        kv_dtype: dtype of the blocks, by default that of `q`; read only where `k_new` is None.
        return_lse: also return the natural log of the sum of exponentials, sink included.
        config: tile sizes for measurements.
        tile: rows and keys of a tile instead of the measured ones, as far as the kernel runs them.
        out: `[B, Hq, n, Dv]` contiguous, in the dtype of `q`; default a new tensor.

    Returns:
        out `[B, Hq, n, Dv]`, or `(out, lse)` with lse fp32 `[B, Hq, n]`. A query without a
        visible key gives 0 and the sink, or -inf without one.

    Raises:
        ValueError: shapes, devices, head dims, head counts, softcap or window that do not fit.
        TypeError: a dtype that is not supported.
    """
    _checks.check_rank4("q", q)
    _checks.check_dtype("q", q.dtype)
    batch, heads, n, dk = q.shape
    new = _checks.new_keys_operand(k_new, v_new, q, kv_heads, head_dim_v, kv_dtype)
    m, dv = new.tokens, new.head_dim_v
    group = _checks.group_size(heads, new.kv_heads)
    _checks.check_head_dim("head_dim_k", dk)
    _checks.check_head_dim("head_dim_v", dv)
    _checks.check_block_size(block_size)
    _checks.check_rows(batch, q.device, rows, row_base, row_len)
    if causal and m != n:
        raise ValueError(f"causal needs as many new keys as queries, got {m} and {n}")
    cap = _checks.softcap_operand(softcap, scale)
    span = _checks.span_operand(window, chunk, causal)
    sinks = _checks.sinks_operand(sinks, heads, q.device)
    out = _checks.check_out(out, (batch, heads, n, dv), q.dtype, q.device)
    lse = torch.empty((batch, heads, n), dtype=torch.float32, device=q.device)
    mask = _checks.kv_mask_operand(kv_mask, batch, q.device)
    add = _checks.bias_operand(bias, batch, heads, n, q.device)
    if batch == 0 or n == 0:
        return (out, lse) if return_lse else out

    operands = kv_mask is not None or bias is not None
    cfg = config or extend_config(q.dtype, new.dtype, dk, dv, n * group, operands, tile)
    block_n = fit_tile(cfg.block_n, block_size)
    row_tiles = triton.cdiv(n * group, cfg.block_m)
    splits = cfg.splits or extend_splits(row_tiles * batch * new.kv_heads, q.device)
    if span.size and not cfg.splits:
        # the cached tiles and the new ones each begin a count of their own
        reach = span.size + triton.cdiv(cfg.block_m, group)
        splits = min(splits, window_tiles(reach, block_n) + 1)
    part_acc = part_m = part_l = None
    if splits > 1:
        part_acc = _checks.workspace(q.device, batch, heads, n, splits, dv)
        part_ml = _checks.workspace(q.device, 2, batch, heads, n, splits)
        part_m, part_l = part_ml[0], part_ml[1]
    with _checks.device_guard(q.device):
        _extend_kernel[(row_tiles, batch * new.kv_heads, splits)](
            q,
            new.k,
            new.v,
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
            sinks,
            cap.scale,
            cap.softcap,
            n,
            m,
            span.size,
            *q.stride(),
            *new.k.stride(),
            *new.v.stride(),
            *mask.strides,
            mask.length,
            *add.strides,
            add.length,
            HKV=new.kv_heads,
            G=group,
            DK=dk,
            DK_P=_checks.next_power_of_2(dk),
            DV=dv,
            DV_P=_checks.next_power_of_2(dv),
            BLOCK=block_size,
            BM=cfg.block_m,
            BN=block_n,
            KV=TL_DTYPE[new.dtype],
            DOT=compute_dtype(q.dtype, new.dtype, q.device),
            CAUSAL=causal,
            HAS_MASK=mask.tensor is not None,
            BIAS=add.kind,
            SOFTCAP=cap.softcap > 0,
            WINDOW=span.kind,
            SINKS=sinks is not None,
            DIRECT=splits == 1,
            STAGES=cfg.num_stages,
            num_warps=cfg.num_warps,
        )
        if part_acc is not None:
            merge_splits(part_acc, part_ml, out, lse, sinks=sinks)
    return (out, lse) if return_lse else out
