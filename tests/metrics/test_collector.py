# SPDX-License-Identifier: Apache-2.0
"""Series of many caches in one process: told apart, counted once, gone with their manager."""

from __future__ import annotations

import gc
import math
from pathlib import Path
from typing import Any

import numpy as np
import prometheus_client
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import CollectorRegistry

from kvpass.config import Config
from kvpass.metrics import Collector
from kvpass.metrics.series import SERIES
from kvpass.runtime import roster
from kvpass.runtime.manager import Manager
from kvpass.runtime.move import Move
from tests.runtime.harness import BLOCK, Driver


@pytest.fixture(autouse=True)
def _no_managers_of_other_tests() -> None:
    gc.collect()


def registry() -> CollectorRegistry:
    made = CollectorRegistry()
    made.register(Collector())
    return made


def page(source: CollectorRegistry | None = None) -> dict[tuple[str, ...], float]:
    """(name, label values sorted by label name) -> value, through the official parser."""
    text = prometheus_client.generate_latest(source or registry()).decode()
    return {
        (sample.name, *(sample.labels[key] for key in sorted(sample.labels))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def of(driver: Driver, name: str, *labels: str) -> float | None:
    """A series without `device`, whose labels but `manager` are given in the order of names."""
    number = str(driver.manager.number)
    for key, value in page().items():
        left = list(key[1:])
        if key[0] == name and {"cpu", number} <= set(left):
            left.remove("cpu")
            left.remove(number)
            if left == list(labels):
                return value
    return None


def even_driver(**options: Any) -> Driver:
    """One layer, one head, keys of zeros: every token gets the same share of the softmax."""
    return Driver(layers=1, heads=1, **options)


def append_zeros(driver: Driver, tokens: int) -> None:
    with driver.manager.step(driver.batch, tokens, driver.layers) as rows:
        k, v, q = (torch.zeros(1, 1, tokens, 16) for _ in range(3))
        token = torch.ops.kvpass.append(k, v, rows, 0, BLOCK)
        torch.ops.kvpass.attend(q, k, v, token, rows, 0, BLOCK, 1.0, True, None, None)


def test_caches_come_and_go_without_duplicates() -> None:
    shared = registry()
    before = page(shared)[("kvpass_managers",)]
    for _ in range(5):
        pair = [Driver(), Driver()]
        for driver in pair:
            driver.append(40)
        found = page(shared)
        assert found[("kvpass_managers",)] == before + 2
        numbers = {str(driver.manager.number) for driver in pair}
        assert len(numbers) == 2
        for number in numbers:
            assert found[("kvpass_steps_total", "cpu", number)] == 1
            assert found[("kvpass_tokens", "cpu", number)] == 40
        del pair, driver
        gc.collect()
        after = page(shared)
        assert after[("kvpass_managers",)] == before
        assert not [key for key in after if set(key[1:]) & numbers]
    prometheus_client.CollectorRegistry().register(Collector())
    other = registry()
    other.register(Collector())  # unwise, but no start-up crash


def test_a_collector_keeps_no_manager_alive() -> None:
    manager = Manager(Config.load(hot="1MiB", cold="1MiB"), "cpu")
    number = manager.number
    collector = Collector()
    list(collector.collect())
    assert number in [m.number for m in roster.managers()]
    del manager
    assert number not in [m.number for m in roster.managers()]


def test_four_blocks_are_four_lookups_a_window() -> None:
    """Windows of one, two and four steps, while all is hot."""
    driver = even_driver(heat_interval=10)
    append_zeros(driver, 4 * BLOCK)
    for windows, steps in enumerate((1, 2, 4), start=1):
        for _ in range(steps):
            append_zeros(driver, 1)
        assert of(driver, "kvpass_lookups_total", "hot") == 4 * windows
    assert of(driver, "kvpass_lookups_total", "cold") == 0
    assert of(driver, "kvpass_accesses_total", "hot") == 4 * 7
    assert of(driver, "kvpass_hit_ratio") == 1.0
    snapshot = driver.manager.snapshot()
    assert snapshot.counters.hot_lookups == 12


def test_no_ratio_before_a_window_has_ended() -> None:
    driver = even_driver(heat_interval=10)
    append_zeros(driver, 4 * BLOCK)
    assert of(driver, "kvpass_hit_ratio") is None
    assert of(driver, "kvpass_accesses_total", "hot") == 0
    assert driver.manager.snapshot().counters.hit_ratio is None


@pytest.mark.parametrize("cold", ["64MiB", "100B"])
def test_two_hits_and_two_misses_are_half(cold: str) -> None:
    """Where nothing can be cold all four hit; lookups are four either way."""
    driver = even_driver(heat_interval=10, cold=cold, resident_tokens=0, min_frequency=100)
    append_zeros(driver, 4 * BLOCK)
    driver.manager.settle()
    driver.manager.place(driver.batch, lambda layer, sequence, index: index >= 2)
    append_zeros(driver, 1)
    lookups = [of(driver, "kvpass_lookups_total", tier) for tier in ("hot", "cold")]
    assert lookups == ([2, 2] if cold == "64MiB" else [4, 0])
    assert of(driver, "kvpass_hit_ratio") == (0.5 if cold == "64MiB" else 1.0)


def test_three_blocks_offloaded_are_three_blocks_of_bytes() -> None:
    driver = even_driver()
    append_zeros(driver, 3 * BLOCK)
    driver.manager.settle()
    block = driver.geometry.payload_bytes
    assert of(driver, "kvpass_migration_bytes_total", "store") == 3 * block
    assert of(driver, "kvpass_migration_blocks_total", "store") == 3
    seconds = of(driver, "kvpass_migration_seconds_total", "store")
    assert seconds is not None and seconds > 0
    rate = of(driver, "kvpass_link_bytes_per_second", "store")
    assert rate is not None and rate >= 0.999 * 3 * block / seconds
    driver.manager.place(driver.batch, lambda *_: False)
    assert of(driver, "kvpass_demoted_blocks_total") == 3
    assert of(driver, "kvpass_migration_bytes_total", "load") == 0  # a demotion moves nothing
    driver.manager.place(driver.batch, lambda layer, sequence, index: index == 1)
    assert of(driver, "kvpass_migration_bytes_total", "load") == block
    assert of(driver, "kvpass_migration_bytes_total", "store") == 3 * block


def test_blocks_by_state_and_fragmentation() -> None:
    driver = even_driver()
    append_zeros(driver, 3 * BLOCK + 8)
    driver.manager.settle()
    driver.manager.place(driver.batch, lambda layer, sequence, index: index != 0)
    assert of(driver, "kvpass_blocks", "written_through", "hot") == 2
    assert of(driver, "kvpass_blocks", "unfinished", "hot") == 1
    assert of(driver, "kvpass_blocks", "full", "cold") == 1
    assert of(driver, "kvpass_block_bytes", "full", "cold") == driver.geometry.block_bytes
    # 2 x 32 + 8 tokens in three slots of 32; three full ones below
    assert of(driver, "kvpass_internal_fragmentation_ratio", "hot") == pytest.approx(24 / 96)
    assert of(driver, "kvpass_internal_fragmentation_ratio", "cold") == 0
    taken = of(driver, "kvpass_arena_taken_bytes", "hot")
    used = of(driver, "kvpass_arena_used_bytes", "hot")
    assert taken is not None and used == 3 * driver.geometry.block_bytes
    external = of(driver, "kvpass_external_fragmentation_ratio", "hot")
    assert external == pytest.approx(1 - used / taken)
    assert of(driver, "kvpass_sequences") == 1
    assert of(driver, "kvpass_demotion_threshold_ratio") == 0.8


def test_shared_blocks_count_once_and_stay_accounted() -> None:
    driver = even_driver()
    append_zeros(driver, 2 * BLOCK)
    driver.manager.settle()
    fork = driver.manager.fork(driver.batch, [0, 0])
    snapshot = driver.manager.snapshot()
    assert snapshot.blocks["hot_written_through"].blocks == 2
    assert snapshot.sequences == 3
    assert snapshot.tokens == 3 * 2 * BLOCK
    assert all(use.held == use.used for use in snapshot.tiers.values())
    driver.manager.release(fork)


class HeldCopies:
    """A copier that starts nothing until it is told to."""

    def __init__(self) -> None:
        self.moves: list[Move] = []

    def submit(self, move: Move) -> bool:
        self.moves.append(move)
        return len(self.moves) <= 2

    def depth(self) -> int:
        return len(self.moves)

    def close(self) -> None:
        pass


def test_copies_in_flight_and_waiting() -> None:
    driver = even_driver()
    copier = driver.manager.mover.copier = HeldCopies()
    append_zeros(driver, 4 * BLOCK)
    assert of(driver, "kvpass_moves_in_flight", "store") == 2
    assert of(driver, "kvpass_moves_in_flight", "load") == 0
    assert of(driver, "kvpass_backlog_blocks") == 2
    assert of(driver, "kvpass_blocks", "full", "hot") == 4
    driver.manager.release(driver.batch)  # copies of what nobody owns any more are no leak
    snapshot = driver.manager.snapshot()
    assert (snapshot.sequences, snapshot.stores_in_flight) == (0, 2)
    assert all(use.held == use.used > 0 for use in snapshot.tiers.values())
    for move in copier.moves[:2]:
        move.run()
    snapshot = driver.manager.snapshot()
    assert snapshot.stores_in_flight == 0
    assert all(use.held == use.used == 0 for use in snapshot.tiers.values())
    assert of(driver, "kvpass_migration_bytes_total", "store") == 0


def test_a_failed_copy_is_counted_and_moves_no_bytes() -> None:
    driver = even_driver()
    copier = driver.manager.mover.copier = HeldCopies()
    append_zeros(driver, BLOCK)
    copier.moves[0].finish(error=OSError("no space left"))
    assert of(driver, "kvpass_copy_failures_total") == 1
    assert of(driver, "kvpass_migration_bytes_total", "store") == 0
    assert of(driver, "kvpass_migration_seconds_total", "store") == 0


def test_the_threshold_and_the_windows_that_lowered_it() -> None:
    driver = even_driver(gpu_threshold=0.7)
    append_zeros(driver, BLOCK)
    assert of(driver, "kvpass_demotion_threshold_ratio") == 0.7
    assert of(driver, "kvpass_thrash_events_total") == 0
    slots = driver.manager.tiers.hot_slots(driver.geometry.block_bytes)
    driver.manager.mover._watch(slots)
    driver.manager.mover._watch(slots)
    assert of(driver, "kvpass_demotion_threshold_ratio") == pytest.approx(0.5)
    assert of(driver, "kvpass_thrash_events_total") == 2


def test_weight_balance_is_a_histogram_where_shares_are_known() -> None:
    driver = Driver(size=3, hot="80KiB")
    driver.append(8)
    assert of(driver, "kvpass_weight_balance_ratio_bucket", "+Inf") is None
    size = driver.geometry.block_bytes
    assert driver.manager.tiers.hot_slots(size) == 10  # each sequence holds two
    driver.batch.shares[size] = np.array([2.5, 2.0, 1.0]) * size
    snapshot = driver.manager.snapshot()
    assert [use.balance for use in snapshot.by_sequence] == pytest.approx([0.8, 1.0, 2.0])
    counts = {
        bound: of(driver, "kvpass_weight_balance_ratio_bucket", bound)
        for bound in ("0.5", "0.8", "0.9", "1.0", "1.25", "2.0", "+Inf")
    }
    assert counts == {"0.5": 0, "0.8": 1, "0.9": 1, "1.0": 2, "1.25": 2, "2.0": 3, "+Inf": 3}


def test_names_follow_the_conventions_and_every_series_is_on_the_page() -> None:
    driver = even_driver(heat_interval=4)
    append_zeros(driver, BLOCK)
    for _ in range(4):
        append_zeros(driver, 1)
    names = {key[0] for key in page()}
    for series in SERIES:
        assert series.name.startswith("kvpass_") and not series.name.endswith("_total")
        assert series.shown in names, series.name
        assert series.help.endswith(".")
    assert all(math.isfinite(value) for value in page().values())


def test_the_readme_has_every_series() -> None:
    text = (Path(__file__).resolve().parents[2] / "README.md").read_text(encoding="utf-8")
    for series in SERIES:
        labels = ", ".join(f"`{label}`" for label in series.labels) or "-"
        assert f"| `{series.shown}` | {labels} | {series.help[:-1]} |" in text
