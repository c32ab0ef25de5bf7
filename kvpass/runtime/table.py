# SPDX-License-Identifier: Apache-2.0
"""Row tables: the few device tensors through which every kernel finds every block."""

from __future__ import annotations

from collections import deque

import torch

from kvpass.errors import OutOfMemoryError
from kvpass.runtime.capture import is_capturing
from kvpass.runtime.locks import fork_safe_lock
from triton_ops.tickets import Tickets

MAX_LAYERS = 256
"""Height of every rows tensor, so that compiled graphs see one shape whatever the model."""

MAX_ROWS = 1 << 16
"""Rows a device has; a row is one layer of one sequence."""


class RowTables:
    """Tables of one device, alive as long as the process.

    Attributes:
        base: int64 ``[rows]``, address of the row's words (one 64-bit word a block: its address,
            the encoding in the low 4 bits).
        length: int32 ``[rows]``, tokens stored before the current step.
        heat: int64 ``[rows]``, address of the row's int32 access counters, or 0.
        tickets: of rows whose steps are begun by hand, see :mod:`kvpass.runtime.guard`.
        checked: whether any row ever was, so that new ones may need their tickets cleared.
        max_blocks: words of the longest table so far; bounds workspaces without a device read.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.base = torch.zeros(MAX_ROWS, dtype=torch.int64, device=device)
        self.length = torch.zeros(MAX_ROWS, dtype=torch.int32, device=device)
        self.heat = torch.zeros(MAX_ROWS, dtype=torch.int64, device=device)
        self.tickets = Tickets.unchecked(MAX_ROWS, device)
        self.checked = False
        self.max_blocks = 1
        self._free = list(reversed(range(MAX_ROWS)))
        self._returned: deque[list[int]] = deque()
        self._captured: deque[tuple[torch.Tensor, list[int]]] = deque()
        self._kept: list[torch.Tensor] = []
        self._lock = fork_safe_lock()

    def take(self, count: int) -> list[int]:
        """Reserve rows.

        Raises:
            OutOfMemoryError: more sequences x layers are alive than there are rows.
        """
        with self._lock:
            while self._returned:
                self._free.extend(self._returned.popleft())
            while self._captured and not is_capturing(self.device):
                rows, numbers = self._captured.popleft()
                rows.fill_(-1)
                self._kept.append(rows)
                self._free.extend(numbers)
            if count > len(self._free):
                raise OutOfMemoryError(
                    f"{count} table rows asked for, {len(self._free)} of {MAX_ROWS} left: "
                    "release caches that are no longer used"
                )
            return [self._free.pop() for _ in range(count)]

    def give(self, rows: list[int]) -> None:
        """Return rows; takes no lock, for a finalizer may call it at any time."""
        self._returned.append(rows)

    def give_captured(self, rows: torch.Tensor, numbers: list[int]) -> None:
        """Likewise, of a batch whose rows a graph may have been captured with.

        They are used again when the graph finds -1 in their place, which is device work, and not
        for a finalizer. The tensor is kept, for the graph reads it whenever it is replayed.
        """
        self._captured.append((rows, numbers))


_TABLES: dict[torch.device, RowTables] = {}
_LOCK = fork_safe_lock()


def normalize(device: torch.device | str) -> torch.device:
    """The device with its index filled in, so that ``cuda`` and ``cuda:0`` are one."""
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return device


def tables_for(device: torch.device) -> RowTables:
    """The row tables of a device, made on first use (outside any graph capture)."""
    device = normalize(device)
    table = _TABLES.get(device)
    if table is None:
        with _LOCK, torch.inference_mode(False):
            table = _TABLES.setdefault(device, RowTables(device))
    return table
