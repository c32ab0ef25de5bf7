# SPDX-License-Identifier: Apache-2.0
"""The ops on a CPU: blocks are read where they lie, and never copied together.

The order of every sum depends on shapes only: each block is one batched product of the same shape
wherever it lies, so that placement never changes a bit. Softmax is the online softmax of Milakov
and Gimelshein (2018), merged over key tiles as in FlashAttention (Dao et al., 2022).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kvpass.runtime.batch import Batch, Block
from kvpass.runtime.geometry import PAGE_SIZE

QUERY_TILE = 256
"""Queries scored at a time in extend; bounds the score tile to heads x 256 x block_size floats."""

UNDERFLOW = 2.0**-100
"""Weights below this, relative to the largest, count as zero: far under the precision of the sum,
and products of denormals would be 25 times slower."""


def append(batch: Batch, layer: int, k: Tensor, v: Tensor) -> None:
    """Write new keys and values at the end of every sequence.

    Args:
        batch: B sequences in a step that reserved room for n tokens.
        layer: index of the layer.
        k: ``[B, Hkv, n, Dk]``, any strides.
        v: ``[B, Hkv, n, Dv]``, any strides.
    """
    geometry = batch.geometry(layer)
    start, tokens = batch.lengths[layer], k.shape[2]
    heads, pages = geometry.kv_heads, geometry.pages
    for sequence, row in enumerate(batch.blocks[layer]):
        done = 0
        while done < tokens:
            position = start + done
            block = row[position // geometry.block_size]
            offset = position % geometry.block_size
            page, slot = divmod(offset, PAGE_SIZE)
            keys = block.k.view(heads, pages, PAGE_SIZE, -1)
            values = block.v.view(heads, pages, PAGE_SIZE, -1)
            if slot == 0 and tokens - done >= PAGE_SIZE:
                whole = min((tokens - done) // PAGE_SIZE, pages - page)
                span = whole * PAGE_SIZE
                new_k = k[sequence, :, done : done + span].unflatten(1, (whole, PAGE_SIZE))
                new_v = v[sequence, :, done : done + span].unflatten(1, (whole, PAGE_SIZE))
                keys[:, page : page + whole].copy_(new_k)
                values[:, page : page + whole].copy_(new_v)
            else:
                span = min(PAGE_SIZE - slot, tokens - done)
                keys[:, page, slot : slot + span].copy_(k[sequence, :, done : done + span])
                values[:, page, slot : slot + span].copy_(v[sequence, :, done : done + span])
            done += span


def gather(batch: Batch, layer: int, length: int) -> tuple[Tensor, Tensor]:
    """Dense copies of the first ``length`` keys and values.

    Returns:
        ``[B, Hkv, length, Dk]`` and ``[B, Hkv, length, Dv]``, contiguous.
    """
    geometry = batch.geometry(layer)
    count = geometry.blocks_for(length)
    heads = geometry.kv_heads

    def dense(name: str, width: int) -> Tensor:
        out = torch.empty(
            (batch.size, heads, length, width), dtype=geometry.dtype, device=batch.device
        )
        for sequence, row in enumerate(batch.blocks[layer]):
            for i in range(count):
                part = getattr(row[i], name).unflatten(0, (heads, geometry.pages)).flatten(1, 2)
                begin = i * geometry.block_size
                end = min(begin + geometry.block_size, length)
                out[sequence, :, begin:end].copy_(part[:, : end - begin])
        return out

    return dense("k", geometry.head_dim_k), dense("v", geometry.head_dim_v)


def attend(
    batch: Batch,
    layer: int,
    q: Tensor,
    k_new: Tensor,
    v_new: Tensor,
    scale: float,
    causal: bool,
    kv_mask: Tensor | None,
    bias: Tensor | None,
) -> Tensor:
    """Attention of the new queries over all stored tokens and the new ones.

    Args:
        batch: B sequences; the n new tokens are appended already, but not counted yet.
        layer: index of the layer.
        q: ``[B, Hq, n, Dk]``, any strides; Hq a multiple of the KV heads.
        k_new: ``[B, Hkv, n, Dk]``, the new keys.
        v_new: ``[B, Hkv, n, Dv]``, the new values.
        scale: factor of the scores.
        causal: query i sees positions up to ``stored + i``.
        kv_mask: bool ``[B, >= stored + n]``, False = never seen.
        bias: ``[B|1, Hq|1, n, >= stored + n]``, bool (False = not seen) or float (added).

    Returns:
        ``[B, n, Hq, Dv]`` contiguous, in the dtype of q.
    """
    size, heads, tokens, _ = q.shape
    out = torch.empty((size, tokens, heads, v_new.shape[3]), dtype=q.dtype, device=q.device)
    if kv_mask is not None:
        kv_mask = kv_mask.to(torch.bool)
        if bool(kv_mask.all()):
            kv_mask = None
    for sequence in range(size):
        mask = None if kv_mask is None else kv_mask[sequence]
        extra = None
        if bias is not None:
            extra = bias[sequence if bias.shape[0] > 1 else 0]
        row = batch.blocks[layer][sequence]
        if tokens == 1:
            _decode(batch, layer, sequence, row, q[sequence], scale, mask, extra, out[sequence])
        else:
            _extend(
                batch, layer, row, q[sequence], k_new[sequence], v_new[sequence], scale, causal,
                mask, extra, out[sequence],
            )  # fmt: skip
    return out


def _decode(
    batch: Batch,
    layer: int,
    sequence: int,
    row: list[Block],
    q: Tensor,
    scale: float,
    mask: Tensor | None,
    bias: Tensor | None,
    out: Tensor,
) -> None:
    geometry = batch.geometry(layer)
    kv_heads, pages, size = geometry.kv_heads, geometry.pages, geometry.block_size
    total = batch.lengths[layer] + 1
    count = geometry.blocks_for(total)
    group = q.shape[0] // kv_heads
    query = (
        q.view(kv_heads, group, -1).float()
        if q.is_contiguous()
        else (q.reshape(kv_heads, group, -1).float())
    )
    query = (query * scale).repeat_interleave(pages, 0)  # [Hkv * pages, G, Dk]
    scores = torch.empty((count, kv_heads * pages, group, PAGE_SIZE), dtype=torch.float32)
    direct = geometry.dtype == torch.float32
    for i in range(count):
        keys = row[i].k if direct else row[i].k.float()
        torch.bmm(query, keys.transpose(1, 2), out=scores[i])
    # [Hkv, G, blocks, pages, 32]: the keys of a head in order of position
    ordered = scores.view(count, kv_heads, pages, group, PAGE_SIZE).permute(1, 3, 0, 2, 4)
    flat = ordered.reshape(kv_heads, group, count * size)
    if bias is not None:
        flat = _biased(flat[..., :total], bias[:, 0, :total], kv_heads, group)
        flat = F.pad(flat, (0, count * size - total), value=float("-inf"))
    else:
        flat[..., total:] = float("-inf")
    if mask is not None:
        flat[..., :total].masked_fill_(~mask[:total], float("-inf"))
    top = flat.amax(-1, keepdim=True)
    top = torch.where(top == float("-inf"), 0.0, top)
    weights = torch.threshold_((flat - top).exp_(), UNDERFLOW, 0.0)
    norm = weights.sum(-1, keepdim=True)
    weights = weights / torch.where(norm == 0, 1.0, norm)
    _count_accesses(batch, layer, sequence, weights, count, size)
    parts = weights.view(kv_heads, group, count, pages, PAGE_SIZE).permute(2, 0, 3, 1, 4)
    parts = parts.reshape(count, kv_heads * pages, group, PAGE_SIZE)
    sums = torch.empty((count, kv_heads * pages, group, geometry.head_dim_v), dtype=torch.float32)
    tail = total - (count - 1) * size
    for i in range(count):
        values = row[i].v if direct else row[i].v.float()
        if i == count - 1 and tail < size:
            values = _without_tail(values, kv_heads, pages, tail)
        torch.bmm(parts[i], values, out=sums[i])
    result = sums.view(count, kv_heads, pages, group, -1).sum((0, 2))
    out.copy_(result.view(1, kv_heads * group, -1))


def _without_tail(values: Tensor, kv_heads: int, pages: int, tail: int) -> Tensor:
    """Values with the unused tokens zeroed: what lies there may be NaN, and 0 * NaN is NaN."""
    position = torch.arange(pages * PAGE_SIZE).view(1, pages, PAGE_SIZE, 1)
    view = values.unflatten(0, (kv_heads, pages))
    return torch.where(position < tail, view, 0.0).flatten(0, 1)


def _biased(scores: Tensor, bias: Tensor, kv_heads: int, group: int) -> Tensor:
    """Scores ``[Hkv, G, keys]`` with a bias ``[Hq|1, keys]`` added, or masked where it is bool."""
    bias = bias.expand(kv_heads * group, -1) if bias.shape[0] == 1 else bias
    bias = bias.reshape(kv_heads, group, -1)
    if bias.dtype == torch.bool:
        return scores.masked_fill(~bias, float("-inf"))
    return scores + bias.float()


def _count_accesses(
    batch: Batch, layer: int, sequence: int, weights: Tensor, count: int, size: int
) -> None:
    """Count an access of each block whose share of a head's softmax reaches 1 / blocks."""
    share = weights.view(weights.shape[0], weights.shape[1], count, size).sum(-1).mean(1)
    batch.heat[layer, sequence, :count] += (share * count >= 1.0).sum(0, dtype=torch.int32)


