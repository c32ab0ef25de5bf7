# SPDX-License-Identifier: Apache-2.0
"""Tiers that grow and shrink at run time keep every byte, and give their memory back."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kvpass
from kvpass.errors import ConfigError, KVPassWarning, OutOfMemoryError
from kvpass.runtime.geometry import BlockGeometry
from kvpass.runtime.manager import Manager
from kvpass.runtime.resize import _neighbours
from tests.runtime.harness import BLOCK, Driver

BLOCK_BYTES = BlockGeometry(2, 16, 16, torch.float32, BLOCK).block_bytes
PAGE = 8 * BLOCK_BYTES


def within(manager: Manager) -> bool:
    """Both tiers hold and have taken no more than they may."""
    return not manager.tiers.hot.crowded and not manager.tiers.cold.crowded


def filled(tokens: int = 400, hot: int = 40, cold: int = 400, **options: object) -> Driver:
    driver = Driver(hot=hot * BLOCK_BYTES, cold=cold * BLOCK_BYTES, page_size=PAGE, **options)
    driver.append(tokens)
    driver.manager.settle()
    return driver


def test_a_larger_hot_tier_is_used_by_the_next_blocks():
    driver = filled(hot=4)
    before = driver.manager.snapshot()
    driver.manager.resize(hot=100 * BLOCK_BYTES)
    driver.append(400)
    after = driver.manager.snapshot()
    assert before.hot_bytes <= 4 * BLOCK_BYTES < 10 * BLOCK_BYTES < after.hot_bytes
    assert after.hot_capacity == 100 * BLOCK_BYTES
    driver.check()


@pytest.mark.parametrize("blocks", [17, 9, 3, 1])
def test_a_smaller_hot_tier_gives_its_slabs_back_at_once(blocks):
    driver = filled(resident_tokens=64)
    manager = driver.manager
    taken = manager.tiers.hot.taken
    manager.resize(hot=blocks * BLOCK_BYTES)
    assert within(manager)
    assert manager.tiers.hot.taken <= blocks * BLOCK_BYTES < taken
    arenas = manager.tiers.arenas("hot")
    assert sum(slab.size for arena in arenas for slab in arena.slabs) == manager.tiers.hot.taken
    assert sum(arena.free_slots for arena in arenas) * BLOCK_BYTES == (
        manager.tiers.hot.taken - manager.tiers.hot.used
    )
    driver.check()
    driver.append(1)
    driver.append(70)
    driver.check()
    manager.resize(hot=80 * BLOCK_BYTES)
    driver.append(200)
    driver.check()


def test_slabs_are_emptied_by_moving_their_blocks_together():
    """Half of the slots of each slab are free: a half of the slabs is enough, and stays hot."""
    driver = filled(hot=64)
    manager = driver.manager
    manager.place(driver.batch, lambda layer, sequence, index: index % 2 == 0)
    hot = manager.snapshot().hot_bytes
    used = manager.tiers.hot.used
    assert manager.tiers.hot.taken >= 1.5 * used
    pages = -(-used // PAGE)
    manager.resize(hot=pages * PAGE)
    assert manager.tiers.hot.taken <= pages * PAGE
    assert manager.snapshot().hot_bytes == hot
    driver.check()


def test_no_room_below_is_an_error_that_changes_nothing():
    driver = filled(hot=60, cold=1)
    manager = driver.manager
    before = manager.snapshot()
    with pytest.raises(OutOfMemoryError, match="cold .* has no room for what would have to leave"):
        manager.resize(hot=BLOCK_BYTES)
    after = manager.snapshot()
    assert (after.hot_capacity, after.kv_bytes) == (before.hot_capacity, before.kv_bytes)
    driver.check()
    driver.append(40)
    driver.check()


def test_a_smaller_cold_tier_keeps_what_is_only_there():
    driver = filled(hot=60, cold=400)
    manager = driver.manager
    manager.place(driver.batch, lambda layer, sequence, index: index >= 6)
    only = manager.snapshot().cold_only_bytes // BLOCK_BYTES
    assert only >= 12
    manager.resize(cold=(only + 2) * BLOCK_BYTES)
    assert within(manager)
    driver.check()
    manager.resize(cold=2 * BLOCK_BYTES)  # the rest fits into the hot tier
    assert within(manager)
    driver.check()
    manager.resize(cold=400 * BLOCK_BYTES)
    driver.append(1)  # copies that were given up are written again
    manager.settle()
    assert manager.snapshot().backlog == 0
    driver.check()


def test_what_grows_makes_room_for_what_leaves_the_other():
    driver = filled(hot=60, cold=1)
    driver.manager.resize(hot=2 * BLOCK_BYTES, cold=400 * BLOCK_BYTES)
    assert within(driver.manager)
    driver.check()


def test_a_sequence_in_a_step_stays_where_it_is_until_its_step_ends():
    manager = filled(hot=60).manager
    busy, idle = Driver(manager=manager), Driver(manager=manager)
    busy.append(200)
    idle.append(200)
    inside, done = threading.Event(), threading.Event()
    addresses = []

    def step() -> None:
        with manager.step(busy.batch, 0, busy.layers):
            addresses.append(busy.batch.words.copy())
            inside.set()
            assert done.wait(60)
            addresses.append(busy.batch.words.copy())

    thread = threading.Thread(target=step)
    thread.start()
    assert inside.wait(60)
    try:
        manager.resize(hot=2 * BLOCK_BYTES)
        assert not within(manager)
        idle.check()
    finally:
        done.set()
        thread.join()
    assert (addresses[0] == addresses[1]).all()
    idle.append(1)
    assert within(manager)
    busy.check()
    idle.check()


def test_two_sizes_of_blocks_share_what_is_left():
    manager = filled(hot=120).manager
    other = Driver(manager=manager, heads=3)
    other.append(300)
    manager.resize(hot=20 * BLOCK_BYTES)
    assert within(manager)
    other.check()
    other.append(70)
    other.check()


def test_forked_sequences_share_a_block_that_moves():
    driver = filled(hot=60)
    manager = driver.manager
    fork = manager.fork(driver.batch, [0, 0])
    manager.resize(hot=3 * BLOCK_BYTES)
    assert within(manager)
    for layer in driver.layers:
        k, v = manager.gather(fork, layer, 400)
        for sequence in range(2):
            assert torch.equal(k[sequence], driver.dense[layer][0][0])
            assert torch.equal(v[sequence], driver.dense[layer][1][0])
    driver.check()


@given(
    used=st.lists(st.integers(0, 4), min_size=1, max_size=9),
    wanted=st.integers(1, 9),
    shut=st.sets(st.integers(0, 8)),
    order=st.randoms(use_true_random=False),
)
def test_the_neighbours_with_the_least_in_use_are_closed(used, wanted, shut, order):
    arena = SimpleNamespace(slot_bytes=10)
    slabs = []
    for i, count in enumerate(used):
        raw = SimpleNamespace(data_ptr=lambda i=i: 1000 + i)
        slots = list(range(4))
        slabs.append(
            SimpleNamespace(
                arena=arena, raw=raw, size=1, slots=slots, free=slots[count:], closed=i in shut
            )
        )
    wanted = min(wanted, len(slabs))
    costs = [-1 if slab.closed else 10 * n for slab, n in zip(slabs, used, strict=True)]
    least = min(sum(costs[i : i + wanted]) for i in range(len(slabs) - wanted + 1))
    shuffled = list(slabs)
    order.shuffle(shuffled)
    chosen = _neighbours(shuffled, wanted)
    places = [slabs.index(slab) for slab in chosen]
    assert places == list(range(places[0], places[0] + wanted))
    assert sum(costs[i] for i in places) == least


def test_other_code_out_of_memory_gets_what_it_asks_for():
    driver = filled(hot=80)
    manager = driver.manager
    taken = manager.tiers.hot.taken
    with pytest.warns(KVPassWarning, match=r"the hot tier gives .* back to other code and holds"):
        manager.relieve(3 * PAGE)
    assert manager.tiers.hot.taken <= taken - 3 * PAGE
    driver.check()
    driver.append(70)
    driver.check()
    with manager._section.lock:  # a slab of our own that finds no memory
        manager.relieve(PAGE)
    assert manager.tiers.hot.capacity == taken - 3 * PAGE


def test_what_cannot_leave_stays_and_serves():
    driver = filled(hot=60, cold=1)
    manager = driver.manager
    with pytest.warns(KVPassWarning):
        manager.relieve(50 * BLOCK_BYTES)
    driver.append(1)
    assert within(manager)
    driver.append(40)
    driver.check()


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.sampled_from([1, 3, 31, 32, 70])),
        st.tuples(st.just("hot"), st.integers(1, 70)),
        st.tuples(st.just("cold"), st.integers(1, 200)),
        st.tuples(st.just("crop"), st.integers(0, 90)),
        st.tuples(st.just("release"), st.just(0)),
    ),
    max_size=14,
)


@given(steps=STEPS, poison=st.booleans())
def test_any_order_of_sizes_keeps_every_byte(steps, poison):
    driver = filled(100, hot=30, cold=200, poison=poison)
    other = Driver(manager=driver.manager)
    other.append(150)
    for name, number in steps:
        try:
            if name == "append":
                driver.append(number)
            elif name == "crop":
                stored = driver.dense[0][0].shape[2]
                driver.manager.crop(driver.batch, min(number, stored))
                driver.dense = [(k[:, :, :number], v[:, :, :number]) for k, v in driver.dense]
            elif name == "release":
                driver.manager.release(other.batch)
                other = Driver(manager=driver.manager)
            else:
                driver.manager.resize(**{name: number * BLOCK_BYTES})
                assert not driver.manager.tiers.budget(name).crowded
        except OutOfMemoryError:
            if name == "append":  # refused as a whole
                assert driver.batch.lengths == [driver.dense[0][0].shape[2]] * 2
        driver.check()
    driver.manager.release(driver.batch)
    driver.manager.release(other.batch)
    driver.manager.settle()
    assert driver.manager.tiers.hot.used == driver.manager.tiers.cold.used == 0
    driver.manager.resize(hot=BLOCK_BYTES, cold=BLOCK_BYTES)
    assert driver.manager.tiers.hot.taken <= BLOCK_BYTES  # a slab is kept for what comes


@pytest.mark.parametrize("size", ["false", "64", -1, 0, True, "1 parsec", 2.5, "900TiB"])
def test_a_bad_size_is_refused_and_changes_nothing(size):
    cache = kvpass.TieredCache(SimpleNamespace(num_hidden_layers=2), 64, hot="1MiB")
    driver = filled(40)
    before = driver.manager.tiers.hot.capacity
    for resize in (driver.manager.resize, cache.resize):
        with pytest.raises(ConfigError, match=str(size).removesuffix("TiB")):
            resize(hot=size)
    assert driver.manager.tiers.hot.capacity == before
    assert cache.kvpass_config.memory.hot == 1 << 20


def test_a_cache_is_resized_before_and_after_its_first_use():
    cache = kvpass.TieredCache(SimpleNamespace(num_hidden_layers=1), 400, hot="1MiB", block_size=32)
    cache.resize(hot="2MiB")
    k, v = torch.randn(1, 2, 300, 16), torch.randn(1, 2, 300, 16)
    with pytest.warns(KVPassWarning, match="outside a graph"):
        cache.update(k, v, 0)
    assert cache.snapshot().hot_capacity == 2 << 20
    cache.resize(hot=BLOCK_BYTES)
    assert cache.snapshot().hot_capacity == BLOCK_BYTES
    keys, values = cache.read(0)
    assert torch.equal(keys, k) and torch.equal(values, v)


def test_blocks_that_had_to_leave_the_cold_tier_are_stored_again():
    driver = Driver(layers=1, hot="64KiB", cold="1MiB", resident_tokens=0)
    driver.append(6 * BLOCK)
    manager = driver.manager
    manager.settle()
    manager.place(driver.batch, lambda *_: False)
    manager.resize(cold=1)
    assert all(block.cold is None for block in driver.batch.blocks[0][0])
    manager.resize(cold="1MiB")
    driver.append(1)
    manager.settle()
    assert all(block.cold is not None for block in driver.batch.blocks[0][0][:6])
    driver.check()


def test_sizes_that_a_resize_cannot_take_are_named():
    manager = Driver(layers=1).manager
    for sizes, words in (
        ({}, "give hot= or cold="),
        ({"hot": "auto"}, "^hot 'auto': "),
        ({"cold": 0}, "^cold 0: "),
        ({"hot": "1MiB", "cold": -1}, "^cold -1: "),
    ):
        with pytest.raises(ConfigError, match=words):
            manager.resize(**sizes)
    assert manager.tiers.hot.capacity == 1 << 20
