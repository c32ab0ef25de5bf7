# SPDX-License-Identifier: Apache-2.0
"""The ops on a CPU: blocks are read where they lie, and never copied together.

The order of every sum depends on shapes only: each block is one batched product of the same shape
wherever it lies, so that placement never changes a bit. Softmax is the online softmax of Milakov
and Gimelshein (2018), merged over key tiles as in FlashAttention (Dao et al., 2022).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from kvpass.cpu_extend import extend
from kvpass.cpu_scores import UNDERFLOW, Scoring, sink_factor
from kvpass.runtime import readahead
from kvpass.runtime.batch import Batch, Block
from kvpass.runtime.geometry import PAGE_SIZE

HEAT_SLACK = 1.0 - 1e-5
"""A block whose share is 1 / blocks up to fp32 rounding counts, as in the GPU kernel."""


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
    if batch.device.type == "cuda":
        if batch.long is not None:
            batch.long.join()
        if any(block.hot is None for row in batch.blocks[layer] for block in row[:count]):
            # The host reads those, and streams that were told to wait do not hold it.
            torch.cuda.current_stream(batch.device).synchronize()

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
    k_new: Tensor | None,
    v_new: Tensor | None,
    scale: float,
    causal: bool,
    kv_mask: Tensor | None,
    bias: Tensor | None,
    softcap: float = 0.0,
    window: int = 0,
    sinks: Tensor | None = None,
    chunk: int = 0,
    tile: Sequence[int] | None = None,
) -> Tensor:
    """Attention of n queries over all stored tokens and the m new ones.

    Args:
        batch: B sequences; the new tokens are appended already, but not counted yet.
        layer: index of the layer.
        q: ``[B, Hq, n, Dk]``, any strides; Hq a multiple of the KV heads.
        k_new: ``[B, Hkv, m, Dk]``, the new keys; None: there are none, m = 0.
        v_new: ``[B, Hkv, m, Dv]``, the new values; None with ``k_new``.
        scale: factor of the scores.
        causal: query i sees positions up to ``stored + i``; needs m = n.
        kv_mask: bool ``[B, >= stored + m]``, False = never seen.
        bias: ``[B|1, Hq|1, n, >= stored + m]``, bool (False = not seen) or float (added).
        softcap: scores become ``softcap * tanh(scores / softcap)`` before bias and masks; 0 = none.
        chunk: query i sees positions of its own chunk only, those with the same
            ``position // chunk``; 0: all. Not with a window.
        window: query i sees the last ``window`` positions up to ``stored + i`` only, its own among
            them; 0 = all. Needs ``causal``. Blocks that no query sees are not read.
        sinks: ``[Hq]``, one more logit of each head's softmax, without a value.
        tile: queries and keys of a chunk that are scored at once; None: as :func:`extend` has it.

    Returns:
        ``[B, n, Hq, Dv]`` contiguous, in the dtype of q; 0 where a query sees no key.
    """
    size, heads, tokens, _ = q.shape
    new = 0 if k_new is None else k_new.shape[2]
    width = batch.geometry(layer).head_dim_v
    out = torch.empty((size, tokens, heads, width), dtype=q.dtype, device=q.device)
    if window >= batch.lengths[layer] + new:
        window = 0  # it covers everything
    if chunk >= batch.lengths[layer] + new:
        chunk = 0  # as does the first chunk
    sink_logits = None if sinks is None else sinks.float()
    scoring = Scoring(scale, causal, softcap, window, sink_logits, chunk)
    masks = masks_of(size, kv_mask, bias)
    if tokens == 1:
        readahead.ask_for_later_layer(batch, layer)
    for sequence, (mask, extra) in enumerate(masks):
        row = batch.blocks[layer][sequence]
        if tokens == 1:
            decode(batch, layer, sequence, row, new, q[sequence], scoring, mask, extra,
                    out[sequence])  # fmt: skip
        else:
            k = None if k_new is None else k_new[sequence]
            v = None if v_new is None else v_new[sequence]
            extend(batch, layer, row, q[sequence], k, v, scoring, mask, extra, out[sequence],
                   tile=tile)  # fmt: skip
    return out


def masks_of(
    size: int, kv_mask: Tensor | None, bias: Tensor | None
) -> list[tuple[Tensor | None, Tensor | None]]:
    """Padding mask and bias of each of ``size`` sequences; None for one that hides nothing."""
    if kv_mask is not None:
        kv_mask = kv_mask.to(torch.bool)
        if bool(kv_mask.all()):
            kv_mask = None
    return [
        (
            None if kv_mask is None else kv_mask[i],
            None if bias is None else bias[i if bias.shape[0] > 1 else 0],
        )
        for i in range(size)
    ]


def decode(
    batch: Batch,
    layer: int,
    sequence: int,
    row: list[Block],
    new: int,
    q: Tensor,
    scoring: Scoring,
    mask: Tensor | None,
    bias: Tensor | None,
    out: Tensor,
    latent: bool = False,
) -> None:
    """Attention of the last token of one sequence.

    Args:
        batch: as for :func:`attend`.
        layer: index of the layer.
        sequence: index of the sequence.
        row: its blocks.
        new: tokens that are appended but not counted yet.
        q: ``[Hq, 1, Dk]``; with ``latent`` ``[Hq, 1, Dk + Dv]``.
        scoring: from products to scores.
        mask: bool ``[>= stored + new]``, or None.
        bias: ``[Hq|1, 1, >= stored + new]``, or None.
        out: ``[1, Hq, Dv]``, written; with ``latent`` ``[1, Hq, Dk]``.
        latent: blocks hold latents and rotary keys: both are keys, the latents are the values.
    """
    geometry = batch.geometry(layer)
    kv_heads, pages, size = geometry.kv_heads, geometry.pages, geometry.block_size
    total = batch.lengths[layer] + new
    if total == 0:
        out.zero_()
        return
    begin = scoring.first_seen(total - 1)
    first = begin // size
    row = row[first : geometry.blocks_for(total)]
    count = len(row)
    ahead = readahead.row_schedule(batch, layer, sequence, first, first + count)
    batch.first_read[layer] = first
    # from here on, positions count from the first block that is read
    begin, end = begin - first * size, total - first * size
    group = q.shape[0] // kv_heads
    query = (
        q.view(kv_heads, group, -1).float()
        if q.is_contiguous()
        else (q.reshape(kv_heads, group, -1).float())
    )
    query = (query * scoring.factor).repeat_interleave(pages, 0)  # [Hkv * pages, G, Dk]
    query, turned = query[..., : geometry.head_dim_k], query[..., geometry.head_dim_k :]
    scores = torch.empty((count, kv_heads * pages, group, PAGE_SIZE), dtype=torch.float32)
    direct = geometry.dtype == torch.float32
    for i in range(count):
        if first + i in ahead:
            readahead.ask_for(row, [j - first for j in ahead[first + i]])
        keys = row[i].k if direct else row[i].k.float()
        torch.bmm(query, keys.transpose(1, 2), out=scores[i])
        if latent:
            rotary = row[i].v if direct else row[i].v.float()
            scores[i].baddbmm_(turned, rotary.transpose(1, 2))
    # [Hkv, G, blocks, pages, 32]: the keys of a head in order of position
    ordered = scores.view(count, kv_heads, pages, group, PAGE_SIZE).permute(1, 3, 0, 2, 4)
    flat = scoring.cap_(ordered.reshape(kv_heads, group, count * size))
    if bias is not None:
        flat = _biased(flat[..., :end], bias[:, 0, total - end : total], kv_heads, group)
        flat = F.pad(flat, (0, count * size - end), value=float("-inf"))
    else:
        flat[..., end:] = float("-inf")
    flat[..., :begin] = float("-inf")
    if mask is not None:
        flat[..., :end].masked_fill_(~mask[total - end : total], float("-inf"))
    top = flat.amax(-1, keepdim=True)
    top = torch.where(top == float("-inf"), 0.0, top)
    weights = torch.threshold_((flat - top).exp_(), UNDERFLOW, 0.0)
    norm = weights.sum(-1, keepdim=True)
    weights = weights / torch.where(norm == 0, 1.0, norm)
    _count_accesses(batch, layer, sequence, weights, first, count, size)
    parts = weights.view(kv_heads, group, count, pages, PAGE_SIZE).permute(2, 0, 3, 1, 4)
    parts = parts.reshape(count, kv_heads * pages, group, PAGE_SIZE)
    width = geometry.head_dim_k if latent else geometry.head_dim_v
    sums = torch.empty((count, kv_heads * pages, group, width), dtype=torch.float32)
    tail = end - (count - 1) * size
    for i in range(count):
        values = row[i].k if latent else row[i].v
        values = values if direct else values.float()
        if i == count - 1 and tail < size:
            values = _without_tail(values, kv_heads, pages, tail)
        torch.bmm(parts[i], values, out=sums[i])
    result = sums.view(count, kv_heads, pages, group, -1).sum((0, 2))
    if scoring.sinks is not None:
        result *= sink_factor(top, norm, scoring.sinks.view(kv_heads, group, 1))
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
    batch: Batch, layer: int, sequence: int, weights: Tensor, first: int, count: int, size: int
) -> None:
    """Count an access of each block whose share of a head's softmax reaches 1 / blocks.

    The blocks are those that the window overlaps; the share is of the keys' sum, without the sink.
    """
    share = weights.view(weights.shape[0], weights.shape[1], count, size).sum(-1).mean(1)
    hot = (share * count >= HEAT_SLACK).sum(0, dtype=torch.int32)
    batch.heat[layer, sequence, first : first + count] += hot
