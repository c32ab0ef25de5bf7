# SPDX-License-Identifier: Apache-2.0
"""Tiers on a GPU: blocks in HBM and in pinned host memory, moved between steps."""

from __future__ import annotations

import random

import pytest
import torch

from kvpass.runtime.batch import Batch
from kvpass.runtime.manager import Manager
from tests.runtime.harness import Driver

pytestmark = pytest.mark.gpu
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def scramble(seed: int):
    rng = random.Random(seed)

    def before_step(manager: Manager, batch: Batch) -> None:
        manager.place(batch, lambda *_: rng.random() < 0.5)

    return before_step


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("width", [64, 128, 40])
def test_placement_and_timing_change_no_bit(dtype, width):
    def decode(place=None, before_step=None, hot="4MiB", check=False) -> list[bytes]:
        torch.manual_seed(11)
        torch.cuda.manual_seed(11)
        driver = Driver(size=2, width=width, dtype=dtype, hot=hot, device="cuda")
        driver.append(150)
        if place is not None:
            driver.manager.place(driver.batch, place)
        driver.manager.before_step = before_step
        outputs = []
        for step in (1,) * 40 + (9,):
            queries = driver.random(step, 6, width)
            out = driver.append(step, queries)
            outputs += out
            if check:
                for layer in driver.layers:
                    error = (out[layer] - driver.attention(queries, layer)).abs().max().item()
                    assert error <= TOLERANCE[dtype]
        driver.check()
        return [x.contiguous().view(torch.uint8).cpu().numpy().tobytes() for x in outputs]

    hot = decode(check=True)
    assert decode(lambda *_: False) == hot
    assert decode(lambda *_: False, hot=1) == hot
    rng = random.Random(3)
    assert decode(lambda *_: rng.random() < 0.4) == hot
    assert decode(before_step=scramble(1)) == hot


def test_poison_shows_no_stale_read_while_two_batches_push_each_other_out():
    torch.manual_seed(0)
    first = Driver(size=2, poison=True, hot="256KiB", heat_interval=4, device="cuda")
    second = Driver(size=2, manager=first.manager)
    other = torch.cuda.Stream()
    for _ in range(200):
        for driver, stream in ((first, torch.cuda.current_stream()), (second, other)):
            with torch.cuda.stream(stream):
                queries = driver.random(1, 6, 16)
                out = driver.append(1, queries)
                assert torch.isfinite(out[0]).all()
                assert (out[0] - driver.attention(queries, 0)).abs().max() < 1e-5
    counters = first.manager.counters
    assert counters.stored_blocks > 0
    first.check()
    second.check()


def test_a_store_waits_for_the_kernels_that_write_the_block():
    """B41: a block that is written late is copied after it was written."""
    driver = Driver(layers=1, device="cuda")
    g = driver.geometry
    for i in range(1, 60):
        torch.cuda._sleep(2_000_000)
        with driver.manager.step(driver.batch, 32, [0]) as rows:
            k = torch.full((1, g.kv_heads, 32, 16), float(i), device="cuda")
            torch.ops.kvpass.append(k, k, rows, 0, 32)
    driver.manager.place(driver.batch, lambda *_: False)
    k, v = driver.manager.gather(driver.batch, 0, driver.batch.lengths[0])
    expected = torch.arange(1, 60, device="cuda").repeat_interleave(32).float()
    assert torch.equal(k[0, 0, :, 0], expected)
    assert torch.equal(v[0, 1, :, 5], expected)
