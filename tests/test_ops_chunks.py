# SPDX-License-Identifier: Apache-2.0
"""Chunks of the op on a CPU, against plain attention."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvpass.errors import ShapeError
from tests.runtime.harness import BLOCK, Driver
from tests.test_ops import attend, close, plain_attention
from triton_ops.reference import heat_reference, hot_blocks


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=5),
    chunk=st.one_of(st.integers(1, 80), st.sampled_from([BLOCK, 2 * BLOCK, 1000, 1 << 40])),
    softcap=st.sampled_from([0.0, 2.0]),
    padded=st.booleans(),
    sunk=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_steps_of_any_size(lengths, chunk, softcap, padded, sunk, seed):
    torch.manual_seed(seed)
    driver = Driver(layers=1)
    total = sum(lengths)
    q, k, v = (torch.randn(1, h, total, 16) for h in (4, 2, 2))
    options = {"chunk": chunk, "softcap": softcap}
    if padded:
        options["kv_mask"] = torch.rand(1, total) > 0.3
    if sunk:
        options["sinks"] = torch.randn(4)
    expected = plain_attention(q, k, v, **options)
    at = 0
    for n in lengths:
        part = slice(at, at + n)
        out, _ = attend(driver, q[:, :, part], k[:, :, part], v[:, :, part], **options)
        close(out, expected[:, :, part])
        at += n


@pytest.mark.parametrize("chunk", [1, 32, 50, 160])
@pytest.mark.parametrize("tokens", [1, 2, 34])
def test_blocks_before_the_chunk_are_not_touched(chunk, tokens):
    driver = Driver(layers=1)
    attend(driver, *(torch.randn(1, h, 170, 16) for h in (4, 2, 2)))
    q, k, v = (torch.randn(1, h, tokens, 16) for h in (4, 2, 2))
    with driver.manager.step(driver.batch, tokens, [0]) as rows:
        token = torch.ops.kvpass.append(k, v, rows, 0, BLOCK)
        taken = driver.batch.blocks[0][0][: 170 // chunk * chunk // BLOCK]
        kept = [(block.k, block.v) for block in taken]
        assert taken
        for block in taken:
            block._views = None, None  # a touch raises
        out = torch.ops.kvpass.attend(
            q, k, v, token, rows, 0, BLOCK, 0.3, True, None, None, chunk=chunk
        )
        for block, (keys, values) in zip(taken, kept, strict=True):
            block._views = keys, values
    dense = [torch.cat(pair, 2) for pair in zip(driver.dense[0], (k, v), strict=True)]
    close(out, plain_attention(q, *dense, chunk=chunk))


@pytest.mark.parametrize("chunk", [1, 20, 64, 100, 1000])
def test_heat_counts_blocks_of_the_chunk(chunk):
    driver = Driver(layers=1)
    attend(driver, *(torch.randn(1, h, 149, 16) for h in (4, 2, 2)))
    driver.batch.heat.zero_()
    q, k, v = (torch.randn(1, h, 1, 16) for h in (4, 2, 2))
    attend(driver, q, k, v, chunk=chunk)
    last = 149 % chunk + 1  # tokens of the last one's chunk
    shares = heat_reference(q[0, :, 0], driver.dense[0][0][0], scale=0.3, block_size=BLOCK,
                            window=last)  # fmt: skip
    hot = hot_blocks(shares, 150, BLOCK, last)
    unsure = (hot - 1).abs() < 1e-3
    unsure &= shares < 0.999
    counted = driver.batch.heat[0, 0, : hot.shape[1]]
    assert ((counted - (hot >= 1 - 1e-9).sum(0)).abs() <= unsure.sum(0)).all()
    assert counted.sum() > 0


def test_what_does_not_fit_is_refused():
    driver = Driver(layers=1)
    q, k = torch.randn(1, 4, 3, 16), torch.randn(1, 2, 3, 16)
    for words, causal, options in (
        (r"chunk \(3\) needs causal", False, {"chunk": 3}),
        (r"window \(2\) and chunks \(3\)", True, {"chunk": 3, "window": 2}),
        ("chunk must be", True, {"chunk": -3}),
    ):
        with pytest.raises(ShapeError, match=words):
            torch.ops.kvpass.attend(
                q, k, k, torch.empty(0), driver.batch.rows, 0, BLOCK, 0.3, causal, None, None,
                **options,
            )  # fmt: skip
