# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C, the end of the process and forks, beside a manager that works."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable

import pytest
import torch

from kvpass.runtime.critical import Section
from kvpass.runtime.migrate import Consumer, ThreadCopier
from kvpass.runtime.move import Cancelled, Move
from tests.runtime.harness import BLOCK, Driver
from tests.runtime.test_migrate import arena


@pytest.fixture(autouse=True)
def interruptible():
    """Whoever runs this in the background may have interrupts ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def section():
    return Section(torch.device("cpu"))


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_an_interrupt_waits_for_the_end_of_the_section(section):
    done = []
    with pytest.raises(KeyboardInterrupt):
        with section.lock, section.whole:
            interrupt()
            done.append("half")
            with section.lock, section.whole:  # a section in a section ends nothing
                done.append("inner")
            done.append("whole")
        done.append("after")
    assert done == ["half", "inner", "whole"]
    assert not section.held
    with pytest.raises(KeyboardInterrupt):
        interrupt()
        done.append("never")
    assert done[-1] == "whole", "outside, it comes at once"


def test_a_second_interrupt_does_not_wait(section):
    done = []
    with pytest.raises(KeyboardInterrupt), section.lock, section.whole:
        interrupt()
        done.append("first")
        interrupt()
        done.append("never")
    assert done == ["first"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert not section.held


def test_other_handlers_are_called_later_and_stay(section):
    seen = []
    before = signal.signal(signal.SIGINT, lambda *_: seen.append("called"))
    try:
        with section.lock, section.whole:
            interrupt()
            assert seen == []
        assert seen == ["called"]
        interrupt()
        assert seen == ["called"] * 2
    finally:
        signal.signal(signal.SIGINT, before)


def test_an_error_inside_is_not_hidden(section):
    with pytest.raises(KeyboardInterrupt) as caught, section.lock, section.whole:
        interrupt()
        raise ValueError("inside")
    assert isinstance(caught.value.__context__, ValueError)


def test_other_threads_and_ignored_signals_are_left_alone(section):
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with section.lock, section.whole:
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
    handlers = []

    def work() -> None:
        with section.lock, section.whole:
            handlers.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert handlers == [signal.default_int_handler]


def test_held_is_what_other_threads_hold(section):
    assert not section.held and not section.mine
    with section.lock:
        assert section.mine and not section.held
        seen = []
        thread = threading.Thread(target=lambda: seen.append((section.held, section.mine)))
        thread.start()
        thread.join()
        assert seen == [(True, False)]


def test_interrupts_at_any_time_leave_a_cache_that_goes_on():
    """Real signals, at random places of steps; what was stored is what dense tensors hold."""
    driver = Driver(layers=2)
    manager = driver.manager
    stop = threading.Event()
    guarded = False  # where an interrupt is caught; elsewhere it would end this test itself

    def once(*_: object) -> None:
        nonlocal guarded
        if guarded:
            guarded = False
            raise KeyboardInterrupt

    def disturb() -> None:
        delay = 0.0
        while not stop.wait(1e-3 + delay):
            delay = (delay * 7 + 1.3e-4) % 9e-4
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    def step() -> None:
        manager.begin(driver.batch, 1, driver.layers)
        manager.abort(driver.batch)
        manager.snapshot()

    def clear() -> None:
        if driver.batch.active is not None:
            manager.abort(driver.batch)

    def cut(work: Callable[[], None]) -> bool:
        nonlocal guarded
        try:
            guarded = True
            work()
            guarded = False
        except KeyboardInterrupt:
            return True
        return False

    thread = threading.Thread(target=disturb)
    cuts, end = 0, time.monotonic() + 20
    interval = sys.getswitchinterval()
    signal.signal(signal.SIGINT, once)  # the fixture puts the former one back
    sys.setswitchinterval(1e-4)  # the other thread would hardly ever run
    try:
        thread.start()
        while cuts < 150 and time.monotonic() < end:
            if cut(step):
                cuts += 1
                while cut(clear):
                    cuts += 1
    finally:
        stop.set()
        thread.join()
        sys.setswitchinterval(interval)
    assert cuts >= 20
    assert not manager._section.held and driver.batch.active is None
    driver.append(2 * BLOCK)
    manager.settle()
    driver.check()


# ------------------------------------------------------------- copies and their end


def test_a_copy_called_off_while_others_are_is_made_or_not_but_not_both():
    """Whoever is told that it is off gives its slots to others at once."""
    one, other = arena(4), arena(4)
    told: list[object] = []

    class First(Move):
        def finish(self, event=None, error=None) -> None:
            moves[1].cancel()  # between the look at the piece and its copy
            super().finish(event, error)

    class Second(Move):
        def finish(self, event=None, error=None) -> None:
            super().finish(event, error)
            told.append(error)

    moves = [kind("load", None, one.allocate(), other.allocate(), []) for kind in (First, Second)]
    moves[0].cancel()
    moves[1].source.raw.fill_(1)
    moves[1].target.raw.fill_(9)
    consumer = Consumer(queue.SimpleQueue(), None)
    consumer._copy(moves)
    copied = moves[1].error is None
    assert bool((moves[1].target.raw == (1 if copied else 9)).all())
    assert len(told) == 1 and isinstance(moves[0].error, Cancelled)
    assert consumer.finished == 2


def test_an_engine_that_was_stopped_takes_nothing_and_keeps_nobody_waiting():
    one, other = arena(8), arena(8)
    copier = ThreadCopier()
    moves = [Move("load", None, one.allocate(), other.allocate(), []) for _ in range(4)]
    assert copier.submit(moves[0])
    moves[0].wait()
    inbox = copier._consumer.inbox
    copier._consumer._stopped = True
    for move in moves[1:3]:
        copier._submitted += 1
        inbox.put(move)
    inbox.put(None)
    for move in moves[1:3]:
        move.wait()
    assert all(move.launched for move in moves[:3])
    assert copier.submit(moves[3]) is False
    assert copier.depth() == 0


def _program(text: str) -> subprocess.CompletedProcess[str]:
    head = (
        "import atexit, os, sys, torch\nimport kvpass\n"
        "from tests.runtime.harness import BLOCK, Driver\n"
    )
    return subprocess.run(
        [sys.executable, "-c", head + textwrap.dedent(text)],
        capture_output=True, text=True, timeout=60,
        env=os.environ | {"TRITON_INTERPRET": "1"},
    )  # fmt: skip


@pytest.mark.parametrize("call", ["settle()", "resize(hot='64KiB')", "snapshot()"])
def test_a_process_ends_although_a_handler_still_uses_a_cache(call):
    run = _program(f"""
        box = []
        atexit.register(lambda: (box[0].append(3 * BLOCK), box[0].manager.{call}, print("done")))
        box.append(Driver(layers=1))
        box[0].append(BLOCK)
        box[0].manager.settle()
    """)
    assert run.returncode == 0, run.stderr
    assert "done" in run.stdout


def test_a_forked_child_with_a_manager_of_its_own_waits_for_no_ghost():
    """A thread of the parent held the condition, or counted as waiting, when it forked."""
    run = _program("""
        from kvpass.runtime.move import waiters
        from kvpass import backends
        from kvpass.runtime import directory, roster, table
        waiters._condition.acquire()
        waiters._count = 1
        tables = table.tables_for(torch.device("cpu"))
        for lock in (directory._lock, roster._lock, table._LOCK, tables._lock, backends._lock):
            lock.acquire()
        torch.set_num_threads(1)  # OpenMP's threads are not there after a fork
        if os.fork() == 0:
            driver = Driver(layers=1)
            driver.append(3 * BLOCK)
            driver.manager.settle()
            assert not waiters
            backends._warn_once("a word")
            assert roster.managers() == [driver.manager]
            os._exit(7)
        print(os.waitstatus_to_exitcode(os.wait()[1]))
    """)
    assert run.stdout.strip() == "7", run.stderr
