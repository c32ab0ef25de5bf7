# SPDX-License-Identifier: Apache-2.0
"""Copies beside kernels that read in place: shares by weight, and what readers leave."""

from __future__ import annotations

import gc
import math
import queue
import time
import timeit
import weakref
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpass.runtime.metrics import LinkRate
from kvpass.runtime.migrate import Consumer
from kvpass.runtime.move import Move, waiters
from kvpass.runtime.pacing import BACKGROUND, LONGEST_WAIT, Pacer, pacer_for
from tests.runtime.harness import BLOCK, Driver
from tests.runtime.test_migrate import arena

RATE = 50e9


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def reader(clock: Clock, weight=0.5, cold=1 << 40, seconds=0.01, size=1):
    """A sequence in a step; its demand exceeds the link unless told otherwise."""
    service = SimpleNamespace(weight=weight, seconds=seconds, begun=clock.now)
    return SimpleNamespace(cold_bytes=cold, size=size, service=service)


def pacer(*batches, clock: Clock) -> Pacer:
    return Pacer(lambda: batches, LinkRate(RATE, RATE), clock=clock)


def launched(pace: Pacer, clock: Clock, weight: float, size: float, seconds: float) -> float:
    """Bytes a second that a flood of copies gets."""
    end, total = clock.now + seconds, 0.0
    while clock.now < end:
        if (delay := pace.delay(weight)) > 0:
            clock.now += delay + 1e-9
        else:
            pace.charge(size)
            total += size
    return total / seconds


def test_copies_take_the_link_while_nobody_reads():
    clock = Clock()
    assert pacer(clock=clock).rate(0.01) == math.inf
    assert pacer(reader(clock, cold=0), clock=clock).rate(0.01) == math.inf
    assert pacer(reader(clock, cold=0), clock=clock).delay(0.01) == 0


@pytest.mark.parametrize("weight", [0.01, 0.3, 0.5, 1.0])
@pytest.mark.parametrize("size", [1 << 20, 16 << 20])
def test_a_flood_gets_its_share(weight, size):
    clock = Clock()
    busy = reader(clock, weight=0.5)
    pace = pacer(busy, clock=clock)
    busy.service.seconds = 10.0  # a long step
    busy.cold_bytes = 10 * 2 * RATE
    due = RATE * BACKGROUND * weight / (BACKGROUND * weight + 0.5)
    got = launched(pace, clock, weight, size, 4.0)
    assert got == pytest.approx(due, rel=0.1, abs=2 * size)
    assert got <= RATE / 2 or weight > 0.5, "never more than an equal's part"


def test_what_a_reader_leaves_is_free():
    clock = Clock()
    light = reader(clock, cold=int(0.01 * RATE * 0.1), seconds=0.01)  # a tenth of the link
    assert pacer(light, clock=clock).rate(0.01) == pytest.approx(0.9 * RATE)


@given(
    weights=st.lists(st.floats(0.01, 1), min_size=1, max_size=4),
    demands=st.lists(st.floats(0.01, 2), min_size=4, max_size=4),
    weight=st.floats(0.01, 4),
)
def test_shares_are_max_min(weights, demands, weight):
    """At least the part by weight, at least the rest, and never both."""
    clock = Clock()
    readers = [
        reader(clock, weight=w, cold=int(d * RATE * 0.01))
        for w, d in zip(weights, demands, strict=False)
    ]
    share = pacer(*readers, clock=clock).rate(weight) / RATE
    part = BACKGROUND * weight / (BACKGROUND * weight + sum(weights))
    rest = 1 - sum(demands[: len(weights)])
    assert share == pytest.approx(max(part, rest), rel=1e-6)
    assert 0 < share <= 1


def test_a_reader_that_stopped_frees_the_link_and_one_that_starts_takes_it():
    clock = Clock()
    batch = reader(clock)
    pace = pacer(batch, clock=clock)
    pace.charge(1 << 30)
    assert pace.delay(0.5) > 0.05
    clock.now += 0.021  # two steps of 10 ms have passed without another
    assert pace.delay(0.5) == 0
    batch.service.begun = clock.now
    assert pace.delay(0.5) == 0, "what was owed then is forgotten"
    pace.charge(1 << 30)
    assert pace.delay(0.5) > 0.05


