# SPDX-License-Identifier: Apache-2.0
"""Typed errors and warnings of kvpass; every message names the offending value and the fix."""

from __future__ import annotations


class KVPassError(Exception):
    """Base class of all errors raised by kvpass."""


class ConfigError(KVPassError, ValueError):
    """A configuration key is unknown, or its value has the wrong type or range."""


class UnsupportedError(KVPassError, NotImplementedError):
    """A request that kvpass refuses because it could not be answered exactly."""


class OutOfMemoryError(KVPassError, MemoryError):
    """No tier has room for a block: the hot arena, host memory or disk is full."""


class CapacityError(KVPassError, ValueError):
    """A sequence would grow beyond the capacity its cache was made with."""


class CacheStateError(KVPassError, RuntimeError):
    """A cache or a handle is used in a state that has no right answer (freed, in use, mixed)."""


def other_length(layer: int, stored: int, given: int) -> CacheStateError:
    """The error of a graph that was given another length than a layer has."""
    least = min(stored, given)
    return CacheStateError(
        f"layer {layer} holds {stored} tokens, the graph was given {given}: a call was "
        "interrupted, or the cache was changed from outside in between. "
        f"cache.truncate({least}) goes on from there"
    )


class ShapeError(KVPassError, ValueError):
    """Tensors given to an op disagree in shape, dtype or device."""


class CheckpointError(KVPassError, ValueError):
    """A checkpoint is missing, damaged, or of a model family that cannot be loaded."""


class TraceError(KVPassError, ValueError):
    """A trace of block accesses is missing, damaged, foreign, or was never recorded."""


class DownloadError(CheckpointError):
    """A checkpoint cannot be fetched: no network, or the package index lacks it."""


class MetricsError(KVPassError, OSError):
    """The page of metrics cannot be served, or not be read from a running process."""


class KVPassWarning(UserWarning):
    """A model or graph is left as it was; the message says why and what to change."""
