# SPDX-License-Identifier: Apache-2.0
"""Caches of keys and values ``[B, tokens, H, D]`` that are concatenated: found, or refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kvpass.graph.site import FindResult
from kvpass.runtime.handle import Content, KVHandle
from tests.graph.recorder import Recorder, find

B, H, KV, N, P, D = 2, 4, 2, 3, 5, 16
Q = torch.randn(B, N, H, D)
K, V = torch.randn(B, N, KV, D), torch.randn(B, N, KV, D)
PK, PV = torch.randn(B, P, KV, D), torch.randn(B, P, KV, D)


def visible(n: int, total: int) -> Tensor:
    return torch.arange(total)[None, :] <= torch.arange(total - n, total)[:, None]


def sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    k, v = (x.transpose(1, 2).repeat_interleave(H // KV, dim=1) for x in (k, v))
    return F.scaled_dot_product_attention(q.transpose(1, 2), k, v, attn_mask=mask)


def repeated_first(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    k, v = (
        x[:, :, :, None, :].expand(-1, -1, -1, H // KV, -1).reshape(B, -1, H, D) for x in (k, v)
    )
    q, k, v = (x.permute(0, 2, 1, 3) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def eager(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    q, k, v = (torch.swapaxes(x, 2, 1) for x in (q, k, v))
    k, v = (x.repeat_interleave(H // KV, dim=1) for x in (k, v))
    scores = q @ k.mT / math.sqrt(D)
    return scores.masked_fill(~mask, -math.inf).softmax(-1) @ v


def einsum(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    k, v = (x.repeat_interleave(H // KV, dim=2) for x in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(D)
    weights = scores.masked_fill(~mask, -math.inf).softmax(-1)
    return torch.einsum("bhqk,bkhd->bqhd", weights, v)


def mixed(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    k, v = (x.repeat_interleave(H // KV, dim=2) for x in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(D)
    return scores.masked_fill(~mask, -math.inf).softmax(-1) @ v.transpose(1, 2)


ATTENTIONS = [sdpa, repeated_first, eager, einsum, mixed]
Join = Callable[[Tensor, Tensor], Tensor]


def joined(past: Tensor, new: Tensor) -> Tensor:
    return torch.cat([past, new], dim=1)


def grown(
    attention: Callable[..., Tensor],
    join: Join = joined,
    join_v: Join | None = None,
    kept: Callable[[Tensor], Tensor] = lambda x: x,
    window: int = 0,
) -> FindResult:
    def step(q: Tensor, k: Tensor, v: Tensor, pk: Tensor, pv: Tensor) -> tuple[Tensor, ...]:
        keys, values = join(pk, k), (join_v or join)(pv, v)
        mask = visible(N, P + N)
        if window:
            rows = torch.arange(P, P + N)[:, None]
            mask = mask & (torch.arange(P + N)[None, :] > rows - window)
        return attention(q, keys, values, mask), kept(keys), kept(values)

    return find(step, Q, K, V, PK, PV)


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_found(attention: Callable[..., Tensor]) -> None:
    found = grown(attention)
    assert found.refusals == [] and len(found.sites) == 1
    site = found.sites[0]
    source = site.source
    assert (source.form, source.tokens_first, source.keep) == ("functional", True, 0)
    assert source.past_k is not None and "pk" in source.past_k.name
    assert source.past_v is not None and "pv" in source.past_v.name
    assert source.shapes == ((B, KV, P + N, D), (B, KV, P + N, D))
    assert site.mask.causal and site.mask.terms == ()
    assert site.query_first is (attention in (einsum, mixed))
    assert site.output_first is (attention is einsum)
    assert site.scale == pytest.approx(1 / math.sqrt(D))


@pytest.mark.parametrize(
    "kept",
    [lambda x: x[:, -4:], lambda x: x[:, -4:, :], lambda x: x[:, -4:, :, :]],
)
def test_the_last_tokens(kept: Callable[[Tensor], Tensor]) -> None:
    found = grown(sdpa, kept=kept, window=5)
    assert found.refusals == [] and len(found.sites) == 1
    assert (found.sites[0].mask.window, found.sites[0].source.keep) == (5, 4)


def refused(found: FindResult, words: str, form: str | None = None) -> None:
    assert found.sites == [] and len(found.refusals) == 1
    assert words in found.refusals[0].reason
    assert found.refusals[0].form == form


@pytest.mark.parametrize(
    "kept",
    [
        lambda x: x[:, :, -1:],
        lambda x: x[:, :4],
        lambda x: x[:, 4:],
        lambda x: x[-1:],
        lambda x: x[:, -4:, -1:],
        lambda x: x[:, -4::2],
    ],
)
def test_other_parts_are_refused(kept: Callable[[Tensor], Tensor]) -> None:
    refused(grown(sdpa, kept=kept, window=5), "a slice of the grown cache is returned")


def test_a_window_that_does_not_fit_is_refused() -> None:
    found = grown(sdpa, kept=lambda x: x[:, -4:], window=6)
    refused(found, "keeps 4 tokens, the mask shows 6")


def test_the_first_prompt() -> None:
    def step(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        empty = k.new_zeros((B, 0, KV, D))
        keys, values = joined(empty, k), joined(empty, v)
        return sdpa(q, keys, values, visible(N, N)), keys, values

    found = find(step, Q, K, V)
    assert found.refusals == []
    source = found.sites[0].source
    assert source.form == "functional" and source.past_k is None and source.tokens_first


def test_an_empty_tensor_of_other_tokens_is_no_past() -> None:
    def step(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        made = k.new_zeros((B, P, KV, D))
        keys, values = joined(made, k), joined(made, v)
        return sdpa(q, keys, values, visible(N, P + N)), keys, values

    refused(find(step, Q, K, V), "no KV cache", "none")


def test_heads_that_grow_are_no_tokens() -> None:
    """``cat`` along the axis of heads."""

    def step(q: Tensor, k: Tensor, v: Tensor, pk: Tensor, pv: Tensor) -> tuple[Tensor, ...]:
        keys, values = torch.cat([pk, k], dim=2), torch.cat([pv, v], dim=2)
        out = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, keys, values)))
        return out, keys, values

    assert find(step, Q, K, V, K.clone(), V.clone()).sites == []


def test_keys_and_values_in_different_orders_are_refused() -> None:
    def step(q: Tensor, k: Tensor, v: Tensor, pk: Tensor, pv: Tensor) -> tuple[Tensor, ...]:
        keys = joined(pk, k)
        values = torch.cat([pv.transpose(1, 2), v.transpose(1, 2)], dim=2)
        out = sdpa(q, keys, values.transpose(1, 2), visible(N, P + N))
        return out, keys, values

    assert find(step, Q, K, V, PK, PV).sites == []


@pytest.mark.parametrize(
    ("keys", "values"),
    [
        ("bkhd", "bhkd"),
        ("bhkd", "bkhd"),
    ],
)
def test_one_of_them_in_another_order_for_the_product(keys: str, values: str) -> None:
    """Equal numbers of heads and tokens: only the letters tell them apart."""
    total = P + N
    q = torch.randn(B, total, total, D)
    new, past = torch.randn(B, N, total, D), torch.randn(B, P, total, D)

    def step(q: Tensor, k: Tensor, v: Tensor, pk: Tensor, pv: Tensor) -> tuple[Tensor, ...]:
        k, v = joined(pk, k), joined(pv, v)
        scores = torch.einsum(f"bqhd,{keys}->bhqk", q, k).softmax(-1)
        return torch.einsum(f"bhqk,{values}->bqhd", scores, v), k, v

    assert find(step, q, new, new.clone(), past, past.clone()).sites == []


EINSUMS = [
    ("bqhd,bkhd->bqhk", "bqhk,bkhd->bqhd"),
    ("bqhd,bkhd->bhkq", "bhkq,bkhd->bqhd"),
    ("qbhd,bkhd->bhqk", "bhqk,bkhd->bqhd"),
    ("bqhd,bkhd->bhqk", "bhqk,bkhd->bqdh"),
    ("bqhd,bkhd->bhqk", "bhqk,bkhd->qbhd"),
    ("bqhd,bkdh->bhqk", "bhqk,bkhd->bqhd"),
]


@pytest.mark.parametrize("first_and_second", EINSUMS)
def test_other_letters_are_refused(first_and_second: tuple[str, str]) -> None:
    size = 16  # of every axis, so that any letters fit

    def step(q: Tensor, k: Tensor, v: Tensor, pk: Tensor, pv: Tensor) -> tuple[Tensor, ...]:
        k, v = joined(pk, k), joined(pv, v)
        weights = torch.einsum(first_and_second[0], q, k).softmax(-1)
        return torch.einsum(first_and_second[1], weights, v), k, v

    new = [torch.randn(size, size, size, size) for _ in range(3)]
    past = [torch.randn(size, 0, size, size) for _ in range(2)]
    assert find(step, *new, *past).sites == []


def test_a_tiered_cache_has_heads_first() -> None:
    """The same letters over ``update``'s ``[B, H, tokens, D]`` would swap heads and tokens."""

    def step(q: Tensor, k: Tensor, v: Tensor, handle: Tensor) -> tuple[Tensor, ...]:
        keys, values = torch.ops.kvpass.cache_update(k, v, handle, 0, 0, 32)
        scores = torch.einsum("bqhd,bkhd->bhqk", q, keys).softmax(-1)
        return (torch.einsum("bhqk,bkhd->bqhd", scores, values),)

    recorder = Recorder(run=False)
    square = torch.randn(B, 4, 4, D)
    with torch.no_grad():
        torch.compile(step, backend=recorder, fullgraph=True)(
            square, square.clone(), square.clone(), torch.zeros(1, dtype=torch.int64)
        )
    refused(recorder.found[0], "takes the tokens of a TieredCache for its heads")


def handle(values: bool) -> KVHandle:
    lease: Any = SimpleNamespace(batch=SimpleNamespace(device=torch.device("cpu")))
    content = Content(lease, 0, values, P, tokens_first=True)
    return KVHandle.of(content, (B, P, KV, D), torch.float32)


def test_cross_attention_reads_handles() -> None:
    def step(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        k, v = (x.transpose(1, 2).repeat_interleave(2, 1) for x in (k, v))
        return (F.scaled_dot_product_attention(q.transpose(1, 2), k, v),)

    recorder = Recorder(run=False)
    with torch.no_grad():
        torch.compile(step, backend=recorder, fullgraph=True)(Q, handle(False), handle(True))
    (found,) = recorder.found
    assert found.refusals == [] and len(found.sites) == 1
    source = found.sites[0].source
    assert source.form == "read" and source.tokens_first
    assert source.shapes[0] == (B, KV, P, D)
