# SPDX-License-Identifier: Apache-2.0
"""Tokens on their way to the host, and what becomes of them there."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from kvpass.errors import UnsupportedError
from kvpass.generation.text import TextOf

NO_TOKEN = -1
"""In place of a token that could not be chosen."""

Reason = Literal["eos", "stop", "length"]


class Reader:
    """Reads what steps were launched for, a few steps behind them.

    Attributes:
        tokens: of each sequence, up to its end.

    Args:
        size: sequences.
        ends: tokens that end a text.
        stops: others that do, in place of a string.
        count: tokens at most.
        ahead: steps that are launched before a token is read.
        texts: of each sequence, or none.
        on_tokens: called with an index and new tokens.
        on_text: called with an index and new text.
    """

    def __init__(
        self,
        size: int,
        ends: frozenset[int],
        stops: frozenset[int],
        count: int,
        ahead: int,
        texts: list[TextOf],
        on_tokens: Callable[[int, list[int]], None] | None,
        on_text: Callable[[int, str], None] | None,
    ) -> None:
        self.tokens: list[list[int]] = [[] for _ in range(size)]
        self._ended: list[Reason | None] = [None] * size
        self._ends = ends
        self._stops = stops
        self._count = count
        self._ahead = ahead
        self._texts = texts
        self._on_tokens = on_tokens
        self._on_text = on_text
        self._coming: deque[tuple[Tensor, Any]] = deque()

    def send(self, tokens: Tensor) -> None:
        """Tokens ``[B, 1]`` of a step that is launched; reads those of an earlier one."""
        if tokens.device.type != "cuda":
            self._read(tokens)
            return
        staging = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
        staging.copy_(tokens, non_blocking=True)
        self._coming.append((staging, torch.cuda.current_stream(tokens.device).record_event()))
        while len(self._coming) > self._ahead:
            self._next()

    def done(self) -> bool:
        """Whether all sequences have ended, as far as is known."""
        return None not in self._ended

    def finish(self) -> None:
        """Read what is still coming."""
        while self._coming and not self.done():
            self._next()
        self._coming.clear()
        for index, text in enumerate(self._texts):
            if self._ended[index] != "stop":
                self._tell(index, text.end())
                if text.stopped:
                    self._ended[index] = "stop"

    def reasons(self) -> list[Reason]:
        """Why each sequence ended."""
        return [reason or "length" for reason in self._ended]

    def _next(self) -> None:
        staging, event = self._coming.popleft()
        event.synchronize()
        self._read(staging)

    def _read(self, tokens: Tensor) -> None:
        for index, token in enumerate(tokens[:, 0].tolist()):
            if self._ended[index] is not None:
                continue
            if token == NO_TOKEN:
                raise UnsupportedError(
                    f"the model's logits for new token {len(self.tokens[index])} of sequence "
                    f"{index} are NaN or infinite: no token can be chosen; check its weights and "
                    "dtype"
                )
            self.tokens[index].append(token)
            if self._on_tokens is not None:
                self._on_tokens(index, [token])
            if token in self._ends or token in self._stops:
                self._ended[index] = "stop" if token in self._stops else "eos"
                continue
            if self._texts:
                self._tell(index, self._texts[index].add(token))
                if self._texts[index].stopped:
                    self._ended[index] = "stop"
                    continue
            if len(self.tokens[index]) == self._count:
                self._ended[index] = "length"

    def _tell(self, index: int, piece: str) -> None:
        if self._on_text is not None and piece:
            self._on_text(index, piece)
