# SPDX-License-Identifier: Apache-2.0
"""How a model is called: one of transformers, or of one's own."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from kvpass.errors import ShapeError, UnsupportedError

_compiled: Any = WeakIdKeyDictionary()
"""Of models that were not compiled: what was made of them."""


def compiled(model: Any) -> Any:
    """The model as it is where somebody compiled it, else through ``kvpass.backend``, once."""
    inner = getattr(model, "_orig_mod", None)
    if inner is not None or getattr(model, "_compiled_call_impl", None) is not None:
        return model
    if not isinstance(model, nn.Module):
        return model
    if model not in _compiled:
        _compiled[model] = torch.compile(model, backend="kvpass", options={"cuda_graphs": True})
    return _compiled[model]


class Call:
    """One forward pass of a model with a cache.

    Args:
        model: whose ``forward`` takes ``past_key_values`` (transformers) or ``cache``.
        cache: of keys and values.

    Raises:
        UnsupportedError: its forward takes neither.
    """

    def __init__(self, model: Any, cache: Any) -> None:
        plain = getattr(model, "_orig_mod", model)
        forward = plain.forward if isinstance(plain, nn.Module) else plain
        try:
            names = inspect.signature(forward).parameters
        except (TypeError, ValueError):
            names = {}  # type: ignore[assignment]
        self._model = compiled(model)
        self._names = names
        self._options: dict[str, Any] = {}
        if "past_key_values" in names:
            self._options = {"past_key_values": cache, "use_cache": True, "logits_to_keep": 1}
        elif "cache" in names:
            self._options = {"cache": cache, "last_only": True}
        else:
            raise UnsupportedError(
                f"{type(plain).__name__} takes neither past_key_values= nor cache=: pass a model "
                "whose forward does, and uses it as a cache of keys and values"
            )
        self._options = {
            name: value
            for name, value in self._options.items()
            if name in names or name in ("past_key_values", "cache")
        }
        self._first = "input_ids" if "input_ids" in names else next(iter(names))
        self.positions = "position_ids" in names
        self.masks = "attention_mask" in names

    def __call__(self, tokens: Tensor, positions: Tensor | None, mask: Tensor | None) -> Tensor:
        """Logits ``[B, V]`` after tokens ``[B, n]``.

        Args:
            tokens: the new ones.
            positions: ``[B, n]`` of them; not passed on where the model counts by itself.
            mask: ``[B, stored + n]``, 0 for padding; None: there is none.

        Raises:
            ShapeError: the model returns no logits ``[B, n, V]``.
            UnsupportedError: a mask, and it takes none.
        """
        options = dict(self._options)
        if self.positions and positions is not None:
            options["position_ids"] = positions
        if mask is not None:
            if not self.masks:
                raise UnsupportedError(
                    "prompts of different lengths need a model whose forward takes "
                    "attention_mask=: generate for each by itself"
                )
            options["attention_mask"] = mask
        out = self._model(**{self._first: tokens}, **options)
        logits = getattr(out, "logits", out[0] if isinstance(out, tuple) else out)
        if not isinstance(logits, Tensor) or logits.dim() != 3:
            found = getattr(logits, "shape", type(logits).__name__)
            raise ShapeError(f"the model returns {found}, not logits [B, n, V]")
        return logits[:, -1]
