# SPDX-License-Identifier: Apache-2.0
"""What is known of all blocks of a manager: a struct of arrays, one column a property.

A block is a row of these arrays, known by its id, so that a decision about thousands of blocks is a
few operations on arrays; only blocks that really move are touched as objects. Ids of blocks that
are gone are used again. A block's own attributes read and write its row: there is no second copy.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvpass.runtime import policy

if TYPE_CHECKING:
    from kvpass.runtime.batch import Batch, Block

NO_BLOCK = 0
"""Id of no block: what tables of ids hold where there is none."""

FIRST_CAPACITY = 256
"""Rows to begin with: a table of them is 16 KiB."""

COLUMNS: dict[str, tuple[Any, Any]] = {
    "frequency": (np.float64, np.nan),
    "rate": (np.float64, np.nan),
    "retention": (np.float64, 0.0),
    "over_share": (np.float64, 0.0),
    "size": (np.int64, 0),
    "index": (np.int32, 0),
    "demoted": (np.int32, policy.NEVER),
    "heat": (np.uint8, 0),
    "protected": (np.bool_, False),
    "resident": (np.bool_, False),
    "full": (np.bool_, False),
    "has_hot": (np.bool_, False),
    "has_cold": (np.bool_, False),
    "moving": (np.bool_, False),
}
"""Name, dtype and value of a new block, of each column of one number a block."""


class Columns:
    """The columns, and who has which row. Needs the manager's lock.

    Args:
        batches: the live batches, whose tables of ids say which blocks there are.
        capacity: rows to begin with, at least 2; they double when they are used up.

    Attributes:
        batches: those given.
        frequency, rate, heat, index, protected, resident, demoted, retention, over_share:
            ``[capacity]``; see :class:`kvpass.runtime.policy.BlockArrays`.
        ages: int32 ``[capacity, K]``, likewise.
        size: bytes of the block's slots.
        full: no more tokens fit.
        has_hot, has_cold: there is a copy in that tier.
        moving: a copy between the tiers is in flight.
    """

    frequency: NDArray[np.float64]
    rate: NDArray[np.float64]
    retention: NDArray[np.float64]
    over_share: NDArray[np.float64]
    size: NDArray[np.int64]
    index: NDArray[np.int32]
    demoted: NDArray[np.int32]
    heat: NDArray[np.uint8]
    protected: NDArray[np.bool_]
    resident: NDArray[np.bool_]
    full: NDArray[np.bool_]
    has_hot: NDArray[np.bool_]
    has_cold: NDArray[np.bool_]
    moving: NDArray[np.bool_]

    def __init__(self, batches: Sequence[Batch] = (), capacity: int = FIRST_CAPACITY) -> None:
        self.batches = batches
        for name, (dtype, value) in COLUMNS.items():
            setattr(self, name, np.full(capacity, value, dtype))
        self.ages: NDArray[np.int32] = np.full((capacity, policy.K), policy.NEVER, np.int32)
        self._blocks: list[Block | None] = [None] * capacity
        self._free = list(range(capacity - 1, NO_BLOCK, -1))

    @property
    def capacity(self) -> int:
        """Rows, the one of no block included."""
        return len(self._blocks)

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays, and of who has which row; ids in tables are 4 bytes each more."""
        numbers = sum(getattr(self, name).nbytes for name in COLUMNS)
        return numbers + self.ages.nbytes + sys.getsizeof(self._blocks) + sys.getsizeof(self._free)

    @property
    def live(self) -> int:
        """Rows in use: blocks of sequences, and those whose last copy is still in flight."""
        return self.capacity - 1 - len(self._free)

    def enlist(self, block: Block) -> int:
        """A row for a new block, of which nothing is known; returns its id."""
        if not self._free:
            self._grow()
        number = self._free.pop()
        for name, (_, value) in COLUMNS.items():
            getattr(self, name)[number] = value
        self.ages[number] = policy.NEVER
        self._blocks[number] = block
        return number

    def delist(self, number: int) -> None:
        """Take the row of a block that is gone back."""
        assert self._blocks[number] is not None, f"id {number} names no block"
        self._blocks[number] = None
        self._free.append(number)

    def _grow(self) -> None:
        before = self.capacity
        for name, (dtype, value) in COLUMNS.items():
            wider = np.full(2 * before, value, dtype)
            wider[:before] = getattr(self, name)
            setattr(self, name, wider)
        ages = np.full((2 * before, policy.K), policy.NEVER, np.int32)
        ages[:before] = self.ages
        self.ages = ages
        self._blocks += [None] * before
        self._free = list(range(2 * before - 1, before - 1, -1))

    # -------------------------------------------------------------- which blocks

    def block(self, number: int) -> Block:
        """The block of an id."""
        block = self._blocks[number]
        assert block is not None, f"id {number} names no block"
        return block

    def blocks(self) -> list[Block]:
        """The blocks of all sequences; a walk, for what happens rarely."""
        return [self.block(number) for number in self.owned().tolist()]

    def _named(self, batches: Sequence[Batch]) -> NDArray[np.bool_]:
        named = np.zeros(self.capacity, dtype=bool)
        for batch in batches:
            named[batch.ids.ravel()] = True
        named[NO_BLOCK] = False
        return named

    def owned(self, size: int | None = None) -> NDArray[np.int64]:
        """Ids of the blocks of all sequences, each once, ascending.

        Args:
            size: only those whose slots have this many bytes.
        """
        named = self._named(self.batches)
        if size is not None:
            named &= self.size == size
        return np.flatnonzero(named)

    def distinct(self, ids: NDArray[np.int32]) -> NDArray[np.int64]:
        """The blocks that ids name, each once, ascending."""
        named = np.zeros(self.capacity, dtype=bool)
        named[ids] = True
        named[NO_BLOCK] = False
        return np.flatnonzero(named)

    def cold_bytes(self, ids: NDArray[np.int32]) -> int:
        """Bytes of the blocks that ids name which have no hot copy, named twice counted twice."""
        named = ids[ids != NO_BLOCK]
        return int(self.size[named[~self.has_hot[named]]].sum())

    def sequences(self, ids: NDArray[Any]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Whose each block is, and the weights of all sequences in order of their batches.

        A block that several sequences share counts as the last one's.

        Args:
            ids: N blocks of live sequences.

        Returns:
            int64 ``[N]`` index of the sequence; float64 ``[S]`` weights.
        """
        whose = np.zeros(self.capacity, dtype=np.int64)
        weights: list[float] = []
        for batch in self.batches:
            numbers = len(weights) + np.arange(batch.size)[None, :, None]
            whose[batch.ids] = np.broadcast_to(numbers, batch.ids.shape)
            weights += [batch.service.weight] * batch.size
        return whose[ids], np.array(weights, dtype=np.float64)

    def note_shares(self, size: int, shares: NDArray[np.float64]) -> None:
        """Keep what each sequence is due of the hot arena, for metrics.

        Args:
            size: bytes of a slot.
            shares: ``[S]`` slots due, in order of the batches.
        """
        first = 0
        for batch in self.batches:
            batch.shares[size] = shares[first : first + batch.size] * size
            first += batch.size

    # ------------------------------------------------------------ what the policy knows

    def movable(self, ids: NDArray[Any]) -> NDArray[np.bool_]:
        """Which blocks may change place now: written through, and nobody in a step with them."""
        able = (self.full[ids] & self.has_cold[ids]) & ~self.moving[ids]
        active = [batch for batch in self.batches if batch.active is not None]
        if active:
            able &= ~self._named(active)[ids]
        return able

    def arrays(self, ids: NDArray[Any]) -> policy.BlockArrays:
        """The metadata that the policy decides on, of these blocks."""
        return policy.BlockArrays(
            frequency=self.frequency[ids],
            heat=self.heat[ids],
            index=self.index[ids],
            resident=self.resident[ids],
            movable=self.movable(ids),
            rate=self.rate[ids],
            ages=self.ages[ids],
            protected=self.protected[ids],
            retention=self.retention[ids],
            over_share=self.over_share[ids],
            demoted=self.demoted[ids],
        )

    def learn(self, ids: NDArray[Any], known: policy.BlockArrays) -> None:
        """Keep what a window has taught of these blocks."""
        for name in ("frequency", "rate", "heat", "ages", "demoted"):
            getattr(self, name)[ids] = getattr(known, name)
