# SPDX-License-Identifier: Apache-2.0
"""Warnings that point at the line of the user, not at what called kvpass for it."""

from __future__ import annotations

import sys
import warnings

from kvpass.errors import KVPassWarning

_INSIDE = ("kvpass", "torch", "transformers", "triton_ops")


def warn_user(message: str) -> None:
    """Issue a KVPassWarning at the innermost frame that is not of a library in between."""
    level = 2
    frame = sys._getframe(1)
    while frame.f_back is not None:
        name = frame.f_globals.get("__name__", "")
        # Code that Dynamo or Inductor has written has a file of its own, and no module of a user.
        written = frame.f_code.co_filename.startswith("<")
        if name.partition(".")[0] not in _INSIDE and not written:
            break
        frame = frame.f_back
        level += 1
    warnings.warn(message, KVPassWarning, stacklevel=level)
