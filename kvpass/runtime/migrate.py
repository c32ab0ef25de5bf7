# SPDX-License-Identifier: Apache-2.0
"""The copy engine: one consumer moves blocks beside compute, on a CPU itself, on a GPU by streams.

Each direction of the link is shared between caches by weight (see ``queueing``). A copy never
changes what a reader sees: the manager publishes the new address only after the copy is done,
between two steps of the sequences that own the block. Copies are launched in pieces of many
blocks, and neighbours in both tiers as one copy, because small ones are bound by their launch
(8 us) and not by the link.
"""

from __future__ import annotations

import queue
import threading
import weakref
from contextlib import suppress
from typing import Any, Protocol

import torch

from kvpass.runtime.capture import ignore_captures
from kvpass.runtime.exits import stop_at_exit
from kvpass.runtime.move import Cancelled, Kind, Move, Timing, copy_on_host, range_of, runs_of
from kvpass.runtime.queueing import FairQueue

QUEUE_LIMIT = 512
"""Copies in flight at most; more are tried again after the next step."""

PIECE_BYTES = 16 << 20
"""Copies of one cache are launched together up to this size: more would hold up other caches."""

LAUNCHED_BYTES = 256 << 20
"""Bytes handed to a stream ahead of the link, 5 ms of it: as long as the interpreter may keep the
consumer waiting for its lock. They cannot be overtaken."""


class Copier(Protocol):
    """Runs moves beside compute."""

    def submit(self, move: Move) -> bool:
        """Queue a move; False when too many are in flight."""
        ...

    def depth(self) -> int:
        """Moves that are queued or being copied."""
        ...

    def close(self) -> None:
        """Finish what is queued and stop."""
        ...


class ThreadCopier:
    """A bounded queue in front of one consumer thread; copies release the interpreter lock."""

    def __init__(self, device: torch.device | None = None) -> None:
        # Bounded by submit, not here: the end marker, put by a finalizer, must never wait.
        inbox: queue.SimpleQueue[Move | None] = queue.SimpleQueue()
        self._consumer = Consumer(inbox, device)
        self._submitted = 0
        self._thread: threading.Thread | None = None
        self._finalizer = weakref.finalize(self, inbox.put, None)

    def submit(self, move: Move) -> bool:
        """See :class:`Copier`."""
        if self.depth() >= QUEUE_LIMIT:
            return False
        if self._thread is None:
            thread = threading.Thread(
                target=self._consumer.work, name="kvpass-migrate", daemon=True
            )
            try:
                thread.start()
            except RuntimeError:  # the process may have no more threads; tried again later
                return False
            stop_at_exit(thread, self._consumer.stop)
            self._thread = thread
        self._submitted += 1
        self._consumer.inbox.put(move)
        return True

    def depth(self) -> int:
        """See :class:`Copier`."""
        return self._submitted - self._consumer.finished

    def close(self) -> None:
        """See :class:`Copier`."""
        self._finalizer()
        if self._thread is not None:
            self._thread.join()


