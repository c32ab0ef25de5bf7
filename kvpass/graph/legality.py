# SPDX-License-Identifier: Apache-2.0
"""What a matched site must satisfy besides its structure to be rewritten."""

from __future__ import annotations

import torch
from torch import fx

from kvpass.graph.operands import heads_first
from kvpass.graph.site import AttentionSite
from kvpass.graph.walk import same, same_shape, tensor_of

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MIN_HEAD_DIM, MAX_HEAD_DIM = 16, 256


def site_refusal(site: AttentionSite) -> str | None:
    """Why a matched site cannot be rewritten, or None if it can."""
    query, keys, values = (
        tensor_of(node) for node in (site.query, site.source.keys, site.source.values)
    )
    output = tensor_of(site.output)
    if query is None or keys is None or values is None or output is None:
        return "query, keys, values or output have no known shape"
    query, output = heads_first(query, site.query_first), heads_first(output, site.output_first)
    keys, values = (heads_first(t, site.source.tokens_first) for t in (keys, values))
    for name, tensor in (("query", query), ("keys", keys), ("values", values)):
        if tensor.dim() != 4:
            return f"{name} of shape {tuple(tensor.shape)}: only [batch, heads, tokens, head_dim]"
    if query.dtype not in DTYPES:
        return f"dtype {query.dtype}: only float32, float16 and bfloat16 are supported"
    dtypes = {tensor.dtype for tensor in (query, keys, values, output)}
    if len(dtypes) > 1:
        return (
            f"query {query.dtype}, keys {keys.dtype}, values {values.dtype} and output "
            f"{output.dtype} differ in dtype"
        )
    if len({tensor.device for tensor in (query, keys, values, output)}) > 1:
        return f"query on {query.device}, keys on {keys.device}, values on {values.device}"
    dims = (("query", query, keys), ("keys", keys, keys), ("values", values, values))
    for name, tensor, match in dims:
        size = tensor.shape[3]
        if not isinstance(size, int):
            return f"head_dim of the {name} is not static"
        if not MIN_HEAD_DIM <= size <= MAX_HEAD_DIM:
            return f"head_dim {size} of the {name}: supported are {MIN_HEAD_DIM} to {MAX_HEAD_DIM}"
        if not same(size, match.shape[3]):
            return f"head_dim of query {query.shape[3]} and keys {keys.shape[3]} differ"
    heads, kv_heads = query.shape[1], keys.shape[1]
    if not isinstance(heads, int) or not isinstance(kv_heads, int):
        return "the number of heads is not static"
    if heads % kv_heads:
        return f"{heads} query heads are not a multiple of {kv_heads} KV heads"
    if not same(kv_heads, values.shape[1]):
        return f"{kv_heads} heads of keys and {values.shape[1]} of values differ"
    if not same(query.shape[0], keys.shape[0]) or not same(query.shape[0], values.shape[0]):
        return (
            f"batch {query.shape[0]} of the query, {keys.shape[0]} of the keys and "
            f"{values.shape[0]} of the values are not the same"
        )
    expected = (query.shape[0], heads, query.shape[2], values.shape[3])
    folded = (query.shape[0] * heads, *expected[2:])
    if not same_shape(output.shape, expected) and not same_shape(output.shape, folded):
        return f"the output {tuple(output.shape)} is not {tuple(expected)}"
    return None


def graph_refusal(gm: fx.GraphModule) -> str | None:
    """Why nothing in the graph may be rewritten, or None.

    The ops of a cache have no gradient, so a graph that may be differentiated is left alone.
    """
    name = _trainable(gm)
    if name is None:
        return None
    if torch.is_grad_enabled():
        return "gradients are needed: compile and run under torch.no_grad()"
    for node in gm.graph.nodes:
        enables = node.target is torch._C._set_grad_enabled and node.args[:1] != (False,)
        if node.op == "call_function" and enables:
            return "gradients are enabled inside the graph: remove torch.enable_grad()"
    return None


def _trainable(gm: fx.GraphModule) -> str | None:
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            value = tensor_of(node)
        elif node.op == "get_attr":
            value = tensor_of(node)
            if value is None:
                found = gm
                for part in str(node.target).split("."):
                    found = getattr(found, part, None)  # type: ignore[assignment]
                value = found if isinstance(found, torch.Tensor) else None
        else:
            continue
        if value is not None and value.is_floating_point() and value.requires_grad:
            return str(node.name)
    return None
