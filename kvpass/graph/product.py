# SPDX-License-Identifier: Apache-2.0
"""The two products of an eager attention, however they are spelled."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from torch import fx

from kvpass.graph.walk import (
    NotMatched,
    bind,
    describe,
    number_of,
    op_name,
    shape_of,
    tensor_of,
)

PRODUCTS = ("matmul", "bmm", "baddbmm", "einsum")


def value_operand(product: fx.Node, probabilities: fx.Node, tokens_first: set[str]) -> fx.Node:
    """V of ``probabilities @ V``.

    Where einsum has V or the output as [batch, tokens, heads, dim], "values" or "output" is added
    to ``tokens_first``.

    Raises:
        NotMatched: the product is not of that form over [batch, heads, tokens, dim].
    """
    first, second, letters = _operands(product)
    if first is not probabilities or second is probabilities:
        raise NotMatched(f"the probabilities are not the left operand of {describe(product)}")
    if letters is not None:
        a, b, out = letters
        if _tokens_first(b, a[0], a[1], a[3]):
            tokens_first.add("values")
            b = _swapped(b)
        if _tokens_first(out, a[0], a[1], a[2]):
            tokens_first.add("output")
            out = _swapped(out)
        # bhqk, bhkd -> bhqd
        if (a[:2], a[:2], a[3], a[:3], b[3]) != (b[:2], out[:2], b[2], out[:3], out[3]):
            raise NotMatched(f"einsum {letters} is not probabilities times V")
    return second


def _tokens_first(term: str, batch: str, heads: str, tokens: str) -> bool:
    return term[:3] == batch + tokens + heads


def _swapped(term: str) -> str:
    return term[0] + term[2] + term[1] + term[3]


def bias_of(product: fx.Node) -> tuple[fx.Node, float, float] | None:
    """(bias, beta, alpha) of ``beta * bias + alpha * (q @ k^T)`` (baddbmm), else None.

    With beta 0 the bias is not read, even where it is NaN: beta stays 0 for the caller.

    Raises:
        NotMatched: its arguments are not understood.
    """
    if op_name(product) != "baddbmm":
        return None
    bound = _baddbmm(product)
    bias = bound.get("input")
    beta, alpha = (number_of(bound.get(name, 1)) for name in ("beta", "alpha"))
    tensor = tensor_of(bias)
    if not isinstance(bias, fx.Node) or tensor is None or not tensor.is_floating_point():
        raise NotMatched(f"the bias of {describe(product)} is not a floating-point tensor")
    if beta is None or alpha is None or not (math.isfinite(beta) and 0.0 < alpha < math.inf):
        raise NotMatched(f"beta and alpha of {describe(product)} are not known and finite")
    return bias, beta, alpha


def _baddbmm(product: fx.Node) -> dict[str, Any]:
    bound = bind(product, "input", "batch1", "batch2", "beta", "alpha")
    if bound is None:
        raise NotMatched(f"the arguments of {describe(product)} are not understood")
    return bound


def _operands(product: fx.Node) -> tuple[fx.Node, fx.Node, tuple[str, str, str] | None]:
    """The two tensors of a product, and for einsum the checked letters of its equation."""
    name = op_name(product)
    letters = None
    if name == "einsum":
        if product.kwargs or not product.args or not isinstance(product.args[0], str):
            raise NotMatched("the equation of the einsum is not a constant")
        items: Any = product.args[1:]
        if len(items) == 1 and isinstance(items[0], (list, tuple)):
            items = items[0]
        letters = _letters(product.args[0])
    elif name == "baddbmm":
        bound = _baddbmm(product)
        items = [bound.get("batch1"), bound.get("batch2")]
    else:
        found = bind(product, "input", "other") or bind(product, "input", "mat2")
        if found is None or len(found) != 2:
            raise NotMatched(f"the arguments of {describe(product)} are not understood")
        items = list(found.values())
    if len(items) != 2 or not all(isinstance(item, fx.Node) for item in items):
        raise NotMatched(f"{describe(product)} is not a product of two tensors")
    ranks = {len(shape_of(item) or ()) for item in (*items, product)}
    if ranks not in ({4}, {3}):
        raise NotMatched(
            f"{describe(product)} is not a product over [batch, heads, tokens, head_dim] or "
            "[batch * heads, tokens, head_dim]"
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


def key_operand(
    product: fx.Node, interior: list[fx.Node], tokens_first: set[str]
) -> tuple[fx.Node, fx.Node]:
    """(query, K) of ``query @ K^T``; the node that transposes K is added to ``interior``.

    Where einsum has the query or K as [batch, tokens, heads, dim], "query" or "keys" is added to
    ``tokens_first``.

    Raises:
        NotMatched: the product is not of that form over [batch, heads, tokens, dim].
    """
    query, other, letters = _operands(product)
    if letters is not None:
        a, b, out = letters
        if _tokens_first(a, out[0], out[1], out[2]):
            tokens_first.add("query")
            a = _swapped(a)
        if _tokens_first(b, out[0], out[1], out[3]):
            tokens_first.add("keys")
            b = _swapped(b)
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
    rank = len(shape_of(node) or ())
    last = [rank - 2, rank - 1]
    if name == "transpose" and len(rest) == 2 and not node.kwargs:
        return sorted(_axes(rest, rank)) == last
    if name == "permute" and not node.kwargs:
        dims = rest[0] if len(rest) == 1 and isinstance(rest[0], (list, tuple)) else rest
        return _axes(dims, rank) == [*range(rank - 2), rank - 1, rank - 2]
    return name == "getattr" and rest == ("mT",)


def _axes(dims: Iterable[Any], rank: int) -> list[int]:
    """Axes counted from the left, empty if one is not a constant."""
    items = list(dims)
    return [d % rank for d in items] if all(isinstance(d, int) for d in items) else []
