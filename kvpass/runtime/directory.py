# SPDX-License-Identifier: Apache-2.0
"""From the small tensors that travel through graphs to the objects they stand for.

Identity is never an address: a cache is known by a number that is never used twice, and rows are
known by the number of their first table row, which belongs to exactly one live batch.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvpass.errors import CacheStateError
from kvpass.runtime.locks import fork_safe_lock

if TYPE_CHECKING:
    from kvpass.runtime.batch import Batch

_numbers = itertools.count(1)
_objects: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_batches: dict[int, weakref.ref[Batch]] = {}
_places: dict[int, weakref.ref[Batch]] = {}
_lock = fork_safe_lock()


def enroll(thing: Any) -> Tensor:
    """Give an object a number; it is forgotten when the object dies.

    Returns:
        int64 ``[1]`` on the CPU, holding the number.
    """
    number = next(_numbers)
    with _lock:
        _objects[number] = thing
    with torch.inference_mode(False):
        return torch.tensor([number], dtype=torch.int64)


def lookup(ticket: Tensor, what: str) -> Any:
    """The object behind a ticket.

    Raises:
        CacheStateError: it has been freed.
    """
    thing = _objects.get(int(ticket))
    if thing is None:
        raise CacheStateError(f"{what} was freed while a graph still uses it; keep it alive")
    return thing


def tiered(handle: Tensor) -> Any:
    """The state of a TieredCache from its handle."""
    return lookup(handle, "the TieredCache")


def handle_content(
    ticket: Tensor, shape: Sequence[int], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Dense copy of what a KV handle of this shape and dtype stands for."""
    content: Tensor = lookup(ticket, "a KV handle").dense(shape, dtype, device)
    return content


def enlist(batch: Batch) -> None:
    """Make a batch known by its rows."""
    with _lock:
        _batches[batch.first_row] = weakref.ref(batch)
        _places[batch.rows.data_ptr()] = weakref.ref(batch)


def batch_at(rows: Tensor) -> Batch | None:
    """The live batch that owns this very tensor of rows, without reading it; None: nobody does.

    An address is enough here: who is found is alive, and so is its tensor.
    """
    reference = _places.get(rows.data_ptr())
    batch = reference() if reference is not None else None
    return None if batch is None or batch.released or batch.rows.shape != rows.shape else batch


def batch_of(rows: Tensor) -> Batch:
    """The live batch whose table rows these are.

    Raises:
        CacheStateError: no live batch has them.
    """
    reference = _batches.get(int(rows[0, 0])) if rows.numel() else None
    batch = reference() if reference is not None else None
    if batch is None or batch.released:
        raise CacheStateError("the rows of a released cache were used")
    return batch
