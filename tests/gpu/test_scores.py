# SPDX-License-Identifier: Apache-2.0
"""Softcap, windows, sinks and cross attention of the kernels on a CUDA GPU, and of the op."""

from __future__ import annotations

import math
import os
from typing import Any

import pytest
import torch
import triton

import triton_ops
from tests.gpu.test_kernels import (
    BLOCK,
    DTYPES,
    close,
    decode,
    expect,
    extend,
    ids,
    joined,
    lse_close,
    ragged,
    randn,
)
from tests.runtime.harness import Driver
from tests.test_ops import attend
from triton_ops.reference import (
    Tables,
    aligned_empty,
    heat_reference,
    hot_blocks,
    place_rows,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.skipif(
        os.environ.get("TRITON_INTERPRET") == "1",
        reason="the interpreter is on: unset the variable",
    ),
]

BF16 = torch.bfloat16
# query heads, KV heads and head size; a compiled variant of both kernels each
CASES = [
    (torch.float32, (4, 4, 64)),
    (torch.float32, (14, 2, 80)),
    (torch.float16, (8, 4, 128)),
    (torch.float16, (4, 4, 33)),
    (BF16, (14, 2, 80)),
    (BF16, (4, 4, 128)),
    (BF16, (4, 2, 256)),
]
LENGTHS = [0, 1, 255, 700, 3000]


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(int.from_bytes(os.urandom(4), "little"))


def check(
    shape: tuple[int, int, int], dtype: torch.dtype, lengths: list[int], n: int = 0,
    splits: int | None = None, **features: Any,
) -> None:  # fmt: skip
    """Decode (n = 0), or extend by n tokens, against the reference."""
    heads, kv_heads, dim = shape
    scale = dim**-0.5
    keys, values = ragged(lengths, kv_heads, dim, dtype), ragged(lengths, kv_heads, dim, dtype)
    tables = place_rows(keys, values, BLOCK, "cuda")
    q = randn(len(lengths), heads, max(n, 1), dim, dtype=dtype)
    if n:
        k, v = (randn(len(lengths), kv_heads, n, dim, dtype=dtype) for _ in range(2))
        config = splits and triton_ops.ExtendConfig(block_m=64, block_n=32, splits=splits)
        out, lse = extend(q, k, v, tables, scale, config=config, **features)
        keys, values = joined(keys, k), joined(values, v)
    else:
        out, lse = decode(q, tables, kv_heads, dim, scale, splits=splits, **features)
    want, want_lse = expect(q, keys, values, scale, causal=True, **features)
    close(out, want, dtype)
    lse_close(lse, want_lse)


