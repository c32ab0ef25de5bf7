# SPDX-License-Identifier: Apache-2.0
"""All masks and biases of a site as one MaskSpec that is exact."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import fx

from kvpass.graph.mask import MaskReader, Reading
from kvpass.graph.operands import heads_first
from kvpass.graph.pointwise import MaskTerm
from kvpass.graph.score import Chain
from kvpass.graph.site import CacheSource, MaskSpec
from kvpass.graph.sizes import Size, fixed, same, same_shape
from kvpass.graph.values import Keep
from kvpass.graph.walk import NotMatched, need_tensor, shape_of

Sizes = tuple[Size, Size, Size, Size]


def read_mask(reader: MaskReader, chain: Chain, query: fx.Node, source: CacheSource) -> MaskSpec:
    """What the masks of a chain mean for scores ``[B, Hq, n, keys]``.

    A term that is read becomes causality, a window or padding. What is not read, and what cannot
    be combined exactly with it, stays a term that the kernel gets as an operand.

    Raises:
        NotMatched: a mask has no exact form.
    """
    shape = heads_first(need_tensor(query, "the query"), "query" in chain.tokens_first).shape
    need_tensor(source.keys, "the keys")
    keys = source.shapes[0][2]
    scores: Sizes = (shape[0], shape[1], shape[2], keys)
    for node in chain.scores.unfolded:
        if not same_shape(shape_of(node) or (), scores):
            raise NotMatched(f"{node.name} does not lay the scores out as [batch, heads, n, keys]")
    if chain.causal_flag:
        if not same(shape[2], keys):
            raise NotMatched(
                f"is_causal=True with {shape[2]} queries and {keys} keys is aligned to the "
                "first key, not to the last: pass the mask instead"
            )
        return MaskSpec(causal=True)
    terms = chain.scores.terms
    checked = chain.positions_checked
    readings = [_read(reader, term, scores, source, checked) for term in terms]
    known = [(term, *found) for term, found in zip(terms, readings, strict=True) if found]
    opaque = [term for term, found in zip(terms, readings, strict=True) if not found]
    # finfo.min hides a key only next to one that is visible: with other masks that is not sure.
    finite = [term for term, _, hidden in known if hidden != -math.inf]
    padding = {reading.kv_mask for _, reading, _ in known if reading.kv_mask is not None}
    if finite and (opaque or padding):
        opaque = [term for term in terms if term in opaque or term in finite]
        known = [item for item in known if item[0] not in finite]
        padding = {reading.kv_mask for _, reading, _ in known if reading.kv_mask is not None}
    chunks = {reading.chunk for _, reading, _ in known if reading.chunk}
    offsets = [
        reading.kv_offset for _, reading, _ in known if reading.kv_mask is not None or reading.chunk
    ]
    if len(padding) > 1 or not all(same(offset, offsets[0]) for offset in offsets):
        raise NotMatched("several padding masks: combine them into one first")
    for term in opaque:
        _check_operand(term, scores, query, len(opaque) > 1)
    windows = [reading.window for _, reading, _ in known if reading.window]
    if len(chunks) + bool(windows) > 1:
        raise NotMatched("several masks with chunks, or with chunks and a window")
    pasts = [reading.past for _, reading, _ in known if reading.causal and reading.past is not None]
    if not all(same(past, pasts[0]) for past in pasts):
        raise NotMatched("several masks that take the queries to begin at different positions")
    return MaskSpec(
        past=pasts[0] if pasts else None,
        assumed=tuple(pair for _, reading, _ in known for pair in reading.assumed),
        causal=any(reading.causal for _, reading, _ in known),
        window=min(windows, default=0),
        kv_mask=next(iter(padding), None),
        kv_offset=offsets[0] if padding or chunks else 0,
        chunk=next(iter(chunks), 0),
        terms=tuple(opaque),
    )


def _read(
    reader: MaskReader, term: MaskTerm, scores: Sizes, source: CacheSource, checked: bool
) -> tuple[Reading, float] | None:
    """What one term means, and the score that hidden keys get; None if it is not read exactly.

    ``checked``: it may take the queries to begin elsewhere, if the runtime finds the two equal.
    """
    tensor = need_tensor(term.node, "the mask")
    shape = shape_of(term.node) or ()
    batch, _, queries, keys = scores
    value = reader.value(term.node)
    if term.kind == "fill":
        if tensor.dtype != torch.bool:
            raise NotMatched(f"the mask {term.node.name} is {tensor.dtype}, not bool")
        if not isinstance(value, Keep):
            return None
        if term.hidden_when:
            value = value.inverted()
    elif isinstance(value, Keep) or value is None:
        return None
    position = source.position if source.fills_buffer else None
    reading = reader.read(value, shape, batch, queries, keys, position)
    if reading is None and checked and position is None:
        reading = reader.read(value, shape, batch, queries, keys, keys - queries)
        if reading is not None and reading.past is not None:
            if fixed(reading.past - (keys - queries)) is not None:
                return None  # never equal
            pair = (reading.past, keys - queries)
            reading = replace(reading, past=None, assumed=(*reading.assumed, pair))
    if reading is None or term.factor <= 0.0:
        return None
    if not source.keep and not same(reading.kv_offset, 0):
        return None
    hidden = term.value if term.kind == "fill" else reading.hidden
    if hidden == -math.inf:
        return reading, hidden
    # A row without any visible key would be the mean of V.
    if reading.kv_mask is not None:
        return None
    lowest = not tensor.is_floating_point() or hidden <= torch.finfo(tensor.dtype).min
    return (reading, hidden) if lowest and term.factor >= 1.0 else None


def _check_operand(term: MaskTerm, scores: Sizes, query: fx.Node, combined: bool) -> None:
    """Refuse an operand that the kernel, or the sum of several, cannot take.

    Raises:
        NotMatched: dtype, shape, device or gradient do not fit.
    """
    node = term.node
    tensor = need_tensor(node, "the mask")
    q = need_tensor(query, "the query")
    if term.kind == "add" and tensor.dtype not in (q.dtype, torch.float32):
        raise NotMatched(f"the mask {node.name} is {tensor.dtype}, not the dtype of the query")
    shape = list(shape_of(node) or ())
    batch, heads, queries, keys = scores
    if len(shape) == 3 and same(shape[0], batch * heads) and not same(batch * heads, heads):
        shape = [batch, heads, *shape[1:]]
    # What is applied to the scores and leaves their shape broadcasts to them.
    applied = shape_of(term.result) if term.result is not None else None
    fits = applied is not None and len(shape) <= 4 and same_shape(applied, scores)
    fits = (
        fits
        or len(shape) <= 4
        and all(
            same(size, 1) or same(size, full)
            for size, full in zip(reversed(shape), reversed(scores), strict=False)
        )
    )
    if not fits:
        raise NotMatched(
            f"the mask {node.name} of shape {tuple(shape)} is not proven to broadcast to the "
            f"scores {tuple(scores)}"
        )
    if tensor.device != q.device:
        raise NotMatched(f"the mask is on {tensor.device}, the query on {q.device}")
    if tensor.requires_grad and torch.is_grad_enabled():
        raise NotMatched(f"the mask {node.name} needs a gradient")
