# SPDX-License-Identifier: Apache-2.0
"""What a matched site must satisfy besides its structure to be rewritten."""

from __future__ import annotations

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

from kvpass.graph.latent import Latent
from kvpass.graph.operands import heads_first
from kvpass.graph.site import AttentionSite
from kvpass.graph.sizes import same, same_shape, settled
from kvpass.graph.walk import tensor_of
from kvpass.runtime.handle import KVHandle

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MIN_HEAD_DIM, MAX_HEAD_DIM = 16, 256
MAX_LATENT_DIM, MAX_ROTARY_DIM = 512, 128


def site_refusal(site: AttentionSite) -> str | None:
    """Why a matched site cannot be rewritten, or None if it can."""
    promoted = _promotion(site)
    if promoted is not None:
        return promoted
    if site.latent is not None:
        return _latent_refusal(site, site.latent)
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
        size = settled(tensor.shape[3])
        if size is None:
            return f"head_dim of the {name} is not static"
        if not MIN_HEAD_DIM <= size <= MAX_HEAD_DIM:
            return f"head_dim {size} of the {name}: supported are {MIN_HEAD_DIM} to {MAX_HEAD_DIM}"
        if not same(size, match.shape[3]):
            return f"head_dim of query {query.shape[3]} and keys {keys.shape[3]} differ"
    heads, kv_heads = settled(query.shape[1]), settled(keys.shape[1])
    if heads is None or kv_heads is None:
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


def _promotion(site: AttentionSite) -> str | None:
    """New tokens are stored as they come: nothing may widen them on their way into the cache."""
    source = site.source
    for what, new, whole in (
        ("keys", source.k_new, source.keys),
        ("values", source.v_new, source.values),
    ):
        a, b = tensor_of(new), tensor_of(whole)
        if a is not None and b is not None and a.dtype != b.dtype:
            return f"new {what} are {a.dtype}, the cache {b.dtype}: give both one dtype"
    return None


def _latent_refusal(site: AttentionSite, latent: Latent) -> str | None:
    nodes = (site.query, latent.latents, latent.rotary, latent.weight, site.output)
    query, latents, rotary, weight, output = (tensor_of(node) for node in nodes)
    if query is None or latents is None or rotary is None or weight is None or output is None:
        return "query, latents, weight or output have no known shape"
    tensors = (query, latents, rotary, weight, output)
    if any(tensor.dim() != 4 for tensor in (query, latents, rotary)):
        return "latents and rotary keys: only [batch, 1, tokens, channels]"
    if site.source.tokens_first:
        return "latents of [batch, tokens, 1, channels] are not supported"
    if site.source.k_new is None:
        return "latents that are only read are not supported"
    if site.sinks is not None or site.mask.chunk:
        return "attention sinks or chunks over latents are not supported"
    if query.dtype not in DTYPES:
        return f"dtype {query.dtype}: only float32, float16 and bfloat16 are supported"
    if len({tensor.dtype for tensor in tensors}) > 1:
        return f"query, latents, their weight and the output differ in dtype ({weight.dtype})"
    if len({tensor.device for tensor in tensors}) > 1:
        return "query, latents and their weight are on different devices"
    sizes = [settled(tensor.shape[-1]) for tensor in (query, latents, rotary, output)]
    widths = [size for size in sizes if size is not None]
    if len(widths) < len(sizes):
        return "the channels of query, latents or output are not static"
    width, channels, turned, _ = widths
    if not MIN_HEAD_DIM <= channels <= MAX_LATENT_DIM:
        return f"latents of {channels} channels: supported are {MIN_HEAD_DIM} to {MAX_LATENT_DIM}"
    if not MIN_HEAD_DIM <= turned <= MAX_ROTARY_DIM:
        return f"rotary keys of {turned} channels: supported are {MIN_HEAD_DIM} to {MAX_ROTARY_DIM}"
    if width != latent.nope + turned:
        return f"queries of {width} channels, keys of {latent.nope + turned}"
    if query.shape[1] != latent.heads:
        return f"{query.shape[1]} query heads and {latent.heads} heads of keys differ"
    if not same(latents.shape[1], 1) or not same(rotary.shape[1], 1):
        return "latents and rotary keys must be the same for all heads"
    batches = (latents.shape[0], rotary.shape[0])
    if not all(same(query.shape[0], batch) for batch in batches):
        return f"batch {query.shape[0]} of the query and {batches} of what is cached differ"
    rows = weight.shape[0] // latent.heads - latent.nope
    expected = (query.shape[0], latent.heads, query.shape[2], rows)
    folded = (query.shape[0] * latent.heads, *expected[2:])
    if not same_shape(output.shape, expected) and not same_shape(output.shape, folded):
        return f"the output {tuple(output.shape)} is not {tuple(expected)}"
    return None


def graph_refusal(gm: fx.GraphModule) -> str | None:
    """Why nothing in the graph may be rewritten, or None.

    The ops of a cache have no gradient, so a graph that may be differentiated is left alone.
    """
    if any(map(_in_transform, gm.graph.nodes)):
        return "it is traced inside a transform, as torch.func.functionalize is: compile outside it"
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


def _in_transform(node: fx.Node) -> bool:
    value = tensor_of(node) if node.op == "placeholder" else None
    return value is not None and not isinstance(value, (FakeTensor, KVHandle))


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
