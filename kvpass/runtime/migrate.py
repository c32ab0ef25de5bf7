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
from collections.abc import Sequence
from typing import Protocol

import torch

from kvpass.runtime.capture import ignore_captures
from kvpass.runtime.exits import stop_at_exit
from kvpass.runtime.lane import Lane
from kvpass.runtime.move import (
    Cancelled,
    Kind,
    Move,
    Passed,
    copy_on_host,
    runs_of,
    waiters,
)
from kvpass.runtime.pacing import Pacer
from kvpass.runtime.queueing import FairQueue

QUEUE_LIMIT = 512
"""Copies in flight at most; more are tried again after the next step."""

PIECE_BYTES = 16 << 20
"""Copies of one cache are launched together up to this size: more would hold up other caches."""

LONE_PIECE_BYTES = 64 << 20
"""The same while no other cache has copies waiting: fewer pieces keep the interpreter free."""

MAX_HELD = 2e-3
"""Seconds after which copies that have had their share of the link are looked at again."""


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
    """A bounded queue in front of one consumer thread; copies release the interpreter lock.

    Args:
        device: a GPU whose streams copy, or None: the thread copies itself.
        pacer: keeps copies to the device to their share of the link; None: they take all of it.
    """

    def __init__(self, device: torch.device | None = None, pacer: Pacer | None = None) -> None:
        # Bounded by submit, not here: the end marker, put by a finalizer, must never wait.
        inbox: queue.SimpleQueue[Move | None] = queue.SimpleQueue()
        self._consumer = Consumer(inbox, device, pacer)
        self._submitted = 0
        self._thread: threading.Thread | None = None
        self._finalizer = weakref.finalize(self, inbox.put, None)

    def submit(self, move: Move) -> bool:
        """See :class:`Copier`."""
        if self._consumer.stopped or self.depth() >= QUEUE_LIMIT:
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

    Args:
        inbox, device, pacer: see :class:`ThreadCopier`.

    Attributes:
        inbox: moves, then None as the end.
    """

    def __init__(
        self,
        inbox: queue.SimpleQueue[Move | None],
        device: torch.device | None,
        pacer: Pacer | None = None,
    ) -> None:
        self.inbox = inbox
        self._finished = 0
        self._device = device
        self._queues: dict[Kind, FairQueue[Move]] = {"store": FairQueue(), "load": FairQueue()}
        self._places: dict[tuple[int, int, int, int], Move] = {}
        self._lanes = {kind: Lane(device) for kind in self._queues} if device is not None else {}
        self._pacer = pacer
        self._turn: Kind = "load"
        self._piece: list[Move] = []
        self._passed = Passed()
        self._held = 0.0  # seconds for which all that waits has to
        self._ended = False
        self._stopped = False

    @property
    def finished(self) -> int:
        """Moves whose bytes have arrived, that failed or were cancelled."""
        return self._finished + sum(lane.arrived for lane in self._lanes.values())

    @property
    def stopped(self) -> bool:
        """Whether it takes no more moves."""
        return self._stopped

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
            if self._stopped:
                self._call_off()
        except BaseException as error:  # a device that is lost: whoever waits must learn of it
            self._refuse(error)

    def _serve(self) -> bool:
        """Receive, then copy one piece; False at the end."""
        self._receive()
        if self._stopped:
            return False
        if self._pacer is not None:
            self._pacer.give_way(urgent=lambda: bool(waiters) or self._stopped)
        self._piece = self._next_piece()
        if self._piece:
            self._copy(self._piece)
            # An idle consumer must not keep a block alive.
            self._piece = []
        elif self._ended:
            for lane in self._lanes.values():
                lane.drain()
            return False
        return True

    def _call_off(self) -> None:
        """Nothing more is copied: whoever waits for what is left must not wait for ever."""
        left = [move for waiting in self._queues.values() for move in waiting.clear()]
        self._places.clear()
        while not self.inbox.empty():
            move = self.inbox.get()
            left += [] if move is None else [move]
        for move in left:
            move.finish(error=Cancelled())
        self._finished += len(left)

    def _refuse(self, error: BaseException) -> None:
        """Let every move fail, those that come later too."""
        left = [move for move in self._piece if not move.launched]
        left += [move for waiting in self._queues.values() for move in waiting.clear()]
        self._places.clear()
        self._piece = []
        for lane in self._lanes.values():
            lane.abandon()
        while True:
            for move in left:
                move.finish(error=error)
            self._finished += len(left)
            left.clear()
            move_or_end = None if self._ended else self.inbox.get()
            if move_or_end is None:
                return
            left.append(move_or_end)
            del move_or_end

    def _receive(self) -> None:
        """Fetch what is in the inbox; wait for something when there is nothing to do."""
        for lane in self._lanes.values():
            lane.collect()
        idle = not self._ended and not any(len(waiting) for waiting in self._queues.values())
        if idle:
            for lane in self._lanes.values():
                lane.drain()
        while idle or self._held or not self.inbox.empty():
            try:
                move = self.inbox.get(timeout=self._held or None)
            except queue.Empty:
                return
            idle, self._held = False, 0.0
            if move is None:
                self._ended = True
                return
            self._queues[move.kind].push(move, move.flow, move.size, move.weight)
            self._places[move.place] = move

    def _next_piece(self) -> list[Move]:
        """Moves of one flow, neighbours in both tiers together; the directions take turns."""
        last = self._turn
        self._turn = "store" if last == "load" else "load"
        self._passed = Passed()
        self._held = 0.0
        for kind in (self._turn, last):
            waiting = self._queues[kind]
            due = waiting.heads()
            if due and not self._too_early(kind, due):
                self._held = 0.0
                # One that must wait for a kernel would hold up those behind it on the stream.
                ready = (
                    move
                    for head in due
                    for move in waiting.flow(head.flow)
                    if move.ready(self._passed)
                )
                return self._piece_of(
                    next(ready, due[0]),
                    waiting,
                    PIECE_BYTES if len(due) > 1 else LONE_PIECE_BYTES,
                )
        return []

    def _too_early(self, kind: Kind, due: Sequence[Move]) -> bool:
        """Whether copies of a kind have had their share of the link for now."""
        if kind == "store" or self._pacer is None or self._ended or waiters:
            return False
        self._held = min(self._pacer.delay(sum(head.weight for head in due)), MAX_HELD)
        return self._held > 0

    def _piece_of(self, head: Move, waiting: FairQueue[Move], left: int) -> list[Move]:
        """Take ``head``, its neighbours, and more of its flow with theirs, up to ``left`` bytes."""
        piece: list[Move] = []
        for move in (head, *waiting.flow(head.flow)):
            if move.place not in self._places or not (move is head or move.ready(self._passed)):
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
                if move is None or move.flow != head.flow or not move.ready(self._passed):
                    break
                found.append(move)
            return found

        before = run(-1, limit - 1)
        return [*reversed(before), head, *run(1, limit - 1 - len(before))]

    def _copy(self, piece: list[Move]) -> None:
        begun: list[Move] = []
        for move in piece:
            # Asked once: whoever calls it off later finds it made.
            if move.called_off:
                move.finish(error=Cancelled())
                self._finished += 1
            else:
                begun.append(move)
        if not self._lanes:
            for run in runs_of(begun):
                copy_on_host(run)
                self._finished += len(run)
        elif begun:
            lane, size = self._lanes[begun[0].kind], sum(move.size for move in begun)
            lane.make_room(size)
            if self._pacer is not None and begun[0].kind == "load":
                self._pacer.charge(size)
            if not lane.launch(begun, self._passed):
                self._finished += len(begun)


def copier_for(device: torch.device, pacer: Pacer) -> Copier:
    """The copy engine that fits a device; the memory of a CPU has no link to share."""
    return ThreadCopier(device, pacer) if device.type == "cuda" else ThreadCopier()
