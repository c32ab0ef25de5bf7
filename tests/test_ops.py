# SPDX-License-Identifier: Apache-2.0
"""The ops against plain attention: masks, biases, caps, windows, sinks, cross attention, fakes."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.runtime.harness import BLOCK, Driver

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def call(driver, q, k, v, rows, *, scale=0.3, causal=True, kv_mask=None, bias=None, **features):
    """The op over layer 0, after the new keys (if any) were appended."""
    token = None if k is None else torch.ops.kvpass.append(k, v, rows, 0, BLOCK)
    if k is None:
        features |= {"kv_heads": driver.geometry.kv_heads, "head_dim_v": driver.geometry.head_dim_v}
    return torch.ops.kvpass.attend(
        q, k, v, token, rows, 0, BLOCK, scale, causal, kv_mask, bias, **features
    )


def attend(driver, q, k, v, **options):
    """One step of a single-layer driver, and the reference in float64."""
    # A step that adds nothing brings the device's lengths up to date all the same.
    with driver.manager.step(driver.batch, 0 if k is None else k.shape[2], [0]) as rows:
        out = call(driver, q, k, v, rows, **options)
    if k is not None:
        old_k, old_v = driver.dense[0]
        driver.dense[0] = (torch.cat([old_k, k], 2), torch.cat([old_v, v], 2))
    return out, plain_attention(q, *driver.dense[0], **options)


def plain_attention(
    q, k, v, *, scale=0.3, causal=True, kv_mask=None, bias=None, softcap=0.0, window=0, sinks=None,
    chunk=0,
):  # fmt: skip
    """Attention in float64; queries are the last tokens where it is causal."""
    group, n, total = q.shape[1] // k.shape[1], q.shape[2], k.shape[2]
    scores = q.double() @ k.double().repeat_interleave(group, 1).mT * scale
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    if bias is not None and bias.dtype != torch.bool:
        scores = scores + bias[..., :total].double()
    seen = torch.ones(q.shape[0], 1, n, total, dtype=torch.bool, device=q.device)
    if causal:
        seen = seen.tril(total - n)
    if window:
        seen = seen.triu(total - n - window + 1)
    if chunk:
        position = torch.arange(total, device=q.device)
        seen = seen & (position // chunk == position[total - n :, None] // chunk)
    if kv_mask is not None:
        seen = seen & kv_mask[:, None, None, :total]
    if bias is not None and bias.dtype == torch.bool:
        seen = seen & bias[..., :total]
    scores = scores.masked_fill(~seen, -math.inf)
    if sinks is not None:
        column = sinks.double().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, column], -1)
    weights = torch.nan_to_num(scores.softmax(-1))[..., :total]
    return weights @ v.double().repeat_interleave(group, 1)


def close(out, expected):
    assert torch.isfinite(out).all()
    assert (out.double() - expected).abs().max() <= TOLERANCE[out.dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@given(
    heads=st.sampled_from([(12, 2), (28, 4), (14, 2), (7, 1), (5, 5), (6, 3)]),
    width=st.sampled_from([16, 33, 40, 80, 96]),
    past=st.sampled_from([0, 1, 31, 32, 70]),
    tokens=st.sampled_from([1, 2, 5, 40]),
    mask=st.sampled_from(["none", "padding", "bool", "float", "row", "full"]),
    causal=st.booleans(),
)
def test_attend_equals_plain_attention(dtype, heads, width, past, tokens, mask, causal):
    hq, hkv = heads
    driver = Driver(size=2, layers=1, heads=hkv, width=width, dtype=dtype, hot="64KiB")
    if past:
        k = driver.random(past, hkv, width)
        attend(driver, driver.random(past, hq, width), k, driver.random(past, hkv, width))
    total = past + tokens
    kv_mask = bias = None
    if mask == "padding":
        kv_mask = torch.rand(2, total + 3) > 0.3
        kv_mask[:, -1] = True
    elif mask == "full":
        kv_mask = torch.zeros(2, total, dtype=torch.bool)  # B08: nothing to see
    elif mask == "bool":
        bias = torch.rand(2, 1, tokens, total) > 0.3
    elif mask == "float":
        bias = torch.randn(1, hq, tokens, total)
    elif mask == "row":
        bias = torch.zeros(1, 1, tokens, total)
        bias[:, :, 0] = -math.inf
    q = driver.random(tokens, hq, width)
    k, v = driver.random(tokens, hkv, width), driver.random(tokens, hkv, width)
    out, expected = attend(driver, q, k, v, causal=causal, kv_mask=kv_mask, bias=bias)
    assert out.dtype == dtype
    assert torch.isfinite(out).all()
    assert (out.double() - expected).abs().max() <= TOLERANCE[dtype]


def test_b08_an_additive_row_of_the_smallest_number_gives_the_mean():
    driver = Driver(layers=1)
    k = torch.randn(1, 2, 3, 16)
    v = torch.randn(1, 2, 3, 16)
    bias = torch.full((1, 1, 3, 3), torch.finfo(torch.float32).min)
    out, _ = attend(driver, torch.randn(1, 2, 3, 16), k, v, causal=False, bias=bias)
    assert (out - v.mean(2, keepdim=True)).abs().max() < 1e-6


def test_b04_uniform_probe_of_a_continuation():
    driver = Driver(layers=1, heads=1)
    values = torch.arange(8.0).view(1, 1, 8, 1).expand(1, 1, 8, 16)
    zeros = torch.zeros(1, 1, 8, 16)
    attend(driver, zeros[:, :, :5], zeros[:, :, :5], values[:, :, :5])
    out, _ = attend(driver, zeros[:, :, :3], zeros[:, :, :3], values[:, :, 5:])
    assert torch.allclose(out[0, 0, :, 0], torch.tensor([2.5, 3.0, 3.5]))


def test_b20_strided_inputs_equal_contiguous_ones():
    fused = torch.randn(2, 40, 3, 2, 16)
    q, k, v = (x.transpose(1, 2) for x in fused.unbind(2))
    views = {
        "fused": (q, k, v),
        "expanded": (q, k[:, :1].expand(-1, 2, -1, -1), v),
        "stride 2": (q, torch.randn(2, 2, 40, 32)[..., ::2], v),
    }
    for name, tensors in views.items():
        outs = []
        for make in (lambda x: x, torch.Tensor.contiguous):
            driver = Driver(size=2, layers=1)
            a, b, c = (make(x) for x in tensors)
            attend(driver, a[:, :, :39], b[:, :, :39], c[:, :, :39])
            outs.append(attend(driver, a[:, :, 39:], b[:, :, 39:], c[:, :, 39:])[0])
        assert torch.equal(*outs), name


def test_b22_query_heads_read_their_own_kv_head():
    for hq, hkv in ((12, 2), (28, 4), (14, 2), (7, 1), (40, 8), (5, 5)):
        driver = Driver(layers=1, heads=hkv)
        v = torch.arange(float(hkv)).view(1, hkv, 1, 1).expand(1, hkv, 5, 16).contiguous()
        q, k = torch.randn(1, hq, 5, 16), torch.randn(1, hkv, 5, 16)
        out, _ = attend(driver, q, k, v)
        assert torch.allclose(out[0, :, 0, 0], (torch.arange(hq) // (hq // hkv)).float())


def test_b16_an_empty_batch_is_no_error():
    rows = torch.empty(256, 0, dtype=torch.int32)
    k = torch.empty(0, 2, 1, 16)
    token = torch.ops.kvpass.append(k, k, rows, 0, BLOCK)
    q = torch.empty(0, 6, 1, 16)
    out = torch.ops.kvpass.attend(q, k, k, token, rows, 0, BLOCK, 1.0, True, None, None)
    assert out.shape == (0, 6, 1, 16)


def test_fakes_tell_the_truth():
    driver = Driver(size=2, layers=1, width=16, width_v=24)
    q, k, v = driver.random(3, 6, 16), driver.random(3, 2, 16), driver.random(3, 2, 24)
    checks = ("test_schema", "test_faketensor")
    with driver.manager.step(driver.batch, 3, [0]) as rows:
        arguments = (k, v, rows, 0, BLOCK)
        torch.library.opcheck(torch.ops.kvpass.append.default, arguments, test_utils=checks)
        token = torch.ops.kvpass.append(*arguments)
        arguments = (q, k, v, token, rows, 0, BLOCK, 0.3, True, None, None)
        torch.library.opcheck(torch.ops.kvpass.attend.default, arguments, test_utils=checks)
        assert torch.ops.kvpass.attend(*arguments).shape == (2, 6, 3, 24)


@pytest.mark.parametrize("default", [torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 5, 70])
def test_the_default_dtype_changes_nothing(default, tokens):
    """B40: what torch makes without a dtype is no part of the arithmetic."""

    def run():
        torch.manual_seed(3)
        driver = Driver()
        driver.append(90)
        return driver.append(tokens, driver.random(tokens, 6, 16))

    expected = run()
    previous = torch.get_default_dtype()
    numbers = torch.randn

    def float32(*shape, **kwargs):
        return numbers(*shape, **({"dtype": torch.float32} | kwargs))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "randn", float32)
        torch.set_default_dtype(default)
        try:
            got = run()
        finally:
            torch.set_default_dtype(previous)
    for one, other in zip(got, expected, strict=True):
        assert torch.equal(one, other)
