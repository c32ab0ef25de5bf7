# SPDX-License-Identifier: Apache-2.0
"""Attention over cached latents: multi-head latent attention (DeepSeek-V2) in its absorbed form.

A token has one latent c and one rotary key r for all query heads; a page holds the latents where
other layers have K, the rotary keys where they have V. A query head's part for the latents has gone
through the up-projection of the keys already, so its scores are q_c c + q_r r and its values are
the latents themselves: a tile is read once and enters both products.

A program owns BM rows, where a row is one query token of one query head, and every S-th tile of the
positions `row_len + m`; `merge` combines the S splits. Tiles are of three kinds, in this order:
whole ones of the cache, one that may hold cached and new tokens, and new ones.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from triton_ops import _checks
from triton_ops._scores import tile_weights
from triton_ops._tiles import (
    PAGE,
    TL_DTYPE,
    compute_dtype,
    load_tile,
    page_offsets,
    store_rows,
)
from triton_ops.config import (
    LatentConfig,
    Tile,
    fit_tile,
    latent_config,
    latent_splits,
    window_tiles,
)
from triton_ops.merge import merge_splits

__all__ = ["LatentConfig", "attend_latent"]


@triton.jit
def _load_cached(
    p_page, m_n, L: tl.constexpr, L_P: tl.constexpr, R: tl.constexpr, R_P: tl.constexpr,
    BN: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Latents `[BN, L_P]` and rotary keys `[BN, R_P]` of a tile that begins at a page."""
    PAGE_ELEMS: tl.constexpr = PAGE * (L + R)
    o_n = tl.arange(0, BN)
    o_c = page_offsets(o_n, L, PAGE_ELEMS)
    b_c = load_tile(p_page, o_c, tl.arange(0, L_P), m_n, L, L_P, MASKED)
    o_k = page_offsets(o_n, R, PAGE_ELEMS)
    b_r = load_tile(p_page + PAGE * L, o_k, tl.arange(0, R_P), m_n, R, R_P, MASKED)
    return b_c, b_r


@triton.jit
def _load_new(
    p_c, p_r, o_j, m_n, sc_n, sr_n, L: tl.constexpr, L_P: tl.constexpr, R: tl.constexpr,
    R_P: tl.constexpr,
):  # fmt: skip
    """Latents and rotary keys of the new tokens `o_j`; `p_c` and `p_r` point at the channels."""
    o_j = o_j.to(tl.int64)[:, None]
    m_c = m_n[:, None] & (tl.arange(0, L_P) < L)[None, :]
    m_r = m_n[:, None] & (tl.arange(0, R_P) < R)[None, :]
    b_c = tl.load(p_c + o_j * sc_n, mask=m_c, other=0.0)
    b_r = tl.load(p_r + o_j * sr_n, mask=m_r, other=0.0)
    return b_c, b_r


