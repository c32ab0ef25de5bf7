# SPDX-License-Identifier: Apache-2.0
"""Locks that a forked child can take, whoever held them in its parent."""

from __future__ import annotations

import os
import threading


def fork_safe_lock() -> threading.Lock:
    """A lock for the life of the process, free again in a child.

    The thread that held it there does not exist here. What it guards has to be whole between any
    two of its statements.
    """
    lock = threading.Lock()
    os.register_at_fork(after_in_child=lock._at_fork_reinit)  # type: ignore[attr-defined]
    return lock
