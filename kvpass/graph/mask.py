# SPDX-License-Identifier: Apache-2.0
"""What a mask means: abstract values of index arithmetic, comparisons and 0/min masks.

An expression is read only if every index in it is proven: which axis it runs along, from which
offset and over which extent. Axes are counted from the right (-1 = keys, -2 = queries), as
broadcasting does. Whatever is not read is passed to the kernel as it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from kvpass.graph.entry import EntryValues
from kvpass.graph.sizes import Size, fixed, proven, same
from kvpass.graph.values import (
    LARGEST,
    Bias,
    Bound,
    Const,
    Floor,
    Index,
    Keep,
    Pad,
    Value,
    below,
    fits,
    move,
    same_chunk,
)
from kvpass.graph.walk import (
    bind,
    inserted_axes,
    is_cast,
    is_written,
    number_of,
    op_name,
    scalar_of,
    shape_of,
    tensor_of,
)


@dataclass(frozen=True)
class Reading:
    """A mask that has been read: causal, in a sliding window or chunks, padding, or none."""

    causal: bool
    window: int
    kv_mask: fx.Node | None
    # Hidden keys get this score; -inf also for bool masks of SDPA.
    hidden: float = -math.inf
    # Column of kv_mask that stands for the first key, which is its position too, where it matters.
    kv_offset: Size = 0
    # Position of the first query, as the mask has it.
    past: Size | None = None
    # Sizes that are equal in every call that runs, but not proven to be.
    assumed: tuple[tuple[Size, Size], ...] = ()
    # Only keys of the query's own chunk of so many positions are seen; 0: all.
    chunk: int = 0


class MaskReader:
    """Reads mask expressions of one graph.

    Args:
        entry: what integer inputs hold.
    """

    def __init__(self, entry: EntryValues) -> None:
        self.entry = entry
        self._known: dict[fx.Node, Value | None] = {}

    def value(self, node: object) -> Value | None:
        """The abstract value of a node, or None if it has none."""
        if not isinstance(node, fx.Node):
            number = number_of(node)
            return None if number is None else Const(number)
        if node not in self._known:
            self._known[node] = None
            self._known[node] = self._evaluate(node)
        return self._known[node]

    def read(
        self,
        value: Value | None,
        shape: tuple[Size, ...],
        batch: Size,
        queries: Size,
        keys: Size,
        position: Size | None = None,
    ) -> Reading | None:
        """What a bool or 0/min value means for scores [batch, heads, queries, keys], or None.

        With a ``position`` the keys are a buffer of which only a part is filled, and the queries
        begin at ``position``; the reading says where the mask takes them to begin.
        """
        hidden = -math.inf
        if isinstance(value, Bias):
            hidden = value.hidden
            value = value.keep
        if not isinstance(value, Keep) or value.negated or not shape or not same(shape[-1], keys):
            return None
        causal, window = False, 0
        past = keys - queries if position is None else _past_of(value, position)
        for bound in value.bounds:
            if bound.k_axis != -1 or not same(bound.k_extent, keys):
                return None
            if _hides_nothing(bound, queries, keys) and not same(bound.shift, past):
                continue
            if bound.q_axis not in (-2, None) or not same(bound.q_extent, queries):
                return None
            if bound.lower:
                # j > i + past - window
                width = fixed(past - bound.shift)
                if width is None or width < 1:
                    return None
                window = min(width, window or width)
            elif not same(bound.shift, past):
                return None
            else:
                causal = True
        chunk = value.chunks[0] if value.chunks else None
        if chunk is not None:
            along = (chunk.k_axis, chunk.q_axis) == (-1, -2)
            fits = same(chunk.k_extent, keys) and same(chunk.q_extent, queries)
            if not along or not fits or not same(chunk.q_offset - chunk.k_offset, past):
                return None
            if len(value.chunks) > 1 or window or not causal:
                return None
        if window and not causal:
            return None
        nodes = {pad.node for pad in value.pads}
        assumed: list[tuple[Size, Size]] = []
        if len(nodes) > 1:
            return None
        for pad in value.pads:
            rows = tensor_of(pad.node)
            if pad.b_axis != -4 or pad.k_axis != -1 or rows is None:
                return None
            if not same(pad.b_extent, batch) or not same(pad.k_extent, keys):
                return None
            if not same(rows.shape[0], batch):
                if fixed(rows.shape[0]) is not None:
                    return None
                assumed.append((rows.shape[0], batch))
            if not same(pad.offset, value.pads[0].offset):
                return None
        offset = value.pads[0].offset if value.pads else 0
        if chunk is not None:
            if value.pads and not same(offset, chunk.k_offset):
                return None
            offset = chunk.k_offset
        return Reading(
            causal,
            window,
            next(iter(nodes), None),
            hidden,
            offset,
            past,
            tuple(assumed),
            0 if chunk is None else chunk.size,
        )

    def _evaluate(self, node: fx.Node) -> Value | None:
        if is_written(node):
            return None
        handler = _HANDLERS.get(op_name(node))
        value = handler(self, node) if handler is not None else None
        if value is None and is_cast(node) and isinstance(node.args[0], fx.Node):
            value = self._cast(node)
        if value is None:
            value = self._opaque(node)
        return value

    def _cast(self, node: fx.Node) -> Value | None:
        value, tensor = self.value(node.args[0]), tensor_of(node)
        before = tensor_of(node.args[0])
        if tensor is None or before is None or tensor.shape != before.shape:
            return None
        if isinstance(value, (Index, Floor)) and tensor.dtype in (torch.int64, torch.int32):
            offset = value.offset if isinstance(value, Index) else value.index.offset
            return value if not isinstance(offset, int) or fits(offset, tensor) else None
        if isinstance(value, Keep) and (before.dtype == torch.bool or tensor.dtype == torch.bool):
            return value
        if isinstance(value, (Const, Bias)) and tensor.dtype == before.dtype:
            return value
        return None

    def _arange(self, node: fx.Node) -> Value | None:
        tensor = tensor_of(node)
        extra = ("dtype", "device", "layout", "pin_memory", "requires_grad")
        if any(key not in (*extra, "start", "end", "step") for key in node.kwargs):
            return None
        if tensor is None or tensor.dtype not in (torch.int64, torch.int32):
            return None
        positional = list(node.args)
        if len(positional) == 1 and "start" not in node.kwargs and "end" not in node.kwargs:
            start: Any = 0
        elif positional:
            start = positional[0] if len(positional) > 1 or "end" in node.kwargs else None
        else:
            start = node.kwargs.get("start", 0)
        step = positional[2] if len(positional) > 2 else node.kwargs.get("step", 1)
        offset = scalar_of(start)
        if offset is None or step != 1:
            return None
        if isinstance(offset, int) and not fits(offset, tensor):
            return None
        return Index(-1, offset, tensor.shape[0])

    def _shift(self, node: fx.Node) -> Value | None:
        bound = bind(node, "input", "other")
        if bound is None or len(bound) != 2:
            return None
        left, right = bound["input"], bound["other"]
        sign = -1 if op_name(node) == "sub" else 1
        value, amount = self.value(left), self._amount(right, node)
        if not isinstance(value, Index) and sign == 1:
            value, amount = self.value(right), self._amount(left, node)
        if not isinstance(value, Index) or amount is None:
            return None
        shape = shape_of(node)
        if value.axis is not None and (shape is None or not same(shape[value.axis], value.extent)):
            return None  # broadcast along the axis of the index
        return replace(value, offset=value.offset + sign * amount)

    def _amount(self, item: object, at: fx.Node) -> Size | None:
        """A number that is added to an index: known, a size, or in a tensor of one element."""
        known = scalar_of(item)
        tensor = tensor_of(item)
        if isinstance(known, int) and not fits(known, tensor_of(at)):
            return None
        if known is not None or tensor is None:
            return known
        value = self.value(item)
        if isinstance(value, Const) and tensor.dtype in (torch.int64, torch.int32):
            return int(value.value) if value.value == int(value.value) else None
        return self.entry.of(item, at) if tensor.dim() == 0 else None

    def _floor(self, node: fx.Node) -> Value | None:
        """``index // n``: integer tensors are divided down, also below zero."""
        bound, tensor = bind(node, "input", "other"), tensor_of(node)
        if bound is None or len(bound) != 2 or tensor is None:
            return None
        value, amount = self.value(bound["input"]), scalar_of(bound["other"])
        divisor = None if amount is None else fixed(amount)
        whole = tensor.dtype in (torch.int64, torch.int32)
        if not isinstance(value, Index) or divisor is None or divisor < 1 or not whole:
            return None
        return Floor(value, divisor)

    def _getitem(self, node: fx.Node) -> Value | None:
        source, index = node.args
        shape = shape_of(source)
        if not isinstance(source, fx.Node) or shape is None:
            return None
        if isinstance(self.value(source), Const):
            return self.value(source)  # whatever is taken of it
        axes = inserted_axes(index, len(shape))
        if axes is not None:
            return self._moved(source, node, axes)
        if isinstance(index, tuple) and len(index) == 2:
            return self._gather(source, index)
        return None

    def _gather(self, source: fx.Node, index: tuple[Any, ...]) -> Value | None:
        """``attention_mask[batch_idx, kv_idx]`` with two index tensors that broadcast."""
        rows, columns = self.value(index[0]), self.value(index[1])
        mask = tensor_of(source)
        if mask is None or mask.dim() != 2 or mask.dtype != torch.bool:
            return None
        if not isinstance(rows, Index) or not isinstance(columns, Index):
            return None
        if rows.axis is None or columns.axis is None or rows.axis == columns.axis:
            return None
        if not same(rows.offset, 0):
            return None
        extents = (rows.extent, columns.extent)
        pad = Pad(source, rows.axis, columns.axis, *extents, offset=columns.offset)
        return Keep(pads=(pad,))

    def _unsqueeze(self, node: fx.Node) -> Value | None:
        bound, shape = bind(node, "input", "dim"), shape_of(node.args[0])
        if bound is None or shape is None or not isinstance(bound.get("dim"), int):
            return None
        rank = len(shape) + 1
        axes: list[int | None] = list(range(len(shape)))
        axes.insert(bound["dim"] % rank, None)
        return self._moved(node.args[0], node, axes)

    def _reshape(self, node: fx.Node) -> Value | None:
        """A 1-D index laid along one axis of a shape whose other axes are all one."""
        source = node.args[0]
        before, after = shape_of(source), shape_of(node)
        if before is None or after is None or len(before) != 1 or len(node.args) < 2:
            return None
        dims = node.args[1] if isinstance(node.args[1], (list, tuple)) else node.args[1:]
        free = [i for i, dim in enumerate(dims) if not (isinstance(dim, int) and dim == 1)]
        if len(free) != 1 or len(dims) != len(after) or not same(after[free[0]], before[0]):
            return None
        if not isinstance(dims[free[0]], (int, fx.Node)):
            return None
        return self._moved(source, node, [0 if i == free[0] else None for i in range(len(after))])

    def _moved(self, source: object, node: fx.Node, axes: list[int | None]) -> Value | None:
        """The value of ``source`` with output axis i taken from input axis ``axes[i]``."""
        value, before, after = self.value(source), shape_of(source), shape_of(node)
        if value is None or before is None or after is None or len(after) != len(axes):
            return None
        return move(value, before, after, axes)

    def _compare(self, node: fx.Node) -> Value | None:
        bound = bind(node, "input", "other")
        if bound is None or len(bound) != 2:
            return None
        left, right, name = bound["input"], bound["other"], op_name(node)
        a, b = self._index(left), self._index(right)
        if a is None or b is None:
            return None
        # Rewrite as "small <= large" possibly negated: x < y is not (y <= x).
        if name in ("ge", "lt"):
            small, large = b, a
        else:
            small, large = a, b
        negated = name in ("lt", "gt")
        return below(small, large, negated)

    def _index(self, item: object) -> Index | None:
        number = scalar_of(item)
        if number is not None:
            small = not isinstance(number, int) or abs(number) < LARGEST
            return Index(None, number, 1) if small else None
        value = self.value(item)
        return value if isinstance(value, Index) else None

    def _both(self, node: fx.Node) -> Value | None:
        bound = bind(node, "input", "other")
        if bound is None or len(bound) != 2:
            return None
        parts = [self.value(bound["input"]), self.value(bound["other"])]
        tensor = tensor_of(node)
        if tensor is None or tensor.dtype != torch.bool:
            return None
        keeps = [part for part in parts if isinstance(part, Keep) and not part.negated]
        if len(keeps) != 2:
            return None
        bounds = keeps[0].bounds + keeps[1].bounds
        pads = keeps[0].pads + keeps[1].pads
        return Keep(bounds, pads, chunks=keeps[0].chunks + keeps[1].chunks)

    def _invert(self, node: fx.Node) -> Value | None:
        value, tensor = self.value(node.args[0]), tensor_of(node.args[0])
        if isinstance(value, Keep) and tensor is not None and tensor.dtype == torch.bool:
            return value.inverted()
        return None

    def _zero(self, node: fx.Node) -> Value | None:
        """``x == 0`` and ``x != 0`` of a 0/1 tensor; ``a // n == b // n`` of indices."""
        bound = bind(node, "input", "other")
        if bound is None:
            return None
        if number_of(bound.get("other")) != 0.0:
            left, right = self.value(bound.get("input")), self.value(bound.get("other"))
            if not isinstance(left, Floor) or not isinstance(right, Floor):
                return None
            keep = same_chunk(left, right)
            return keep.inverted() if keep is not None and op_name(node) == "ne" else keep
        value = self.value(bound["input"])
        if not isinstance(value, Keep):
            return None
        return value.inverted() if op_name(node) == "eq" else value

    def _ones(self, node: fx.Node) -> Value | None:
        return Keep()

    def _zeros(self, node: fx.Node) -> Value | None:
        return Const(0.0)

    def _full(self, node: fx.Node) -> Value | None:
        position = 2 if op_name(node) == "new_full" else 1
        given = node.args[position] if len(node.args) > position else node.kwargs.get("fill_value")
        number = number_of(given)
        return None if number is None else Const(number)

    def _tensor(self, node: fx.Node) -> Value | None:
        number = number_of(node.args[0]) if len(node.args) == 1 else None
        return None if number is None else Const(number)

    def _triangle(self, node: fx.Node) -> Value | None:
        bound, shape = bind(node, "input", "diagonal"), shape_of(node)
        if bound is None or shape is None or len(shape) < 2:
            return None
        diagonal = scalar_of(bound.get("diagonal", 0))
        inner = self.value(bound["input"])
        if diagonal is None:
            return None
        lower = op_name(node) == "tril"
        shift = diagonal if lower else diagonal - 1
        keep = Keep(bounds=(Bound(-1, -2, shift, shape[-1], shape[-2]),))
        if isinstance(inner, Keep) and inner.everywhere:
            return keep if lower else keep.inverted()
        if isinstance(inner, Const) and not lower and inner.value < 0:
            return Bias(keep, inner.value)
        return None

    def _where(self, node: fx.Node) -> Value | None:
        bound = bind(node, "condition", "input", "other")
        if bound is None or len(bound) != 3:
            return None
        keep = self.value(bound["condition"])
        seen, hidden = self.value(bound["input"]), self.value(bound["other"])
        if not isinstance(keep, Keep) or not isinstance(seen, Const):
            return None
        if not isinstance(hidden, Const):
            return None
        if hidden.value == 0.0:
            keep, seen, hidden = keep.inverted(), hidden, seen
        if seen.value != 0.0 or not hidden.value < 0:
            return None
        return Bias(keep, hidden.value)

    def _masked_fill(self, node: fx.Node) -> Value | None:
        bound = bind(node, "input", "mask", "value")
        if bound is None or len(bound) != 3:
            return None
        base, mask, fill = (self.value(bound[key]) for key in ("input", "mask", "value"))
        if not (isinstance(base, Const) and base.value == 0.0 and isinstance(mask, Keep)):
            return None
        if not isinstance(fill, Const) or not fill.value < 0:
            return None
        return Bias(mask.inverted(), fill.value)

    def _opaque(self, node: fx.Node) -> Value | None:
        """A bool [rows, keys] tensor of unknown content can be padding, a 1-D input positions."""
        tensor = tensor_of(node)
        if tensor is not None and tensor.dim() == 1 and node.op == "placeholder":
            first = self.entry.of(node, node)
            return None if first is None else Index(-1, first, tensor.shape[0])
        if tensor is None or tensor.dtype != torch.bool or tensor.dim() != 2:
            return None
        return Keep(pads=(Pad(node, -2, -1, tensor.shape[0], tensor.shape[1]),))

    def _same(self, node: fx.Node) -> Value | None:
        """Broadcasting and copies: axes counted from the right do not move."""
        value = self.value(node.args[0])
        return value if node.args and isinstance(node.args[0], fx.Node) else None


