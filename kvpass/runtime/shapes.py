# SPDX-License-Identifier: Apache-2.0
"""Checks of keys and values that are given to a cache."""

from __future__ import annotations

from torch import Tensor

from kvpass.errors import ShapeError


def no_layer(layer: int, layers: int) -> ShapeError:
    """The error of a layer that a cache does not have."""
    return ShapeError(
        f"layer {layer} of a cache made for {layers} layers, 0..{layers - 1}: make it with the "
        "config of the model that uses it"
    )


def check_pair(k: Tensor, v: Tensor, layer: int, layers: int) -> None:
    """Refuse new keys and values that do not belong together.

    Raises:
        ShapeError: rank, batch, heads, tokens, dtype or device differ; or no such layer.
    """
    if not 0 <= layer < layers:
        raise no_layer(layer, layers)
    pair = [f"{tuple(x.shape)} {x.dtype} on {x.device}" for x in (k, v)]
    if k.ndim != 4 or v.ndim != 4:
        wrong = "must both be [batch, heads, tokens, channels]"
    elif k.shape[:3] != v.shape[:3]:
        wrong = "must have the same batch, heads and tokens"
    elif k.dtype != v.dtype or k.device != v.device:
        wrong = "must have the same dtype and device"
    else:
        return
    raise ShapeError(f"new keys {pair[0]} and values {pair[1]} {wrong}")
