# SPDX-License-Identifier: Apache-2.0
"""The copy engines: blocks move beside compute, by a worker thread on a CPU, a stream on a GPU.

A copy never changes what a reader sees: the manager publishes the new address only after the copy
is done, between two steps of the sequences that own the block.
"""

from __future__ import annotations

import queue
import threading
import weakref
from typing import Any, Literal, Protocol

import numpy as np
import torch

from kvpass.runtime.pool import Slot

QUEUE_LIMIT = 512
"""Copies in flight at most; more are tried again after the next step."""


class Move:
    """One copy of a block from ``source`` to ``target``.

    Attributes:
        kind: ``store`` (hot to cold) or ``load`` (cold to hot).
        block: the block whose bytes move.
        after: CUDA events that must have passed before the copy starts.
        error: what went wrong in the copy, or None.
    """

    __slots__ = ("_done", "after", "block", "error", "event", "kind", "source", "target")

    def __init__(
        self,
        kind: Literal["store", "load"],
        block: Any,
        source: Slot,
        target: Slot,
        after: list[Any],
    ) -> None:
        self.kind = kind
        self.block = block
        self.source = source
        self.target = target
        self.after = after
        self.error: BaseException | None = None
        self.event: Any = None
        self._done = threading.Event()

    def done(self) -> bool:
        """Whether the bytes have arrived (or the copy failed)."""
        return self._done.is_set() if self.event is None else bool(self.event.query())

    def wait(self) -> None:
        """Block the caller until the copy is done."""
        if self.event is None:
            self._done.wait()
        else:
            self.event.synchronize()

    def run(self) -> None:
        """Copy now, on the calling thread."""
        try:
            # One thread only: a second team of OpenMP threads would stall the one that computes.
            np.copyto(self.target.raw.numpy(), self.source.raw.numpy())
        except BaseException as error:  # handed to the manager, which keeps the old copy
            self.error = error
        finally:
            self._done.set()


class Copier(Protocol):
    """Runs moves in order, beside compute."""

    def submit(self, move: Move) -> bool:
        """Queue a move; False when too many are in flight."""
        ...

    def close(self) -> None:
        """Finish what is queued and stop."""
        ...


class ThreadCopier:
    """A single worker thread behind a bounded queue; copies release the interpreter lock."""

    def __init__(self) -> None:
        # Bounded by submit, not here: the end marker, put by a finalizer, must never wait.
        self._queue: queue.SimpleQueue[Move | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._finalizer = weakref.finalize(self, self._queue.put, None)

    def submit(self, move: Move) -> bool:
        """See :class:`Copier`."""
        if self._queue.qsize() >= QUEUE_LIMIT:
            return False
        if self._thread is None:
            self._thread = threading.Thread(
                target=_work, args=(self._queue,), name="kvpass-migrate", daemon=True
            )
            self._thread.start()
        self._queue.put(move)
        return True

    def close(self) -> None:
        """See :class:`Copier`."""
        self._finalizer()
        if self._thread is not None:
            self._thread.join()


def _work(moves: queue.SimpleQueue[Move | None]) -> None:
    while (move := moves.get()) is not None:
        move.run()
        del move  # an idle worker must not keep a block alive


class StreamCopier:
    """A side stream of a GPU; ordered against readers and writers by events only."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)
        self._in_flight: list[Move] = []

    def submit(self, move: Move) -> bool:
        """See :class:`Copier`."""
        self._in_flight = [m for m in self._in_flight if not m.done()]
        if len(self._in_flight) >= QUEUE_LIMIT:
            return False
        for event in (*move.after, *move.source.fences, *move.target.fences):
            self.stream.wait_event(event)
        with torch.cuda.stream(self.stream):
            move.target.raw.copy_(move.source.raw, non_blocking=True)
        move.event = torch.cuda.Event()
        move.event.record(self.stream)
        move.target.fences = [move.event]
        self._in_flight.append(move)
        return True

    def close(self) -> None:
        """See :class:`Copier`."""
        self.stream.synchronize()
        self._in_flight.clear()


def copier_for(device: torch.device) -> Copier:
    """The copy engine that fits a device."""
    return StreamCopier(device) if device.type == "cuda" else ThreadCopier()
