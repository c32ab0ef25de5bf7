# SPDX-License-Identifier: Apache-2.0
"""Static buffers that are not understood: each is refused, with its reason."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kvpass.graph.site import FindResult
from kvpass.runtime.handle import Content, KVHandle
from tests.graph.buffers import (
    ALL,
    KV,
    B,
    D,
    N,
    P,
    Read,
    T,
    assign,
    at,
    attention,
    causal,
    each,
    inputs,
    only,
    operand,
    put,
    refused,
    roll,
    tail,
    wide,
)  # fmt: skip
from tests.graph.recorder import Recorder, find

Make = Callable[[], FindResult]
SLICE = assign(ALL, ALL, "slice")
UNKNOWN = "writes to the buffer l_kb_: not understood"


def stepped(buffer: Tensor, new: Tensor, start: int) -> None:
    buffer[:, :, 0 : 2 * N : 2] = new


def added(buffer: Tensor, new: Tensor, at: Tensor) -> object:
    return put(buffer, [None, None, at], new, True)


def accumulated(buffer: Tensor, new: Tensor, at: Tensor) -> object:
    return buffer.index_put_((torch.arange(B)[:, None, None], torch.arange(KV)[:, None], at), new,
                             accumulate=True)  # fmt: skip


def scattered(buffer: Tensor, new: Tensor, at: Tensor) -> object:
    return buffer.scatter_(2, at[None, None, :, None].expand(B, KV, N, D), new)


WRITES: dict[str, tuple[Make, str]] = {
    "index_add_": (lambda: at(each(lambda b, x, i: b.index_add_(2, i, x))), UNKNOWN),
    "scatter_": (lambda: at(each(scattered)), UNKNOWN),
    "aten.index_put_, accumulated": (lambda: at(each(added)), UNKNOWN),
    "index_put_, accumulated": (lambda: at(each(accumulated)), UNKNOWN),
    "added": (lambda: at(lambda b, x, s: b[:, :, s : s + N].add_(x)), "writes to a view"),
    "another axis": (
        lambda: at(lambda b, x, s: b.index_copy_(1, torch.arange(KV), x.new_ones(B, KV, T, D))),
        UNKNOWN,
    ),
    "one head": (lambda: at(lambda b, x, s: b[:, 0, s : s + N].copy_(x[:, 0])), "writes to a view"),
    "one head's index": (
        lambda: at(lambda b, x, s: b.__setitem__((ALL, 0, slice(s, s + N)), x[:, 0])), UNKNOWN,
    ),
    "some channels": (
        lambda: at(lambda b, x, s: b.__setitem__((ALL, ALL, slice(s, s + N), slice(0, D)), x)),
        UNKNOWN,
    ),
    "a view": (lambda: at(lambda b, x, s: b[:, :, s : s + N].copy_(x)), "writes to a view"),
    "a transposed view": (
        lambda: at(
            lambda b, x, s: b.transpose(1, 2).__setitem__((ALL, slice(s, s + N)), x.transpose(1, 2))
        ),
        "writes to a view of the buffer l_kb_",
    ),
    "twice": (lambda: at(lambda b, x, s: (SLICE(b, x, 0), SLICE(b, x, s))), "is written 2 times"),
    "filled first": (lambda: at(lambda b, x, s: (b.zero_(), SLICE(b, x, s))), "is written 2 times"),
    "changed behind": (lambda: at(lambda b, x, s: (SLICE(b, x, s), b.mul_(2.0))), "is written 2"),
    "copy_ of something else": (
        lambda: at(lambda b, x, s: b.copy_(torch.cat([x, x, x], 2))), "copies to the buffer l_kb_",
    ),
    "copy_ of one token": (lambda: at(lambda b, x, s: b.copy_(x[:, :, :1])), "copies to the"),
    "broadcast heads": (lambda: at(lambda b, x, s: SLICE(b, x[:, :1], s)), "do not fill the heads"),
    "broadcast sequences": (lambda: at(lambda b, x, s: SLICE(b, x[:1], s)), "do not fill the"),
    "broadcast channels": (lambda: at(lambda b, x, s: SLICE(b, x[..., :1], s)), "do not fill"),
    "narrowed": (lambda: at(lambda b, x, s: SLICE(b, x.half(), s)), "torch.float16"),
    "a number": (lambda: at(lambda b, x, s: b.__setitem__((ALL, ALL, slice(s, s + N)), 1.0)), ""),
    "step 2": (lambda: at(stepped), UNKNOWN),
    "strided positions": (
        lambda: at(lambda b, x, s: b.index_copy_(2, torch.arange(0, 2 * N, 2), x)), UNKNOWN,
    ),
    "reversed positions": (
        lambda: at(lambda b, x, s: b.index_copy_(2, torch.arange(N).flip(0) + s, x)), UNKNOWN,
    ),
    "scaled positions": (
        lambda: at(lambda b, x, s: b.index_copy_(2, torch.arange(N) * 2, x)), UNKNOWN,
    ),
    "negative start": (
        lambda: at(lambda b, x, s: b.__setitem__((ALL, ALL, slice(-N, None)), x)), UNKNOWN,
    ),
    "negative slice": (
        lambda: at(lambda b, x, s: b.__setitem__((ALL, ALL, slice(-N - 1, -1)), x)), UNKNOWN,
    ),
    "a float": (
        lambda: at(each(lambda b, x, i: b.index_copy_(2, i.long(), x)), start=torch.tensor(2.0)),
        UNKNOWN,
    ),
    "other positions of values": (
        lambda: at(SLICE, start_v=lambda s: s + 1), "written to different positions",
    ),
    "other numbers in a tensor": (
        lambda: at(
            each(lambda b, x, i: b.index_copy_(2, i, x)), start=torch.tensor(P),
            write_v=each(lambda b, x, i: b.index_copy_(2, i + 1, x)),
        ),
        "written to different positions",
    ),
    "values left alone": (lambda: at(SLICE, write_v=lambda b, x, s: None), ""),
    "values by roll": (
        lambda: at(SLICE, write_v=lambda b, x, s: b.copy_(b.roll(-1, dims=2))), "end",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRITES)
def test_other_writes(name: str) -> None:
    make, words = WRITES[name]
    refused(make(), words)


def part(*index: Any) -> Read:
    return lambda buffer, start: buffer[index]


def nothing(start: Any) -> None:
    return None


PART, NOT_LAST = "reads a part of the buffer", "up to the last one that was written"
READS: dict[str, tuple[Make, str]] = {
    "fewer": (lambda: at(SLICE, part(ALL, ALL, slice(P + N - 1)), mask=nothing), NOT_LAST),
    "more": (lambda: at(SLICE, part(ALL, ALL, slice(P + N + 1)), mask=nothing), NOT_LAST),
    "negative stop": (lambda: at(SLICE, part(ALL, ALL, slice(-4)), mask=nothing), NOT_LAST),
    "the new ones": (lambda: at(SLICE, part(ALL, ALL, slice(P, P + N)), mask=nothing), PART),
    "every second": (lambda: at(SLICE, part(ALL, ALL, slice(None, None, 2)), mask=nothing), PART),
    "the last": (lambda: at(SLICE, part(ALL, ALL, slice(-N, None)), mask=nothing), PART),
    "other heads": (
        lambda: at(SLICE, part(ALL, slice(0, 1), slice(P + N)), mask=nothing), PART,
    ),
    "some channels": (
        lambda: at(SLICE, part(ALL, ALL, slice(P + N), slice(0, 16)), mask=nothing), PART,
    ),
    "an index": (lambda: at(SLICE, lambda b, s: b[:, :, torch.arange(P + N)], mask=nothing), ""),
    "reversed": (lambda: at(SLICE, lambda b, s: b.flip(2)), "static buffer written by setitem"),
    "doubled": (lambda: at(SLICE, lambda b, s: torch.cat([b, b], 2), mask=nothing), ""),
    "narrowed": (lambda: at(SLICE, lambda b, s: b.half().float()), ""),
    "no mask": (lambda: at(SLICE, mask=nothing), "the mask is not causal"),
    "all seen": (lambda: at(SLICE, mask=lambda s: torch.ones(N, T).bool()), "is not causal"),
    "late": (lambda: at(SLICE, mask=lambda s: causal(s + 1)), "written at 2, the mask takes them"),
    "early": (lambda: at(SLICE, mask=lambda s: causal(s - 1)), "written at 2, the mask takes them"),
    "from the first": (lambda: at(SLICE, mask=lambda s: causal(0)), "written at 2, the mask"),
}  # fmt: skip


@pytest.mark.parametrize("name", READS)
def test_other_reads_and_masks(name: str) -> None:
    make, words = READS[name]
    refused(make(), words)


def test_read_before_it_is_written() -> None:
    def step(q: Tensor, k: Tensor, v: Tensor, kb: Tensor, vb: Tensor) -> Tensor:
        keys, values = wide(kb), wide(vb)
        SLICE(kb, k, P), SLICE(vb, v, P)
        return F.scaled_dot_product_attention(q, keys, values, attn_mask=causal(P))

    refused(find(step, *inputs()), "is read before it is written")


@pytest.mark.parametrize("repeated", [True, False])
def test_keys_written_behind_their_product(repeated: bool) -> None:
    """With as many heads of keys as of queries, nothing lies between the buffer and the product."""

    def step(q: Tensor, k: Tensor, v: Tensor, kb: Tensor, vb: Tensor) -> Tensor:
        scores = q @ (wide(kb) if repeated else kb).transpose(2, 3)
        SLICE(kb, k, P), SLICE(vb, v, P)
        weights = F.softmax(scores.masked_fill(~causal(P), -math.inf), -1)
        return weights @ (wide(vb) if repeated else vb)

    q, *rest = inputs()
    refused(find(step, q if repeated else q[:, :KV], *rest), "read before")


def test_values_written_behind_their_product() -> None:
    def step(q: Tensor, k: Tensor, v: Tensor, kb: Tensor, vb: Tensor) -> Tensor:
        SLICE(kb, k, P)
        out = attention(q, kb, vb, causal(P))
        SLICE(vb, v, P)
        return out

    refused(find(step, *inputs()), "the buffer l_vb_ is read before it is written")


@pytest.mark.parametrize("which", ["k", "q"])
def test_new_tokens_changed_before_the_attention(which: str) -> None:
    def step(q: Tensor, k: Tensor, v: Tensor, kb: Tensor, vb: Tensor) -> Tensor:
        SLICE(kb, k, P), SLICE(vb, v, P)
        scores = q @ wide(kb).transpose(2, 3)
        (k if which == "k" else q).mul_(2.0)
        return F.softmax(scores.masked_fill(~causal(P), -math.inf), -1) @ wide(vb)

    refused(find(step, *inputs()), "writes in place to an input of the attention")


def test_positions_in_a_tensor_that_has_been_written() -> None:
    def step(
        q: Tensor, k: Tensor, v: Tensor, kb: Tensor, vb: Tensor, length: Tensor
    ) -> tuple[Tensor, ...]:
        if early:
            positions = torch.arange(N) + length
            length.add_(N)
        else:
            length.add_(N)
            positions = torch.arange(N) + length - N
        for buffer, new in ((kb, k), (vb, v)):
            buffer.index_copy_(2, positions, new)
        return (attention(q, kb, vb, torch.arange(T) <= positions[:, None]),)

    early = True
    assert only(find(step, *inputs(), torch.tensor(P))).source.write == "at"
    early = False
    refused(find(step, *inputs(), torch.tensor(P)), UNKNOWN)


def test_one_buffer_for_keys_and_values() -> None:
    def step(q: Tensor, k: Tensor, v: Tensor, kb: Tensor, vb: Tensor) -> Tensor:
        SLICE(kb, k, P)
        return attention(q, kb, kb, causal(P))

    refused(find(step, *inputs()), "keys and values share one buffer")


def test_buffers_that_share_memory() -> None:
    q, k, v, *_ = inputs()
    refused(at(SLICE, data=[q, k, v, *torch.zeros(2, B, KV, T, D).unbind()]), "is written 2 times")


def test_buffers_of_different_capacity() -> None:
    """Only where both are read up to the last token can the products have as many of each."""
    *data, vb = inputs()
    longer = torch.cat([vb, vb], 2)
    read: Read = lambda b, s: b[:, :, : s + N]  # noqa: E731
    refused(at(SLICE, read, mask=nothing, data=[*data, longer]), "differ in their number of tokens")


def test_only_one_buffer_is_made_in_the_graph() -> None:
    def step(q: Tensor, k: Tensor, v: Tensor, kb: Tensor) -> tuple[Tensor, ...]:
        vb = torch.zeros(B, KV, T, D)
        SLICE(kb, k, 0), SLICE(vb, v, 0)
        return attention(q, kb, vb, causal(0)), vb

    refused(find(step, *inputs()[:4]), "only one of the buffers")


MOVED = "does not move the buffer l_kb_ by one token"
ROLLS: dict[str, tuple[Make, str]] = {
    "by two": (lambda: roll(shift=-2), MOVED),
    "to the right": (lambda: roll(shift=1), MOVED),
    "heads": (lambda: roll(dims=1), MOVED),
    "channels": (lambda: roll(dims=-1), MOVED),
    "two axes": (lambda: roll(shift=(-1, -1), dims=(1, 2)), MOVED),
    "new token in front": (lambda: roll(last=(ALL, ALL, [0])), "does not get one new token at"),
    "one before the last": (lambda: roll(last=(ALL, ALL, slice(-2, -1))), "does not get one new"),
    "some heads": (lambda: roll(last=(ALL, slice(0, 2), [-1])), "does not get one new token"),
    "changed": (lambda: roll(then=lambda moved: moved * 2.0), "copies to the buffer"),
    "two tokens": (lambda: roll(last=(ALL, ALL, [-2, -1]), tokens=2), "does not get one new token"),
    "shifted mask": (lambda: roll(mask=torch.zeros(1, 1, 1, 1)), "does not say of each token"),
}


@pytest.mark.parametrize("name", ROLLS)
def test_other_rolls(name: str) -> None:
    make, words = ROLLS[name]
    refused(make(), words)


FITS = "does not take the tokens that fit in l_kb_"
TAILS: dict[str, tuple[Make, str]] = {
    "shorter than the buffer": (lambda: tail(lambda b: None, tokens=1, window=0), "may be shorter"),
    "first tokens": (lambda: tail(lambda b: b[:, :, 1:], lambda x: x[:, :, :T]), FITS),
    "not the last": (lambda: tail(lambda b: b[:, :, 1:], lambda x: x[:, :, -T - 1 : -1]), FITS),
    "from the third": (lambda: tail(lambda b: b[:, :, 2:]), "in a way that is not understood"),
    "all but the last": (lambda: tail(lambda b: b[:, :, 1:-1]), "in a way that is not"),
    "every second": (lambda: tail(lambda b: b[:, :, ::2], tokens=T), "in a way that is not"),
    "the whole buffer": (lambda: tail(lambda b: b), "but not by this attention"),
    "a changed buffer": (lambda: tail(lambda b: b[:, :, 1:].neg()), "but not by this attention"),
    "window too wide": (lambda: tail(lambda b: b[:, :, 1:], window=T + 1), "the mask shows 10"),
    "no window": (lambda: tail(lambda b: b[:, :, 1:], window=0), "the mask shows all of them"),
}


@pytest.mark.parametrize("name", TAILS)
def test_other_tails(name: str) -> None:
    make, words = TAILS[name]
    refused(make(), words)


def effects(table: Tensor, pos: Tensor) -> Tensor:
    return table[None, None, pos] & (torch.rand(N, T) < 2)


def large(table: Tensor, pos: Tensor) -> Tensor:
    for _ in range(70):
        table = ~table
    return table[None, None, pos]


PROBES: dict[str, tuple[Callable[[Tensor, Any], Tensor], str]] = {
    "random": (effects, "from which the mask is made, has effects"),
    "large": (large, "takes many operations to make"),
    "one column": (lambda table, pos: table[None, None, pos, :1], "does not say of each token"),
    "written": (
        lambda table, pos: table.logical_and_(table.clone())[None, None, pos], "is written",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PROBES)
def test_masks_that_cannot_be_probed(name: str) -> None:
    make, words = PROBES[name]
    refused(operand(make), words)


def handle(values: bool) -> KVHandle:
    """An input as a graph gets it: a static buffer without memory of its own."""
    return KVHandle.of_buffer(
        Content(None, 0, values, 0, capacity=T), (B, KV, T, D), torch.float32, torch.device("cpu")
    )


def read_of_handles(extra: Callable[[Tensor], Tensor | None], late: bool = False) -> FindResult:
    def step(q: Tensor, k: Tensor, v: Tensor, kb: Tensor, vb: Tensor) -> tuple[Any, ...]:
        early = None if late else extra(kb)
        SLICE(kb, k, P), SLICE(vb, v, P)
        return attention(q, kb, vb, causal(P)), early, extra(kb) if late else None

    recorder = Recorder(run=False)
    with torch.no_grad():
        compiled = torch.compile(step, backend=recorder, fullgraph=True)
        compiled(*inputs()[:3], handle(False), handle(True))
    assert len(recorder.found) == 1 and not recorder.mutated
    return recorder.found[0]


def test_handles_of_buffers() -> None:
    source = only(read_of_handles(lambda b: None)).source
    assert (source.form, source.write, source.stored_k) == ("static", "at", None)
    assert only(read_of_handles(lambda b: torch.zeros(b.shape[2]))).source.write == "at"


@pytest.mark.parametrize("late", [False, True])
def test_a_handle_that_something_else_reads(late: bool) -> None:
    refused(read_of_handles(lambda b: b.mean(), late), "the cache l_kb_ is also used by mean")


def test_memory_that_something_else_reads() -> None:
    """Dense buffers are still written, so that they may be read elsewhere."""

    def step(q: Tensor, k: Tensor, v: Tensor, kb: Tensor, vb: Tensor) -> tuple[Tensor, ...]:
        before = kb.mean()
        SLICE(kb, k, P), SLICE(vb, v, P)
        return attention(q, kb, vb, causal(P)), before, vb.mean()

    assert only(find(step, *inputs())).source.write == "at"


@pytest.mark.parametrize("values", [False, True])
def test_a_made_buffer_that_something_else_reads(values: bool) -> None:
    def step(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        kb, vb = torch.zeros(B, KV, T, D), torch.zeros(B, KV, T, D)
        SLICE(kb, k, 0), SLICE(vb, v, 0)
        return attention(q, kb, vb, causal(0)), kb, vb, (vb if values else kb).mean()

    refused(find(step, *inputs()[:3]), "is also used by mean")
