# SPDX-License-Identifier: Apache-2.0
"""What a prompt may be: text, token ids, arrays of them, what a tokenizer returns, or several."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvpass.errors import ConfigError, ShapeError

Prompt = str | Sequence[Any] | Mapping[str, Any] | Tensor


def read_prompt(
    prompt: Any, tokenizer: Any, device: torch.device, vocabulary: int | None
) -> tuple[Tensor, Tensor | None]:
    """Token ids ``[B, n]``, shorter rows padded on the left, and where they are no padding.

    Args:
        prompt: text, ids, several of either, a tensor or array ``[n]`` or ``[B, n]``, or a mapping
            with ``input_ids`` and perhaps ``attention_mask``.
        tokenizer: for text.
        device: where the ids go.
        vocabulary: ids are below it; None: unknown.

    Returns:
        The ids, and bool ``[B, n]``; None where nothing is padding.

    Raises:
        ConfigError: text, and no tokenizer that encodes it.
        ShapeError: no tokens, or what is no token id of the model.
    """
    shown = None
    if isinstance(prompt, Mapping):
        if "input_ids" not in prompt:
            raise ShapeError(
                f"a prompt with the keys {sorted(map(str, prompt))}: give one with input_ids, as a "
                "tokenizer returns it"
            )
        mask = prompt.get("attention_mask")
        prompt = prompt["input_ids"]
        if mask is not None:
            shown = _table(mask, "attention_mask").bool()
    if isinstance(prompt, (Tensor, np.ndarray)):
        ids = _table(prompt, "a prompt")
        if not _are_integers(ids) or not ids.numel():
            raise ShapeError(f"a prompt {tuple(ids.shape)}, {ids.dtype}: give ids [B, n]")
    else:
        ids, padded = _joined(_rows(prompt, tokenizer))
        shown = padded if shown is None else shown
    ids = ids.to(torch.int64)
    most = 2**63 - 1 if vocabulary is None else vocabulary - 1
    bad = ids[(ids < 0) | (ids > most)]
    if bad.numel():
        has = "" if vocabulary is None else f": the model has {vocabulary} tokens"
        raise ShapeError(f"token id {int(bad[0])} in a prompt{has}")
    if shown is not None:
        if shown.shape != ids.shape:
            raise ShapeError(
                f"attention_mask {tuple(shown.shape)} of a prompt {tuple(ids.shape)}: give one "
                "number for each token"
            )
        shown = None if bool(shown.all()) else shown.to(device)
    return ids.to(device), shown


def read_mask(mask: Any, device: torch.device) -> Tensor:
    """A mask of the user as bool ``[B, m]``.

    Raises:
        ShapeError: it is no table of numbers.
    """
    return _table(mask, "attention_mask").to(device).bool()


def _table(value: Any, name: str) -> Tensor:
    try:
        table = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ShapeError(f"{name} is no table of numbers: {error}") from None
    table = table[None] if table.dim() == 1 else table
    if table.dim() != 2:
        raise ShapeError(f"{name} {tuple(table.shape)}: give [B, n]")
    return table


def _are_integers(table: Tensor) -> bool:
    return not (table.is_floating_point() or table.is_complex() or table.dtype == torch.bool)


def _rows(prompt: Any, tokenizer: Any) -> list[list[int]]:
    """Ids of each sequence, from text and lists."""
    if isinstance(prompt, str):
        return [_encoded(prompt, tokenizer)]
    try:
        parts = list(prompt)
    except TypeError:
        raise ShapeError(f"a prompt {prompt!r}: give text or token ids") from None
    if any(isinstance(part, Mapping) for part in parts):
        raise ConfigError(
            "a prompt of chat messages: give tokenizer.apply_chat_template(messages, "
            "add_generation_prompt=True)"
        )
    whole = not any(isinstance(part, (str, Sequence, Tensor, np.ndarray)) for part in parts)
    if whole and parts:
        return [_ids(parts)]
    return [_encoded(p, tokenizer) if isinstance(p, str) else _ids(p) for p in parts]


def _encoded(text: str, tokenizer: Any) -> list[int]:
    encode = getattr(tokenizer, "encode", None)
    if not callable(encode):
        raise ConfigError("a prompt of text needs tokenizer=, with encode(text)")
    try:
        found = encode(text)
    except (TypeError, UnicodeError) as error:
        raise ShapeError(f"a prompt {text!r} cannot be encoded: {error}") from None
    return _ids(getattr(found, "ids", found))


def _ids(values: Any) -> list[int]:
    try:
        values = values.tolist() if isinstance(values, (Tensor, np.ndarray)) else list(values)
    except TypeError:
        raise ShapeError(f"{values!r} in a prompt: give token ids, or text") from None
    ids = []
    for value in values:
        try:
            if isinstance(value, (bool, np.bool_)):
                raise TypeError
            ids.append(operator.index(value))
        except TypeError:
            raise ShapeError(f"{value!r} in a prompt: give token ids, or text") from None
    return ids


def _joined(rows: list[list[int]]) -> tuple[Tensor, Tensor | None]:
    if not rows or not all(rows):
        raise ShapeError("a prompt has no tokens: give some text")
    longest = max(map(len, rows))
    padded = [[row[0]] * (longest - len(row)) + row for row in rows]
    try:
        ids = torch.tensor(padded, dtype=torch.int64)
    except (OverflowError, RuntimeError, ValueError):
        worst = max((value for row in rows for value in row), key=abs)
        raise ShapeError(f"token id {worst} in a prompt: no model has so many") from None
    if all(len(row) == longest for row in rows):
        return ids, None
    lengths = torch.tensor([len(row) for row in rows])
    return ids, torch.arange(longest) >= longest - lengths[:, None]
