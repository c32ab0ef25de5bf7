# SPDX-License-Identifier: Apache-2.0
"""Refusals before any launch, the configuration rules, and the import without Triton."""

from __future__ import annotations

import itertools
import subprocess
import sys
from typing import Any

import pytest
import torch

import triton_ops
from triton_ops import config as config_module
from triton_ops.config import balanced_splits, decode_config, extend_config, fit_tile
from triton_ops.reference import Tables, place_rows


@pytest.fixture
def tables() -> Tables:
    empty = [torch.empty(2, 0, 16)]
    return place_rows(empty, empty, 32, "cpu")


def decode(tables: Tables, q: torch.Tensor, **kwargs: Any) -> Any:
    args: dict[str, Any] = {"kv_heads": 2, "head_dim_v": 16, "block_size": 32, "scale": 1.0}
    args |= kwargs
    rows = args.pop("rows", torch.zeros(q.shape[0], dtype=torch.int32))
    return triton_ops.attend_decode(q, rows, tables.row_base, tables.row_len, **args)


def extend(tables: Tables, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **kw: Any) -> Any:
    args: dict[str, Any] = {"block_size": 32, "scale": 1.0, "causal": True} | kw
    rows = args.pop("rows", torch.zeros(q.shape[0], dtype=torch.int32))
    return triton_ops.attend_extend(q, k, v, rows, tables.row_base, tables.row_len, **args)


@pytest.mark.parametrize("heads", [33, 3])
def test_b22_heads_that_do_not_divide(tables: Tables, heads: int) -> None:
    with pytest.raises(ValueError, match=f"{heads} and 2"):
        decode(tables, torch.zeros(1, heads, 1, 16))
    new = torch.zeros(1, 2, 4, 16)
    with pytest.raises(ValueError, match=f"{heads} and 2"):
        extend(tables, torch.zeros(1, heads, 4, 16), new, new)


@pytest.mark.parametrize("dim", [4, 8, 257])
def test_head_dims_out_of_range(tables: Tables, dim: int) -> None:
    good, bad = torch.zeros(1, 2, 1, 16), torch.zeros(1, 2, 1, dim)
    with pytest.raises(ValueError, match=f"head_dim_k must be 16..256, got {dim}"):
        decode(tables, bad)
    with pytest.raises(ValueError, match=f"head_dim_v must be 16..256, got {dim}"):
        decode(tables, good, head_dim_v=dim)
    with pytest.raises(ValueError, match=f"head_dim_v must be 16..256, got {dim}"):
        extend(tables, good, good, bad)
    rows = torch.zeros(1, dtype=torch.int32)
    with pytest.raises(ValueError, match=f"head_dim_v must be 16..256, got {dim}"):
        triton_ops.append(good, bad, rows, tables.row_base, tables.row_len, 32)
    wide = torch.zeros(1, 2, 1, dim * 2 - 1)  # latents may have 512 channels
    with pytest.raises(ValueError, match=f"head_dim_k must be 16..512, got {wide.shape[3]}"):
        triton_ops.append(wide, good, rows, tables.row_base, tables.row_len, 32)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int8, torch.float8_e4m3fn])
def test_other_dtypes(tables: Tables, dtype: torch.dtype) -> None:
    x, y = torch.zeros(1, 2, 1, 16, dtype=dtype), torch.zeros(1, 2, 1, 16)
    with pytest.raises(TypeError, match=str(dtype)):
        decode(tables, x)
    with pytest.raises(TypeError, match=str(dtype)):
        decode(tables, y, kv_dtype=dtype)
    with pytest.raises(TypeError, match=str(dtype)):
        extend(tables, y, x, x)
    rows = torch.zeros(1, dtype=torch.int32)
    with pytest.raises(TypeError, match=str(dtype)):
        triton_ops.append(x, x, rows, tables.row_base, tables.row_len, 32)


