# SPDX-License-Identifier: Apache-2.0
"""Attention over a KV cache that is found through a table of 64-bit block addresses.

Importing this package does not import Triton: the kernels load on first use of a name below.
"""

from __future__ import annotations

import importlib
import sys
import types
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from triton_ops.append import append
    from triton_ops.arm import arm
    from triton_ops.attend_decode import DecodeConfig, attend_decode, splits_for
    from triton_ops.attend_extend import ExtendConfig, attend_extend
    from triton_ops.attend_latent import LatentConfig, attend_latent
    from triton_ops.merge import merge
    from triton_ops.stage import stage
    from triton_ops.tickets import Tickets

__all__ = [
    "DecodeConfig",
    "ExtendConfig",
    "LatentConfig",
    "Tickets",
    "append",
    "arm",
    "attend_decode",
    "attend_extend",
    "attend_latent",
    "merge",
    "splits_for",
    "stage",
]

_HOME = {
    "DecodeConfig": "attend_decode",
    "ExtendConfig": "attend_extend",
    "LatentConfig": "attend_latent",
    "Tickets": "tickets",
    "arm": "arm",
    "append": "append",
    "attend_decode": "attend_decode",
    "attend_extend": "attend_extend",
    "attend_latent": "attend_latent",
    "merge": "merge",
    "splits_for": "attend_decode",
    "stage": "stage",
}


class _Package(types.ModuleType):
    """Some functions have the name of their module: the function is what the package shows."""

    def __setattr__(self, name: str, value: object) -> None:
        if isinstance(value, types.ModuleType) and _HOME.get(name) == name:
            value = getattr(value, name)
        super().__setattr__(name, value)


def __getattr__(name: str) -> Any:
    """Load a public name from its module."""
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'triton_ops' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"triton_ops.{home}"), name)
    globals()[name] = value
    return value


sys.modules[__name__].__class__ = _Package
