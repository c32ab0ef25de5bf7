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
    """A stream, and what is launched on it. Used by one thread.

    Attributes:
        arrived: moves whose bytes have arrived, since the beginning.
    """

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)
        self.arrived = 0
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

    def collect(self) -> None:
        """Account for the pieces that have arrived."""
        while self._launched and self._launched[0][1].query():
            self._account()

    def _account(self) -> None:
        self.arrived += len(self._launched.pop(0)[0])

    def make_room(self, size: int) -> None:
        """Wait until ``size`` more bytes may be launched."""
        self.collect()
        while self._launched and (
            size + sum(m.size for piece, *_ in self._launched for m in piece) > LAUNCHED_BYTES
        ):
            self._launched[0][1].synchronize()
            self._account()

    def abandon(self) -> None:
        """Ask no more about what was launched: it counts as arrived."""
        while self._launched:
            self._account()

    def drain(self) -> None:
        """Wait for everything launched."""
        if self._launched:
            self._launched[-1][1].synchronize()
        self.collect()