class Consumer:
    """Takes moves from the inbox, in fair order, and copies them. Used by one thread.

    Attributes:
        inbox: moves, then None as the end.
        finished: moves whose bytes have arrived, that failed or were cancelled.
    """

    def __init__(self, inbox: queue.SimpleQueue[Move | None], device: torch.device | None) -> None:
        self.inbox = inbox
        self.finished = 0
        self._device = device
        self._queues: dict[Kind, FairQueue[Move]] = {"store": FairQueue(), "load": FairQueue()}
        self._places: dict[tuple[int, int, int, int], Move] = {}
        self._lanes = {kind: Lane(device) for kind in self._queues} if device is not None else {}
        self._turn: Kind = "load"
        self._piece: list[Move] = []
        self._ended = False
        self._stopped = False

    def stop(self) -> None:
        """End after the piece in hand, whatever waits. From any thread."""
        self._stopped = True
        self.inbox.put(None)

    def work(self) -> None:
        """Copy until the end marker, then what is left."""
        try:
            if self._device is not None:
                ignore_captures(self._device)
            while self._serve():
                pass
        except BaseException as error:  # a device that is lost: whoever waits must learn of it
            self._refuse(error)

    def _serve(self) -> bool:
        """Receive, then copy one piece; False at the end."""
        self._receive()
        if self._stopped:
            return False
        self._piece = self._next_piece()
        if self._piece:
            self._copy(self._piece)
            # An idle consumer must not keep a block alive.
            self._piece = []
        elif self._ended:
            for lane in self._lanes.values():
                self.finished += lane.drain()
            return False
        return True

    def _refuse(self, error: BaseException) -> None:
        """Let every move fail, those that come later too."""
        left = [move for move in self._piece if not move.launched]
        left += [move for waiting in self._queues.values() for move in waiting.clear()]
        self._places.clear()
        self._piece = []
        self.finished += sum(lane.abandon() for lane in self._lanes.values())
        while True:
            for move in left:
                move.finish(error=error)
            self.finished += len(left)
            left.clear()
            move_or_end = None if self._ended else self.inbox.get()
            if move_or_end is None:
                return
            left.append(move_or_end)
            del move_or_end

    def _receive(self) -> None:
        """Fetch what is in the inbox; wait for something when there is nothing to do."""
        for lane in self._lanes.values():
            self.finished += lane.collect()
        idle = not self._ended and not any(len(waiting) for waiting in self._queues.values())
        if idle:
            for lane in self._lanes.values():
                self.finished += lane.drain()
        while idle or not self.inbox.empty():
            move = self.inbox.get()
            idle = False
            if move is None:
                self._ended = True
                return
            self._queues[move.kind].push(move, move.flow, move.size, move.weight)
            self._places[move.place] = move

    def _next_piece(self) -> list[Move]:
        """Moves of one flow, neighbours in both tiers together; the directions take turns."""
        last = self._turn
        self._turn = "store" if last == "load" else "load"
        for kind in (self._turn, last):
            waiting = self._queues[kind]
            due = waiting.heads()
            if due:
                # One that must wait for a kernel would hold up those behind it on the stream.
                ready = (move for head in due for move in waiting.flow(head.flow) if move.ready)
                return self._piece_of(next(ready, due[0]), waiting)
        return []

    def _piece_of(self, head: Move, waiting: FairQueue[Move]) -> list[Move]:
        """Take ``head``, its neighbours, and more of its flow with theirs, up to a full piece."""
        piece: list[Move] = []
        left = PIECE_BYTES
        for move in (head, *waiting.flow(head.flow)):
            if move.place not in self._places or not (move is head or move.ready):
                continue
            run = self._neighbours(move, max(1, left // move.size))
            for each in run:
                del self._places[each.place]
            piece += run
            left -= sum(each.size for each in run)
            if left < head.size:
                break
        waiting.take(head.flow, piece)
        return piece

    def _neighbours(self, head: Move, limit: int) -> list[Move]:
        """The longest run around ``head`` of its flow's moves whose slots adjoin in both tiers."""
        one, other, source, target = head.place

        def run(step: int, most: int) -> list[Move]:
            found: list[Move] = []
            for i in range(1, most + 1):
                move = self._places.get((one, other, source + i * step, target + i * step))
                if move is None or move.flow != head.flow or not move.ready:
                    break
                found.append(move)
            return found

        before = run(-1, limit - 1)
        return [*reversed(before), head, *run(1, limit - 1 - len(before))]

    def _copy(self, piece: list[Move]) -> None:
        begun = [move for move in piece if not move._cancelled]
        for move in piece:
            if move._cancelled:
                move.finish(error=Cancelled())
        self.finished += len(piece) - len(begun)
        if not self._lanes:
            for run in runs_of(begun):
                copy_on_host(run)
            self.finished += len(begun)
        elif begun:
            lane = self._lanes[begun[0].kind]
            self.finished += lane.make_room(sum(move.size for move in begun))
            if not lane.launch(begun):
                self.finished += len(begun)


class Lane:
    """One direction of the link: a stream, and what is launched on it."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)
        self._launched: list[tuple[list[Move], Any]] = []

    def launch(self, piece: list[Move]) -> bool:
        """Copy on the stream, after the events that the moves wait for; False when that failed.

        Events and their bookkeeping cost 0.1 ms, five blocks of 1 MiB on the link, so a piece has
        them once.
        """
        waited = {id(e): e for m in piece for e in (*m.after, *m.source.fences, *m.target.fences)}
        begin = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        try:
            for event in waited.values():
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


def copier_for(device: torch.device) -> Copier:
    """The copy engine that fits a device."""
    return ThreadCopier(device if device.type == "cuda" else None)
