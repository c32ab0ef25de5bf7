# SPDX-License-Identifier: Apache-2.0
"""Caches that share a manager: one pair of arenas, weights, copies called off and tried again."""

from __future__ import annotations

import copy
import gc
import os
import warnings

import pytest
import torch

import kvpass
from kvpass.config import Config
from kvpass.errors import CacheStateError, ConfigError, KVPassWarning, UnsupportedError
from kvpass.runtime.batch import Batch
from kvpass.runtime.manager import Manager
from kvpass.runtime.move import Cancelled, Move
from kvpass.runtime.retries import LONGEST_WAIT, Retries
from tests.runtime.harness import BLOCK, Driver


class Shape:
    num_hidden_layers = 2


class HeldCopies:
    """A copier that runs what it is told to, when it is told to."""

    def __init__(self) -> None:
        self.moves: list[Move] = []

    def submit(self, move: Move) -> bool:
        self.moves.append(move)
        return True

    def depth(self) -> int:
        return sum(not move.done() for move in self.moves)

    def close(self) -> None:
        pass


def append(cache: kvpass.TieredCache, tokens: int) -> None:
    x = torch.randn(1, 2, tokens, 16)
    for layer in range(2):
        cache.update(x, x, layer)


@pytest.fixture(autouse=True)
def _quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", KVPassWarning)
        yield


def test_caches_of_one_manager_share_its_arenas():
    manager = kvpass.Manager(device="cpu", hot="64KiB", cold="1MiB", block_size=BLOCK)
    first = kvpass.TieredCache(Shape, 512, manager=manager, qos=0.9)
    second = kvpass.TieredCache(Shape, 512, manager=manager, qos=0.1)
    for cache in (first, second):
        append(cache, 100)
    assert first.manager is second.manager is manager
    assert manager.snapshot().sequences == 2
    assert first.block_size == BLOCK and first.kvpass_config.memory.hot == 64 << 10
    assert first.batch.service.weight > 2 * second.batch.service.weight
    del first
    assert manager.snapshot().sequences == 1


def test_a_fork_keeps_its_service():
    manager = kvpass.Manager(device="cpu", hot="64KiB", block_size=BLOCK)
    cache = kvpass.TieredCache(Shape, 512, manager=manager, qos=0.9)
    append(cache, 40)
    cache.select([0, 0])
    assert cache.batch.service.qos == 0.9


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"hot": "1MiB"}, "memory.hot beside manager="),
        ({"block_size": 64}, "memory.block_size beside manager="),
        ({"qos": 1.5}, "qos = 1.5"),
        ({"qos": "false"}, "qos = 'false'"),
        ({"latency_target": 20}, "latency_target = 20"),
        ({"qoss": 0.5}, "did you mean 'qos'"),
    ],
)
def test_what_a_shared_cache_may_not_say(options, words):
    manager = kvpass.Manager(device="cpu", hot="64KiB")
    with pytest.raises(ConfigError, match=words):
        kvpass.TieredCache(Shape, 512, manager=manager, **options)


def test_other_mistakes():
    with pytest.raises(ConfigError, match="kvpass.Manager"):
        kvpass.TieredCache(Shape, 512, manager="64MiB")
    with pytest.raises(ConfigError, match="beside a config"):
        kvpass.Manager(Config(), "cpu", hot="1MiB")
    with pytest.raises(ConfigError, match="hott"):
        kvpass.Manager(hott="1MiB")


def test_dropping_a_cache_calls_its_copies_off():
    """B45: the copies that have not begun are not made, and no slot is lost."""
    driver = Driver()
    copier = driver.manager.mover.copier = HeldCopies()
    driver.append(2 * BLOCK)
    moves = list(copier.moves)
    assert len(moves) == 4
    moves[0].run()
    driver.manager.release(driver.batch)
    for move in moves[1:]:
        move.run()
    assert [isinstance(move.error, Cancelled) for move in moves] == [False, True, True, True]
    driver.manager.mover.collect()
    snapshot = driver.manager.snapshot()
    assert (snapshot.hot_used, snapshot.cold_used) == (0, 0)
    assert (snapshot.counters.cancelled_moves, snapshot.counters.failed_moves) == (3, 0)


def test_a_shared_block_is_still_copied_when_one_owner_goes():
    driver = Driver()
    copier = driver.manager.mover.copier = HeldCopies()
    driver.append(BLOCK)
    fork = driver.manager.fork(driver.batch, [0])
    driver.manager.release(fork)
    for move in copier.moves:
        move.run()
    driver.manager.mover.collect()
    assert driver.manager.counters.stored_blocks == 2
    driver.check()


def test_a_copy_that_failed_is_tried_again_less_and_less_often():
    driver = Driver(layers=1)
    copier = driver.manager.mover.copier = HeldCopies()
    driver.append(BLOCK)
    tries = []
    with pytest.warns(KVPassWarning, match=r"3 times.*OSError: no space"):
        for step in range(40):
            for move in copier.moves:
                move.finish(error=OSError("no space"))
                tries.append(step)
            copier.moves.clear()
            driver.append(0)
    assert tries == [0, 1, 3, 7, 15, 31]
    for _ in range(64):
        for move in copier.moves:
            move.run()
        driver.append(0)
    counters = driver.manager.counters
    assert (counters.failed_moves, counters.stored_blocks) == (6, 1)
    assert driver.manager.mover.retries._failures == {}
    driver.check()


