# SPDX-License-Identifier: Apache-2.0
"""The eager chain: product, scale, mask, softmax, casts, dropout, product with V."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import fx

from kvpass.graph.product import PRODUCTS, key_operand, value_operand
from kvpass.graph.walk import (
    NotMatched,
    bind,
    describe,
    is_cast,
    is_written,
    number_of,
    op_name,
    shape_of,
    tensor_of,
)

_SEARCH_LIMIT = 256
_ENDS = ("linear", "dropout", "softmax", "function embedding", "function layer_norm")


@dataclass(frozen=True)
class MaskTerm:
    """One mask applied to the scores.

    ``node`` is added to them if ``kind`` is "add"; if it is "fill", it is a bool tensor, and
    scores are replaced by ``value`` where it equals ``hidden_when``.
    """

    kind: str
    node: fx.Node
    value: float = 0.0
    hidden_when: bool = True


@dataclass
class Chain:
    """An attention as its anchor spells it, before K, V and the masks are looked at."""

    anchor: fx.Node
    output: fx.Node
    query: fx.Node
    keys: fx.Node
    values: fx.Node
    scale: float
    masks: list[MaskTerm] = field(default_factory=list)
    causal_flag: bool = False
    grouped: bool = False
    interior: list[fx.Node] = field(default_factory=list)


def is_softmax(node: fx.Node) -> bool:
    """Whether the node is a softmax in any spelling."""
    return op_name(node) == "softmax"


def looks_like_attention(softmax: fx.Node, live: set[fx.Node]) -> bool:
    """Whether a softmax stands between two products, whatever else is in between."""
    source = softmax.args[0] if softmax.args else softmax.kwargs.get("input")
    return isinstance(source, fx.Node) and _from_product(source) and _to_product(softmax, live)


def _from_product(node: fx.Node) -> bool:
    """Whether elementwise or joining operations lead from a product of tensors to the node."""
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
    return False


def _to_product(node: fx.Node, live: set[fx.Node]) -> bool:
    stack, seen = [node], {node}
    while stack and len(seen) < _SEARCH_LIMIT:
        for user in stack.pop().users:
            if user in seen or user not in live:
                continue
            if op_name(user) in PRODUCTS:
                return True
            if op_name(user) in ("dropout", "getitem", "contiguous", "mul", "view", "reshape") or (
                is_cast(user)
            ):
                seen.add(user)
                stack.append(user)
    return False


def match_sdpa(node: fx.Node) -> Chain:
    """A ``scaled_dot_product_attention`` call.

    Raises:
        NotMatched: an argument is not understood.
    """
    bound = bind(
        node,
        *("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa"),
    )
    if bound is None:
        raise NotMatched("unknown arguments of scaled_dot_product_attention")
    query, keys, values = (bound.get(name) for name in ("query", "key", "value"))
    if not all(isinstance(item, fx.Node) for item in (query, keys, values)):
        raise NotMatched("query, key and value must be tensors of the graph")
    dropout = number_of(bound.get("dropout_p", 0.0))
    if dropout != 0.0:
        raise NotMatched(
            f"dropout_p={bound.get('dropout_p')} is not zero: call model.eval() before compiling"
        )
    causal, grouped = bound.get("is_causal", False), bound.get("enable_gqa", False)
    if not isinstance(causal, bool) or not isinstance(grouped, bool):
        raise NotMatched("is_causal or enable_gqa is not a constant of the graph")
    mask = bound.get("attn_mask")
    if mask is not None and causal:
        raise NotMatched("both attn_mask and is_causal are given")
    if mask is not None and not isinstance(mask, fx.Node):
        raise NotMatched("attn_mask is not a tensor of the graph")
    masks = []
    if mask is not None:
        tensor = tensor_of(mask)
        is_bool = tensor is not None and tensor.dtype == torch.bool
        kind = "fill" if is_bool else "add"
        masks = [MaskTerm(kind, mask, -math.inf, hidden_when=False)]
    given = bound.get("scale")
    if given is None:
        head_dim = (shape_of(query) or (0,))[-1]
        if not isinstance(head_dim, int) or head_dim < 1:
            raise NotMatched("head_dim is not static, so the default scale is unknown")
        scale = 1.0 / math.sqrt(head_dim)
    else:
        scale = _positive(given, "scale")
    return Chain(node, node, query, keys, values, scale, masks, causal, grouped)  # type: ignore[arg-type]


def match_softmax(node: fx.Node, live: set[fx.Node]) -> Chain:
    """The eager chain around a softmax.

    Raises:
        NotMatched: some part of it is not understood.
    """
    source = _check_softmax(node)
    interior: list[fx.Node] = [node]
    output, values = _forward(node, live, interior)
    query, keys, scale, masks = _backward(source, interior)
    chain = Chain(node, output, query, keys, values, scale, masks)
    chain.interior = [item for item in interior if item is not output]
    _check_dtypes(chain)
    return chain


def _check_softmax(node: fx.Node) -> fx.Node:
    names: tuple[str, ...] = ("input", "dim", "_stacklevel", "dtype")
    if node.op == "call_method" or getattr(node.target, "__module__", "") != "torch.nn.functional":
        names = ("input", "dim", "dtype")
    bound = bind(node, *names)
    source = bound.get("input") if bound else None
    tensor = tensor_of(source)
    if bound is None or not isinstance(source, fx.Node) or tensor is None:
        raise NotMatched("the arguments of the softmax are not understood")
    dim = bound.get("dim")
    if dim not in (-1, tensor.dim() - 1):
        raise NotMatched(f"softmax over dim {dim} instead of the last (the keys)")
    return source


def _forward(
    softmax: fx.Node, live: set[fx.Node], interior: list[fx.Node]
) -> tuple[fx.Node, fx.Node]:
    """From the softmax to the product with V: (product, V operand)."""
    current = softmax
    while True:
        users = [user for user in current.users if user in live]
        if any(user.op == "output" for user in users):
            raise NotMatched(
                "the attention probabilities are returned: set output_attentions=False"
            )
        if len(users) != 1:
            names = ", ".join(describe(user) for user in users)
            raise NotMatched(f"the attention probabilities have several users: {names}")
        user = users[0]
        name = op_name(user)
        if name in PRODUCTS:
            return user, value_operand(user, current)
        if name == "dropout":
            _check_dropout(user)
        elif name == "getitem":
            raise NotMatched(
                f"the probabilities are sliced by {describe(user)} (attention sinks): "
                "not supported yet"
            )
        elif name in ("view", "reshape"):
            raise NotMatched(
                f"heads and batch are folded together by {describe(user)}: only "
                "[batch, heads, tokens, head_dim] is supported"
            )
        elif not (is_cast(user) and user.args[0] is current) and name != "contiguous":
            raise NotMatched(f"{describe(user)} between softmax and V is not understood")
        interior.append(user)
        current = user


def _check_dropout(node: fx.Node) -> None:
    bound = bind(node, "input", "p", "training", "inplace")
    if bound is None:
        bound = bind(node, "input", "p", "train") or {}
        bound["training"] = bound.get("train", True)
    p, training = number_of(bound.get("p", 0.5)), bound.get("training", True)
    if bound.get("inplace"):
        raise NotMatched("dropout in place")
    if p != 0.0 and training is not False:
        raise NotMatched(
            f"dropout p={bound.get('p', 0.5)} in training: call model.eval() before compiling"
        )


def _backward(
    source: fx.Node, interior: list[fx.Node]
) -> tuple[fx.Node, fx.Node, float, list[MaskTerm]]:
    """From the softmax input to the product: (query, K operand, scale, masks)."""
    current, scale, masks = source, 1.0, list[MaskTerm]()
    scaled = False
    while True:
        interior.append(current)
        name = op_name(current)
        if name in PRODUCTS:
            query, keys = key_operand(current, interior)
            return query, keys, scale, masks
        if name in ("mul", "div"):
            current, factor = _scaling(current)
            scale, scaled = scale * factor, True
        elif is_cast(current) and isinstance(current.args[0], fx.Node):
            current = current.args[0]
        elif name in ("add", "masked_fill", "where"):
            if scaled:
                raise NotMatched(
                    f"the mask {describe(current)} is applied before the scale: apply the scale "
                    "to the product first"
                )
            current, term = _masking(current)
            masks.append(term)
        else:
            raise NotMatched(_unknown(current))


def _unknown(node: fx.Node) -> str:
    name = op_name(node)
    if name == "tanh":
        return "the scores are soft-capped with tanh: not supported yet"
    if name == "cat":
        return "the scores are concatenated with attention sinks: not supported yet"
    return f"{describe(node)} between product and softmax is not understood"


def _positive(item: object, what: str) -> float:
    number = number_of(item)
    if number is None:
        raise NotMatched(f"the {what} {item} is not a number known at compile time")
    if not (0.0 < number < math.inf):
        raise NotMatched(f"the {what} {number} is not positive and finite")
    return number


def _scaling(node: fx.Node) -> tuple[fx.Node, float]:
    bound = bind(node, "input", "other")
    if bound is None or len(bound) != 2:
        raise NotMatched(f"the arguments of {describe(node)} are not understood")
    left, right = bound["input"], bound["other"]
    if op_name(node) == "mul" and tensor_of(left) is None:
        left, right = right, left
    if not isinstance(left, fx.Node) or tensor_of(left) is None:
        raise NotMatched(f"{describe(node)} does not scale the scores")
    if tensor_of(right) is not None:
        tanh = next((item for item in (left, right) if op_name(item) == "tanh"), None)
        if tanh is not None:
            raise NotMatched(_unknown(tanh))
        raise NotMatched(f"the scale {right} is a tensor, not a number known at compile time")
    if op_name(left) == "tanh":
        raise NotMatched(_unknown(left))
    factor = _positive(right, "scale")
    return left, factor if op_name(node) == "mul" else 1.0 / factor


def _masking(node: fx.Node) -> tuple[fx.Node, MaskTerm]:
    name = op_name(node)
    if name == "add":
        bound = bind(node, "input", "other")
        if bound is None or len(bound) != 2:
            raise NotMatched(f"the arguments of {describe(node)} are not understood")
        left, right = bound["input"], bound["other"]
        if not isinstance(left, fx.Node) or not isinstance(right, fx.Node):
            raise NotMatched(f"{describe(node)} adds a number: not understood as a mask")
        if _from_product(right) == _from_product(left):
            raise NotMatched(f"it is unclear which operand of {describe(node)} is the mask")
        scores, mask = (left, right) if _from_product(left) else (right, left)
        tensor = tensor_of(mask)
        if tensor is None or not tensor.is_floating_point():
            raise NotMatched(f"the added mask {mask.name} is not a floating-point tensor")
        return scores, MaskTerm("add", mask)
    if name == "masked_fill":
        bound = bind(node, "input", "mask", "value") or {}
        filled, marks, value = (bound.get(key) for key in ("input", "mask", "value"))
        hidden_when = True
    else:
        bound = bind(node, "condition", "input", "other") or {}
        marks, filled, value = (bound.get(key) for key in ("condition", "input", "other"))
        hidden_when = False
        if not (isinstance(filled, fx.Node) and _from_product(filled)):
            filled, value, hidden_when = value, filled, True
    number = _constant(value)
    if not isinstance(filled, fx.Node) or not isinstance(marks, fx.Node) or number is None:
        raise NotMatched(f"the arguments of {describe(node)} are not understood")
    if not _from_product(filled):
        raise NotMatched(f"{describe(node)} does not fill the scores")
    dtype = getattr(tensor_of(filled), "dtype", torch.float32)
    if number > torch.finfo(dtype).min:
        raise NotMatched(
            f"hidden scores are set to {number}: use -inf or finfo.min, or add the mask"
        )
    return filled, MaskTerm("fill", marks, number, hidden_when)


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


def _check_dtypes(chain: Chain) -> None:
    """Scores may be widened to fp32 for the softmax and narrowed back after it, nothing else.

    The kernel computes scores and probabilities in fp32, so a product in fp16 that overflows in
    eager does not overflow here.
    """
    query = tensor_of(chain.query)
    if query is None:
        raise NotMatched("the query is not a tensor with a known dtype")
    for node in (*chain.interior, chain.output):
        tensor = tensor_of(node)
        if tensor is None:
            raise NotMatched(f"{describe(node)} has no known dtype")
        if tensor.dtype not in (query.dtype, torch.float32) or tensor.device != query.device:
            raise NotMatched(
                f"{describe(node)} is {tensor.dtype} on {tensor.device}, the query is "
                f"{query.dtype} on {query.device}: this cast is not supported yet"
            )
    wide = False
    softmax_at = chain.anchor
    current: object = softmax_at.args[0] if softmax_at.args else softmax_at.kwargs["input"]
    while isinstance(current, fx.Node) and current in chain.interior:
        narrow = tensor_of(current).dtype == query.dtype  # type: ignore[union-attr]
        if wide and not narrow:
            raise NotMatched(
                f"the scores are narrowed before the softmax after {describe(current)}"
            )
        wide = narrow and query.dtype != torch.float32
        sources = [item for item in current.all_input_nodes if item in chain.interior]
        current = sources[0] if sources else None
