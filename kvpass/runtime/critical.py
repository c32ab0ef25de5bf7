# SPDX-License-Identifier: Apache-2.0
"""Critical sections of a manager: one thread at a time, and not cut in two by Ctrl-C.

``with section.lock, section.whole:`` takes two steps, because only a lock that is written in C is
released for certain when an interrupt comes while it is being taken.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch

from kvpass.runtime.capture import Uncaptured

_noted: list[tuple[int, FrameType | None]] = []
"""Interrupts that came in a critical section of the main thread, the only one that gets them."""


def _note(number: int, frame: FrameType | None) -> None:
    """Keep an interrupt for the end of the section; a second one does not wait."""
    if _noted:
        raise KeyboardInterrupt
    _noted.append((number, frame))


class Whole:
    """A block of code that an interrupt (SIGINT) waits for. Its user holds a lock."""

    def __init__(self, device: torch.device) -> None:
        self._handlers: list[Any] = []
        self._uncaptured = Uncaptured(device)

    def __enter__(self) -> None:
        """Note interrupts from here on, in the outermost section."""
        handler = None
        if threading.current_thread() is threading.main_thread():
            known = signal.getsignal(signal.SIGINT)
            if callable(known) and known is not _note:
                handler = known
                _noted.clear()  # of a section whose end was cut by an interrupt of its own
                signal.signal(signal.SIGINT, _note)
        self._handlers.append(handler)
        self._uncaptured.__enter__()

    def __exit__(self, *_: object) -> None:
        """Do what an interrupt asked for meanwhile: as a rule, raise ``KeyboardInterrupt``."""
        try:
            self._uncaptured.__exit__()
        finally:
            handler: Callable[..., Any] | None = self._handlers.pop()
            if handler is not None:
                # First, so that none is noted that nobody would look at.
                signal.signal(signal.SIGINT, handler)
                noted = _noted[:]
                _noted.clear()
                for number, frame in noted:
                    handler(number, frame)


class Section:
    """What ``with section.lock, section.whole:`` needs; reentrant.

    Attributes:
        lock: held inside.
        whole: keeps interrupts out, and captures of other threads undisturbed.
    """

    def __init__(self, device: torch.device) -> None:
        self.lock = threading.RLock()
        self.whole = Whole(device)

    @property
    def held(self) -> bool:
        """Whether another thread is inside."""
        if self.lock.acquire(blocking=False):
            self.lock.release()
            return False
        return True

    @property
    def mine(self) -> bool:
        """Whether the calling thread is inside."""
        return bool(self.lock._is_owned())  # type: ignore[attr-defined]
