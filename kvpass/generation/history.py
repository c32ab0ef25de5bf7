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
"""Histories of caches that are not ours, whose sequences may be reordered unseen."""


@dataclass
class History:
    """What was generated into a cache.

    Attributes:
        size: sequences, B.
        ids: int64 ``[B, m]`` from the first token on, the last of which need not be stored; None:
            not all are known.
        shown: bool ``[B, m]``, False for padding, which is among the first m tokens; None: there is
            none.
    """

    size: int
    ids: Tensor | None
    shown: Tensor | None

    def select(self, sequences: Sequence[int]) -> History:
        """That of some of the sequences, in another order."""

        def of(table: Tensor | None) -> Tensor | None:
            return None if table is None else table[torch.tensor(sequences, device=table.device)]

        return History(len(sequences), of(self.ids), of(self.shown))


def remember(cache: Any, history: History) -> None:
    """Keep what is known of a cache as long as it lives."""
    if isinstance(cache, TieredCache):
        cache.history = history
    else:
        with suppress(TypeError):  # no weak references to it
            _of_others[cache] = history


def stored(
    cache: Any, past: int, size: int, *, masked: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Ids ``[B, past]`` of what a cache holds, and where they are no padding, if it is known.

    Args:
        cache: in question.
        past: tokens that it holds.
        size: sequences of the prompt that goes on.
        masked: whether the caller says what is padding.

    Raises:
        ShapeError: sequences were padded, nobody says how, and here it is not certain.
    """
    ours = isinstance(cache, TieredCache)
    history = None
    with suppress(TypeError):
        history = cache.history if ours else _of_others.get(cache)
    if not past or history is None or history.size != size:
        return None, None
    ids = history.ids
    ids = None if ids is None or ids.shape[1] < past else ids[:, :past]
    shown = history.shown
    if shown is None or masked:
        return ids, None
    if not ours:
        raise ShapeError(
            f"the prompts before were padded: give attention_mask=, [B, {past} + new tokens], or "
            "use a kvpass.TieredCache, which remembers"
        )
    if shown.shape[1] < past:  # what came from elsewhere is no padding
        rest = torch.ones(size, past - shown.shape[1], dtype=torch.bool, device=shown.device)
        shown = torch.cat([shown, rest], 1)
    return ids, shown[:, :past]
