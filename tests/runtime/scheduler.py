# SPDX-License-Identifier: Apache-2.0
"""A copy engine whose copies run, arrive, fail or stay in flight as a test says."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from kvpass.runtime.manager import Manager
from kvpass.runtime.move import Move


class ManualCopier:
    """A :class:`kvpass.runtime.migrate.Copier` without a thread.

    Args:
        limit: moves in flight at most.

    Attributes:
        waiting: moves that were submitted, oldest first.
        failures: of the next copies, how many fail.
    """

    def __init__(self, limit: int = 512) -> None:
        self.limit = limit
        self.waiting: list[Move] = []
        self.failures = 0
        self._copied: list[Move] = []

    def submit(self, move: Move) -> bool:
        if self.depth() >= self.limit:
            return False
        self.waiting.append(move)
        return True

    def depth(self) -> int:
        return len(self.waiting) + len(self._copied)

    def close(self) -> None:
        while self.depth():
            self.complete(0)

    def copy(self, number: int) -> None:
        """Copy the bytes of a waiting move; it does not count as done yet."""
        if self.waiting:
            move = self.waiting[number % len(self.waiting)]
            move.target.raw.copy_(move.source.raw)
            self.waiting.remove(move)
            self._copied.append(move)

    def complete(self, number: int) -> None:
        """Let a move arrive, or fail, its bytes copied before or not."""
        moves = [*self._copied, *self.waiting]
        if moves:
            self._end(moves[number % len(moves)])

    def _end(self, move: Move) -> None:
        copied = move in self._copied
        (self._copied if copied else self.waiting).remove(move)
        if self.failures:
            self.failures -= 1
            move.target.raw.fill_(0x7B)  # half of a copy is no copy
            move.finish(error=OSError("bus error"))
        elif copied:
            move.finish()
        else:
            move.run()

    def wait_for(self, move: Move) -> None:
        """What a caller that waits for a move sees: it arrives, or fails, now."""
        if move in self.waiting or move in self._copied:
            self._end(move)


@contextmanager
def scheduled(manager: Manager, copier: ManualCopier) -> Iterator[ManualCopier]:
    """Give a manager a manual copy engine; whoever waits for one of its moves gets it now."""
    wait = Move.wait

    def wait_now(move: Move) -> None:
        copier.wait_for(move)
        wait(move)

    with mock.patch.object(Move, "wait", wait_now):
        manager.mover.copier = copier
        yield copier
