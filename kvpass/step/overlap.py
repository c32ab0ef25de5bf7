# SPDX-License-Identifier: Apache-2.0
"""Whether tensors share memory: a graph compiled for separate buffers may be given views of one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from torch import Tensor


class _Layout:
    """Address, shape and strides of a tensor as NumPy takes them; nothing is read."""

    def __init__(self, tensor: Tensor) -> None:
        size = tensor.element_size()
        self.__array_interface__: dict[str, Any] = {
            "version": 3,
            "typestr": f"|V{size}",
            "shape": tuple(tensor.shape),
            "strides": tuple(stride * size for stride in tensor.stride()),
            "data": (tensor.data_ptr(), True),
        }


def overlap(tensors: Iterable[Tensor]) -> bool:
    """Whether any two of the tensors have an element in common; interleaved ones do not."""
    spans = sorted(
        (
            (tensor.data_ptr(), tensor.data_ptr() + _extent(tensor), tensor)
            for tensor in tensors
            if tensor.numel()
        ),
        key=lambda span: span[:2],
    )
    earlier: list[tuple[int, Tensor]] = []
    for low, high, tensor in spans:
        earlier = [(end, other) for end, other in earlier if end > low]
        mine = np.asarray(_Layout(tensor)) if earlier else None
        if any(np.shares_memory(mine, np.asarray(_Layout(other))) for _, other in earlier):
            return True
        earlier.append((high, tensor))
    return False


def _extent(tensor: Tensor) -> int:
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()
