# SPDX-License-Identifier: Apache-2.0
"""Plain PyTorch references of the kernels, and helpers that lay K and V out in blocks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from triton_ops._checks import PAGE_TOKENS, check_block_size

ALIGNMENT = 128


def attend_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float,
    causal: bool = False,
    q_offset: int = 0,
    kv_mask: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    softcap: float = 0.0,
    window: int = 0,
    chunk: int = 0,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax attention in float64.

    Args:
        q: `[B, Hq, n, Dk]`.
        k: `[B, Hkv, T, Dk]`, Hq a multiple of Hkv.
        v: `[B, Hkv, T, Dv]`.
        scale: factor of the scores.
        causal: query i sees keys up to `q_offset + i`.
        q_offset: position of the first query.
        kv_mask: bool or uint8 `[B, >= T]`, True = may be seen.
        bias: additive float or bool (True = visible), broadcasts to `[B, Hq, n, >= T]`.
        softcap: scores become `softcap * tanh(scores / softcap)` first (Gemma 2); 0 = none.
        window: query i sees keys after `q_offset + i - window` only (`sliding_window` of
            transformers); 0 = all. Needs `causal`.
        chunk: the query at position p sees keys j with `j // chunk == p // chunk` only
            (`attention_chunk_size` of transformers); 0 = all. Needs `causal`.
        sinks: `[Hq]`, a logit without a value in each head's softmax (gpt-oss).

    Returns:
        out float64 `[B, Hq, n, Dv]` and lse float64 `[B, Hq, n]` (natural log, with the sink); a
        query without a visible key gives 0 and the sink, or -inf without one.

    Raises:
        ValueError: a window or chunk without `causal`.
    """
    if chunk and not causal:
        raise ValueError(f"a chunk ({chunk}) needs causal=True")
    if window and not causal:
        raise ValueError(f"a window ({window}) needs causal=True")
    group = q.shape[1] // k.shape[1]
    kd = k.double().repeat_interleave(group, 1)
    vd = v.double().repeat_interleave(group, 1)
    n, total = q.shape[2], k.shape[2]
    scores = torch.matmul(q.double(), kd.transpose(2, 3)) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        cut = bias[..., :total]
        if cut.dtype == torch.bool:
            scores = scores.masked_fill(~cut, -math.inf)
        else:
            scores = scores + cut.double()
    if kv_mask is not None:
        scores = scores.masked_fill(~kv_mask[:, None, None, :total].bool(), -math.inf)
    if causal:
        query = torch.arange(n, device=q.device)[:, None] + q_offset
        key = torch.arange(total, device=q.device)
        scores = scores.masked_fill(key > query, -math.inf)
        if window:
            scores = scores.masked_fill(key <= query - window, -math.inf)
        if chunk:
            scores = scores.masked_fill(key // chunk != query // chunk, -math.inf)
    sink = scores.new_full((q.shape[1],), -math.inf) if sinks is None else sinks.double()
    scores = torch.cat([scores, sink[:, None, None].expand(*scores.shape[:3], 1)], -1)
    top = scores.amax(-1, keepdim=True)
    weights = torch.exp(scores - top.masked_fill(top == -math.inf, 0.0))
    total_weight = weights.sum(-1, keepdim=True)
    seen = total_weight > 0
    out = torch.matmul(weights[..., :total], vd) / total_weight.masked_fill(~seen, 1.0)
    lse = (top + torch.log(total_weight)).squeeze(-1)
    return out, lse


def latent_reference(
    q: torch.Tensor, c: torch.Tensor, r: torch.Tensor, **kwargs: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Absorbed attention over latents in float64: the keys are (c, r), the values are c.

    Args:
        q: `[B, Hq, n, L + R]`, the part for the latents first.
        c: `[B, 1, T, L]`, latents.
        r: `[B, 1, T, R]`, rotary keys.
        kwargs: as for `attend_reference`.

    Returns:
        out float64 `[B, Hq, n, L]` and lse float64 `[B, Hq, n]`, as `attend_reference`.
    """
    return attend_reference(q, torch.cat([c, r], -1), c, **kwargs)


def merge_reference(outs: torch.Tensor, lses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge partial attentions in float64: outs `[S, ..., D]`, lses `[S, ...]` (natural log)."""
    top = lses.double().amax(0)
    weights = torch.exp(lses.double() - top.masked_fill(top == -math.inf, 0.0))
    total = weights.sum(0)
    parts = torch.where((weights > 0)[..., None], outs.double() * weights[..., None], 0.0)
    out = parts.sum(0) / total.masked_fill(total == 0, 1.0)[..., None]
    return out, top + torch.log(total)


def heat_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    *,
    scale: float,
    block_size: int,
    softcap: float = 0.0,
    window: int = 0,
) -> torch.Tensor:
    """Share of the softmax of every block, mean over a KV head's query heads, in float64.

    Args:
        q: `[Hq, Dk]` of one sequence, at position T - 1.
        k: `[Hkv, T, Dk]`.
        scale: factor of the scores.
        block_size: tokens in a block.
        softcap: as in `attend_reference`.
        window: as in `attend_reference`.

    Returns:
        `[Hkv, blocks]`, 0 for blocks before the window; the kernel counts where it is at least
        1 / blocks that overlap the window.
    """
    heads, total, _ = k.shape
    group = q.shape[0] // heads
    scores = torch.einsum("hd,htd->ht", q.double(), k.double().repeat_interleave(group, 0)) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if window:
        scores[:, : max(total - window, 0)] = -math.inf
    weights = torch.softmax(scores, -1)
    blocks = -(-total // block_size)
    weights = torch.nn.functional.pad(weights, (0, blocks * block_size - total))
    shares = weights.view(q.shape[0], blocks, block_size).sum(-1)
    return shares.view(heads, group, blocks).mean(1)


def hot_blocks(shares: torch.Tensor, total: int, block_size: int, window: int = 0) -> torch.Tensor:
    """How `heat_reference` shares compare with the threshold, `[Hkv, blocks]`: hot from 1 on.

    Args:
        shares: `[Hkv, blocks]`.
        total: tokens of the sequence.
        block_size: tokens in a block.
        window: last tokens that are seen, 0 = all; blocks before them are 0.
    """
    first = max(total - window, 0) // block_size if window else 0
    hot = shares * (shares.shape[1] - first)
    hot[:, :first] = 0.0
    return hot


def block_elems(kv_heads: int, head_dim_k: int, head_dim_v: int, block_size: int) -> int:
    """Elements of one block: K and V of `block_size` tokens, all KV heads."""
    return kv_heads * block_size * (head_dim_k + head_dim_v)


def pack_blocks(
    k: torch.Tensor, v: torch.Tensor, block_size: int, fill: float = math.nan
) -> torch.Tensor:
    """Lay K `[Hkv, T, Dk]` and V `[Hkv, T, Dv]` of one sequence out as blocks.

    Returns:
        `[ceil(T / block_size), Hkv * block_size * (Dk + Dv)]` in the dtype of `k`, each block
        `[Hkv, pages, K page then V page]`; unused slots hold `fill`.
    """
    check_block_size(block_size)
    heads, total, dk = k.shape
    blocks = -(-total // block_size)
    pages = block_size // PAGE_TOKENS
    packed = []
    for part in (k, v):
        dim = part.shape[2]
        padded = part.new_full((heads, blocks * block_size, dim), fill)
        padded[:, :total] = part
        paged = padded.view(heads, blocks, pages, PAGE_TOKENS * dim)
        packed.append(paged.permute(1, 0, 2, 3))
    elems = block_elems(heads, dk, v.shape[2], block_size)
    return torch.cat(packed, -1).reshape(blocks, elems)


def gather_blocks(
    blocks: torch.Tensor,
    length: int,
    kv_heads: int,
    head_dim_k: int,
    head_dim_v: int,
    block_size: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The inverse of `pack_blocks`: K `[Hkv, length, Dk]` and V `[Hkv, length, Dv]`."""
    pages = block_size // PAGE_TOKENS
    paged = blocks.view(blocks.shape[0], kv_heads, pages, -1).permute(1, 0, 2, 3)
    k, v = paged.split([PAGE_TOKENS * head_dim_k, PAGE_TOKENS * head_dim_v], -1)
    k = k.reshape(kv_heads, -1, head_dim_k)[:, :length]
    return k, v.reshape(kv_heads, -1, head_dim_v)[:, :length]


def aligned_empty(
    elems: int, dtype: torch.dtype, device: torch.device | str = "cpu", pin: bool = False
) -> torch.Tensor:
    """An uninitialised vector whose address is a multiple of 128 bytes."""
    slack = ALIGNMENT // dtype.itemsize
    raw = torch.empty(elems + slack, dtype=dtype, device=device, pin_memory=pin)
    start = (-raw.data_ptr() % ALIGNMENT) // dtype.itemsize
    return raw[start : start + elems]


@dataclass
class Tables:
    """Tables of some rows, and what keeps the memory behind their addresses alive."""

    row_base: torch.Tensor
    row_len: torch.Tensor
    row_heat: torch.Tensor
    words: torch.Tensor
    heat: torch.Tensor
    keep: list[torch.Tensor] = field(default_factory=list)

    @property
    def max_blocks(self) -> int:
        """Block words of each row's table."""
        return self.words.shape[1]


def build_tables(
    rows: Sequence[Sequence[torch.Tensor]],
    lengths: Sequence[int],
    device: torch.device | str,
    spare_blocks: int = 0,
) -> Tables:
    """Tables that point row r at the block tensors `rows[r]`, wherever each of them lies.

    Args:
        rows: for each row its blocks, in order; every one contiguous and 128-byte aligned.
        lengths: tokens stored in each row.
        device: where the tables are.
        spare_blocks: words of 0 after the longest row's own.

    Raises:
        ValueError: a block that is not aligned.
    """
    width = max([len(blocks) for blocks in rows], default=0) + max(spare_blocks, 1)
    words = torch.zeros(len(rows), width, dtype=torch.int64)
    for r, blocks in enumerate(rows):
        for i, block in enumerate(blocks):
            if block.data_ptr() % ALIGNMENT:
                raise ValueError(f"block {i} of row {r} is at {block.data_ptr():#x}: align to 128")
            words[r, i] = block.data_ptr()
    words = words.to(device)
    heat = torch.zeros(len(rows), width, dtype=torch.int32, device=device)
    index = torch.arange(len(rows), dtype=torch.int64)
    return Tables(
        row_base=(words.data_ptr() + index * width * 8).to(device),
        row_len=torch.tensor(list(lengths), dtype=torch.int32, device=device),
        row_heat=(heat.data_ptr() + index * width * 4).to(device),
        words=words,
        heat=heat,
        keep=[block for blocks in rows for block in blocks],
    )


def place_rows(
    keys: Sequence[torch.Tensor],
    values: Sequence[torch.Tensor],
    block_size: int,
    device: torch.device | str,
    *,
    fill: float = math.nan,
    spare_blocks: int = 1,
    allocate: Callable[[int, torch.dtype, int], torch.Tensor] | None = None,
) -> Tables:
    """Put sequences into blocks of their own and build the tables of rows 0, 1, ...

    Args:
        keys: for each row K `[Hkv, T, Dk]`; T may differ from row to row and be 0.
        values: for each row V `[Hkv, T, Dv]`.
        block_size: tokens in a block.
        device: where the tables are, and the blocks unless `allocate` is given.
        fill: value of all unused slots.
        spare_blocks: blocks that every row has beyond its tokens, for appends.
        allocate: `(elements, dtype, running number) -> vector` that chooses where a block lies.
    """
    number = 0
    rows = []
    for k, v in zip(keys, values, strict=True):
        packed = pack_blocks(k, v, block_size, fill)
        size = block_elems(k.shape[0], k.shape[2], v.shape[2], block_size)
        blocks = []
        for i in range(packed.shape[0] + spare_blocks):
            if allocate is None:
                block = aligned_empty(size, k.dtype, device)
            else:
                block = allocate(size, k.dtype, number)
            number += 1
            if i < packed.shape[0]:
                block.copy_(packed[i])
            else:
                block.fill_(fill)
            blocks.append(block)
        rows.append(blocks)
    return build_tables(rows, [k.shape[1] for k in keys], device)


def row_blocks(tables: Tables, row: int) -> torch.Tensor:
    """The blocks of a row stacked, `[blocks, elements]`, on the CPU."""
    words = tables.words.cpu().tolist()
    by_address = {block.data_ptr(): block for block in tables.keep}
    return torch.stack([by_address[word].cpu() for word in words[row] if word])