def test_a_sequence_whose_steps_were_not_measured_reads_as_fast_as_it_can():
    clock = Clock()
    assert pacer(reader(clock, seconds=None, cold=1), clock=clock).rate(0.5) < RATE / 2


def test_an_unknown_link_is_paced_too():
    clock = Clock()
    pace = Pacer(lambda: [reader(clock)], LinkRate(), clock=clock)
    assert 0 < pace.rate(0.5) < RATE


def test_the_engine_holds_loads_back_and_not_stores():
    clock = Clock()
    busy = reader(clock, weight=1.0)
    one, other = arena(16), arena(16)
    inbox: queue.SimpleQueue[Move | None] = queue.SimpleQueue()
    loads = [Move("load", None, one.allocate(), other.allocate(), [], 0, 0.01) for _ in range(3)]
    stores = [Move("store", None, other.allocate(), one.allocate(), [], 0, 0.01) for _ in range(3)]
    for move in (*loads, *stores):
        inbox.put(move)
    pace = pacer(busy, clock=clock)
    consumer = Consumer(inbox, None, pace)
    consumer._receive()
    pace.charge(1 << 30)
    assert [consumer._next_piece() for _ in range(2)] == [stores, []]
    assert 0 < consumer._held <= 0.01
    clock.now += 100.0
    busy.service.begun = clock.now
    consumer._receive()  # returns although nothing arrives
    assert consumer._next_piece() == loads
    assert consumer._held == 0


def test_copies_that_somebody_waits_for_are_not_held_back(monkeypatch):
    clock = Clock()
    pace = pacer(reader(clock), clock=clock)
    pace.charge(1 << 40)
    one, other = arena(2), arena(2)
    inbox: queue.SimpleQueue[Move | None] = queue.SimpleQueue()
    load = Move("load", None, one.allocate(), other.allocate(), [], 0, 0.01)
    inbox.put(load)
    consumer = Consumer(inbox, None, pace)
    consumer._receive()
    assert consumer._next_piece() == []
    monkeypatch.setattr(waiters, "_count", 1)
    assert consumer._next_piece() == [load]


def test_the_last_copies_are_not_held_back():
    """Whoever closes the engine waits for them."""
    clock = Clock()
    one, other = arena(2), arena(2)
    inbox: queue.SimpleQueue[Move | None] = queue.SimpleQueue()
    load = Move("load", None, one.allocate(), other.allocate(), [], 0, 0.01)
    pace = pacer(reader(clock), clock=clock)
    pace.charge(1 << 40)
    for move in (load, None):
        inbox.put(move)
    consumer = Consumer(inbox, None, pace)
    consumer.work()
    assert load.launched and load.error is None


def test_what_a_batch_reads_in_place_is_counted_when_its_step_begins():
    driver = Driver(layers=2)
    manager, batch = driver.manager, driver.batch
    driver.append(3 * BLOCK + 1)
    manager.settle()
    manager.place(batch, lambda layer, _, i: i > layer)
    driver.append(1)
    size = batch.geometries[0].block_bytes
    assert batch.cold_bytes == 3 * size  # one of the first layer, two of the second
    manager.place(batch, lambda *_: True)
    driver.append(1)
    assert batch.cold_bytes == 0
    assert batch.service.begun > 0


def test_the_engine_leaves_the_interpreter_to_a_manager_that_works():
    busy, urgent = [True], [False]
    pace = Pacer(lambda: (), LinkRate(), busy=lambda: busy[0])
    begin = time.perf_counter()
    pace.give_way(lambda: urgent[0])
    assert time.perf_counter() - begin >= LONGEST_WAIT, "and not for ever"
    urgent[0] = True
    assert _seconds(lambda: pace.give_way(lambda: urgent[0])) < LONGEST_WAIT
    urgent[0], busy[0] = False, False
    assert _seconds(lambda: pace.give_way(lambda: urgent[0])) < LONGEST_WAIT


def _seconds(call) -> float:
    return min(timeit.repeat(call, number=1, repeat=20))


def test_the_engine_keeps_no_blocks_alive():
    driver = Driver(layers=1)
    driver.append(BLOCK)
    driver.manager.settle()
    pace = pacer_for(driver.manager.columns, LinkRate(), driver.manager._section)
    assert pace.rate(1.0) == math.inf
    batch = weakref.ref(driver.batch)
    del driver
    gc.collect()
    assert batch() is None
    assert pace.rate(1.0) == math.inf
