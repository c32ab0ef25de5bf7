# SPDX-License-Identifier: Apache-2.0
"""Sizes and positions in one call of a rewritten graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from kvpass.errors import CacheStateError


class NotCounted(Exception):
    """The rewritten graph does not describe this call; the graph before rewriting does.

    Its text says why, for whoever wonders why such calls are slow.
    """


_numbers: Any = WeakIdKeyDictionary()
"""Of tensors on a GPU: their version and the number in them, so that no step waits to read it."""


def number_in(tensor: Tensor) -> int:
    """The number in an integer tensor of one element."""
    if tensor.device.type == "cpu" or tensor.is_inference():
        return int(tensor)
    known = _numbers.get(tensor)
    if known is None or known[0] != tensor._version:
        known = tensor._version, int(tensor)
        _numbers[tensor] = known
    return int(known[1])


def has_grown(tensor: Tensor, before: int | None, added: int) -> None:
    """A graph has added a number to a tensor in place, and is known to have done nothing else."""
    if before is not None:
        _numbers[tensor] = tensor._version, before + added


def known_number(tensor: Tensor) -> int | None:
    """The number in a tensor on a GPU, if it is known without reading it."""
    known = None if tensor.is_inference() else _numbers.get(tensor)
    return int(known[1]) if known is not None and known[0] == tensor._version else None


def _first_of(positions: Tensor) -> int:
    """The first of consecutive positions.

    Raises:
        NotCounted: they are not consecutive, or there are none.
    """
    numbers = positions.tolist()
    if not numbers:
        raise NotCounted("a call writes no tokens to a static buffer")
    first = int(numbers[0])
    if numbers != list(range(first, first + len(numbers))):
        raise NotCounted("tokens are written to a static buffer at positions that do not follow")
    return first


class CallSizes:
    """Values of the symbols in one call."""

    def __init__(
        self, symbols: dict[Any, tuple[int, int | str | None]], args: Sequence[Any]
    ) -> None:
        self.symbols = symbols
        self.args = args
        self.known: dict[Any, int] = {}

    def of(self, size: Any) -> int:
        """Value of an int or a symbolic expression."""
        if isinstance(size, int):
            return size
        if size not in self.known:
            if size.is_Symbol:  # substitution is slow, and most sizes are plain symbols
                self.known[size] = self._read(size)
            else:
                values = {symbol: self._read(symbol) for symbol in size.free_symbols}
                self.known[size] = int(size.subs(values))
        return self.known[size]

    def _read(self, symbol: Any) -> int:
        if symbol not in self.symbols:
            raise CacheStateError(f"the size {symbol} cannot be read from the graph's inputs")
        index, place = self.symbols[symbol]
        value = self.args[index]
        if isinstance(place, int):
            return int(value.shape[place])
        if place == "positions":
            return _first_of(value)
        return int(value) if place is None else number_in(value)