def _hides_nothing(bound: Bound, queries: Size, keys: Size) -> bool:
    """Whether a bound is proven to hold for all keys, whatever the query."""
    if bound.lower:
        # The strictest place is the last one along whatever axis it is.
        last = bound.q_extent - 1 if bound.q_axis is not None else 0
        return proven(bound.shift + last < 0)
    return proven(bound.shift >= keys - 1)


def _past_of(value: Keep, position: Size) -> Size:
    """Where a causal mask over a buffer takes the queries to begin: for the runtime to confirm."""
    shifts = [b.shift for b in value.bounds if not b.lower and b.q_axis in (-2, None)]
    return shifts[0] if shifts else position


_HANDLERS: dict[str, Callable[[MaskReader, fx.Node], Value | None]] = {
    "arange": MaskReader._arange,
    "add": MaskReader._shift,
    "sub": MaskReader._shift,
    "floordiv": MaskReader._floor,
    "getitem": MaskReader._getitem,
    "unsqueeze": MaskReader._unsqueeze,
    "view": MaskReader._reshape,
    "reshape": MaskReader._reshape,
    **dict.fromkeys(("le", "lt", "ge", "gt"), MaskReader._compare),
    "and_": MaskReader._both,
    "invert": MaskReader._invert,
    "eq": MaskReader._zero,
    "ne": MaskReader._zero,
    **dict.fromkeys(("ones", "new_ones", "ones_like"), MaskReader._ones),
    **dict.fromkeys(("zeros", "new_zeros", "zeros_like"), MaskReader._zeros),
    **dict.fromkeys(("full", "new_full", "full_like"), MaskReader._full),
    "tensor": MaskReader._tensor,
    "tril": MaskReader._triangle,
    "triu": MaskReader._triangle,
    "where": MaskReader._where,
    "masked_fill": MaskReader._masked_fill,
    **dict.fromkeys(("expand", "expand_as", "contiguous", "clone", "detach"), MaskReader._same),
}
