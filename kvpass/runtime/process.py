# SPDX-License-Identifier: Apache-2.0
"""What belongs to one process and one device."""

from __future__ import annotations

import os
from typing import Any

import torch

from kvpass.errors import CacheStateError, ConfigError, UnsupportedError
from kvpass.runtime.table import normalize


class OfThisProcess:
    """Owner of memory that a forked child would share with its parent, and that nobody copies."""

    def __init__(self) -> None:
        self._process = os.getpid()

    @property
    def usable(self) -> bool:
        """False in a process forked from the one that made it."""
        return self._process == os.getpid()

    def check_process(self) -> None:
        """Refuse a forked child; before its copy of a lock, which may be held for ever.

        Raises:
            CacheStateError: the process is another one.
        """
        if not self.usable:
            raise CacheStateError(
                "this cache was made before os.fork(): parent and child would write to the same "
                "memory; make a new cache (and manager) in the child"
            )

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refused: its memory belongs to the process.

        Raises:
            UnsupportedError: always.
        """
        name = type(self).__name__
        raise UnsupportedError(
            f"a {name} cannot be copied, pickled or saved, its memory belongs to this process: "
            f"make another one with kvpass.{name}(...)"
        )


def device_for(device: torch.device | str | None) -> torch.device:
    """Where attention is computed; None: the current GPU, or the CPU where there is none.

    Raises:
        ConfigError: there is no such device here, or it holds no numbers.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        known = normalize(device)
    except (RuntimeError, AssertionError) as error:  # torch has no CUDA, or knows no such type
        why = str(error).splitlines()[0]
        raise ConfigError(f"device = {str(device)!r}: {why}; write 'cpu' or 'cuda'") from None
    if known.type not in ("cpu", "cuda"):
        raise ConfigError(f"device = {str(device)!r}: blocks lie on 'cpu' or 'cuda' devices")
    return known