def test_waits_are_bounded():
    retries, block = Retries(), object()
    for _ in range(30):
        retries.failed(block, OSError())
    assert not retries.due(block)
    for _ in range(LONGEST_WAIT):
        retries.tick()
    assert retries.due(block)
    retries.forget(block)
    assert retries.due(block)


def test_copies_carry_the_weight_of_their_cache():
    manager = Manager(device="cpu", hot="1MiB", block_size=BLOCK)
    copier = manager.mover.copier = HeldCopies()
    drivers = [Driver(manager=manager) for _ in range(2)]
    for driver, qos in zip(drivers, (0.9, 0.1), strict=True):
        driver.batch.service.qos = qos
        driver.batch.service.window(1.0)
        driver.append(BLOCK)
    weights = {move.flow: move.weight for move in copier.moves}
    assert weights == pytest.approx(
        {drivers[0].batch.first_row: 0.93, drivers[1].batch.first_row: 0.37}
    )


def test_a_copy_of_an_unused_cache_shares_the_manager():
    manager = kvpass.Manager(device="cpu", hot="64KiB", block_size=BLOCK)
    cache = kvpass.TieredCache(Shape, 512, manager=manager, qos=0.9)
    assert copy.deepcopy(cache)._state.manager is manager
    append(cache, 40)
    cache.reset()
    again = copy.deepcopy(cache)
    append(again, 40)
    assert again.manager is manager
    assert again.batch.service.qos == 0.9


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: kvpass.Manager("1MiB"), ConfigError, r"kvpass.Manager\(hot=...\)"),
        (lambda: kvpass.Manager(device="foo"), ConfigError, "device = 'foo'"),
        (lambda: kvpass.Manager(device="meta"), ConfigError, "device = 'meta'"),
        (lambda: kvpass.Manager(inner="eager"), ConfigError, "inner = 'eager'.*backend"),
        (lambda: copy.deepcopy(kvpass.Manager(device="cpu")), UnsupportedError, "cannot be copied"),
        (lambda: kvpass.Manager(resident_tokens=10**30), ConfigError, "resident_tokens"),
        (lambda: kvpass.Manager(heat_interval=1 << 63), ConfigError, "heat_interval"),
    ],
)
def test_managers_that_cannot_be_made(make, error, words):
    with pytest.raises(error, match=words):
        make()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
@pytest.mark.parametrize("act", ["resize", "reset", "drop", "snapshot", "relieve", "new"])
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_leaves_its_parents_blocks_alone(act):
    """Cold slabs are shared memory: what a child frees, poisons or moves there the parent reads."""
    manager = kvpass.Manager(
        device="cpu", hot="64KiB", cold="4MiB", block_size=BLOCK, poison=True, resident_tokens=0
    )
    driver = Driver(manager=manager)
    driver.append(20 * BLOCK)
    manager.settle()
    cache = kvpass.TieredCache(Shape, 512, manager=manager)
    append(cache, 100)
    manager.settle()
    before = manager.snapshot()
    assert before.cold_only_bytes > 0
    child = os.fork()
    if not child:
        code = 1
        try:
            if act == "resize":
                with pytest.raises(CacheStateError, match=r"os.fork"):
                    cache.resize(hot="4KiB")
            elif act == "reset":
                cache.reset()
                with pytest.raises(CacheStateError, match=r"os.fork"):
                    append(cache, 3)
            elif act == "drop":
                manager.release(driver.batch)
                del cache
                gc.collect()
            elif act == "snapshot":
                with pytest.raises(CacheStateError, match=r"os.fork"):
                    manager.snapshot()
            elif act == "relieve":
                manager.relieve(1 << 20)
            else:
                with pytest.raises(CacheStateError, match=r"os.fork"):
                    manager.new_batch(1, 2, 100)
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    driver.check()
    keys, values = manager.gather(cache.batch, 0, 100)
    assert not keys.isnan().any() and not values.isnan().any()
    assert manager.snapshot().cold_only_bytes == before.cold_only_bytes


def test_a_fork_that_fails_half_way_leaves_nothing(monkeypatch):
    driver = Driver(layers=2)
    driver.append(3 * BLOCK)
    driver.manager.settle()
    before = driver.manager.snapshot()
    calls = []

    def attach(self, *args):
        calls.append(1)
        if len(calls) == 4:
            raise MemoryError
        return real(self, *args)

    real = Batch.attach
    monkeypatch.setattr(Batch, "attach", attach)
    with pytest.raises(MemoryError):
        driver.manager.fork(driver.batch, [0])
    monkeypatch.undo()
    after = driver.manager.snapshot()
    assert (after.sequences, after.hot_used) == (before.sequences, before.hot_used)
    driver.check()
    driver.manager.release(driver.batch)
    assert driver.manager.tiers.hot.used == driver.manager.tiers.cold.used == 0
