# SPDX-License-Identifier: Apache-2.0
"""Merge partial attentions over disjoint keys, and count block heat from the merged sums.

The rule: with maxima m_s, sums l_s and unnormalised outputs a_s of the splits, M = max m_s,
w_s = exp(m_s - M), out = sum w_s a_s / sum w_s l_s. A split that saw no key has m = -inf, l = 0
and is left out, so all-empty gives 0 and lse = -inf instead of NaN. A sink, a logit without a
value, enters here and nowhere else, so it counts once however many splits there are.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from triton_ops import _checks
from triton_ops._scores import LOG2E, add_sink

# A block whose share is 1/blocks counts: fp32 sums of exponentials have logs that are right to 1e-4
# as long as they are below some hundreds.
_HEAT_SLACK = tl.constexpr(1.0 - 1e-4)
# fp32 partials that a merging program holds at once: 64 registers a thread.
_ELEMS_PER_LOAD = 8192
# Tile sums that a heat-counting program loads at once.
_TILES_PER_LOAD = 1024


@triton.jit
def _merge_row(
    part_acc, part_m, part_l, out, lse, sinks, i_r, S, N, HQ: tl.constexpr, DV: tl.constexpr,
    DV_P: tl.constexpr, SP: tl.constexpr, SC: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    o_s = tl.arange(0, SP)
    o_d = tl.arange(0, DV_P)
    m_s = o_s < S
    if SINKS:
        b_sink = tl.load(sinks + (i_r // N) % HQ).to(tl.float32)
    b_m = tl.load(part_m + i_r * S + o_s, mask=m_s, other=-float("inf"))
    b_l = tl.load(part_l + i_r * S + o_s, mask=m_s, other=0.0)
    b_top = tl.max(b_m, 0)
    b_ref = tl.where(b_top == -float("inf"), 0.0, b_top)
    b_sum = tl.sum(b_l * tl.exp2((b_m - b_ref) * LOG2E), 0)
    b_o = tl.zeros([DV_P], tl.float32)
    o_c = tl.arange(0, SC)
    for i in range(0, S, SC):
        m_c = i + o_c < S
        b_cm = tl.load(part_m + i_r * S + i + o_c, mask=m_c, other=-float("inf"))
        b_cl = tl.load(part_l + i_r * S + i + o_c, mask=m_c, other=0.0)
        # [SC, DV]
        m_a = m_c[:, None] & (o_d < DV)[None, :]
        p_a = part_acc + (i_r * S + i + o_c)[:, None] * DV + o_d[None, :]
        b_a = tl.load(p_a, mask=m_a, other=0.0)
        # an empty split has not written its part; a mask on the load would wait for the sums
        b_a = tl.where((b_cl > 0)[:, None], b_a, 0.0)
        b_o += tl.sum(b_a * tl.exp2((b_cm - b_ref) * LOG2E)[:, None], 0)
    if SINKS:
        b_top, b_sum, b_scale = add_sink(b_top, b_sum, b_sink)
        b_o = b_o * b_scale
    b_o = b_o / tl.where(b_sum > 0, b_sum, 1.0)
    tl.store(out + i_r * DV + o_d, b_o.to(out.dtype.element_ty), mask=o_d < DV)
    tl.store(lse + i_r, b_top + tl.log(tl.where(b_sum > 0, b_sum, 1.0)))


@triton.jit
def _count_heat(
    part_m, part_l, tile_lse, rows, row_len, row_heat, i_c, new_tokens, window, S,
    max_tiles, HKV: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, SP: tl.constexpr,
    BLOCK: tl.constexpr, BN: tl.constexpr, CHUNKS, CB: tl.constexpr, TP: tl.constexpr,
    WINDOW: tl.constexpr,
):  # fmt: skip
    i_bh = i_c // CHUNKS
    i_row = tl.load(rows + i_bh // HKV).to(tl.int64)
    length = 0
    heat = i_row * 0
    if i_row >= 0:
        length = tl.load(row_len + i_row) + new_tokens
        heat = tl.load(row_heat + i_row)
    # tiles before `begin` were not visited, and their blocks are not among those that share
    begin = 0
    if WINDOW:
        begin = tl.maximum(length - window, 0)
        if WINDOW == 2:
            begin = tl.maximum(length - 1, 0) // window * window
    old = begin // BLOCK
    blocks = tl.cdiv(length, BLOCK)
    first = (i_c % CHUNKS) * CB
    if (heat != 0) & (first < blocks) & (first + CB > old):
        o_g = tl.arange(0, GP)
        o_s = tl.arange(0, SP)
        # [GP, SP] maxima and sums of the splits of each query head
        m_gs = (o_g < G)[:, None] & (o_s < S)[None, :]
        o_gs = (i_bh * G + o_g)[:, None] * S + o_s[None, :]
        b_m = tl.load(part_m + o_gs, mask=m_gs, other=-float("inf"))
        b_l = tl.load(part_l + o_gs, mask=m_gs, other=0.0)
        # [CB * TP, GP] logs of the sums of the tiles, all loaded at once
        o_ct = tl.arange(0, CB * TP)
        o_tile = (first + o_ct // TP) * (BLOCK // BN) + o_ct % TP
        m_t = (o_ct % TP < BLOCK // BN) & (o_tile * BN < length) & (o_tile < max_tiles)
        m_t = m_t & (o_tile >= begin // BN)
        m_tg = m_t[:, None] & (o_g < G)[None, :]
        o_tg = (i_bh * max_tiles + o_tile)[:, None] * G + o_g[None, :]
        b_t = tl.load(tile_lse + o_tg, mask=m_tg, other=-float("inf"))
        b_top = tl.max(b_m, 1)
        b_ref = tl.where(b_top == -float("inf"), 0.0, b_top)
        # no product goes into a sum: fused with it, it would differ between threads' copies
        b_sum = tl.sum(tl.exp2((b_m + tl.log(b_l) - b_ref[:, None]) * LOG2E), 1)
        b_lse = tl.where(b_sum > 0, b_ref + tl.log(tl.where(b_sum > 0, b_sum, 1.0)), float("inf"))
        b_mass = tl.exp2((b_t - b_lse[None, :]) * LOG2E)
        b_share = tl.sum(tl.reshape(tl.sum(b_mass, 1), [CB, TP]), 1) / G
        o_block = first + tl.arange(0, CB)
        m_hot = (b_share * (blocks - old) >= _HEAT_SLACK) & (o_block >= old) & (o_block < blocks)
        m_hot = m_hot & (o_block * (BLOCK // BN) < max_tiles)
        p_heat = heat.to(tl.pointer_type(tl.int32)) + o_block
        tl.atomic_add(p_heat, tl.full([CB], 1, tl.int32), mask=m_hot, sem="relaxed")


@triton.jit(do_not_specialize=["new_tokens", "window", "max_tiles", "R", "N", "CHUNKS"])
def _merge_kernel(
    part_acc,
    part_m,
    part_l,
    out,
    lse,
    tile_lse,
    rows,
    row_len,
    row_heat,
    sinks,
    R,
    S,
    N,
    new_tokens,
    window,
    max_tiles,
    CHUNKS,
    HQ: tl.constexpr,
    DV: tl.constexpr,
    DV_P: tl.constexpr,
    SP: tl.constexpr,
    SC: tl.constexpr,
    HEAT: tl.constexpr,
    HKV: tl.constexpr,
    G: tl.constexpr,
    GP: tl.constexpr,
    BLOCK: tl.constexpr,
    BN: tl.constexpr,
    CB: tl.constexpr,
    TP: tl.constexpr,
    SINKS: tl.constexpr,
    WINDOW: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_wait()
    i_p = tl.program_id(0).to(tl.int64)
    if HEAT:
        if i_p < R:
            _merge_row(
                part_acc, part_m, part_l, out, lse, sinks, i_p, S, N, HQ, DV, DV_P, SP, SC, SINKS
            )  # fmt: skip
        else:
            _count_heat(
                part_m, part_l, tile_lse, rows, row_len, row_heat, i_p - R, new_tokens, window,
                S, max_tiles, HKV, G, GP, SP, BLOCK, BN, CHUNKS, CB, TP, WINDOW,
            )  # fmt: skip
    else:
        _merge_row(
            part_acc, part_m, part_l, out, lse, sinks, i_p, S, N, HQ, DV, DV_P, SP, SC, SINKS
        )  # fmt: skip


def merge_splits(
    part_acc: torch.Tensor,
    part_ml: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    *,
    sinks: torch.Tensor | None = None,
    heat: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
    new_tokens: int = 0,
    span: _checks.Span = _checks.ALL_KEYS,
    kv_heads: int = 1,
    block_size: int = 32,
    block_n: int = 32,
    pdl: bool = False,
) -> None:
    """Combine the partials of a split kernel, and count heat in the same launch.

    Args:
        part_acc: fp32 `[B, Hq, n, S, Dv]`, sums of weights times V; not read where the sum is 0.
        part_ml: fp32 `[2, B, Hq, n, S]`, maxima and sums in natural units.
        out: `[B, Hq, n, Dv]` contiguous, written.
        lse: fp32 `[B, Hq, n]` contiguous, written; with the sink.
        sinks: `[Hq]` contiguous, one more logit a query head.
        heat: `(tile_lse, rows, row_len, row_heat)` with tile_lse fp32 `[B, Hkv, tiles, G]`, the
            natural logs of the sums of exponentials. Shares are of the keys' own sum, without
            the sink.
        new_tokens: added to `row_len`, as in the kernel that wrote the partials.
        span: which tokens of a row were visited; for heat.
        kv_heads: KV heads, for heat.
        block_size: tokens in a block, for heat.
        block_n: tokens in a tile of `tile_lse`.
        pdl: the kernel before signals with `gdc_launch_dependents` (programmatic dependent
            launch), so this one may start early and wait.
    """
    splits, dv = part_acc.shape[-2:]
    total = lse.numel()
    group, tiles, chunks, batch, chunk = 1, 0, 0, 0, 1
    tiles_p = _checks.next_power_of_2(block_size // block_n)
    tile_lse = rows = row_len = row_heat = None
    if heat is not None:
        tile_lse, rows, row_len, row_heat = heat
        batch, _, tiles, group = tile_lse.shape
        group_p = _checks.next_power_of_2(group)
        chunk = max(1, _TILES_PER_LOAD // (tiles_p * group_p))
        chunks = triton.cdiv(tiles * block_n, block_size * chunk)
    _merge_kernel[(total + batch * kv_heads * chunks,)](
        part_acc,
        part_ml[0],
        part_ml[1],
        out,
        lse,
        tile_lse,
        rows,
        row_len,
        row_heat,
        sinks,
        total,
        splits,
        lse.shape[2],
        new_tokens,
        span.size,
        tiles,
        chunks,
        HQ=lse.shape[1],
        DV=dv,
        DV_P=_checks.next_power_of_2(dv),
        SP=_checks.next_power_of_2(splits),
        SC=min(_checks.next_power_of_2(splits), _ELEMS_PER_LOAD // _checks.next_power_of_2(dv)),
        HEAT=heat is not None,
        HKV=kv_heads,
        G=group,
        GP=_checks.next_power_of_2(group),
        BLOCK=block_size,
        BN=block_n,
        CB=chunk,
        TP=tiles_p,
        SINKS=sinks is not None,
        WINDOW=span.kind,
        PDL=pdl,
        num_warps=4,
        **({"launch_pdl": True} if pdl else {}),
    )


@triton.jit
def _merge_lse_kernel(outs, lses, out, lse, R, S, D: tl.constexpr, DP: tl.constexpr,
                      SP: tl.constexpr):  # fmt: skip
    i_r = tl.program_id(0).to(tl.int64)
    o_s = tl.arange(0, SP).to(tl.int64)
    o_d = tl.arange(0, DP)
    b_lse = tl.load(lses + o_s * R + i_r, mask=o_s < S, other=-float("inf"))
    b_top = tl.max(b_lse, 0)
    b_w = tl.exp2((b_lse - tl.where(b_top == -float("inf"), 0.0, b_top)) * LOG2E)
    b_sum = tl.sum(b_w, 0)
    # [SP, D] a part whose lse is -inf may hold anything
    m_o = (b_w > 0)[:, None] & (o_d < D)[None, :]
    b_o = tl.load(outs + (o_s * R + i_r)[:, None] * D + o_d[None, :], mask=m_o, other=0.0)
    b_o = tl.sum(b_o.to(tl.float32) * b_w[:, None], 0) / tl.where(b_sum > 0, b_sum, 1.0)
    tl.store(out + i_r * D + o_d, b_o.to(out.dtype.element_ty), mask=o_d < D)
    tl.store(lse + i_r, b_top + tl.log(tl.where(b_sum > 0, b_sum, 1.0)))


def merge(outs: torch.Tensor, lses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge attentions of the same queries over disjoint sets of keys.

    Args:
        outs: `[S, ..., D]` fp32, fp16 or bf16, each normalised over its own keys.
        lses: fp32 `[S, ...]`, natural log of each one's sum; -inf: this part is left out.

    Returns:
        out `[..., D]` in the dtype of `outs` and lse fp32 `[...]`; 0 and -inf where all are empty.

    Raises:
        ValueError: shapes that do not fit, or no part.
        TypeError: a dtype other than those named.
    """
    _checks.check_dtype("outs", outs.dtype)
    if lses.dtype != torch.float32:
        raise TypeError(f"lses must be float32, got {lses.dtype}")
    if outs.shape[:-1] != lses.shape or outs.dim() < 2 or outs.shape[0] == 0:
        raise ValueError(
            f"outs [S, ..., D] and lses [S, ...] do not fit: {list(outs.shape)}, {list(lses.shape)}"
        )
    outs, lses = outs.contiguous(), lses.contiguous()
    out = outs.new_empty(outs.shape[1:])
    lse = lses.new_empty(lses.shape[1:])
    total = math.prod(lse.shape)
    if total == 0 or outs.shape[-1] == 0:
        return out, lse
    with _checks.device_guard(outs.device):
        _merge_lse_kernel[(total,)](
            outs,
            lses,
            out,
            lse,
            total,
            outs.shape[0],
            D=outs.shape[-1],
            DP=_checks.next_power_of_2(outs.shape[-1]),
            SP=_checks.next_power_of_2(outs.shape[0]),
        )
    return out, lse
