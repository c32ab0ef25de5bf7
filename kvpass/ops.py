# SPDX-License-Identifier: Apache-2.0
"""The custom ops of kvpass, defined with ``torch.library.Library`` (a few microseconds a call).

Source ops appear in traced graphs and are right by themselves, if slow; the pass replaces them:

- ``cache_update(k, v, handle, layer, past, block_size, tile) -> (K, V)``: append, and return dense
  copies of all keys and values. Traced from ``TieredCache.update``.
- ``materialize(ticket, size, dtype, device) -> Tensor``: dense copy of what a KV handle stands for.

Cached ops stand in rewritten graphs, and read ``rows`` (int32 ``[MAX_LAYERS, B]``), the table
rows of a batch. Their effects are ordered by data: ``attend`` consumes the token that ``append``
returns.

- ``append(k, v, rows, layer, block_size) -> token``
- ``stage(token, rows, layer, block_size, block_bytes, window, chunk) -> buffer``: begin to copy the
  cold blocks of a layer that attends next, see :mod:`kvpass.runtime.staged`.
- ``attend(q, k_new, v_new, token, rows, layer, block_size, scale, causal, kv_mask, bias, softcap,
  window, sinks, kv_heads, head_dim_v, chunk, tile, staged, following) -> out``, ``[B, Hq, n, Dv]``
  laid out as ``[B, n, Hq, Dv]`` in memory: n queries over the stored tokens and m new ones. Without
  ``k_new``, ``v_new`` and ``token`` (cross attention after its first step) the stored ones are all,
  in the dtype of ``q``; only then are ``kv_heads`` and ``head_dim_v`` read. ``staged`` is its own
  layer's buffer, ``following`` one that is begun before. The rest: ``cpu_ops.attend``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kvpass import cpu_ops, gpu_ops
from kvpass.errors import ShapeError, UnsupportedError
from kvpass.runtime import directory
from kvpass.runtime.staged import buffer_bytes, start
from triton_ops._checks import (
    NewKeys,
    group_size,
    new_keys_operand,
    sinks_operand,
    softcap_operand,
    span_operand,
)

_LIBRARY = torch.library.Library("kvpass", "DEF")

_LIBRARY.define(
    "cache_update(Tensor k, Tensor v, Tensor handle, int layer, SymInt past, int block_size,"
    " int[]? tile=None) -> (Tensor, Tensor)"
)
_LIBRARY.define(
    "materialize(Tensor ticket, SymInt[] size, ScalarType dtype, Device device) -> Tensor"
)
_LIBRARY.define("append(Tensor k, Tensor v, Tensor rows, int layer, int block_size) -> Tensor")
_LIBRARY.define(
    "attend(Tensor q, Tensor? k_new, Tensor? v_new, Tensor? token, Tensor rows, int layer,"
    " int block_size, float scale, bool causal, Tensor? kv_mask, Tensor? bias,"
    " float softcap=0.0, int window=0, Tensor? sinks=None, int kv_heads=0, int head_dim_v=0,"
    " int chunk=0, int[]? tile=None, Tensor? staged=None, Tensor? following=None) -> Tensor"
)
_LIBRARY.define(
    "stage(Tensor token, Tensor rows, int layer, int block_size, int block_bytes, int window,"
    " int chunk) -> Tensor"
)


# ------------------------------------------------------------------ cached ops


def _append_cpu(k: Tensor, v: Tensor, rows: Tensor, layer: int, block_size: int) -> Tensor:
    if k.shape[0] == 0:
        return k.new_empty(0)
    cpu_ops.append(directory.batch_of(rows), layer, k, v)
    return k.new_empty(0)


def _attend_cpu(
    q: Tensor,
    k_new: Tensor | None,
    v_new: Tensor | None,
    token: Tensor | None,
    rows: Tensor,
    layer: int,
    block_size: int,
    scale: float,
    causal: bool,
    kv_mask: Tensor | None,
    bias: Tensor | None,
    softcap: float = 0.0,
    window: int = 0,
    sinks: Tensor | None = None,
    kv_heads: int = 0,
    head_dim_v: int = 0,
    chunk: int = 0,
    tile: Sequence[int] | None = None,
    staged: Tensor | None = None,
    following: Tensor | None = None,
) -> Tensor:
    new = _check(
        q, k_new, v_new, token, scale, causal, softcap, window, chunk, sinks, kv_heads, head_dim_v
    )
    if q.shape[0] == 0:
        return empty_output(q, new.head_dim_v)
    batch = directory.batch_of(rows)
    known = batch.geometry(layer)
    if (known.kv_heads, known.head_dim_v) != (new.kv_heads, new.head_dim_v):
        raise ShapeError(
            f"attend over {new.kv_heads} KV heads of {new.head_dim_v} channels; layer {layer} "
            f"holds {known.kv_heads} of {known.head_dim_v}"
        )
    # Under autocast the products below would round to 16 bits, whatever the dtype of the cache.
    with torch.autocast("cpu", enabled=False):
        out = cpu_ops.attend(
            batch, layer, q, k_new, v_new, scale, causal, kv_mask, full_bias(bias, q.shape[2]),
            softcap, window, sinks, chunk, tile,
        )  # fmt: skip
    return out.transpose(1, 2)


def _append_cuda(k: Tensor, v: Tensor, rows: Tensor, layer: int, block_size: int) -> Tensor:
    gpu_ops.append(k, v, rows, layer, block_size)
    return k.new_empty(0)


def _attend_cuda(
    q: Tensor,
    k_new: Tensor | None,
    v_new: Tensor | None,
    token: Tensor | None,
    rows: Tensor,
    layer: int,
    block_size: int,
    scale: float,
    causal: bool,
    kv_mask: Tensor | None,
    bias: Tensor | None,
    softcap: float = 0.0,
    window: int = 0,
    sinks: Tensor | None = None,
    kv_heads: int = 0,
    head_dim_v: int = 0,
    chunk: int = 0,
    tile: Sequence[int] | None = None,
    staged: Tensor | None = None,
    following: Tensor | None = None,
) -> Tensor:
    new = _check(
        q, k_new, v_new, token, scale, causal, softcap, window, chunk, sinks, kv_heads, head_dim_v
    )
    options: dict[str, Any] = {
        "block_size": block_size,
        "scale": scale,
        "kv_mask": kv_mask,
        "bias": full_bias(bias, q.shape[2]),
        "softcap": softcap,
        "window": window,
        "chunk": chunk,
        "sinks": sinks,
        "kv_heads": new.kv_heads,
        "head_dim_v": new.head_dim_v,
        "kv_dtype": new.dtype,
        "tile": tile,
    }
    out = gpu_ops.attend(q, k_new, v_new, rows, layer, causal, new.tokens, options, staged)
    return token_major(out)


def _stage_fake(
    token: Tensor,
    rows: Tensor,
    layer: int,
    block_size: int,
    block_bytes: int,
    window: int,
    chunk: int,
) -> Tensor:
    return rows.new_empty(buffer_bytes(rows.shape[1]), dtype=torch.uint8)


def _stage_cuda(
    token: Tensor,
    rows: Tensor,
    layer: int,
    block_size: int,
    block_bytes: int,
    window: int,
    chunk: int,
) -> Tensor:
    buffer = _stage_fake(token, rows, layer, block_size, block_bytes, window, chunk)
    start(buffer, rows, layer, block_size, block_bytes, window, chunk)
    return buffer


def _check(
    q: Tensor,
    k_new: Tensor | None,
    v_new: Tensor | None,
    token: Tensor | None,
    scale: float,
    causal: bool,
    softcap: float,
    window: int,
    chunk: int,
    sinks: Tensor | None,
    kv_heads: int,
    head_dim_v: int,
) -> NewKeys:
    """What the new keys tell, once the arguments fit together.

    Raises:
        ShapeError: they do not.
    """
    try:
        new = new_keys_operand(k_new, v_new, q, kv_heads or None, head_dim_v or None, None)
        group_size(q.shape[1], new.kv_heads)
        softcap_operand(softcap, scale)
        span_operand(window, chunk, causal)
        sinks_operand(sinks, q.shape[1], q.device)
    except (TypeError, ValueError) as error:
        raise ShapeError(f"attend: {error}") from None
    if k_new is not None and token is None:
        raise ShapeError("attend: k_new without the token of its append, which orders the two")
    if causal and new.tokens != q.shape[2]:
        raise ShapeError(
            f"attend: causal needs as many new keys as queries, got {new.tokens} and {q.shape[2]}"
        )
    return new


def full_bias(bias: Tensor | None, queries: int) -> Tensor | None:
    """A mask or bias of any broadcastable shape as ``[B|1, Hq|1, queries, keys]``, by strides."""
    if bias is None:
        return None
    while bias.dim() < 4:
        bias = bias.unsqueeze(0)
    size, heads, rows, columns = bias.shape
    # The number of keys is on the device only; one column stands for as many as there may be.
    columns = _MANY if columns == 1 else columns
    return bias.expand(size, heads, queries if rows == 1 else rows, columns)


_MANY = 1 << 30


def token_major(out: Tensor) -> Tensor:
    """The same ``[B, Hq, n, Dv]`` laid out as ``[B, n, Hq, Dv]``, as the fake op promises."""
    return out.transpose(1, 2).contiguous().transpose(1, 2)


def _append_fake(k: Tensor, v: Tensor, rows: Tensor, layer: int, block_size: int) -> Tensor:
    return k.new_empty(0)


def _attend_fake(
    q: Tensor,
    k_new: Tensor | None,
    v_new: Tensor | None,
    token: Tensor | None,
    rows: Tensor,
    layer: int,
    block_size: int,
    scale: float,
    causal: bool,
    kv_mask: Tensor | None,
    bias: Tensor | None,
    softcap: float = 0.0,
    window: int = 0,
    sinks: Tensor | None = None,
    kv_heads: int = 0,
    head_dim_v: int = 0,
    chunk: int = 0,
    tile: Sequence[int] | None = None,
    staged: Tensor | None = None,
    following: Tensor | None = None,
) -> Tensor:
    return empty_output(q, head_dim_v if v_new is None else v_new.shape[3])


def empty_output(q: Tensor, head_dim_v: int) -> Tensor:
    """An uninitialised ``[B, Hq, n, Dv]`` laid out as ``[B, n, Hq, Dv]``."""
    size, heads, tokens, _ = q.shape
    return q.new_empty((size, tokens, heads, head_dim_v)).transpose(1, 2)


# ------------------------------------------------------------------ source ops


def _cache_update(
    k: Tensor,
    v: Tensor,
    handle: Tensor,
    layer: int,
    past: int,
    block_size: int,
    tile: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor]:
    return directory.tiered(handle).update_dense(k, v, layer, past)


def _cache_update_fake(
    k: Tensor,
    v: Tensor,
    handle: Tensor,
    layer: int,
    past: int,
    block_size: int,
    tile: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor]:
    size, heads, tokens, _ = k.shape
    total = past + tokens
    return (
        k.new_empty((size, heads, total, k.shape[3])),
        v.new_empty((size, heads, total, v.shape[3])),
    )


def _materialize(
    ticket: Tensor, size: list[int], dtype: torch.dtype, device: torch.device
) -> Tensor:
    return directory.handle_content(ticket, size, dtype, device)


def _materialize_fake(
    ticket: Tensor, size: list[int], dtype: torch.dtype, device: torch.device
) -> Tensor:
    return torch.empty(size, dtype=dtype, device=device)


_LIBRARY.impl("append", _append_cpu, "CPU")
_LIBRARY.impl("attend", _attend_cpu, "CPU")
_LIBRARY.impl("append", _append_cuda, "CUDA")
_LIBRARY.impl("attend", _attend_cuda, "CUDA")
_LIBRARY.impl("stage", _stage_fake, "CPU")
_LIBRARY.impl("stage", _stage_cuda, "CUDA")
# Below a frame that Dynamo gave up on, it would compile the runtime that these call.
_LIBRARY.impl("cache_update", torch._dynamo.disable(_cache_update), "CPU")
_LIBRARY.impl("cache_update", torch._dynamo.disable(_cache_update), "CUDA")
_LIBRARY.impl("materialize", torch._dynamo.disable(_materialize), "CPU")

torch.library.register_fake("kvpass::append", _append_fake, lib=_LIBRARY)
torch.library.register_fake("kvpass::attend", _attend_fake, lib=_LIBRARY)
torch.library.register_fake("kvpass::stage", _stage_fake, lib=_LIBRARY)
torch.library.register_fake("kvpass::cache_update", _cache_update_fake, lib=_LIBRARY)
torch.library.register_fake("kvpass::materialize", _materialize_fake, lib=_LIBRARY)


def refuse_backward(ctx: object, *grads: Tensor) -> None:
    """The backward of every op of a cache.

    Raises:
        UnsupportedError: always.
    """
    raise UnsupportedError(
        "gradients cannot flow through a tiered KV cache: train without a cache (use_cache=False), "
        "or call the model under torch.no_grad()"
    )


for _name in ("cache_update", "append", "attend"):
    torch.library.register_autograd(f"kvpass::{_name}", refuse_backward, lib=_LIBRARY)
