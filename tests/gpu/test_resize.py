# SPDX-License-Identifier: Apache-2.0
"""Tiers that change their size while a GPU works on them."""

from __future__ import annotations

import pytest
import torch

from kvpass.errors import KVPassWarning
from tests.runtime.harness import BLOCK, Driver

pytestmark = pytest.mark.gpu
PAGE = 2 << 20


def wide(cold: str = "1GiB", **options: object) -> Driver:
    """32 tokens of 8 heads of 128 in float32: slots of 256 KiB."""
    return Driver(device="cuda", heads=2, width=128, cold=cold, **options)


@pytest.mark.parametrize("poison", [False, True])
def test_sizes_change_between_steps_and_no_byte_is_lost(poison):
    driver = wide(hot="64MiB", poison=poison, size=4)
    for tokens, hot in ((300, "8MiB"), (70, "2MiB"), (1, "64MiB"), (500, "16MiB"), (33, "4MiB")):
        driver.append(tokens)
        driver.manager.resize(hot=hot)
        q = driver.random(1, 6, 128)
        outputs = driver.append(1, q)
        for layer, output in enumerate(outputs):
            expected = driver.attention(q, layer)
            assert (output - expected).abs().max() <= 2e-5 * expected.abs().max()
        torch.cuda.synchronize()
        driver.manager.resize(hot=hot)
        budget = driver.manager.tiers.hot
        assert budget.used <= budget.capacity and budget.taken <= budget.capacity
        driver.check()


def test_other_code_that_runs_out_of_memory_gets_slabs_back():
    torch.cuda.empty_cache()
    size = 2 << 30
    driver = wide(cold="3GiB", hot=size, size=8)
    while driver.manager.tiers.hot.taken < int(0.7 * size):
        driver.append(16 * BLOCK)
    driver.manager.settle()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    # Other tests may share the GPU: a limit of the process stands for its memory.
    total = torch.cuda.get_device_properties(0).total_memory
    wanted = 1 << 30
    limit = torch.cuda.memory_reserved() + wanted // 4
    torch.cuda.set_per_process_memory_fraction(limit / total)
    try:
        with (
            pytest.warns(KVPassWarning, match="ran out of memory: the hot tier gives"),
            pytest.raises(torch.OutOfMemoryError),
        ):
            torch.empty(wanted, dtype=torch.uint8, device="cuda")
        other = torch.empty(wanted, dtype=torch.uint8, device="cuda")
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    driver.check()
    driver.append(1)
    driver.check()
    del other
