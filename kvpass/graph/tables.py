# SPDX-License-Identifier: Apache-2.0
"""Block tables of flex_attention: whether they say what the mask function says.

A BlockMask lists, for each block of queries, the blocks of keys that its mask function decides on,
and those of which all keys are seen; no key of other blocks is seen. Compiled kernels follow these
lists, uncompiled code follows the function alone. They agree as ``create_block_mask`` makes them,
but that is in the numbers, not in the graph: they are compared before a graph is run.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from kvpass.graph.sizes import Size
from kvpass.graph.walk import (
    NotMatched,
    is_written,
    mutates,
    op_name,
    shape_of,
    tensor_of,
    value_of,
)

_LARGEST = 256
"""Nodes that may be run twice to compare; more are no arithmetic of masks."""
_ELEMENTS = 1 << 24
"""Elements of a mask that are compared at once."""
_VMAP = ("_vmap_increment_nesting", "_vmap_decrement_nesting", "lazy_load_decompositions")

Input = tuple[str, Any]
"""``("input", index)`` of the whole graph's inputs, or ``("size", expression)``."""


@dataclass(frozen=True)
class Tables:
    """Tables of one BlockMask, nodes or None.

    Attributes:
        partial_count, full_count: int ``[B|1, H|1, rows]``, listed blocks of keys.
        partial, full: int ``[B|1, H|1, rows, columns]``, which these are.
        rows, columns: queries and keys of a block.
    """

    partial_count: Any
    partial: Any
    full_count: Any
    full: Any
    rows: Any
    columns: Any

    @property
    def nodes(self) -> tuple[Any, ...]:
        """The tables."""
        return self.partial_count, self.partial, self.full_count, self.full

    @property
    def block(self) -> tuple[Any, Any]:
        """Queries and keys of a block."""
        return self.rows, self.columns


@dataclass
class _Part:
    """A part of a graph that is run by itself."""

    graph: fx.Graph
    inputs: list[Input]
    run: Callable[..., Any] | None = None

    def __call__(self, args: Sequence[Any], sizes: Any, *first: Any) -> Any:
        assert self.run is not None
        return self.run(*first, *_given(self.inputs, args, sizes))


