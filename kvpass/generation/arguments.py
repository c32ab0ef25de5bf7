# SPDX-License-Identifier: Apache-2.0
"""Arguments of ``kvpass.generate``: what they may be, and what they become."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kvpass.cache import TieredCache
from kvpass.errors import CapacityError, ConfigError, ShapeError
from kvpass.generation.calls import plain
from kvpass.generation.prompts import read_mask

MOST_ROOM = 1 << 20
"""Tokens that a cache is made for at most, however many positions a model has."""


def stops(stop: Any) -> list[str]:
    """Strings that end a text.

    Raises:
        ConfigError: not strings, or an empty one.
    """
    stops = [stop] if isinstance(stop, str) else stop or ()
    if not isinstance(stops, Sequence) or not all(isinstance(s, str) and s for s in stops):
        raise ConfigError(f"stop = {stop!r}: give strings that are not empty")
    return list(stops)


def behind(waiting: Tensor, shown: Tensor) -> Tensor:
    """Where there is no padding in a prompt behind a token of each sequence."""
    return torch.cat([torch.ones_like(waiting, dtype=torch.bool), shown], 1)


def room(config: Any, tokens: int) -> int:
    """Tokens that a new cache is for: as many as the model takes, so that others can go on."""
    most = getattr(config, "max_position_embeddings", None)
    return max(tokens, min(most, MOST_ROOM)) if isinstance(most, int) else 2 * tokens


def check_count(name: str, number: object) -> None:
    """An integer from 1.

    Raises:
        ConfigError: it is not.
    """
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise ConfigError(f"{name} = {number!r}: give an integer from 1")


def several(given: Any) -> list[Any]:
    """A list of what may be one integer."""
    try:
        operator.index(given)  # an array of several has one too, and raises
    except TypeError:
        return list(given)
    return [given]


def ends(model: Any, tokenizer: Any, given: Any) -> frozenset[int]:
    """Tokens that end a text.

    Raises:
        ConfigError: not token ids.
    """
    if isinstance(given, str) and given == "auto":
        settings = getattr(plain(model), "generation_config", None)
        given = getattr(settings, "eos_token_id", None)
        if given is None:
            given = getattr(tokenizer, "eos_token_id", None)
    try:
        ids = [] if given is None else several(given)
        if any(isinstance(each, bool) for each in ids):
            raise TypeError
        found = frozenset(map(operator.index, ids))
    except TypeError:
        raise ConfigError(f"eos_token_id = {given!r}: give token ids") from None
    if found and not 0 <= min(found) <= max(found) < 2**63:
        raise ConfigError(f"eos_token_id = {given!r}: give token ids")
    return found


def shown(
    ids: Tensor, shown: Tensor | None, mask: Any, past: int, before: Tensor | None
) -> Tensor | None:
    """Where there are tokens, bool ``[B, stored + n]``, and no padding; None: there is none.

    Raises:
        ShapeError: the mask does not belong to the prompt, or hides what it may not.
    """
    if mask is None:
        if shown is None and before is None:
            return None
        if before is None:
            before = torch.ones(len(ids), past, dtype=torch.bool, device=ids.device)
        found = torch.cat([before, torch.ones_like(ids, dtype=torch.bool)], 1)
        if shown is not None:
            found[:, past:] = shown
    else:
        found = read_mask(mask, ids.device)
    want = (ids.shape[0], past + ids.shape[1])
    if tuple(found.shape) != want:
        raise ShapeError(
            f"attention_mask {tuple(found.shape)}: give {want}, for the {past} tokens stored and "
            f"the {ids.shape[1]} that come (a returned cache begins with its last token)"
        )
    if not bool(found[:, -1].all()):
        raise ShapeError("attention_mask hides the last token of a prompt: pad on the left")
    return None if bool(found.all()) else found


def can_be_cut(cache: Any) -> bool:
    """Whether tokens behind the end of a text can be taken off a cache again."""
    if isinstance(cache, TieredCache):
        return True
    layers = getattr(cache, "layers", ())
    sliding = getattr(cache, "is_sliding", ())
    return (
        callable(getattr(cache, "crop", None))
        and all(hasattr(layer, "crop") for layer in layers)
        and not any(sliding if isinstance(sliding, Sequence) else (sliding,))
    )


def check_room(cache: Any, tokens: int) -> None:
    """A cache has to take all tokens.

    Raises:
        CapacityError: it does not.
    """
    most = getattr(cache, "max_tokens", None)
    if most is not None and tokens > most:
        raise CapacityError(
            f"prompt and new tokens are {tokens}, the cache is for max_tokens={most}: make it "
            "larger, or lower max_new_tokens"
        )


def device_of(model: Any) -> torch.device:
    """That of the first parameter; the CPU where there is none."""
    parameters = getattr(plain(model), "parameters", None)
    first = next(parameters(), None) if callable(parameters) else None
    return torch.device("cpu") if first is None else first.device


def config_of(model: Any) -> Any:
    """The model's config.

    Raises:
        ConfigError: it has none.
    """
    config = getattr(plain(model), "config", None)
    if config is None:
        raise ConfigError(
            f"{type(plain(model)).__name__} has no config: pass a cache, "
            "kvpass.TieredCache(config, max_tokens=...)"
        )
    return config