@pytest.mark.parametrize(
    ("kwargs", "error", "match"),
    [
        ({"block_size": 48}, ValueError, "multiple of 32, got 48"),
        ({"block_size": 0}, ValueError, "got 0"),
        ({"splits": -1}, ValueError, "-1"),
        ({"rows": torch.zeros(2, dtype=torch.int32)}, ValueError, r"\[1\], got \[2\]"),
        ({"rows": torch.zeros(1, dtype=torch.int64)}, TypeError, "int32, got torch.int64"),
        ({"kv_mask": torch.zeros(2, 9, dtype=torch.bool)}, ValueError, r"batch=1.*\[2, 9\]"),
        ({"kv_mask": torch.zeros(1, 9)}, TypeError, "float32"),
        ({"bias": torch.zeros(1, 3, 1, 9)}, ValueError, r"\[1, 3, 1, 9\]"),
        ({"bias": torch.zeros(1, 9)}, ValueError, r"\[1, 9\]"),
        ({"bias": torch.zeros(1, 1, 1, 9, dtype=torch.int64)}, TypeError, "int64"),
        ({"row_heat": torch.zeros(1, dtype=torch.int64)}, ValueError, "max_blocks"),
        ({"softcap": -1.0}, ValueError, r"softcap must be 0.*got -1.0"),
        ({"softcap": float("inf")}, ValueError, "got inf"),
        ({"softcap": float("nan")}, ValueError, "got nan"),
        ({"window": -1}, ValueError, "window must be 0.*got -1"),
        ({"window": 2.0}, TypeError, "window must be an int, got float"),
        ({"sinks": torch.zeros(1)}, ValueError, r"sinks must be \[heads\] = \[2\], got \[1\]"),
        ({"sinks": torch.zeros(2, 1)}, ValueError, r"got \[2, 1\]"),
        ({"sinks": torch.zeros(2).double()}, TypeError, "sinks must be.*float64"),
        ({"sinks": torch.zeros(2, device="meta")}, ValueError, "sinks are on meta"),
        ({"out": torch.zeros(1, 2, 1, 17)}, ValueError, r"\[1, 2, 1, 16\].*\[1, 2, 1, 17\]"),
        ({"out": torch.zeros(1, 2, 1, 32)[..., ::2]}, ValueError, "contiguous"),
    ],
)
def test_decode_refusals(tables: Tables, kwargs: dict, error: type, match: str) -> None:
    with pytest.raises(error, match=match):
        decode(tables, torch.zeros(1, 2, 1, 16), **kwargs)


def test_more_refusals(tables: Tables) -> None:
    q = torch.zeros(1, 2, 4, 16)
    with pytest.raises(ValueError, match="got 4: use attend_extend"):
        decode(tables, q)
    with pytest.raises(ValueError, match="k_new"):
        extend(tables, q, q[:, :, :3], q)
    with pytest.raises(ValueError, match="differ"):
        extend(tables, q, q, q[:, :, :3])
    with pytest.raises(TypeError, match="one dtype"):
        extend(tables, q, q, q.half())
    for bad in ({"softcap": -1.0}, {"window": -1}, {"sinks": torch.zeros(3)}):
        with pytest.raises(ValueError, match=f"{next(iter(bad))} must be"):
            extend(tables, q, q, q, **bad)
    with pytest.raises(ValueError, match=r"window \(5\) needs causal=True"):
        extend(tables, q, q, q, window=5, causal=False)
    with pytest.raises(ValueError, match=r"chunk \(5\) needs causal=True"):
        extend(tables, q, q, q, chunk=5, causal=False)
    for call in (lambda **o: extend(tables, q, q, q, **o),
                 lambda **o: decode(tables, q[:, :, :1], **o)):  # fmt: skip
        with pytest.raises(ValueError, match=r"window \(5\) and chunks \(6\)"):
            call(window=5, chunk=6)
        with pytest.raises(ValueError, match="chunk must be"):
            call(chunk=-1)
    for k in (q[:, :, :3], None):
        with pytest.raises(ValueError, match="as many new keys as queries"):
            extend(tables, q, k, k, kv_heads=2, head_dim_v=16)
    with pytest.raises(ValueError, match="both be None"):
        extend(tables, q, q, None)
    with pytest.raises(ValueError, match="kv_heads and head_dim_v must be given"):
        extend(tables, q, None, None, causal=False, kv_heads=2)
    with pytest.raises(ValueError, match="2 and 3"):
        extend(tables, q, None, None, causal=False, kv_heads=3, head_dim_v=16)
    with pytest.raises(ValueError, match="head_dim_v must be 16..256, got 15"):
        extend(tables, q, None, None, causal=False, kv_heads=2, head_dim_v=15)
    with pytest.raises(TypeError, match="kv_dtype.*float64"):
        extend(tables, q, None, None, causal=False, kv_heads=2, head_dim_v=16,
               kv_dtype=torch.float64)  # fmt: skip
    rows = torch.zeros(1, dtype=torch.int32)
    with pytest.raises(TypeError, match="one dtype"):
        triton_ops.append(q, q.half(), rows, tables.row_base, tables.row_len, 32)
    with pytest.raises(ValueError, match="differ"):
        triton_ops.append(q, q[:, :1], rows, tables.row_base, tables.row_len, 32)


