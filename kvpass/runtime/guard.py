# SPDX-License-Identifier: Apache-2.0
"""The device's side of steps that are begun by hand: appends that nobody reserved for are refused.

A captured graph that is replayed runs no Python, so a replay outside a step would overwrite the
last token, or write to a block that is another cache's by now. Each step gives the rows of its
batch a ticket in stream order; the append takes it (``triton_ops.append``). What went wrong comes
back to the host without a wait, so it is noticed a step or two late.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from kvpass.errors import CacheStateError
from triton_ops.tickets import REFUSED, UNUSED

if TYPE_CHECKING:
    from kvpass.runtime.batch import Batch

_MESSAGES = {
    REFUSED: "an append found no tokens reserved for it, and wrote nothing: replay a captured "
    "graph once inside each `with cache.begin_step(n):`, with the n that it was captured with",
    UNUSED: "a step that was begun appended nothing: replay the graph, or call the model, inside "
    "`with cache.begin_step(n):`, with this cache; a graph of a cache whose sequences were "
    "selected, reordered or reset has to be captured anew",
}


class StepGuard:
    """Tickets of one batch. Needs the manager's lock.

    Args:
        batch: whose rows are checked from now on.
    """

    def __init__(self, batch: Batch) -> None:
        self._batch = batch
        self._tickets = batch.tables.tickets
        batch.tables.checked = True
        self._faults = 0
        self._rows: dict[tuple[int, ...], torch.Tensor] = {}
        cuda = batch.device.type == "cuda"
        with torch.inference_mode(False):
            self._status = torch.zeros(1, dtype=torch.int32, device=batch.device)
            # Whatever copy came last, what it says still holds: faults stay.
            self._seen = torch.zeros(1, dtype=torch.int32, pin_memory=cuda)

    def arm(self, tokens: int, layers: Sequence[int]) -> None:
        """Let the next append of each of these layers write ``tokens`` tokens."""
        import triton_ops

        triton_ops.arm(self._rows_of(layers), self._tickets, tokens, self._status)
        self._seen.copy_(self._status, non_blocking=True)

    def disarm(self, layers: Sequence[int]) -> None:
        """Take back what was not used."""
        self._tickets.due.index_fill_(0, self._rows_of(layers).to(torch.int64), 0)

    def check(self, *, wait: bool = False) -> None:
        """Raise what is known of appends that went wrong; it stays until the batch is released.

        Args:
            wait: for the device, so that all is known.

        Raises:
            CacheStateError: an append was refused, or a ticket was left.
        """
        self._faults |= int(self._seen[0])
        if wait:
            rows = self._rows_of(range(self._batch.layers)).to(torch.int64)
            left = int((self._tickets.due[rows] > 0).any())
            for fault in self._tickets.fault[rows].unique().tolist():
                self._faults |= fault
            self._faults |= UNUSED * left
        for fault, message in _MESSAGES.items():
            if self._faults & fault:
                raise CacheStateError(f"{message}. What this cache holds is not right: reset() it")

    def _rows_of(self, layers: Sequence[int]) -> torch.Tensor:
        key = tuple(layers)
        rows = self._rows.get(key)
        if rows is None:
            index = self._batch.rows_of(key)
            rows = torch.tensor(index, dtype=torch.int32).to(self._batch.device)
            self._rows[key] = rows
        return rows
