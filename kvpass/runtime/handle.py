# SPDX-License-Identifier: Apache-2.0
"""KV handles: tensors without storage that stand for keys or values a manager holds.

A rewritten graph returns them where the model expects its new cache tensors. Shape, dtype and
device are right, so code that only asks for the length works unchanged; anything that needs the
numbers gets a dense copy. A handle means the first ``length`` tokens of its batch for ever: a later
append through another handle never changes it.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from kvpass.errors import KVPassWarning, UnsupportedError
from kvpass.runtime import directory
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
        lease: keeps the batch alive.
        layer: layer of the batch.
        values: values if true, keys otherwise.
        length: tokens.
    """

    __slots__ = ("__weakref__", "layer", "lease", "length", "values")

    def __init__(self, lease: Lease, layer: int, values: bool, length: int) -> None:
        self.lease = lease
        self.layer = layer
        self.values = values
        self.length = length

    def dense(self) -> Tensor:
        """Dense copy, ``[B, Hkv, length, D]``."""
        keys, values = self.lease.manager.gather(self.lease.batch, self.layer, self.length)
        dense: Tensor = values if self.values else keys
        return dense


class KVHandle(Tensor):
    """A tensor ``[B, Hkv, length, D]`` without storage; see the module's description.

    Any op on it works on a dense copy, with one warning, except changing it in place, which raises
    ``UnsupportedError``.
    """

    ticket: Tensor
    content: Content | None

    @staticmethod
    def __new__(
        cls,
        ticket: Tensor,
        shape: Any,
        dtype: torch.dtype,
        device: torch.device,
        content: Content | None = None,
    ) -> KVHandle:
        """Wrap a ticket (int64 ``[1]``, see :func:`kvpass.runtime.directory.enroll`)."""
        handle: KVHandle = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=dtype, device=device
        )
        handle.ticket = ticket
        handle.content = content
        return handle

    @classmethod
    def of(cls, content: Content, shape: tuple[int, ...], dtype: torch.dtype) -> KVHandle:
        """A new handle for ``content``."""
        device = content.lease.batch.device
        handle = cls(directory.enroll(content), shape, dtype, device, content)
        # The length differs at every step: a graph compiled for one length would be wasted.
        torch._dynamo.maybe_mark_dynamic(handle, 2)
        return handle

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        """The ticket is the only part a compiler sees; the shape comes from outside."""
        return ["ticket"], (self.dtype, self.device)

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], context: Any, outer_size: Any, outer_stride: Any
    ) -> KVHandle:
        """Inverse of :meth:`__tensor_flatten__`."""
        dtype, device = context
        return KVHandle(inner["ticket"], outer_size, dtype, device)

    def _stable_hash_for_caching(self) -> str:
        """Key for torch's caches of compiled graphs, which do not depend on the numbers."""
        return f"KVHandle:{self.dtype}:{self.device}"

    def dense(self) -> Tensor:
        """Dense copy of what the handle stands for."""
        dense: Tensor = torch.ops.kvpass.materialize(
            self.ticket, list(self.shape), self.dtype, self.device
        )
        return dense

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Shape and dtype; the numbers are not read."""
        return f"KVHandle(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """A dense copy: independent of this handle, as a copy must be."""
        return self.dense()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the numbers, not the handle."""
        return self.dense().__reduce_ex__(protocol)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an op on dense copies."""
        kwargs = kwargs or {}
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            handle = args[0]
            return KVHandle(
                handle.ticket, handle.shape, handle.dtype, handle.device, handle.content
            )
        schema = func._schema
        written = [
            value
            for value, argument in zip(args, schema.arguments, strict=False)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        if any(isinstance(value, KVHandle) for value in written):
            raise UnsupportedError(
                f"{func} changes a KV cache in place that kvpass holds: crop or copy the cache "
                "through its own methods, or use kvpass.TieredCache"
            )
        if not torch.compiler.is_compiling() and type(args) is tuple:
            _warn_once(str(func))
        args, kwargs = tree_map_only(KVHandle, lambda handle: handle.dense(), (args, kwargs))
        return func(*args, **kwargs)


_warned = False


def _warn_once(op: str) -> None:
    global _warned
    if not _warned:
        _warned = True
        warnings.warn(
            f"{op} reads a KV cache that kvpass holds, outside a rewritten graph: a dense copy is "
            "made, which is right but slow",
            KVPassWarning,
            stacklevel=4,
        )
