# SPDX-License-Identifier: Apache-2.0
"""``flex_attention``: its mask and score functions spelled out, to be read as others are.

Dynamo hands over ``flex_attention(q, k, v, score_mod, block_mask, scale, kernel_options, captured
by score_mod, captured by mask_mod)``. The two functions are graphs over single positions; the block
mask is ``(n, keys, kv_num_blocks, kv_indices, full_kv_num_blocks, full_kv_indices, ..., block
sizes, mask_mod)``. What they compute is added to the graph as ordinary nodes that nothing uses yet:
a rewritten attention may take some of them as operands, and the others are erased again.

Options of the kernel change how it computes and what else it returns, not the output.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch._higher_order_ops.flex_attention import flex_attention

from kvpass.graph.inline import Inliner
from kvpass.graph.operands import unrepeat
from kvpass.graph.pointwise import MaskTerm, walk_back
from kvpass.graph.score import Chain
from kvpass.graph.sizes import Size, same, settled
from kvpass.graph.tables import TableCheck, Tables, table_check
from kvpass.graph.walk import (
    NotMatched,
    describe,
    is_written,
    need_tensor,
    op_name,
    scalar_of,
    shape_of,
    tensor_of,
    value_of,
)

_MARK = "kvpass_spelled"
_ARGUMENTS = 9
_TABLE_FIELDS = slice(2, 6)


@dataclass(frozen=True)
class FlexCall:
    """What one call computes.

    Attributes:
        query, keys, values: its operands; heads of keys and values are shared by groups.
        scores: the scaled and modified scores, a node that is never run.
        mask: bool, True = visible, broadcasts to ``[B, Hq, n, keys]``.
        tables: what must hold of the block tables; None where it is proven.
    """

    query: fx.Node
    keys: fx.Node
    values: fx.Node
    scores: fx.Node
    mask: fx.Node
    tables: TableCheck | None


def is_flex(node: fx.Node) -> bool:
    """Whether the node is a call of flex_attention."""
    return node.op == "call_function" and node.target is flex_attention


def spell_out(graph: fx.Graph, root: torch.nn.Module) -> dict[fx.Node, FlexCall | str]:
    """Spell out all calls of flex_attention.

    Args:
        graph: gets new nodes, which :func:`erase_unused` erases again.
        root: has the functions that the graph calls.

    Returns:
        What each call computes, or why that is not understood.
    """
    speller = _Speller(graph, root)
    return {node: speller.spell(node) for node in list(graph.nodes) if is_flex(node)}


def erase_unused(graph: fx.Graph) -> None:
    """Erase what has been spelled out and is not used."""
    for node in reversed(list(graph.nodes)):
        if node.meta.get(_MARK) and not node.users:
            graph.erase_node(node)


def match_flex(node: fx.Node, call: FlexCall, live: set[fx.Node]) -> Chain:
    """A call of flex_attention that has been spelled out.

    Raises:
        NotMatched: some part of it is not understood.
    """
    outputs = [user for user in node.users if user in live]
    others = [user for user in outputs if op_name(user) != "getitem" or user.args[1] != 0]
    if others:
        raise NotMatched(
            "flex_attention also returns the logarithm of the sum, or the maximum, of the scores, "
            "which are used: do not ask for return_lse or return_aux"
        )
    if len(outputs) != 1:
        raise NotMatched("flex_attention's output is taken apart more than once")
    passed: list[fx.Node] = []
    _, scores = walk_back(call.scores, passed)
    for item in passed:
        tensor = tensor_of(item)
        if tensor is None or tensor.dtype != torch.float32:
            raise NotMatched(f"{describe(item)} inside of flex_attention rounds the scores")
    if not _sees_all(call.mask):
        scores.terms.append(MaskTerm("fill", call.mask, -math.inf, hidden_when=False))
    interior, stack = [node], [user for user in node.users if user not in live]
    while stack:  # statistics of the scores that nothing uses
        dead = stack.pop()
        interior.append(dead)
        stack.extend(user for user in dead.users if user not in interior)
    return Chain(
        anchor=node,
        output=outputs[0],
        query=call.query,
        keys=call.keys,
        values=call.values,
        scores=scores,
        grouped=True,
        interior=interior,
        tables=call.tables,
        positions_checked=True,
    )


def _sees_all(mask: fx.Node) -> bool:
    return op_name(mask) == "new_ones" and shape_of(mask) == ()


@dataclass
class _Axes:
    """Sizes of the scores as numbers or nodes, and the index tensors along each axis."""

    sizes: tuple[Any, Any, Any, Any]
    rows: fx.Node
    indices: list[fx.Node] = field(default_factory=list)


class _Speller:
    def __init__(self, graph: fx.Graph, root: torch.nn.Module) -> None:
        self.graph = graph
        self.root = root
        self.axes: dict[Any, _Axes] = {}
        self.masks: dict[Any, fx.Node] = {}
        self.checks: dict[Any, TableCheck | None] = {}

    def spell(self, node: fx.Node) -> FlexCall | str:
        added: list[fx.Node] = []
        try:
            with self.graph.inserting_before(node):
                return self._spell(node, added)
        except NotMatched as failure:
            return str(failure)
        finally:
            for item in added:
                item.meta[_MARK] = True
                for key in ("nn_module_stack", "stack_trace", "source_fn_stack"):
                    if key in node.meta:
                        item.meta[key] = node.meta[key]

    def _spell(self, node: fx.Node, added: list[fx.Node]) -> FlexCall:
        if len(node.args) != _ARGUMENTS or node.kwargs:
            raise NotMatched("unknown arguments of flex_attention")
        query, keys, values, score_mod, block_mask, scale, _, scored, masked = node.args
        if not isinstance(block_mask, (tuple, list)) or len(block_mask) < 9:
            raise NotMatched("the BlockMask of flex_attention has unknown parts")
        q, k = need_tensor(query, "the query"), need_tensor(keys, "the keys")
        if q.dim() != 4 or k.dim() != 4 or None in [settled(x.shape[1]) for x in (q, k)]:
            raise NotMatched("flex_attention with a number of heads that is not static")
        assert isinstance(query, fx.Node) and isinstance(keys, fx.Node)
        assert isinstance(values, fx.Node)
        sizes = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
        mode: Any = q.fake_mode  # type: ignore[attr-defined]
        inliner = Inliner(self.graph, mode, added)
        axes = self._axes(inliner, query, keys, sizes, block_mask[:2])
        mask_mod, score_function = self._function(block_mask[-1]), self._function(score_mod)
        key = (node if _changes(masked) else None, _signature(mask_mod), tuple(masked), axes.rows)  # type: ignore[arg-type]
        if key not in self.masks:
            mask = inliner.inline(mask_mod, axes.indices, masked)  # type: ignore[arg-type]
            tensor = tensor_of(mask)
            if tensor is None or tensor.dtype != torch.bool:
                raise NotMatched("the mask_mod of flex_attention gives no bool tensor")
            self.masks[key] = mask
        mask = self.masks[key]
        scores = self._scores(inliner, sizes, scale, q)
        scores = inliner.inline(score_function, [scores, *axes.indices], scored)  # type: ignore[arg-type]
        if not isinstance(scores, fx.Node) or tensor_of(scores) is None:
            raise NotMatched("the score_mod of flex_attention gives no scores")
        block = [
            size if (size := scalar_of(part)) is None else settled(size)
            for part in block_mask[-3:-1]
        ]
        tables = Tables(*block_mask[_TABLE_FIELDS], *block)
        whole = (*key, *tables.nodes, *tables.block)
        if whole not in self.checks:
            self.checks[whole] = table_check(self.graph, mask, axes.rows, tables, sizes)
        return FlexCall(query, keys, values, scores, mask, self.checks[whole])

    def _function(self, node: object) -> fx.GraphModule:
        if isinstance(node, fx.Node) and node.op == "get_attr":
            found = self.root.get_submodule(str(node.target))
            if isinstance(found, fx.GraphModule):
                return found
        raise NotMatched("a function of flex_attention is not a graph")

    def _scores(self, inliner: Inliner, sizes: Any, scale: Any, like: torch.Tensor) -> fx.Node:
        """The scaled product of queries and keys: nodes to find it by, which are never run."""
        product = self.graph.call_function(torch.matmul)
        inliner.added.append(product)
        with inliner.mode:
            product.meta["example_value"] = torch.empty(
                sizes, dtype=torch.float32, device=like.device
            )
        return inliner.call(operator.mul, product, scale)

    def _axes(
        self, inliner: Inliner, query: fx.Node, keys: fx.Node, sizes: Any, lengths: Any
    ) -> _Axes:
        key = tuple(getattr(getattr(size, "node", None), "expr", size) for size in sizes)
        if key in self.axes:
            return self.axes[key]
        source = unrepeat(keys).base
        if not same((shape_of(source) or (-1, -1, -1))[2], sizes[3]):
            source = keys
        nodes = (
            self._size(inliner, query, 0, sizes[0]),
            sizes[1],
            self._size(inliner, query, 2, sizes[2], lengths[0]),
            self._size(inliner, source, 2, sizes[3], lengths[1]),
        )
        device = need_tensor(query, "the query").device
        lines = [self._line(inliner, size, device) for size in nodes]
        axes = _Axes(nodes, lines[2])
        for axis, line in enumerate(lines):
            place = tuple(slice(None) if i == axis else None for i in range(4))
            axes.indices.append(inliner.call(operator.getitem, line, place))
        self.axes[key] = axes
        return axes

    def _line(self, inliner: Inliner, size: Any, device: torch.device) -> fx.Node:
        return inliner.call(torch.arange, size, device=device)

    def _size(
        self, inliner: Inliner, node: fx.Node, dim: int, size: Size, known: object = None
    ) -> Any:
        """A size as a number, as a node that has it, or as a node that reads it."""
        if isinstance(size, int):
            return size
        if isinstance(known, fx.Node) and known.op == "placeholder":
            value = value_of(known)
            if isinstance(value, torch.SymInt) and same(value, size):
                return known
        return inliner.call("size", node, dim)


def _changes(captured: Any) -> bool:
    """Whether what a function captures is written in the graph, so that calls may see others."""
    return any(isinstance(item, fx.Node) and is_written(item) for item in captured)


def _signature(function: fx.GraphModule) -> Any:
    """Equal for functions that compute the same of their inputs."""
    number: dict[fx.Node, int] = {}
    lines: list[str] = []
    for position, node in enumerate(function.graph.nodes):
        number[node] = position

        def place(arg: fx.Node) -> str:
            return f"%{number[arg]}"

        target = "" if node.op in ("placeholder", "output") else node.target
        name: Callable[..., Any] | str = getattr(target, "__name__", target)
        args = fx.map_arg((node.args, node.kwargs), place)
        lines.append(f"{node.op} {getattr(target, '__module__', '')} {name} {args}")
    return tuple(lines)