@dataclass(eq=False)
class TableCheck:
    """Compares the tables of one BlockMask with its mask function.

    Attributes:
        mask: gives the mask of some rows, whose indices it takes first.
        tables: gives the tables that are no None.
        has_full: whether blocks that are seen as a whole are listed.
        block: queries and keys of a block.
        scores: sizes ``(B, Hq, n, keys)``, numbers or expressions.
    """

    mask: _Part
    tables: _Part
    has_full: bool
    block: tuple[int, int]
    scores: tuple[Any, Any, Any, Any]
    _known: tuple[Any, bool] | None = field(default=None, repr=False)

    @property
    def parts(self) -> tuple[_Part, _Part]:
        """What the backend must make callable."""
        return self.mask, self.tables

    def holds(self, args: Sequence[Any], sizes: Any) -> bool:
        """Whether a kernel that follows the tables sees what the mask function shows.

        Args:
            args: inputs of the whole graph.
            sizes: gives the value of an expression (:class:`kvpass.step.sizes.CallSizes`).
        """
        scores = tuple(map(sizes.of, self.scores))
        given = _given(self.mask.inputs + self.tables.inputs, args, sizes)
        tensors = [item for item in given if isinstance(item, Tensor)]
        if any(tensor.is_inference() for tensor in tensors):
            return self._agree(args, sizes, scores)
        known = self._known
        numbers = [item for item in given if not isinstance(item, Tensor)]
        state = (scores, numbers, [tensor._version for tensor in tensors])
        if (
            known is not None
            and known[0][0] == state
            and all(ref() is tensor for ref, tensor in zip(known[0][1], tensors, strict=True))
        ):
            return known[1]
        agree = self._agree(args, sizes, scores)
        self._known = (state, [weakref.ref(tensor) for tensor in tensors]), agree
        return agree

    def _agree(self, args: Sequence[Any], sizes: Any, scores: tuple[int, ...]) -> bool:
        size, heads, queries, keys = scores
        if 0 in scores:
            return True
        rows, columns = self.block
        grid = -(-queries // rows), -(-keys // columns)
        found = self.tables(args, sizes)
        partial = _listed(found[0], found[1], grid)
        full = _listed(found[2], found[3], grid) if self.has_full else None
        if partial is None or (self.has_full and full is None):
            return False
        if full is None:
            full = torch.zeros_like(partial)
        listed = partial + full
        fits = all(
            table.shape[0] in (1, size) and table.shape[1] in (1, heads)
            for table in (partial, full)
        )
        if not fits:
            return False
        wrong = (listed > 1).any()  # twice in the sum
        column = torch.arange(keys, device=listed.device) // columns
        step = max(1, _ELEMENTS // (size * heads * keys))
        for start in range(0, queries, step):
            row = torch.arange(start, min(start + step, queries), device=listed.device)
            shown = self.mask(args, sizes, row)
            block = row // rows
            seen = (full > 0)[:, :, block][..., column]
            reached = (listed > 0)[:, :, block][..., column]
            wrong = wrong | (shown & ~reached).any() | (~shown & seen).any()
        return not bool(wrong)


def _given(inputs: Sequence[Input], args: Sequence[Any], sizes: Any) -> list[Any]:
    return [args[item] if kind == "input" else sizes.of(item) for kind, item in inputs]


def _listed(count: Tensor, index: Tensor, grid: tuple[int, int]) -> Tensor | None:
    """How often each block is listed, ``[B|1, H|1, *grid]``; None if some are outside of it."""
    rows, columns = grid
    if index.dim() != 4 or count.shape != index.shape[:3] or count.shape[2] < rows:
        return None
    count, index = count[:, :, :rows].long(), index[:, :, :rows].long()
    used = torch.arange(index.shape[3], device=index.device) < count[..., None]
    outside = used & ((index < 0) | (index >= columns))
    if bool(outside.any() | (count > index.shape[3]).any() | (count < 0).any()):
        return None
    times = index.new_zeros((*index.shape[:3], columns + 1))
    times.scatter_add_(3, torch.where(used, index, columns), torch.ones_like(index))
    return times[..., :columns]


def table_check(
    graph: fx.Graph,
    mask: fx.Node,
    rows: fx.Node,
    tables: Tables,
    scores: tuple[Size, Size, Size, Size],
) -> TableCheck | None:
    """What must be compared before the graph is run; None if the tables list one block of all.

    Args:
        graph: in which mask and tables are made.
        mask: bool, broadcasts to the scores.
        rows: the index of queries ``[n]`` that ``mask`` is made from.
        tables: of the BlockMask.
        scores: ``(B, Hq, n, keys)``.

    Raises:
        NotMatched: the tables cannot be compared.
    """
    if not all(isinstance(size, int) and size > 0 for size in tables.block):
        raise NotMatched("the block size of a BlockMask is not static")
    given = [node for node in tables.nodes if node is not None]
    if (tables.full_count is None) != (tables.full is None) or len(given) < 2:
        raise NotMatched("a BlockMask without the lists of its blocks")
    if not all(tensor_of(node) is not None for node in given):
        raise NotMatched("the lists of a BlockMask are no tensors")
    if len(given) == 2 and _one_block(tables, scores):
        return None
    number = {node: i for i, node in enumerate(n for n in graph.nodes if n.op == "placeholder")}
    return TableCheck(
        _part(graph, [mask], number, rows),
        _part(graph, given, number, None),
        len(given) == 4,
        tables.block,
        tuple(map(_expression, scores)),
    )


def _one_block(tables: Tables, scores: tuple[Size, Size, Size, Size]) -> bool:
    """Whether the graph itself makes the list of a single block that is larger than the scores.

    As ``flex_attention`` does without a BlockMask.
    """
    count, index = tables.partial_count, tables.partial
    if min(tables.block) < 1 << 30 or any(is_written(node) for node in (count, index)):
        return False
    sizes = shape_of(count), shape_of(index)
    made = op_name(count) == "ones" and op_name(index) == "zeros"
    return made and sizes == ((1, 1, 1), (1, 1, 1, 1))


def _expression(size: Size) -> Any:
    if isinstance(size, int):
        return size
    expression = size.node.shape_env.replace(size.node.expr)
    return int(expression) if expression.is_number else expression


def _part(
    graph: fx.Graph, outputs: list[fx.Node], number: dict[fx.Node, int], first: fx.Node | None
) -> _Part:
    """The nodes that make ``outputs``, with ``first`` as an additional first input.

    Raises:
        NotMatched: they cannot be run by themselves.
    """
    needed: set[fx.Node] = set()
    stack = list(outputs)
    while stack:
        node = stack.pop()
        if node in needed:
            continue
        needed.add(node)
        if node is first or isinstance(value_of(node), (torch.SymInt, int)):
            continue
        if is_written(node) or mutates(node):
            raise NotMatched(
                f"{node.name}, which the mask_mod or BlockMask of flex_attention uses, is written "
                "in the graph: pass a copy"
            )
        calls = node.op in ("call_function", "call_method") and not node.is_impure()
        if node.op not in ("placeholder", "get_attr") and not calls:
            raise NotMatched(f"{node.name}, from which a BlockMask is made, has effects")
        if len(needed) > _LARGEST:
            raise NotMatched("the BlockMask of flex_attention takes many operations to make")
        if _function(node).endswith("_batch_dim"):
            stack.extend(other for other in graph.nodes if _function(other) in _VMAP)
        stack.extend(node.all_input_nodes)
    part = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    inputs: list[Input] = []
    if first is not None:
        copies[first] = part.placeholder("rows")
    ordered = [node for node in graph.nodes if node in needed and node is not first]
    for node in ordered:
        value = value_of(node)
        if node in number:
            inputs.append(("input", number[node]))
        elif isinstance(value, (torch.SymInt, int)):
            inputs.append(("size", _expression(value)))
        else:
            continue
        copies[node] = part.placeholder(node.name)
    for node in ordered:
        if node not in copies:
            copies[node] = part.node_copy(node, lambda old: copies[old])
    part.output(tuple(copies[node] for node in outputs) if first is None else copies[outputs[0]])
    return _Part(part, inputs)


def _function(node: fx.Node) -> str:
    return str(getattr(node.target, "__name__", "")) if node.op == "call_function" else ""
