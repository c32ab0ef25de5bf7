# SPDX-License-Identifier: Apache-2.0
"""KV handles: tensors without storage that stand for keys or values a manager holds.

A rewritten graph returns them where the model expects its new cache tensors. Shape, dtype and
device are right, so code that only asks for the length works unchanged; anything that needs the
numbers gets a dense copy. A handle means the first ``length`` tokens of its batch for ever: a later
append through another handle never changes it. Its first tokens are a shorter handle; any other
view of it is a handle of a part of the copy, so that a write through a view is refused too.

A handle of a *buffer* (``content.capacity`` is not 0) stands for a static cache tensor instead:
rewritten graphs write to it, so that it means what was written last, zeros where nothing was.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_iter, tree_map_only

from kvpass.errors import UnsupportedError
from kvpass.runtime import directory
from kvpass.runtime.content import Content, Part
from kvpass.warn import warn_user


class KVHandle(Tensor):
    """A tensor ``[B, Hkv, length, D]`` or ``[B, length, Hkv, D]`` without storage.

    See the module's description.

    Any op on it works on a dense copy, with one warning, except changing it or a view of it in
    place, and what needs its memory: both raise ``UnsupportedError``.

    Attributes:
        ticket: number of what the handle stands for.
        content: keys or values of a batch; None for other views, and while a graph is traced.
        part: what another view stands for; None otherwise.
    """

    ticket: Tensor
    content: Content | None
    part: Part | None

    @staticmethod
    def __new__(
        cls,
        ticket: Tensor,
        shape: Any,
        dtype: torch.dtype,
        device: torch.device,
        content: Content | None = None,
        part: Part | None = None,
        strides: Any = None,
    ) -> KVHandle:
        """Wrap a ticket (int64 ``[1]``, see :func:`kvpass.runtime.directory.enroll`)."""
        # Autograd makes no view of an inference tensor: a view with a base is no input of a graph.
        # But no graph writes to an inference tensor, so that a buffer is none.
        real = not part.of_buffer if part else content is not None and not content.capacity
        with torch.inference_mode(True if real else torch.is_inference_mode_enabled()):
            handle: KVHandle = torch.Tensor._make_wrapper_subclass(
                cls, shape, strides=strides, dtype=dtype, device=device
            )
        handle.ticket = ticket
        handle.content = content
        handle.part = part
        return handle

    @classmethod
    def of(cls, content: Content, shape: tuple[int, ...], dtype: torch.dtype) -> KVHandle:
        """A new handle for ``content``."""
        assert content.lease is not None
        device = content.lease.batch.device
        handle = cls(directory.enroll(content), shape, dtype, device, content)
        # The length differs at every step: a graph compiled for one length would be wasted.
        torch._dynamo.maybe_mark_dynamic(handle, 1 if content.tokens_first else 2)
        return handle

    @classmethod
    def of_buffer(
        cls, content: Content, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> KVHandle:
        """A new handle for a static buffer; its shape never changes."""
        with torch.inference_mode(False):
            return cls(directory.enroll(content), shape, dtype, device, content)

    @classmethod
    def of_part(cls, tensor: Tensor, of_buffer: bool) -> KVHandle:
        """A new handle for a part of a dense copy."""
        part = Part(tensor, of_buffer)
        ticket = directory.enroll(part)
        return cls(
            ticket, tensor.shape, tensor.dtype, tensor.device, part=part, strides=tensor.stride()
        )

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        """The ticket is the only part a compiler sees; the shape comes from outside."""
        return ["ticket"], (self.dtype, self.device)

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], context: Any, outer_size: Any, outer_stride: Any
    ) -> KVHandle:
        """Inverse of :meth:`__tensor_flatten__`."""
        dtype, device = context
        return KVHandle(inner["ticket"], outer_size, dtype, device, strides=outer_stride)

    def _stable_hash_for_caching(self) -> str:
        """Key for torch's caches of compiled graphs, which do not depend on the numbers."""
        return f"KVHandle:{self.dtype}:{self.device}"

    def dense(self) -> Tensor:
        """Dense copy of what the handle stands for."""
        dense: Tensor = torch.ops.kvpass.materialize(
            self.ticket, list(self.shape), self.dtype, self.device
        )
        return dense

    @property
    def sequences(self) -> int:
        """Sequences of the batch that the handle stands for."""
        lease = None if self.content is None else self.content.lease
        return 0 if lease is None else int(lease.batch.size)

    def with_memory(self) -> Tensor:
        """The dense tensor that holds a buffer from now on: what changes it changes the buffer.

        Raises:
            UnsupportedError: the handle is no buffer.
        """
        content = self.content
        if content is None or not content.capacity:
            raise _no_memory("a change in place")
        if content.memory is None:
            content.check_whole()
            with torch.inference_mode(False):
                content.settle(content.dense(self.shape, self.dtype, self.device))
        assert content.memory is not None
        return content.memory

    @property
    def data(self) -> Tensor:
        """The handle without its history."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        raise _no_memory("an assignment to the data")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Shape and dtype; the numbers are not read."""
        return f"KVHandle(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """A dense copy: independent of this handle, as a copy must be."""
        return self.dense()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the numbers, not the handle."""
        return self.dense().__reduce_ex__(protocol)

    def numpy(self, *, force: bool = False) -> Any:
        """Dense copy as an array."""
        return self.dense().numpy(force=force)

    def tolist(self) -> Any:
        """The numbers as nested lists."""
        return self.dense().tolist()

    def __dlpack__(self, **options: Any) -> Any:
        """Dense copy for another library."""
        return self.dense().__dlpack__(**options)

    def share_memory_(self) -> Any:
        """Refused.

        Raises:
            UnsupportedError: always.
        """
        raise _no_memory("share_memory_()")

    def data_ptr(self) -> int:
        """Refused.

        Raises:
            UnsupportedError: always.
        """
        raise _no_memory("data_ptr()")

    def _first_tokens(self, dim: int = 0, start: Any = None, end: Any = None, step: Any = 1) -> Any:
        """A slice that is a handle itself, or None; arguments of ``aten.slice``."""
        content = self.content
        if content is None or content.start or content.capacity:
            return None
        axis = 1 if content.tokens_first else 2
        if step != 1 or dim not in (axis, axis - 4) or start not in (None, 0):
            return None
        length = content.length if end is None else int(end)
        length = min(max(length + content.length if length < 0 else length, 0), content.length)
        shorter = Content(
            content.lease,
            content.layer,
            content.values,
            length,
            tokens_first=content.tokens_first,
        )
        shape = tuple(length if i == axis else size for i, size in enumerate(self.shape))
        return KVHandle.of(shorter, shape, self.dtype)

    def _numbers(self) -> Tensor:
        """Dense tensor to read from, not to change."""
        return self.dense() if self.part is None else self.part.tensor

    # Below a frame that Dynamo gave up on, it would compile this function and what that calls.
    @classmethod
    @torch._dynamo.disable
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an op on dense copies."""
        kwargs = kwargs or {}
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            handle = args[0]
            return KVHandle(
                handle.ticket,
                handle.shape,
                handle.dtype,
                handle.device,
                handle.content,
                handle.part,
                handle.stride(),
            )
        if func is torch.ops.aten.detach_.default:
            return args[0]
        arguments = func._schema.arguments
        given = [*zip(arguments, args, strict=False)]
        given += [(a, kwargs[a.name]) for a in arguments[len(args) :] if a.name in kwargs]
        if func is torch.ops.aten.zero_.default and args[0].is_buffer:
            args[0].content.clear()
            return args[0]
        is_view = False
        for argument, value in given:
            if argument.alias_info is None:
                continue
            handles = [leaf for leaf in tree_iter(value) if isinstance(leaf, KVHandle)]
            if handles and argument.alias_info.is_write:
                if all(isinstance(handle.ticket, FakeTensor) for handle in handles):
                    return args[0]  # traced by Dynamo: the pass replaces or gives memory to it
                if all(handle.is_buffer for handle in handles):
                    return cls._write(func, args, kwargs)
                if any(handle._in_buffer for handle in handles):
                    raise UnsupportedError(
                        f"{func} changes a view of a static buffer that kvpass holds, outside a "
                        "graph that it rewrites: use buffer.index_copy_(...) or "
                        "buffer[:, :, positions] = x with a tensor of positions"
                    )
                raise UnsupportedError(
                    f"{func} changes a KV cache in place that kvpass holds: .clone() it first, "
                    "crop or copy the cache through its own methods, or use kvpass.TieredCache"
                )
            is_view |= any(handle._is_real() for handle in handles)
        if is_view and func._can_decompose():
            # Of an inference tensor even x.to(x.dtype) comes here: its parts know what is a view.
            return func.decompose(*args, **kwargs)
        if func is torch.ops.aten.slice.Tensor:
            shorter = args[0]._first_tokens(*args[1:], **kwargs)
            if shorter is not None:
                return shorter
        real = any(isinstance(x, KVHandle) and x._is_real() for x in tree_iter((args, kwargs)))
        if real and not torch.compiler.is_compiling():  # a tracer's handles are not read
            _warn_once(str(func))
        buffers = [x for x in tree_iter((args, kwargs)) if isinstance(x, KVHandle) and x._in_buffer]
        args, kwargs = tree_map_only(KVHandle, lambda handle: handle._numbers(), (args, kwargs))
        with torch.inference_mode(torch.is_inference_mode_enabled() and not buffers):
            result = func(*args, **kwargs)
            if not is_view:
                return result
            return tree_map_only(Tensor, lambda part: KVHandle.of_part(part, bool(buffers)), result)

    @property
    def _in_buffer(self) -> bool:
        return self.part.of_buffer if self.part is not None else self.is_buffer

    @classmethod
    def _write(cls, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Change a buffer in place, outside a rewritten graph: it gets its memory back."""
        _warn_once(str(func))
        handles: dict[int, KVHandle] = {}

        def dense(handle: KVHandle) -> Tensor:
            if not handle.is_buffer:
                return handle._numbers()
            tensor = handle.with_memory()
            handles[id(tensor)] = handle
            return tensor

        result = func(
            *tree_map_only(KVHandle, dense, args), **tree_map_only(KVHandle, dense, kwargs)
        )
        return tree_map_only(Tensor, lambda tensor: handles.get(id(tensor), tensor), result)

    @property
    def is_buffer(self) -> bool:
        """Whether the handle stands for a static buffer."""
        return self.content is not None and self.content.capacity > 0

    def _is_real(self) -> bool:
        return self.content is not None or self.part is not None


def _no_memory(what: str) -> UnsupportedError:
    return UnsupportedError(
        f"{what} of a KV cache that kvpass holds: its numbers lie in blocks, not in one piece of "
        "memory; .clone() it first"
    )


_warned = False


def _warn_once(op: str) -> None:
    global _warned
    if not _warned:
        _warned = True
        warn_user(
            f"{op} reads a KV cache that kvpass holds, outside a rewritten graph: a dense copy is "
            "made, which is right but slow"
        )
