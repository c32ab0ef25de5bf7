# SPDX-License-Identifier: Apache-2.0
"""Giving back the memory of static cache buffers."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from kvpass.errors import ConfigError, UnsupportedError
from kvpass.runtime.content import Content
from kvpass.runtime.handle import KVHandle

_LAYOUT = "[batch, heads, tokens, head_dim] or [batch, tokens, heads, head_dim]"


def release_buffers(
    owner: Any, *patterns: str, device: torch.device | str | None = None
) -> dict[str, int]:
    """Replace cache buffers of a model, or of a transformers ``StaticCache``, by handles.

    A handle has the buffer's shape and dtype and what was in it, but no memory: once a graph that
    kvpass has rewritten writes to it, what it stands for is in the tiers. Do this after the buffers
    have been made and before the model runs; whatever kvpass does not rewrite gets the memory back
    and says so in a warning.

    Args:
        owner: a module, or an object whose ``layers`` have ``keys`` and ``values``.
        *patterns: shell patterns of the buffers' names, such as ``"*.k_cache"``; registered buffers
            and plain attributes of modules count. None are needed for a cache.
        device: where buffers on the meta device will be; default is the device of the parameters.

    Returns:
        Bytes given back, by name; 0 for a buffer on the meta device.

    Raises:
        ConfigError: no pattern is given, or one matches no tensor.
        UnsupportedError: a buffer is no dense float tensor of four dimensions, or something else
            holds it too, so that its memory would stay or be written behind the back of the handle.
    """
    places = list(_places(owner))
    if isinstance(owner, nn.Module):
        if not patterns:
            raise ConfigError(
                "release_buffers(model) needs the names of the cache buffers, for example "
                "release_buffers(model, '*.k_cache', '*.v_cache')"
            )
        for pattern in patterns:
            if not any(fnmatchcase(name, pattern) for name, _, _ in places):
                known = ", ".join(sorted({name.rsplit(".", 1)[-1] for name, _, _ in places}))
                raise ConfigError(
                    f"no tensor of the model is named like {pattern!r}; the last parts of the "
                    f"names are: {known or 'none'}"
                )
        places = [p for p in places if any(fnmatchcase(p[0], pattern) for pattern in patterns)]
    for name, holder, key in places:
        _check(name, holder, key)
    freed = {}
    for name, holder, key in places:
        tensor = holder[key]
        freed[name] = 0 if tensor.is_meta else tensor.numel() * tensor.element_size()
        holder[key] = _handle(tensor, _device_of(owner, tensor, device))
        del tensor
    return freed


def _places(owner: Any) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Name, dictionary and key of every tensor that may be a buffer."""
    if isinstance(owner, nn.Module):
        for path, module in owner.named_modules():
            prefix = f"{path}." if path else ""
            for holder in (module._buffers, vars(module)):
                for key, value in list(holder.items()):
                    if isinstance(value, Tensor) and not isinstance(value, KVHandle):
                        yield prefix + key, holder, key
        return
    layers = getattr(owner, "layers", None)
    if not isinstance(layers, (list, tuple)):
        raise UnsupportedError(
            f"release_buffers takes a module or a StaticCache, not {type(owner).__name__}"
        )
    for index, layer in enumerate(layers):
        for key in ("keys", "values"):
            value = vars(layer).get(key)
            if isinstance(value, Tensor) and not isinstance(value, KVHandle):
                yield f"layers.{index}.{key}", vars(layer), key


def _check(name: str, holder: dict[str, Any], key: str) -> None:
    tensor = holder[key]
    dense = type(tensor) is Tensor and tensor.layout == torch.strided
    if not dense or tensor.dim() != 4 or not tensor.is_floating_point() or tensor.requires_grad:
        raise UnsupportedError(
            f"{name} of shape {tuple(tensor.shape)}, {tensor.dtype}: only dense float tensors "
            f"{_LAYOUT} that need no gradient are caches"
        )
    # Held by its dictionary, by `tensor` and by the call of getrefcount.
    others = sys.getrefcount(tensor) - 3
    if others > 0 or tensor._base is not None:
        raise UnsupportedError(
            f"{name} is also held elsewhere ({'a view' if tensor._base is not None else others}): "
            "delete the other references first, and do not run the model before"
        )


def _device_of(owner: Any, tensor: Tensor, given: torch.device | str | None) -> torch.device:
    if not tensor.is_meta:
        return tensor.device
    if given is not None:
        return torch.device(given)
    if isinstance(owner, nn.Module):
        for parameter in owner.parameters():
            if not parameter.is_meta:
                return parameter.device
    raise ConfigError("the buffers are on the meta device: say where they will be, device='cuda'")


def _handle(tensor: Tensor, device: torch.device) -> KVHandle:
    content = Content(None, 0, False, 0, capacity=tensor.shape[2])
    if not tensor.is_meta and bool(tensor.any()):
        content.settle(tensor)  # until the next step has copied it
    return KVHandle.of_buffer(content, tuple(tensor.shape), tensor.dtype, device)
