# SPDX-License-Identifier: Apache-2.0
"""An attention as its anchor spells it: the SDPA call, or the eager chain around a softmax."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import fx

from kvpass.graph.pointwise import (
    MaskTerm,
    Scores,
    from_product,
    positive,
    run_time_number,
    walk_back,
)
from kvpass.graph.product import PRODUCTS, bias_of, key_operand, value_operand
from kvpass.graph.sizes import same_shape, settled
from kvpass.graph.tables import TableCheck
from kvpass.graph.walk import (
    NotMatched,
    bind,
    describe,
    is_cast,
    number_of,
    op_name,
    shape_of,
    tensor_of,
)

_SEARCH_LIMIT = 256


@dataclass
class Chain:
    """An attention as its anchor spells it, before K, V and the masks are looked at.

    Attributes:
        query, keys, values: operands of the products, ``[B, H, tokens, D]`` or, where batch and
            heads are folded, ``[B * H, tokens, D]``.
        scores: scale, softcap, masks and sinks.
        causal_flag: SDPA's ``is_causal``.
        grouped: SDPA's ``enable_gqa``.
        tokens_first: which of "query", "keys", "values" and "output" are ``[B, tokens, H, D]``.
        interior: nodes that disappear, without ``output``.
        tables: what must hold of flex_attention's block tables.
        positions_checked: where queries begin may be left for the runtime to confirm.
    """

    anchor: fx.Node
    output: fx.Node
    query: fx.Node
    keys: fx.Node
    values: fx.Node
    scores: Scores
    causal_flag: bool = False
    grouped: bool = False
    tokens_first: set[str] = field(default_factory=set)
    interior: list[fx.Node] = field(default_factory=list)
    tables: TableCheck | None = None
    positions_checked: bool = False


def is_softmax(node: fx.Node) -> bool:
    """Whether the node is a softmax in any spelling."""
    return op_name(node) == "softmax"


def looks_like_attention(softmax: fx.Node, live: set[fx.Node]) -> bool:
    """Whether a softmax stands between two products, whatever else is in between."""
    source = softmax.args[0] if softmax.args else softmax.kwargs.get("input")
    return isinstance(source, fx.Node) and from_product(source) and _to_product(softmax, live)


_BETWEEN = ("add", "contiguous", "div", "dropout", "getitem", "mul", "reshape", "sub", "view")
"""What may stand between a softmax and its product; that is then refused, but not overlooked."""


def _to_product(node: fx.Node, live: set[fx.Node]) -> bool:
    stack, seen = [node], {node}
    while stack and len(seen) < _SEARCH_LIMIT:
        for user in stack.pop().users:
            if user in seen or user not in live:
                continue
            if op_name(user) in PRODUCTS:
                return True
            if op_name(user) in _BETWEEN or (is_cast(user)):
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
    scores = Scores()
    if mask is not None:
        tensor = tensor_of(mask)
        is_bool = tensor is not None and tensor.dtype == torch.bool
        kind = "fill" if is_bool else "add"
        scores.terms = [MaskTerm(kind, mask, -math.inf, hidden_when=False)]
    given = bound.get("scale")
    unknown = run_time_number(given)
    if given is None:
        head_dim = settled((shape_of(query) or (0,))[-1])
        if head_dim is None or head_dim < 1:
            raise NotMatched("head_dim is not static, so the default scale is unknown")
        scores.scale = 1.0 / math.sqrt(head_dim)
    elif unknown is not None:
        scores.factors = [unknown]
    else:
        scores.scale = positive(given, "scale")
    return Chain(node, node, query, keys, values, scores, causal, grouped)  # type: ignore[arg-type]


def match_softmax(node: fx.Node, live: set[fx.Node]) -> Chain:
    """The eager chain around a softmax.

    Raises:
        NotMatched: some part of it is not understood.
    """
    source = _check_softmax(node)
    interior: list[fx.Node] = [node]
    tokens_first: set[str] = set()
    output, values, cut = _forward(node, live, interior, tokens_first)
    product, scores = walk_back(source, interior)
    if cut != (scores.sinks is not None):
        raise NotMatched(
            "the last probability is dropped without an attention sink among the scores"
            if cut
            else "the attention sinks take part in the product with V"
        )
    interior.append(product)
    query, keys = key_operand(product, interior, tokens_first)
    bias = bias_of(product)
    if bias is not None:
        term, beta, alpha = bias
        if scores.softcap or scores.factors:
            raise NotMatched(f"the bias of {describe(product)} is soft-capped or scaled")
        if beta != 0.0:
            scores.terms.insert(0, MaskTerm("add", term, factor=beta * scores.scale))
        scores.scale *= alpha
    chain = Chain(node, output, query, keys, values, scores, tokens_first=tokens_first)
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
    softmax: fx.Node, live: set[fx.Node], interior: list[fx.Node], tokens_first: set[str]
) -> tuple[fx.Node, fx.Node, bool]:
    """From the softmax to the product with V: (product, V operand, last probability dropped)."""
    current, cut = softmax, False
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
            return user, value_operand(user, current, tokens_first), cut
        if name == "dropout":
            _check_dropout(user)
        elif name == "getitem":
            if cut or not _drops_last(user.args[1], len(shape_of(current) or ())):
                raise NotMatched(f"{describe(user)} between softmax and V is not understood")
            cut = True
        elif name in ("view", "reshape"):
            before, after = shape_of(current) or (), shape_of(user) or ()
            folds = len(before) == 4 and len(after) == 3 and same_shape(before[2:], after[1:])
            if not folds and not same_shape(before, after):
                raise NotMatched(f"{describe(user)} between softmax and V is not understood")
        elif not (is_cast(user) and user.args[0] is current) and name != "contiguous":
            raise NotMatched(f"{describe(user)} between softmax and V is not understood")
        interior.append(user)
        current = user


def _drops_last(index: object, rank: int) -> bool:
    """Whether an index is ``[..., :-1]``."""
    whole = slice(None, None, None)
    if not isinstance(index, tuple) or index[-1] != slice(None, -1, None):
        return False
    rest = index[:-1]
    return rest == (Ellipsis,) or (len(index) == rank and all(item == whole for item in rest))


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


def _check_dtypes(chain: Chain) -> None:
    """Scores may be widened to fp32 for the softmax and narrowed back after it, nothing else.

    The kernel computes scores and probabilities in fp32, so a product in fp16 that overflows in
    eager does not overflow here.
    """
    query = tensor_of(chain.query)
    if query is None:
        raise NotMatched("the query is not a tensor with a known dtype")
    output = tensor_of(chain.output)
    narrow_dtype = query.dtype if output is None else output.dtype
    for node in (*chain.interior, chain.output):
        value = tensor_of(node)
        if value is None:
            if op_name(node) == "max":  # (values, indices)
                continue
            raise NotMatched(f"{describe(node)} has no known dtype")
        if value.dtype not in (query.dtype, narrow_dtype, torch.float32) or (
            value.device != query.device
        ):
            raise NotMatched(
                f"{describe(node)} is {value.dtype} on {value.device}, the query is "
                f"{query.dtype} on {query.device}: this cast is not supported yet"
            )
    width = 0
    softmax_at = chain.anchor
    current: object = softmax_at.args[0] if softmax_at.args else softmax_at.kwargs["input"]
    while isinstance(current, fx.Node) and current in chain.interior:
        value = tensor_of(current)
        if value is not None:
            if width and value.dtype.itemsize > width:
                raise NotMatched(
                    f"the scores are narrowed before the softmax after {describe(current)}"
                )
            width = value.dtype.itemsize
        sources = [item for item in current.all_input_nodes if item in chain.interior]
        current = sources[0] if sources else None
