# SPDX-License-Identifier: Apache-2.0
"""Attention over cached latents on a GPU: the projections around the kernels.

What is stored is attended absorbed: the latents are keys and values of one head, at whatever number
of queries, since keys and values of all heads would be larger than any memory that was meant for a
cache. The new tokens of a long chunk are attended expanded, which takes fewer products there; both
parts are one softmax, put together by their sums (FlashAttention, Dao et al., 2022).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

import triton_ops

EXPANDED_QUERIES = 2048
"""New tokens from which on their keys and values are made. On an H200 absorbed attention alone is
1.3 to 1.9 times as fast as making all keys and values at 128 queries, and 0.5 to 0.7 times at 512
(benchmarks/results/latent-gpu-2026-11-30.json); the cost of two parts is made up for at 2,048."""
_MAX_HEAD_DIM = 256


class Tables(Protocol):
    """Block tables as the kernels take them."""

    base: Tensor
    length: Tensor
    heat: Any
    max_blocks: Any


def attend_latent(
    q: Tensor,
    key_weight: Tensor,
    value_weight: Tensor,
    k_new: Tensor,
    v_new: Tensor,
    rows: Tensor,
    tables: Tables,
    block_size: int,
    scale: float,
    causal: bool,
    kv_mask: Tensor | None,
    bias: Tensor | None,
    softcap: float = 0.0,
    window: int = 0,
    tile: Sequence[int] | None = None,
) -> Tensor:
    """Attention of n queries over all stored tokens and the m new ones.

    Args:
        q: as of :func:`kvpass.cpu_latent.attend_latent`, and so are all but the next three.
        key_weight: ``[Hq, Dn, L]``.
        value_weight: ``[Hq, Dv, L]``.
        k_new: ``[B, 1, m, L]``.
        v_new: ``[B, 1, m, R]``.
        rows: int32 ``[B]``, the table rows of the sequences.
        tables: of the device.
        block_size: tokens of a block.
        scale: factor of the scores.
        causal: query i sees positions up to ``stored + i``.
        kv_mask: bool ``[B, >= stored + m]``, or None.
        bias: ``[B|1, Hq|1, n, >= stored + m]``, or None.
        softcap: 0 = none.
        window: 0 = all.
        tile: rows and keys of a tile; None: the measured ones.

    Returns:
        ``[B, Hq, n, Dv]`` in the dtype of q.
    """
    queries, nope, rotary = q.shape[2], key_weight.shape[1], v_new.shape[3]
    query = torch.cat((q[..., :nope] @ key_weight, q[..., nope:]), -1)
    plain = causal and kv_mask is None and bias is None and not softcap and not window
    fits = max(nope + rotary, value_weight.shape[1]) <= _MAX_HEAD_DIM
    # The device is asked last: a decode step never gets there.
    if queries >= EXPANDED_QUERIES and plain and fits and _has_flash(q):
        return _in_two_parts(
            q,
            query,
            key_weight,
            value_weight,
            k_new,
            v_new,
            rows,
            tables,
            block_size,
            scale,
            tile,
        )
    one = queries == 1
    sums: Any = triton_ops.attend_latent(
        query,
        k_new,
        v_new,
        rows,
        tables.base,
        tables.length,
        block_size=block_size,
        scale=scale,
        causal=causal,
        kv_mask=kv_mask,
        bias=bias,
        softcap=softcap,
        window=window,
        tile=tile,
        row_heat=tables.heat if one else None,
        max_blocks=tables.max_blocks if one else None,
    )
    out: Tensor = sums @ value_weight.transpose(1, 2)
    return out


def _in_two_parts(
    q: Tensor,
    query: Tensor,
    key_weight: Tensor,
    value_weight: Tensor,
    k_new: Tensor,
    v_new: Tensor,
    rows: Tensor,
    tables: Tables,
    block_size: int,
    scale: float,
    tile: Sequence[int] | None,
) -> Tensor:
    """Causal attention of a chunk: stored tokens absorbed, new ones expanded."""
    keys = k_new @ key_weight.transpose(1, 2)
    keys = torch.cat((keys, v_new.expand(-1, keys.shape[1], -1, -1)), -1)
    values = k_new @ value_weight.transpose(1, 2)
    new = _flash(q, keys, values, scale)
    old: Any = triton_ops.attend_latent(
        query, None, None, rows, tables.base, tables.length, block_size=block_size, scale=scale,
        causal=False, latent_dim=k_new.shape[3], rope_dim=v_new.shape[3], kv_dtype=k_new.dtype,
        return_lse=True, tile=tile,
    )  # fmt: skip
    # The new part always has keys, so that its sum is finite.
    share = torch.sigmoid(new[1] - old[1]).unsqueeze(-1)
    stored = (old[0] @ value_weight.transpose(1, 2)).float()
    return torch.lerp(stored, new[0].float(), share).to(q.dtype)


def _has_flash(q: Tensor) -> bool:
    """Whether FlashAttention takes the queries."""
    if not q.is_cuda:
        return True
    half = q.dtype in (torch.float16, torch.bfloat16)
    return half and torch.cuda.get_device_capability(q.device) >= (8, 0)


def _flash(q: Tensor, keys: Tensor, values: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Causal attention ``[B, H, n, Dv]``, and the logarithm of its sum ``[B, H, n]``."""
    ops: Any = torch.ops.aten
    width = max(keys.shape[3], values.shape[3])
    # One width for all, a multiple of 8.
    width = -(-width // 8) * 8
    padded = [F.pad(x, (0, width - x.shape[3])) for x in (q, keys, values)]
    if q.is_cuda:
        out, lse, *_ = ops._scaled_dot_product_flash_attention(*padded, 0.0, True, scale=scale)
    else:
        out, lse = ops._scaled_dot_product_flash_attention_for_cpu(*padded, 0.0, True, scale=scale)
    return out[..., : values.shape[3]], lse