def _extend(
    batch: Batch,
    layer: int,
    row: list[Block],
    q: Tensor,
    k_new: Tensor,
    v_new: Tensor,
    scale: float,
    causal: bool,
    mask: Tensor | None,
    bias: Tensor | None,
    out: Tensor,
) -> None:
    geometry = batch.geometry(layer)
    past = batch.lengths[layer]
    tokens, kv_heads = q.shape[1], geometry.kv_heads
    if past == 0 and mask is None and bias is None and q.shape[2] == v_new.shape[2]:
        k_all, v_all = _repeat(k_new, q.shape[0]), _repeat(v_new, q.shape[0])
        dense = F.scaled_dot_product_attention(
            q[None], k_all[None], v_all[None], is_causal=causal, scale=scale
        )
        out.copy_(dense[0].transpose(0, 1))
        return
    size = geometry.block_size
    for begin in range(0, tokens, QUERY_TILE):
        end = min(begin + QUERY_TILE, tokens)
        tile = _Tile(q[:, begin:end], kv_heads, geometry.head_dim_v, scale)
        for i in range(geometry.blocks_for(past)):
            keys = row[i].k.unflatten(0, (kv_heads, -1)).flatten(1, 2)
            values = row[i].v.unflatten(0, (kv_heads, -1)).flatten(1, 2)
            first, last = i * size, min((i + 1) * size, past)
            tile.visit(
                keys[:, : last - first], values[:, : last - first],
                _visible(mask, bias, None, begin, end, first, last),
                _added(bias, begin, end, first, last),
            )  # fmt: skip
        for first in range(0, end if causal else tokens, size):
            last = min(first + size, tokens)
            limit = (past + begin, past + first) if causal else None
            tile.visit(
                k_new[:, first:last], v_new[:, first:last],
                _visible(mask, bias, limit, begin, end, past + first, past + last),
                _added(bias, begin, end, past + first, past + last),
            )  # fmt: skip
        out[begin:end].copy_(tile.result().transpose(0, 1))


