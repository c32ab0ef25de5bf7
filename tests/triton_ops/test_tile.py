# SPDX-License-Identifier: Apache-2.0
"""Tiles that are asked for: what of them is run, and that the answer stays the same."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import triton_ops
from tests.triton_ops.paged import check_decode, check_extend, ragged
from triton_ops import config
from triton_ops._checks import next_power_of_2

HALF = torch.float16
DTYPES = st.sampled_from([torch.float32, torch.float16, torch.bfloat16])
DIMS = st.integers(16, 256)
TILES = st.tuples(st.sampled_from([16, 32, 64, 128]), st.sampled_from([32, 64, 128]))


@given(DTYPES, DTYPES, DIMS, DIMS, st.integers(1, 64), TILES)
def test_what_decode_runs_of_a_tile(q, kv, dk, dv, group, tile) -> None:
    cut = config.decode_config(q, kv, dk, dv, group, tile)
    assert cut.block_n in (32, 64, 128)
    if q != kv or q == torch.float32:
        assert cut == config.decode_config(q, kv, dk, dv, group)
        return
    assert cut.block_n <= tile[1]
    stage = (next_power_of_2(dk) + next_power_of_2(dv)) * kv.itemsize
    assert cut.num_stages * cut.block_n * stage <= 104 * 1024
    larger = 2 * cut.block_n
    assert larger > tile[1] or 2 * larger * stage > 104 * 1024, "no more than needed is cut off"


@given(DTYPES, DTYPES, DIMS, DIMS, st.integers(1, 4096), st.booleans(), TILES)
def test_what_extend_runs_of_a_tile(q, kv, dk, dv, rows, operands, tile) -> None:
    cut = config.extend_config(q, kv, dk, dv, rows, operands, tile)
    measured = config.extend_config(q, kv, dk, dv, rows, operands)
    assert cut.block_m == min(measured.block_m, tile[0])
    assert 32 <= cut.block_n <= (min(tile[1], 64) if operands else tile[1])
    stage = (next_power_of_2(dk) + next_power_of_2(dv)) * kv.itemsize
    if q == kv != torch.float32:
        assert cut.num_stages * cut.block_n * stage <= 104 * 1024


@given(DTYPES, DTYPES, st.integers(16, 512), st.integers(16, 128), st.integers(1, 4096), TILES)
def test_what_latents_run_of_a_tile(q, kv, latent, rope, rows, tile) -> None:
    cut = config.latent_config(q, kv, latent, rope, rows, False, tile)
    measured = config.latent_config(q, kv, latent, rope, rows, False)
    assert (cut.block_m, cut.block_n) == (
        min(measured.block_m, tile[0]),
        min(measured.block_n, tile[1]),
    )


def cuts(monkeypatch: pytest.MonkeyPatch, module: str, name: str) -> list[Any]:
    """What launches to come are cut to."""
    home = sys.modules[f"triton_ops.{module}"]
    real, seen = getattr(home, name), []

    def note(*args: Any) -> Any:
        seen.append(real(*args))
        return seen[-1]

    monkeypatch.setattr(home, name, note)
    return seen


@pytest.mark.parametrize("columns", [32, 64, 128])
def test_decode_with_a_tile(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    triton_ops.attend_decode  # noqa: B018  # loads the module
    seen = cuts(monkeypatch, "attend_decode", "decode_config")
    keys, values = ragged([130, 7], 2, 16, HALF), ragged([130, 7], 2, 16, HALF)
    check_decode(torch.randn(2, 4, 1, 16).to(HALF), keys, values, 128, tile=(16, columns))
    assert {cut.block_n for cut in seen} == {columns}


@pytest.mark.parametrize("tile", [(16, 32), (32, 64), (64, 128)])
@pytest.mark.parametrize("causal", [False, True])
def test_extend_with_a_tile(
    monkeypatch: pytest.MonkeyPatch, tile: tuple[int, int], causal: bool
) -> None:
    triton_ops.attend_extend  # noqa: B018  # loads the module
    seen = cuts(monkeypatch, "attend_extend", "extend_config")
    keys, values = ragged([130, 7], 1, 16, HALF), ragged([130, 7], 1, 16, HALF)
    q = torch.randn(2, 3, 40, 16).to(HALF)
    k, v = torch.randn(2, 2, 1, 40, 16).to(HALF)
    check_extend(q, k, v, keys, values, 128, causal=causal, tile=tile)
    assert {(cut.block_m, cut.block_n) for cut in seen} == {tile}
