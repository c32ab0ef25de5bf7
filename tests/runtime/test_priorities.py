# SPDX-License-Identifier: Apache-2.0
"""Who gives way when the hot tier is full: by priority, never in turns, and never for ever."""

from __future__ import annotations

import time
from collections import Counter

import pytest
import torch

import kvpass
from kvpass.errors import OutOfMemoryError
from kvpass.runtime.batch import Batch, Block
from kvpass.runtime.manager import Manager
from tests.runtime import invariants
from tests.runtime.harness import BLOCK, Driver
from tests.runtime.test_hot_shares import held, turns

BYTES = 8192
SLOTS = 40
INTERVAL = 4


def crowded(slots: int = SLOTS, cold: int = 1024) -> Manager:
    return kvpass.Manager(
        device="cpu", hot=slots * BYTES, cold=cold * BYTES, block_size=BLOCK,
        heat_interval=INTERVAL, gpu_threshold=1.0, resident_tokens=0, resident_ratio=0.1,
    )  # fmt: skip


class Seeded(Driver):
    """What it appends depends on its seed and its steps alone, not on who runs beside it."""

    def __init__(self, seed: int, qos: float, manager: Manager, layers: int = 2) -> None:
        self.numbers = torch.Generator().manual_seed(seed)
        super().__init__(manager=manager, layers=layers)
        self.batch.service.qos = qos
        self.batch.service.window(1.0)
        self.outputs: list[torch.Tensor] = []

    def random(self, tokens: int, heads: int, width: int) -> torch.Tensor:
        return torch.randn(self.batch.size, heads, tokens, width, generator=self.numbers)

    def append(self, tokens: int, queries: torch.Tensor | None = None) -> list[torch.Tensor]:
        outputs = super().append(tokens, queries)
        self.outputs += outputs
        return outputs


class Demotions:
    """Blocks that give up their hot slots, and their batches, in order."""

    def __init__(self, manager: Manager, patch: pytest.MonkeyPatch) -> None:
        self.blocks: list[Block] = []  # kept alive, so that no other block gets the same identity
        self.batches: list[Batch] = []
        demote = manager.mover.demote

        def noted(block: Block) -> None:
            self.blocks.append(block)
            self.batches.append(block.owners[0][0])
            demote(block)

        patch.setattr(manager.mover, "demote", noted)


@pytest.mark.parametrize("lows", [1, 2])
def test_one_of_high_priority_takes_its_share_from_those_of_low_priority(lows, monkeypatch):
    manager = crowded()
    low = [Seeded(seed, 0.1, manager) for seed in range(lows)]
    for driver in low:
        driver.append(24 * BLOCK)
    turns(low, 24)
    assert sum(map(held, low)) == SLOTS
    demotions = Demotions(manager, monkeypatch)
    high = Seeded(9, 0.9, manager)
    high.append(23 * BLOCK + 5)  # the unfinished blocks need slots at once
    everyone = [*low, high]
    turns(everyone, 2 * INTERVAL)
    weights = [driver.batch.service.weight for driver in everyone]
    for driver, weight in zip(everyone, weights, strict=True):
        assert held(driver) == pytest.approx(SLOTS * weight / sum(weights), abs=1)
    first = demotions.batches[:10]
    assert len(first) == 10
    assert high.batch not in first
    turns(everyone, 40)
    for seed, driver in enumerate(low):
        driver.check()
        alone = Seeded(seed, 0.1, crowded())
        alone.append(24 * BLOCK)
        turns([alone], 24 + 2 * INTERVAL + 40)
        assert len(alone.outputs) == len(driver.outputs)
        assert all(map(torch.equal, alone.outputs, driver.outputs))


def moved(manager: Manager) -> tuple[int, int]:
    return manager.counters.demoted_blocks, manager.counters.loaded_blocks


@pytest.mark.parametrize("count", [2, 3])
def test_equal_priorities_that_have_settled_move_no_block(count):
    """The same accesses a hundred times: the lengths stay, as each new token is cropped again."""
    manager = crowded()
    drivers = [Seeded(seed, 0.5, manager) for seed in range(count)]

    def again(steps: int) -> None:
        for _ in range(steps):
            turns(drivers, 1)
            for driver in drivers:
                length = driver.batch.lengths[0] - 1
                manager.crop(driver.batch, length)
                driver.dense = [(k[:, :, :length], v[:, :, :length]) for k, v in driver.dense]

    for driver in drivers:
        driver.append(24 * BLOCK + 3)
    again(48)
    before = moved(manager)
    again(100)
    # Nobody's worth changes, and a share is at most one slot from a whole number of them.
    assert sum(moved(manager)) - sum(before) <= 2
    assert sum(map(held, drivers)) == SLOTS
    for driver in drivers:
        driver.check()


