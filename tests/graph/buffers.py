# SPDX-License-Identifier: Apache-2.0
"""Small graphs with an attention over static buffers, and what is found in them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kvpass.graph.site import AttentionSite, FindResult
from tests.graph.recorder import find

B, H, KV, N, T, D = 2, 4, 2, 3, 9, 16
P = 2  # where new tokens are written
Write = Callable[[Tensor, Tensor, Any], object]
Read = Callable[[Tensor, Any], Tensor]


def only(found: FindResult) -> AttentionSite:
    assert [refusal.reason for refusal in found.refusals] == []
    assert len(found.sites) == 1
    return found.sites[0]


def refused(found: FindResult, words: str) -> None:
    assert found.sites == []
    assert len(found.refusals) == 1
    assert words in found.refusals[0].reason


def inputs(tokens: int = N, first: bool = False) -> list[Tensor]:
    """A query, new keys and values, and a buffer for each; ``first``: ``[B, tokens, H, D]``."""
    torch.manual_seed(0)
    new, buffers = torch.randn(2, B, KV, tokens, D), torch.randn(2, B, KV, T, D)
    if first:
        new, buffers = (x.transpose(2, 3).contiguous() for x in (new, buffers))
    return [torch.randn(B, H, tokens, D), *(x.clone() for x in (*new, *buffers))]


def wide(x: Tensor) -> Tensor:
    return x.repeat_interleave(H // x.shape[1], dim=1)


def causal(start: Any, tokens: int = N, keys: int = T) -> Tensor:
    return torch.arange(keys) <= (torch.arange(tokens) + start)[:, None]


def attention(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None = None) -> Tensor:
    return F.scaled_dot_product_attention(q, wide(keys), wide(values), attn_mask=mask)


def each(op: Callable[[Tensor, Tensor, Tensor], object]) -> Write:
    """A write at an index tensor."""
    return lambda buffer, new, start: op(buffer, new, torch.arange(N) + start)


def assign(*index: Any) -> Write:
    """A write to ``buffer[index]``, in which the token axis is "at" or "slice"."""

    def write(buffer: Tensor, new: Tensor, start: Any) -> None:
        at = slice(start, start + N) if "slice" in index else torch.arange(N) + start
        buffer[tuple(at if isinstance(item, str) else item for item in index)] = new

    return write


ALL = slice(None)
put = torch.ops.aten.index_put_
WRITES: dict[str, tuple[Write, bool]] = {
    "index_copy_": (each(lambda b, x, at: b.index_copy_(2, at, x)), False),
    "index_copy_ -2": (each(lambda b, x, at: b.index_copy_(-2, at, x)), False),
    "index_copy_ 1": (each(lambda b, x, at: b.index_copy_(1, at, x)), True),
    "index_copy_ -3": (each(lambda b, x, at: b.index_copy_(-3, at, x)), True),
    "tensor": (assign(ALL, ALL, "at"), False),
    "tensor, all dims": (assign(ALL, ALL, "at", ALL), False),
    "tensor, tokens first": (assign(ALL, "at"), True),
    "slice": (assign(ALL, ALL, "slice"), False),
    "slice, all dims": (assign(ALL, ALL, "slice", ALL), False),
    "slice, tokens first": (assign(ALL, "slice"), True),
    "aten.index_put_": (each(lambda b, x, at: put(b, [None, None, at], x)), False),
    "index_put_ overload": (each(lambda b, x, at: put.default(b, (None, None, at), x)), False),
    "aten.index_put_, tokens first": (each(lambda b, x, at: put(b, [None, at], x)), True),
}


def at(
    write: Write = WRITES["tensor"][0],
    read: Read = lambda buffer, _: buffer,
    first: bool = False,
    mask: Callable[[Any], Tensor | None] = causal,
    start: Any = P,
    write_v: Write | None = None,
    start_v: Callable[[Any], Any] = lambda start: start,
    dynamic: bool | None = None,
    data: list[Tensor] | None = None,
) -> FindResult:
    """Find in an attention that writes to two buffers and reads them.

    ``start`` is a number, or a tensor that the graph gets; ``start_v`` makes that of the values.
    """

    def step(
        q: Tensor, k: Tensor, v: Tensor, kb: Tensor, vb: Tensor, *given: Tensor
    ) -> tuple[Tensor, ...]:
        begin = given[0] if given else start
        write(kb, k, begin)
        (write_v or write)(vb, v, start_v(begin))
        keys, values = read(kb, begin), read(vb, start_v(begin))
        if first:
            keys, values = keys.transpose(1, 2), values.transpose(1, 2)
        return (attention(q, keys, values, mask(begin)),)

    extra = [start] if isinstance(start, Tensor) else []
    return find(step, *(data or inputs(first=first)), *extra, dynamic=dynamic)


def roll(
    shift: Any = -1, dims: Any = -2, last: Any = (ALL, ALL, [-1]), then: Any = None,
    mask: Tensor | None = None, tokens: int = 1,
) -> FindResult:  # fmt: skip
    def step(q: Tensor, k: Tensor, v: Tensor, kb: Tensor, vb: Tensor, *mask: Tensor) -> Tensor:
        for buffer, new in ((kb, k), (vb, v)):
            moved = buffer.roll(shift, dims=dims)
            at = tuple(torch.tensor(i) if isinstance(i, list) else i for i in last)
            moved[at] = new
            buffer.copy_(moved if then is None else then(moved))
        return attention(q, kb, vb, mask[0] if mask else None)

    return find(step, *inputs(tokens), *([] if mask is None else [mask]))


def tail(
    old: Callable[[Tensor], Tensor | None],
    kept: Callable[[Tensor], Tensor] = lambda full: full[:, :, -T:, :],
    window: int = T,
    tokens: int = N,
    dim: int = -2,
) -> FindResult:
    """``copy_`` of the last tokens of what the buffer has and of the new ones, or of these alone"""

    def step(q: Tensor, k: Tensor, v: Tensor, kb: Tensor, vb: Tensor) -> Tensor:
        full = []
        for buffer, new in ((kb, k), (vb, v)):
            past, new = old(buffer), new.neg()  # an input would be taken for a buffer
            full.append(new if past is None else torch.cat((past, new), dim=dim))
            buffer.copy_(kept(full[-1]))
        total = full[0].shape[2]
        rows, columns = torch.arange(tokens)[:, None] + total - tokens, torch.arange(total)
        mask = columns <= rows if not window else (columns <= rows) & (columns > rows - window)
        return attention(q, *full, mask)

    return find(step, *inputs(tokens))


def operand(make: Callable[[Tensor, Any], Tensor] = lambda given, start: given) -> FindResult:
    """An attention under a mask that the graph gets, over a buffer written at P."""

    def step(
        q: Tensor, k: Tensor, v: Tensor, kb: Tensor, vb: Tensor, given: Tensor, pos: Tensor
    ) -> tuple[Tensor, ...]:
        kb[:, :, pos], vb[:, :, pos] = k, v
        return (attention(q, kb, vb, make(given, pos)),)

    return find(step, *inputs(), torch.ones(T, T).tril().bool(), torch.arange(P, P + N))
