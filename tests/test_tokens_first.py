# SPDX-License-Identifier: Apache-2.0
"""Concatenated caches ``[B, tokens, H, D]``: outputs, handles and what is done with them."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import kvpass
from kvpass import backends
from kvpass.graph.report import GraphReport, observed
from kvpass.runtime import handle
from kvpass.runtime.handle import KVHandle
from tests.models import OPTIONS

HEADS, KV, WIDTH = 4, 2, 16
Past = list[tuple[Tensor, Tensor]]


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    backends._warned.clear()
    handle._warned = False
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "aten.* reads a KV cache")
        yield
    torch._dynamo.reset()


def sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    k, v = (x.transpose(1, 2).repeat_interleave(HEADS // KV, dim=1) for x in (k, v))
    out = F.scaled_dot_product_attention(q.transpose(1, 2), k, v, attn_mask=mask)
    return out.transpose(1, 2)


def eager(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    k, v = (x.transpose(1, 2).repeat_interleave(HEADS // KV, dim=1) for x in (k, v))
    scores = q.transpose(1, 2) @ k.transpose(2, 3) / math.sqrt(WIDTH)
    out = scores.masked_fill(~mask, -math.inf).softmax(-1) @ v
    return out.permute(0, 2, 1, 3)


def einsum(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    k, v = (x.repeat_interleave(HEADS // KV, dim=2) for x in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(WIDTH)
    weights = scores.masked_fill(~mask, -math.inf).softmax(-1)
    return torch.einsum("bhqk,bkhd->bqhd", weights, v)


ATTENTIONS = [sdpa, eager, einsum]


class Decoder(torch.nn.Module):
    """Two layers; the first call may get no past, and then joins an empty one or none."""

    def __init__(
        self, attention: Callable[..., Tensor] = sdpa, window: int = 0, empty: bool = True
    ) -> None:
        super().__init__()
        self.attention, self.window, self.empty = attention, window, empty
        columns = (HEADS + 2 * KV) * WIDTH
        self.inner = torch.nn.ModuleList(torch.nn.Linear(32, columns) for _ in range(2))
        self.outer = torch.nn.ModuleList(torch.nn.Linear(HEADS * WIDTH, 32) for _ in range(2))

    def forward(self, x: Tensor, past: Past | None = None) -> tuple[Tensor, Past]:
        presents: Past = []
        n = x.shape[1]
        for i, (inner, outer) in enumerate(zip(self.inner, self.outer, strict=True)):
            heads = inner(x).unflatten(-1, (-1, WIDTH))
            q, k, v = heads.split((HEADS, KV, KV), dim=2)
            if past is not None:
                k, v = torch.cat([past[i][0], k], dim=1), torch.cat([past[i][1], v], dim=1)
            elif self.empty:
                none = k.new_zeros((k.shape[0], 0, KV, WIDTH))
                k, v = torch.cat([none, k], dim=1), torch.cat([none, v], dim=1)
            total = k.shape[1]
            rows = torch.arange(total - n, total, device=x.device)[:, None]
            columns = torch.arange(total, device=x.device)[None, :]
            mask = columns <= rows
            if self.window:
                mask = mask & (columns > rows - self.window)
                presents.append((k[:, 1 - self.window :], v[:, 1 - self.window :]))
            else:
                presents.append((k, v))
            x = x + outer(self.attention(q, k, v, mask).reshape(x.shape[0], n, -1))
        return x, presents


def model(*args: Any, **options: Any) -> tuple[Decoder, Any]:
    torch.manual_seed(0)
    made = Decoder(*args, **options).eval()
    settings = {"inner": "eager"} | OPTIONS
    return made, torch.compile(made, backend=kvpass.backend, options=settings)


def same_steps(
    plain: Decoder, compiled: Any, steps: tuple[int, ...], size: int = 2
) -> tuple[Past, Past, list[GraphReport]]:
    generator = torch.Generator().manual_seed(sum(steps))
    reports: list[GraphReport] = []
    expected: Past | None = None
    held: Past | None = None
    with torch.no_grad(), observed(reports.append):
        for n in steps:
            x = torch.randn(size, n, 32, generator=generator)
            a, expected = plain(x, expected)
            b, held = compiled(x, held)
            assert (a - b).abs().max() < 1e-5
            assert all(
                mine.shape == theirs.shape
                for pair, other in zip(held, expected, strict=True)
                for mine, theirs in zip(pair, other, strict=True)
            )
    assert expected is not None and held is not None
    return held, expected, reports


def equal(held: Past, dense: Past) -> None:
    for pair, other in zip(held, dense, strict=True):
        for mine, theirs in zip(pair, other, strict=True):
            assert mine.shape == theirs.shape
            assert torch.allclose(mine + 0, theirs, atol=1e-5)


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("size", [1, 3])
def test_turns(attention, size):
    held, dense, reports = same_steps(*model(attention), (40, 1, 1, 9, 1, 30, 1), size)
    assert reports and all(report.rewritten == 2 for report in reports)
    assert {site.form for report in reports for site in report.sites} == {"functional"}
    assert all(type(tensor) is KVHandle for pair in held for tensor in pair)
    equal(held, dense)


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_a_first_call_that_does_not_concatenate(attention):
    held, dense, reports = same_steps(*model(attention, empty=False), (35, 1, 1, 4, 1))
    assert [report.rewritten for report in reports][:2] == [0, 2]
    assert all(type(tensor) is KVHandle for pair in held for tensor in pair)
    equal(held, dense)


@pytest.mark.parametrize("window", [2, 40])
@pytest.mark.parametrize("prompt", [1, 50])
def test_a_window_that_is_kept(window, prompt):
    held, dense, reports = same_steps(*model(sdpa, window), (prompt, 1, 1, 12, 1, 1))
    assert all(report.rewritten == 2 for report in reports)
    assert held[0][0].shape[1] == min(window - 1, prompt + 16)
    equal(held, dense)


READS = {
    "first": lambda x: x[:, :11],
    "first of first": lambda x: x[:, :20][:, :-4],
    "last": lambda x: x[:, -3:],
    "heads": lambda x: x[:, :, :1],
    "sequence": lambda x: x[1],
    "transposed": lambda x: x.transpose(1, 2),
    "transposed first": lambda x: x.transpose(1, 2)[:, :, :7],
    "flat": lambda x: x.reshape(-1),
    "view": lambda x: x.view(-1),
    "order": lambda x: x.index_select(0, torch.tensor([1, 0, 0])),
    "copy": copy.deepcopy,
    "cat": lambda x: torch.cat([x, x], 1),
}


@pytest.mark.parametrize("name", READS)
def test_reads(name):
    held, dense, _ = same_steps(*model(), (37, 1))
    for mine, theirs in zip(held[1], dense[1], strict=True):
        got, expected = READS[name](mine), READS[name](theirs)
        assert got.shape == expected.shape
        assert torch.allclose(got + 0, expected, atol=1e-5)


def test_the_first_tokens_are_a_shorter_handle():
    held, _, _ = same_steps(*model(), (37, 1))
    keys = held[0][0]
    short = keys[:, :11]
    assert type(short) is KVHandle and short.content.lease is keys.content.lease
    assert tuple(short.shape) == (2, 11, KV, WIDTH) and short.content.length == 11
    assert keys[:, :, :1].content is None


CHANGES = {
    "reordered": lambda x: x.index_select(0, torch.tensor([1, 1])),
    "copied": copy.deepcopy,
    "cropped": lambda x: x[:, :-5],
    "one sequence": lambda x: x[1:],
    "later tokens": lambda x: x[:, 6:],
    "dense": lambda x: x.clone(),
    "emptied": lambda x: x[:, :0],
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_past_continues(name):
    plain, compiled = model()
    held, dense, _ = same_steps(plain, compiled, (37, 1))
    with torch.no_grad():
        before = [tuple(tensor.clone() for tensor in pair) for pair in dense]
        for n in (1, 3, 1):
            held, dense = (
                [tuple(CHANGES[name](x) for x in pair) for pair in past] for past in (held, dense)
            )
            x = torch.randn(dense[0][0].shape[0], n, 32)
            a, dense = plain(x, dense)
            b, held = compiled(x, held)
            assert (a - b).abs().max() < 1e-5
            equal(held, dense)
            if name == "one sequence":
                break
        assert all(torch.isfinite(tensor).all() for pair in before for tensor in pair)


def test_an_earlier_past_is_not_changed_by_what_came_later():
    plain, compiled = model()
    held, dense, _ = same_steps(plain, compiled, (20, 1))
    with torch.no_grad():
        compiled(torch.randn(2, 4, 32), held)
        equal(held, dense)
        x = torch.randn(2, 1, 32)
        assert (plain(x, dense)[0] - compiled(x, held)[0]).abs().max() < 1e-5


def test_a_past_of_the_other_order():
    """A handle ``[B, H, tokens, D]`` of one model is transposed for another one."""

    def heads_first(q: Tensor, k: Tensor, v: Tensor, past: Any) -> Any:
        k, v = torch.cat([past[0], k], dim=2), torch.cat([past[1], v], dim=2)
        return F.scaled_dot_product_attention(q, k, v), (k, v)

    def tokens_first(q: Tensor, k: Tensor, v: Tensor, past: Any) -> Any:
        k, v = torch.cat([past[0], k], dim=1), torch.cat([past[1], v], dim=1)
        return F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v))), (k, v)

    settings = {"inner": "eager"} | OPTIONS
    run = [
        torch.compile(step, backend=kvpass.backend, options=settings)
        for step in (heads_first, tokens_first)
    ]
    # As many heads as tokens: only what the handle stands for tells the orders apart.
    q, k, v = (torch.randn(2, 6, 1, WIDTH) for _ in range(3))
    past = tuple(torch.randn(2, 6, 5, WIDTH) for _ in range(2))
    reports: list[GraphReport] = []
    with torch.no_grad(), observed(reports.append):
        _, held = run[0](q, k, v, past)
        assert type(held[0]) is KVHandle and tuple(held[0].shape) == (2, 6, 6, WIDTH)
        expected = [torch.cat(pair, dim=2) for pair in zip(past, (k, v), strict=True)]
        turned = [x.transpose(1, 2) for x in (q, k, v)]
        new = [x.expand(-1, -1, 6, -1).contiguous() for x in turned]
        a, _ = tokens_first(*new, expected)
        b, grown = run[1](*new, held)
    assert [report.rewritten for report in reports] == [1, 1]
    assert (a - b).abs().max() < 1e-5 and grown[0].shape[1] == 7


def test_cross_attention():
    """Keys and values of the encoder are stored by the first call and read by the others."""

    def step(x: Tensor, encoded: Tensor | None, past: Any) -> Any:
        q = x.unflatten(-1, (HEADS, WIDTH))
        if past is None:
            none = x.new_zeros((x.shape[0], 0, HEADS, WIDTH))
            k = torch.cat([none, encoded.unflatten(-1, (HEADS, WIDTH))], dim=1)
            v = torch.cat([none, encoded.unflatten(-1, (HEADS, WIDTH)) * 2 + 1], dim=1)
            past = (k, v)
        k, v = past
        return F.scaled_dot_product_attention(*(y.transpose(1, 2) for y in (q, k, v))), (k, v)

    compiled = torch.compile(
        step, backend=kvpass.backend, options={"inner": "eager"} | OPTIONS
    )  # fmt: skip
    encoded = torch.randn(2, 19, HEADS * WIDTH)
    reports: list[GraphReport] = []
    with torch.no_grad(), observed(reports.append):
        mine = theirs = None
        for n in (4, 1, 1):
            x = torch.randn(2, n, HEADS * WIDTH)
            a, theirs = step(x, encoded if theirs is None else None, theirs)
            b, mine = compiled(x, encoded if mine is None else None, mine)
            assert (a - b).abs().max() < 1e-5
    assert [site.form for report in reports for site in report.sites][:2] == ["functional", "read"]
    assert all(report.rewritten == 1 for report in reports)


def test_sizes_that_are_asked_for_behind():
    class Sized(Decoder):
        def forward(self, x: Tensor, past: Past | None = None) -> tuple[Tensor, Past]:
            out, presents = super().forward(x, past)
            return out * presents[0][0].shape[1] + presents[1][1].size(-3), presents

    torch.manual_seed(0)
    plain = Sized().eval()
    settings = {"inner": "eager"} | OPTIONS
    compiled = torch.compile(plain, backend=kvpass.backend, options=settings, dynamic=True)
    _, _, reports = same_steps(plain, compiled, (7, 1, 1, 3))
    assert all(report.rewritten == 2 for report in reports)
