# SPDX-License-Identifier: Apache-2.0
"""The inputs of a rewritten graph: table rows, where sizes are read, buffers that need memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from kvpass.graph.emit import example
from kvpass.graph.kv import is_handle
from kvpass.graph.sizes import settled
from kvpass.graph.walk import is_written, op_name, scalar_of, writes_to
from kvpass.runtime.table import MAX_LAYERS

NUMBER = "kvpass_number"
"""Among the meta of an input: the number in it, which does not change."""


def give_memory(graph: fx.Graph) -> list[fx.Node]:
    """Inputs that are handles and are written in the graph; they become dense tensors in it."""
    found = [node for node in graph.nodes if is_handle(node) and is_written(node)]
    for node in found:
        like = example(node)
        with like.ticket.fake_mode:
            node.meta["example_value"] = torch.empty(
                tuple(like.shape), dtype=like.dtype, device=like.device
            )
    return found


def follow_writes(graph: fx.Graph) -> None:
    """What ``buffer.index_copy_(...)`` returns is the buffer itself: whoever reads it, reads that.

    Changes the graph, not what it computes.
    """
    for node in graph.nodes:
        if op_name(node).removeprefix("function ").removesuffix(".default") in _RETURN_SELF:
            written = node.args[0] if node.args else None
            if isinstance(written, fx.Node):
                node.replace_all_uses_with(written)


_RETURN_SELF = ("index_copy_", "index_put_")


def fix_numbers(graph: fx.Graph, sources: Sequence[object]) -> None:
    """Make constants of numbers that do not change: the epsilon of a norm, the window of a cache.

    With ``dynamic=True`` Dynamo hands them over as inputs: floats as tensors of the host, which
    would keep a decode step from being captured. It compiles again where one of them changes; one
    that did is left as it is.

    Args:
        graph: changed in place; its inputs stay.
        sources: of each placeholder, where Dynamo found it, or None.
    """
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    for node, source in zip(placeholders, sources, strict=True):
        given = example(node)
        if isinstance(given, torch.SymInt):
            name, hint = getattr(source, "member", None), given.node.hint
            if name in (_WINDOW, _CAPACITY) and hint is not None:
                changed = _changed(source, hint)
                if name == _WINDOW or not changed:  # no window, no rewriting
                    _replace(node, settled(given) or 0)
            continue
        number = getattr(given, "item_memo", None)
        if not isinstance(number, torch.SymFloat) or number.node.hint is None:
            continue
        if not _is_of_module(source) or _changed(source, number.node.hint):
            continue
        node.meta[NUMBER] = float(number)  # from here on a guard of the graph
        for read in list(node.users):
            if read.op == "call_method" and read.target == "item":
                _replace(read, node.meta[NUMBER])
                graph.erase_node(read)


_WINDOW, _CAPACITY = "sliding_window", "max_cache_len"  # of the layers of transformers' caches
_seen: dict[tuple[int, str], float] = {}


def _changed(source: Any, number: float) -> bool:
    """Whether a number has had another value than when its code was first compiled."""
    compiling = torch._guards.CompileContext.current_compile_id()
    if compiling is None or compiling.frame_id is None:
        return False
    key = compiling.frame_id, str(source)
    if not compiling.frame_compile_id:  # after a reset the numbers of frames begin anew
        _seen[key] = number
    return _seen.get(key) != number  # without dynamic=True, a number that changed is an input


def _replace(node: fx.Node, number: float) -> None:
    for user in list(node.users):
        user.replace_input_with(node, number)  # type: ignore[arg-type]


def _is_of_module(source: Any) -> bool:
    kind = getattr(source, "guard_source", None)
    kind = kind() if callable(kind) else kind  # a method before torch 2.12
    return kind is not None and bool(
        kind.is_unspecialized_nn_module() or kind.is_specialized_nn_module()
    )


def is_number(node: fx.Node) -> bool:
    """Whether a placeholder is a number that Dynamo wrapped in a tensor of the host."""
    return isinstance(getattr(example(node), "item_memo", None), torch.SymFloat)


class Rows:
    """Placeholders for the table rows of each group, after all others."""

    def __init__(self, graph: fx.Graph, placeholders: list[fx.Node]) -> None:
        self.graph = graph
        self.last = placeholders[-1]
        self.nodes: list[fx.Node] = []

    def add(self, like: Any) -> fx.Node:
        """A placeholder int32 ``[MAX_LAYERS, B]`` on the device of ``like`` ``[B, ...]``."""
        with self.graph.inserting_after(self.last):
            node = self.graph.placeholder(f"kvpass_rows_{len(self.nodes)}")
        size = (MAX_LAYERS, like.shape[0])
        with like.fake_mode:
            fake = torch.empty(size, dtype=torch.int32, device=like.device)
        node.meta["example_value"] = fake
        self.nodes.append(node)
        self.last = node
        return node


def grown(placeholders: list[fx.Node]) -> dict[int, Any]:
    """Integer inputs to which the graph adds a number in place, once, and nothing else."""
    found: dict[int, Any] = {}
    for index, node in enumerate(placeholders):
        tensor = example(node)
        if not isinstance(tensor, torch.Tensor) or tensor.is_floating_point():
            continue
        writes = writes_to(node)
        if len(writes) == 1:
            (write,) = writes
            added = scalar_of(write.args[1]) if len(write.args) == 2 and not write.kwargs else None
            if write.target == "add_" and write.args[0] is node and added is not None:
                found[index] = plain(added)
    return found


def symbols_of(placeholders: list[fx.Node]) -> dict[Any, tuple[int, int | str | None]]:
    """Where each symbol of the shapes can be read when the graph is called."""
    found: dict[Any, tuple[int, int | str | None]] = {}
    for index, node in enumerate(placeholders):
        value = node.meta.get("example_value")
        if isinstance(value, torch.SymInt):
            if value.node.expr.is_Symbol:
                found.setdefault(value.node.expr, (index, None))
        elif isinstance(value, torch.Tensor):
            for dimension, size in enumerate(value.shape):
                if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol:
                    found.setdefault(size.node.expr, (index, dimension))
    return found


def plain(size: Any) -> Any:
    """An int, or the symbolic expression of a SymInt."""
    if isinstance(size, torch.SymInt):
        expression = size.node.expr
        return int(expression) if expression.is_number else expression
    return int(size)
