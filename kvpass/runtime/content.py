# SPDX-License-Identifier: Apache-2.0
"""What a KV handle stands for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kvpass.errors import CacheStateError
from kvpass.runtime.batch import Batch


class Lease:
    """Held by all handles of a batch; the batch is released when the last of them dies."""

    __slots__ = ("__weakref__", "batch", "manager")

    def __init__(self, manager: Any, batch: Batch) -> None:
        self.manager = manager
        self.batch = batch
        manager.lease(self, batch)


class Content:
    """What a handle stands for.

    Attributes:
        lease: keeps the batch alive; None for a buffer that nothing was written to.
        layer: layer of the batch.
        values: values if true, keys otherwise.
        length: tokens of the sequence up to the last one that the handle stands for.
        start: the first one it stands for.
        capacity: tokens of the static buffer that the handle stands for, else 0. A buffer changes:
            its ``length`` is what was written last.
        reach: tokens up to which a buffer may have been written. Blocks behind ``length`` are
            given back, so that a buffer forgets what it held there.
        tokens_first: whether the tensor is ``[B, tokens, Hkv, D]``.
        memory: a dense tensor that has taken the place of a buffer's blocks, or None.
    """

    __slots__ = (
        "__weakref__", "capacity", "layer", "lease", "length", "memory", "reach", "start",
        "tokens_first", "values",
    )  # fmt: skip

    def __init__(
        self,
        lease: Lease | None,
        layer: int,
        values: bool,
        length: int,
        start: int = 0,
        capacity: int = 0,
        tokens_first: bool = False,
    ) -> None:
        self.lease = lease
        self.layer = layer
        self.values = values
        self.length = length
        self.start = start
        self.capacity = capacity
        self.tokens_first = tokens_first
        self.memory: Tensor | None = None
        self.reach = length

    def dense(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Dense copy of all tokens from ``start`` on, or a buffer in the shape it has."""
        if self.memory is not None:
            return self.memory.clone()
        self.check_whole()
        if self.lease is None:
            return torch.zeros(tuple(shape), dtype=dtype, device=device)
        keys, values = self.lease.manager.gather(self.lease.batch, self.layer, self.length)
        dense: Tensor = values if self.values else keys
        dense = dense[:, :, self.start :]
        if self.tokens_first:
            dense = dense.transpose(1, 2)
        if not self.capacity:
            return dense.contiguous()
        whole = torch.zeros(tuple(shape), dtype=dtype, device=device)
        whole[tuple(slice(size) for size in dense.shape)] = dense
        return whole

    def check_whole(self) -> None:
        """Nothing of a buffer has been given up.

        Raises:
            CacheStateError: tokens were written at an earlier position, and blocks behind it are
                gone.
        """
        if self.reach > self.length:
            raise CacheStateError(
                f"this static buffer without memory holds {self.length} tokens; what was behind "
                f"them (up to {self.reach}) was given up when tokens were written at an earlier "
                "position: read it before, .zero_() it, or do not release it"
            )

    def clear(self) -> None:
        """Forget what a buffer holds; its blocks go with the next step, or with the buffer."""
        self.length = self.start = self.reach = 0
        self.memory = None

    def become(self, other: Content) -> None:
        """Hold what another content of the same buffer does."""
        self.lease, self.layer, self.values = other.lease, other.layer, other.values
        self.length, self.start, self.tokens_first = other.length, other.start, other.tokens_first
        self.reach = max(self.reach, other.length)
        if self.memory is not None and other.length < other.capacity:
            axis = 1 if other.tokens_first else 2
            behind = self.memory.narrow(axis, other.length, other.capacity - other.length)
            self.reach = other.capacity if bool(behind.any()) else other.length
        self.capacity, self.memory = other.capacity, None

    def settle(self, memory: Tensor) -> None:
        """From now on hold a buffer in a dense tensor."""
        self.memory, self.lease = memory, None


class Part:
    """What a view of a handle stands for: a part of a dense copy that nothing else can change.

    Attributes:
        tensor: the part, with the strides of the view.
        of_buffer: whether it is a view of a buffer.
    """

    __slots__ = ("__weakref__", "of_buffer", "tensor")

    def __init__(self, tensor: Tensor, of_buffer: bool) -> None:
        self.tensor = tensor
        self.of_buffer = of_buffer

    def dense(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Dense copy in the shape of the view, contiguous."""
        return self.tensor.clone(memory_format=torch.contiguous_format)
