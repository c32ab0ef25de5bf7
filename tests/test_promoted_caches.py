# SPDX-License-Identifier: Apache-2.0
"""Caches that `cat` promotes to a wider dtype, and writes whose result is used."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kvpass
from kvpass.graph.report import GraphReport, observed
from tests.models import OPTIONS

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def reports_of(function, *args):
    """Output of the compiled function, and what was found."""
    torch._dynamo.reset()
    found: list[GraphReport] = []
    options = {"inner": "eager", **OPTIONS}
    with torch.no_grad(), observed(found.append):
        out = torch.compile(function, backend=kvpass.backend, options=options)(*args)
    return out, [site for report in found for site in report.sites]


@pytest.mark.parametrize(
    ("k_new", "v_new", "past"),
    [case for case in itertools.product(FLOATS, repeat=3) if len(set(case)) > 1],
)
def test_new_tokens_of_another_dtype_than_the_cache_leave_the_model_alone(k_new, v_new, past):
    """Stored as they come they would be right, but the past would lose its digits."""

    def attend(q: Tensor, k: Tensor, v: Tensor, past_k: Tensor, past_v: Tensor):
        k, v = torch.cat([past_k, k], 2), torch.cat([past_v, v], 2)
        dtype = torch.promote_types(k.dtype, v.dtype)
        return F.scaled_dot_product_attention(q, k.to(dtype), v.to(dtype)), k, v

    wide = torch.promote_types(torch.promote_types(k_new, past), torch.promote_types(v_new, past))
    q = torch.randn(2, 4, 1, 16).to(wide)
    new = [torch.randn(2, 4, 1, 16).to(dtype) for dtype in (k_new, v_new)]
    old = [torch.randn(2, 4, 40, 16).to(past) for _ in range(2)]
    expected = attend(q, *new, *old)
    out, sites = reports_of(attend, q, *new, *old)
    exact = {torch.promote_types(k_new, past), torch.promote_types(v_new, past)}
    kept = k_new == v_new and exact == {k_new}  # the past is widened, which loses nothing
    assert [site.rewritten for site in sites] == [kept], sites
    tolerance = 2e-2 if wide != torch.float32 else 1e-5
    for ours, theirs in zip(out, expected, strict=True):
        assert ours.dtype == theirs.dtype
        if not kept:
            assert torch.equal(ours, theirs)
        assert (ours.clone() - theirs).abs().max() <= tolerance


class Written(nn.Module):
    """A layer that reads what `index_copy_` returns."""

    def __init__(self, unfused: bool) -> None:
        super().__init__()
        self.unfused = unfused
        self.register_buffer("k", torch.zeros(1, 2, 64, 16))
        self.register_buffer("v", torch.zeros(1, 2, 64, 16))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, at: Tensor) -> Tensor:
        k, v = self.k.index_copy_(2, at, k), self.v.index_copy_(2, at, v)
        hidden = torch.arange(64)[None, :] > at[:, None]
        if self.unfused:
            scores = (q @ k.transpose(-1, -2) / 4).masked_fill(hidden, float("-inf"))
            return scores.softmax(-1) @ v
        return F.scaled_dot_product_attention(q, k, v, attn_mask=~hidden)


@pytest.mark.parametrize("unfused", [False, True])
def test_the_result_of_a_write_is_the_buffer(unfused):
    model, plain = Written(unfused), Written(unfused)
    torch._dynamo.reset()
    found: list[GraphReport] = []
    compiled = torch.compile(model, backend=kvpass.backend, options={"inner": "eager", **OPTIONS})
    start = 0
    for tokens in (33, 1, 1, 5, 1):
        new = [torch.randn(1, 2, tokens, 16) for _ in range(3)]
        at = torch.arange(start, start + tokens)
        with torch.no_grad(), observed(found.append):
            assert (compiled(*new, at) - plain(*new, at)).abs().max() <= 1e-5
        start += tokens
    assert torch.equal(model.k, plain.k) and torch.equal(model.v, plain.v)
    sites = [site for report in found for site in report.sites]
    assert sites and all(site.rewritten and site.form == "static" for site in sites), sites


def _cast_past(q, k, v, past_k, past_v):
    k, v = torch.cat([past_k.half(), k.half()], 2), torch.cat([past_v.half(), v.half()], 2)
    return F.scaled_dot_product_attention(q.half(), k, v), k, v


def _normalized(q, k, v, past_k, past_v):
    k, v = torch.cat([past_k, k], 2), torch.cat([past_v, v], 2)
    return F.scaled_dot_product_attention(q, F.normalize(k, dim=-1), v), k, v


def _divided(q, k, v, past_k, past_v):
    k, v = torch.cat([past_k, k], 2), torch.cat([past_v, v], 2)
    return F.scaled_dot_product_attention(q, k / -2, v), k, v


def _renormalized(q, k, v, past_k, past_v):
    k, v = torch.cat([past_k, k], 2), torch.cat([past_v, v], 2)
    weights = (q @ k.transpose(-1, -2)).softmax(-1)
    return (weights / weights.sum(-1, keepdim=True)) @ v, k, v


def _difference(q, k, v, past_k, past_v):
    k, v = torch.cat([past_k, k], 2), torch.cat([past_v, v], 2)
    weights = (q @ k.transpose(-1, -2)).softmax(-1) - (q @ k.transpose(-1, -2) / 2).softmax(-1)
    return weights @ v, k, v


@pytest.mark.parametrize(
    ("function", "count"),
    [(_cast_past, 1), (_normalized, 1), (_divided, 1), (_renormalized, 1), (_difference, 2)],
)
def test_what_is_left_alone_is_named_and_does_not_deny_its_cache(function, count):
    args = [torch.randn(1, 2, n, 16) for n in (1, 1, 1, 40, 40)]
    expected = function(*args)
    out, sites = reports_of(function, *args)
    assert all(torch.equal(a, b) for a, b in zip(out, expected, strict=True))
    assert len(sites) == count
    for site in sites:
        assert not site.rewritten and "no KV cache" not in site.reason, site.reason
