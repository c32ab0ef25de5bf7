# SPDX-License-Identifier: Apache-2.0
"""Memory sources: full disks, crashes, budgets."""

from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
import sys

import pytest
import torch

import kvpass
from kvpass.errors import CapacityError, ConfigError, OutOfMemoryError, ShapeError, UnsupportedError
from kvpass.runtime import memory
from kvpass.runtime.memory import DeviceMemory, MappedFile
from kvpass.runtime.pool import Arena, Budget
from tests.runtime.harness import Driver


class Config:
    num_hidden_layers = 2


def test_slabs_are_aligned():
    for source in (DeviceMemory(torch.device("cpu")), MappedFile()):
        slab = source.slab(128 * 77)
        assert slab.numel() == 128 * 77
        assert slab.data_ptr() % 128 == 0


def test_a_full_disk_is_a_typed_error_and_nothing_is_left(monkeypatch, tmp_path):
    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OutOfMemoryError, match="set cold_dir"):
        MappedFile(str(tmp_path)).slab(1 << 20)
    assert not list(tmp_path.iterdir())
    driver = Driver(hot=4 * 8192, cold_dir=str(tmp_path))
    with pytest.raises(OutOfMemoryError):
        driver.append(400)
    monkeypatch.undo()
    driver.append(400)
    driver.check()


def test_a_directory_that_vanished_is_named(tmp_path):
    source = MappedFile(str(tmp_path / "gone"))
    with pytest.raises(ConfigError, match="gone"):
        source.slab(1 << 12)


def test_no_file_is_left_after_a_crash(tmp_path):
    code = f"""
import torch, os, signal, kvpass
class C: num_hidden_layers = 1
cache = kvpass.TieredCache(C(), 4096, hot=1, cold_dir={str(tmp_path)!r}, block_size=32)
x = torch.zeros(1, 1, 512, 16)
cache.update(x, x, 0)
assert cache.snapshot().cold_only_bytes > 0
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], timeout=120)
    assert done.returncode == -signal.SIGKILL
    assert not list(tmp_path.iterdir())


def test_budget_is_kept_and_slabs_come_back():
    budget = Budget(16 * 1024)
    arena = Arena(DeviceMemory(torch.device("cpu")), budget, 1024)
    slots = [arena.allocate() for _ in range(16)]
    assert all(slots)
    assert arena.allocate() is None
    assert budget.used == budget.taken == 16 * 1024
    assert len({slot.address for slot in slots}) == 16
    for slot in slots:
        arena.free(slot)
    assert budget.used == 0
    assert budget.taken < 16 * 1024, "empty slabs are given back"
    assert arena.room() == 16


def test_auto_sizes_are_positive_and_below_what_is_there():
    cpu = torch.device("cpu")
    assert 0 < memory.auto_hot_bytes(cpu) < memory.available_memory()
    assert memory.auto_cold_bytes(cpu, None) > 0


@pytest.mark.parametrize("bad", [0, -1, True, 1.5, "100", "8k", None])
def test_max_tokens_must_be_a_positive_integer(bad):
    with pytest.raises(ConfigError, match=re.escape(f"max_tokens={bad!r}: write the number of")):
        kvpass.TieredCache(Config(), bad)


def test_bad_options_and_configs_are_named_at_construction(tmp_path):
    with pytest.raises(ConfigError, match="hot"):
        kvpass.TieredCache(Config(), 10, hot="64")
    with pytest.raises(ConfigError, match="resident_tokens"):
        kvpass.TieredCache(Config(), 10, resident_token=5)
    with pytest.raises(ConfigError, match="inner"):
        kvpass.TieredCache(Config(), 10, inner="eager")
    with pytest.raises(ConfigError, match="missing"):
        kvpass.TieredCache(Config(), 10, cold_dir=str(tmp_path / "missing"))
    with pytest.raises(UnsupportedError, match="num_hidden_layers"):
        kvpass.TieredCache(object(), 10)

    class Mamba(Config):
        layer_types = ("linear_attention", "full_attention")

    with pytest.raises(UnsupportedError, match="linear_attention"):
        kvpass.TieredCache(Mamba(), 10)


@pytest.mark.filterwarnings("ignore::kvpass.errors.KVPassWarning")
def test_a_tiered_cache_refuses_what_it_cannot_hold():
    cache = kvpass.TieredCache(Config(), 40, block_size=32)
    x = torch.randn(2, 1, 30, 16)
    cache.update(x, x, 0)
    with pytest.raises(CapacityError, match="max_tokens=40"):
        cache.update(x, x, 0)
    with pytest.raises(ShapeError, match="2 sequences"):
        cache.update(x[:1, :, :1], x[:1, :, :1], 0)
    with pytest.raises(ShapeError, match="float16"):
        cache.update(x[:, :, :1].half(), x[:, :, :1].half(), 0)
    keys, _ = cache.update(x[:, :, :5], x[:, :, :5], 0)
    assert torch.equal(keys, torch.cat([x, x[:, :, :5]], 2))
    assert cache.get_seq_length() == 35


@pytest.mark.parametrize("slot", [33 << 20, 1 << 20, 5000 * 128])
def test_pinned_memory_is_asked_for_in_powers_of_two_within_the_budget(slot):
    """B48: the driver's allocator rounds up to them, and would lock almost twice as much."""
    sizes = []

    class Pinned(DeviceMemory):
        def slab(self, size: int) -> torch.Tensor:
            sizes.append(size)
            return super().slab(size)  # never touched, so that it takes no memory

    source = Pinned(torch.device("cpu"))
    source.name = memory.PinnedMemory.name
    budget = Budget(11 * (1 << 30) // 10)
    arena = Arena(source, budget, slot)
    while arena.allocate():
        pass
    assert all(size & (size - 1) == 0 for size in sizes)
    assert sum(sizes) == budget.taken <= budget.capacity
    assert budget.used >= 0.4 * budget.capacity
