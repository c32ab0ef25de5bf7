# SPDX-License-Identifier: Apache-2.0
"""The two products of an eager attention, however they are spelled."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import fx

from kvpass.graph.walk import NotMatched, bind, describe, op_name, shape_of

PRODUCTS = ("matmul", "bmm", "baddbmm", "einsum")


def value_operand(product: fx.Node, probabilities: fx.Node) -> fx.Node:
    """V of ``probabilities @ V``.

    Raises:
        NotMatched: the product is not of that form over [batch, heads, tokens, dim].
    """
    first, second, letters = _operands(product)
    if first is not probabilities or second is probabilities:
        raise NotMatched(f"the probabilities are not the left operand of {describe(product)}")
    if letters is not None:
        a, b, out = letters
        # bhqk, bhkd -> bhqd
        if (a[:2], a[:2], a[3], a[:3], b[3]) != (b[:2], out[:2], b[2], out[:3], out[3]):
            raise NotMatched(f"einsum {letters} is not probabilities times V")
    return second


def _operands(product: fx.Node) -> tuple[fx.Node, fx.Node, tuple[str, str, str] | None]:
    """The two tensors of a product, and for einsum the checked letters of its equation."""
    name = op_name(product)
    if name == "baddbmm":
        raise NotMatched("baddbmm (ALiBi inside the product) is not supported yet")
    letters = None
    if name == "einsum":
        if product.kwargs or not product.args or not isinstance(product.args[0], str):
            raise NotMatched("the equation of the einsum is not a constant")
        items: Any = product.args[1:]
        if len(items) == 1 and isinstance(items[0], (list, tuple)):
            items = items[0]
        letters = _letters(product.args[0])
    else:
        bound = bind(product, "input", "other") or bind(product, "input", "mat2")
        if bound is None or len(bound) != 2:
            raise NotMatched(f"the arguments of {describe(product)} are not understood")
        items = list(bound.values())
    if len(items) != 2 or not all(isinstance(item, fx.Node) for item in items):
        raise NotMatched(f"{describe(product)} is not a product of two tensors")
    for item in (*items, product):
        shape = shape_of(item)
        if shape is None or len(shape) != 4:
            rank = "unknown" if shape is None else len(shape)
            raise NotMatched(
                f"{describe(item)} has rank {rank}: only [batch, heads, tokens, head_dim] is "
                "supported"
            )
    return items[0], items[1], letters


def _letters(equation: str) -> tuple[str, str, str]:
    inputs, arrow, out = equation.replace(" ", "").partition("->")
    parts = inputs.split(",")
    terms = (*parts, out)
    good = arrow and len(parts) == 2 and all(len(t) == 4 and len(set(t)) == 4 for t in terms)
    if not good or not "".join(terms).isalpha():
        raise NotMatched(f"einsum {equation!r} is not a product of [batch, heads, tokens, dim]")
    return parts[0], parts[1], out


def key_operand(product: fx.Node, interior: list[fx.Node]) -> tuple[fx.Node, fx.Node]:
    """(query, K) of ``query @ K^T``; the node that transposes K is added to ``interior``.

    Raises:
        NotMatched: the product is not of that form over [batch, heads, tokens, dim].
    """
    query, other, letters = _operands(product)
    if letters is not None:
        a, b, out = letters
        # bhqd, bhkd -> bhqk
        if (a[:2], a[:2], a[3], a[2], b[2]) != (b[:2], out[:2], b[3], out[2], out[3]):
            raise NotMatched(f"einsum {letters} is not queries times keys")
        return query, other
    if not _swaps_last(other):
        raise NotMatched(
            f"the right operand {describe(other)} of the score product is not K with its last "
            "two axes swapped"
        )
    interior.append(other)
    keys = other.args[0]
    assert isinstance(keys, fx.Node)
    return query, keys


def _swaps_last(node: fx.Node) -> bool:
    if not node.args or not isinstance(node.args[0], fx.Node):
        return False
    name = op_name(node)
    rest: tuple[Any, ...] = node.args[1:]
    if name == "transpose" and len(rest) == 2 and not node.kwargs:
        return _axes(rest) in ([2, 3], [3, 2])
    if name == "permute" and not node.kwargs:
        dims = rest[0] if len(rest) == 1 and isinstance(rest[0], (list, tuple)) else rest
        return _axes(dims) == [0, 1, 3, 2]
    return name == "getattr" and rest == ("mT",)


def _axes(dims: Iterable[Any]) -> list[int]:
    """Axes of a 4-D tensor counted from the left, empty if one is not a constant."""
    items = list(dims)
    return [d % 4 for d in items] if all(isinstance(d, int) for d in items) else []