def poison(tables: Tables, row: int, upto: int) -> None:
    """Point the first words of a row at a block full of NaN."""
    bad = aligned_empty(tables.keep[0].numel(), tables.keep[0].dtype, "cuda").fill_(math.nan)
    tables.keep.append(bad)
    tables.words[row, : upto // BLOCK] = bad.data_ptr()


@pytest.mark.parametrize(("dtype", "shape"), CASES, ids=str)
def test_all_features_together(dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    sinks = torch.randn(shape[0], device="cuda").to(dtype) * 2
    for window in (300, 5000):
        features = {"softcap": 4.0, "window": window, "sinks": sinks}
        check(shape, dtype, LENGTHS, **features)
        check(shape, dtype, LENGTHS[1:], n=150, **features)


@pytest.mark.parametrize("name", ["softcap", "window", "sinks"])
@pytest.mark.parametrize("splits", [1, 7])
def test_each_feature_alone(name: str, splits: int) -> None:
    features = {"softcap": 3.0, "window": 300, "sinks": torch.randn(32, device="cuda") * 3}
    feature = {name: features[name]}
    check((32, 8, 128), BF16, LENGTHS, splits=splits, **feature)
    check((32, 8, 128), BF16, LENGTHS, n=70, splits=splits, **feature)


@pytest.mark.parametrize("splits", [1, 2, 7])
def test_window_edges(splits: int) -> None:
    lengths = [1, 63, 64, 255, 256, 257, 511, 512, 1000]
    for window in (1, 2, 63, 64, 65, BLOCK - 1, BLOCK, BLOCK + 1, 2000):
        check((8, 2, 64), torch.float16, lengths, splits=splits, window=window)
        check((8, 2, 64), torch.float16, lengths, n=70, splits=splits, window=window)


@pytest.mark.parametrize("splits", [1, 7])
def test_masks_and_biases(splits: int) -> None:
    bias = torch.randn(4, 8, 20, 1000, device="cuda") * 3
    mask = torch.rand(4, 1000, device="cuda") > 0.2
    lengths = [30, 256, 500, 900]
    for row in (bias, bias > -2):
        features: dict[str, Any] = {"softcap": 2.0, "kv_mask": mask, "splits": splits}
        check((8, 2, 64), torch.float16, lengths, 20, bias=row, window=100, **features)
        check((8, 2, 64), torch.float16, lengths, bias=row[:, :, :1], window=100, **features)


def test_the_cap_keeps_sign_and_precision_at_every_size() -> None:
    # with one key the log-sum is the score itself
    sizes = torch.logspace(-6, 15, 400)
    scores = torch.cat([sizes, -sizes])
    q = torch.zeros(800, 1, 1, 64, device="cuda")
    q[:, 0, 0, 5] = scores.cuda()
    key = torch.zeros(1, 1, 64, device="cuda")
    key[..., 5] = 1.0
    tables = place_rows([key], [torch.ones(1, 1, 64, device="cuda")], BLOCK, "cuda")
    for cap in (1e-3, 0.5, 30.0, 1e6):
        out, lse = decode(q, tables, 1, 64, 1.0, rows=ids(*[0] * 800), softcap=cap, splits=1)
        want = cap * torch.tanh(q[:, :, 0, 5].double() / cap)
        assert (out == 1.0).all()
        torch.testing.assert_close(lse[:, :, 0].double(), want, rtol=3e-6, atol=1e-30)


@pytest.mark.parametrize("dtype", DTYPES)
def test_b11_a_sink_counts_once(dtype: torch.dtype) -> None:
    # 8 visible keys of score 0 in 8 blocks, every other one in host memory; a sink of ln 8
    total = 8 * BLOCK
    keys, values = [torch.zeros(2, total, 64, dtype=dtype)], [torch.ones(2, total, 64, dtype=dtype)]
    tables = place_rows(keys, values, BLOCK, "cuda", allocate=lambda n, d, i: aligned_empty(
        n, d, "cpu" if i % 2 else "cuda", pin=bool(i % 2)))  # fmt: skip
    mask = (torch.arange(total, device="cuda") % BLOCK == 0)[None]
    features = {"sinks": torch.full((4,), math.log(8.0), device="cuda"), "kv_mask": mask}
    q = randn(1, 4, 3, 64, dtype=dtype)
    for splits in (1, 2, 7):
        out, lse = decode(q[:, :, :1], tables, 2, 64, 1.0, splits=splits, **features)
        close(out, torch.full_like(out, 0.5), torch.float32)
        lse_close(lse, torch.full_like(lse, math.log(16.0)))
        config = triton_ops.ExtendConfig(block_m=16, splits=splits)
        out = triton_ops.attend_extend(
            q, None, None, ids(0), tables.row_base, tables.row_len, block_size=BLOCK, scale=1.0,
            causal=False, kv_heads=2, head_dim_v=64, config=config, **features,
        )  # fmt: skip
        close(out, torch.full_like(out, 0.5), torch.float32)


@pytest.mark.parametrize("size", [-math.inf, -1e30, 200.0, 1e30])
def test_extreme_sinks_and_no_visible_key(size: float) -> None:
    sinks = torch.tensor([size, 0.5, -1.0, 3.0], device="cuda")
    nothing = torch.zeros(2, 700, dtype=torch.bool, device="cuda")
    for splits in (1, 7):
        for n in (0, 70):
            check((4, 2, 64), BF16, [600, 40], n, splits, sinks=sinks)
            check((4, 2, 64), BF16, [600, 40], n, splits, sinks=sinks, kv_mask=nothing)


def test_blocks_outside_the_window_are_not_read() -> None:
    lengths = [5000, 2048, 300]
    keys, values = (ragged(lengths, 8, 128, BF16) for _ in range(2))
    q, k, v = (randn(3, h, 150, 128, dtype=BF16) for h in (32, 8, 8))
    for window in (1, 256, 500):
        tables = place_rows(keys, values, BLOCK, "cuda")
        for row, length in enumerate(lengths):
            poison(tables, row, max(length - window, 0))
        heat = {"row_heat": tables.row_heat, "max_blocks": tables.max_blocks}
        want, _ = expect(q[:, :, :1], keys, values, 0.09, True, window=window)
        for splits in (1, None):
            out, _ = decode(q[:, :, :1], tables, 8, 128, 0.09, splits=splits, window=window, **heat)
            close(out, want, BF16)
        for row, length in enumerate(lengths):
            assert (tables.heat[row, : max(length - window, 0) // BLOCK] == 0).all()
        want, _ = expect(q, joined(keys, k), joined(values, v), 0.09, True, window=window)
        tables = place_rows(keys, values, BLOCK, "cuda")
        for row, length in enumerate(lengths):
            poison(tables, row, max(length - window + 1, 0))
        close(extend(q, k, v, tables, 0.09, window=window)[0], want, BF16)


@pytest.mark.parametrize("splits", [1, 8])
def test_heat_counts_blocks_of_the_window(splits: int) -> None:
    lengths = [40 * BLOCK + 3, 100, 70 * BLOCK]
    keys = [k * 2 for k in ragged(lengths, 8, 128, BF16)]
    q = randn(3, 32, 1, 128, dtype=BF16)
    for window in (1, BLOCK, 3000):
        tables = place_rows(keys, keys, BLOCK, "cuda")
        want, unsure = torch.zeros_like(tables.heat), torch.zeros_like(tables.heat)
        for b, k in enumerate(keys):
            shares = heat_reference(q[b, :, 0], k, scale=0.1, block_size=BLOCK, window=window)
            hot = hot_blocks(shares, lengths[b], BLOCK, window)
            want[b, : hot.shape[1]] = (hot >= 1 - 1e-9).sum(0).int()
            # the only block of a window has all of the softmax: that is sure
            near = ((hot - 1).abs() < 1e-3) & (shares < 0.999)
            unsure[b, : hot.shape[1]] = near.sum(0).int()
        assert want.sum() > 0
        for step in (1, 2):
            decode(q, tables, 8, 128, 0.1, splits=splits, row_heat=tables.row_heat,
                   max_blocks=tables.max_blocks, window=window,
                   sinks=torch.full((32,), 9.0, device="cuda"))  # fmt: skip
            assert ((tables.heat - step * want).abs() <= step * unsure).all()


def test_placement_does_not_change_a_bit() -> None:
    lengths = [5000, 777]
    keys, values = (ragged(lengths, 8, 128, BF16) for _ in range(2))
    q, k, v = (randn(2, h, 6, 128, dtype=BF16) for h in (32, 8, 8))
    features = {"softcap": 3.0, "window": 700, "sinks": torch.randn(32, device="cuda")}

    def mixed(n: int, dtype: torch.dtype, i: int) -> torch.Tensor:
        return aligned_empty(n, dtype, "cpu" if i % 2 else "cuda", pin=bool(i % 2))

    results = []
    for allocate in (None, mixed):
        tables = place_rows(keys, values, BLOCK, "cuda", allocate=allocate)
        results.append([
            *decode(q[:, :, :1], tables, 8, 128, 0.09, row_heat=tables.row_heat,
                    max_blocks=tables.max_blocks, **features),
            *extend(q, k, v, tables, 0.09, **features), tables.heat,
        ])  # fmt: skip
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_cross_attention(dtype: torch.dtype) -> None:
    keys, values = (ragged([700, 0, 33], 2, 64, dtype) for _ in range(2))
    tables = place_rows(keys, values, BLOCK, "cuda")
    for n in (1, 5, 150):
        q = randn(3, 8, n, 64, dtype=dtype)
        out, lse = triton_ops.attend_extend(
            q, None, None, ids(0, 1, 2), tables.row_base, tables.row_len, block_size=BLOCK,
            scale=0.1, causal=False, kv_heads=2, head_dim_v=64, return_lse=True,
        )  # fmt: skip
        want, want_lse = expect(q, keys, values, 0.1)
        close(out, want, dtype)
        lse_close(lse, want_lse)
        for m in (1, 100):
            k, v = (randn(3, 2, m, 64, dtype=dtype) for _ in range(2))
            out, _ = extend(q, k, v, tables, 0.1, causal=False)
            close(out, expect(q, joined(keys, k), joined(values, v), 0.1)[0], dtype)


def test_a_captured_step_moves_its_window() -> None:
    """Lengths grow past the window between replays, and old blocks are poisoned as they leave."""
    keys, values = (ragged([250], 2, 128, BF16) for _ in range(2))
    tables = place_rows(keys, values, BLOCK, "cuda", spare_blocks=3)
    q = randn(1, 8, 1, 128, dtype=BF16)
    k, v = (randn(1, 2, 1, 128, dtype=BF16) for _ in range(2))
    rows, sinks = ids(0), torch.randn(8, device="cuda")

    def step() -> torch.Tensor:
        triton_ops.append(k, v, rows, tables.row_base, tables.row_len, BLOCK)
        return triton_ops.attend_decode(
            q, rows, tables.row_base, tables.row_len, kv_heads=2, head_dim_v=128, block_size=BLOCK,
            scale=0.09, row_heat=tables.row_heat, max_blocks=tables.max_blocks, window=40,
            softcap=5.0, sinks=sinks,
        )  # fmt: skip

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for _ in range(60):
        k.normal_()
        v.normal_()
        q.normal_()
        keys, values = [torch.cat([keys[0], k[0]], 1)], [torch.cat([values[0], v[0]], 1)]
        if keys[0].shape[1] - 40 >= BLOCK:
            poison(tables, 0, BLOCK)
        graph.replay()
        want, _ = expect(q, keys, values, 0.09, True, window=40, softcap=5.0, sinks=sinks)
        close(out, want, BF16)
        tables.row_len += 1


def test_a_launch_reads_nothing_back() -> None:
    keys, values = (ragged([500], 2, 128, BF16) for _ in range(2))
    tables = place_rows(keys, values, BLOCK, "cuda")
    q, k = (randn(1, h, 1, 128, dtype=BF16) for h in (8, 2))
    rows = ids(0)
    features = {"softcap": 4.0, "window": 300, "sinks": torch.zeros(8, device="cuda")}
    torch.cuda.set_sync_debug_mode("error")
    try:
        decode(q, tables, 2, 128, 0.09, rows=rows, row_heat=tables.row_heat,
               max_blocks=tables.max_blocks, **features)  # fmt: skip
        extend(q, k, k, tables, 0.09, rows=rows, **features)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_one_variant_for_all_windows_and_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[Any] = []
    monkeypatch.setattr(
        triton.knobs.runtime, "jit_cache_hook", lambda **event: compiled.append(event["fn"])
    )
    for n in (0, 70):
        check((8, 2, 32), BF16, [300], n, 3, window=16)
        assert compiled
        compiled.clear()
        for window, length in ((1, 300), (17, 1000), (512, 5000), (4096, 16)):
            check((8, 2, 32), BF16, [length], n, 3, window=window)
        assert not compiled


def test_the_op_takes_the_features_to_the_kernels() -> None:
    for width in (16, 64):
        driver = Driver(size=2, layers=1, device="cuda", dtype=torch.float16, width=width)
        g = driver.geometry
        sinks = torch.randn(6, device="cuda")
        for n in (70, 1, 5, 1):
            q, k, v = (driver.random(n, h, g.head_dim_k) for h in (6, 2, 2))
            out, want = attend(driver, q, k, v, softcap=3.0, window=40, sinks=sinks)
            close(out, want, torch.float16)
            assert out.transpose(1, 2).is_contiguous()
        for n in (1, 5):
            q = driver.random(n, 6, g.head_dim_k)
            out, want = attend(driver, q, None, None, causal=False, sinks=sinks)
            close(out, want, torch.float16)
        k, v = driver.random(3, 2, width), driver.random(3, 2, width)
        for n in (1, 7):
            out, want = attend(driver, driver.random(n, 6, width), k, v, causal=False)
            close(out, want, torch.float16)
