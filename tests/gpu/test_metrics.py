# SPDX-License-Identifier: Apache-2.0
"""Metrics of caches on a GPU: copies timed by CUDA events."""

from __future__ import annotations

import pytest

from kvpass.metrics.page import page
from tests.runtime.harness import BLOCK, Driver

pytestmark = pytest.mark.gpu


def test_copies_are_timed_each_way():
    driver = Driver(device="cuda", hot="4MiB")
    driver.append(3 * BLOCK)
    driver.manager.settle()
    driver.manager.place(driver.batch, lambda *_: False)
    driver.manager.place(driver.batch, lambda *_: True)
    (found,) = [s for s in page().managers if s.manager == driver.manager.number]
    assert found.device == "cuda:0"
    counters = found.counters
    assert counters.stored_bytes == counters.loaded_bytes == 6 * driver.geometry.payload_bytes
    assert 0 < counters.store_seconds < 1
    assert 0 < counters.load_seconds < 1
    assert found.link.store > 0
    assert found.link.load > 0
