# SPDX-License-Identifier: Apache-2.0
"""One copy of a block between the tiers, and how it is made on the host."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch

from kvpass.runtime.pool import Slot

Kind = Literal["store", "load"]


class Cancelled(Exception):
    """The copy was called off before it began."""


class _Waiters:
    """Threads that wait for copies: one condition for all, since waiting is rare."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._count = 0

    def __bool__(self) -> bool:
        """Whether anybody waits."""
        return self._count > 0

    def wait(self, done: Callable[[], bool]) -> None:
        """Block the caller until ``done``."""
        with self._condition:
            self._count += 1
            try:
                self._condition.wait_for(done)
            finally:
                self._count -= 1

    def tell(self) -> None:
        """Something is done. Whoever begins to wait after this looks first and sees it."""
        if self._count:
            with self._condition:
                self._condition.notify_all()


waiters = _Waiters()
"""Who waits for any copy of the process."""

# A thread of the parent may have been about to wait, or to tell.
os.register_at_fork(after_in_child=waiters.__init__)  # type: ignore[misc]


class Passed:
    """Whether CUDA events have passed, each asked once: many copies wait for the same few."""

    def __init__(self) -> None:
        # With the event itself, since the id of one that is gone may come back.
        self._answers: dict[int, tuple[bool, Any]] = {}

    def __call__(self, event: Any) -> bool:
        """Ask, unless that was done before."""
        answer = self._answers.get(id(event))
        if answer is None:
            answer = self._answers[id(event)] = bool(event.query()), event
        return answer[0]

    def known(self, event: Any) -> bool:
        """Whether it was asked and had passed."""
        return self._answers.get(id(event), (False, None))[0]


class Timing:
    """How long a piece took on its stream, told when first asked for.

    Args:
        begin, end: CUDA events around it.
        moves: of the piece.
    """

    def __init__(self, begin: Any, end: Any, moves: int) -> None:
        self._events = begin, end
        self._moves = moves

    @cached_property
    def seconds(self) -> float:
        """Seconds for each of its moves."""
        begin, end = self._events
        return float(begin.elapsed_time(end)) / 1e3 / self._moves


class Move:
    """One copy of a block from ``source`` to ``target``.

    Attributes:
        kind: ``store`` (hot to cold) or ``load`` (cold to hot).
        block: the block whose bytes move.
        after: CUDA events that must have passed before the copy starts.
        flow: whose copy it is, for fair shares of the link.
        weight: share of the flow relative to others.
        error: what went wrong in the copy, ``Cancelled``, or None.
    """

    __slots__ = (
        "_cancelled", "_launched", "_seconds", "after", "block", "error", "event", "flow", "kind",
        "source", "target", "timing", "weight",
    )  # fmt: skip

    def __init__(
        self,
        kind: Kind,
        block: Any,
        source: Slot,
        target: Slot,
        after: list[Any],
        flow: Hashable = None,
        weight: float = 1.0,
    ) -> None:
        self.kind: Kind = kind
        self.block = block
        self.source = source
        self.target = target
        self.after = after
        self.flow = flow
        self.weight = weight
        self._cancelled = False
        self.error: BaseException | None = None
        self._seconds = 0.0
        self.timing: Timing | None = None
        self.event: Any = None
        self._launched = False

    @property
    def size(self) -> int:
        """Bytes that are copied."""
        return self.source.arena.slot_bytes

    @property
    def seconds(self) -> float:
        """How long the copy took once it is done, without its wait: its part of a piece."""
        if self.timing is None:
            return self._seconds
        return self.timing.seconds

    @property
    def launched(self) -> bool:
        """Whether the engine has taken it up: its event, if any, follows the copy; or it failed."""
        return self._launched

    def done(self) -> bool:
        """Whether the bytes have arrived (or the copy failed)."""
        return self._launched and (self.event is None or bool(self.event.query()))

    def wait(self) -> None:
        """Block the caller until the copy is done."""
        if not self._launched:
            waiters.wait(lambda: self._launched)
        if self.event is not None:
            self.event.synchronize()

    def cancel(self) -> None:
        """Call the copy off unless it has begun; it is done soon either way."""
        self._cancelled = True

    @property
    def called_off(self) -> bool:
        """Whether somebody asked not to make it."""
        return self._cancelled

    @property
    def cancelled(self) -> bool:
        """Whether it was called off in time: no byte was copied."""
        return isinstance(self.error, Cancelled)

    @property
    def place(self) -> tuple[int, int, int, int]:
        """Where it leads from and to: slabs, and slots in them."""
        source, target = self.source, self.target
        return id(source.slab), id(target.slab), source.index, target.index

    @property
    def waits(self) -> tuple[Any, ...]:
        """CUDA events that the copy has to wait for."""
        return *self.after, *self.source.fences, *self.target.fences

    def ready(self, passed: Passed) -> bool:
        """Nothing that the copy has to wait for is still running, as far as was asked before."""
        # A loop, not all(...): this runs for every copy.
        for event in self.waits:  # noqa: SIM110
            if not passed(event):
                return False
        return True

    def finish(self, event: Any = None, error: BaseException | None = None) -> None:
        """Called by the engine: the copy is launched (``event`` follows it), done, or failed."""
        self.event = event
        self.error = error
        self._launched = True
        waiters.tell()

    def run(self) -> None:
        """Copy now, on the calling thread, unless it was cancelled."""
        if self._cancelled:
            self.finish(error=Cancelled())
        else:
            copy_on_host([self])


def runs_of(moves: Sequence[Move]) -> list[list[Move]]:
    """Split moves into those that one copy can make: neighbours in both tiers."""
    runs: list[list[Move]] = []
    after = None
    for move in moves:
        one, other, source, target = move.place
        if move.place == after:
            runs[-1].append(move)
        else:
            runs.append([move])
        after = one, other, source + 1, target + 1
    return runs


def range_of(slots: list[Slot]) -> torch.Tensor:
    """The bytes of slots that follow each other in one slab."""
    if len(slots) == 1:
        return slots[0].raw
    size = slots[0].arena.slot_bytes
    return slots[0].slab.raw[slots[0].index * size : (slots[-1].index + 1) * size]


def copy_on_host(piece: list[Move]) -> None:
    """Copy neighbours in both tiers now, on the calling thread, and finish their moves."""
    begin = time.perf_counter()
    error: BaseException | None = None
    try:
        # One thread only: a second team of OpenMP threads would stall the one that computes.
        np.copyto(
            range_of([move.target for move in piece]).numpy(),
            range_of([move.source for move in piece]).numpy(),
        )
    except BaseException as failure:  # handed to the manager, which keeps the old copies
        error = failure
    seconds = (time.perf_counter() - begin) / len(piece)
    for move in piece:
        move._seconds = seconds
        move.finish(error=error)
