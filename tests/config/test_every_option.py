# SPDX-License-Identifier: Apache-2.0
"""Every option does something: each is named here with the test that shows what."""

from __future__ import annotations

import ast
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import kvpass
from kvpass.config import OPTIONS, FamilyConfig

ROOT = Path(__file__).resolve().parents[2]
HERE = "tests/config/test_every_option.py"
MANAGER = "tests/runtime/test_manager.py"
RESIZE = "tests/runtime/test_resize.py"
POLICY = "tests/runtime/test_policy.py"
SHARES = "tests/runtime/test_shares.py"
AHEAD = "tests/runtime/test_readahead.py"

SHOWN_BY = {
    "memory.block_size": (HERE, "block_size_is_the_tokens_of_a_block"),
    "memory.hot": (RESIZE, "a_cache_is_resized_before_and_after_its_first_use"),
    "memory.cold": (MANAGER, "both_tiers_full_is_a_typed_error_and_the_cache_goes_on"),
    "memory.cold_dir": (HERE, "cold_dir_holds_the_cold_blocks"),
    "memory.gpu_threshold": (MANAGER, "demotion_starts_above_the_threshold_and_needs_rare_access"),
    "memory.min_frequency": (MANAGER, "demotion_starts_above_the_threshold_and_needs_rare_access"),
    "memory.resident_tokens": (HERE, "the_first_tokens_stay_in_the_hot_arena"),
    "memory.heat_interval": (HERE, "heat_interval_is_the_steps_of_a_window"),
    "memory.page_size": (RESIZE, "a_smaller_hot_tier_gives_its_slabs_back_at_once"),
    "memory.resident_ratio": (POLICY, "residents_are_the_first_the_last_and_the_hottest"),
    "memory.hot_zone_ratio": (POLICY, "the_protected_zone_keeps_its_share_and_its_warmest"),
    "memory.poison": (MANAGER, "poison_shows_no_stale_read"),
    "attention.prefetch": (AHEAD, "prefetch_distance_and_lookahead_say_what_is_asked_for"),
    "attention.lookahead": (AHEAD, "prefetch_distance_and_lookahead_say_what_is_asked_for"),
    "fairness.qos": ("tests/runtime/test_hot_shares.py", "shares_follow_weights_within_a_tenth"),
    "fairness.latency_target": (SHARES, "a_missed_target_raises_the_weight_until_it_is_met"),
    "fairness.latency_weight": (SHARES, "the_weight_of_the_description"),
    "fairness.token_weight": (SHARES, "the_weight_of_the_description"),
    "inner": ("tests/test_backend.py", "inner_compilers_agree"),
    "cuda_graphs": ("tests/test_replay.py", "the_option_switches_graphs_off"),
    "optimizations.<family>.block_size": (
        "tests/test_family_tiles.py", "a_tile_bounds_what_is_scored_at_once"
    ),
    "optimizations.<family>.prefetch_distance": (
        AHEAD, "prefetch_distance_and_lookahead_say_what_is_asked_for"
    ),
    "optimizations.<family>.retention_priority": (
        "tests/test_tuning.py", "batches_have_what_their_family_says"
    ),
}  # fmt: skip


def test_every_option_is_here() -> None:
    families = [f"optimizations.<family>.{name}" for name in FamilyConfig.model_fields]
    assert sorted(SHOWN_BY) == sorted([*OPTIONS, *families])


@pytest.mark.parametrize("option", SHOWN_BY)
def test_the_named_test_exists(option: str) -> None:
    path, name = SHOWN_BY[option]
    text = (ROOT / path).read_text(encoding="utf-8")
    found = [
        node
        for node in ast.parse(text).body
        if isinstance(node, ast.FunctionDef) and node.name == f"test_{name}"
    ]
    assert len(found) == 1, SHOWN_BY[option]


class Cache:
    """A cache of one layer that is filled and read outside a compiled graph."""

    def __init__(self, tokens: int, **options: Any) -> None:
        model = SimpleNamespace(num_hidden_layers=1)
        self.cache = kvpass.TieredCache(model, 2048, **options)
        self.append(tokens)

    def append(self, tokens: int) -> None:
        k = torch.randn(1, 2, tokens, 16)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "a TieredCache is used outside")
            self.cache.update(k, k, 0)

    @property
    def blocks(self) -> list[Any]:
        assert self.cache.batch is not None
        return self.cache.batch.blocks[0][0]


@pytest.mark.parametrize(("size", "blocks"), [(32, 4), (64, 2), (128, 1)])
def test_block_size_is_the_tokens_of_a_block(size: int, blocks: int) -> None:
    cache = Cache(100, block_size=size)
    assert len(cache.blocks) == blocks
    assert {block.geometry.block_size for block in cache.blocks} == {size}


def test_cold_dir_holds_the_cold_blocks(tmp_path: Path) -> None:
    cache = Cache(300, block_size=32, cold_dir=str(tmp_path))
    cache.cache.manager.settle()
    addresses = [block.cold.address for block in cache.blocks if block.cold is not None]
    maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    held = [
        tuple(int(end, 16) for end in line[0].split("-"))
        for line in maps
        if len(line) > 5 and line[5].startswith(str(tmp_path))
    ]
    assert addresses
    assert all(any(start <= a < end for start, end in held) for a in addresses)


@pytest.mark.parametrize(("tokens", "first"), [(0, 0), (64, 2), (128, 4)])
def test_the_first_tokens_stay_in_the_hot_arena(tokens: int, first: int) -> None:
    cache = Cache(512, block_size=32, hot="64KiB", resident_tokens=tokens, resident_ratio=0)
    for _ in range(200):
        cache.append(1)
    resident = [block.resident for block in cache.blocks]
    assert sum(resident) == first
    assert all(resident[:first])
    assert all(block.hot is not None for block in cache.blocks[:first])


@pytest.mark.parametrize(("interval", "steps"), [(3, 1 + 2 + 3), (5, 1 + 2 + 4 + 5)])
def test_heat_interval_is_the_steps_of_a_window(interval: int, steps: int) -> None:
    """The first window after a prompt is one step; each is twice as long as the one before."""
    cache = Cache(64, block_size=32, heat_interval=interval)
    for step in range(1, steps + 1):
        assert all(block.frequency != block.frequency for block in cache.blocks), step
        cache.append(1)
    assert all(block.frequency == block.frequency for block in cache.blocks[:2])
