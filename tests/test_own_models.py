# SPDX-License-Identifier: Apache-2.0
"""Attention as people write it by hand: the compiled output is eager's, rewritten or not."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import kvpass
import model_zoo
from kvpass.graph.report import observed
from tests.models import OPTIONS


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def both(function, *calls):
    """Eager and compiled results of several calls, the past of each fed into the next."""
    compiled = torch.compile(function, backend=kvpass.backend, options={"inner": "eager"} | OPTIONS)
    reports = []
    with torch.no_grad(), observed(reports.append):
        results = []
        for run in (function, compiled):
            past, outs = None, []
            for q, k, v in calls:
                out, past = run(q, k, v, past)
                outs.append(out)
            results.append(outs)
    return results[0], results[1], [report.rewritten for report in reports], reports


def qkv(tokens: int, dtype=torch.float32, heads=(4, 4), width=64, seed=0) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed + tokens)
    return tuple(
        torch.randn(2, h, tokens, width, generator=generator).to(dtype)
        for h in (heads[0], heads[1], heads[1])
    )


def grow(k: Tensor, v: Tensor, past) -> tuple[Tensor, Tensor]:
    if past is None:
        return k, v
    return torch.cat((past[0], k), 2), torch.cat((past[1], v), 2)


def causal(n: int, total: int) -> Tensor:
    rows = torch.arange(n)[:, None] + (total - n)
    return torch.arange(total)[None, :] <= rows


SCALES = {
    "divided": lambda q, k: (q @ k.mT) / math.sqrt(8),
    "folded into q": lambda q, k: (q * 0.2) @ k.mT,
    "split": lambda q, k: (q * 0.5) @ (k * 0.25).mT,
    "one": lambda q, k: torch.matmul(q, k.transpose(-1, -2)) * 1.0,
}


@pytest.mark.parametrize("name", SCALES)
def test_b01_scale(name):
    def attention(q, k, v, past):
        k, v = grow(k, v, past)
        scores = SCALES[name](q, k)
        scores = scores.masked_fill(~causal(q.shape[2], k.shape[2]), -math.inf)
        return scores.softmax(-1) @ v, (k, v)

    eager, ours, rewritten, _ = both(attention, qkv(16), qkv(1), qkv(1, seed=2), qkv(1, seed=3))
    for a, b in zip(eager, ours, strict=True):
        assert (a - b).abs().max() < 1e-5
    if name != "split":
        assert 1 in rewritten


def test_b03_softcap_is_never_dropped():
    def attention(q, k, v, past):
        k, v = grow(k, v, past)
        scores = torch.tanh(q @ k.mT / 2.0) * 2.0
        return scores.softmax(-1) @ v, (k, v)

    q = torch.ones(1, 1, 1, 16)
    k = torch.tensor([0.0, 4.0 / 16]).view(1, 1, 2, 1).expand(1, 1, 2, 16).contiguous()
    v = torch.tensor([0.0, 1.0]).view(1, 1, 2, 1).expand(1, 1, 2, 16).contiguous()
    compiled = torch.compile(attention, backend=kvpass.backend, options={"inner": "eager"})
    with torch.no_grad():
        compiled(q, k[:, :, :1], v[:, :, :1], None)
        past = (k[:, :, :1].clone(), v[:, :, :1].clone())
        out, _ = compiled(q, k[:, :, 1:], v[:, :, 1:], past)
    assert out[0, 0, 0, 0].item() == pytest.approx(0.8730, abs=1e-4)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("unknown pointwise op", lambda s: s + 0.1 * torch.sin(s)),
        ("softmax over another dim", None),
        ("squared", lambda s: s * s),
    ],
)
def test_foreign_pieces_are_left_alone(name, change):
    def attention(q, k, v, past):
        k, v = grow(k, v, past)
        scores = q @ k.mT
        weights = scores.softmax(-2) if change is None else change(scores).softmax(-1)
        return weights @ v, (k, v)

    eager, ours, rewritten, reports = both(attention, qkv(16), qkv(1), qkv(1, seed=1))
    assert not any(rewritten)
    for a, b in zip(eager, ours, strict=True):
        assert torch.equal(a, b)
    assert all(site.reason for report in reports for site in report.sites)


def test_b04_is_causal_with_a_longer_past_keeps_its_upper_left_meaning():
    """``is_causal=True`` with 2 queries and 5 keys: eager's rows are 0 and 0.5."""

    def attention(q, k, v, past):
        k, v = grow(k, v, past)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True), (k, v)

    zeros = torch.zeros(1, 1, 5, 16)
    values = torch.arange(5.0).view(1, 1, 5, 1).expand(1, 1, 5, 16)
    calls = [(zeros[:, :, :n], zeros[:, :, :n], v) for n, v in ((3, values[:, :, :3]),)]
    calls.append((zeros[:, :, :2], zeros[:, :, :2], values[:, :, 3:]))
    eager, ours, _, _ = both(attention, *calls)
    assert eager[1][0, 0, :, 0].tolist() == [0.0, 0.5]
    assert torch.equal(eager[1], ours[1])


