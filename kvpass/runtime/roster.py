# SPDX-License-Identifier: Apache-2.0
"""The live managers of the process, each known by a number that is never used twice."""

from __future__ import annotations

import itertools
import weakref
from typing import TYPE_CHECKING

from kvpass.runtime.locks import fork_safe_lock

if TYPE_CHECKING:
    from kvpass.runtime.manager import Manager

_numbers = itertools.count(1)
_live: weakref.WeakValueDictionary[int, Manager] = weakref.WeakValueDictionary()
_lock = fork_safe_lock()


def enroll(manager: Manager) -> int:
    """Give a manager its number; it is forgotten when the manager dies."""
    number = next(_numbers)
    with _lock:
        _live[number] = manager
    return number


def managers() -> list[Manager]:
    """The live managers, oldest first; without those that belong to a parent process."""
    with _lock:
        live = sorted(_live.items())
    return [manager for _, manager in live if manager.usable]
