# SPDX-License-Identifier: Apache-2.0
"""Softcap, windows, sinks and cross attention of the op on a CPU, against plain attention."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kvpass.cpu_extend
from kvpass.errors import ShapeError
from tests.runtime.harness import BLOCK, Driver
from tests.test_ops import DTYPES, attend, call, close, plain_attention
from triton_ops.reference import heat_reference, hot_blocks

WINDOWS = [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 50, 1000]


def step(driver, heads, tokens, **options):
    """Append random tokens and attend to them."""
    g = driver.geometry
    q = driver.random(tokens, heads, g.head_dim_k)
    k = driver.random(tokens, g.kv_heads, g.head_dim_k)
    return attend(driver, q, k, driver.random(tokens, g.kv_heads, g.head_dim_v), **options)


@pytest.mark.parametrize("dtype", DTYPES)
@given(
    heads=st.sampled_from([(4, 2), (7, 1), (3, 3)]),
    widths=st.sampled_from([(16, 16), (33, 24), (80, 80), (16, 256)]),
    past=st.sampled_from([0, 1, 31, 32, 33, 70, 100]),
    tokens=st.sampled_from([1, 2, 33, 40]),
    mask=st.sampled_from(["none", "padding", "bool", "float", "row", "full", "column"]),
    window=st.sampled_from([0, *WINDOWS]),
    softcap=st.sampled_from([0.0, 0.8, 30.0]),
    sinks=st.sampled_from([None, *DTYPES]),
    seed=st.integers(0, 2**31),
)
def test_attend(dtype, heads, widths, past, tokens, mask, window, softcap, sinks, seed):
    torch.manual_seed(seed)
    hq, hkv = heads
    driver = Driver(
        size=2, layers=1, heads=hkv, width=widths[0], width_v=widths[1], dtype=dtype, hot="128KiB"
    )
    if past:
        step(driver, hq, past)
    total = past + tokens
    options = {"window": window, "softcap": softcap}
    if sinks:
        options["sinks"] = (torch.randn(hq) * 3).to(sinks)
    if mask == "padding":
        options["kv_mask"] = torch.rand(2, total + 3) > 0.3
        options["kv_mask"][:, -1] = True
    elif mask == "full":
        options["kv_mask"] = torch.zeros(2, total, dtype=torch.bool)
    elif mask == "bool":
        options["bias"] = torch.rand(2, 1, tokens, total) > 0.3
    elif mask == "float":
        options["bias"] = torch.randn(1, hq, tokens, total) * 5
    elif mask == "row":
        options["bias"] = torch.zeros(1, 1, tokens, total)
        options["bias"][:, :, 0] = -math.inf
    elif mask == "column":
        options["bias"] = torch.randn(2, hq, 1, 1)
    out, expected = step(driver, hq, tokens, **options)
    assert out.dtype == dtype
    close(out, expected)


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=5),
    window=st.integers(1, 80),
    seed=st.integers(0, 2**31),
)
def test_a_window_over_chunks_of_any_size(lengths, window, seed):
    torch.manual_seed(seed)
    driver = Driver(layers=1)
    total = sum(lengths)
    q, k, v = (torch.randn(1, h, total, 16) for h in (4, 2, 2))
    expected = plain_attention(q, k, v, window=window)
    at = 0
    for n in lengths:
        part = slice(at, at + n)
        out, _ = attend(driver, q[:, :, part], k[:, :, part], v[:, :, part], window=window)
        close(out, expected[:, :, part])
        at += n


def test_b03_two_keys_under_a_cap():
    driver = Driver(layers=1, heads=1)
    k = torch.zeros(1, 1, 2, 16)
    k[:, :, 1, 0] = 4.0
    v = torch.tensor([0.0, 1.0]).view(1, 1, 2, 1).expand(1, 1, 2, 16)
    q = torch.zeros(1, 1, 2, 16)
    q[..., 0] = 1.0
    out, _ = attend(driver, q, k, v, scale=1.0, causal=False, softcap=2.0)
    assert (out - 0.8730).abs().max() < 5e-5
    out, _ = attend(driver, q[:, :, :1], None, None, scale=1.0, causal=False, softcap=2.0)
    assert (out - 0.8730).abs().max() < 5e-5


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("hot", ["16KiB", "1MiB"])
def test_b11_a_sink_counts_once(dtype, tokens, hot):
    # eight blocks in two tiers, one key of each visible
    driver = Driver(layers=1, dtype=dtype, hot=hot)
    k, v = torch.zeros(1, 2, 255, 16, dtype=dtype), torch.ones(1, 2, 255, 16, dtype=dtype)
    attend(driver, torch.randn(1, 4, 255, 16).to(dtype), k, v)
    mask = (torch.arange(300) % BLOCK == 0)[None]
    q = torch.randn(1, 4, tokens, 16).to(dtype)
    options = {"sinks": torch.full((4,), math.log(8.0)), "kv_mask": mask}
    new = torch.zeros(1, 2, tokens, 16, dtype=dtype)
    if tokens > 1:
        mask[:, 256] = False
    out, _ = attend(driver, q, new, new, **options)
    assert (out - 0.5).abs().max() < 1e-6
    out, _ = attend(driver, q, None, None, causal=False, **options)
    assert (out - 0.5).abs().max() < 1e-6


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("size", [-math.inf, -1e30, -200.0, 200.0, 1e30])
def test_sinks_far_from_the_scores(tokens, size):
    driver = Driver(layers=1)
    step(driver, 4, 40)
    sinks = torch.tensor([size, 0.5, -1.0, 3.0])
    close(*step(driver, 4, tokens, sinks=sinks))
    lowest = torch.full((1, 1, tokens, 100), torch.finfo(torch.float32).min)
    close(*step(driver, 4, tokens, sinks=sinks, bias=lowest))
    out, _ = step(driver, 4, tokens, sinks=sinks, kv_mask=torch.zeros(1, 100, dtype=torch.bool))
    assert (out == 0).all()


def test_b12_prefill_then_decode_across_the_edge():
    def ramp(start, end):
        return torch.arange(float(start), end).view(1, 1, -1, 1).expand(1, 1, end - start, 16)

    def probe(driver, start, end):
        zeros = torch.zeros(1, 1, end - start, 16)
        out, _ = attend(driver, zeros, zeros, ramp(start, end), window=4)
        return out[0, 0, :, 0]

    for n, last in ((3, 1.0), (4, 1.5), (5, 2.5), (9, 6.5)):
        driver = Driver(layers=1, heads=1)
        out = probe(driver, 0, n)
        assert torch.allclose(out[-1], torch.tensor(last))
    assert torch.allclose(out[2], torch.tensor(1.0))
    pieces = Driver(layers=1, heads=1)
    assert torch.allclose(torch.cat([probe(pieces, p, p + 3) for p in (0, 3, 6)]), out)
    for p in range(9, 40):
        assert torch.allclose(probe(driver, p, p + 1), torch.tensor(p - 1.5))


@pytest.mark.parametrize("window", [1, 31, 32, 33, 70])
@pytest.mark.parametrize("tokens", [1, 2, 34])
def test_blocks_outside_the_window_are_not_touched(window, tokens):
    driver = Driver(layers=1)
    step(driver, 4, 170)
    g = driver.geometry
    q, k, v = (driver.random(tokens, h, 16) for h in (4, g.kv_heads, g.kv_heads))
    with driver.manager.step(driver.batch, tokens, [0]) as rows:
        token = torch.ops.kvpass.append(k, v, rows, 0, BLOCK)
        row = driver.batch.blocks[0][0]
        # several new keys are not read from blocks, which a window of 1 therefore does not need
        none = window == 1 and tokens > 1
        taken = [(b, b.k, b.v) for b in (row if none else row[: (170 - window + 1) // BLOCK])]
        assert taken
        for block, _, _ in taken:
            block._views = None, None  # a touch raises
        out = torch.ops.kvpass.attend(
            q, k, v, token, rows, 0, BLOCK, 0.3, True, None, None, window=window
        )
        for block, keys, values in taken:
            block._views = keys, values
    dense = [torch.cat(pair, 2) for pair in zip(driver.dense[0], (k, v), strict=True)]
    close(out, plain_attention(q, *dense, window=window))


def test_tiles_of_new_keys_before_the_window_are_skipped(monkeypatch):
    # 600 queries, tiles of 256: the second tile's window of 40 begins at 216, in new block 6
    visited = []
    visit = kvpass.cpu_extend._Tile.visit

    def spy(tile, k, v, visible, added):
        visited.append(k.shape[1])
        visit(tile, k, v, visible, added)

    monkeypatch.setattr(kvpass.cpu_extend._Tile, "visit", spy)
    driver = Driver(layers=1)
    close(*step(driver, 2, 600, window=41))
    # queries 0-255 see new blocks 0-7, 256-511 see 6-15, 512-599 see 14-18
    assert len(visited) == 8 + 10 + 5


@pytest.mark.parametrize("window", [0, 1, 20, 40, 64, 100, 1000])
def test_heat_counts_blocks_of_the_window(window):
    torch.manual_seed(5)
    driver = Driver(layers=1, heads=2)
    step(driver, 6, 149)
    driver.batch.heat.zero_()
    q, k, v = torch.randn(1, 6, 1, 16) * 3, torch.randn(1, 2, 1, 16), torch.randn(1, 2, 1, 16)
    options = {"window": window, "softcap": 5.0}
    close(*attend(driver, q, k, v, sinks=torch.full((6,), 20.0), **options))
    keys = driver.dense[0][0][0]
    shares = heat_reference(q[0, :, 0], keys, scale=0.3, block_size=BLOCK, **options)
    hot = hot_blocks(shares, 150, BLOCK, window)
    sure = ((hot - 1).abs() > 1e-3) | (shares > 0.999)
    counts = driver.batch.heat[0, 0, :5]
    assert counts.sum() > 0
    unsure = (~sure).sum(0)
    assert ((counts - (hot >= 1 - 1e-9).sum(0)).abs() <= unsure).all()


def test_a_window_over_everything_changes_no_bit():
    results = []
    for window in (0, 100, 1 << 40):
        torch.manual_seed(3)
        driver = Driver(layers=1)
        results.append([step(driver, 4, n, window=window)[0] for n in (40, 33, 1)])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("hot", ["16KiB", "1MiB"])
def test_placement_changes_no_bit(hot):
    results = []
    for size in (hot, "64MiB"):
        torch.manual_seed(4)
        driver = Driver(layers=1, hot=size)
        options = {"window": 50, "softcap": 3.0, "sinks": torch.randn(4)}
        results.append([step(driver, 4, n, **options)[0] for n in (100, 33, 1)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width_v", [16, 24])
@pytest.mark.parametrize(("tokens", "new"), [(1, 10), (4, 33), (40, 3), (1, 1), (3, 3)])
def test_cross_attention(dtype, width_v, tokens, new):
    """The first step appends the encoder's keys, later ones only read them."""
    driver = Driver(size=2, layers=1, dtype=dtype, width_v=width_v)
    q = driver.random(tokens, 6, 16)
    k, v = driver.random(new, 2, 16), driver.random(new, 2, width_v)
    mask = torch.rand(2, new) > 0.3
    mask[:, 0] = True
    for options in ({}, {"kv_mask": mask, "sinks": torch.randn(6), "softcap": 2.0}):
        first, want = attend(driver, q, k, v, causal=False, **options)
        close(first, want)
        close(*attend(driver, driver.random(5, 6, 16), None, None, causal=False, **options))
        close(*attend(driver, driver.random(1, 6, 16), None, None, causal=False, **options))
        assert driver.batch.lengths == [new]
        driver = Driver(size=2, layers=1, dtype=dtype, width_v=width_v)


