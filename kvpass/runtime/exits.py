# SPDX-License-Identifier: Apache-2.0
"""The end of the process: threads that copy stop before the interpreter does.

A daemon thread that the interpreter kills inside a call of CUDA or torch takes the process down
with ``std::terminate``.
"""

from __future__ import annotations

import atexit
import threading
import weakref
from collections.abc import Callable

PATIENCE = 10.0
"""Seconds to wait for a thread: it has a piece of at most 64 MiB in hand."""

_running: weakref.WeakKeyDictionary[threading.Thread, Callable[[], None]] = (
    weakref.WeakKeyDictionary()
)


def stop_at_exit(thread: threading.Thread, stop: Callable[[], None]) -> None:
    """Call ``stop`` when the process ends, and wait for the thread.

    Args:
        thread: a daemon thread.
        stop: tells it to end soon; must not wait.
    """
    if not any(each.is_alive() for each in list(_running)):
        # Anew: what is registered last runs first.
        atexit.unregister(_stop)
        atexit.register(_stop)
    _running[thread] = stop


def _stop() -> None:
    running = list(_running.items())
    for _, stop in running:
        stop()
    for thread, _ in running:
        thread.join(PATIENCE)
