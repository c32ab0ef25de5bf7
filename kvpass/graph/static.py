# SPDX-License-Identifier: Apache-2.0
"""Static buffers as caches: what a graph writes to a tensor of fixed size, and reads of it.

Three kinds of write are understood, each the only one to its buffer in the graph:

- ``at``: new tokens at positions p, p + 1, ... (``index_copy_``, ``index_put_``, assignment to a
  slice or to an index tensor); the attention reads the whole buffer or its first tokens.
- ``roll``: the buffer moves by one token and the new one is written last; the attention reads it.
- ``tail``: the buffer gets the last tokens of ``cat(buffer's tokens, new)``, or of the new ones
  alone; the attention reads the ``cat`` or the new ones.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import fx

from kvpass.graph.inputs import symbols_of
from kvpass.graph.kv import is_handle, last_tokens
from kvpass.graph.mask import MaskReader
from kvpass.graph.operands import Operand
from kvpass.graph.site import CacheSource, tokens_axis
from kvpass.graph.sizes import Size, fixed, proven, same, settled
from kvpass.graph.values import Index
from kvpass.graph.walk import (
    NotMatched,
    bind,
    is_cast,
    op_name,
    scalar_of,
    shape_of,
    tensor_of,
    writes_to,
)

Write = Literal["at", "tail", "roll"]
_WHOLE = slice(None, None, None)
_MAKERS = ("zeros", "new_zeros", "zeros_like")


@dataclass(frozen=True)
class _Buffer:
    """One buffer, how it is written, and what the attention reads of it."""

    kind: Write
    node: fx.Node
    new: fx.Node
    write: fx.Node
    position: Size | None
    batch: Size | None  # sequences written; None for all of the buffer
    between: tuple[fx.Node, ...]  # nodes from the buffer to what the attention reads
    others: tuple[fx.Node, ...] = ()  # what else belongs to the write
    tokens_first: bool = False
    assumed: tuple[tuple[Size, Size], ...] = ()


class StaticReader:
    """Finds the static buffers behind operands in one graph.

    Args:
        graph: the graph.
        live: its nodes that are not dead.
        reader: knows positions.
    """

    def __init__(self, graph: fx.Graph, live: set[fx.Node], reader: MaskReader) -> None:
        self.live = live
        self.reader = reader
        self.order = {node: i for i, node in enumerate(graph.nodes)}
        placeholders = [node for node in graph.nodes if node.op == "placeholder"]
        self.symbols = symbols_of(placeholders).keys()

    def source(self, keys: Operand, values: Operand, first: fx.Node) -> CacheSource | None:
        """The static cache behind the operands, or None if there is none.

        ``first`` is the first node of the attention.

        Raises:
            NotMatched: there is a buffer, but what happens to it is not understood.
        """
        k, v = self._buffer(keys, first), self._buffer(values, first)
        if k is None or v is None:
            return None
        if (k.kind, k.tokens_first) != (v.kind, v.tokens_first):
            raise NotMatched(f"keys are written to their buffer by {k.kind}, values by {v.kind}")
        if k.node is v.node:
            raise NotMatched("keys and values share one buffer")
        for buffer in (k, v):
            _check_new(buffer)
        if not _alike(k.position, v.position) or not _alike(k.batch, v.batch):
            raise NotMatched("keys and values are written to different positions")
        if is_handle(k.node) != is_handle(v.node):
            raise NotMatched("only one of the buffers of keys and values has memory of its own")
        made = [op_name(buffer.node) in _MAKERS for buffer in (k, v)]
        if made[0] != made[1]:
            raise NotMatched("only one of the buffers of keys and values is made in this graph")
        axis = tokens_axis(k.tokens_first)
        size = (shape_of(k.node) or ())[axis]
        known = fixed(size)
        if known is None and (k.kind != "at" or not self._readable(size)):
            known = settled(size)
        capacity: Size = size if known is None else known
        other = (shape_of(v.node) or ())[axis]
        alike: tuple[tuple[Size, Size], ...] = ()
        if not same(other, capacity):
            if isinstance(other, int) and isinstance(capacity, int) or not self._readable(other):
                raise NotMatched("the buffers of keys and values differ in their number of tokens")
            alike = ((other, capacity),)
        if not isinstance(capacity, int) and (k.kind != "at" or not self._readable(capacity)):
            raise NotMatched(
                f"the buffers have {capacity} tokens, which is known at run time only: compile "
                "with dynamic=False"
            )
        return CacheSource(
            "static",
            keys.base if k.kind == "tail" else _read(k),
            values.base if v.kind == "tail" else _read(v),
            k_new=k.new,
            v_new=v.new,
            past_k=k.node,
            past_v=v.node,
            stored_k=k.node if made[0] else None,
            stored_v=v.node if made[0] else None,
            keep=0 if k.kind == "at" else int(capacity),
            write=k.kind,
            writes=(k.write, v.write, *k.others, *v.others),
            position=k.position,
            capacity=capacity,
            tokens_first=k.tokens_first,
            assumed=(*k.assumed, *v.assumed, *alike),
        )

    def _readable(self, size: Size) -> bool:
        """Whether a size can be found from the inputs of a call."""
        return not isinstance(size, torch.SymInt) or size.node.expr.free_symbols <= self.symbols

    # ------------------------------------------------------------------ the three kinds

    def _buffer(self, operand: Operand, reader: fx.Node) -> _Buffer | None:
        node = operand.base
        between: list[fx.Node] = []
        whole = root_of(node.args[0]) if op_name(node) == "getitem" else None
        if whole is not None and _is_buffer(whole) and self._writes(whole):
            between, node = [node], whole
        node = root_of(node) or node
        if _is_buffer(node):
            found = self._written(node, tuple(between), operand.tokens_first)
            first = min([*between, *operand.between, reader], key=self.order.__getitem__)
            if found is not None and self.order[found.write] > self.order[first]:
                raise NotMatched(f"the buffer {node.name} is read before it is written")
            return found
        return None if operand.tokens_first else self._tail(operand.base)

    def _writes(self, buffer: fx.Node) -> list[fx.Node]:
        return sorted(writes_to(buffer) & self.live, key=self.order.__getitem__)

    def _written(
        self, node: fx.Node, between: tuple[fx.Node, ...], tokens_first: bool
    ) -> _Buffer | None:
        writes = self._writes(node)
        if not writes:
            return None
        write = writes[0]
        if len(writes) > 1:
            raise NotMatched(
                f"the buffer {node.name}, or what shares its memory, is written {len(writes)} "
                "times in the graph"
            )
        if root_of(write.args[0]) is not node:
            raise NotMatched(f"{write.name} writes to a view of the buffer {node.name}")
        if op_name(write) == "copy_":
            if between or tokens_first:
                raise NotMatched(f"the buffer {node.name} is copied to and read in part")
            return self._rolled(node, write)
        placed = self._placed(write, tokens_first)
        if placed is None:
            raise NotMatched(f"{write.name} writes to the buffer {node.name}: not understood")
        new, position, batch = placed
        buffer = _Buffer("at", node, new, write, position, batch, between, (), tokens_first)
        return replace(buffer, assumed=self._check_slice(buffer))

    def _check_slice(self, buffer: _Buffer) -> tuple[tuple[Size, Size], ...]:
        """What is read is the whole buffer, or its tokens up to the last new one.

        Returns:
            Sizes that must be equal for that to be so.

        Raises:
            NotMatched: it is another part.
        """
        axis = tokens_axis(buffer.tokens_first)
        new, whole = shape_of(buffer.new), shape_of(buffer.node)
        assert new is not None and whole is not None and buffer.position is not None
        if not buffer.between:
            if buffer.batch is not None and not same(buffer.batch, whole[0]):
                raise NotMatched("a part of the batch is written and all of it is read")
            return ()
        index = buffer.between[0].args[1]
        items = index if isinstance(index, tuple) else (index,)
        if len(items) <= axis or any(item != _WHOLE for item in items[axis + 1 :]):
            raise NotMatched(f"{buffer.between[0].name} reads a part of the buffer: not understood")
        rest = [item for i, item in enumerate(items[:axis]) if i > 0]
        tokens = items[axis]
        stop = None
        if isinstance(tokens, slice) and tokens.start in (None, 0) and tokens.step in (None, 1):
            stop = scalar_of(tokens.stop)
        end = buffer.position + new[axis]
        if stop is None or any(item != _WHOLE for item in rest):
            raise NotMatched(f"{buffer.between[0].name} reads a part of the buffer: not understood")
        assumed: tuple[tuple[Size, Size], ...] = ()
        if not (proven(stop >= whole[axis]) or same(stop, end)):
            if not self.reader.entry.knows(end):
                raise NotMatched(
                    f"{buffer.between[0].name} does not read the tokens up to the last one that "
                    "was written"
                )
            assumed = ((stop, end),)
        count = _prefix(items[0])
        written = whole[0] if buffer.batch is None else buffer.batch
        if count is False or not same(whole[0] if count is None else count, written):
            raise NotMatched("other sequences are read than were written")
        return assumed

    def _placed(self, write: fx.Node, tokens_first: bool) -> tuple[fx.Node, Size, Any] | None:
        """New tokens, position of the first and number of sequences of a write."""
        axis, name, arguments = tokens_axis(tokens_first), op_name(write), write.args
        if name == "index_copy_" and len(arguments) == 4 and not write.kwargs:
            dim, index, new = arguments[1:]
            if not isinstance(dim, int) or dim % 4 != axis:
                return None
            items: tuple[Any, ...] = (*[_WHOLE] * axis, index)
        elif write.target is operator.setitem:
            items, new = arguments[1], arguments[2]  # type: ignore[assignment]
        elif name in ("index_put_", "function index_put_", "function index_put_.default"):
            if len(arguments) != 3 or write.kwargs or not isinstance(arguments[1], (tuple, list)):
                return None
            items = tuple(_WHOLE if item is None else item for item in arguments[1])
            new = arguments[2]
        else:
            return None
        if not isinstance(items, tuple) or len(items) <= axis or not isinstance(new, fx.Node):
            return None
        rest = [item for i, item in enumerate(items) if i not in (0, axis)]
        if any(item != _WHOLE for item in rest):
            return None
        batch = _prefix(items[0])
        shape = shape_of(new)
        if batch is False or shape is None or len(shape) != 4:
            return None
        position = self._position(items[axis], shape[axis])
        return None if position is None else (new, position, batch)

    def _position(self, index: object, tokens: Size) -> Size | None:
        if isinstance(index, slice):
            start, stop = scalar_of(index.start or 0), scalar_of(index.stop)
            if index.step not in (None, 1) or start is None or stop is None:
                return None
            return start if same(stop - start, tokens) and not proven(start < 0) else None
        value = self.reader.value(index)
        if not isinstance(value, Index) or value.axis != -1 or not same(value.extent, tokens):
            return None
        return value.offset

    def _rolled(self, node: fx.Node, write: fx.Node) -> _Buffer:
        """``new = buffer.roll(-1); new[:, :, [-1]] = token; buffer.copy_(new)``."""
        rolled = write.args[1] if len(write.args) == 2 else None
        if not isinstance(rolled, fx.Node) or op_name(rolled) != "roll":
            raise NotMatched(f"{write.name} copies to the buffer {node.name}: not understood")
        bound = bind(rolled, "input", "shifts", "dims") or {}
        if (bound.get("input"), bound.get("shifts")) != (node, -1) or bound.get("dims") not in (
            -2, 2, (2,), (-2,), [2], [-2],
        ):  # fmt: skip
            raise NotMatched(f"{rolled.name} does not move the buffer {node.name} by one token")
        writes = self._writes(rolled)
        last = writes[0] if len(writes) == 1 and writes[0].target is operator.setitem else None
        index = last.args[1] if last is not None else None
        if last is None or last.args[0] is not rolled or not _is_last(index):
            raise NotMatched(f"{rolled.name} does not get one new token at its end")
        if self.order[last] > self.order[write]:
            raise NotMatched(f"{last.name} writes after the buffer has been copied")
        new = last.args[2]
        users = {user for user in rolled.users if user in self.live}
        if not isinstance(new, fx.Node) or users != {last, write}:
            raise NotMatched(f"{rolled.name} is also used elsewhere")
        shape = shape_of(new)
        if shape is None or len(shape) != 4 or not same(shape[2], 1):
            raise NotMatched(f"{new.name} is not one token")
        return _Buffer("roll", node, new, write, None, None, (), (last, rolled))

    def _tail(self, node: fx.Node) -> _Buffer | None:
        """``full = cat(buffer[:, :, a:b], new)`` or ``new``; ``buffer.copy_(full[:, :, -W:])``."""
        for user in node.users:
            if op_name(user) != "getitem" or user not in self.live:
                continue
            copies = [
                u for u in user.users if op_name(u) == "copy_" and u.args[1:] == (user,)
            ]  # fmt: skip
            buffer = copies[0].args[0] if len(copies) == 1 else None
            if not isinstance(buffer, fx.Node) or not _is_buffer(buffer):
                continue
            shape = shape_of(buffer)
            capacity = settled(shape[2]) if shape is not None and len(shape) == 4 else None
            if capacity is None or last_tokens(user.args[1], 2) != capacity:
                raise NotMatched(f"{user.name} does not take the tokens that fit in {buffer.name}")
            if self._writes(buffer) != copies:
                raise NotMatched(f"the buffer {buffer.name} is written more than once")
            return self._joined(node, buffer, copies[0], user, capacity)
        return None

    def _joined(
        self, node: fx.Node, buffer: fx.Node, write: fx.Node, tail: fx.Node, capacity: int
    ) -> _Buffer:
        shape = shape_of(node)
        if shape is None or not proven(shape[2] >= capacity):
            raise NotMatched(f"{tail.name} may be shorter than the buffer {buffer.name}")
        bound = bind(node, "tensors", "dim") if op_name(node) == "cat" else None
        parts = (bound or {}).get("tensors")
        if isinstance(parts, (list, tuple)) and len(parts) == 2 and (bound or {})["dim"] in (-2, 2):
            old, new = parts
            if op_name(old) == "getitem" and old.args[0] is buffer:
                if self.order[old] > self.order[write]:
                    raise NotMatched(f"{old.name} reads {buffer.name} after it is written")
                return _Buffer(
                    "tail", buffer, new, write, self._past(old, capacity), None, (), (tail, old)
                )
        readers = [user for user in buffer.users if user in self.live and user is not write]
        if any(user.op != "output" for user in readers):
            raise NotMatched(f"the buffer {buffer.name} is read, but not by this attention")
        return _Buffer("tail", buffer, node, write, 0, None, (), (tail,))

    def _past(self, old: fx.Node, capacity: int) -> Size | None:
        """Tokens of the buffer that stay: its first p (the position), or all but one (None)."""
        index = old.args[1]
        if isinstance(index, tuple) and len(index) in (3, 4) and isinstance(index[2], slice):
            others = [item for i, item in enumerate(index) if i != 2]
            start, stop = index[2].start, scalar_of(index[2].stop)
            if all(item == _WHOLE for item in others) and index[2].step in (None, 1):
                fits = stop is not None and proven(stop > 0) and proven(stop <= capacity)
                if start in (None, 0) and fits:
                    return stop
                if start == 1 and index[2].stop is None:
                    return None
        raise NotMatched(f"{old.name} takes tokens of a buffer in a way that is not understood")


def _check_new(buffer: _Buffer) -> None:
    """What is written is neither cast nor broadcast on its way.

    Raises:
        NotMatched: it is, or may be.
    """
    new, whole = tensor_of(buffer.new), tensor_of(buffer.node)
    assert new is not None and whole is not None
    if new.dtype != whole.dtype or new.device != whole.device:
        raise NotMatched(
            f"new tokens ({new.dtype}, {new.device}) are written to the buffer {buffer.node.name} "
            f"({whole.dtype}, {whole.device}): make the buffer in the dtype of the keys"
        )
    axis = tokens_axis(buffer.tokens_first)
    wanted = [whole.shape[0] if buffer.batch is None else buffer.batch, *whole.shape[1:]]
    fits = [
        same(a, b) or (i > 0 and settled(a) == settled(b))
        for i, (a, b) in enumerate(zip(new.shape, wanted, strict=True))
        if i != axis
    ]
    if not all(fits):
        raise NotMatched(
            f"new tokens {tuple(new.shape)} do not fill the heads and sequences of the buffer "
            f"{buffer.node.name} {tuple(whole.shape)}"
        )


def _read(buffer: _Buffer) -> fx.Node:
    """What the attention reads of a buffer."""
    return buffer.between[0] if buffer.between else buffer.node


def root_of(node: object) -> fx.Node | None:
    """The tensor behind calls that give back what they got, such as ``x.to(x.dtype)``."""
    while is_cast(node) if isinstance(node, fx.Node) else False:
        assert isinstance(node, fx.Node)
        source = node.args[0]
        before, after = tensor_of(source), tensor_of(node)
        if before is None or after is None:
            break
        if (before.dtype, before.device) != (after.dtype, after.device):
            break
        node = source
    return node if isinstance(node, fx.Node) else None


def _is_buffer(node: object) -> bool:
    if not isinstance(node, fx.Node) or tensor_of(node) is None:
        return False
    if len(shape_of(node) or ()) != 4:
        return False
    return node.op == "placeholder" or op_name(node) in _MAKERS


def _prefix(item: object) -> Any:
    """Sequences that an index of the batch takes: None for all, False if it is not understood."""
    if item == _WHOLE:
        return None
    if isinstance(item, slice) and item.start in (None, 0) and item.step in (None, 1):
        count = scalar_of(item.stop)
        return False if count is None else count
    return False


def _is_last(index: object) -> bool:
    """``(:, :, t)`` with ``t = tensor([-1])``, or -1 in a slice."""
    if not isinstance(index, tuple) or len(index) not in (3, 4):
        return False
    if any(item != _WHOLE for i, item in enumerate(index) if i != 2):
        return False
    last = index[2]
    if isinstance(last, slice):
        return last == slice(-1, None, None)
    return op_name(last) == "tensor" and list(getattr(last, "args", ())) == [[-1]]


def _alike(a: Size | None, b: Size | None) -> bool:
    if a is None or b is None:
        return a is b
    return same(a, b)