@triton.jit
def _latent_tile(
    t, b_qc, b_qr, b_c, b_r, b_m, b_l, b_acc, scale, softcap, o_pos, total, o_i, o_h, m_r, past,
    window, p_mask, sm_t, mask_len, p_bias, sb_t, bias_len, p_tile_lse, max_tiles,
    G: tl.constexpr, DOT: tl.constexpr, CAUSAL: tl.constexpr, HAS_MASK: tl.constexpr,
    BIAS: tl.constexpr, HEAT: tl.constexpr, SOFTCAP: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    b_c = b_c.to(DOT)
    # [BM, BN]
    b_s = tl.dot(b_qc, tl.trans(b_c), input_precision="ieee")
    b_s = tl.dot(b_qr, tl.trans(b_r.to(DOT)), b_s, input_precision="ieee") * scale
    m_n = o_pos < total
    m_see = m_n[None, :]
    if CAUSAL:
        m_see = m_see & (o_pos[None, :] <= (past + o_i)[:, None])
    if WINDOW:
        m_see = m_see & (o_pos[None, :] > (past - window + o_i)[:, None])
    b_m, b_p, b_scale = tile_weights(
        b_s, b_m, softcap, m_see, m_n, o_pos, m_r, p_mask, sm_t, mask_len, p_bias, sb_t, bias_len,
        HAS_MASK, BIAS, SOFTCAP,
    )  # fmt: skip
    b_sum = tl.sum(b_p, 1)
    b_l = b_l * b_scale + b_sum
    b_acc = tl.dot(b_p.to(DOT), b_c, b_acc * b_scale[:, None], input_precision="ieee")
    if HEAT:
        m_t = m_r & (t < max_tiles)
        # the merge reads it soon: streamed keys and values should not push it out of the L2
        p_tile = p_tile_lse + t * G + o_h
        tl.store(p_tile, b_m + tl.log(b_sum), mask=m_t, eviction_policy="evict_last")
    return b_m, b_l, b_acc


@triton.jit(
    do_not_specialize=[
        "n", "m", "window", "sm_b", "mask_len", "sb_b", "sb_h", "sb_q", "bias_len", "max_tiles"
    ]
)  # fmt: skip
def _latent_kernel(
    q,
    c_new,
    r_new,
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
    scale,
    softcap,
    n,
    m,
    window,
    sq_b,
    sq_h,
    sq_n,
    sq_d,
    sc_b,
    sc_n,
    sc_d,
    sr_b,
    sr_n,
    sr_d,
    sm_b,
    sm_t,
    mask_len,
    sb_b,
    sb_h,
    sb_q,
    sb_t,
    bias_len,
    max_tiles,
    G: tl.constexpr,
    L: tl.constexpr,
    L_P: tl.constexpr,
    R: tl.constexpr,
    R_P: tl.constexpr,
    BLOCK: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    KV: tl.constexpr,
    DOT: tl.constexpr,
    CAUSAL: tl.constexpr,
    HAS_MASK: tl.constexpr,
    BIAS: tl.constexpr,
    HEAT: tl.constexpr,
    SOFTCAP: tl.constexpr,
    WINDOW: tl.constexpr,
    DIRECT: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        # the merge may take its place on the SMs now; it waits for the last of these programs
        tl.extra.cuda.gdc_launch_dependents()
    PAGE_ELEMS: tl.constexpr = PAGE * (L + R)
    TILES: tl.constexpr = BLOCK // BN
    scale = tl.cast(scale, tl.float32)
    softcap = tl.cast(softcap, tl.float32)
    i_b = tl.program_id(1).to(tl.int64)
    i_s = tl.program_id(2)
    S = tl.num_programs(2)
    # row r of the tile is query token o_i of query head o_h
    o_r = tl.program_id(0) * BM + tl.arange(0, BM)
    o_i = o_r // G
    o_h = (o_r % G).to(tl.int64)
    m_r = o_i < n
    o_n = tl.arange(0, BN)
    o_d = tl.arange(0, L_P)
    o_e = tl.arange(0, R_P)
    i_row = tl.load(rows + i_b).to(tl.int64)
    i_safe = tl.maximum(i_row, 0)
    past = tl.load(row_len + i_safe, mask=i_row >= 0, other=0)
    p_words = tl.load(row_base + i_safe, mask=i_row >= 0, other=0).to(tl.pointer_type(tl.int64))
    # [BM, L] and [BM, R]
    p_q = q + i_b * sq_b + (o_i.to(tl.int64) * sq_n + o_h * sq_h)[:, None]
    m_q = m_r[:, None] & (o_d < L)[None, :]
    b_qc = tl.load(p_q + o_d.to(tl.int64)[None, :] * sq_d, mask=m_q, other=0.0).to(DOT)
    m_q = m_r[:, None] & (o_e < R)[None, :]
    b_qr = tl.load(p_q + (L + o_e).to(tl.int64)[None, :] * sq_d, mask=m_q, other=0.0).to(DOT)
    p_c = c_new + i_b * sc_b + o_d.to(tl.int64)[None, :] * sc_d
    p_r = r_new + i_b * sr_b + o_e.to(tl.int64)[None, :] * sr_d
    p_mask = kv_mask
    if HAS_MASK:
        p_mask = kv_mask + i_b * sm_b
    p_bias = bias
    if BIAS != 0:
        p_bias = bias + i_b * sb_b + (o_h * sb_h + o_i.to(tl.int64) * sb_q)[:, None]
    p_tile_lse = tile_lse
    if HEAT:
        p_tile_lse = tile_lse + i_b * max_tiles * G

    # positions up to `total`; tiles before `whole` are cached, those from `cached` on are new
    total = past + m
    if CAUSAL:
        total = tl.minimum(total, past + (tl.program_id(0) * BM + BM - 1) // G + 1)
    total = tl.where(i_row >= 0, total, 0)
    tiles = tl.cdiv(total, BN)
    whole = past // BN
    cached = tl.cdiv(past, BN)
    start = i_s
    if WINDOW:
        start += tl.maximum(past + (tl.program_id(0) * BM) // G - window + 1, 0) // BN
    b_m = tl.full([BM], -float("inf"), tl.float32)
    b_l = tl.zeros([BM], tl.float32)
    b_acc = tl.zeros([BM, L_P], tl.float32)
    # the word of a tile is loaded one tile ahead: inside the pipeline it would halve its depth
    last = tl.maximum(cached - 1, 0)
    b_word = tl.load(p_words + start // TILES, mask=start < cached, other=0)
    for t in tl.range(start, whole, S, num_stages=STAGES):
        p_block = tl.multiple_of((b_word & -16).to(tl.pointer_type(KV)), 16)
        b_word = tl.load(p_words + tl.minimum(t + S, last) // TILES)
        o_pos = t * BN + o_n
        p_page = p_block + (t % TILES) * (BN // PAGE) * PAGE_ELEMS
        b_c, b_r = _load_cached(p_page, o_pos < past, L, L_P, R, R_P, BN, False)
        b_m, b_l, b_acc = _latent_tile(
            t, b_qc, b_qr, b_c, b_r, b_m, b_l, b_acc, scale, softcap, o_pos, total, o_i, o_h, m_r,
            past, window, p_mask, sm_t, mask_len, p_bias, sb_t, bias_len, p_tile_lse,
            max_tiles, G, DOT, CAUSAL, HAS_MASK, BIAS, HEAT, SOFTCAP, WINDOW,
        )  # fmt: skip
    # the tile with the last cached tokens, if it is not full, in the program whose turn it is
    if (whole < cached) & (start <= whole) & ((whole - start) % S == 0):
        p_block = tl.multiple_of((b_word & -16).to(tl.pointer_type(KV)), 16)
        o_pos = whole * BN + o_n
        m_old = o_pos < past
        p_page = p_block + (whole % TILES) * (BN // PAGE) * PAGE_ELEMS
        b_c, b_r = _load_cached(p_page, m_old, L, L_P, R, R_P, BN, True)
        m_new = (o_pos >= past) & (o_pos < total)
        b_cn, b_rn = _load_new(p_c, p_r, o_pos - past, m_new, sc_n, sr_n, L, L_P, R, R_P)
        b_c = tl.where(m_old[:, None], b_c, b_cn)
        b_r = tl.where(m_old[:, None], b_r, b_rn)
        b_m, b_l, b_acc = _latent_tile(
            whole, b_qc, b_qr, b_c, b_r, b_m, b_l, b_acc, scale, softcap, o_pos, total, o_i, o_h,
            m_r, past, window, p_mask, sm_t, mask_len, p_bias, sb_t, bias_len, p_tile_lse,
            max_tiles, G, DOT, CAUSAL, HAS_MASK, BIAS, HEAT, SOFTCAP, WINDOW,
        )  # fmt: skip
    start += tl.cdiv(tl.maximum(cached - start, 0), S) * S
    for t in tl.range(start, tiles, S, num_stages=STAGES):
        o_pos = t * BN + o_n
        b_c, b_r = _load_new(p_c, p_r, o_pos - past, o_pos < total, sc_n, sr_n, L, L_P, R, R_P)
        b_m, b_l, b_acc = _latent_tile(
            t, b_qc, b_qr, b_c, b_r, b_m, b_l, b_acc, scale, softcap, o_pos, total, o_i, o_h, m_r,
            past, window, p_mask, sm_t, mask_len, p_bias, sb_t, bias_len, p_tile_lse,
            max_tiles, G, DOT, CAUSAL, HAS_MASK, BIAS, HEAT, SOFTCAP, WINDOW,
        )  # fmt: skip
    i_r = (i_b * G + o_h) * n + o_i
    store_rows(
        b_m, b_l, b_acc, out, lse, part_acc, part_m, part_l, i_r, i_s, S, o_d, m_r, L, DIRECT
    )  # fmt: skip


def attend_latent(
    q: torch.Tensor,
    c_new: torch.Tensor | None,
    r_new: torch.Tensor | None,
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
    row_heat: torch.Tensor | None = None,
    max_blocks: int | None = None,
    latent_dim: int | None = None,
    rope_dim: int | None = None,
    kv_dtype: torch.dtype | None = None,
    return_lse: bool = False,
    config: LatentConfig | None = None,
    tile: Tile | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of n query tokens to the latents of `row_len[row]` cached tokens and m new ones.

    The scores are `scale * (q_c c + q_r r)` and the values the latents c. New tokens come from
    `c_new` and `r_new`, whether or not they were appended already. Nothing is read back from the
    device. The result depends on shapes, lengths and values only, never on where the blocks lie
    (bit for bit, on one device with one config).

    Args:
        q: `[B, Hq, n, L + R]` fp32, fp16 or bf16, the part for the latents first, any strides.
        c_new: `[B, 1, m, L]`, latents in the dtype of the blocks, any strides; None: m = 0.
        r_new: `[B, 1, m, R]`, rotary keys, dtype of `c_new`, any strides; None with `c_new`.
        rows: int32 `[B]`; -1 gives zeros and lse -inf.
        row_base: int64 `[rows]`, address of each row's table of block words.
        row_len: int32 `[rows]`, cached tokens before the new ones.
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
        row_heat: int64 `[rows]`, address of int32 counters a block, 0 = do not count. Needs n = 1.
            Adds 1 to the blocks whose share of the softmax (mean over the query heads) is at least
            1 / blocks that overlap the window (all of the row's, without one).
        max_blocks: block words in a table, needed with `row_heat`. Blocks past it are not counted.
        latent_dim: L, read only where `c_new` is None.
        rope_dim: R, read only where `c_new` is None.
        kv_dtype: dtype of the blocks, by default that of `q`; read only where `c_new` is None.
        return_lse: also return the natural log of the sum of exponentials.
        config: tile sizes for measurements.
        tile: rows and keys of a tile instead of the measured ones, as far as the kernel runs them.
        out: `[B, Hq, n, L]` contiguous, in the dtype of `q`; default a new tensor.

    Returns:
        out `[B, Hq, n, L]`, or `(out, lse)` with lse fp32 `[B, Hq, n]`. A query without a visible
        key gives 0 and -inf.

    Raises:
        ValueError: shapes, devices, L (16..512), R (16..128), softcap or window that do not fit.
        TypeError: a dtype that is not supported.
    """
    _checks.check_rank4("q", q)
    _checks.check_dtype("q", q.dtype)
    batch, heads, n, _ = q.shape
    if heads == 0:
        raise ValueError(f"q must have query heads, got {list(q.shape)}")
    new = _checks.new_latents_operand(c_new, r_new, q, latent_dim, rope_dim, kv_dtype)
    m, dim, rope = new.tokens, new.latent_dim, new.rope_dim
    _checks.check_block_size(block_size)
    _checks.check_rows(batch, q.device, rows, row_base, row_len)
    if causal and m != n:
        raise ValueError(f"causal needs as many new tokens as queries, got {m} and {n}")
    cap = _checks.softcap_operand(softcap, scale)
    span = _checks.span_operand(window, 0, causal)
    window = span.size
    out = _checks.check_out(out, (batch, heads, n, dim), q.dtype, q.device)
    lse = torch.empty((batch, heads, n), dtype=torch.float32, device=q.device)
    mask = _checks.kv_mask_operand(kv_mask, batch, q.device)
    add = _checks.bias_operand(bias, batch, heads, n, q.device)
    if row_heat is not None:
        _checks.check_table("row_heat", row_heat, torch.int64, q.device)
        if n > 1:
            raise ValueError(f"row_heat needs 1 query token a row, got {n}")
        if max_blocks is None or max_blocks <= 0:
            raise ValueError(f"row_heat needs max_blocks, a table's block words, got {max_blocks}")
    if batch == 0 or n == 0:
        return (out, lse) if return_lse else out

    operands = kv_mask is not None or bias is not None
    cfg = config or latent_config(q.dtype, new.dtype, dim, rope, n * heads, operands, tile)
    block_n = fit_tile(cfg.block_n, block_size)
    row_tiles = triton.cdiv(n * heads, cfg.block_m)
    splits = cfg.splits or latent_splits(row_tiles * batch, cfg.programs_per_sm, q.device)
    if window and not cfg.splits:
        splits = min(splits, window_tiles(window + triton.cdiv(cfg.block_m, heads), block_n))
    direct = splits == 1 and row_heat is None
    part_acc = part_m = part_l = tile_lse = None
    if not direct:
        part_acc = _checks.workspace(q.device, batch, heads, n, splits, dim)
        part_ml = _checks.workspace(q.device, 2, batch, heads, n, splits)
        part_m, part_l = part_ml[0], part_ml[1]
    pdl = not direct and _checks.dependent_launch(q.device)
    max_tiles = 0
    if row_heat is not None and max_blocks is not None:
        max_tiles = max_blocks * (block_size // block_n)
        tile_lse = _checks.workspace(q.device, batch, 1, max_tiles, heads)
    with _checks.device_guard(q.device):
        _latent_kernel[(row_tiles, batch, splits)](
            q,
            new.c,
            new.r,
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
            cap.scale,
            cap.softcap,
            n,
            m,
            window,
            *q.stride(),
            new.c.stride(0),
            *new.c.stride()[2:],
            new.r.stride(0),
            *new.r.stride()[2:],
            *mask.strides,
            mask.length,
            *add.strides,
            add.length,
            max_tiles,
            G=heads,
            L=dim,
            L_P=_checks.next_power_of_2(dim),
            R=rope,
            R_P=_checks.next_power_of_2(rope),
            BLOCK=block_size,
            BM=cfg.block_m,
            BN=block_n,
            KV=TL_DTYPE[new.dtype],
            DOT=compute_dtype(q.dtype, new.dtype, q.device),
            CAUSAL=causal,
            HAS_MASK=mask.tensor is not None,
            BIAS=add.kind,
            HEAT=row_heat is not None,
            SOFTCAP=cap.softcap > 0,
            WINDOW=window > 0,
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
                heat=heat,
                new_tokens=m,
                span=span,
                block_size=block_size,
                block_n=block_n,
                pdl=pdl,
            )
    return (out, lse) if return_lse else out
