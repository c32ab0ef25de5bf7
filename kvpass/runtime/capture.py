# SPDX-License-Identifier: Apache-2.0
"""Host work of a manager beside a CUDA graph capture of another thread.

While any thread captures in the mode ``global``, the default of ``torch.cuda.graph``, every other
thread that queries or waits for an event, or allocates, breaks that capture (errors 900 and 901),
unless it has said that captures of others do not concern it. A manager touches no stream that it
does not own or run on, so it may say so.
"""

from __future__ import annotations

import ctypes
import functools

import torch

THREAD_LOCAL = 1
"""CU_STREAM_CAPTURE_MODE_THREAD_LOCAL: captures of other threads are ignored, not our own."""


def is_capturing(device: torch.device) -> bool:
    """Whether what is launched on the device now is captured into a graph, and not run."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _has_captures(device: torch.device) -> bool:
    return device.type == "cuda" and torch.version.hip is None


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _exchange(mode: int) -> int:
    """Set how captures concern the calling thread; returns what was set before."""
    old = ctypes.c_int(mode)
    error = _driver().cuThreadExchangeStreamCaptureMode(ctypes.byref(old))
    if error:
        raise RuntimeError(f"cuThreadExchangeStreamCaptureMode failed with CUDA error {error}")
    return old.value


def ignore_captures(device: torch.device) -> None:
    """From now on captures of other threads do not concern the calling one, nor it them."""
    if _has_captures(device):
        torch.cuda.set_device(device)  # a context, which the driver's call needs
        _exchange(THREAD_LOCAL)


class Uncaptured:
    """A block of code that does not disturb captures of other threads; may be nested."""

    def __init__(self, device: torch.device) -> None:
        self._modes: list[int] = []
        self._captures = _has_captures(device)

    def __enter__(self) -> None:
        """Ignore captures of other threads."""
        if self._captures:
            self._modes.append(_exchange(THREAD_LOCAL))

    def __exit__(self, *_: object) -> None:
        """Restore the mode of this thread."""
        if self._captures:
            _exchange(self._modes.pop())
