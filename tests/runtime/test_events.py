# SPDX-License-Identifier: Apache-2.0
"""What a GPU's streams may still read or write, and a GPU that fails, with events made by hand."""

from __future__ import annotations

import queue
from contextlib import nullcontext

import pytest
import torch

from kvpass.runtime import migrate
from kvpass.runtime.lane import Lane
from kvpass.runtime.memory import DeviceMemory
from kvpass.runtime.migrate import Consumer, ThreadCopier
from kvpass.runtime.move import Move, Passed
from kvpass.runtime.pool import Arena, Budget
from tests.runtime.harness import BLOCK, Driver
from tests.runtime.scheduler import ManualCopier, scheduled


class Event:
    """Of a stream that has not come so far, or that is lost."""

    def __init__(self, *_: object, error: BaseException | None = None, **__: object) -> None:
        self.error = error
        self.passed = False
        self.asked = 0

    def record(self, stream: object = None) -> None:
        if self.error is not None:
            raise self.error

    def query(self) -> bool:
        self.asked += 1
        if self.error is not None:
            raise self.error
        return self.passed

    def synchronize(self) -> None:
        if self.error is not None:
            raise self.error
        self.passed = True


def _slots(driver: Driver):
    return [
        slot
        for tier in ("hot", "cold")
        for arena in driver.manager.tiers.arenas(tier)
        for slab in arena.slabs
        for slot in slab.slots
    ]


def test_a_slot_waits_for_all_who_read_it_also_for_owners_that_went_first():
    """A fork reads a shared block on its own stream, and goes; then the other owner does."""
    driver = Driver(layers=1)
    manager = driver.manager
    with scheduled(manager, ManualCopier()):
        driver.append(BLOCK)
        fork = manager.fork(driver.batch, [0])
        block = driver.batch.blocks[0][0][0]
        hot = block.hot
        early, late = Event(), Event()
        fork.event, driver.batch.event = early, late
        manager.release(fork)
        manager.release(driver.batch)
        assert manager.tiers.hot.used == block.geometry.block_bytes, "its copy is under way"
        for move in manager.mover.in_flight:
            move.run()
        manager.snapshot()
        assert manager.tiers.hot.used == 0
        assert early in hot.fences and late in hot.fences


def test_fences_of_a_block_that_many_shared_do_not_pile_up():
    driver = Driver(layers=1)
    driver.append(BLOCK)
    driver.manager.settle()
    for _ in range(20):
        fork = driver.manager.fork(driver.batch, [0])
        fork.event = Event()
        fork.event.passed = True
        driver.manager.release(fork)
    assert all(len(slot.fences) <= 1 for slot in _slots(driver))


def test_a_fork_begins_after_what_its_parent_has_launched():
    driver = Driver(layers=1)
    driver.append(5)
    driver.batch.event = Event()
    assert driver.manager.fork(driver.batch, [0]).event is driver.batch.event


# ---------------------------------------------------------- a device that fails


def _arena(slots: int) -> Arena:
    return Arena(DeviceMemory(torch.device("cpu")), Budget(slots * 16 * 1024), 1024, slots * 1024)


def _moves(count: int, kind: str = "store") -> list[Move]:
    one, other = _arena(count), _arena(count)
    return [Move(kind, None, one.allocate(), other.allocate(), []) for _ in range(count)]


class Stream:
    """Of a device that fails where it is told to."""

    def __init__(self, fails: str, error: BaseException) -> None:
        self.fails, self.error = fails, error
        self.waited: list[object] = []

    def _maybe(self, what: str) -> None:
        if what in self.fails.split():
            raise self.error

    def wait_event(self, event: object) -> None:
        self._maybe("wait")
        self.waited.append(event)

    def synchronize(self) -> None:
        self._maybe("synchronize")


LOST = RuntimeError("CUDA error: an illegal memory access was encountered")


@pytest.fixture
def lane(monkeypatch):
    """A lane with a stream made by hand."""

    def make(fails: str) -> Lane:
        lane = Lane.__new__(Lane)
        lane.stream = Stream(fails, LOST)
        lane._launched = []
        lane.arrived = 0
        error = LOST if "record" in fails.split() else None
        monkeypatch.setattr(migrate.torch.cuda, "Event", lambda **_: Event(error=error))
        monkeypatch.setattr(migrate.torch.cuda, "stream", lambda stream: nullcontext())
        return lane

    return make


