# SPDX-License-Identifier: Apache-2.0
"""From the operands of the products back to queries, keys and values ``[B, H, tokens, D]``."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from kvpass.graph.sizes import same_shape, settled
from kvpass.graph.walk import (
    NotMatched,
    bind,
    inserted_axes,
    is_cast,
    mutates,
    need_tensor,
    number_of,
    op_name,
    shape_of,
    tensor_of,
)


@dataclass(frozen=True)
class Operand:
    """An operand of a product.

    Attributes:
        node: as the product sees it.
        base: before heads are repeated, batch and heads folded, numbers widened or scaled.
        between: the nodes between the two, and ``node`` if it is not ``base``.
        factor: ``node`` is ``factor`` times ``base``, apart from its form.
        tokens_first: ``base`` is ``[B, tokens, H, D]``.
        seen_first: the same of ``node``.
    """

    node: fx.Node
    base: fx.Node
    between: tuple[fx.Node, ...]
    factor: float = 1.0
    tokens_first: bool = False
    seen_first: bool = False


def heads_first(tensor: torch.Tensor, tokens_first: bool) -> torch.Tensor:
    """``[B, H, tokens, D]``, also of ``[B, tokens, H, D]``; other ranks as they are."""
    return tensor.transpose(1, 2) if tokens_first and tensor.dim() == 4 else tensor


def unrepeat(node: fx.Node, tokens_first: bool = False) -> Operand:
    """Walk back from K or V as a product sees it to what is cached.

    Passed are ``contiguous``, repeats of each KV head for its group of query heads in the
    interleaved order (query head i uses KV head i // r), folding of batch and heads, casts that
    widen and multiplication by a number.
    """
    return _walk(Operand(node, node, (), 1.0, tokens_first, tokens_first))


def behind_transpose(operand: Operand) -> Operand | None:
    """The same operand further back, if its base is ``x.transpose(1, 2)``.

    ``[B, tokens, H, D]`` is behind ``[B, H, tokens, D]``, and the other way round. Heads may be
    repeated before the transposition.
    """
    source = _transposed(operand.base)
    if source is None:
        return None
    between = (*operand.between, operand.base)
    turned = not operand.tokens_first
    return _walk(replace(operand, base=source, between=between, tokens_first=turned))


def _transposed(node: fx.Node) -> fx.Node | None:
    """``x`` of ``x.transpose(1, 2)`` or ``x.permute(0, 2, 1, 3)`` with four axes."""
    if len(shape_of(node) or ()) != 4 or not node.args or not isinstance(node.args[0], fx.Node):
        return None
    dims: Any = node.args[1:]
    if node.kwargs or not all(isinstance(dim, int) for dim in dims):
        bound = bind(node, "input", "dim0", "dim1") or bind(node, "input", "dims") or {}
        dims = bound.get("dims", (bound.get("dim0"), bound.get("dim1")))
    if not isinstance(dims, (tuple, list)) or not all(isinstance(dim, int) for dim in dims):
        return None
    places = [dim % 4 for dim in dims]
    if op_name(node) == "transpose":
        return node.args[0] if sorted(places) == [1, 2] else None
    return node.args[0] if op_name(node) == "permute" and places == [0, 2, 1, 3] else None


def _walk(operand: Operand) -> Operand:
    current, factor = operand.base, operand.factor
    between = list(operand.between)
    while True:
        step = _step(current, 2 if operand.tokens_first else 1)
        if step is None:
            scaled = _scaled(current)
            if scaled is None:
                return replace(operand, base=current, between=tuple(between), factor=factor)
            factor *= scaled[1]
            step = scaled[0], [current]
        inner, passed = step
        between.extend(passed)
        current = inner


def unfold_query(node: fx.Node) -> Operand:
    """Walk back from a query that is folded to ``[B * H, n, D]``, and over casts that widen."""
    current = node
    between: list[fx.Node] = []
    while True:
        inner = _widened(current) or _folded(current)
        if inner is None:
            return Operand(node, current, tuple(between))
        between.append(current)
        current = inner


def _step(node: fx.Node, axis: int) -> tuple[fx.Node, list[fx.Node]] | None:
    """One step back; ``axis`` is that of the heads."""
    name = op_name(node)
    source = node.args[0] if node.args else None
    if not isinstance(source, fx.Node):
        return None
    if name == "contiguous" and len(node.args) == 1 and not node.kwargs:
        return source, [node]
    if name == "repeat_interleave":
        return _repeat_interleave(node, axis)
    wide = _widened(node) or (_folded(node) if axis == 1 else None)
    if wide is not None:
        return wide, [node]
    if name in ("reshape", "view", "flatten"):
        return _expanded(node, source, axis)
    return None


def _widened(node: fx.Node) -> fx.Node | None:
    """The input of a cast that loses nothing: to the same dtype, or from 16 bits to float32."""
    source = node.args[0] if node.args else None
    before, after = tensor_of(source), tensor_of(node)
    if not is_cast(node) or before is None or after is None or before.device != after.device:
        return None
    narrow = (torch.float16, torch.bfloat16)
    if before.dtype == after.dtype or (before.dtype in narrow and after.dtype == torch.float32):
        return source  # type: ignore[return-value]
    return None


def _folded(node: fx.Node) -> fx.Node | None:
    """``[B, H, S, D]`` before a reshape to ``[B * H, S, D]``, or to the shape it has."""
    if op_name(node) not in ("reshape", "view", "flatten") or not node.args:
        return None
    source = node.args[0]
    before, after = shape_of(source), shape_of(node)
    if not isinstance(source, fx.Node) or before is None or after is None or len(before) != 4:
        return None
    if same_shape(before, after):
        return source
    batch, heads, *rest = before
    return source if same_shape(after, (batch * heads, *rest)) else None


def _scaled(node: fx.Node) -> tuple[fx.Node, float] | None:
    """``x`` and ``c`` of ``x * c`` or ``x / c`` with a positive number."""
    if op_name(node) not in ("mul", "div") or mutates(node):
        return None
    bound = bind(node, "input", "other")
    if bound is None or len(bound) != 2:
        return None
    left, right = bound["input"], bound["other"]
    if op_name(node) == "mul" and not isinstance(left, fx.Node):
        left, right = right, left
    number = number_of(right) if tensor_of(right) is None else None
    if not isinstance(left, fx.Node) or tensor_of(left) is None or number is None:
        return None
    if not 0.0 < number < float("inf"):
        return None
    return left, number if op_name(node) == "mul" else 1.0 / number


def _repeat_interleave(node: fx.Node, axis: int) -> tuple[fx.Node, list[fx.Node]] | None:
    bound = bind(node, "input", "repeats", "dim", "output_size")
    if bound is None:
        return None
    source, repeats, dim = bound.get("input"), bound.get("repeats"), bound.get("dim")
    before, after = shape_of(source), shape_of(node)
    if not isinstance(source, fx.Node) or before is None or after is None:
        return None
    if not isinstance(repeats, int) or len(before) != 4 or dim not in (axis, axis - 4):
        return None
    expected = tuple(n * repeats if i == axis else n for i, n in enumerate(before))
    return (source, [node]) if same_shape(after, expected) else None


def _expanded(node: fx.Node, source: fx.Node, axis: int) -> tuple[fx.Node, list[fx.Node]] | None:
    """``x[:, :, None].expand(B, H, r, S, D).reshape(B, H * r, S, D)``; heads on ``axis``."""
    passed = [node]
    if op_name(source) == "contiguous" and isinstance(source.args[0], fx.Node):
        passed.append(source)
        source = source.args[0]
    if op_name(source) != "expand" or not isinstance(source.args[0], fx.Node):
        return None
    widened = source.args[0]
    if op_name(widened) not in ("getitem", "unsqueeze"):
        return None
    origin = widened.args[0]
    shapes = [shape_of(item) for item in (origin, widened, source, node)]
    if not isinstance(origin, fx.Node) or any(shape is None for shape in shapes):
        return None
    first, with_axis, grown, last = (tuple(shape or ()) for shape in shapes)
    if (len(first), len(with_axis), len(grown), len(last)) != (4, 5, 5, 4):
        return None
    if op_name(widened) == "unsqueeze":
        bound = bind(widened, "input", "dim")
        if bound is None or bound["dim"] not in (axis + 1, axis - 4):
            return None
    elif inserted_axes(widened.args[1], 4) != [*range(axis + 1), None, *range(axis + 1, 4)]:
        return None
    repeats = grown[axis + 1]
    before, after = first[: axis + 1], first[axis + 1 :]
    fits = (
        same_shape(with_axis, (*before, 1, *after))
        and same_shape(grown, (*before, repeats, *after))
        and same_shape(last, (*before[:-1], before[-1] * repeats, *after))
    )
    return (origin, [*passed, source, widened]) if fits else None


def kv_heads(operand: Operand, query_heads: int, grouped: bool, what: str) -> int:
    """KV heads in the cache, after checking how query heads are spread over them.

    Raises:
        NotMatched: the heads of the product do not follow "query head i uses KV head i // r".
    """
    unfolded = (n for n in (operand.node, *operand.between, operand.base) if _rank(n) == 4)
    base = need_tensor(operand.base, what)
    product = settled(need_tensor(next(unfolded, None), what).shape[2 if operand.seen_first else 1])
    stored = settled(base.shape[2 if operand.tokens_first else 1])
    if product is None or stored is None:
        raise NotMatched(f"the number of heads of the {what} is not static")
    fits = product in (query_heads, 1) or (grouped and query_heads % max(product, 1) == 0)
    if not fits or stored < 1 or query_heads % stored:
        raise NotMatched(
            f"{query_heads} query heads cannot be spread over {product} heads of the {what}"
        )
    return stored


def _rank(node: fx.Node) -> int:
    return len(shape_of(node) or ())
