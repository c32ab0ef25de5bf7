# SPDX-License-Identifier: Apache-2.0
"""Decode attention: one query token a row over the blocks of its table, split over the keys.

A program owns one (row, KV head) and every S-th key tile (so that those running together read the
same blocks), keeps an online softmax (Milakov and Gimelshein 2018) and writes its maximum, sum and
accumulator; `merge` combines the S splits (flash decoding). The query heads of a KV head are the
rows of one `tl.dot`. With a window, or chunks, the tiles begin at the one that holds the first
token that is seen.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from triton_ops import _checks
from triton_ops._scores import add_bias, add_sink, cap_scores, softmax_weights, visible_keys
from triton_ops._tiles import PAGE, TL_DTYPE, compute_dtype, load_tile, page_offsets
from triton_ops.config import DecodeConfig, Tile, decode_config, splits_for, window_tiles
from triton_ops.merge import merge_splits

__all__ = ["DecodeConfig", "attend_decode", "splits_for"]


@triton.jit
def _decode_tile(
    t, p_block, b_q, b_m, b_l, b_acc, scale, softcap, begin, length, i_h, p_mask, sm_t, mask_len,
    p_bias, sb_t, bias_len, p_tile_lse, max_tiles,
    G: tl.constexpr, GP: tl.constexpr, DK: tl.constexpr, DK_P: tl.constexpr, DV: tl.constexpr,
    DV_P: tl.constexpr, BLOCK: tl.constexpr, BN: tl.constexpr, KV: tl.constexpr,
    DOT: tl.constexpr, USE_DOT: tl.constexpr, HAS_MASK: tl.constexpr, BIAS: tl.constexpr,
    HEAT: tl.constexpr, SOFTCAP: tl.constexpr, WINDOW: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    PAGE_ELEMS: tl.constexpr = PAGE * (DK + DV)
    TILES: tl.constexpr = BLOCK // BN
    o_n = tl.arange(0, BN)
    o_g = tl.arange(0, GP)
    o_pos = t * BN + o_n
    m_n = o_pos < length
    if WINDOW:
        m_n = m_n & (o_pos >= begin)
    o_page = i_h * (BLOCK // PAGE) + (t % TILES) * (BN // PAGE)
    p_page = p_block + o_page * PAGE_ELEMS
    # [BN, DK]
    o_k = page_offsets(o_n, DK, PAGE_ELEMS)
    b_k = load_tile(p_page, o_k, tl.arange(0, DK_P), m_n, DK, DK_P, MASKED).to(DOT)
    # [BN, DV]
    o_v = page_offsets(o_n, DV, PAGE_ELEMS)
    b_v = load_tile(p_page + PAGE * DK, o_v, tl.arange(0, DV_P), m_n, DV, DV_P, MASKED).to(DOT)
    # [GP, BN]
    if USE_DOT:
        b_s = tl.dot(b_q, tl.trans(b_k), input_precision="ieee") * scale
    else:
        b_s = tl.sum(b_k.to(tl.float32) * b_q.to(tl.float32), 1)[None, :] * scale
    if SOFTCAP:
        b_s = cap_scores(b_s, softcap)
    if BIAS != 0:
        m_b = (o_g < G)[:, None] & (m_n & (o_pos < bias_len))[None, :]
        b_s = add_bias(b_s, p_bias + o_pos.to(tl.int64)[None, :] * sb_t, m_b, BIAS)
    if HAS_MASK:
        m_n = visible_keys(p_mask, o_pos, m_n, sm_t, mask_len)
    if MASKED or HAS_MASK:
        b_s = tl.where(m_n[None, :], b_s, -float("inf"))
    b_m, b_p, b_scale = softmax_weights(b_s, b_m, MASKED or HAS_MASK or BIAS != 0)
    b_sum = tl.sum(b_p, 1)
    b_l = b_l * b_scale + b_sum
    if USE_DOT:
        b_acc = tl.dot(b_p.to(DOT), b_v, b_acc * b_scale[:, None], input_precision="ieee")
    else:
        b_w = tl.sum(b_p, 0)
        b_acc = b_acc * b_scale[:, None] + tl.sum(b_w[:, None] * b_v.to(tl.float32), 0)[None, :]
    if HEAT:
        m_t = (o_g < G) & (t < max_tiles)
        # the merge reads it soon: streamed keys and values should not push it out of the L2
        p_tile = p_tile_lse + t * G + o_g
        tl.store(p_tile, b_m + tl.log(b_sum), mask=m_t, eviction_policy="evict_last")
    return b_m, b_l, b_acc


@triton.jit(
    do_not_specialize=[
        "new_tokens", "window", "sm_b", "mask_len", "sb_b", "sb_h", "bias_len", "max_tiles", "width"
    ]
)  # fmt: skip
def _decode_kernel(
    q,
    rows,
    row_base,
    row_len,
    out,
    lse,
    part_acc,
    part_m,
    part_l,
    tile_lse,
    kv_mask,
    bias,
    sinks,
    scale,
    softcap,
    new_tokens,
    window,
    sq_b,
    sq_h,
    sq_d,
    sm_b,
    sm_t,
    mask_len,
    sb_b,
    sb_h,
    sb_t,
    bias_len,
    max_tiles,
    words,
    width,
    HKV: tl.constexpr,
    G: tl.constexpr,
    GP: tl.constexpr,
    DK: tl.constexpr,
    DK_P: tl.constexpr,
    DV: tl.constexpr,
    DV_P: tl.constexpr,
    BLOCK: tl.constexpr,
    BN: tl.constexpr,
    KV: tl.constexpr,
    DOT: tl.constexpr,
    USE_DOT: tl.constexpr,
    HAS_MASK: tl.constexpr,
    BIAS: tl.constexpr,
    HEAT: tl.constexpr,
    SOFTCAP: tl.constexpr,
    WINDOW: tl.constexpr,
    SINKS: tl.constexpr,
    DIRECT: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        # the merge may take its place on the SMs now; it waits for the last of these programs
        tl.extra.cuda.gdc_launch_dependents()
    scale = tl.cast(scale, tl.float32)
    softcap = tl.cast(softcap, tl.float32)
    TILES: tl.constexpr = BLOCK // BN
    i_bh = tl.program_id(0).to(tl.int64)
    i_s = tl.program_id(1)
    S = tl.num_programs(1)
    i_b = i_bh // HKV
    i_h = i_bh % HKV
    o_g = tl.arange(0, GP)
    o_d = tl.arange(0, DK_P)
    o_dv = tl.arange(0, DV_P)
    m_g = o_g < G
    i_row = tl.load(rows + i_b).to(tl.int64)
    # a row of -1 reads no table: its length is 0
    i_safe = tl.maximum(i_row, 0)
    length = tl.where(i_row >= 0, tl.load(row_len + i_safe, mask=i_row >= 0, other=0), -new_tokens)
    length = length + new_tokens
    table = tl.load(row_base + i_safe, mask=i_row >= 0, other=0)
    if words is not None:
        # a row that has outgrown them, as in a graph captured before, is read through its own
        fits = length <= width * BLOCK
        table = tl.where(fits, (words + i_b * width).to(tl.int64), table)
    p_words = table.to(tl.pointer_type(tl.int64))
    # [GP, DK]
    o_q = (i_h * G + o_g)[:, None] * sq_h + o_d.to(tl.int64)[None, :] * sq_d
    m_q = m_g[:, None] & (o_d < DK)[None, :]
    b_q = tl.load(q + i_b * sq_b + o_q, mask=m_q, other=0.0).to(DOT)
    p_mask = kv_mask
    if HAS_MASK:
        p_mask = kv_mask + i_b * sm_b
    p_bias = bias
    if BIAS != 0:
        p_bias = bias + i_b * sb_b + (i_h * G + o_g)[:, None] * sb_h
    p_tile_lse = tile_lse
    if HEAT:
        p_tile_lse = tile_lse + i_bh * max_tiles * G

    tiles = tl.cdiv(length, BN)
    whole = length // BN
    begin = 0
    start = i_s
    if WINDOW:
        begin = tl.maximum(length - window, 0)
        if WINDOW == 2:
            begin = tl.maximum(length - 1, 0) // window * window
        start = begin // BN + i_s
    last = tl.maximum(tiles - 1, 0)
    b_m = tl.full([GP], -float("inf"), tl.float32)
    b_l = tl.zeros([GP], tl.float32)
    b_acc = tl.zeros([GP, DV_P], tl.float32)
    # the word of a tile is loaded one tile ahead: inside the pipeline it would halve its depth
    b_word = tl.load(p_words + start // TILES, mask=start < tiles, other=0)
    for t in tl.range(start, whole, S, num_stages=STAGES):
        p_block = tl.multiple_of((b_word & -16).to(tl.pointer_type(KV)), 16)
        b_word = tl.load(p_words + tl.minimum(t + S, last) // TILES)
        b_m, b_l, b_acc = _decode_tile(
            t, p_block, b_q, b_m, b_l, b_acc, scale, softcap, begin, length, i_h, p_mask, sm_t,
            mask_len, p_bias, sb_t, bias_len, p_tile_lse, max_tiles, G, GP, DK, DK_P, DV,
            DV_P, BLOCK, BN, KV, DOT, USE_DOT, HAS_MASK, BIAS, HEAT, SOFTCAP, WINDOW, WINDOW != 0,
        )  # fmt: skip
    # the last tile of the row, if it is not full, in the program whose turn it is
    if (whole < tiles) & ((whole - start) % S == 0):
        p_block = tl.multiple_of((b_word & -16).to(tl.pointer_type(KV)), 16)
        b_m, b_l, b_acc = _decode_tile(
            whole, p_block, b_q, b_m, b_l, b_acc, scale, softcap, begin, length, i_h, p_mask, sm_t,
            mask_len, p_bias, sb_t, bias_len, p_tile_lse, max_tiles, G, GP, DK, DK_P, DV,
            DV_P, BLOCK, BN, KV, DOT, USE_DOT, HAS_MASK, BIAS, HEAT, SOFTCAP, WINDOW, True,
        )  # fmt: skip

    i_r = i_bh * G + o_g
    m_o = m_g[:, None] & (o_dv < DV)[None, :]
    if DIRECT:
        if SINKS:
            b_sink = tl.load(sinks + i_h * G + o_g, mask=m_g, other=0.0).to(tl.float32)
            b_m, b_l, b_scale = add_sink(b_m, b_l, b_sink)
            b_acc = b_acc * b_scale[:, None]
        b_l = tl.where(b_l > 0, b_l, 1.0)
        b_o = b_acc / b_l[:, None]
        tl.store(out + i_r[:, None] * DV + o_dv[None, :], b_o.to(out.dtype.element_ty), mask=m_o)
        tl.store(lse + i_r, b_m + tl.log(b_l), mask=m_g)
    else:
        o_p = i_r * S + i_s
        tl.store(part_m + o_p, b_m, mask=m_g)
        tl.store(part_l + o_p, b_l, mask=m_g)
        m_a = m_o & (b_l > 0)[:, None]
        tl.store(part_acc + o_p[:, None] * DV + o_dv[None, :], b_acc, mask=m_a)


def attend_decode(
    q: torch.Tensor,
    rows: torch.Tensor,
    row_base: torch.Tensor,
    row_len: torch.Tensor,
    *,
    kv_heads: int,
    head_dim_v: int,
    block_size: int,
    scale: float,
    kv_dtype: torch.dtype | None = None,
    kv_mask: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    softcap: float = 0.0,
    window: int = 0,
    chunk: int = 0,
    sinks: torch.Tensor | None = None,
    row_heat: torch.Tensor | None = None,
    max_blocks: int | None = None,
    words: torch.Tensor | None = None,
    splits: int | None = None,
    return_lse: bool = False,
    new_tokens: int = 1,
    config: DecodeConfig | None = None,
    tile: Tile | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of one query token a row over its blocks.

    Nothing is read back from the device. The result depends on shapes, lengths and values only,
    never on where the blocks lie (bit for bit, on one device with one config).

    Args:
        q: `[B, Hq, 1, Dk]` fp32, fp16 or bf16, any strides.
        rows: int32 `[B]`; -1 gives zeros and lse -inf (the sink where there is one).
        row_base: int64 `[R]`, address of each row's table of block words.
        row_len: int32 `[R]`; the length attended is `row_len[row] + new_tokens`.
        kv_heads: Hkv, a divisor of Hq.
        head_dim_v: Dv, 16..256.
        block_size: tokens in a block, a multiple of 32.
        scale: factor of the scores.
        kv_dtype: dtype of the blocks, by default that of `q`; if it differs the products are fp32.
        kv_mask: bool or uint8 `[B, T]`, True = may be seen; T covers every length, and positions
            past it are hidden.
        bias: additive float or bool (True = visible) `[B|1, Hq|1, 1, T]`, any strides.
        softcap: scores become `softcap * tanh(scores / softcap)` before bias and masks; 0 = none.
        window: the query is the row's last token and sees only the last `window` tokens, itself
            among them; 0 = all. Earlier tiles are not read.
        chunk: it sees only tokens of its own chunk, those with the same position // chunk; 0 = all.
            Not with a window.
        sinks: fp32, fp16 or bf16 `[Hq]`, one more logit of each head's softmax, without a value.
        row_heat: int64 `[R]`, address of int32 counters a block, 0 = do not count. Each KV head
            adds 1 to the blocks whose share of the softmax (mean over its query heads) is at
            least 1 / blocks that overlap the window or chunk (all of the row's, without one). The
            shares are of the keys' own sum, without the sink.
        max_blocks: block words in a table, needed with `row_heat`: lengths are known on the
            device only, and per-tile sums need a workspace. Blocks past it are not counted.
        words: int64 `[B, W]`, tables to read instead of those of `row_base`, for rows of at most
            W blocks.
        splits: programs a (row, KV head), default `splits_for`, and not more than a window has
            tiles.
        return_lse: also return the natural log of the sum of exponentials, sink included.
        new_tokens: tokens added to `row_len`.
        config: tile sizes for measurements, default from the measured table.
        tile: rows and keys of a tile instead of the measured ones; only the keys count here.
        out: `[B, Hq, 1, Dv]` contiguous, in the dtype of `q`; default a new tensor.

    Returns:
        out `[B, Hq, 1, Dv]`, or `(out, lse)` with lse fp32 `[B, Hq, 1]`. A query without a
        visible key gives 0 and the sink, or -inf without one.

    Raises:
        ValueError: shapes, devices, head dims, head counts, splits, softcap or window that do not
            fit.
        TypeError: a dtype that is not supported.
    """
    _checks.check_rank4("q", q)
    _checks.check_dtype("q", q.dtype)
    kv_dtype = q.dtype if kv_dtype is None else kv_dtype
    _checks.check_dtype("kv_dtype", kv_dtype)
    batch, heads, n, dk = q.shape
    if n != 1:
        raise ValueError(f"attend_decode takes 1 query token a row, got {n}: use attend_extend")
    group = _checks.group_size(heads, kv_heads)
    _checks.check_head_dim("head_dim_k", dk)
    _checks.check_head_dim("head_dim_v", head_dim_v)
    _checks.check_block_size(block_size)
    _checks.check_rows(batch, q.device, rows, row_base, row_len)
    out = _checks.check_out(out, (batch, heads, 1, head_dim_v), q.dtype, q.device)
    lse = torch.empty((batch, heads, 1), dtype=torch.float32, device=q.device)
    mask = _checks.kv_mask_operand(kv_mask, batch, q.device)
    add = _checks.bias_operand(bias, batch, heads, 1, q.device)
    cap = _checks.softcap_operand(softcap, scale)
    span = _checks.span_operand(window, chunk)
    sinks = _checks.sinks_operand(sinks, heads, q.device)
    if row_heat is not None:
        _checks.check_table("row_heat", row_heat, torch.int64, q.device)
        if max_blocks is None or max_blocks <= 0:
            raise ValueError(f"row_heat needs max_blocks, a table's block words, got {max_blocks}")
    if words is not None:
        _checks.check_words(words, batch, q.device)
    if batch == 0:
        return (out, lse) if return_lse else out

    pairs = batch * kv_heads
    cfg = config or decode_config(q.dtype, kv_dtype, dk, head_dim_v, group, tile, pairs, block_size)
    block_n = cfg.tile(block_size)
    splits = splits or cfg.splits
    if not splits:
        splits = splits_for(batch, kv_heads, q.device, cfg.programs_per_sm)
        if span.size:
            splits = min(splits, window_tiles(span.size, block_n))
    if splits < 0:
        raise ValueError(f"splits must be positive, got {splits}")
    use_dot = cfg.use_dot or group > 1
    direct = splits == 1 and row_heat is None
    part_acc = part_m = part_l = tile_lse = None
    if not direct:
        part_acc = _checks.workspace(q.device, batch, heads, splits, head_dim_v)
        part_ml = _checks.workspace(q.device, 2, batch, heads, splits)
        part_m, part_l = part_ml[0], part_ml[1]
    pdl = not direct and _checks.dependent_launch(q.device)
    max_tiles = 0
    if row_heat is not None and max_blocks is not None:
        max_tiles = max_blocks * (block_size // block_n)
        tile_lse = _checks.workspace(q.device, batch, kv_heads, max_tiles, group)
    with _checks.device_guard(q.device):
        _decode_kernel[(batch * kv_heads, splits)](
            q,
            rows,
            row_base,
            row_len,
            out,
            lse,
            part_acc,
            part_m,
            part_l,
            tile_lse,
            mask.tensor,
            add.tensor,
            sinks,
            cap.scale,
            cap.softcap,
            new_tokens,
            span.size,
            q.stride(0),
            q.stride(1),
            q.stride(3),
            *mask.strides,
            mask.length,
            add.strides[0],
            add.strides[1],
            add.strides[3],
            add.length,
            max_tiles,
            words,
            0 if words is None else words.shape[1],
            HKV=kv_heads,
            G=group,
            GP=max(16, _checks.next_power_of_2(group)) if use_dot else 1,
            DK=dk,
            DK_P=_checks.next_power_of_2(dk),
            DV=head_dim_v,
            DV_P=_checks.next_power_of_2(head_dim_v),
            BLOCK=block_size,
            BN=block_n,
            KV=TL_DTYPE[kv_dtype],
            DOT=compute_dtype(q.dtype, kv_dtype, q.device),
            USE_DOT=use_dot,
            HAS_MASK=mask.tensor is not None,
            BIAS=add.kind,
            HEAT=row_heat is not None,
            SOFTCAP=cap.softcap > 0,
            WINDOW=span.kind,
            SINKS=sinks is not None,
            DIRECT=direct,
            STAGES=cfg.num_stages,
            PDL=pdl,
            num_warps=cfg.num_warps,
        )
        if part_acc is not None:
            heat = None
            if tile_lse is not None and row_heat is not None:
                heat = (tile_lse, rows, row_len, row_heat)
            merge_splits(
                part_acc,
                part_ml,
                out,
                lse,
                sinks=sinks,
                heat=heat,
                new_tokens=new_tokens,
                span=span,
                kv_heads=kv_heads,
                block_size=block_size,
                block_n=block_n,
                pdl=pdl,
            )
    return (out, lse) if return_lse else out