def _repeat(x: Tensor, heads: int) -> Tensor:
    return x.repeat_interleave(heads // x.shape[0], 0)


def _visible(
    mask: Tensor | None,
    bias: Tensor | None,
    limit: tuple[int, int] | None,
    begin: int,
    end: int,
    first: int,
    last: int,
) -> Tensor | None:
    """Which keys first..last the queries begin..end see: bool ``[Hq|1, queries, keys]`` or None."""
    parts: list[Tensor] = []
    if mask is not None:
        parts.append(mask[first:last].view(1, 1, -1))
    if bias is not None and bias.dtype == torch.bool:
        parts.append(bias[:, begin:end, first:last])
    if limit is not None:
        rows = torch.arange(limit[0], limit[0] + end - begin).view(-1, 1)
        columns = torch.arange(limit[1], limit[1] + last - first).view(1, -1)
        parts.append((columns <= rows)[None])
    if not parts:
        return None
    result = parts[0]
    for part in parts[1:]:
        result = result & part
    return result


def _added(bias: Tensor | None, begin: int, end: int, first: int, last: int) -> Tensor | None:
    if bias is None or bias.dtype == torch.bool:
        return None
    return bias[:, begin:end, first:last].float()


class _Tile:
    """Online softmax of some queries over one tile of keys after another."""

    def __init__(self, q: Tensor, kv_heads: int, width: int, scale: float) -> None:
        self.heads, self.queries, _ = q.shape
        self.kv_heads = kv_heads
        self.q = (q.float() * scale).reshape(kv_heads, -1, q.shape[2])
        rows = self.q.shape[1]
        self.top = torch.full((kv_heads, rows, 1), float("-inf"))
        self.norm = torch.zeros((kv_heads, rows, 1))
        self.sum = torch.zeros((kv_heads, rows, width))

    def visit(self, k: Tensor, v: Tensor, visible: Tensor | None, added: Tensor | None) -> None:
        """Take keys ``[Hkv, t, Dk]`` and values ``[Hkv, t, Dv]`` in."""
        scores = torch.bmm(self.q, k.float().transpose(1, 2))
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
        return (self.sum / norm).view(self.heads, self.queries, -1)
