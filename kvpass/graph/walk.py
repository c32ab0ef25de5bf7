# SPDX-License-Identifier: Apache-2.0
"""Reading Dynamo FX graphs: names of calls, arguments, shapes that are proven, users, mutation."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from kvpass.graph.sizes import Size, fixed


class NotMatched(Exception):
    """A candidate turned out not to be a supported attention; the message is the reason."""


_ALIASES = {
    "truediv": "div",
    "divide": "div",
    "true_divide": "div",
    "multiply": "mul",
    "concat": "cat",
    "concatenate": "cat",
    "__and__": "and_",
    "__eq__": "eq",
    "__ne__": "ne",
    "__le__": "le",
    "__lt__": "lt",
    "__ge__": "ge",
    "__gt__": "gt",
    "bitwise_and": "and_",
    "logical_and": "and_",
    "logical_not": "invert",
    "bitwise_not": "invert",
    "__invert__": "invert",
    "inv": "invert",
    "subtract": "sub",
    "floor_divide": "floordiv",
    "__floordiv__": "floordiv",
    "less_equal": "le",
    "less": "lt",
    "greater_equal": "ge",
    "greater": "gt",
    "swapaxes": "transpose",
    "swapdims": "transpose",
    "not_equal": "ne",
    "__matmul__": "matmul",
    "__getitem__": "getitem",
    "add_": "add",
    "sub_": "sub",
    "mul_": "mul",
    "div_": "div",
    "tanh_": "tanh",
    "masked_fill_": "masked_fill",
}
_IN_PLACE_OPERATORS = (
    *(operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ifloordiv),
    *(operator.imod, operator.ipow, operator.imatmul, operator.iand, operator.ior),
    *(operator.ixor, operator.ilshift, operator.irshift, operator.setitem, operator.delitem),
)
# Whether an in-place spelling may stand for the plain one is for the caller to say: see `mutates`.
_IN_PLACE_SPELLINGS = {
    operator.iadd: "add",
    operator.isub: "sub",
    operator.imul: "mul",
    operator.itruediv: "div",
}
# fmt: off
_NAMES = (
    "add", "sub", "subtract", "mul", "multiply", "div", "truediv", "divide", "true_divide",
    "matmul", "bmm", "baddbmm", "einsum", "softmax", "dropout", "cat", "concat", "concatenate",
    "where", "masked_fill", "arange", "le", "lt", "ge", "gt", "eq", "ne", "less", "less_equal",
    "greater", "greater_equal", "not_equal", "and_", "bitwise_and", "logical_and", "invert",
    "inv", "logical_not", "bitwise_not", "transpose", "swapaxes", "swapdims", "permute",
    "reshape", "unsqueeze", "flatten", "repeat_interleave", "getitem", "tril", "triu", "ones",
    "zeros", "full", "empty", "tensor", "ones_like", "zeros_like", "full_like", "tanh", "clone",
    "scaled_dot_product_attention", "multi_head_attention_forward", "linear", "narrow", "squeeze",
    "select", "split", "chunk", "unflatten", "detach", "neg", "max", "amax", "floordiv",
    "floor_divide",
)
# fmt: on


def _function_names() -> dict[Any, str]:
    table: dict[Any, str] = {}
    for module in (F, torch, operator):
        for name in _NAMES:
            function = getattr(module, name, None)
            if callable(function):
                table[function] = _ALIASES.get(name, name)
    for operation, name in _IN_PLACE_SPELLINGS.items():
        table[operation] = name
    table[getattr] = "getattr"
    return table


_FUNCTIONS = _function_names()

# Operators whose result may share memory with their first argument.
# fmt: off
_VIEWS = frozenset((
    "T", "bfloat16", "bool", "chunk", "contiguous", "detach", "double", "expand", "expand_as",
    "flatten", "float", "getattr", "getitem", "half", "int", "long", "mT", "movedim", "narrow",
    "permute", "reshape", "reshape_as", "select", "split", "squeeze", "swapaxes", "t", "to",
    "transpose", "type", "type_as", "unflatten", "unsqueeze", "view", "view_as",
))
# fmt: on
_SHAPE_READS = frozenset(("size", "numel", "dim", "nelement", "stride", "ndimension"))


def op_name(node: object) -> str:
    """One name for a call however it is spelled (``torch.mul``, ``*``, ``.mul``), else ``""``.

    A function that is not known gives its own qualified name, which equals no known name.
    """
    if not isinstance(node, fx.Node):
        return ""
    if node.op == "call_method":
        return _ALIASES.get(str(node.target), str(node.target))
    if node.op == "call_function":
        try:
            known = _FUNCTIONS.get(node.target)
        except TypeError:
            known = None
        return known or f"function {getattr(node.target, '__name__', node.target)}"
    return ""


def describe(node: fx.Node) -> str:
    """The call in words for a message."""
    name = op_name(node).removeprefix("function ")
    return f"{name} ({node.name})" if name and name != node.name else node.name


def bind(node: fx.Node, *names: str) -> dict[str, Any] | None:
    """Arguments of a call by name, or None if it has some that are not among ``names``."""
    if len(node.args) > len(names) or any(key not in names for key in node.kwargs):
        return None
    bound = dict(zip(names, node.args, strict=False))
    if any(key in bound for key in node.kwargs):
        return None
    return bound | dict(node.kwargs)


def value_of(node: object) -> Any:
    """The example value Dynamo recorded, or None."""
    return node.meta.get("example_value") if isinstance(node, fx.Node) else None


def tensor_of(node: object) -> torch.Tensor | None:
    """The fake tensor of a node, or None if it is no tensor."""
    value = value_of(node)
    return value if isinstance(value, torch.Tensor) else None


def need_tensor(node: object, what: str) -> torch.Tensor:
    """The fake tensor of ``node``.

    Raises:
        NotMatched: it has none, so that nothing can be proven about it.
    """
    value = tensor_of(node)
    if value is None:
        raise NotMatched(f"{what} is not a tensor with a known shape")
    return value


def shape_of(node: object) -> tuple[Size, ...] | None:
    """Sizes of the tensor of a node, ints or SymInts, or None."""
    value = tensor_of(node)
    return None if value is None else tuple(value.shape)


def scalar_of(arg: object) -> Size | None:
    """An int or SymInt given directly or by a node; None for anything else (also for bool)."""
    value = value_of(arg) if isinstance(arg, fx.Node) else arg
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
        return None
    return value


def number_of(arg: object) -> float | None:
    """A Python number, or a SymFloat/SymInt that the shape environment has fixed to one value.

    Dynamo passes float attributes as symbols under ``dynamic=True``; an operator that needs a
    plain float makes it guard on the value, and only then is the value known here.
    """
    value = value_of(arg) if isinstance(arg, fx.Node) else arg
    if isinstance(value, bool):
        return None
    if isinstance(value, (int, float)):
        return float(value)
    if isinstance(value, (torch.SymFloat, torch.SymInt)):
        inner = value.node
        expr = inner.shape_env.replace(inner.expr)
        return float(expr) if expr.is_number else None
    return None


def constant_int(arg: object) -> int:
    """An int argument of an op that takes no symbols; under ``dynamic=True`` it may be a node.

    Raises:
        NotMatched: it has no single value.
    """
    size = scalar_of(arg)
    value = None if size is None else fixed(size)
    if value is None:
        raise NotMatched(f"{arg} is not an integer known at compile time")
    return value


def inserted_axes(index: object, ndim: int) -> list[int | None] | None:
    """For indexing by full slices, ``None`` and ``...`` only: the input axis of each output axis.

    None in the list is an inserted axis of size one. Slices that begin at zero with step one are
    let through as well: they shorten an axis but move nothing. Anything else gives None.
    """
    items = list(index) if isinstance(index, tuple) else [index]
    axes: list[int | None] = []
    used = sum(1 for item in items if isinstance(item, slice))
    source = 0
    for item in items:
        if item is None:
            axes.append(None)
        elif item is Ellipsis:
            for _ in range(ndim - used):
                axes.append(source)
                source += 1
        elif isinstance(item, slice) and item.start in (None, 0) and item.step in (None, 1):
            axes.append(source)
            source += 1
        else:
            return None
    axes.extend(range(source, ndim))
    return axes if source <= ndim else None


def is_cast(node: fx.Node) -> bool:
    """Whether the call can change nothing but dtype and device of its first argument."""
    name = op_name(node)
    if name in ("float", "half", "bfloat16", "double", "bool", "long", "int"):
        return len(node.args) == 1 and not node.kwargs
    if name in ("to", "type", "type_as"):
        rest = [*node.args[1:], *node.kwargs.values()]
        return not any(isinstance(item, torch.memory_format) for item in rest) and bool(rest)
    return False


def mutates(node: fx.Node) -> list[fx.Node]:
    """The arguments a call writes to (empty for a pure call)."""
    first = node.args[0] if node.args and isinstance(node.args[0], fx.Node) else None
    # Of a list (torch._foreach_*_), every tensor is written.
    firsts = [first] if first is not None else []
    if node.args and isinstance(node.args[0], (list, tuple)):
        firsts = [item for item in node.args[0] if isinstance(item, fx.Node)]
    written: list[fx.Node] = []
    out = node.kwargs.get("out")
    if isinstance(out, fx.Node):
        written.append(out)
    if node.op == "call_method":
        name = str(node.target)
        if first is not None and name.endswith("_") and not name.endswith("__"):
            written.append(first)
        if first is not None and name in ("__setitem__", "__iadd__", "__imul__"):
            written.append(first)
    elif node.op == "call_function":
        if isinstance(node.target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
            return written + _schema_writes(node)
        if isinstance(node.target, torch._ops.HigherOrderOperator):
            # Only a user's Triton kernel writes to its arguments.
            return list(node.all_input_nodes) if "triton" in str(node.target) else []
        name = getattr(node.target, "__name__", "")
        in_place = any(node.target is op for op in _IN_PLACE_OPERATORS)
        if node.kwargs.get("inplace") is True or (name.endswith("_") and not _is_operator(node)):
            in_place = True
        if in_place:
            written.extend(firsts)
    return written


def _schema_writes(node: fx.Node) -> list[fx.Node]:
    """Arguments that the schema of an operator, or of any overload it may stand for, writes to."""
    target = node.target
    overloads = [target] if isinstance(target, torch._ops.OpOverload) else []
    if isinstance(target, torch._ops.OpOverloadPacket):
        overloads = [getattr(target, name) for name in target.overloads()]
    found: list[fx.Node] = []
    for overload in overloads:
        for position, argument in enumerate(overload._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            given = node.kwargs.get(argument.name)
            fx.map_arg(node.args[position] if position < len(node.args) else given, found.append)
    return found


def _is_operator(node: fx.Node) -> bool:
    return getattr(node.target, "__module__", "") in ("_operator", "operator")


def live_nodes(graph: fx.Graph) -> set[fx.Node]:
    """Nodes that the outputs or a side effect need; the rest are dropped as dead code."""
    live: set[fx.Node] = set()
    stack = [
        node
        for node in graph.nodes
        if node.op in ("output", "call_module") or node.is_impure() or mutates(node)
    ]
    while stack:
        node = stack.pop()
        if node not in live:
            live.add(node)
            stack.extend(node.all_input_nodes)
    return live


def is_shape_read(node: fx.Node) -> bool:
    """Whether the call reads only the shape of its first argument."""
    if op_name(node) == "getattr":
        return node.args[1] in ("shape", "ndim", "dtype", "device")
    return op_name(node) in _SHAPE_READS


def size_reads(node: fx.Node) -> list[tuple[fx.Node, int]]:
    """Nodes that are one size of the tensor ``node``, each with the dimension it is the size of."""
    rank = len(shape_of(node) or ())
    found = []
    for user in node.users:
        whole = op_name(user) == "size" and len(user.args) == 1 and not user.kwargs
        if whole or (op_name(user) == "getattr" and user.args[1] == "shape"):
            for item in user.users:
                if op_name(item) == "getitem" and isinstance(item.args[1], int):
                    found.append((item, item.args[1] % rank))
        elif op_name(user) == "size" and len(user.args) == 2 and isinstance(user.args[1], int):
            found.append((user, user.args[1] % rank))
    return found


def aliases(node: fx.Node) -> set[fx.Node]:
    """Nodes that may share memory with ``node``: what it is a view of, and all views of that.

    Known views count by their name, which also covers copies that may be none (``contiguous``);
    everything else counts by the storage of its example value.
    """
    root = node
    while op_name(root) in _VIEWS and root.args and isinstance(root.args[0], fx.Node):
        root = root.args[0]
    by_storage = _nodes_of_storages(node.graph)
    found: set[fx.Node] = set()
    stack = [root, node]
    while stack:
        current = stack.pop()
        if current in found:
            continue
        found.add(current)
        for user in current.users:
            shares = op_name(user) in _VIEWS or mutates(user)
            if shares and user.args and user.args[0] is current:
                stack.append(user)
        for storage in _storages(current):
            stack.extend(by_storage.get(storage, ()))
    return found


_by_storage: weakref.WeakKeyDictionary[fx.Graph, dict[int, list[fx.Node]]] = (
    weakref.WeakKeyDictionary()
)


def _nodes_of_storages(graph: fx.Graph) -> dict[int, list[fx.Node]]:
    """Nodes by the storages of their example values, made once a graph: find changes none."""
    known = _by_storage.get(graph)
    if known is None:
        known = {}
        for node in graph.nodes:
            for storage in _storages(node):
                known.setdefault(storage, []).append(node)
        _by_storage[graph] = known
    return known


def _storages(node: fx.Node) -> set[int]:
    """Identities of the storages behind a node's example value."""
    value = value_of(node)
    found = set()
    for tensor in value if isinstance(value, (list, tuple)) else (value,):
        if isinstance(tensor, torch.Tensor):
            try:
                found.add(tensor.untyped_storage()._cdata)
            except (NotImplementedError, RuntimeError):  # a wrapper without storage
                continue
    return found


