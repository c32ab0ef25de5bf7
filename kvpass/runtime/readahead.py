# SPDX-License-Identifier: Apache-2.0
"""Asking for the pages of cold blocks before they are read, where the cold tier is a mapped file.

``madvise(MADV_WILLNEED)`` starts to read pages from disk and returns at once; what is in memory
already costs a look-up. It never changes what is read.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvpass.runtime.batch import Batch, Block

Span = tuple[int, int]
"""Address and bytes."""


@dataclass(frozen=True)
class ReadAhead:
    """How far ahead cold blocks are asked for.

    Attributes:
        distance: cold blocks ahead of the one in use, in its row; 0: none.
        lookahead: layers ahead whose cold blocks are asked for; 0: none.
    """

    distance: int
    lookahead: int


def first_seen(position: int, window: int, chunk: int) -> int:
    """The first position that the query at ``position`` sees; a window or chunk of 0 is none."""
    if chunk:
        return position // chunk * chunk
    return max(position - window + 1, 0) if window else 0


def schedule(cold: Sequence[int], distance: int, first: int) -> dict[int, Sequence[int]]:
    """Which cold blocks of a row to ask for, and when, so that ``distance`` are always ahead.

    They are asked for in groups, so that neighbours are one call: two groups when the row begins,
    then another one when the first block of a group is read.

    Args:
        cold: indices of the cold blocks that are read, in order.
        distance: blocks in a group; 0: none is asked for.
        first: index of the first block that is read.

    Returns:
        From the index of the block that is about to be read to those to ask for.
    """
    if distance < 1 or not cold:
        return {}
    found = {first: cold[: 2 * distance]}
    for start in range(distance, len(cold) - distance, distance):
        found[cold[start]] = cold[start + distance : start + 2 * distance]
    return found


def later_layer(layer: int, layers: int, lookahead: int) -> int | None:
    """The layer to ask for while ``layer`` of ``layers`` is read; the next step follows the last.

    None: none, as reading ahead is off or reaches around to the same layer.
    """
    return (layer + lookahead) % layers if 0 < lookahead < layers else None


def spans(pieces: Iterable[Span], page: int = mmap.PAGESIZE) -> list[Span]:
    """Whole pages that hold the pieces, those that touch or overlap as one."""
    found: list[Span] = []
    for address, size in sorted(pieces):
        start, end = address // page * page, -(-(address + size) // page) * page
        if found and start <= sum(found[-1]):
            start, end = found[-1][0], max(end, sum(found.pop()))
        found.append((start, end - start))
    return found


def will_need(pieces: Iterable[Span]) -> None:
    """Start to read these bytes of mapped files; what the system refuses is read when used."""
    advise = _madvise()
    for address, size in spans(pieces):
        advise(address, size, mmap.MADV_WILLNEED)


@cache
def _madvise() -> Any:
    function = ctypes.CDLL(None).madvise
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    function.restype = ctypes.c_int
    return function


def ask_for_later_layer(batch: Batch, layer: int) -> None:
    """While ``layer`` is about to be read: ask for the cold blocks of a later one."""
    if batch.cold is None or batch.ahead is None:
        return
    later = later_layer(layer, batch.layers, batch.ahead.lookahead)
    if later is None:
        return
    for row, cold in zip(batch.blocks[later], batch.cold[later], strict=True):
        # The last step knows which blocks a window has left behind.
        ask_for(row, [i for i in cold if i >= batch.first_read[later]])


def row_schedule(
    batch: Batch, layer: int, sequence: int, first: int, last: int
) -> dict[int, Sequence[int]]:
    """:func:`schedule` of the blocks ``first`` to ``last - 1`` of a row."""
    if batch.cold is None or batch.ahead is None:
        return {}
    cold = [i for i in batch.cold[layer][sequence] if first <= i < last]
    return schedule(cold, batch.ahead.distance, first)


def ask_for(row: Sequence[Block], indices: Iterable[int]) -> None:
    """Start to read the cold blocks of a row that have these indices."""
    slots = [row[i].cold for i in indices if i < len(row) and row[i].hot is None]
    will_need((slot.address, slot.arena.slot_bytes) for slot in slots if slot is not None)
