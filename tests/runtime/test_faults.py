# SPDX-License-Identifier: Apache-2.0
"""A fault at each step of a migration: nothing is lost, leaked or changed, and work goes on.

The same sequences are decoded with and without the fault. What comes out is compared to the bit,
the accounting at every step.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable

import numpy as np
import pytest
import torch

from kvpass.errors import ConfigError, OutOfMemoryError
from kvpass.runtime import memory, migrate, move
from kvpass.runtime.batch import Block
from kvpass.runtime.geometry import BlockGeometry
from kvpass.runtime.memory import PinnedMemory
from kvpass.runtime.migrate import ThreadCopier
from tests.runtime import invariants
from tests.runtime.harness import BLOCK, Driver

BYTES = BlockGeometry(2, 16, 16, torch.float32, BLOCK).block_bytes

Fault = Callable[[Driver, pytest.MonkeyPatch], list[int]]
"""Switches a fault on; the list grows by one whenever it strikes."""


def _failing(error: BaseException, hits: list[int], when: Callable[..., bool] | None = None):
    def fail(real):
        def call(*args, **kwargs):
            if when is not None and not when(*args, **kwargs):
                return real(*args, **kwargs)
            hits.append(1)
            raise error

        return call

    return fail


def _strike(patch, target, name, error, when=None) -> list[int]:
    hits: list[int] = []
    patch.setattr(target, name, _failing(error, hits, when)(getattr(target, name)))
    return hits


def disk_full(driver, patch):
    return _strike(patch, os, "posix_fallocate", OSError(errno.ENOSPC, "No space left on device"))


def no_inodes(driver, patch):
    error = OSError(errno.ENOSPC, "No space left on device")
    return _strike(patch, memory.tempfile, "mkstemp", error)


def directory_gone(driver, patch):
    error = FileNotFoundError(errno.ENOENT, "No such file or directory")
    return _strike(patch, memory.tempfile, "mkstemp", error)


def disk_broken(driver, patch):
    return _strike(patch, os, "posix_fallocate", OSError(errno.EIO, "Input/output error"))


def mapping_refused(driver, patch):
    return _strike(patch, memory.mmap, "mmap", OSError(errno.ENOMEM, "Cannot allocate memory"))


def pinning_refused(driver, patch):
    """As on a GPU, where the cold tier is pinned memory."""
    patch.setattr(driver.manager.tiers.arenas("cold")[0], "source", PinnedMemory())
    return _strike(
        patch, memory.torch, "empty", RuntimeError("CUDA error: out of memory"),
        lambda *_, **options: options.get("pin_memory", False),
    )  # fmt: skip


def no_host_memory_to_pin(driver, patch):
    hits: list[int] = []
    patch.setattr(driver.manager.tiers.arenas("cold")[0], "source", PinnedMemory())
    patch.setattr(memory, "available_memory", lambda: hits.append(1) or 0)
    return hits


def no_device_memory(driver, patch):
    error = OutOfMemoryError("no 16 KiB of RAM left")
    return _strike(patch, memory.DeviceMemory, "slab", error)


def no_thread(driver, patch):
    driver.manager.mover.copier = ThreadCopier()
    return _strike(patch, migrate.threading.Thread, "start", RuntimeError("can't start new thread"))


def queue_full(driver, patch):
    hits: list[int] = []
    submit = driver.manager.mover.copier.submit
    patch.setattr(migrate, "QUEUE_LIMIT", 0)
    patch.setattr(driver.manager.mover.copier, "submit", lambda m: hits.append(1) or submit(m))
    return hits


def copy_fails(driver, patch):
    return _strike(patch, move.np, "copyto", OSError(errno.EIO, "Input/output error"))


def copy_stops_half_way(driver, patch):
    hits: list[int] = []
    copy = np.copyto

    def half(target, source):
        hits.append(1)
        copy(target[: target.size // 2], source[: source.size // 2])
        raise OSError(errno.EIO, "Input/output error")

    patch.setattr(move.np, "copyto", half)
    return hits


def publishing_fails(driver, patch):
    """Of a block that was brought in: its cold copy has to serve on."""
    return _strike(
        patch, Block, "publish", MemoryError(),
        lambda block: block.hot is not None and block.cold is not None,
    )  # fmt: skip


BACKGROUND: list[Fault] = [
    disk_full, no_inodes, directory_gone, disk_broken, mapping_refused, pinning_refused,
    no_host_memory_to_pin, no_device_memory, no_thread, queue_full, copy_fails,
    copy_stops_half_way, publishing_fails,
]  # fmt: skip


def _bits(outputs: list[torch.Tensor]) -> list[bytes]:
    return [x.contiguous().view(torch.uint8).numpy().tobytes() for x in outputs]


def _decode(fault: Fault | None) -> list[bytes]:
    torch.manual_seed(3)
    driver = Driver(
        hot=40 * BYTES, cold=64 * BYTES, page_size=BYTES, resident_tokens=0, heat_interval=4,
        min_frequency=1.0, poison=True,
    )  # fmt: skip
    manager = driver.manager
    outputs = driver.append(5 * BLOCK + 3)
    manager.settle()
    manager.place(driver.batch, lambda layer, sequence, index: index % 3 > 0)
    with pytest.MonkeyPatch.context() as patch:
        hits = fault(driver, patch) if fault is not None else [1]
        for step in range(2 * BLOCK + 5):
            outputs += driver.append(1)
            if step % 20 == 9:
                manager.place(driver.batch, lambda *_: True)
            if step % 20 == 19:
                manager.place(driver.batch, lambda layer, sequence, index: index % 2 > 0)
            invariants.check(manager, [driver.batch])
        driver.check()
        assert hits, "the fault never struck"
    manager.resize(hot=40 * BYTES, cold=64 * BYTES)  # a tier that found no room went on with less
    for _ in range(BLOCK):
        outputs += driver.append(1)
        invariants.check(manager, [driver.batch])
    manager.settle()
    assert manager.snapshot().backlog == 0, "a copy that failed was not made up for"
    manager.place(driver.batch, lambda *_: False)
    assert manager.snapshot().hot_bytes <= 2 * BYTES  # all but the two that are written
    driver.check()
    manager.release(driver.batch)
    invariants.check_empty(manager)
    return _bits(outputs)


@pytest.fixture(scope="module")
def clean() -> list[bytes]:
    return _decode(None)


@pytest.mark.parametrize("fault", BACKGROUND, ids=lambda fault: fault.__name__)
def test_a_fault_in_the_background_changes_nothing(fault, clean):
    """B46: each step of a migration in turn."""
    assert _decode(fault) == clean


def test_a_copy_that_always_fails_does_not_hang_who_waits(monkeypatch):
    """B44: no endless loop; the old copies serve, and are counted as not written."""
    driver = Driver()
    copy_fails(driver, monkeypatch)
    driver.append(3 * BLOCK)
    driver.manager.settle()
    driver.manager.resize(hot=100 * BYTES)
    assert driver.manager.snapshot().backlog == 6
    assert driver.manager.counters.failed_moves >= 6
    driver.check()
    monkeypatch.undo()
    driver.append(1)
    driver.manager.settle()
    assert driver.manager.snapshot().backlog == 0


@pytest.mark.parametrize(
    ("fault", "error", "words"),
    [
        (disk_full, OutOfMemoryError, "No space left on device"),
        (no_inodes, OutOfMemoryError, "No space left on device"),
        (mapping_refused, OutOfMemoryError, "Cannot allocate memory"),
        (directory_gone, ConfigError, "name an existing, writable directory"),
        (disk_broken, ConfigError, "Input/output error"),
        (no_device_memory, None, ""),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_request_that_needs_the_room_is_refused_as_a_whole(fault, error, words, monkeypatch):
    """A prompt larger than the hot tier; what other memory there is takes what it can."""
    driver = Driver(hot=9 * BYTES, cold=400 * BYTES, resident_tokens=0)
    other = Driver(manager=driver.manager)
    other.append(3)
    hits = fault(driver, monkeypatch)
    if error is None:
        driver.append(10 * BLOCK)
    else:
        with pytest.raises(error, match=words):
            driver.append(10 * BLOCK)
        assert driver.batch.lengths == [0, 0]
    assert hits
    batches = [driver.batch, other.batch]
    invariants.check(driver.manager, batches)
    other.check()
    other.append(1)
    monkeypatch.undo()
    driver.append(10 * BLOCK)
    driver.check()
    other.check()
    invariants.check(driver.manager, batches)


def test_no_memory_behind_either_tier_names_both(monkeypatch):
    driver = Driver(hot=6 * BYTES, cold=400 * BYTES)
    no_device_memory(driver, monkeypatch)
    disk_full(driver, monkeypatch)
    with pytest.raises(OutOfMemoryError, match="of RAM left.* left for the cold tier"):
        driver.append(1)
    monkeypatch.undo()
    driver.append(1)
    driver.check()


def _not_empty(shape, *_, **__) -> bool:
    return 0 not in (shape if isinstance(shape, tuple) else shape.shape)


def test_a_disk_that_fills_up_later_is_named_too(monkeypatch):
    driver = Driver(layers=1, hot=2 * BYTES, cold=400 * BYTES)
    driver.append(10 * BLOCK)
    disk_full(driver, monkeypatch)
    with pytest.raises(OutOfMemoryError, match="both tiers are full .*No space left on device"):
        driver.append(100 * BLOCK)
    driver.check()
    driver.append(1)
    driver.check()
    invariants.check(driver.manager, [driver.batch])


@pytest.mark.parametrize("name", ["zeros", "zeros_like"])
def test_tables_that_cannot_grow_stay_as_they_are(name, monkeypatch):
    driver = Driver(size=2)
    driver.append(2 * BLOCK)  # what the tables were made for
    before = driver.batch.words
    _strike(monkeypatch, np, name, MemoryError("cannot allocate"), _not_empty)
    with pytest.raises(OutOfMemoryError, match="for the tables of 2 layers and 2 sequences of 65"):
        driver.append(1)
    assert driver.batch.words is before
    assert driver.batch.device_words.data_ptr() == before.ctypes.data
    driver.check()
    with pytest.raises(OutOfMemoryError, match="for the tables"):
        driver.manager.fork(driver.batch, [0])
    monkeypatch.undo()
    driver.append(9 * BLOCK)
    driver.check()
    invariants.check(driver.manager, [driver.batch])


def test_a_batch_that_cannot_be_made_takes_no_rows(monkeypatch):
    manager = Driver().manager
    rows = len(manager.tables._free)
    _strike(monkeypatch, np, "zeros_like", MemoryError("cannot allocate"))
    for _ in range(3):
        with pytest.raises(OutOfMemoryError):
            manager.new_batch(4, 2, 64)
    monkeypatch.undo()
    manager.tables.take(0)
    assert len(manager.tables._free) == rows


def test_a_copy_on_write_that_fails_leaves_the_shared_block(monkeypatch):
    driver = Driver()
    driver.append(BLOCK + 5)
    fork = driver.manager.fork(driver.batch, [0])
    _strike(monkeypatch, Block, "publish", MemoryError(), lambda block: block.index == 1)
    with pytest.raises(MemoryError):
        driver.append(1)
    monkeypatch.undo()
    invariants.check(driver.manager, [driver.batch, fork])
    driver.check()
    driver.append(1)
    driver.check()
    driver.manager.release(fork)
    driver.manager.release(driver.batch)
    invariants.check_empty(driver.manager)


@pytest.mark.parametrize("fault", [disk_full, mapping_refused, disk_broken])
def test_no_cold_slab_during_a_resize_leaves_the_size(fault, monkeypatch):
    driver = Driver(hot=60 * BYTES, cold=400 * BYTES)
    with monkeypatch.context() as patch:
        hits = fault(driver, patch)
        driver.append(9 * BLOCK)
        with pytest.raises((OutOfMemoryError, ConfigError)):
            driver.manager.resize(hot=2 * BYTES)
        assert hits
        assert driver.manager.tiers.hot.capacity == 60 * BYTES
        invariants.check(driver.manager, [driver.batch])
        driver.append(1)
        driver.check()
    driver.append(1)
    driver.manager.resize(hot=2 * BYTES)
    assert not driver.manager.tiers.hot.crowded
    driver.append(1)
    driver.check()
    invariants.check(driver.manager, [driver.batch])


def test_a_copy_that_fails_during_a_resize_leaves_the_block(monkeypatch):
    driver = Driver(hot=60 * BYTES, cold=400 * BYTES)
    driver.append(9 * BLOCK + 3)
    driver.manager.settle()
    with monkeypatch.context() as patch:
        hits = copy_fails(driver, patch)
        with pytest.raises(OSError, match="Input/output error"):
            driver.manager.resize(hot=1 * BYTES)
        assert hits
        assert driver.manager.tiers.hot.capacity == 60 * BYTES
        invariants.check(driver.manager, [driver.batch])
        driver.check()
    driver.manager.resize(hot=1 * BYTES)
    driver.append(1)
    driver.check()
    invariants.check(driver.manager, [driver.batch])


def test_a_tier_that_shrinks_later_never_fails_a_step(monkeypatch):
    """What a step could not give up follows in later ones, whose callers asked for nothing."""
    driver, other = (
        (first := Driver(hot=60 * BYTES, cold=400 * BYTES)),
        Driver(manager=first.manager),
    )
    driver.append(9 * BLOCK + 3)
    driver.manager.settle()
    driver.manager.begin(driver.batch, 0, driver.layers)
    driver.manager.resize(hot=2 * BYTES)
    driver.manager.commit(driver.batch, 0, driver.layers)
    with monkeypatch.context() as patch:
        hits = copy_fails(driver, patch)
        other.append(3)
        assert hits
        invariants.check(driver.manager, [driver.batch, other.batch])
    other.append(1)
    assert not driver.manager.tiers.hot.crowded
    driver.check()
    other.check()


def test_a_load_that_is_published_half_way_names_the_old_copy_everywhere(monkeypatch):
    """Two owners, and the second table cannot be written: the new slot is freed again."""
    driver = Driver(layers=1)
    driver.append(BLOCK)
    fork = driver.manager.fork(driver.batch, [0])
    driver.manager.place(driver.batch, lambda *_: False)
    (block,) = driver.batch.blocks[0][0]
    assert block.hot is None and len(block.owners) == 2
    publish, calls = Block.publish, []

    def half(self: Block) -> None:
        calls.append(self)
        if len(calls) > 1:
            publish(self)
            return
        batch, layer, sequence, index = self.owners[0]
        batch.words[layer, sequence, index] = self.word
        raise OSError("no table")

    monkeypatch.setattr(Block, "publish", half)
    assert driver.manager.mover.promote(block)
    driver.manager.settle()
    monkeypatch.undo()
    assert driver.manager.counters.failed_moves == 1
    words = {int(batch.words[0, 0, 0]) for batch in (driver.batch, fork)}
    assert words == {block.word} and block.hot is None
    invariants.check(driver.manager, [driver.batch, fork])
    driver.check()


@pytest.mark.parametrize("nested", [False, True])
def test_a_step_that_fails_holds_no_room(nested):
    """A prompt that was interrupted: the next sequence has all the room there is."""
    driver = Driver(hot=16 * BYTES, cold=48 * BYTES)
    manager, other = driver.manager, Driver(manager=driver.manager)
    driver.append(BLOCK + 3)
    manager.settle()
    live, used = manager.columns.live, manager.tiers.hot.used
    groups = [[0], [1]] if nested else [[0, 1]]
    for group in groups:
        manager.begin(driver.batch, 27 * BLOCK, group)
    assert manager.columns.live == live + 2 * 27
    for _ in groups:
        manager.abort(driver.batch)
        invariants.check(manager, [driver.batch, other.batch])
    assert (manager.columns.live, manager.tiers.hot.used) == (live, used)
    other.append(27 * BLOCK)
    manager.release(other.batch)
    driver.append(BLOCK)
    driver.check()
