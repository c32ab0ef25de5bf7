# SPDX-License-Identifier: Apache-2.0
"""Masks: what is read as causal or padding is proven, everything else stays an exact operand.

A step has n = 3 new tokens over P = 5 cached ones; S = 8 keys.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import kvpass
from kvpass.graph.site import AttentionSite, FindResult
from tests.graph.recorder import Recorder, find

N, P, B = 3, 5, 2
S = N + P
MIN = torch.finfo(torch.float32).min
Q = torch.randn(B, 4, N, 16)
K, V = torch.randn(B, 4, N, 16), torch.randn(B, 4, N, 16)
PK, PV = torch.randn(B, 4, P, 16), torch.randn(B, 4, P, 16)
PAD = torch.ones(B, S, dtype=torch.bool)
MASK2 = torch.ones(N, S, dtype=torch.bool)
WEIGHT = torch.randn(64, 64)

Make = Callable[[Tensor, Tensor], Tensor]


def sdpa(make: Make, pad: Tensor = PAD) -> FindResult:
    """Find in SDPA with ``attn_mask=make(pad, q)`` over a functional cache."""

    def step(
        q: Tensor, k: Tensor, v: Tensor, pk: Tensor, pv: Tensor, pad: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        keys, values = torch.cat([pk, k], dim=2), torch.cat([pv, v], dim=2)
        mask = make(pad, q)
        return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask), keys, values

    return find(step, Q, K, V, PK, PV, pad)


def eager(apply: Callable[[Tensor, Tensor], Tensor], pad: Tensor = PAD) -> FindResult:
    """Find in the eager chain whose scores go through ``apply(scores, pad)``."""

    def step(
        q: Tensor, k: Tensor, v: Tensor, pk: Tensor, pv: Tensor, pad: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        keys, values = torch.cat([pk, k], dim=2), torch.cat([pv, v], dim=2)
        scores = apply(q @ keys.mT * 0.25, pad)
        return F.softmax(scores, dim=-1) @ values, keys, values

    return find(step, Q, K, V, PK, PV, pad)


def only(found: FindResult) -> AttentionSite:
    assert [refusal.reason for refusal in found.refusals] == []
    assert len(found.sites) == 1
    return found.sites[0]


def rows() -> Tensor:
    return torch.arange(N)[:, None] + P


def columns() -> Tensor:
    return torch.arange(S)[None, :]


def gather(pad: Tensor) -> Tensor:
    batch = torch.arange(B)[:, None, None, None]
    return pad[batch, torch.arange(S)[None, None, None, :]]


CAUSAL: dict[str, Make] = {
    "le": lambda pad, q: columns() <= rows(),
    "ge": lambda pad, q: rows() >= columns(),
    "lt": lambda pad, q: columns() < rows() + 1,
    "gt": lambda pad, q: rows() > columns() - 1,
    "not gt": lambda pad, q: ~(columns() > rows()),
    "logical_not": lambda pad, q: torch.logical_not(rows() < columns()),
    "range from past": lambda pad, q: columns() <= torch.arange(P, S)[:, None],
    "range to": lambda pad, q: columns() <= torch.arange(start=P, end=S)[:, None],
    "both shifted": lambda pad, q: columns() + 2 <= rows() + 2,
    "4-D": lambda pad, q: (columns() <= rows())[None, None].expand(B, 1, N, S),
    "unsqueezed": lambda pad, q: (columns() <= rows()).unsqueeze(0).unsqueeze(1),
    "view": lambda pad, q: (
        torch.arange(S).view(1, 1, 1, -1) <= torch.arange(N).view(1, 1, -1, 1) + P
    ),
    "identity": lambda pad, q: q.new_ones((), dtype=torch.bool) & (columns() <= rows()),
    "logical_and": lambda pad, q: torch.logical_and(columns() <= rows(), columns() <= rows()),
    "tril": lambda pad, q: torch.tril(torch.ones(N, S, dtype=torch.bool), diagonal=P),
    "tril of ones": lambda pad, q: torch.ones(N, S).tril(diagonal=P).bool(),
    "triu hidden": lambda pad, q: ~torch.triu(torch.ones(N, S, dtype=torch.bool), P + 1),
    "square": lambda pad, q: torch.tril(torch.ones(N, 9, dtype=torch.bool), P)[:, :S],
    "always true": lambda pad, q: (columns() <= rows()) & (columns() <= S - 1),
    "int32": lambda pad, q: torch.arange(S, dtype=torch.int32)[None] <= rows().to(torch.int32),
    "where": lambda pad, q: torch.where(columns() <= rows(), 0.0, MIN),
    "where hidden": lambda pad, q: torch.where(columns() > rows(), -math.inf, 0.0),
    "masked_fill": lambda pad, q: torch.zeros(N, S).masked_fill(columns() > rows(), MIN),
    "triu of -inf": lambda pad, q: torch.triu(torch.full((N, S), -math.inf), diagonal=P + 1),
}


@pytest.mark.parametrize("name", CAUSAL)
def test_causal_is_read(name: str) -> None:
    mask = only(sdpa(CAUSAL[name])).mask
    assert (mask.causal, mask.kv_mask, mask.operand) == (True, None, None)


@pytest.mark.parametrize("name", CAUSAL)
def test_every_causal_spelling_is_the_causal_mask(name: str) -> None:
    """The table above is right: in eager, each mask shows query i the keys up to P + i."""
    mask = CAUSAL[name](PAD, Q)
    seen = mask if mask.dtype == torch.bool else mask == 0
    expected = torch.tril(torch.ones(N, S, dtype=torch.bool), diagonal=P)
    assert torch.equal(seen.expand(B, 1, N, S), expected.expand(B, 1, N, S))


OPERAND: dict[str, Make] = {
    "late by one": lambda pad, q: columns() <= rows() - 1,
    "early by one": lambda pad, q: columns() < rows() + 2,
    "upper left": lambda pad, q: columns() <= torch.arange(N)[:, None],
    "tril off": lambda pad, q: torch.tril(torch.ones(N, S, dtype=torch.bool)),
    "keys shifted": lambda pad, q: columns() + 1 <= rows(),
    "window alone": lambda pad, q: columns() > rows() - 4,
    "window on the wrong side": lambda pad, q: (columns() <= rows()) & (columns() < rows() - 2),
    "window of no key": lambda pad, q: (columns() <= rows()) & (columns() > rows()),
    "window from the key": lambda pad, q: (columns() <= rows()) & (columns() > rows() // 2),
    "window by data": lambda pad, q: (columns() <= rows()) & (columns() > rows() - pad.sum()),
    "window or causal": lambda pad, q: (columns() <= rows()) | (columns() > rows() - 4),
    "window upper left": lambda pad, q: (
        (columns() <= rows()) & (columns() > torch.arange(N)[None, :, None] - 4)[0, :1]
    ),
    "window of an early mask": lambda pad, q: (columns() <= rows() - 1) & (columns() > rows() - 4),
    "chunks counted from elsewhere": lambda pad, q: (
        (columns() <= rows()) & ((columns() - 1) // 4 == (rows() - 1) // 4)
    ),
    "chunks shifted by a whole one": lambda pad, q: (
        (columns() <= rows()) & ((columns() + 4) // 4 == (rows() + 4) // 4)
    ),
    "chunks of keys and queries apart": lambda pad, q: (
        (columns() <= rows()) & (columns() // 4 == (rows() + 1) // 4)
    ),
    "chunks of two sizes": lambda pad, q: (columns() <= rows()) & (columns() // 4 == rows() // 8),
    "chunks within chunks": lambda pad, q: (
        (columns() <= rows()) & (columns() // 4 == rows() // 4) & (columns() // 8 == rows() // 8)
    ),
    "chunks alone": lambda pad, q: columns() // 4 == rows() // 4,
    "other chunks": lambda pad, q: (columns() <= rows()) & (columns() // 4 != rows() // 4),
    "chunks by data": lambda pad, q: (
        (columns() <= rows()) & ((columns() - pad.sum()) // 4 == (rows() - pad.sum()) // 4)
    ),
    "chunks by minus four": lambda pad, q: (
        (columns() <= rows()) & (columns() // -4 == rows() // -4)
    ),
    "chunks rounded to zero": lambda pad, q: (
        (columns() <= rows()) & (columns().div(4, rounding_mode="trunc") == rows() // 4)
    ),
    "true division": lambda pad, q: (columns() <= rows()) & (columns() / 4 == rows() / 4),
    "remainders": lambda pad, q: (columns() <= rows()) & (columns() % 4 == rows() % 4),
    "chunks and a window": lambda pad, q: (
        (columns() <= rows()) & (columns() // 4 == rows() // 4) & (columns() > rows() - 3)
    ),
    "chunks of queries of another count": lambda pad, q: (
        (columns() <= rows()) & (columns() // 4 == (torch.arange(1)[:, None] + P) // 4)
    ),
    "reversed": lambda pad, q: columns() >= rows(),
    "negated": lambda pad, q: ~(columns() <= rows()),
    "or": lambda pad, q: (columns() <= rows()) | (columns() == 0),
    "xor": lambda pad, q: (columns() <= rows()) ^ (columns() == 0),
    "stride": lambda pad, q: torch.arange(0, 2 * S, 2)[None] <= rows(),
    "one row": lambda pad, q: (columns() <= rows())[:1],
    "last row of fewer": lambda pad, q: (columns() <= torch.arange(1)[:, None] + P).expand(N, S),
    "cut of a broadcast row": lambda pad, q: (columns() <= torch.arange(1)[:, None] + P).expand(
        N + 2, S
    )[:N],
    "data": lambda pad, q: columns() <= rows() + pad.sum(),
    "opaque": lambda pad, q: pad[:, None, None, :] | (q[:, :1, :, :8] > 0),
    "padding twice": lambda pad, q: pad[:, None, None] & pad.roll(1)[:, None, None],
    "other axis": lambda pad, q: pad[None, :, None, :].expand(1, B, N, S)[:, :1],
    "float padding": lambda pad, q: torch.where(gather(pad) & (columns() <= rows()), 0.0, MIN),
    "float bias": lambda pad, q: q[:, :, :, :8],
    "weak mask": lambda pad, q: torch.where(columns() <= rows(), 0.0, -5.0),
    "1 - tril": lambda pad, q: (1.0 - torch.ones(N, S).tril(P)) * MIN,
}


@pytest.mark.parametrize("name", OPERAND)
def test_what_cannot_be_read_stays_an_operand(name: str) -> None:
    site = only(sdpa(OPERAND[name]))
    assert (site.mask.causal, site.mask.kv_mask) == (False, None)
    assert site.mask.operand is site.anchor.kwargs["attn_mask"]


def late() -> Tensor:
    return torch.zeros(B, dtype=torch.int64)[torch.arange(B)[:, None, None, None]]


CHUNKS: dict[str, tuple[Make, int]] = {
    "eq": (lambda pad, q: (columns() <= rows()) & (columns() // 4 == rows() // 4), 4),
    "turned": (lambda pad, q: (rows() // 3 == columns() // 3) & (columns() <= rows()), 3),
    "not ne": (lambda pad, q: (columns() <= rows()) & ~(columns() // 4 != rows() // 4), 4),
    "floor_divide": (
        lambda pad, q: (
            (columns() <= rows()) & (columns().floor_divide(4) == torch.floor_divide(rows(), 4))
        ),
        4,
    ),
    "of no padding": (
        lambda pad, q: (
            (columns() <= rows())[None, None]
            & ((columns()[None, None] - late()) // 4 == (rows()[None, None] - late()) // 4)
        ),
        4,
    ),
    "4-D": (
        lambda pad, q: ((columns() <= rows()) & (columns() // 4 == rows() // 4))[None, None].expand(
            B, 1, N, S
        ),
        4,
    ),
    "where": (
        lambda pad, q: torch.where(
            (columns() <= rows()) & (columns() // 4 == rows() // 4), 0.0, MIN
        ),
        4,
    ),
    "wider than all": (
        lambda pad, q: (columns() <= rows()) & (columns() // 99 == rows() // 99),
        99,
    ),
}


@pytest.mark.parametrize("name", CHUNKS)
def test_chunks_are_read(name: str) -> None:
    make, size = CHUNKS[name]
    mask = only(sdpa(make)).mask
    assert (mask.causal, mask.chunk, mask.window, mask.kv_mask, mask.terms) == (
        True, size, 0, None, (),
    )  # fmt: skip
    assert mask.kv_offset == 0 and f"chunks of {size}" in mask.describe()


@pytest.mark.parametrize("name", CHUNKS)
def test_every_spelling_of_chunks_is_right(name: str) -> None:
    make, size = CHUNKS[name]
    mask = make(PAD, Q)
    seen = mask if mask.dtype == torch.bool else mask == 0
    expected = torch.tensor(
        [[j <= i and j // size == i // size for j in range(S)] for i in range(P, S)]
    )
    assert torch.equal(seen.expand(B, 1, N, S), expected.expand(B, 1, N, S))


def test_chunks_in_one_mask_and_a_window_in_another_are_refused() -> None:
    def apply(scores: Tensor, pad: Tensor) -> Tensor:
        chunks = (columns() <= rows()) & (columns() // 4 == rows() // 4)
        window = (columns() <= rows()) & (columns() > rows() - 3)
        return scores.masked_fill(~chunks, -math.inf).masked_fill(~window, -math.inf)

    found = eager(apply)
    assert found.sites == [] and "chunks and a window" in found.refusals[0].reason


@pytest.mark.parametrize("shift", [0, 1])
def test_chunks_over_kept_tokens_say_where_they_begin(shift: int) -> None:
    """The position of the first key is an input: only the runtime can confirm it."""
    kept = 4

    def step(
        q: Tensor, k: Tensor, v: Tensor, pk: Tensor, pv: Tensor, before: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        begin = before.shape[0]
        keys, values = torch.cat([pk, k], dim=2), torch.cat([pv, v], dim=2)
        cols = torch.arange(kept + N)[None, :] + begin
        lines = torch.arange(N)[:, None] + (begin + kept + shift)
        mask = (cols <= lines) & (cols // 5 == lines // 5)
        out = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)
        return out, keys[:, :, -kept:], values[:, :, -kept:]

    recorder = Recorder()
    torch._dynamo.reset()
    compiled = torch.compile(step, backend=recorder, fullgraph=True)
    before = torch.zeros(11)
    torch._dynamo.mark_dynamic(before, 0)
    with torch.no_grad():
        compiled(Q, K, V, PK[:, :, :kept].clone(), PV[:, :, :kept].clone(), before)
    (found,) = recorder.found
    if shift:
        assert found.sites == [] and "mask shows all of them" in found.refusals[0].reason
        return
    mask = only(found).mask
    assert (mask.causal, mask.chunk) == (True, 5)
    assert isinstance(mask.kv_offset, torch.SymInt)


WINDOWS: dict[str, tuple[Make, int]] = {
    "gt": (lambda pad, q: (columns() <= rows()) & (columns() > rows() - 4), 4),
    "ge": (lambda pad, q: (columns() <= rows()) & (columns() >= rows() - 3), 4),
    "lt": (lambda pad, q: (rows() - 4 < columns()) & (rows() >= columns()), 4),
    "not le": (lambda pad, q: (columns() <= rows()) & ~(columns() <= rows() - 4), 4),
    "one key": (lambda pad, q: (columns() <= rows()) & (columns() >= rows()), 1),
    "keys shifted": (lambda pad, q: (columns() <= rows()) & (columns() + 4 > rows()), 4),
    "narrowest of two": (
        lambda pad, q: (columns() <= rows()) & (columns() > rows() - 6) & (columns() > rows() - 4),
        4,
    ),
    "triu of tril": (
        lambda pad, q: (
            torch.tril(torch.ones(N, S, dtype=torch.bool), P)
            & torch.triu(torch.ones(N, S, dtype=torch.bool), P - 3)
        ),
        4,
    ),
    "4-D": (lambda pad, q: ((columns() <= rows()) & (columns() > rows() - 4))[None, None], 4),
    "where": (
        lambda pad, q: torch.where((columns() <= rows()) & (columns() > rows() - 4), 0.0, MIN),
        4,
    ),
    "wider than all": (lambda pad, q: (columns() <= rows()) & (columns() > rows() - S), 0),
}


@pytest.mark.parametrize("name", WINDOWS)
def test_windows_are_read(name: str) -> None:
    make, width = WINDOWS[name]
    mask = only(sdpa(make)).mask
    assert (mask.causal, mask.window, mask.kv_mask, mask.terms) == (True, width, None, ())


@pytest.mark.parametrize("name", WINDOWS)
def test_every_window_spelling_is_the_window(name: str) -> None:
    """The table above is right: in eager, the query at p sees the keys p - window < j <= p."""
    make, width = WINDOWS[name]
    mask = make(PAD, Q)
    seen = mask if mask.dtype == torch.bool else mask == 0
    j, p = torch.arange(S)[None, :], torch.arange(P, S)[:, None]
    assert torch.equal(seen.reshape(N, S), (j <= p) & (j > p - (width or S)))


def test_window_and_padding_are_read() -> None:
    def make(pad: Tensor, q: Tensor) -> Tensor:
        return gather(pad) & (columns() <= rows()) & (columns() > rows() - 4)

    mask = only(sdpa(make)).mask
    assert (mask.causal, mask.window, mask.terms) == (True, 4, ()) and mask.kv_mask is not None


def _set_column(pad: Tensor, q: Tensor) -> Tensor:
    mask = torch.ones(N, S, dtype=torch.bool).tril(P)
    mask[:, 0] = False
    return mask


def _write_through_view(pad: Tensor, q: Tensor) -> Tensor:
    mask = columns() <= rows()
    mask[1:].logical_or_(mask[:1])
    return mask[None, None]


def _write_index(pad: Tensor, q: Tensor) -> Tensor:
    index = torch.arange(N)
    index.add_(1)
    return columns() <= index[:, None] + P


@pytest.mark.parametrize("make", [_set_column, _write_through_view, _write_index])
def test_a_mask_that_is_written_to_is_never_read(make: Make) -> None:
    """Its expression is causal, its content is not: an operand or a refusal, never "causal"."""
    found = sdpa(make)
    assert len(found.sites) + len(found.refusals) == 1
    for site in found.sites:
        assert not site.mask.causal and site.mask.operand is not None
    for refusal in found.refusals:
        assert "writes in place" in refusal.reason


PADDING: dict[str, Make] = {
    "gather": lambda pad, q: gather(pad).expand(B, 1, N, S),
    "indexed": lambda pad, q: pad[:, None, None, :],
    "unsqueezed": lambda pad, q: pad.unsqueeze(1).unsqueeze(2),
}


@pytest.mark.parametrize("name", PADDING)
@pytest.mark.parametrize("causal", [False, True])
def test_padding_is_read(name: str, causal: bool) -> None:
    def make(pad: Tensor, q: Tensor) -> Tensor:
        mask = PADDING[name](pad, q)
        return (columns() <= rows()) & mask if causal else mask

    mask = only(sdpa(make)).mask
    assert mask.causal is causal and mask.operand is None
    assert mask.kv_mask is not None and mask.kv_mask.op == "placeholder"


def test_padding_extended_by_pad_is_read() -> None:
    def make(pad: Tensor, q: Tensor) -> Tensor:
        return gather(F.pad(pad, (0, 4))) & (columns() <= rows())

    mask = only(sdpa(make)).mask
    assert mask.causal and mask.kv_mask is not None and "pad" in mask.kv_mask.name


def test_padding_converted_from_integers_is_read() -> None:
    mask = only(sdpa(lambda pad, q: gather(pad.to(torch.bool)), PAD.long())).mask
    assert mask.kv_mask is not None and mask.kv_mask.target == "to"


def test_a_mask_per_query_is_no_padding() -> None:
    """[N, S] has the rank of a padding mask but its rows are queries."""
    site = only(sdpa(lambda pad, q: pad, MASK2))
    assert site.mask.kv_mask is None and site.mask.operand is not None


@pytest.mark.parametrize("size", [1, 3])
def test_padding_of_another_batch_size_is_not_read(size: int) -> None:
    pad = torch.ones(size, S, dtype=torch.bool)
    make: Make = lambda pad, q: pad[:1, None, None, :]  # noqa: E731
    site = only(sdpa(make, pad))
    assert site.mask.kv_mask is None and site.mask.operand is not None


@pytest.mark.parametrize("axis", ["batch", "heads", "queries"])
def test_padding_rows_must_be_the_batch(axis: str) -> None:
    """Batch, heads and queries are all four here, so only the axis tells them apart."""

    def cached(x: Tensor, pk: Tensor, pv: Tensor, pad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        keys, values = torch.cat([pk, x], dim=2), torch.cat([pv, x], dim=2)
        views = {"batch": pad[:, None, None], "heads": pad[None, :, None], "queries": pad}
        out = F.scaled_dot_product_attention(x, keys, values, attn_mask=views[axis])
        return out, keys, values

    x, past = torch.randn(4, 4, 4, 16), torch.randn(4, 4, 4, 16)
    mask = only(find(cached, x, past, past.clone(), torch.ones(4, 8, dtype=torch.bool))).mask
    assert (mask.kv_mask is not None) is (axis == "batch")
    assert (mask.operand is None) is (axis == "batch")


def test_is_causal_over_a_cache_is_refused() -> None:
    """Aligned to the first key: eager gives row 0 only key 0, a cached step would show it six."""

    def step(
        q: Tensor, k: Tensor, v: Tensor, pk: Tensor, pv: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        keys, values = torch.cat([pk, k], dim=2), torch.cat([pv, v], dim=2)
        return F.scaled_dot_product_attention(q, keys, values, is_causal=True), keys, values

    found = find(step, Q, K, V, PK, PV)
    assert found.sites == [] and "aligned to the first key" in found.refusals[0].reason
    found = find(step, Q[:, :, :1], K[:, :, :1], V[:, :, :1], PK, PV)
    assert found.sites == [] and "aligned to the first key" in found.refusals[0].reason


@pytest.mark.parametrize("dynamic", [False, True])
def test_is_causal_on_the_first_prefill_is_causal(dynamic: bool) -> None:
    def step(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = heads(x)
        empty = torch.tensor([], dtype=k.dtype)
        keys, values = torch.cat([empty, k], dim=2), torch.cat([empty, v], dim=2)
        return F.scaled_dot_product_attention(q, keys, values, is_causal=True), keys, values

    site = only(find(step, hidden(N, dynamic)))
    assert site.mask.causal and site.source.past_k is None
    assert isinstance(site.query.meta["example_value"].shape[2], torch.SymInt) is dynamic


FILLED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": lambda s, pad: s + torch.where(columns() <= rows(), 0.0, MIN),
    "add left": lambda s, pad: torch.where(columns() <= rows(), 0.0, -math.inf) + s,
    "masked_fill": lambda s, pad: s.masked_fill(columns() > rows(), MIN),
    "masked_fill -inf": lambda s, pad: s.masked_fill(columns() > rows(), -math.inf),
    "torch.masked_fill": lambda s, pad: torch.masked_fill(s, ~(columns() <= rows()), -math.inf),
    "where": lambda s, pad: torch.where(columns() <= rows(), s, MIN),
    "where hidden": lambda s, pad: torch.where(columns() > rows(), -math.inf, s),
    "where tensor": lambda s, pad: torch.where(columns() <= rows(), s, torch.full((), MIN)),
    "tril == 0": lambda s, pad: s.masked_fill(torch.ones(N, S).tril(P) == 0, -math.inf),
}


@pytest.mark.parametrize("name", FILLED)
def test_causal_is_read_in_the_eager_chain(name: str) -> None:
    mask = only(eager(FILLED[name])).mask
    assert (mask.causal, mask.kv_mask, mask.operand) == (True, None, None)


def fields(site: AttentionSite) -> list[tuple[str, float, bool, float]]:
    """What the terms of a site do: kind, then value and hidden_when of a fill, or the factor."""
    return [
        (term.kind, term.value, term.hidden_when, 1.0)
        if term.kind == "fill"
        else (term.kind, 0.0, True, term.factor)
        for term in site.mask.terms
    ]


def test_bias_and_causal_fill_are_combined() -> None:
    def apply(scores: Tensor, pad: Tensor) -> Tensor:
        bias = torch.arange(S)[None, :] * pad[0, 0].float()
        return (scores + bias).masked_fill(columns() > rows(), -math.inf)

    site = only(eager(apply))
    assert site.mask.causal and site.mask.kv_mask is None
    assert fields(site) == [("add", 0.0, True, 1.0)]


SEEN: Callable[[Tensor], Tensor] = lambda pad: gather(pad) | (columns() == 0)  # noqa: E731
BIAS: Callable[[Tensor], Tensor] = lambda pad: (  # noqa: E731
    torch.arange(S)[None, :] * pad[0, 0].float()
)
FILL, FILL_MIN = ("fill", -math.inf, True, 1.0), ("fill", MIN, True, 1.0)
ADD = ("add", 0.0, True, 1.0)
Terms = list[tuple[str, float, bool, float]]
TERMS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], Terms]] = {
    "float padding": (lambda s, pad: s + torch.where(gather(pad), 0.0, MIN), [ADD]),
    "bool where": (
        lambda s, pad: torch.where(SEEN(pad), s, -math.inf),
        [("fill", -math.inf, False, 1.0)],
    ),
    "hidden where": (lambda s, pad: torch.where(SEEN(pad), -math.inf, s), [FILL]),
    "inverted": (lambda s, pad: s.masked_fill(~SEEN(pad), -math.inf), [FILL]),
    "keys marked hidden": (lambda s, pad: s.masked_fill(SEEN(pad), -math.inf), [FILL]),
    "causal negated": (lambda s, pad: s.masked_fill(columns() <= rows(), -math.inf), [FILL]),
    "padding filled with min": (lambda s, pad: s.masked_fill(~gather(pad), MIN), [FILL_MIN]),
    "min and padding": (
        lambda s, pad: (s + torch.where(columns() <= rows(), 0.0, MIN)).masked_fill(
            ~SEEN(pad), -math.inf
        ),
        [ADD, FILL],
    ),
    "bias, then fill": (lambda s, pad: (s + BIAS(pad)).masked_fill(~SEEN(pad), MIN),
                        [ADD, FILL_MIN]),
    "fill, then bias": (lambda s, pad: s.masked_fill(~SEEN(pad), MIN) + BIAS(pad),
                        [FILL_MIN, ADD]),
    "two biases": (lambda s, pad: s + BIAS(pad) + BIAS(pad).flip(-1), [ADD, ADD]),
    "bias before a scale": (lambda s, pad: (s + BIAS(pad)) * 0.5, [("add", 0.0, True, 0.5)]),
    "fill before a scale": (lambda s, pad: s.masked_fill(~SEEN(pad), -math.inf) * 0.5, [FILL]),
    "min before a larger scale": (lambda s, pad: s.masked_fill(~SEEN(pad), MIN) * 2, [FILL]),
    "in place": (lambda s, pad: s.masked_fill_(~SEEN(pad), MIN).add_(BIAS(pad)), [FILL_MIN, ADD]),
}  # fmt: skip


@pytest.mark.parametrize("name", TERMS)
def test_terms_keep_order_sign_and_factor(name: str) -> None:
    apply, expected = TERMS[name]
    site = only(eager(apply))
    assert (site.mask.causal, site.mask.window, site.mask.kv_mask) == (False, 0, None)
    assert fields(site) == expected
    for term in site.mask.terms:
        dtype = term.node.meta["example_value"].dtype
        assert dtype == (torch.bool if term.kind == "fill" else torch.float32)


def test_a_fill_by_the_raw_mask_is_not_its_complement() -> None:
    """With and without ``~`` the marks are other nodes, or hidden where they differ."""
    raw = only(eager(lambda s, pad: s.masked_fill(SEEN(pad), -math.inf))).mask.terms[0]
    inverted = only(eager(lambda s, pad: s.masked_fill(~SEEN(pad), -math.inf))).mask.terms[0]
    assert "or" in str(raw.node.target) and raw.hidden_when
    assert "invert" in str(inverted.node.target) and inverted.hidden_when


def test_causal_min_and_padding_stay_together() -> None:
    """finfo.min hides a key only next to a visible one, so neither of the two is read alone."""

    def apply(scores: Tensor, pad: Tensor) -> Tensor:
        return scores.masked_fill(columns() > rows(), MIN).masked_fill(~gather(pad), -math.inf)

    mask = only(eager(apply)).mask
    assert not mask.causal or mask.kv_mask is None
    assert any(term.value == MIN for term in mask.terms)


def test_padding_filled_with_minus_infinity_is_read() -> None:
    mask = only(eager(lambda s, pad: s.masked_fill(~gather(pad), -math.inf))).mask
    assert mask.kv_mask is not None and mask.operand is None and not mask.causal


REFUSED: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], str]] = {
    "weak fill": (lambda s, pad: s.masked_fill(columns() > rows(), -1e4), "use -inf"),
    "bool added": (lambda s, pad: s + (columns() <= rows()), "not a floating-point tensor"),
    "int added": (lambda s, pad: s + columns(), "not a floating-point tensor"),
    "weakened fill": (
        lambda s, pad: s.masked_fill(columns() > rows(), MIN) * 0.5,
        "hidden scores are set to",
    ),
    "two paddings": (
        lambda s, pad: s.masked_fill(~gather(pad), -math.inf).masked_fill(
            ~gather(pad.flip(0)), -math.inf
        ),
        "several padding masks",
    ),
    "scores added into a mask": (
        lambda s, pad: torch.where(gather(pad), 0.0, MIN).expand(B, 4, N, S).clone().add_(s),
        "writes in place to something else",
    ),
    "multiplied": (lambda s, pad: s * gather(pad), "is a tensor"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_inexact_masks_are_refused(name: str) -> None:
    apply, words = REFUSED[name]
    found = eager(apply)
    assert found.sites == [] and len(found.refusals) == 1
    assert words in found.refusals[0].reason


def hidden(tokens: int, dynamic: bool = False) -> Tensor:
    x = torch.randn(B, tokens, 64)
    if dynamic:
        torch._dynamo.mark_dynamic(x, 1)
    return x


def heads(x: Tensor) -> list[Tensor]:
    return [F.linear(x, WEIGHT).view(B, -1, 4, 16).transpose(1, 2) for _ in range(3)]


def decoder(late: int) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    """A decoder layer with its own mask, ``late`` positions too late."""

    def step(x: Tensor, pk: Tensor, pv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = heads(x)
        keys, values = torch.cat([pk, k], dim=2), torch.cat([pv, v], dim=2)
        past = pk.shape[2]
        q_idx = torch.arange(q.shape[2], device=q.device)
        kv_idx = torch.arange(past + q.shape[2], device=q.device)
        mask = (kv_idx[None, :] <= q_idx[:, None] + past - late)[None, None]
        return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask), keys, values

    return step


@pytest.mark.parametrize("late", [0, 1])
def test_own_decoder_with_a_growing_past(late: int) -> None:
    """Offsets are symbols once the length has changed; the mask is causal only if it is exact."""
    recorder = Recorder()
    compiled = torch.compile(decoder(late), backend=recorder, fullgraph=True)
    with torch.no_grad():
        pk, pv = PK, PV
        for tokens in (3, 3, 2, 4, 1):
            _, pk, pv = compiled(hidden(tokens), pk, pv)
    assert len(recorder.found) > 1 and not recorder.mutated
    assert any(isinstance(size, torch.SymInt) for size in _key_lengths(recorder))
    for found in recorder.found:
        mask = only(found).mask
        assert (mask.causal, mask.kv_mask) == (late == 0, None)
        assert (mask.operand is None) is (late == 0)


def test_new_tokens_of_unproven_equal_number_are_refused() -> None:
    def step(q: Tensor, k: Tensor, v: Tensor, pk: Tensor, pv: Tensor) -> tuple[Tensor, ...]:
        keys, values = torch.cat([pk, k], dim=2), torch.cat([pv, v], dim=2)
        return F.scaled_dot_product_attention(q, keys, values), keys, values

    inputs = [x.clone() for x in (Q, K, V)]
    for x in inputs:
        torch._dynamo.mark_dynamic(x, 2)
    found = find(step, *inputs, PK, PV)
    assert found.sites == [] and "differ in batch, heads or tokens" in found.refusals[0].reason


def _key_lengths(recorder: Recorder) -> list[object]:
    return [
        site.source.keys.meta["example_value"].shape[2]
        for found in recorder.found
        for site in found.sites
    ]


def _wraps(q: Tensor, keys: int) -> tuple[Tensor, Tensor]:
    past = keys - q.shape[2]
    return torch.arange(q.shape[2])[:, None] + past, torch.arange(keys)[None]


WRAPPING = {
    "int64 sum": lambda i, j: (j <= i) & (j + (2**63 - 1) > i),
    "int32 sum": lambda i, j: (j <= i) & (j.int() + (2**31 - 1) > i.int()),
    "int32 cast": lambda i, j: (j <= i) & ((j + 2**35).int() > i.int()),
    "a window of all": lambda i, j: (j <= i) & (j >= i - (2**63 - 1)),
    "a window of many": lambda i, j: (j <= i) & (j >= i - (2**31 - 1)),
}


@pytest.mark.parametrize("name", WRAPPING)
def test_numbers_that_wrap_are_not_computed_with(name: str) -> None:
    """As torch computes them, at every step of a cache."""

    def step(q: Tensor, k: Tensor, v: Tensor, pk: Tensor, pv: Tensor) -> tuple[Tensor, ...]:
        keys, values = torch.cat((pk, k), 2), torch.cat((pv, v), 2)
        mask = WRAPPING[name](*_wraps(q, keys.shape[2]))
        return F.scaled_dot_product_attention(q, keys, values, mask), keys, values

    torch._dynamo.reset()
    compiled = torch.compile(step, backend=kvpass.backend, options={"inner": "eager"})
    plain = kept = (torch.zeros(1, 2, 0, 16),) * 2
    with torch.no_grad():
        for n in (9, 3, 1, 1):
            x = torch.randn(1, 2, n, 16)
            expected, *plain = step(x, x * 2, x + 1, *plain)
            got, *kept = compiled(x, x * 2, x + 1, *kept)
            torch.testing.assert_close(got, expected)
