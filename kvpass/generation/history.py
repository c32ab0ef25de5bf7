# SPDX-License-Identifier: Apache-2.0
"""Which tokens a cache holds, for who goes on with it: their ids, and what of them is padding."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from kvpass.cache import TieredCache
from kvpass.errors import ShapeError

_of_others: Any = WeakIdKeyDictionary()
"""Histories of caches that are not ours, each with the last keys that were stored then."""


@dataclass
class History:
    """What was generated into a cache.

    Attributes:
        size: sequences, B.
        length: tokens of each so far, padding among them.
        last: int64 ``[B, 1]``, the last of them, where that is not stored yet; None: all are.
        ids: int64 ``[B, length]``; None: not all are known.
        shown: bool ``[B, m]``, False for padding, which is among the first m tokens; None: there is
            none.
    """

    size: int
    length: int
    last: Tensor | None
    ids: Tensor | None
    shown: Tensor | None

    def select(self, sequences: Sequence[int]) -> History:
        """That of some of the sequences, in another order."""

        def of(table: Tensor | None) -> Tensor | None:
            return None if table is None else table[torch.tensor(sequences, device=table.device)]

        return History(len(sequences), self.length, of(self.last), of(self.ids), of(self.shown))

    def first(self, tokens: int) -> History:
        """That of the first tokens, which others may follow."""

        def of(table: Tensor | None) -> Tensor | None:
            return None if table is None else table[:, :tokens]

        return History(self.size, tokens, None, of(self.ids), of(self.shown))


def remember(cache: Any, history: History) -> None:
    """Keep what is known of a cache as long as it lives."""
    if isinstance(cache, TieredCache):
        cache.history = history
        return
    mark = _last_keys(cache)
    if mark is not None:
        _of_others[cache] = history, mark


def recall(cache: Any) -> History | None:
    """What is known of a cache, if it has not been changed by others since."""
    if isinstance(cache, TieredCache):
        found: History | None = cache.history
        return found
    try:
        history, mark = _of_others[cache]
    except (KeyError, TypeError):  # unknown, or nothing that can be known
        return None
    now = _last_keys(cache)
    same = now is not None and now.shape == mark.shape and torch.equal(now, mark)
    return history if same else None


def _last_keys(cache: Any) -> Tensor | None:
    """Keys ``[B, Hkv, D]`` of the last token in the last layer of a cache of transformers.

    Above the first layer they depend on all tokens before.
    """
    with suppress(AttributeError, LookupError, TypeError):  # a cache of any other kind
        stored = int(cache.get_seq_length())
        keys = cache.layers[-1].keys
        if stored and keys.dim() == 4:
            return torch.as_tensor(keys[:, :, min(stored, keys.shape[2]) - 1].clone())
    return None


def waiting(history: History | None, past: int) -> Tensor | None:
    """The last token ``[B, 1]`` of a returned cache, if only that one is not stored."""
    return None if history is None or history.length != past + 1 else history.last


def stored(
    history: History | None, past: int, size: int, *, masked: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Ids ``[B, past]`` of what a cache holds, and where they are no padding, if it is known.

    Args:
        history: of the cache.
        past: tokens that it holds.
        size: sequences of the prompt that goes on.
        masked: whether the caller says what is padding.
    """
    if not past or history is None or history.size != size:
        return None, None
    ids = history.ids
    ids = None if ids is None or ids.shape[1] < past else ids[:, :past]
    shown = history.shown
    if shown is None or masked:
        return ids, None
    if shown.shape[1] < past:  # what came from elsewhere is no padding
        rest = torch.ones(size, past - shown.shape[1], dtype=torch.bool, device=shown.device)
        shown = torch.cat([shown, rest], 1)
    return ids, shown[:, :past]


def refuse_padding_unknown(cache: Any, past: int) -> None:
    """A cache whose padding was known, and that others have changed since.

    Raises:
        ShapeError: it is one.
    """
    with suppress(KeyError, TypeError):
        history, _ = _of_others[cache]
        if past and history.shown is not None and recall(cache) is None:
            raise ShapeError(
                "the prompts before were padded, and the cache was changed since: give "
                f"attention_mask=, [B, {past} + new tokens]"
            )
