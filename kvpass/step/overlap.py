# SPDX-License-Identifier: Apache-2.0
"""Whether tensors share memory: a graph compiled for separate buffers may be given views of one."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import numpy as np
from torch import Tensor

Layout = tuple[int, int, tuple[int, ...], tuple[int, ...]]
"""Address, bytes of an element, shape, strides in elements."""


def overlap(tensors: Iterable[Tensor]) -> bool:
    """Whether any two of the tensors have an element in common; interleaved ones do not."""
    return _overlap(
        tuple((t.data_ptr(), t.element_size(), tuple(t.shape), t.stride()) for t in tensors)
    )


@lru_cache(maxsize=256)  # the buffers of a model stay where they are, and this is asked each step
def _overlap(layouts: tuple[Layout, ...]) -> bool:
    earlier: list[tuple[int, Layout]] = []
    for layout in sorted(layout for layout in layouts if 0 not in layout[2]):
        earlier = [(end, other) for end, other in earlier if end > layout[0]]
        if any(np.shares_memory(_array(layout), _array(other)) for _, other in earlier):
            return True
        earlier.append((_end(layout), layout))
    return False


def _end(layout: Layout) -> int:
    address, size, shape, strides = layout
    return address + size * (1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True)))


def _array(layout: Layout) -> np.ndarray[Any, Any]:
    """An array with this layout; its elements, perhaps on a GPU, are never read."""
    address, size, shape, strides = layout
    interface = {
        "version": 3,
        "typestr": f"|V{size}",
        "shape": shape,
        "strides": tuple(size * stride for stride in strides),
        "data": (address, True),
    }
    return np.asarray(SimpleNamespace(__array_interface__=interface))
