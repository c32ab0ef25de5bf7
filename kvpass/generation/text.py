# SPDX-License-Identifier: Apache-2.0
"""Text of tokens that come one by one, and strings that end it."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, Protocol

from kvpass.errors import ConfigError

REPLACEMENT = "�"
"""What a decoder makes of bytes that are no whole character."""


class Decodes(Protocol):
    """A tokenizer, of transformers or of one's own."""

    def decode(self, ids: Any) -> str:
        """The text of token ids."""
        ...


def decoder_of(tokenizer: Any) -> Any:
    """Text of token ids, without special tokens where the tokenizer can leave them out.

    Raises:
        ConfigError: it has no ``decode``.
    """
    decode = getattr(tokenizer, "decode", None)
    if not callable(decode):
        raise ConfigError(
            f"tokenizer = {tokenizer!r}: give an object with decode(ids) -> str, as a tokenizer of "
            "transformers"
        )
    if "skip_special_tokens" in inspect.signature(decode).parameters:
        return lambda ids: decode(ids, skip_special_tokens=True)
    return decode


def special_ids(tokenizer: Any, texts: Sequence[str]) -> frozenset[int]:
    """Of texts that are special tokens, which the decoded text leaves out, their ids."""
    names = getattr(tokenizer, "all_special_tokens", None) or ()
    ids = getattr(tokenizer, "all_special_ids", None) or ()
    known = dict(zip(map(str, names), ids, strict=False))
    return frozenset(known[text] for text in texts if text in known)


class TextOf:
    """The text of one sequence as its tokens come.

    A token may be a part of a character, and how it reads may depend on the one before it. So each
    time the last pieces are decoded with and without the new token, and what the longer text has
    more is new, unless it ends in half a character (incremental detokenization, as in text
    generation servers).

    Args:
        decode: text of token ids.
        stops: strings that end the text.
    """

    def __init__(self, decode: Any, stops: Sequence[str]) -> None:
        self._decode = decode
        self._stops = stops
        self._held = max((len(stop) for stop in stops), default=1) - 1
        self._ids: list[int] = []
        self._from = self._read = 0
        self._given = 0
        self.text = ""
        self.stopped = False

    def add(self, token: int) -> str:
        """Take one more token; returns the text that is certain now and was not given yet.

        What could be the beginning of a stop string is held back. ``stopped`` tells whether one
        was found: the text ends in front of it.
        """
        self._ids.append(token)
        before = self._decode(self._ids[self._from : self._read])
        after = self._decode(self._ids[self._from :])
        if len(after) > len(before) and not after.endswith(REPLACEMENT):
            self._add(after[len(before) :])
            self._from, self._read = self._read, len(self._ids)
        return self._give(len(self.text) if self.stopped else len(self.text) - self._held)

    def end(self) -> str:
        """No more tokens come; returns what was held back."""
        if not self.stopped:
            before = self._decode(self._ids[self._from : self._read])
            self._add(self._decode(self._ids[self._from :])[len(before) :])
        return self._give(len(self.text))

    def _add(self, text: str) -> None:
        searched = max(len(self.text) - self._held, 0)
        self.text += text
        found = [at for stop in self._stops if (at := self.text.find(stop, searched)) >= 0]
        if found:
            self.text = self.text[: min(found)]
            self.stopped = True

    def _give(self, end: int) -> str:
        piece = self.text[self._given : max(end, self._given)]
        self._given += len(piece)
        return piece