def test_b25_every_decoder_step_sees_the_whole_encoder():
    driver = Driver(layers=1, heads=1)
    ramp = torch.arange(10.0).view(1, 1, 10, 1).expand(1, 1, 10, 16)
    zeros = torch.zeros(1, 1, 10, 16)
    outs = [attend(driver, torch.randn(1, 2, 4, 16), zeros, ramp, causal=False)[0]]
    for n in (1, 1, 1, 1, 1, 3):
        outs.append(attend(driver, torch.randn(1, 2, n, 16), None, None, causal=False)[0])
    assert (torch.cat(outs, 2) - 4.5).abs().max() < 1e-5
    assert driver.batch.lengths == [10]


@pytest.mark.parametrize("tokens", [1, 3])
def test_nothing_stored_gives_zero(tokens):
    driver = Driver(layers=1)
    q = torch.randn(1, 4, tokens, 16)
    for sinks in (None, torch.randn(4)):
        out = call(driver, q, None, None, driver.batch.rows, causal=False, sinks=sinks)
        assert out.shape == q.shape and (out == 0).all()


def test_what_does_not_fit_is_refused():
    driver = Driver(layers=1)
    step(driver, 4, 5)
    rows = driver.batch.rows
    q, k = torch.randn(1, 4, 3, 16), torch.randn(1, 2, 3, 16)
    token = torch.empty(0)

    def refuse(words, *args, causal=True, **options):
        with pytest.raises(ShapeError, match=words):
            torch.ops.kvpass.attend(*args, rows, 0, BLOCK, 0.3, causal, None, None, **options)

    refuse("as many new keys as queries, got 2 and 3", q, k[:, :, :2], k[:, :, :2], token)
    refuse("as many new keys as queries, got 0 and 3", q, None, None, None, kv_heads=2,
           head_dim_v=16)  # fmt: skip
    refuse("both be None", q, k, None, token)
    refuse("k_new without the token", q, k, k, None)
    refuse("must be given", q, None, None, None, causal=False, kv_heads=2)
    refuse("holds 2 of 16", q, None, None, None, causal=False, kv_heads=4, head_dim_v=16)
    refuse("holds 2 of 16", q, None, None, None, causal=False, kv_heads=2, head_dim_v=24)
    refuse(r"window \(3\) needs causal", q, k, k, token, causal=False, window=3)
    refuse("window must be", q, k, k, token, window=-1)
    refuse("softcap must be", q, k, k, token, softcap=-1.0)
    refuse("softcap must be", q, k, k, token, softcap=math.inf)
    refuse(r"sinks must be \[heads\]", q, k, k, token, sinks=torch.zeros(3))
    refuse("sinks must be", q, k, k, token, sinks=torch.zeros(4, dtype=torch.int64))
    refuse("4 and 3", q, torch.randn(1, 3, 3, 16), torch.randn(1, 3, 3, 16), token)
    refuse("k_new must be", q, torch.randn(1, 2, 3, 17), k, token)


