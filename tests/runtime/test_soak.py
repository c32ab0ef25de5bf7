# SPDX-License-Identifier: Apache-2.0
"""Four threads with caches of their own on one manager whose tiers are too small for all.

``SOAK_SECONDS=120 python -m pytest -n 0 tests/runtime/test_soak.py`` runs it longer than the ten
seconds of CI.
"""

from __future__ import annotations

import os
import random
import sys
import threading
import time
from collections import Counter

import pytest
import torch

from kvpass.errors import OutOfMemoryError
from kvpass.runtime.geometry import BlockGeometry
from kvpass.runtime.manager import Manager
from tests.runtime import invariants
from tests.runtime.harness import BLOCK, Driver

SECONDS = float(os.environ.get("SOAK_SECONDS", "10"))
THREADS = 4
BYTES = BlockGeometry(2, 16, 16, torch.float32, BLOCK).block_bytes


class Worker(threading.Thread):
    """Random operations on up to three caches, each output beside the reference."""

    def __init__(self, manager: Manager, seed: int, end: float) -> None:
        super().__init__(name=f"soak-{seed}")
        self.manager = manager
        self.rng = random.Random(seed)
        self.end = end
        self.caches: list[Driver] = []
        self.done: Counter[str] = Counter()
        self.error: BaseException | None = None

    def run(self) -> None:
        actions = [self.append] * 6 + [self.fork, self.crop, self.free, self.migrate, self.look]
        try:
            while time.monotonic() < self.end:
                if not self.caches:
                    self.caches.append(self.fresh())
                action = self.rng.choice(actions)
                try:
                    action(self.rng.choice(self.caches))
                    self.done[action.__name__] += 1
                except OutOfMemoryError:
                    self.done["refused"] += 1
                    self.free(self.rng.choice(self.caches))
        except BaseException as error:
            self.error = error

    def fresh(self) -> Driver:
        size, layers = self.rng.randint(1, 2), self.rng.randint(1, 2)
        return Driver(manager=self.manager, size=size, layers=layers)

    def append(self, driver: Driver) -> None:
        if driver.dense[0][0].shape[2] > 12 * BLOCK:
            return self.crop(driver)
        tokens = self.rng.choice([1, 1, 1, 5, 33, 64])
        queries = driver.random(tokens, 6, 16)
        for layer, out in enumerate(driver.append(tokens, queries)):
            error = (out - driver.attention(queries, layer)).abs().max().item()
            assert error < 1e-5, f"layer {layer} is off by {error}"
        return None

    def fork(self, driver: Driver) -> None:
        if len(self.caches) > 2:
            return self.free(driver)
        fork = self.fresh()
        self.manager.release(fork.batch)
        chosen = [self.rng.randrange(driver.batch.size) for _ in range(self.rng.randint(1, 2))]
        fork.batch = self.manager.fork(driver.batch, chosen)
        fork.layers = driver.layers
        fork.dense = [(k[chosen], v[chosen]) for k, v in driver.dense]
        self.caches.append(fork)
        return None

    def crop(self, driver: Driver) -> None:
        length = self.rng.randint(0, driver.dense[0][0].shape[2])
        self.manager.crop(driver.batch, length)
        driver.dense = [(k[:, :, :length], v[:, :, :length]) for k, v in driver.dense]

    def free(self, driver: Driver) -> None:
        driver.check()
        self.caches.remove(driver)
        self.manager.release(driver.batch)

    def migrate(self, driver: Driver) -> None:
        self.manager.place(driver.batch, lambda *_: self.rng.random() < 0.5)

    def look(self, driver: Driver) -> None:
        driver.check()
        self.manager.snapshot()


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 300)
def test_threads_on_one_manager_for_a_while(record_property):
    """B50: every output is its own sequence's, and nothing is left at the end."""
    first = Driver(
        hot=60 * BYTES, cold=300 * BYTES, page_size=4 * BYTES, poison=True, heat_interval=8,
        resident_tokens=64,
    )  # fmt: skip
    manager = first.manager
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        workers = [Worker(manager, seed, time.monotonic() + SECONDS) for seed in range(THREADS)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    finally:
        sys.setswitchinterval(interval)
    for worker in workers:
        if worker.error is not None:
            raise worker.error
    caches = [cache for worker in workers for cache in worker.caches]
    manager.settle()
    invariants.check(manager, [cache.batch for cache in (first, *caches)])
    for cache in caches:
        cache.check()
    for cache in (first, *caches):
        manager.release(cache.batch)
    invariants.check_empty(manager)
    done = sum((worker.done for worker in workers), Counter())
    counters = manager.counters
    assert counters.failed_moves == 0
    assert min(done[name] for name in ("append", "fork", "crop", "free", "migrate")) > 0
    assert min(counters.demoted_blocks, counters.loaded_blocks, counters.copied_blocks) > 0
    record_property(
        "summary",
        f"soak of {SECONDS:.0f} s: {sum(done.values())} operations ({dict(done)}), "
        f"{counters.stored_blocks} stored, {counters.loaded_blocks} loaded, "
        f"{counters.demoted_blocks} demoted, {counters.copied_blocks} copied on write",
    )
