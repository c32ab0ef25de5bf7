# SPDX-License-Identifier: Apache-2.0
"""Cut off what of a decode step depends on the length of the sequence; the rest has fixed shapes.

A CUDA graph replays one shape. In a rewritten decode step only the padding mask, and what is
computed from lengths, still grows with the sequence. Those few nodes become a graph of their own,
the prelude, which runs before each step; the rest takes what it computes as inputs.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from kvpass.graph.emit import example
from kvpass.graph.walk import is_written, mutates

MASK = "kv_mask"


@dataclass
class Prelude:
    """How a graph was cut.

    Attributes:
        graph: from the inputs of the whole graph to ``values``, ``masks``, and numbers; None if it
            would be empty.
        kept: which inputs the rest still has, in order; after them it takes ``values``, then
            ``masks``.
        values: outputs of a fixed shape.
        masks: padding masks ``[B, keys]``, of which the rest may be given longer ones.
        numbers: positions of those among the outputs of the whole graph, where the rest has None.
        written: positions among the inputs of the rest of those that it writes to.
    """

    graph: fx.Graph | None
    kept: list[int]
    values: int
    masks: int
    numbers: list[int]
    written: list[int]

    def repeated(self) -> str:
        """Names what a captured whole would repeat although it differs from step to step."""
        if self.graph is None:
            return ""
        results = self.graph.output_node().args[0]
        assert isinstance(results, tuple)
        return ", ".join(str(node) for node in results[: self.values + self.masks])


class GrowsWithLength(Exception):
    """More of the graph differs from step to step than can be cut off; the message says what."""


def cut(graph: fx.Graph, fixed: Set[Any], device: torch.device) -> Prelude:
    """Take the prelude out of a rewritten graph, in place.

    Args:
        graph: of one decode step.
        fixed: symbols of sizes that seldom change from step to step, as of the batch.
        device: where the step runs.

    Raises:
        GrowsWithLength: the rest would not have fixed shapes; the graph computes what it did.
    """
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    output = next(node for node in reversed(graph.nodes) if node.op == "output")
    _take_sizes_from_inputs(graph, placeholders)
    grows = {node for node in graph.nodes if node is not output and _grows(node, fixed)}
    for node in placeholders:
        # A number on the host goes to a kernel by value: a replay would repeat the first one.
        if _is_tensor(node) and node.users and example(node).device != device:
            raise GrowsWithLength(f"{node.name} is on {example(node).device}, not on {device}")
    returned = list(output.args[0]) if isinstance(output.args[0], (tuple, list)) else []
    numbers = [i for i, node in enumerate(returned) if node in grows and not _is_tensor(node)]
    masks: dict[fx.Node, None] = {}
    values: dict[fx.Node, None] = {}
    for node in graph.nodes:
        growing = [each for each in node.all_input_nodes if each in grows]
        if node in grows or not growing:
            continue
        if node is output:
            rest = [each for each in growing if each not in (returned[i] for i in numbers)]
            if rest:
                raise GrowsWithLength(f"{rest[0].name} is returned")
        elif not _attends(node):
            values[node] = None
        elif (mask := _mask_of(node)) is not None and growing == [mask]:
            masks[mask] = None
        else:
            other = next(each for each in growing if each is not mask)
            raise GrowsWithLength(f"{other.name} is an operand of {node.name}")
    results = [*values, *masks, *(returned[i] for i in numbers)]
    early = _ancestors(results)
    for node in early:
        if node.op == "placeholder" and is_written(node):
            raise GrowsWithLength(f"{node.name} is written to")
        if _is_heavy(node):
            raise GrowsWithLength(f"{node.name} is needed for a length")
    for node in grows:
        if node not in early and node.op != "placeholder" and mutates(node):
            raise GrowsWithLength(f"{node.name} writes to what grows")
    prelude = _copy_of(graph, early, results) if results else None
    changed = [None if i in numbers else node for i, node in enumerate(returned)]
    if numbers:
        output.args = (type(output.args[0])(changed),)
    length = next((node for node in placeholders if node in grows), None)
    growing_size = None if length is None else _growing_size(example(length), fixed)
    _replace_by_inputs(graph, placeholders[-1], list(values), list(masks), growing_size)
    _erase(graph, [*grows, *early])
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    left = set(inputs)
    kept = [i for i, node in enumerate(placeholders) if node in left]
    written = [i for i, node in enumerate(inputs) if is_written(node)]
    graph.lint()
    return Prelude(prelude, kept, len(values), len(masks), numbers, written)


def _take_sizes_from_inputs(graph: fx.Graph, placeholders: list[fx.Node]) -> None:
    """Replace sizes of intermediate tensors by numbers, or by inputs, that are known to be equal.

    A length is often the past and the size of some activation, which the prelude cannot compute.
    """
    inputs: dict[Any, fx.Node] = {}
    for node in placeholders:
        if isinstance(value := example(node), torch.SymInt):
            inputs.setdefault(value.node.expr, node)
    for node in graph.nodes:
        value = node.meta.get("example_value")
        if node.op in ("placeholder", "output") or isinstance(value, bool):
            continue
        if not isinstance(value, (int, torch.SymInt)):
            continue
        known = getattr(getattr(value, "node", None), "expr", value)
        if isinstance(value, torch.SymInt) and getattr(known, "is_number", False):
            value = int(known)
        stand_in = inputs.get(known, value)
        if not isinstance(stand_in, torch.SymInt):
            for user in list(node.users):
                user.replace_input_with(node, stand_in)


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(example(node), torch.Tensor)


def _grows(node: fx.Node, fixed: Set[Any]) -> bool:
    """Whether a value is a size, or has one, that differs from step to step."""
    return not _symbols(node.meta.get("example_value")) <= fixed


def _symbols(value: Any) -> set[Any]:
    """Those that a size, a tensor's shape, or several of them depend on."""
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return set(value.node.expr.free_symbols)
    parts: Any = value.shape if isinstance(value, torch.Tensor) else value
    if isinstance(parts, (tuple, list)):
        return set().union(*map(_symbols, parts))
    return set()


