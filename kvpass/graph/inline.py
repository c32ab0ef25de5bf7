# SPDX-License-Identifier: Apache-2.0
"""Scalar functions over positions, as flex_attention takes them, in ordinary nodes that broadcast.

A ``mask_mod`` or ``score_mod`` is a graph over one position each of batch, head, query and key.
With index tensors ``[B, 1, 1, 1]``, ``[1, H, 1, 1]``, ``[1, 1, n, 1]`` and ``[1, 1, 1, keys]``
in their place, elementwise operations and indexing give the same numbers for all positions at once.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from kvpass.graph.inputs import NUMBER
from kvpass.graph.pointwise import from_product
from kvpass.graph.values import LARGEST
from kvpass.graph.walk import (
    NotMatched,
    describe,
    is_cast,
    mutates,
    op_name,
    shape_of,
    tensor_of,
    value_of,
)

# fmt: off
_ELEMENTWISE = frozenset((
    "abs", "add", "and_", "bfloat16", "bool", "ceil", "clamp", "clamp_max", "clamp_min", "cos",
    "div", "double", "eq", "exp", "exp2", "float", "floor", "floor_divide", "floordiv",
    "fmod", "ge", "gt", "half", "int", "invert", "le", "log", "log1p", "log2", "logical_or",
    "logical_xor", "long", "lt", "maximum", "minimum", "mod", "mul", "ne", "neg", "or_", "pow",
    "relu", "remainder", "round", "rsqrt", "sigmoid", "sign", "sin", "sqrt", "square", "sub",
    "tanh", "to", "trunc", "type", "type_as", "where", "xor", "bitwise_or", "bitwise_xor",
    "masked_fill", "detach", "clone",
))
# fmt: on
_CONSTANTS = frozenset(("new_ones", "new_zeros", "new_full", "ones", "zeros", "full", "tensor"))
_OUT_OF_PLACE: dict[Any, Callable[..., Any]] = {
    operator.iadd: operator.add,
    operator.isub: operator.sub,
    operator.imul: operator.mul,
    operator.itruediv: operator.truediv,
    operator.iand: operator.and_,
    operator.ior: operator.or_,
}
_TURNED = {"le": "ge", "lt": "gt", "ge": "le", "gt": "lt", "eq": "eq", "ne": "ne"}
_COMPARISONS: dict[str, Callable[..., Any]] = {name: getattr(operator, name) for name in _TURNED}


@dataclass(frozen=True)
class _Table:
    """A captured tensor, of which the first axes have been indexed."""

    node: fx.Node
    indices: tuple[Any, ...] = ()

    @property
    def rank(self) -> int:
        return len(tensor_of(self.node).shape) - len(self.indices)  # type: ignore[union-attr]


class Inliner:
    """Adds nodes to a graph at its insertion point.

    Args:
        graph: of Dynamo, which its owner lets change.
        mode: the fake mode of its example values.
        added: gets every new node.
    """

    def __init__(self, graph: fx.Graph, mode: Any, added: list[fx.Node]) -> None:
        self.graph = graph
        self.mode = mode
        self.added = added

    def call(self, function: Callable[..., Any] | str, *args: Any, **kwargs: Any) -> fx.Node:
        """A new node with its example value; a string is the name of a method.

        Raises:
            NotMatched: it cannot be computed.
        """
        if isinstance(function, str):
            node = self.graph.call_method(function, args, kwargs)
        else:
            node = self.graph.call_function(function, args, kwargs)
        self.added.append(node)
        values, named = fx.map_arg(args, value_of), fx.map_arg(kwargs, value_of)
        try:
            with self.mode:
                if isinstance(function, str):
                    value = getattr(values[0], function)(*values[1:], **named)
                else:
                    value = function(*values, **named)
        except Exception as error:  # whatever torch raises, the call is left as it is
            raise NotMatched(
                f"{describe(node)} inside of flex_attention has no broadcasting form: {error}"
            ) from error
        node.meta["example_value"] = value
        return node

    def inline(
        self, function: fx.GraphModule, positions: Sequence[fx.Node], captured: Sequence[Any]
    ) -> Any:
        """The result of ``function`` for all positions.

        Args:
            function: a graph of scalars.
            positions: scores, if it takes some, and index tensors; what it takes first.
            captured: what else it takes: tensors, of which it uses single elements, and numbers.

        Returns:
            A node, or a number.

        Raises:
            NotMatched: it does what does not broadcast.
        """
        known: dict[fx.Node, Any] = {}
        inputs = [*positions, *(_Table(c) if shape_of(c) else c for c in captured)]
        placeholders = [node for node in function.graph.nodes if node.op == "placeholder"]
        if len(placeholders) != len(inputs):
            raise NotMatched("a function of flex_attention takes other inputs than it is given")
        known.update(zip(placeholders, inputs, strict=True))
        for node in function.graph.nodes:
            if node.op == "placeholder":
                continue
            if node.op == "output":
                result = node.args[0]
                if isinstance(result, (tuple, list)) and len(result) == 1:
                    result = result[0]
                return self._scalar(known.get(result, result), node)
            elif node.op in ("call_function", "call_method"):
                known[node] = self._step(node, known)
            else:
                raise NotMatched(f"{node.name} in a function of flex_attention is not understood")
        raise NotMatched("a function of flex_attention has no result")

    def _step(self, node: fx.Node, known: dict[fx.Node, Any]) -> Any:
        name = op_name(node).removeprefix("function ")
        if name == "getitem":
            return self._index(node, known)
        read = known.get(node.args[0]) if name == "item" else None  # type: ignore[arg-type]
        if isinstance(read, fx.Node) and NUMBER in read.meta:
            return read.meta[NUMBER]
        target: Any = self._out_of_place(node, known) if mutates(node) else node.target
        name = target.__name__ if target is not node.target else name
        allowed = name in _ELEMENTWISE or (name in _CONSTANTS and shape_of(node) == ())
        if not allowed or not _of_torch(target):
            raise NotMatched(
                f"{describe(node)} inside of flex_attention is neither elementwise nor indexing"
            )
        args = fx.map_arg(node.args, lambda arg: self._scalar(known[arg], node))
        kwargs = fx.map_arg(node.kwargs, lambda arg: self._scalar(known[arg], node))
        result = self._spelled(node, name, target, args, kwargs)
        self._check_dtype(node, result)
        return result

    def _out_of_place(self, node: fx.Node, known: dict[fx.Node, Any]) -> Callable[..., Any]:
        """What an operation in place computes, where nothing else sees that it is in place.

        Raises:
            NotMatched: something may.
        """
        written, target = node.args[0] if node.args else None, _OUT_OF_PLACE.get(node.target)
        if target is not None and isinstance(written, fx.Node) and len(written.users) == 1:
            own = written.op != "placeholder" or _is_score(known[written])
            if own and not is_cast(written) and op_name(written) not in ("getitem", "detach"):
                return target
        raise NotMatched(f"{describe(node)} writes in place inside of flex_attention")

    def _spelled(
        self, node: fx.Node, name: str, target: Any, args: Any, kwargs: dict[str, Any]
    ) -> fx.Node:
        """The operation; sums of scores and comparisons of distances as other code has them."""
        plain = len(args) == 2 and not kwargs
        if plain and name in ("add", "sub") and any(map(_is_score, args)):
            left, right = (self._as_float(arg, node) for arg in args)
            if name == "sub" and _is_score(left) and tensor_of(right) is not None:
                return self.call(operator.add, left, self.call(operator.neg, right))
            return self.call(operator.add if name == "add" else operator.sub, left, right)
        if plain and name in _TURNED:
            left, right = args
            if _distance(right) is not None and _distance(left) is None:
                left, right, name = right, left, _TURNED[name]
            pair = _distance(left)
            if pair is not None and _is_small(right):
                # i - j < w is i < w + j, whose two sides are positions.
                return self.call(
                    _COMPARISONS[name], pair[0], self.call(operator.add, pair[1], right)
                )
        return self.call(target, *args, **kwargs)

    def _as_float(self, item: Any, node: fx.Node) -> Any:
        """An operand of a sum with scores in the dtype that the sum gives it."""
        tensor, result = tensor_of(item), tensor_of(node)
        if tensor is None or result is None or tensor.is_floating_point():
            return item
        return self.call("to", item, result.dtype)

    def _check_dtype(self, node: fx.Node, result: fx.Node) -> None:
        """Tensors with and without axes promote differently: the scalars' dtype must come out.

        Raises:
            NotMatched: it does not.
        """
        wanted, got = tensor_of(node), tensor_of(result)
        if (wanted is None) != (got is None):
            raise NotMatched(f"{describe(node)} inside of flex_attention is not understood")
        if wanted is None or got is None or wanted.dtype == got.dtype:
            return
        if got.dtype == torch.float32 and _is_score(result):
            return  # scores are float32, whatever the dtype of the query that stands for theirs
        # Indices are int32 in one compiler of the function, and int64 here and in others.
        if {wanted.dtype, got.dtype} != {torch.int32, torch.int64}:
            raise NotMatched(
                f"{describe(node)} inside of flex_attention is {wanted.dtype} for scalars and "
                f"{got.dtype} for tensors: cast its operands to one dtype"
            )

    def _index(self, node: fx.Node, known: dict[fx.Node, Any]) -> Any:
        source, index = node.args
        table = known.get(source)  # type: ignore[arg-type]
        items = index if isinstance(index, (tuple, list)) else (index,)
        if not isinstance(table, _Table):
            raise NotMatched(f"{describe(node)} inside of flex_attention indexes no tensor")
        given = []
        for item in items:
            item = self._scalar(known[item], node) if isinstance(item, fx.Node) else item
            whole = _is_integer(item) and not isinstance(value_of(item), bool)
            if not whole:
                raise NotMatched(f"{describe(node)} inside of flex_attention is not one element")
            given.append(item)
        table = _Table(table.node, (*table.indices, *given))
        if table.rank < 0:
            raise NotMatched(f"{describe(node)} inside of flex_attention has too many indices")
        if table.rank:
            return table
        result = self.call(operator.getitem, table.node, table.indices)
        self._check_dtype(node, result)
        return result

    def _scalar(self, item: Any, node: fx.Node) -> Any:
        if isinstance(item, _Table):
            raise NotMatched(
                f"{describe(node)} inside of flex_attention uses {item.node.name} without indexing "
                "each of its axes"
            )
        return item


def _of_torch(target: Any) -> bool:
    """Whether a call is of a method, or of a function that torch or Python comes with."""
    name = getattr(target, "__name__", "")
    known = (getattr(library, name, None) for library in (torch, operator))
    return isinstance(target, str) or any(target is function for function in known)


def _is_score(item: Any) -> bool:
    return isinstance(item, fx.Node) and tensor_of(item) is not None and from_product(item)


def _is_integer(item: Any) -> bool:
    """Whether an item is an integer, or a tensor of them; not a truth value."""
    value = value_of(item) if isinstance(item, fx.Node) else item
    if isinstance(value, torch.Tensor):
        return value.dtype in (torch.int64, torch.int32, torch.int16, torch.int8)
    return isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool)


def _distance(item: Any) -> tuple[Any, Any] | None:
    """``a`` and ``b`` of ``a - b``, if both are positions, so that nothing wraps."""
    if not isinstance(item, fx.Node) or op_name(item) != "sub" or item.kwargs:
        return None
    return item.args if len(item.args) == 2 and all(map(_is_position, item.args)) else None


def _is_position(item: Any) -> bool:
    """Whether an item is one of the four positions, or moved by a number."""
    tensor = tensor_of(item)
    if not isinstance(item, fx.Node) or tensor is None or tensor.dtype != torch.int64:
        return False
    name = op_name(item)
    if name == "getitem":
        return op_name(item.args[0]) == "arange"
    if name not in ("add", "sub") or item.kwargs or len(item.args) != 2:
        return False
    left, right = item.args
    if name == "add" and not _is_position(left):
        left, right = right, left
    amount = tensor_of(right)
    moved = _is_small(right) or (amount is not None and amount.dim() == 0 and _is_integer(right))
    return _is_position(left) and moved


def _is_small(item: Any) -> bool:
    """Whether an item is a whole number that cannot make a position wrap."""
    value = value_of(item) if isinstance(item, fx.Node) else item
    if isinstance(value, bool):
        return False
    return isinstance(value, torch.SymInt) or (isinstance(value, int) and abs(value) < LARGEST)
