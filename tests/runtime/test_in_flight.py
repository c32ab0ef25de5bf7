# SPDX-License-Identifier: Apache-2.0
"""Sequences that change, end or are read while copies of their blocks are under way."""

from __future__ import annotations

import gc

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvpass.errors import CapacityError, OutOfMemoryError
from kvpass.runtime.geometry import BlockGeometry
from tests.runtime import invariants
from tests.runtime.harness import BLOCK, Driver
from tests.runtime.mirror import Owner
from tests.runtime.scheduler import ManualCopier, scheduled

BYTES = BlockGeometry(2, 16, 16, torch.float32, BLOCK).block_bytes


@pytest.fixture
def driver():
    """One layer, and a copy engine that does what the test says."""
    driver = Driver(layers=1, hot=40 * BYTES, cold=400 * BYTES, poison=True, resident_tokens=0)
    with scheduled(driver.manager, ManualCopier()):
        yield driver


def _crop(driver: Driver, length: int) -> None:
    driver.manager.crop(driver.batch, length)
    driver.dense = [(k[:, :, :length], v[:, :, :length]) for k, v in driver.dense]


@pytest.mark.parametrize("copied", [False, True])
@pytest.mark.parametrize("kind", ["store", "load"])
@pytest.mark.parametrize("fails", [False, True])
def test_the_owner_goes_while_a_copy_is_under_way(driver, kind, copied, fails):
    """B45: what is free at the end is what was free at the start, however the copy ends."""
    manager, copier = driver.manager, driver.manager.mover.copier
    other = Driver(manager=manager, layers=1)
    other.append(5)
    driver.append(3 * BLOCK)
    if kind == "load":
        manager.settle()
        manager.place(driver.batch, lambda *_: False)
        with manager._section.lock:
            for block in driver.batch.blocks[0][0]:
                assert manager.mover.promote(block)
    assert copier.depth() == 3
    if copied:
        copier.copy(1)
    owner = Owner()
    manager.lease(owner, driver.batch)
    del owner
    invariants.check(manager, [other.batch])
    assert copier.depth() == 3, "a copy under way still has its slots"
    other.append(3 * BLOCK)  # new blocks, which must not lie where a copy goes
    copier.failures = 3 * fails
    copier.close()
    other.check()
    invariants.check(manager, [other.batch])
    manager.release(other.batch)
    invariants.check_empty(manager)


def test_a_copy_that_ends_twice_counts_once(driver):
    """B45."""
    manager, copier = driver.manager, driver.manager.mover.copier
    driver.append(BLOCK)
    (move,) = manager.mover.in_flight
    copier.complete(0)
    move.finish()
    manager.settle()
    move.finish(error=OSError("late"))
    manager.settle()
    assert manager.counters.stored_blocks == 1
    assert manager.counters.failed_moves == 0
    invariants.check(manager, [driver.batch])


@given(st.lists(st.tuples(st.sampled_from(["store", "load"]), st.integers(0, 7)), max_size=30))
def test_a_block_is_read_whole_while_it_is_copied(actions):
    """B54: readers see the old copy until all of the new one is there."""
    driver = Driver(layers=1, hot=40 * BYTES, cold=400 * BYTES, poison=True, resident_tokens=0)
    manager = driver.manager
    with scheduled(manager, ManualCopier()) as copier:
        driver.append(4 * BLOCK)
        for kind, number in actions:
            block = driver.batch.blocks[0][0][number % 4]
            if kind == "load" and block.hot and block.cold and not block.move:
                manager.place(driver.batch, lambda _, s, index, n=number % 4: index != n)
                with manager._section.lock:
                    assert manager.mover.promote(block)
            copier.copy(number)
            driver.check()
            copier.complete(number + 1)
            driver.check()
            driver.append(1)
            driver.check()


@pytest.mark.parametrize("limit", [1, 4])
def test_more_blocks_than_may_be_in_flight_arrive_in_rounds(limit):
    """B44: ten blocks through an engine that takes four at a time."""
    driver = Driver(layers=1, hot=40 * BYTES, cold=400 * BYTES)
    manager = driver.manager
    with scheduled(manager, ManualCopier(limit)) as copier:
        driver.append(10 * BLOCK)
        assert copier.depth() == limit
        manager.settle()
        manager.place(driver.batch, lambda *_: False)
        assert manager.counters.stored_blocks == manager.counters.demoted_blocks == 10
        manager.place(driver.batch, lambda *_: True)
        assert manager.counters.loaded_blocks == 10
        assert copier.depth() == manager.snapshot().queue == 0
        driver.check()


