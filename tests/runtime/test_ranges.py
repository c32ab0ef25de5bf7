# SPDX-License-Identifier: Apache-2.0
"""A profiler sees the host work of the runtime by name; without one, no range is opened."""

from __future__ import annotations

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from tests.runtime.harness import BLOCK, Driver


def test_a_profiler_sees_named_ranges() -> None:
    driver = Driver(heat_interval=2)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        driver.append(2 * BLOCK)
        driver.manager.settle()
        for _ in range(3):
            driver.append(1)
    counts = {event.key: event.count for event in profiler.key_averages()}
    assert counts["kvpass::begin"] == counts["kvpass::commit"] == 4
    assert counts["kvpass::migrate"] == 2 * len(driver.layers)  # one store a full block
    assert counts["kvpass::heat"] >= 1
    assert counts["kvpass::publish"] >= 4


def test_no_range_is_opened_where_no_profiler_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> None:
        raise AssertionError(name)

    monkeypatch.setattr(torch.profiler, "record_function", fail)
    driver = Driver()
    driver.append(BLOCK)
    driver.check()