@pytest.mark.parametrize("softmax_dtype", [torch.float32, None])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_b06_output_dtype_is_eagers(dtype, softmax_dtype):
    def attention(q, k, v, past):
        k, v = grow(k, v, past)
        scores = (q @ k.mT) * 0.125
        scores = scores.masked_fill(~causal(q.shape[2], k.shape[2]), -math.inf)
        return F.softmax(scores, dim=-1, dtype=softmax_dtype).to(q.dtype) @ v, (k, v)

    eager, ours, rewritten, _ = both(attention, qkv(9, dtype), qkv(1, dtype), qkv(1, dtype, seed=4))
    for a, b in zip(eager, ours, strict=True):
        assert a.dtype == b.dtype
        assert (a.float() - b.float()).abs().max() <= (1e-5 if dtype == torch.float32 else 2e-2)
    assert any(rewritten)


def test_b06_upcast_before_the_product_stays_finite():
    def attention(q, k, v, past):
        k, v = grow(k, v, past)
        scores = q.float() @ k.float().mT
        return scores.softmax(-1).to(v.dtype) @ v, (k, v)

    big = [tuple(x * 30 for x in qkv(n, torch.float16)) for n in (4, 1, 1)]
    eager, ours, _, _ = both(attention, *big)
    for a, b in zip(eager, ours, strict=True):
        assert torch.isfinite(b).all()
        assert (a - b).abs().max() < 2e-3 * a.abs().max()


def test_legacy_tuples_with_einsum_and_grouped_heads():
    def attention(q, k, v, past):
        k, v = grow(k, v, past)
        heads = q.shape[1] // k.shape[1]
        keys, values = k.repeat_interleave(heads, 1), v.repeat_interleave(heads, 1)
        scores = torch.einsum("bhqd,bhkd->bhqk", q, keys) / 8.0
        scores = scores + torch.where(causal(q.shape[2], k.shape[2]), 0.0, -math.inf)
        return torch.einsum("bhqk,bhkd->bhqd", F.softmax(scores, dim=-1), values), (k, v)

    calls = [qkv(n, heads=(6, 2), seed=n) for n in (40, 1, 1, 7, 1)]
    eager, ours, rewritten, _ = both(attention, *calls)
    for a, b in zip(eager, ours, strict=True):
        assert (a - b).abs().max() < 1e-5
    # The first call has no concatenation; lengths of separate inputs need not be equal in a chunk.
    assert rewritten[1:3] == [1, 1]
    assert rewritten[-1] == 1


def test_swapped_or_mixed_handles_stay_right():
    """Handles of different sequences mixed by the caller: dense copies, never a wrong answer."""

    def attention(q, k, v, past):
        k, v = grow(k, v, past)
        mask = causal(q.shape[2], k.shape[2])
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask), (k, v)

    compiled = torch.compile(attention, backend=kvpass.backend, options={"inner": "eager"})
    with torch.no_grad():
        dense, handles = [], []
        for seed in (0, 1):
            for run, kept in ((attention, dense), (compiled, handles)):
                _, past = run(*qkv(12, seed=seed), None)
                _, past = run(*qkv(1, seed=seed), past)
                kept.append(past)
        for i, j in ((0, 1), (1, 0), (1, 1), (0, 0)):
            expected, _ = attention(*qkv(1, seed=9), (dense[i][0], dense[j][1]))
            got, _ = compiled(*qkv(1, seed=9), (handles[i][0], handles[j][1]))
            assert (expected - got).abs().max() < 1e-5