def _attends(node: fx.Node) -> bool:
    """Whether a node is an attention over blocks."""
    schema = getattr(node.target, "_schema", None)
    return node.op == "call_function" and str(getattr(schema, "name", "")).startswith(
        "kvpass::attend"
    )


def _mask_of(node: fx.Node) -> fx.Node | None:
    """The padding mask of an attention over blocks."""
    index = [argument.name for argument in node.target._schema.arguments].index(MASK)  # type: ignore[union-attr]
    mask = node.args[index] if index < len(node.args) else node.kwargs.get(MASK)
    return mask if isinstance(mask, fx.Node) else None


def _is_heavy(node: fx.Node) -> bool:
    """Whether a node is no small computation on lengths and masks."""
    if node.op in ("placeholder", "get_attr"):
        return False
    if node.op == "call_module" or mutates(node):
        return True
    schema = getattr(node.target, "_schema", None)
    if schema is not None and schema.name.startswith("kvpass::"):
        return True
    return any(
        isinstance(value, torch.Tensor) and value.is_floating_point() and value.dim() > 2
        for value in (each.meta.get("example_value") for each in node.all_input_nodes)
    )


def _ancestors(nodes: Iterable[fx.Node]) -> dict[fx.Node, None]:
    found: dict[fx.Node, None] = {}
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        if node not in found:
            found[node] = None
            waiting.extend(node.all_input_nodes)
    return found


def _copy_of(graph: fx.Graph, among: dict[fx.Node, None], outputs: list[fx.Node]) -> fx.Graph:
    """A graph with all inputs that computes ``outputs``."""
    copy = fx.Graph()
    new: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if node.op == "placeholder" or node in among:
            new[node] = copy.node_copy(node, lambda old: new[old])
    copy.output(tuple(new[node] for node in outputs))
    copy.lint()
    return copy


def _replace_by_inputs(
    graph: fx.Graph,
    last: fx.Node,
    values: list[fx.Node],
    masks: list[fx.Node],
    length: Any,
) -> None:
    for kind, nodes in (("value", values), ("mask", masks)):
        for number, node in enumerate(nodes):
            with graph.inserting_after(last):
                last = graph.placeholder(f"kvpass_{kind}_{number}")
            like = example(node)
            last.meta["example_value"] = like if kind == "value" else _any_length(like, length)
            node.replace_all_uses_with(last)


def _growing_size(value: Any, fixed: Set[Any]) -> Any:
    """A size that differs from step to step: the value itself, or one of its shape."""
    sizes = value.shape if isinstance(value, torch.Tensor) else (value,)
    return next(size for size in sizes if not _symbols(size) <= fixed)


def _any_length(like: Any, length: Any) -> torch.Tensor:
    """An example of a mask ``like`` one, with ``length`` columns."""
    with like.fake_mode:
        made: torch.Tensor = torch.empty(
            (like.shape[0], length), dtype=like.dtype, device=like.device
        )
    return made


def _erase(graph: fx.Graph, nodes: Iterable[fx.Node]) -> None:
    """Erase those that nothing uses any more, users first."""
    doomed = set(nodes)
    for node in reversed(list(graph.nodes)):
        if node in doomed and not node.users:
            graph.erase_node(node)