def test_fakes_tell_the_truth():
    driver = Driver(size=2, layers=1, width=16, width_v=24)
    checks = ("test_schema", "test_faketensor")
    k, v = driver.random(3, 2, 16), driver.random(3, 2, 24)
    with driver.manager.step(driver.batch, 3, [0]) as rows:
        token = torch.ops.kvpass.append(k, v, rows, 0, BLOCK)
        q, options = driver.random(3, 6, 16), (3.0, 2, torch.randn(6))
        arguments = (q, k, v, token, rows, 0, BLOCK, 0.3, True, None, None, *options)
        torch.library.opcheck(torch.ops.kvpass.attend.default, arguments, test_utils=checks)
    for n in (1, 4):
        q = driver.random(n, 6, 16)
        arguments = (q, None, None, None, rows, 0, BLOCK, 0.3, False, None, None, 0.0, 0, None, 2)
        torch.library.opcheck(torch.ops.kvpass.attend.default, (*arguments, 24), test_utils=checks)
        out = torch.ops.kvpass.attend(*arguments, 24)
        assert out.shape == (2, 6, n, 24) and out.transpose(1, 2).is_contiguous()
    empty = torch.empty(0, 6, 1, 16)
    out = torch.ops.kvpass.attend(empty, None, None, None, rows[:, :0], *arguments[5:], 24)
    assert out.shape == (0, 6, 1, 24)


def test_existing_callers_stay_valid():
    schema = torch.ops.kvpass.attend.default._schema
    defaults = [(a.name, a.default_value) for a in schema.arguments if a.has_default_value()]
    assert defaults == [
        ("softcap", 0.0), ("window", 0), ("sinks", None), ("kv_heads", 0), ("head_dim_v", 0),
        ("chunk", 0), ("tile", None), ("staged", None), ("following", None),
    ]  # fmt: skip
