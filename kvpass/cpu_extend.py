# SPDX-License-Identifier: Apache-2.0
"""Attention of many queries on a CPU: an online softmax over one tile of keys after another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kvpass.cpu_scores import UNDERFLOW, Scoring, sink_factor
from kvpass.runtime.batch import Batch, Block

QUERY_TILE = 256
"""Queries scored at a time; bounds the score tile to heads x 256 x block_size floats."""


def extend(
    batch: Batch,
    layer: int,
    row: list[Block],
    q: Tensor,
    k_new: Tensor | None,
    v_new: Tensor | None,
    scoring: Scoring,
    mask: Tensor | None,
    bias: Tensor | None,
    out: Tensor,
    made: Made | None = None,
    tile: Sequence[int] | None = None,
) -> None:
    """Attention of one sequence: stored keys from its blocks, new ones from dense tensors.

    Args:
        batch: the sequences; the new tokens are not counted yet.
        layer: index of the layer.
        row: the blocks of the sequence.
        q: ``[Hq, n, Dk]``.
        k_new: ``[Hkv, m, Dk]``, or None for m = 0.
        v_new: ``[Hkv, m, Dv]``, or None with ``k_new``.
        scoring: from products to scores; causal only where m = n.
        mask: bool ``[>= stored + m]``, False = never seen.
        bias: ``[Hq|1, n, >= stored + m]``, bool or float.
        out: ``[n, Hq, Dv]``, written.
        made: how keys and values are made of what the blocks hold; None: they are that. New keys
            and values come made already.
        tile: queries, and keys of a block, that are scored at once; None: ``QUERY_TILE`` and all.
            A first prompt without masks is given whole to torch, which cuts it by itself.
    """
    geometry = batch.geometry(layer)
    past = batch.lengths[layer]
    tokens, kv_heads, size = q.shape[1], geometry.kv_heads, geometry.block_size
    stored_heads = kv_heads
    if made is not None:
        kv_heads = made.kv_heads
    if k_new is None or v_new is None:
        k_new = q.new_empty(kv_heads, 0, q.shape[2])
        v_new = q.new_empty(kv_heads, 0, geometry.head_dim_v)
    new, causal = k_new.shape[1], scoring.causal
    bare = past == 0 and mask is None and bias is None and scoring.plain
    if bare and new and (new == tokens or not causal) and q.shape[2] == v_new.shape[2]:
        k_all, v_all = _repeat(k_new, q.shape[0]), _repeat(v_new, q.shape[0])
        dense = F.scaled_dot_product_attention(
            q[None], k_all[None], v_all[None], is_causal=causal, scale=scoring.scale
        )
        out.copy_(dense[0].transpose(0, 1))
        return
    rows, columns = (QUERY_TILE, size) if tile is None else (tile[0], min(tile[1], size))
    for begin in range(0, tokens, rows):
        end = min(begin + rows, tokens)
        sums = _Tile(q[:, begin:end], kv_heads, out.shape[2], scoring)
        span = _Span(past, begin, end, scoring, mask, bias)
        seen = scoring.first_seen(past + begin)
        for i in range(seen // size, geometry.blocks_for(past) if seen < past else 0):
            start, stop = i * size, min((i + 1) * size, past)
            keys = row[i].k.unflatten(0, (stored_heads, -1)).flatten(1, 2)[:, : stop - start]
            values = row[i].v.unflatten(0, (stored_heads, -1)).flatten(1, 2)[:, : stop - start]
            if made is not None:
                keys, values = made.of(keys, values)
            for first in range(start, stop, columns):
                last = min(first + columns, stop)
                sums.visit(
                    keys[:, first - start : last - start], values[:, first - start : last - start],
                    span.visible(first, last), span.added(first, last),
                )  # fmt: skip
        start = max(seen - past, 0) // columns * columns
        for first in range(start, end if causal else new, columns):
            last = min(first + columns, new)
            sums.visit(
                k_new[:, first:last], v_new[:, first:last],
                span.visible(past + first, past + last), span.added(past + first, past + last),
            )  # fmt: skip
        out[begin:end].copy_(sums.result().transpose(0, 1))


@dataclass(frozen=True)
class Made:
    """Keys and values that are made of what the blocks hold.

    Attributes:
        kv_heads: heads of the keys that are made.
        of: from ``[stored heads, t, Dk]`` and ``[stored heads, t, Dv]`` to keys and values.
    """

    kv_heads: int
    of: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def _repeat(x: Tensor, heads: int) -> Tensor:
    return x.repeat_interleave(heads // x.shape[0], 0)


@dataclass(frozen=True)
class _Span:
    """The new queries ``begin`` to ``end``, and which keys they see; keys are named by position."""

    past: int
    begin: int
    end: int
    scoring: Scoring
    mask: Tensor | None
    bias: Tensor | None

    def visible(self, first: int, last: int) -> Tensor | None:
        """Which of the keys are seen: bool ``[Hq|1, queries, keys]``, or None for all."""
        parts: list[Tensor] = []
        if self.mask is not None:
            parts.append(self.mask[first:last].view(1, 1, -1))
        if self.bias is not None and self.bias.dtype == torch.bool:
            parts.append(self.bias[:, self.begin : self.end, first:last])
        low, high = self.past + self.begin, self.past + self.end - 1
        window, chunk = self.scoring.window, self.scoring.chunk
        late = self.scoring.causal and last - 1 > low
        old = first < self.scoring.first_seen(high)
        if late or old:
            rows = torch.arange(low, high + 1).view(1, -1, 1)
            columns = torch.arange(first, last).view(1, 1, -1)
            if late:
                parts.append(columns <= rows)
            if old:
                parts.append(columns >= rows // chunk * chunk if chunk else columns > rows - window)
        if not parts:
            return None
        result = parts[0]
        for part in parts[1:]:
            result = result & part
        return result

    def added(self, first: int, last: int) -> Tensor | None:
        """What is added to the scores of the keys: fp32 ``[Hq|1, queries, keys]``, or None."""
        if self.bias is None or self.bias.dtype == torch.bool:
            return None
        return self.bias[:, self.begin : self.end, first:last].float()


class _Tile:
    """Online softmax of some queries over one tile of keys after another."""

    def __init__(self, q: Tensor, kv_heads: int, width: int, scoring: Scoring) -> None:
        self.heads, self.queries, _ = q.shape
        self.kv_heads = kv_heads
        self.scoring = scoring
        self.q = (q.float() * scoring.factor).reshape(kv_heads, -1, q.shape[2])
        rows = self.q.shape[1]
        self.top = torch.full((kv_heads, rows, 1), float("-inf"), dtype=torch.float32)
        self.norm = torch.zeros((kv_heads, rows, 1), dtype=torch.float32)
        self.sum = torch.zeros((kv_heads, rows, width), dtype=torch.float32)

    def visit(self, k: Tensor, v: Tensor, visible: Tensor | None, added: Tensor | None) -> None:
        """Take keys ``[Hkv, t, Dk]`` and values ``[Hkv, t, Dv]`` in."""
        scores = self.scoring.cap_(torch.bmm(self.q, k.float().transpose(1, 2)))
        per_head = scores.view(self.heads, self.queries, -1)
        if added is not None:
            per_head += added
        if visible is not None:
            per_head.masked_fill_(~visible, float("-inf"))
        top = torch.maximum(self.top, scores.amax(-1, keepdim=True))
        safe = torch.where(top == float("-inf"), 0.0, top)
        weights = torch.threshold_((scores - safe).exp_(), UNDERFLOW, 0.0)
        decay = (self.top - safe).exp_()
        self.norm = self.norm * decay + weights.sum(-1, keepdim=True)
        self.sum = self.sum * decay + torch.bmm(weights, v.float())
        self.top = top

    def result(self) -> Tensor:
        """``[Hq, queries, Dv]``; zero where no key was visible."""
        norm = torch.where(self.norm == 0, 1.0, self.norm)
        result = (self.sum / norm).view(self.heads, self.queries, -1)
        if self.scoring.sinks is not None:
            share = (self.heads, self.queries, 1)
            sinks = self.scoring.sinks.view(-1, 1, 1)
            result *= sink_factor(self.top.view(share), self.norm.view(share), sinks)
        return result
