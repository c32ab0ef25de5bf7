# SPDX-License-Identifier: Apache-2.0
"""What the cached ops do on a GPU: which kernel runs, over which copies of the blocks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kvpass.runtime import directory
from kvpass.runtime.batch import Batch
from kvpass.runtime.capture import is_capturing
from kvpass.runtime.prompt import LongStep
from kvpass.runtime.staged import join
from kvpass.runtime.table import tables_for


def append(k: Tensor, v: Tensor, rows: Tensor, layer: int, block_size: int) -> None:
    """Write new keys and values to their blocks; in a long step to cold ones beside what follows.

    Args:
        k: ``[B, Hkv, n, Dk]``.
        v: ``[B, Hkv, n, Dv]``.
        rows: int32 ``[MAX_LAYERS, B]``.
        layer: of the batch.
        block_size: tokens of a block.
    """
    import triton_ops

    tables = tables_for(k.device)

    def run(programs: int) -> None:
        triton_ops.append(
            k, v, rows[layer], tables.base, tables.length, block_size, tables.tickets, programs
        )

    long = LongStep.of(directory.batch_at(rows), k.shape[2])
    if long is None:
        run(0)
    else:
        long.append(layer, (k, v), run)


def attend(
    q: Tensor,
    k_new: Tensor | None,
    v_new: Tensor | None,
    rows: Tensor,
    layer: int,
    causal: bool,
    new_tokens: int,
    options: dict[str, Any],
    staged: Tensor | None = None,
) -> Tensor:
    """Attention of n queries over the stored tokens and the new ones.

    Args:
        q: ``[B, Hq, n, Dk]``.
        k_new: ``[B, Hkv, m, Dk]`` or None.
        v_new: ``[B, Hkv, m, Dv]`` or None.
        rows: int32 ``[MAX_LAYERS, B]``.
        layer: of the batch.
        causal: query i sees positions up to ``stored + i``.
        new_tokens: m.
        options: of both kernels, by name.
        staged: buffer in which cold blocks of this layer were begun to be staged.

    Returns:
        ``[B, Hq, n, Dv]``.
    """
    import triton_ops

    tables = tables_for(q.device)
    batch = directory.batch_at(rows)
    words = join(staged, len(q))
    out: Any
    if q.shape[2] == 1:
        with joined(batch, before=True):  # one query may see many new keys, as of cross attention
            out = triton_ops.attend_decode(
                q,
                rows[layer],
                tables.base,
                tables.length,
                new_tokens=new_tokens,
                row_heat=tables.heat,
                max_blocks=tables.max_blocks,
                words=words,
                **options,
            )
        return out
    with joined(batch, before=k_new is None):
        return _attend_many(batch, q, k_new, v_new, rows, layer, causal, options)


@contextmanager
def joined(batch: Batch | None, *, before: bool) -> Iterator[None]:
    """Around what reads the keys and values that were appended last.

    Behind it their memory may be used again, by a compiled graph even without the allocator, so
    what reads them on another stream has to be done by then.

    Args:
        batch: whose step it is.
        before: what is inside reads them from their blocks.
    """
    if before and batch is not None and batch.long is not None:
        batch.long.join()
    yield
    if batch is not None and batch.long is not None:
        batch.long.join()


def _attend_many(
    batch: Batch | None,
    q: Tensor,
    k_new: Tensor | None,
    v_new: Tensor | None,
    rows: Tensor,
    layer: int,
    causal: bool,
    options: dict[str, Any],
) -> Tensor:
    """:func:`attend` of more than one query."""
    import triton_ops

    if batch is not None:
        batch.spans[layer] = options["window"], options["chunk"]
    if batch is not None and _is_first_chunk(batch, layer, q, k_new, causal, options):
        assert k_new is not None and v_new is not None
        with torch.autocast(q.device.type, enabled=False):  # it would cast to its own dtype
            return F.scaled_dot_product_attention(
                q, k_new, v_new, is_causal=True, scale=options["scale"],
                enable_gqa=q.shape[1] != k_new.shape[1],
            )  # fmt: skip
    tables = tables_for(q.device)
    place: tuple[Tensor, ...] = rows[layer], tables.base, tables.length
    long = LongStep.of(batch, q.shape[2])
    past = None if long is None else long.past(layer)
    if past is not None:
        place = past.rows, past.base, past.length
    out: Any = triton_ops.attend_extend(q, k_new, v_new, *place, causal=causal, **options)
    return out


def _is_first_chunk(
    batch: Batch,
    layer: int,
    q: Tensor,
    k_new: Tensor | None,
    causal: bool,
    options: dict[str, Any],
) -> bool:
    """Whether an attention is plain and causal over new tokens alone: FlashAttention is for that.

    A rule of shapes, dtypes and lengths, so the same wherever the blocks are.
    """
    span = options["window"] or options["chunk"]
    operands = options["kv_mask"], options["bias"], options["sinks"]
    return (
        causal
        and k_new is not None
        and not is_capturing(batch.device)  # replays come when something is stored
        and options["head_dim_v"] == q.shape[3]  # else grouped queries leave it no fast kernel
        and k_new.dtype == q.dtype
        and q.dtype in (torch.float16, torch.bfloat16)
        and batch.lengths[layer] == 0
        and all(operand is None for operand in operands)
        and not options["softcap"]
        and (not span or span >= q.shape[2])
    )