@pytest.mark.parametrize("fails", ["wait", "record", "wait synchronize", "record synchronize"])
def test_a_launch_that_fails_ends_its_moves(lane, fails):
    moves = _moves(3)
    moves[0].after.append(Event())
    assert lane(fails).launch(moves, Passed()) is False
    assert all(move.launched and move.error is LOST for move in moves)


def _serve(lanes: dict[str, Lane], moves: list[Move]) -> Consumer:
    inbox: queue.SimpleQueue[Move | None] = queue.SimpleQueue()
    consumer = Consumer(inbox, None)
    consumer._lanes = lanes
    for move in (*moves, None):
        inbox.put(move)
    consumer.work()
    return consumer


@pytest.mark.parametrize("fails", ["wait synchronize", "record"])
def test_the_engine_goes_on_when_launches_fail(lane, fails):
    moves = _moves(5) + _moves(5, "load")
    for move in moves:
        move.source.fences.append(Event())
    broken = lane(fails)
    consumer = _serve({"store": broken, "load": broken}, moves)
    assert consumer.finished == 10
    assert all(move.error is LOST for move in moves)


def test_a_launch_waits_for_what_is_not_known_to_have_passed(lane):
    """Each event once, however many copies wait for it."""
    moves = _moves(4)
    passed, running = Event(), Event()
    passed.passed = True
    for move in moves:
        move.source.fences += [passed, running]
    working = lane("")
    known = Passed()
    assert not any(move.ready(known) for move in moves)
    assert passed.asked == running.asked == 1
    assert working.launch(moves, known)
    assert working.stream.waited == [running]
    assert working.launch(_with(passed), Passed())
    assert working.stream.waited == [running, passed], "nobody had asked"


def _with(event: Event) -> list[Move]:
    move = _moves(1)[0]
    move.after.append(event)
    return [move]


def test_a_lost_device_fails_every_move_and_hangs_nobody(lane):
    """Asking for an event raises in the engine's own thread; who waits must learn of it."""
    working = lane("")
    moves = _moves(6)
    moves[4].after.append(Event(error=LOST))  # raises when it is asked
    consumer = _serve({"store": working, "load": working}, moves)
    assert consumer.finished == 6
    assert all(move.launched for move in moves)
    assert moves[4].error is LOST


def test_moves_after_the_engine_was_lost_fail_at_once(monkeypatch):
    driver = Driver(layers=1)
    copier = driver.manager.mover.copier
    with monkeypatch.context() as patch:
        patch.setattr(Consumer, "_next_piece", lambda self: (_ for _ in ()).throw(LOST))
        driver.append(BLOCK)
        driver.manager.settle()
    driver.append(BLOCK)
    driver.manager.settle()
    assert copier.depth() == 0
    assert driver.manager.counters.failed_moves >= 2
    assert driver.manager.snapshot().backlog == 2
    driver.check()
    driver.manager.mover.copier = ThreadCopier()
    driver.append(1)
    driver.manager.settle()
    assert driver.manager.snapshot().backlog == 0
    driver.check()


def test_pieces_that_arrived_before_the_device_was_lost_are_counted_once(lane):
    """The event of the second piece raises: the first has arrived all the same."""
    working = lane("")
    one, other = _moves(2), _moves(3)
    assert working.launch(one, Passed()) and working.launch(other, Passed())
    one[0].event.passed = True
    other[0].event.error = LOST
    with pytest.raises(RuntimeError):
        working.collect()
    assert working.arrived == 2
    working.abandon()
    assert working.arrived == 5


def test_a_copy_whose_event_cannot_be_asked_is_not_lost():
    driver = Driver(layers=1)
    with scheduled(driver.manager, ManualCopier()):
        driver.append(2 * BLOCK)
        moves = list(driver.manager.mover.in_flight)
        assert len(moves) == 2
        moves[0].run()
        moves[1].finish(Event(error=LOST))
        with pytest.raises(RuntimeError, match="illegal"):
            driver.manager.mover.collect()
        assert driver.manager.mover.in_flight == moves[1:]
        moves[1].event.error = None
        moves[1].event.passed = True
        driver.manager.mover.collect()
        assert not driver.manager.mover.in_flight
