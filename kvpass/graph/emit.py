# SPDX-License-Identifier: Apache-2.0
"""New nodes of a rewritten graph, with the example values that compilers expect."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from kvpass.graph.latent import Latent
from kvpass.graph.pointwise import MaskTerm
from kvpass.graph.walk import shape_of


def example(node: fx.Node) -> Any:
    """The example value of a node."""
    return node.meta["example_value"] if "example_value" in node.meta else node.meta["val"]


def call(graph: fx.Graph, function: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
    """Add a call at the graph's insertion point; one of its arguments must be a tensor."""
    node = graph.call_function(function, args, kwargs)
    values = fx.map_arg(args, example)
    named = fx.map_arg(kwargs, example)
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    with tensors[0].fake_mode:  # type: ignore[attr-defined]
        node.meta["example_value"] = function(*values, **named)
    return node


def size_of(graph: fx.Graph, node: fx.Node, dim: int) -> Any:
    """A size of a tensor: an int, or a node that reads it."""
    size = example(node).shape[dim]
    if isinstance(size, int):
        return size
    read = graph.call_method("size", (node, dim))
    read.meta["example_value"] = size
    return read


def total(graph: fx.Graph, a: Any, b: Any) -> Any:
    """Sum of two sizes, ints or nodes."""
    if isinstance(a, int) and isinstance(b, int):
        return a + b
    node = graph.call_function(operator.add, (a, b))
    left, right = (example(x) if isinstance(x, fx.Node) else x for x in (a, b))
    node.meta["example_value"] = left + right
    return node


def scaled_query(graph: fx.Graph, query: fx.Node, factors: tuple[fx.Node, ...]) -> fx.Node:
    """The query times scales that are known at run time only."""
    for factor in factors:
        query = call(graph, torch.mul, query, factor)
    return query


def latent_weights(graph: fx.Graph, latent: Latent) -> tuple[fx.Node, fx.Node]:
    """The weights ``[H, Dn, L]`` of keys and ``[H, Dv, L]`` of values."""
    weight = call(graph, torch.unflatten, latent.weight, 0, (latent.heads, -1))
    width = example(weight).shape[1]
    return (
        call(graph, torch.narrow, weight, 1, 0, latent.nope),
        call(graph, torch.narrow, weight, 1, latent.nope, width - latent.nope),
    )


def operand(graph: fx.Graph, terms: tuple[MaskTerm, ...], heads: int) -> fx.Node | None:
    """All masks that are not read as one operand, bool (True = visible) or float (added).

    A score that is replaced by the lowest number is replaced by adding float32's lowest number:
    any score next to it is lost in rounding, so that rows without visible keys tie as before.

    Args:
        graph: with its insertion point before the site.
        terms: in the order in which they are applied.
        heads: query heads, to unfold ``[B * Hq, ...]``.
    """
    if not terms:
        return None
    nodes = [_unfolded(graph, term.node, heads) for term in terms]
    if len(terms) == 1:
        (term,), (node,) = terms, nodes
        if term.kind == "fill" and term.value == -math.inf:
            return call(graph, torch.logical_not, node) if term.hidden_when else node
        if term.kind == "add" and term.factor == 1.0:
            return node
    total: fx.Node | None = None
    for term, node in zip(terms, nodes, strict=True):
        if term.kind == "add":
            added = call(
                graph,
                torch.mul,
                call(graph, torch.ops.aten.to.dtype, node, torch.float32),
                term.factor,
            )
            total = added if total is None else call(graph, torch.add, total, added)
        else:
            hidden = node if term.hidden_when else call(graph, torch.logical_not, node)
            lowest = -math.inf if term.value == -math.inf else torch.finfo(torch.float32).min
            if total is None:
                total = call(
                    graph, torch.mul, call(graph, torch.ops.aten.to.dtype, node, torch.float32), 0.0
                )
            total = call(graph, torch.masked_fill, total, hidden, lowest)
    return total


def _unfolded(graph: fx.Graph, node: fx.Node, heads: int) -> fx.Node:
    """``[B * Hq, r, c]`` as ``[B, Hq, r, c]``."""
    shape = shape_of(node) or ()
    folded = len(shape) == 3 and isinstance(shape[0], int) and shape[0] not in (1, heads)
    symbolic = len(shape) == 3 and not isinstance(shape[0], int)
    if not folded and not symbolic:
        return node
    return call(graph, torch.unflatten, node, 0, (-1, heads))
