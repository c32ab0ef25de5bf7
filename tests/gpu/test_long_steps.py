# SPDX-License-Identifier: Apache-2.0
"""Prompts in chunks on a GPU: what is brought and what leaves on side streams is in time."""

from __future__ import annotations

import pytest
import torch

from kvpass.runtime import prompt
from tests.long_steps import chunk, worst
from tests.runtime.harness import Driver

pytestmark = pytest.mark.gpu
SMALL = {"hot": "1MiB", "resident_tokens": 0, "device": "cuda"}
DTYPES = {torch.float32: 2e-3, torch.float16: 6e-3, torch.bfloat16: 4e-2}


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """Steps are long from 32 tokens on."""
    monkeypatch.setattr(prompt, "LONG", 32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 3])
def test_chunks_over_cold_blocks(dtype, size):
    driver = Driver(size=size, layers=6, width=64, dtype=dtype, **SMALL)
    for tokens in (500, 33, 700, 64, 1000, 5, 40):
        assert worst(chunk(driver, tokens)) < DTYPES[dtype]
    torch.cuda.synchronize()
    driver.check()


def test_windows_and_chunks():
    driver = Driver(layers=3, width=64, dtype=torch.float16, **SMALL)
    spans = {1: {"window": 100}, 2: {"chunk": 256}}
    for tokens in (500, 300, 200, 100):
        assert worst(chunk(driver, tokens, spans)) < DTYPES[torch.float16]
    driver.check()


def test_the_place_of_blocks_changes_no_bit():
    got = []
    for hot in ("64MiB", "1MiB"):
        torch.manual_seed(0)
        driver = Driver(layers=3, width=64, dtype=torch.bfloat16, **SMALL | {"hot": hot})
        got.append([out for tokens in (600, 333, 64) for out, _ in chunk(driver, tokens)])
    assert all(torch.equal(a, b) for a, b in zip(*got, strict=True))


def test_many_steps_in_a_row_with_migration():
    """The host runs far ahead of the device, blocks move in between, freed slots are poisoned."""
    driver = Driver(
        layers=4, width=128, dtype=torch.bfloat16, poison=True, **SMALL | {"hot": "4MiB"}
    )
    outs = []
    for step in range(30):
        outs += chunk(driver, 32 + 64 * (step % 5))
        if step % 10 == 9:
            keep = driver.batch.lengths[0] // 2
            driver.manager.crop(driver.batch, keep)
            driver.dense = [(k[:, :, :keep], v[:, :, :keep]) for k, v in driver.dense]
    assert worst(outs) < DTYPES[torch.bfloat16]
    driver.check()


def test_copies_of_cold_blocks_are_freed():
    driver = Driver(layers=4, width=128, dtype=torch.bfloat16, **SMALL)
    for _ in range(3):
        chunk(driver, 512)
    driver.dense = [(k[:, :, :0], v[:, :, :0]) for k, v in driver.dense]
    torch.cuda.synchronize()
    held = []
    for _ in range(4):
        g = driver.geometry
        with driver.manager.step(driver.batch, 64, driver.layers) as rows:
            for layer in driver.layers:
                k = driver.random(64, g.kv_heads, 128)
                token = torch.ops.kvpass.append(k, k, rows, layer, 32)
                torch.ops.kvpass.attend(
                    driver.random(64, 4, 128), k, k, token, rows, layer, 32, 0.3, True, None, None
                )
        torch.cuda.synchronize()
        held.append(torch.cuda.memory_allocated())
    assert held[-1] - held[0] < 1 << 20
