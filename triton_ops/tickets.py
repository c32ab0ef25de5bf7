# SPDX-License-Identifier: Apache-2.0
"""Tickets: which rows may be appended to by the next append of a captured graph.

A CUDA graph that is replayed runs none of the Python that reserves blocks, so its appends check on
the device that somebody did. A step *arms* its rows with the tokens it reserved; the append takes
the ticket, and refuses to write a second time, or another number of tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from triton_ops import _checks

UNCHECKED = -1
"""In ``due``: appends to this row are not checked, their caller has reserved blocks."""

REFUSED = 1
"""In ``fault``: an append found no ticket for its tokens, and wrote nothing."""

UNUSED = 2
"""In ``fault``: a ticket was not taken when the next one came."""


class Tickets(NamedTuple):
    """Int32 vectors ``[R]``, one value a row.

    Attributes:
        due: tokens that the next append has to have, 0 for none, ``UNCHECKED`` for any.
        arrived: programs of a running append that are done.
        fault: ``REFUSED`` and ``UNUSED``, or-ed together; stays until somebody clears it.
    """

    due: torch.Tensor
    arrived: torch.Tensor
    fault: torch.Tensor

    @classmethod
    def unchecked(cls, rows: int, device: torch.device) -> Tickets:
        """Tickets of rows that are not checked."""
        due = torch.full((rows,), UNCHECKED, dtype=torch.int32, device=device)
        return cls(due, torch.zeros_like(due), torch.zeros_like(due))

    def check(self, device: torch.device) -> None:
        """Check dtypes, sizes, contiguity and device.

        Raises:
            TypeError: a dtype other than int32.
            ValueError: not contiguous vectors of one size on ``device``.
        """
        for name, table in zip(self._fields, self, strict=True):
            _checks.check_table(name, table, torch.int32, device)
            if table.shape != self.due.shape:
                raise ValueError(f"{name} has {len(table)} rows, due has {len(self.due)}")