@pytest.mark.parametrize("padding", [0, 4])
def test_the_own_decoder_with_and_without_a_cache(padding):
    torch.manual_seed(0)
    config = model_zoo.DecoderConfig(
        vocab_size=64, hidden_size=48, intermediate_size=64, num_hidden_layers=3,
        num_attention_heads=6, num_key_value_heads=2, head_dim=16, max_position_embeddings=256,
    )  # fmt: skip
    decoder = model_zoo.Decoder(config).eval().requires_grad_(False)
    ids = torch.randint(0, 64, (2, 50))
    mask = torch.ones_like(ids)
    mask[0, :padding] = 0
    expected = model_zoo.greedy(decoder, ids, model_zoo.DenseCache(), 30, attention_mask=mask)
    compiled = torch.compile(decoder, backend="kvpass", fullgraph=True, options={"inner": "eager"})
    cache = kvpass.TieredCache(config, 100, **OPTIONS)
    reports = []
    with observed(reports.append):
        got = model_zoo.greedy(compiled, ids, cache, 30, attention_mask=mask, prefill_chunk=20)
    assert torch.equal(got, expected)
    assert all(report.rewritten == 3 for report in reports)
    with torch.no_grad():
        assert torch.equal(compiled(ids), decoder(ids))


ORDERS = {
    "consecutive": [0, 1, 2, 3, 4, 5],
    "from somewhere": [7, 8, 9, 10, 11, 12],
    "packed": [0, 1, 2, 0, 1, 2],
    "reversed": [5, 4, 3, 2, 1, 0],
    "sparse": [0, 10, 20, 30, 40, 50],
}


@pytest.mark.parametrize("window", [0, 3])
@pytest.mark.parametrize("order", ORDERS)
def test_positions_compared_with_themselves(order, window):
    """Only consecutive ones make the mask causal."""
    given = torch.tensor(ORDERS[order])

    def attention_of(q, k, v, past_k, past_v, positions):
        k, v = torch.cat((past_k, k), 2), torch.cat((past_v, v), 2)
        seen = positions[None, :] <= positions[:, None]
        if window:
            seen = seen & (positions[None, :] > positions[:, None] - window)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen), (k, v)

    q, k, v = qkv(6)
    empty = k[:, :, :0], v[:, :, :0]
    compiled = torch.compile(
        attention_of, backend=kvpass.backend, options={"inner": "eager"} | OPTIONS
    )
    with torch.no_grad():
        out, past = compiled(q, k, v, *empty, given)
        expected, grown = attention_of(q, k, v, *empty, given)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(past[0] + 0, grown[0])


def test_an_attention_asks_what_another_found():
    """The output of one attention is the query of the next."""

    def attention(q, k, v, past):
        first, second = past or ((k[:, :, :0], v[:, :, :0]), (k[:, :, :0], v[:, :, :0]))
        mask = causal(q.shape[2], first[0].shape[2] + k.shape[2])
        first = grow(k, v, first)
        out = F.scaled_dot_product_attention(q, *first, attn_mask=mask)
        second = grow(k * 2, v + 1, second)
        return F.scaled_dot_product_attention(out, *second, attn_mask=mask), (first, second)

    expected, got, rewritten, _ = both(attention, qkv(40), qkv(3), qkv(1), qkv(1, seed=5))
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b)
    assert rewritten[-1] == 2  # the first has no cache, the second three lengths at once


@pytest.mark.parametrize("newest_first", [True, False])
def test_two_lengths_of_one_sequence_in_a_graph(newest_first):
    def attention(q, k, v, past_k, past_v):
        k, v = torch.cat((past_k, k), 2), torch.cat((past_v, v), 2)
        return F.scaled_dot_product_attention(q, k, v), (k, v)

    def pair(q, k, v, first, second):
        short = q[:, :, :2], k[:, :, :2], v[:, :, :2]
        return attention(q, k, v, *first), attention(*short, *second)

    options = {"inner": "eager"} | OPTIONS
    grow_one = torch.compile(attention, backend=kvpass.backend, options=options)
    compiled = torch.compile(pair, backend=kvpass.backend, options=options)
    with torch.no_grad():
        start = qkv(1)[1][:, :, :0]
        _, older = grow_one(*qkv(9), start, start)
        _, newer = grow_one(*qkv(5), *older)
        pasts = (newer, older) if newest_first else (older, newer)
        dense = [tuple(x.clone() for x in past) for past in pasts]
        got, expected = compiled(*qkv(3), *pasts), pair(*qkv(3), *dense)
    for (a, grown_a), (b, grown_b) in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b)
        torch.testing.assert_close(grown_a[0] + 0, grown_b[0])


def test_b01_scores_filled_with_nan_are_no_mask():
    def attention(q, k, v, past):
        k, v = grow(k, v, past)
        scores = (q @ k.mT).masked_fill(~causal(q.shape[2], k.shape[2]), math.nan)
        return scores.softmax(-1) @ v, (k, v)

    expected, got, rewritten, reports = both(attention, qkv(4), qkv(1))
    assert set(rewritten) == {0}
    assert "nan" in reports[0].sites[0].reason
    for a, b in zip(got, expected, strict=True):
        assert torch.equal(a.isnan(), b.isnan())
