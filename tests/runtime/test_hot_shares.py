# SPDX-License-Identifier: Apache-2.0
"""Sequences under pressure hold the shares of the hot arena that their weights say."""

from __future__ import annotations

import pytest
import torch

import kvpass
from kvpass.runtime.manager import Manager
from tests.runtime.harness import BLOCK, Driver


def held(driver: Driver) -> int:
    return sum(block.hot is not None for row in driver.batch.blocks for b in row for block in b)


def flat_queries(driver: Driver) -> torch.Tensor:
    """Queries that see all blocks alike, so that every one is accessed in every step."""
    return torch.zeros(driver.batch.size, 6, 1, driver.geometry.head_dim_k)


def pressed(weights: list[float], blocks: int = 24, slots: int = 40) -> list[Driver]:
    manager = kvpass.Manager(
        device="cpu", hot=slots * 8192, cold="8MiB", block_size=BLOCK, heat_interval=4,
        gpu_threshold=1.0, resident_tokens=0, resident_ratio=0.1,
    )  # fmt: skip
    drivers = [Driver(manager=manager, layers=2) for _ in weights]
    for driver, qos in zip(drivers, weights, strict=True):
        driver.batch.service.qos = qos
        driver.batch.service.window(1.0)
        driver.append(blocks * BLOCK)
    manager.settle()
    return drivers


def turns(drivers: list[Driver], steps: int) -> None:
    for _ in range(steps):
        for driver in drivers:
            driver.append(1, flat_queries(driver))
            driver.manager.settle()


@pytest.mark.parametrize("order", [(0.9, 0.1), (0.1, 0.9), (0.5, 0.5)])
def test_shares_follow_weights_within_a_tenth(order):
    drivers = pressed(list(order))
    assert drivers[0].geometry.block_bytes == 8192
    turns(drivers, 48)
    weights = [driver.batch.service.weight for driver in drivers]
    slots = sum(map(held, drivers))
    assert slots >= 38
    for driver, weight in zip(drivers, weights, strict=True):
        due = slots * weight / sum(weights)
        assert held(driver) == pytest.approx(due, rel=0.1)
        driver.check()


def test_what_one_does_not_want_the_other_gets():
    drivers = pressed([0.1, 0.9])
    big, small = drivers
    small.manager.crop(small.batch, 3 * BLOCK)
    small.dense = [(k[:, :, : 3 * BLOCK], v[:, :, : 3 * BLOCK]) for k, v in small.dense]
    turns(drivers, 48)
    assert held(small) == 2 * 5  # all it has: 3 blocks and those of the 48 steps
    assert held(big) >= 38 - 10


def test_one_that_comes_gets_its_share_from_one_that_is_there():
    first = pressed([0.5])[0]
    turns([first], 16)
    before = held(first)
    assert before >= 38
    second = Driver(manager=first.manager, layers=2)
    second.append(24 * BLOCK)
    turns([first, second], 48)
    assert held(first) == pytest.approx(held(second), rel=0.1)
    for driver in (first, second):
        driver.check()


def test_the_snapshot_says_what_is_due_and_held():
    drivers = pressed([0.9, 0.1])
    turns(drivers, 24)
    manager: Manager = drivers[0].manager
    uses = manager.snapshot().by_sequence
    shares = [use.fair_share for use in uses]
    assert sum(shares) == pytest.approx(1, abs=0.02)
    assert shares[0] / shares[1] == pytest.approx(0.93 / 0.37, rel=0.05)
    for use in uses:
        assert use.balance == pytest.approx(1, abs=0.1)
