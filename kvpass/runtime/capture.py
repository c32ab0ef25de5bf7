# SPDX-License-Identifier: Apache-2.0
"""Host work of a manager beside a CUDA graph capture of another thread.

While any thread captures in the mode ``global``, the default of ``torch.cuda.graph``, every other
thread that queries or waits for an event, or allocates, breaks that capture (errors 900 and 901),
unless it has said that captures of others do not concern it. A manager touches no stream that it
does not own or run on, so it may say so.
"""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import torch

THREAD_LOCAL = 1
"""CU_STREAM_CAPTURE_MODE_THREAD_LOCAL: captures of other threads are ignored, not our own."""


class HostLock:
    """A reentrant lock; on a GPU its holder does not disturb captures of other threads."""

    def __init__(self, device: torch.device) -> None:
        self._lock = threading.RLock()
        self._modes: list[int] = []
        self._exchange: Any = None
        if device.type == "cuda" and torch.version.hip is None:
            self._exchange = ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode

    def _swap(self, mode: int) -> int:
        old = ctypes.c_int(mode)
        error = self._exchange(ctypes.byref(old))
        if error:
            raise RuntimeError(f"cuThreadExchangeStreamCaptureMode failed with CUDA error {error}")
        return old.value

    def __enter__(self) -> HostLock:
        """Lock, then ignore captures of other threads."""
        self._lock.acquire()
        if self._exchange is not None:
            try:
                self._modes.append(self._swap(THREAD_LOCAL))
            except BaseException:
                self._lock.release()
                raise
        return self

    def __exit__(self, *_: object) -> None:
        """Restore the mode of this thread, then unlock."""
        try:
            if self._exchange is not None:
                self._swap(self._modes.pop())
        finally:
            self._lock.release()
