# SPDX-License-Identifier: Apache-2.0
"""Decode steps on a GPU: cold blocks of the next layer come while this one computes.

A kernel that reads cold blocks in place leaves the link idle while the model computes anything but
attention. With staging, a few programs on a stream of their own copy cold blocks of the layer that
attends next, as many as fit a buffer, and make tables that name the copies. Nothing of it is known
to the host, so a captured graph does it at every replay, wherever the blocks are by then; a step
whose blocks are all hot has a graph of its own, without it.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvpass.runtime import directory
from kvpass.runtime.capture import is_capturing
from kvpass.runtime.table import tables_for

COPIES = 32 << 20
"""Bytes of one layer's copies: more than a link brings while a layer of a decode step computes."""

WIDTH = 4096
"""Words of a table that can be staged: those of a million tokens in blocks of 256."""


@dataclass(eq=False)
class _Staged:
    """Copies on their way.

    Attributes:
        buffer: in which they are, held until it is joined: the stream that writes it is not the one
            whose memory it is.
        width: words of its tables.
        event: behind the copies; None where there are no streams.
        captured: whether a graph does it.
    """

    buffer: Tensor
    width: int
    event: Any
    captured: bool


_coming: dict[Any, list[_Staged]] = {}
"""By the stream that attends; of each of them one thread launches."""

_MOST = 4
"""Layers that are staged and not joined: two in a sequence of layers, more are of failed steps."""


class _Step(threading.local):
    has_cold = True


_step = _Step()


@contextmanager
def step_over(rows: Sequence[Tensor]) -> Iterator[None]:
    """What is launched inside is one step over the caches of these rows.

    Args:
        rows: int32 ``[MAX_LAYERS, B]`` each.
    """
    before = _step.has_cold
    # A graph that is captured by hand is replayed wherever the blocks are by then.
    _step.has_cold = any(is_capturing(each.device) or _has_cold(each) for each in rows)
    try:
        yield
    finally:
        _step.has_cold = before


def _has_cold(rows: Tensor) -> bool:
    batch = directory.batch_at(rows)
    return batch is None or batch.cold_bytes > 0


def is_wanted() -> bool:
    """Whether the step being launched, or captured, has cold blocks to copy."""
    return _step.has_cold


@functools.cache
def _side(device: torch.device, main: int) -> Any:
    """A stream beside the one with this handle.

    Each has its own, for a stream that is being captured must not get the work of others; streams
    of high priority come from a pool that is used for little else.
    """
    return torch.cuda.Stream(device, priority=-1)


def buffer_bytes(size: Any) -> Any:
    """Bytes of the buffer for ``size`` sequences."""
    return COPIES + size * WIDTH * 8


def start(
    buffer: Tensor,
    rows: Tensor,
    layer: int,
    block_size: int,
    block_bytes: int,
    window: int,
    chunk: int,
) -> None:
    """Begin to stage a layer; nothing happens where there is no cold block, or no room.

    Args:
        buffer: uint8 ``[buffer_bytes(B)]``, which names the copies later, in :func:`join`.
        rows: int32 ``[MAX_LAYERS, B]``.
        layer: that attends next.
        block_size: tokens of its blocks.
        block_bytes: bytes of one.
        window: tokens that the step's token sees, itself among them; 0 = all.
        chunk: of positions that it sees; 0 = all.
    """
    import triton_ops

    device = rows.device
    tables = tables_for(device)
    size, width = rows.shape[1], tables.max_blocks
    if not size or width > WIDTH or COPIES // block_bytes < size:
        return
    if not is_wanted():
        return
    capturing = is_capturing(device)
    copies, table = buffer[:COPIES], _table(buffer, size, width)
    stage = functools.partial(
        triton_ops.stage,
        rows[layer],
        tables.base,
        tables.length,
        copies,
        table,
        block_size=block_size,
        block_bytes=block_bytes,
        window=window,
        chunk=chunk,
    )
    waiting = _coming.setdefault(_key(device), [])
    while len(waiting) >= _MOST:
        _wait(waiting.pop(0))
    event = None
    if device.type == "cuda":
        main = torch.cuda.current_stream(device)
        stream = _side(device, main.cuda_stream)
        stream.wait_stream(main)
        with torch.cuda.stream(stream):
            stage()
            event = stream.record_event()
    else:
        stage()
    waiting.append(_Staged(buffer, width, event, capturing))


def join(buffer: Tensor | None, size: int) -> Tensor | None:
    """Wait for what was begun in a buffer.

    Args:
        buffer: of :func:`start`, or None.
        size: sequences (B).

    Returns:
        Tables of words, int64 ``[B, W]``, for what is launched from here on; None: nothing was
        staged, and blocks are read in place.
    """
    if buffer is None:
        return None
    waiting = _coming.get(_key(buffer.device), [])
    found = next((each for each in waiting if each.buffer.data_ptr() == buffer.data_ptr()), None)
    if found is None:
        return None
    waiting.remove(found)
    _wait(found)
    return _table(buffer, size, found.width)


def _key(device: torch.device) -> Any:
    return device, torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


def _wait(found: _Staged) -> None:
    if found.event is not None and (not found.captured or is_capturing(found.buffer.device)):
        torch.cuda.current_stream(found.buffer.device).wait_event(found.event)


def _table(buffer: Tensor, size: int, width: int) -> Tensor:
    return buffer[COPIES : COPIES + size * width * 8].view(torch.int64).view(size, width)