def is_written(node: fx.Node) -> bool:
    """Whether any call writes to the memory of a node, at whatever time."""
    return bool(writes_to(node))


def writes_to(node: fx.Node) -> set[fx.Node]:
    """All calls that write to the memory of a node."""
    family = aliases(node)
    return {
        user
        for item in family
        for user in item.users
        if any(arg in family for arg in mutates(user))
    }


def written_between(
    nodes: Iterable[fx.Node], start: int, stop: int, order: dict[fx.Node, int]
) -> fx.Node | None:
    """The first call at positions [start, stop] that writes to memory of one of ``nodes``."""
    for node in nodes:
        family = aliases(node)
        for member in family:
            for user in member.users:
                if start <= order[user] <= stop and any(arg in family for arg in mutates(user)):
                    return user
    return None


def upwards(
    node: fx.Node, goes_through: Callable[[fx.Node], bool], limit: int = 64
) -> set[fx.Node]:
    """Nodes reached from the inputs of ``node`` through nodes that ``goes_through`` accepts."""
    found: set[fx.Node] = set()
    stack = [node]
    while stack and len(found) < limit:
        for source in stack.pop().all_input_nodes:
            if source not in found:
                found.add(source)
                if goes_through(source):
                    stack.append(source)
    return found


def module_path(node: fx.Node) -> str | None:
    """Path of the innermost module a node was traced in, e.g. ``model.layers.0.self_attn``."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return None
    last = list(stack.values())[-1]
    path = str(last[0] if isinstance(last, tuple) else last)
    for noise in ("L['self'].", "L['self']", "L['fn'].", "L['fn']", "_modules"):
        path = path.replace(noise, "")
    path = path.replace("['", ".").replace("']", "").replace("[", ".").replace("]", "")
    cleaned = ".".join(part for part in path.split(".") if part)
    return cleaned or None
