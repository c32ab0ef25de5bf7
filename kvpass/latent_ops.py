# SPDX-License-Identifier: Apache-2.0
"""The cached op of multi-head latent attention, beside ``append`` of :mod:`kvpass.ops`.

``attend_latent(q, key_weight, value_weight, k_new, v_new, token, rows, layer, block_size, scale,
causal, kv_mask, bias, softcap, window, tile) -> out``, ``[B, Hq, n, Dv]`` laid out as
``[B, n, Hq, Dv]`` in memory. Blocks hold latents as keys and rotary keys as values of one head;
meaning of the arguments: :func:`kvpass.cpu_latent.attend_latent`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvpass import cpu_latent, gpu_ops
from kvpass.errors import ShapeError
from kvpass.ops import empty_output, full_bias, refuse_backward, token_major
from kvpass.runtime import directory
from kvpass.runtime.table import tables_for
from triton_ops._checks import softcap_operand, window_operand

_LIBRARY = torch.library.Library("kvpass", "FRAGMENT")

_LIBRARY.define(
    "attend_latent(Tensor q, Tensor key_weight, Tensor value_weight, Tensor k_new, Tensor v_new,"
    " Tensor token, Tensor rows, int layer, int block_size, float scale, bool causal,"
    " Tensor? kv_mask, Tensor? bias, float softcap=0.0, int window=0, int[]? tile=None)"
    " -> Tensor"
)


def _attend_latent_cpu(
    q: Tensor,
    key_weight: Tensor,
    value_weight: Tensor,
    k_new: Tensor,
    v_new: Tensor,
    token: Tensor,
    rows: Tensor,
    layer: int,
    block_size: int,
    scale: float,
    causal: bool,
    kv_mask: Tensor | None,
    bias: Tensor | None,
    softcap: float = 0.0,
    window: int = 0,
    tile: Sequence[int] | None = None,
) -> Tensor:
    _check(q, key_weight, value_weight, k_new, v_new, scale, causal, softcap, window)
    if q.shape[0] == 0:
        return empty_output(q, value_weight.shape[1])
    batch = directory.batch_of(rows)
    # Under autocast the products below would round to 16 bits, whatever the dtype of the cache.
    with torch.autocast("cpu", enabled=False):
        out = cpu_latent.attend_latent(
            batch, layer, q, key_weight, value_weight, k_new, v_new, scale, causal, kv_mask,
            full_bias(bias, q.shape[2]), softcap, window, tile,
        )  # fmt: skip
    return out.transpose(1, 2)


def _attend_latent_cuda(
    q: Tensor,
    key_weight: Tensor,
    value_weight: Tensor,
    k_new: Tensor,
    v_new: Tensor,
    token: Tensor,
    rows: Tensor,
    layer: int,
    block_size: int,
    scale: float,
    causal: bool,
    kv_mask: Tensor | None,
    bias: Tensor | None,
    softcap: float = 0.0,
    window: int = 0,
    tile: Sequence[int] | None = None,
) -> Tensor:
    from kvpass import gpu_latent

    _check(q, key_weight, value_weight, k_new, v_new, scale, causal, softcap, window)
    tables = tables_for(q.device)
    batch = directory.batch_at(rows)
    with torch.autocast("cuda", enabled=False), gpu_ops.joined(batch, before=False):
        out = gpu_latent.attend_latent(
            q, key_weight, value_weight, k_new, v_new, rows[layer], tables, block_size, scale,
            causal, kv_mask, full_bias(bias, q.shape[2]), softcap, window, tile,
        )  # fmt: skip
    return token_major(out)


def _check(
    q: Tensor,
    key_weight: Tensor,
    value_weight: Tensor,
    k_new: Tensor,
    v_new: Tensor,
    scale: float,
    causal: bool,
    softcap: float,
    window: int,
) -> None:
    """Refuse arguments that do not fit together.

    Raises:
        ShapeError: they do not.
    """
    try:
        softcap_operand(softcap, scale)
        window_operand(window)
    except ValueError as error:
        raise ShapeError(f"attend_latent: {error}") from None
    heads, nope, latent = key_weight.shape
    wanted = (q.shape[0], heads, q.shape[2], nope + v_new.shape[3])
    if tuple(q.shape) != wanted or value_weight.shape[::2] != (heads, latent):
        raise ShapeError(
            f"attend_latent: queries {tuple(q.shape)}, weights {tuple(key_weight.shape)} and "
            f"{tuple(value_weight.shape)} and rotary keys {tuple(v_new.shape)} do not fit together"
        )
    news = (q.shape[0], 1, k_new.shape[2])
    if k_new.shape != (*news, latent) or v_new.shape[:3] != news:
        raise ShapeError(
            f"attend_latent: new latents {tuple(k_new.shape)} and rotary keys "
            f"{tuple(v_new.shape)} are not those of {q.shape[0]} sequences and one head of {latent}"
        )
    if causal and k_new.shape[2] != q.shape[2]:
        raise ShapeError(
            f"attend_latent: causal needs as many new tokens as queries, got {k_new.shape[2]} and "
            f"{q.shape[2]}"
        )
    if window and not causal:
        raise ShapeError(f"attend_latent: a window ({window}) needs causal=True")


def _attend_latent_fake(
    q: Tensor,
    key_weight: Tensor,
    value_weight: Tensor,
    k_new: Tensor,
    v_new: Tensor,
    token: Tensor,
    rows: Tensor,
    layer: int,
    block_size: int,
    scale: float,
    causal: bool,
    kv_mask: Tensor | None,
    bias: Tensor | None,
    softcap: float = 0.0,
    window: int = 0,
    tile: Sequence[int] | None = None,
) -> Tensor:
    return empty_output(q, value_weight.shape[1])


_LIBRARY.impl("attend_latent", _attend_latent_cpu, "CPU")
_LIBRARY.impl("attend_latent", _attend_latent_cuda, "CUDA")
torch.library.register_fake("kvpass::attend_latent", _attend_latent_fake, lib=_LIBRARY)
torch.library.register_autograd("kvpass::attend_latent", refuse_backward, lib=_LIBRARY)
