# SPDX-License-Identifier: Apache-2.0
"""The source op that reads a TieredCache without adding to it, as cross attention does.

``cache_read(handle, layer, past, batch, kv_heads, head_dim_k, head_dim_v, dtype, device,
block_size, tile) -> (K, V)``: dense copies of the first ``past`` keys and values of a layer. Like
``cache_update`` it is right by itself, and the pass replaces it where it can.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvpass.runtime import directory

_LIBRARY = torch.library.Library("kvpass", "FRAGMENT")

_LIBRARY.define(
    "cache_read(Tensor handle, int layer, SymInt past, SymInt batch, int kv_heads, int head_dim_k,"
    " int head_dim_v, ScalarType dtype, Device device, int block_size,"
    " int[]? tile=None) -> (Tensor, Tensor)"
)


def _cache_read(
    handle: Tensor,
    layer: int,
    past: int,
    batch: int,
    kv_heads: int,
    head_dim_k: int,
    head_dim_v: int,
    dtype: torch.dtype,
    device: torch.device,
    block_size: int,
    tile: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor]:
    pair: tuple[Tensor, Tensor] = directory.tiered(handle).read_dense(layer, past)
    return pair


def _cache_read_fake(
    handle: Tensor,
    layer: int,
    past: int,
    batch: int,
    kv_heads: int,
    head_dim_k: int,
    head_dim_v: int,
    dtype: torch.dtype,
    device: torch.device,
    block_size: int,
    tile: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor]:
    return (
        torch.empty((batch, kv_heads, past, head_dim_k), dtype=dtype, device=device),
        torch.empty((batch, kv_heads, past, head_dim_v), dtype=dtype, device=device),
    )


# Below a frame that Dynamo gave up on, it would compile the runtime that this calls.
_LIBRARY.impl("cache_read", torch._dynamo.disable(_cache_read), "CPU")
torch.library.register_fake("kvpass::cache_read", _cache_read_fake, lib=_LIBRARY)
