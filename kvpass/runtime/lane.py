# SPDX-License-Identifier: Apache-2.0
"""One direction of the link between a GPU and its host."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch

from kvpass.runtime.move import Move, Passed, Timing, range_of, runs_of

LAUNCHED_BYTES = 256 << 20
"""Bytes handed to a stream ahead of the link, 5 ms of it: as long as the interpreter may keep the
consumer waiting for its lock. They cannot be overtaken."""


class Lane:
    """A stream, and what is launched on it. Used by one thread."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)
        self._launched: list[tuple[Sequence[Move], Any]] = []

    def launch(self, piece: Sequence[Move], passed: Passed) -> bool:
        """Copy on the stream, after the events that the moves wait for; False when that failed.

        Events and their bookkeeping cost 0.1 ms, five blocks of 1 MiB on the link, so a piece has
        them once, and waits for none that is known to have passed.
        """
        waited = {id(event): event for move in piece for event in move.waits}
        begin = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        try:
            for event in waited.values():
                if not passed.known(event):
                    self.stream.wait_event(event)
            begin.record(self.stream)
            with torch.cuda.stream(self.stream):
                for run in runs_of(piece):
                    range_of([m.target for m in run]).copy_(
                        range_of([m.source for m in run]), non_blocking=True
                    )
            end.record(self.stream)
        except BaseException as error:  # handed to the manager, which keeps the old copies
            # The stream may hold part of it: no slot may be reused under a copy. Where that fails
            # too, the device is lost and no stream writes any more.
            with suppress(Exception):
                self.stream.synchronize()
            for move in piece:
                move.finish(error=error)
            return False
        timing = Timing(begin, end, len(piece))
        for move in piece:
            move.target.fences = [end]
            move.timing = timing
            move.finish(end)
        self._launched.append((piece, end))
        return True

    def collect(self) -> int:
        """Account for the pieces that have arrived; returns the number of their moves."""
        arrived = 0
        while self._launched and self._launched[0][1].query():
            arrived += len(self._launched.pop(0)[0])
        return arrived

    def make_room(self, size: int) -> int:
        """Wait until ``size`` more bytes may be launched; returns the moves that arrived."""
        arrived = self.collect()
        while self._launched and (
            size + sum(m.size for piece, *_ in self._launched for m in piece) > LAUNCHED_BYTES
        ):
            self._launched[0][1].synchronize()
            arrived += self.collect()
        return arrived

    def abandon(self) -> int:
        """Ask no more about what was launched; returns the number of its moves."""
        count = sum(len(piece) for piece, _ in self._launched)
        self._launched.clear()
        return count

    def drain(self) -> int:
        """Wait for everything launched; returns the moves that arrived."""
        if self._launched:
            self._launched[-1][1].synchronize()
        return self.collect()
