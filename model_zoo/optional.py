# SPDX-License-Identifier: Apache-2.0
"""Import of libraries that only some checkpoints need."""

from __future__ import annotations

import importlib
from typing import Any

from kvpass.errors import CheckpointError


def require(module: str, purpose: str) -> Any:
    """Import `module`, or raise a CheckpointError that says what it is for and how to get it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise CheckpointError(
            f'{purpose} needs the {module!r} library ({error}); run: pip install "kvpass[demo]"'
        ) from error
