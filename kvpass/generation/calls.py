# SPDX-License-Identifier: Apache-2.0
"""How a model is called: one of transformers, or of one's own."""

from __future__ import annotations

import inspect
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from kvpass.cache import TieredCache
from kvpass.errors import ShapeError, UnsupportedError


class _Compiled:
    """What was made of a model, kept by the model itself, so that both end together."""

    def __init__(self, call: Any = None) -> None:
        self.call = call

    def __deepcopy__(self, memo: dict[int, Any]) -> _Compiled:
        """Nothing: a copy of the model is another model."""
        return _Compiled()

    def __reduce__(self) -> Any:
        """Likewise, when the model is saved."""
        return _Compiled, ()


_ATTRIBUTE = "_kvpass_compiled"

GRAPHS = 64
"""Of one model, where torch lets each compilation have a limit of its own (2.13)."""

_LIMITS = "recompile_limit" in inspect.signature(torch.compile).parameters


def plain(model: Any) -> Any:
    """The module that a compiled one is made of."""
    return getattr(model, "_orig_mod", model)


def compiled(model: Any) -> Any:
    """The model as it is where somebody compiled it, else through ``kvpass.backend``, once."""
    if plain(model) is not model or getattr(model, "_compiled_call_impl", None) is not None:
        return model
    if not isinstance(model, nn.Module):
        return model
    kept = model.__dict__.get(_ATTRIBUTE)
    if kept is None or kept.call is None:
        # Prompts, pieces of them, steps and batches, with padding and without, are a graph each.
        more = {"recompile_limit": GRAPHS} if _LIMITS else {}
        call = torch.compile(model, backend="kvpass", mode="reduce-overhead", **more)  # type: ignore[call-overload]
        kept = model.__dict__[_ATTRIBUTE] = _Compiled(call)
    return kept.call


def vocabulary_of(model: Any) -> int | None:
    """Tokens that a model knows; None where it does not say."""
    model = plain(model)
    embeddings = getattr(model, "get_input_embeddings", None)
    if callable(embeddings):
        with suppress(Exception):  # some models have none, and raise what they like
            return int(embeddings().num_embeddings)
    found = getattr(getattr(model, "config", None), "vocab_size", None)
    return found if isinstance(found, int) and not isinstance(found, bool) else None


def _check(model: Any, cache: Any) -> None:
    """Refuse what would fail inside the model.

    Raises:
        UnsupportedError: an encoder-decoder model, or a cache of another model.
    """
    name = type(model).__name__
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        raise UnsupportedError(
            f"{name} is an encoder-decoder model: call its own generate, with the model compiled "
            "by model.compile(backend=kvpass.backend)"
        )
    theirs = any(base.__module__.startswith("transformers.") for base in type(model).__mro__)
    if theirs and isinstance(cache, TieredCache) and not hasattr(cache, "get_mask_sizes"):
        raise UnsupportedError(
            f"a TieredCache that was made without the config of {name}: make it with "
            "kvpass.TieredCache(model.config, max_tokens=...)"
        )


def _first_of(names: Any) -> str | None:
    """The name that tokens are passed by; None: they are passed first, without one.

    Raises:
        UnsupportedError: there is no place for them.
    """
    if "input_ids" in names:
        return "input_ids"
    taken = {"past_key_values", "cache", "position_ids", "attention_mask", "last_only"}
    for place, parameter in enumerate(names.values()):
        if parameter.kind == parameter.VAR_POSITIONAL or (
            place == 0 and parameter.kind == parameter.POSITIONAL_ONLY
        ):
            return None
        by_name = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        if by_name and parameter.name not in taken:
            return str(parameter.name)
    raise UnsupportedError(
        f"a forward of {', '.join(names)} has no place for tokens: name them input_ids"
    )


class Call:
    """One forward pass of a model with a cache.

    Args:
        model: whose ``forward`` takes ``past_key_values`` (transformers) or ``cache``.
        cache: of keys and values.

    Raises:
        UnsupportedError: its forward takes neither, or it is not a decoder of such a cache.
    """

    def __init__(self, model: Any, cache: Any) -> None:
        module = plain(model)
        _check(module, cache)
        forward = module.forward if isinstance(module, nn.Module) else module
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
                f"{type(module).__name__} takes neither past_key_values= nor cache=: pass a model "
                "whose forward does, and uses it as a cache of keys and values"
            )
        self._options = {
            name: value
            for name, value in self._options.items()
            if name in names or name in ("past_key_values", "cache")
        }
        self._first = _first_of(names)
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
        if self._first is None:
            out = self._model(tokens, **options)
        else:
            out = self._model(**{self._first: tokens}, **options)
        logits = getattr(out, "logits", out[0] if isinstance(out, tuple) else out)
        if not isinstance(logits, Tensor) or logits.dim() != 3:
            found = getattr(logits, "shape", type(logits).__name__)
            raise ShapeError(f"the model returns {found}, not logits [B, n, V]")
        return logits[:, -1]
