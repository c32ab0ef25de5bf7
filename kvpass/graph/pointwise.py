# SPDX-License-Identifier: Apache-2.0
"""From the softmax back to the score product: scale, softcap, masks and biases, sinks.

What has been passed is kept as ``softmax input = factor * current + terms`` or, once a softcap has
been passed, ``cap * tanh(factor * current) + terms``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from kvpass.graph.product import PRODUCTS
from kvpass.graph.sizes import same_shape
from kvpass.graph.walk import (
    NotMatched,
    bind,
    describe,
    is_cast,
    is_written,
    mutates,
    number_of,
    op_name,
    shape_of,
    tensor_of,
    value_of,
)

_SEARCH_LIMIT = 256
_ENDS = ("linear", "dropout", "softmax", "function embedding", "function layer_norm")


@dataclass(frozen=True)
class MaskTerm:
    """One mask or bias applied to the scores.

    ``factor * node`` is added to them if ``kind`` is "add"; if it is "fill", ``node`` is a bool
    tensor, and scores are replaced by ``value`` where it equals ``hidden_when``. ``result`` is the
    node that applies it, where there is one.
    """

    kind: str
    node: fx.Node
    value: float = 0.0
    hidden_when: bool = True
    factor: float = 1.0
    result: fx.Node | None = None


@dataclass
class Scores:
    """What lies between the score product and the softmax.

    Attributes:
        scale: factor of the product, inside the softcap if there is one.
        softcap: 0 for none, else ``softcap * tanh(x / softcap)`` is applied to the scaled scores.
        factors: further factors that are known at run time only, to be folded into the query.
        terms: masks and biases, in the order in which they are applied.
        sinks: extra logits ``[Hq]`` of the softmax, without values.
        unfolded: nodes that must be ``[B, Hq, n, keys]``.
    """

    scale: float = 1.0
    softcap: float = 0.0
    factors: list[fx.Node] = field(default_factory=list)
    terms: list[MaskTerm] = field(default_factory=list)
    sinks: fx.Node | None = None
    unfolded: list[fx.Node] = field(default_factory=list)


def from_product(node: fx.Node) -> bool:
    """Whether elementwise or joining operations lead from a product of tensors to the node.

    True as well where the search is given up, so that a caller who must tell scores from a mask
    finds two products.
    """
    stack, seen = [node], {node}
    while stack and len(seen) < _SEARCH_LIMIT:
        current = stack.pop()
        if op_name(current) in PRODUCTS:
            return True
        name = op_name(current)
        if not name or name in _ENDS:
            continue
        for source in current.all_input_nodes:
            shape = shape_of(source)
            if source not in seen and shape is not None and len(shape) >= 3:
                seen.add(source)
                stack.append(source)
    return bool(stack)


def walk_back(source: fx.Node, interior: list[fx.Node]) -> tuple[fx.Node, Scores]:
    """From the softmax input to the score product.

    Args:
        source: input of the softmax.
        interior: gets the nodes on the way, without the product.

    Returns:
        The product, and what was passed.

    Raises:
        NotMatched: some part is not understood.
    """
    scores = Scores()
    current, scores.sinks = _sinks(source, interior)
    factor, cap = 1.0, 0.0
    while op_name(current) not in PRODUCTS:
        interior.append(current)
        name = op_name(current)
        _check_target(current)
        if name in ("mul", "div"):
            inner = _softcap(current)
            if inner is not None:
                _check_cap(cap, scores)
                interior.append(inner[0])
                current, cap, factor = inner[0], factor * inner[1], 1.0
                current = _tanh_input(current)
            else:
                current, number, unknown = _scaling(current)
                factor *= number
                if unknown is not None:
                    scores.factors.append(unknown)
        elif name == "tanh":
            _check_cap(cap, scores)
            current, cap, factor = _tanh_input(current), factor, 1.0
        elif is_cast(current) and isinstance(current.args[0], fx.Node):
            current = current.args[0]
        elif name in ("view", "reshape", "unflatten"):
            scores.unfolded.append(current)
            current = _same_scores(current)
        elif name in ("add", "masked_fill", "where"):
            if cap:
                raise NotMatched(
                    f"{describe(current)} changes the scores before they are soft-capped"
                )
            if scores.factors:
                raise NotMatched(
                    f"the mask {describe(current)} is applied before a scale that is not known at "
                    "compile time: apply the scale to the product first"
                )
            current, term = _masking(current, factor)
            scores.terms.insert(0, term)
        else:
            raise NotMatched(f"{describe(current)} between product and softmax is not understood")
    scores.softcap = cap
    scores.scale = factor * cap if cap else factor
    return current, scores


def _check_cap(cap: float, scores: Scores) -> None:
    if cap:
        raise NotMatched("the scores are soft-capped twice")
    if scores.factors:
        raise NotMatched("the soft-capped scores are scaled by a number known at run time only")


def _check_target(node: fx.Node) -> None:
    """An operation in place may write to the scores only, which nothing else reads."""
    if any(not from_product(written) for written in mutates(node)):
        raise NotMatched(f"{describe(node)} writes in place to something else than the scores")


def _same_scores(node: fx.Node) -> fx.Node:
    """The input of a reshape that keeps the scores, or only unfolds [batch * heads] into two."""
    source = node.args[0]
    before, after = shape_of(source), shape_of(node)
    if isinstance(source, fx.Node) and before is not None and after is not None:
        if same_shape(before, after):
            return source
        if len(before) == 3 and len(after) == 4 and same_shape(before[1:], after[2:]):
            return source
    raise NotMatched(f"{describe(node)} between product and softmax is not understood")


def _sinks(source: fx.Node, interior: list[fx.Node]) -> tuple[fx.Node, fx.Node | None]:
    """The scores, and the per-head logits ``[Hq]`` that are concatenated to them (gpt-oss)."""
    current = source
    passed: list[fx.Node] = []
    while is_cast(current) and isinstance(current.args[0], fx.Node):
        passed.append(current)
        current = current.args[0]
    shifted = _without_maximum(current)
    if shifted is not None:
        passed.extend(shifted[1])
        current = shifted[0]
    if op_name(current) != "cat":
        return source, None
    bound = bind(current, "tensors", "dim") or {}
    parts = bound.get("tensors")
    if not isinstance(parts, (list, tuple)) or len(parts) != 2 or bound.get("dim") not in (-1, 3):
        raise NotMatched(f"{describe(current)} between product and softmax is not understood")
    scores, extra = parts
    if not (isinstance(scores, fx.Node) and isinstance(extra, fx.Node) and from_product(scores)):
        raise NotMatched(f"{describe(current)} does not put attention sinks behind the scores")
    interior.extend((*passed, current))
    return scores, _per_head(extra, scores)


def _without_maximum(node: fx.Node) -> tuple[fx.Node, list[fx.Node]] | None:
    """``x`` of ``x - x.max(dim=-1, keepdim=True).values``, which changes no softmax."""
    if op_name(node) != "sub" or len(node.args) != 2 or node.kwargs:
        return None
    x, top = node.args
    if not isinstance(x, fx.Node) or not isinstance(top, fx.Node):
        return None
    between = [node, top]
    if op_name(top) in ("getattr", "getitem") and top.args[1] in ("values", 0):
        pair = top.args[0]
        if not isinstance(pair, fx.Node) or op_name(pair) != "max":
            return None
        between.append(pair)
        top = pair
    elif op_name(top) != "amax":
        return None
    bound = bind(top, "input", "dim", "keepdim") or {}
    if bound.get("input") is not x or bound.get("keepdim") is not True:
        return None
    rank = len(shape_of(x) or ())
    if bound.get("dim") not in (-1, rank - 1):
        return None
    assert isinstance(x, fx.Node)
    return x, between


def _per_head(node: fx.Node, scores: fx.Node) -> fx.Node:
    """The vector ``[Hq]`` behind sinks ``[B, Hq, n, 1]``."""
    shape, expected = shape_of(node), shape_of(scores)
    if shape is None or expected is None or len(expected) != 4:
        raise NotMatched("the attention sinks have no known shape")
    current: Any = node
    if op_name(current) == "expand":
        current = current.args[0]
    before = shape_of(current)
    if op_name(current) in ("view", "reshape") and before is not None and len(before) == 4:
        source = current.args[0]
        inner = shape_of(source)
        heads = expected[1]
        if (
            inner is not None
            and same_shape(before, (1, heads, 1, 1))
            and same_shape(inner, (heads,))
            and same_shape(shape, (*expected[:3], 1))
        ):
            assert isinstance(source, fx.Node)
            return source
    raise NotMatched(f"the sinks {describe(node)} are not one logit a query head")


def _tanh_input(node: fx.Node) -> fx.Node:
    bound = bind(node, "input") or {}
    source = bound.get("input")
    if not isinstance(source, fx.Node) or mutates(node):
        raise NotMatched(f"the arguments of {describe(node)} are not understood")
    return source


def _softcap(node: fx.Node) -> tuple[fx.Node, float] | None:
    """``tanh`` node and factor of ``tanh(x) * c``, or None."""
    bound = bind(node, "input", "other")
    if bound is None or len(bound) != 2:
        return None
    left, right = bound["input"], bound["other"]
    if op_name(node) == "mul" and op_name(right) == "tanh":
        left, right = right, left
    if op_name(left) != "tanh":
        return None
    number = positive(right, "softcap")
    return left, number if op_name(node) == "mul" else 1.0 / number


def positive(item: object, what: str) -> float:
    """A positive finite number known at compile time.

    Raises:
        NotMatched: it is not.
    """
    number = number_of(item)
    if number is None:
        raise NotMatched(f"the {what} {item} is not a number known at compile time")
    if not (0.0 < number < math.inf):
        raise NotMatched(f"the {what} {number} is not positive and finite")
    return number


def run_time_number(item: object) -> fx.Node | None:
    """A float that the graph gets or computes as a symbol, or None."""
    symbolic = isinstance(value_of(item), (torch.SymFloat, torch.SymInt))
    return item if symbolic and isinstance(item, fx.Node) and number_of(item) is None else None


def _scaling(node: fx.Node) -> tuple[fx.Node, float, fx.Node | None]:
    """Scores before a multiplication, its number, and its factor that is known at run time only."""
    bound = bind(node, "input", "other")
    if bound is None or len(bound) != 2:
        raise NotMatched(f"the arguments of {describe(node)} are not understood")
    left, right = bound["input"], bound["other"]
    if op_name(node) == "mul" and tensor_of(left) is None:
        left, right = right, left
    if not isinstance(left, fx.Node) or tensor_of(left) is None:
        raise NotMatched(f"{describe(node)} does not scale the scores")
    if tensor_of(right) is not None:
        raise NotMatched(f"the scale {right} is a tensor, not a number known at compile time")
    unknown = run_time_number(right)
    if unknown is not None and op_name(node) == "mul":
        return left, 1.0, unknown
    factor = positive(right, "scale")
    return left, factor if op_name(node) == "mul" else 1.0 / factor, None


def _masking(node: fx.Node, factor: float) -> tuple[fx.Node, MaskTerm]:
    """Scores before a mask or bias, and the mask as it acts behind a later ``factor``."""
    name = op_name(node)
    if name == "add":
        bound = bind(node, "input", "other")
        if bound is None or len(bound) != 2:
            raise NotMatched(f"the arguments of {describe(node)} are not understood")
        left, right = bound["input"], bound["other"]
        if not isinstance(left, fx.Node) or not isinstance(right, fx.Node):
            raise NotMatched(f"{describe(node)} adds a number: not understood as a mask")
        if from_product(right) == from_product(left):
            raise NotMatched(f"it is unclear which operand of {describe(node)} is the mask")
        scores, mask = (left, right) if from_product(left) else (right, left)
        tensor = tensor_of(mask)
        if tensor is None or not tensor.is_floating_point():
            raise NotMatched(f"the added mask {mask.name} is not a floating-point tensor")
        return scores, MaskTerm("add", mask, factor=factor, result=node)
    if name == "masked_fill":
        bound = bind(node, "input", "mask", "value") or {}
        filled, marks, value = (bound.get(key) for key in ("input", "mask", "value"))
        hidden_when = True
    else:
        bound = bind(node, "condition", "input", "other") or {}
        marks, filled, value = (bound.get(key) for key in ("condition", "input", "other"))
        hidden_when = False
        if not (isinstance(filled, fx.Node) and from_product(filled)):
            filled, value, hidden_when = value, filled, True
    number = _constant(value)
    if not isinstance(filled, fx.Node) or not isinstance(marks, fx.Node) or number is None:
        raise NotMatched(f"the arguments of {describe(node)} are not understood")
    if not from_product(filled):
        raise NotMatched(f"{describe(node)} does not fill the scores")
    dtype = getattr(tensor_of(filled), "dtype", torch.float32)
    lowest = torch.finfo(dtype).min
    if not number <= lowest or (factor < 1.0 and number != -math.inf):
        raise NotMatched(
            f"hidden scores are set to {number * factor}: use -inf or finfo.min, or add the mask"
        )
    if number * factor < lowest:
        number = -math.inf  # as the product in the dtype of the scores is
    return filled, MaskTerm("fill", marks, number, hidden_when, result=node)


def _constant(item: object) -> float | None:
    """A number, or a tensor made of one number in the graph."""
    if isinstance(item, fx.Node) and not is_written(item):
        name = op_name(item)
        if name == "tensor" and len(item.args) == 1:
            return number_of(item.args[0])
        if name == "full" and len(item.args) == 2:
            return number_of(item.args[1])
        if is_cast(item):
            return _constant(item.args[0])
    return number_of(item)
