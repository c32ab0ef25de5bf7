# SPDX-License-Identifier: Apache-2.0
"""Memory sources: full disks, crashes, budgets."""

from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
import sys
import weakref
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

import kvpass
from kvpass.errors import CapacityError, ConfigError, OutOfMemoryError, ShapeError, UnsupportedError
from kvpass.runtime import memory
from kvpass.runtime.memory import DeviceMemory, MappedFile
from kvpass.runtime.pool import Arena, Budget
from kvpass.runtime.tiers import Tiers, check_cold
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


def test_a_driver_that_refuses_to_pin_is_quoted_with_what_helps(monkeypatch):
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(memory.torch, "empty", refuse)
    words = "refused to pin 4 KiB of host memory: CUDA error: out of memory; lower cold, or free"
    with pytest.raises(OutOfMemoryError, match=words) as caught:
        memory.PinnedMemory().slab(4096)
    assert "ulimit" not in str(caught.value), "CUDA does not count what it pins as locked"


CPU, GPU = torch.device("cpu"), torch.device("cuda")


def free_disk(monkeypatch: pytest.MonkeyPatch, size: Callable[[], int]) -> list[str]:
    """No GPU, and so many bytes free on every disk; returns the directories that were asked for."""
    asked: list[str] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(
        memory.shutil, "disk_usage", lambda path: asked.append(path) or SimpleNamespace(free=size())
    )
    return asked


def test_a_cold_tier_larger_than_the_free_disk_is_refused_with_both_sizes(monkeypatch, tmp_path):
    asked = free_disk(monkeypatch, lambda: 3 << 20)
    place = {"cold_dir": str(tmp_path), "hot": "1MiB"}
    words = f"cold = 4 MiB is more than the 3 MiB of disk free in '{tmp_path}': set cold_dir"
    for make in (
        lambda: kvpass.Manager(device="cpu", cold="4MiB", **place),
        lambda: kvpass.TieredCache(Config(), 64, cold=4 << 20, **place),
        lambda: kvpass.TieredCache(Config(), 64, **place).resize(cold="4MiB"),
    ):
        with pytest.raises(ConfigError, match=re.escape(words)):
            make()
    assert set(asked) == {str(tmp_path)}
    assert not list(tmp_path.iterdir())
    with pytest.raises(ConfigError, match=re.escape(f"free in '{memory.tempfile.gettempdir()}'")):
        kvpass.Manager(device="cpu", hot="1MiB", cold="4MiB")


def test_a_cold_tier_that_fits_is_not_refused(monkeypatch, tmp_path):
    kvpass.Manager(device="cpu", hot="1MiB", cold="64MiB")  # of what there really is
    free_disk(monkeypatch, lambda: 3 << 20)
    cache = kvpass.TieredCache(Config(), 64, hot="1MiB", cold="3MiB", cold_dir=str(tmp_path))
    cache.resize(hot="2MiB", cold="2MiB")
    assert kvpass.Manager(device="cpu", hot="1MiB").tiers.cold.capacity == (3 << 20) // 2
    monkeypatch.undo()
    check_cold(1 << 60, CPU, tmp_path / "gone")  # whoever makes files there says it


def test_what_a_cold_tier_has_taken_counts_as_available(monkeypatch):
    driver = Driver(hot="64KiB", cold="8MiB")
    driver.append(1000)
    driver.manager.settle()
    tiers = driver.manager.tiers
    assert tiers.cold.taken >= 62 * 8192
    free_disk(monkeypatch, lambda: 8 << 20)
    with pytest.raises(ConfigError, match="cold = 64 MiB is more than the 8\\.[0-9]+ MiB of disk"):
        driver.manager.resize(cold="64MiB")
    assert tiers.cold.capacity == 8 << 20
    driver.manager.resize(cold=(8 << 20) + tiers.cold.taken)
    free_disk(monkeypatch, lambda: 0)
    driver.manager.resize(cold="4MiB")  # less than before asks for nothing
    assert tiers.cold.capacity == 4 << 20
    cache = kvpass.TieredCache(Config(), 64, manager=driver.manager)
    assert cache.kvpass_config.memory.cold == 8 << 20  # was the manager's to ask for
    driver.check()


def test_on_a_gpu_the_host_memory_available_counts(monkeypatch):
    monkeypatch.setattr(memory, "available_memory", lambda: 3 << 30)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    free_disk(monkeypatch, lambda: 1 << 50)
    check_cold(3 << 30, GPU)
    words = "cold = 4 GiB is more than the 3 GiB of host memory available: give a part"
    with pytest.raises(ConfigError, match=words):
        check_cold(4 << 30, GPU)
    # What torch keeps pinned is given to the next slabs.
    stats = {"allocated_bytes.current": 3 << 30, "active_bytes.current": 2 << 30}
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "host_memory_stats", lambda: stats)
    check_cold(4 << 30, GPU)
    # Where the device is not known yet, it may be the one with more.
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    check_cold(5 << 30)
    free_disk(monkeypatch, lambda: 1 << 30)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    check_cold(4 << 30)
    with pytest.raises(ConfigError, match="more than the 4 GiB of host memory available"):
        check_cold(5 << 30)


def test_what_dropped_managers_still_hold_is_collected_before_a_refusal(monkeypatch):
    driver = Driver(hot="64KiB", cold="8MiB")
    driver.append(1000)
    driver.manager.settle()
    (arena,) = driver.manager.tiers.arenas("cold")
    held = weakref.ref(arena)
    free_disk(monkeypatch, lambda: 1 << 20 if held() is not None else 8 << 20)
    del driver, arena
    config = kvpass.Config.load(hot="1MiB", cold="8MiB")
    assert Tiers(config, CPU).cold.capacity == 8 << 20
    assert held() is None


@pytest.mark.parametrize(
    ("limit", "used", "left"), [("1000000", "400000", 600000), ("5", "9", 0), ("max", "1", None)]
)
def test_a_container_has_no_more_memory_than_it_may_take(monkeypatch, tmp_path, limit, used, left):
    whole = memory.available_memory()
    monkeypatch.setattr(memory, "CGROUP", tmp_path)
    (tmp_path / "memory.max").write_text(limit + "\n")
    (tmp_path / "memory.current").write_text(used + "\n")
    found = memory.available_memory()
    assert found == left if left is not None else found > whole // 2