def test_tiles_divide_blocks() -> None:
    assert fit_tile(64, 256) == 64 and fit_tile(64, 32) == 32 and fit_tile(128, 96) == 32
    for bad in (16, 48):
        with pytest.raises(ValueError, match=str(bad)):
            fit_tile(bad, 256)


def test_default_tiles_fit_the_shared_memory_of_an_h200() -> None:
    limit = 227 * 1024
    many = (1, 64)
    for dtype in (torch.float32, torch.bfloat16):
        for dk in (16, 40, 64, 80, 96, 128, 192, 256):
            for dv in (16, 128, 256):
                for kv in (dtype, torch.float16):
                    width = config_module.next_power_of_2(dk) + config_module.next_power_of_2(dv)
                    for group, pairs, size in itertools.product((1, 4), many, (32, 256)):
                        c = decode_config(dtype, kv, dk, dv, group, None, pairs, size)
                        used = c.num_stages * c.block_n * width * kv.itemsize
                        # products in fp32 take what they need
                        half = kv == dtype == torch.bfloat16
                        assert used * (c.programs_per_sm if half else 1) < limit
                    e = extend_config(dtype, kv, dk, dv, 4096, False)
                    used = e.num_stages * e.block_n * width * kv.itemsize
                    assert used + e.block_m * width * dtype.itemsize < limit


@pytest.mark.parametrize("pairs", [4, 8, 64, 128, 160, 1000])
def test_splits_fill_the_last_wave(pairs: int) -> None:
    slots = 264
    splits = balanced_splits(pairs, slots)
    waves = -(-pairs * splits // slots)
    assert 1 <= splits <= 128 and (splits == 1 or pairs * splits / (waves * slots) > 0.85)


def test_splits_for_is_a_function_of_shapes() -> None:
    cpu = torch.device("cpu")
    assert triton_ops.splits_for(1, 8, cpu) == triton_ops.splits_for(64, 8, cpu) > 0


def test_splits_follow_how_many_programs_fit_an_sm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config_module, "_sm_count", lambda index: 132)
    gpu = torch.device("cuda", 0)

    def splits(pairs: int, per_sm: int) -> int:
        return triton_ops.splits_for(pairs, 1, gpu, per_sm)

    assert [splits(pairs, 1) for pairs in (64, 128, 512)] == [2, 1, 1]
    assert [splits(pairs, 2) for pairs in (8, 4)] == [32, 65]
    assert [splits(pairs, 3) for pairs in (32, 40, 160, 256, 1)] == [12, 9, 3, 1, 128]


def test_import_needs_no_triton() -> None:
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import triton_ops, triton_ops.reference\n"
        "try:\n    triton_ops.append\n"
        "except ImportError:\n    print('lazy')\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout.strip() == "lazy", result.stderr


def test_names_are_functions_however_modules_were_imported() -> None:
    code = (
        "import triton_ops.attend_decode, triton_ops.append, triton_ops.merge\n"
        "import triton_ops\n"
        "print(all(callable(getattr(triton_ops, n)) for n in triton_ops.__all__))\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout.strip() == "True", result.stderr
    with pytest.raises(AttributeError, match="nothing"):
        triton_ops.nothing  # noqa: B018