def test_equal_priorities_that_grow_move_blocks_for_new_ones_only():
    manager = crowded()
    drivers = [Seeded(seed, 0.5, manager) for seed in range(2)]
    for driver in drivers:
        driver.append(24 * BLOCK)
    turns(drivers, 48)
    before, blocks = moved(manager), manager.columns.live
    turns(drivers, 100)
    demoted, loaded = (now - then for now, then in zip(moved(manager), before, strict=True))
    new = manager.columns.live - blocks
    assert new >= 12
    # Each takes one slot; where it was another sequence's, that one gets a slot back later.
    assert loaded <= new + 2
    assert demoted <= new + loaded


def test_overload_starves_nobody_and_picks_no_block_again_and_again(monkeypatch):
    slots, turns_each = 32, 250
    manager = crowded(slots)
    drivers = [Seeded(seed, 0.5, manager, layers=1) for seed in range(4)]
    for driver in drivers:
        driver.append(20 * BLOCK)
    demotions = Demotions(manager, monkeypatch)
    for step in range(turns_each):
        turns(drivers, 1)
        if step >= 2 * INTERVAL:
            assert min(map(held, drivers)) >= slots // len(drivers) // 2
    started = turns_each // BLOCK + 1
    times = Counter(map(id, demotions.blocks))
    assert len(times) >= 4 * started, "hardly any block was demoted: no overload"
    # Once for each block that its row begins; a block that bounces goes once a window.
    assert max(times.values()) <= started < turns_each // INTERVAL // 4
    for driver in drivers:
        driver.check()


def full_of_residents(cold: int) -> tuple[Manager, list[Driver]]:
    """A tier of 24 slots, all of residents: what is promised was promised to fewer sequences."""
    manager = kvpass.Manager(
        device="cpu", hot=24 * BYTES, cold=cold * BYTES, block_size=BLOCK, page_size=BYTES,
        resident_tokens=10**6, gpu_threshold=1.0,
    )  # fmt: skip
    drivers = []
    for blocks in (12, 6, 3):
        drivers.append(Driver(manager=manager, layers=1))
        drivers[-1].append(blocks * BLOCK)
    for _ in range(3):
        drivers.append(Driver(manager=manager, layers=1))
        drivers[-1].append(5)  # not one token, which would end a window and with it residency
        drivers[-1].append(BLOCK - 5)
    manager.settle()
    return manager, drivers


def residents(manager: Manager) -> int:
    columns = manager.columns
    ids = columns.owned()
    return int((columns.resident[ids] & columns.has_hot[ids]).sum())


def test_a_tier_full_of_residents_serves_one_more_block_at_once():
    manager, drivers = full_of_residents(cold=64)
    assert residents(manager) == 24 == sum(map(held, drivers))
    begun = time.monotonic()
    drivers.append(Driver(manager=manager, layers=1))
    drivers[-1].append(5)
    assert time.monotonic() - begun < 1
    assert held(drivers[-1]) == 1
    assert sum(map(held, drivers)) == 24
    assert moved(manager) == (1, 0)
    invariants.check(manager, [driver.batch for driver in drivers])
    for driver in drivers:
        driver.check()


def test_both_tiers_full_of_residents_refuse_by_name_until_a_sequence_goes():
    manager, drivers = full_of_residents(cold=31)
    assert residents(manager) == 24
    filler, late = Driver(manager=manager, layers=1), Driver(manager=manager, layers=1)
    filler.append(30 * BLOCK)  # takes the place of the cold copies of what is hot too
    drivers.append(filler)

    def refused(tokens: int) -> None:
        batches = [driver.batch for driver in (*drivers, late)]
        invariants.check(manager, batches)
        live, used = manager.columns.live, manager.tiers.hot.used + manager.tiers.cold.used
        begun = time.monotonic()
        with pytest.raises(OutOfMemoryError, match=r"\(hot 192 KiB, cold 248 KiB\)"):
            late.append(tokens)
        assert time.monotonic() - begun < 1
        assert late.batch.lengths == [0] and late.batch.blocks == [[[]]]
        assert manager.columns.live == live
        # A copy that is there twice may have been given up for it.
        assert manager.tiers.hot.used + manager.tiers.cold.used <= used
        invariants.check(manager, batches)

    refused(3 * BLOCK + 5)  # there is room for one block: the first of them is given up again
    filler.append(BLOCK)
    refused(5)
    refused(BLOCK)
    manager.release(drivers.pop(1).batch)
    late.append(3 * BLOCK + 5)
    for driver in (*drivers, late):
        driver.check()
    invariants.check(manager, [driver.batch for driver in (*drivers, late)])
