# SPDX-License-Identifier: Apache-2.0
"""kvpass: a torch.compile backend for decoders whose KV cache does not fit on the GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvpass._version import __version__

if TYPE_CHECKING:
    from kvpass.backends import backend
    from kvpass.buffers import release_buffers
    from kvpass.cache import TieredCache
    from kvpass.config import Config
    from kvpass.explanation import Explanation, explain
    from kvpass.generation import Generation, generate
    from kvpass.metrics import serve_metrics
    from kvpass.runtime.manager import Manager

__all__ = [
    "Config",
    "Explanation",
    "Generation",
    "Manager",
    "TieredCache",
    "__version__",
    "backend",
    "explain",
    "generate",
    "release_buffers",
    "serve_metrics",
]

_HOMES = {
    "backend": "kvpass.backends",
    "TieredCache": "kvpass.cache",
    "Config": "kvpass.config",
    "explain": "kvpass.explanation",
    "Explanation": "kvpass.explanation",
    "generate": "kvpass.generation",
    "Generation": "kvpass.generation",
    "release_buffers": "kvpass.buffers",
    "serve_metrics": "kvpass.metrics",
    "Manager": "kvpass.runtime.manager",
}


def __getattr__(name: str) -> Any:
    # Lazily, so that `kvpass --help` does not wait for torch.
    if name not in _HOMES:
        raise AttributeError(f"module 'kvpass' has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