def test_more_blocks_than_there_is_room_for_stay_readable_where_they_are(driver):
    """B44: hot has room for four of ten; those that do not fit are read in place."""
    manager = driver.manager
    driver.append(10 * BLOCK)
    manager.settle()
    manager.place(driver.batch, lambda *_: False)
    manager.resize(hot=4 * BYTES)
    manager.place(driver.batch, lambda *_: True)
    assert manager.counters.loaded_blocks == 4
    driver.check()
    invariants.check(manager, [driver.batch])


def test_tiers_full_of_other_sequences_refuse_until_one_goes():
    """B49: an error in bounded time, and the same request succeeds later."""
    first = Driver(layers=1, hot=4 * BYTES, cold=4 * BYTES)
    second = Driver(manager=first.manager, layers=1)
    first.append(7 * BLOCK)
    with pytest.raises(OutOfMemoryError, match=r"both tiers are full .*release caches"):
        second.append(3 * BLOCK)
    first.check()
    invariants.check(first.manager, [first.batch, second.batch])
    first.manager.release(first.batch)
    second.append(3 * BLOCK)
    second.check()


def test_memory_of_a_source_is_not_used_again_before_its_copy_ends(driver):
    """B42: references dropped and memory asked for again right after the launch."""
    manager, copier = driver.manager, driver.manager.mover.copier
    others = []
    for number in range(8):
        other = Driver(manager=manager, layers=1)
        other.append(2 * BLOCK)
        others.append(other)
        if number % 2:
            manager.release(other.batch)
            others.remove(other)
            del other
            gc.collect()
    driver.append(6 * BLOCK)
    while copier.depth():
        copier.copy(3)
        copier.complete(5)
    manager.settle()
    for one in (driver, *others):
        one.check()
        manager.place(one.batch, lambda *_: False)
        one.check()
    invariants.check(manager, [one.batch for one in (driver, *others)])


def test_a_block_written_again_in_a_nested_step_keeps_no_copy_of_before():
    """Crop, then a step in another, with its store under way: that copy would be stale."""
    driver = Driver(layers=2, hot=40 * BYTES, cold=400 * BYTES)
    manager = driver.manager
    with scheduled(manager, ManualCopier()):
        driver.append(BLOCK)
        _crop(driver, BLOCK - 2)
        new = [driver.random(2, 2, 16) for _ in range(4)]
        with manager.step(driver.batch, 2, [0]) as rows, manager.step(driver.batch, 2, [1]):
            for layer in driver.layers:
                torch.ops.kvpass.append(*new[2 * layer :][:2], rows, layer, BLOCK)
        driver.dense = [
            (torch.cat([k, new[2 * i]], 2), torch.cat([v, new[2 * i + 1]], 2))
            for i, (k, v) in enumerate(driver.dense)
        ]
        manager.settle()
        invariants.check(manager, [driver.batch])
        manager.place(driver.batch, lambda *_: False)
        assert manager.snapshot().hot_bytes == 0
        driver.check()


def test_a_batch_that_is_given_up_in_a_step_goes_when_it_ends(driver):
    manager = driver.manager
    driver.append(BLOCK + 1)
    with manager.step(driver.batch, 1, [0]) as rows:
        manager.release(driver.batch)
        address = driver.batch.blocks[0][0][1].slot.address
        other = Driver(manager=manager, layers=1)
        other.append(40)
        assert all(b.slot.address != address for b in other.batch.blocks[0][0])
        k = driver.random(1, 2, 16)
        torch.ops.kvpass.append(k, k, rows, 0, BLOCK)
    manager.snapshot()
    assert driver.batch.released
    other.check()
    manager.release(other.batch)
    invariants.check_empty(manager)


def test_blocks_that_wait_for_room_below_go_with_their_sequences():
    """Memory stays flat where nothing can be written through."""
    driver = Driver(layers=1, hot=40 * BYTES, cold=1)
    driver.append(3 * BLOCK)
    for _ in range(30):
        other = Driver(manager=driver.manager, layers=1)
        other.append(4 * BLOCK)
        driver.manager.release(other.batch)
        assert driver.manager.snapshot().backlog == 3
    for _ in range(5):
        _crop(driver, 2 * BLOCK + 1)
        driver.append(BLOCK - 1)
        assert driver.manager.snapshot().backlog == 3
    driver.manager.resize(cold=400 * BYTES)
    driver.append(1)
    driver.manager.settle()
    assert driver.manager.snapshot().backlog == 0
    invariants.check(driver.manager, [driver.batch])


@pytest.mark.parametrize("length", [-1, -BLOCK])
def test_a_fork_of_less_than_nothing_is_refused(driver, length):
    driver.append(5)
    with pytest.raises(CapacityError, match=f"fork of {length} tokens"):
        driver.manager.fork(driver.batch, [0], length)
    invariants.check(driver.manager, [driver.batch])
