# SPDX-License-Identifier: Apache-2.0
"""A trace as what replacement policies are given: blocks that appear, and requests for blocks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvpass.runtime.trace import Trace


@dataclass(frozen=True)
class Tick:
    """What happens in one tick; blocks are numbers, see :func:`events`.

    Attributes:
        created: int64 ``[n]``, blocks that appear before the requests.
        requests: int64 ``[m]``, blocks that were accessed, layer after layer as a model runs.
    """

    created: NDArray[np.int64]
    requests: NDArray[np.int64]


def events(trace: Trace) -> list[Tick]:
    """The ticks of a trace.

    A block that any KV head accessed in a tick is one request, however many heads did: it is read
    once. Block ``i`` of row ``r`` (layer x sequence) has number ``r * blocks + i``. The blocks of
    the prompt appear in the first tick, older ones before newer ones, in all layers at once.
    """
    wide = trace.counts.shape[3]
    counts = trace.counts.reshape(len(trace.counts), -1)
    sizes = trace.blocks.reshape(len(trace.blocks), -1).astype(np.int64)
    before = np.zeros_like(sizes[0])
    position = np.arange(wide)
    ticks = []
    for tick, now in enumerate(sizes):
        new = (position >= before[:, None]) & (position < now[:, None])
        column, row = np.nonzero(new.T)
        ticks.append(Tick(row * wide + column, np.flatnonzero(counts[tick])))
        before = now
    return ticks
