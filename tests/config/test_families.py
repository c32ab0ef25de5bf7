# SPDX-License-Identifier: Apache-2.0
"""Options by model family, and the tile that follows from them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpass.config import Config, FamilyConfig, ResolvedFamily
from kvpass.config.families import rounded
from kvpass.errors import ConfigError


@given(st.integers(16, 10_000))
def test_rounding_goes_down_to_what_kernels_run(size: int) -> None:
    runs = rounded(size)
    assert runs in (16, 32, 64, 128)
    assert runs <= size
    assert runs == 128 or 2 * runs > size


def test_sections_combine_option_by_option() -> None:
    config = Config(
        optimizations={
            "llama": {"block_size": [96, 130]},
            "default": {
                "block_size": "auto",
                "prefetch_distance": 2,
                "retention_priority": "layer",
            },
        }
    )
    llama, other = config.family("llama"), config.family("qwen2", hidden_size=2048)
    assert (llama.tile, llama.tile_note) == ((64, 128), "[96, 130], runs as [64, 128]")
    assert (llama.prefetch_distance, str(llama.retention_priority)) == (2, "layer")
    assert (other.tile, other.prefetch_distance) == ((128, 128), 2)
    assert Config().family("llama") == ResolvedFamily("llama")


@pytest.mark.parametrize(
    ("hidden_size", "experts", "tile"),
    [
        (2048, None, (128, 128)),
        (2047, 0, (64, 64)),
        (4096, 1, (128, 128)),
        (4096, 8, (32, 32)),
        (None, 8, (32, 32)),
    ],
)
def test_auto_tile(hidden_size: int | None, experts: int | None, tile: tuple[int, int]) -> None:
    config = Config(optimizations={"default": {"block_size": "auto"}})
    assert config.family("any", hidden_size=hidden_size, experts=experts).tile == tile


def test_auto_tile_of_an_unknown_width() -> None:
    config = Config(optimizations={"default": {"block_size": "Auto"}})
    with pytest.raises(ConfigError, match=r"llama.block_size = 'auto' needs the hidden size"):
        config.family("llama")


@pytest.mark.parametrize(
    "options",
    [
        {"optimizations": {"GPT-NeoX": {"block_size": (32, "64")}}},
        {"optimizations.gpt_neox": {"block_size": [32, 64]}},
        {"optimizations.gpt_neox.block_size": "[32, 64]"},
        {"optimizations": {"gpt_neox": FamilyConfig(block_size="32,64")}},
    ],
)
def test_one_option_written_four_ways(options: dict[str, Any]) -> None:
    config = Config(**options)
    assert config.family("gpt-neox").tile == (32, 64)
    assert config.flat()["optimizations.gpt_neox.block_size"] == (32, 64)
    assert Config(**config.flat()) == config == config.merge()
    assert hash(config) == hash(config.merge())


def test_variables_of_families() -> None:
    env = {
        "KVPASS_OPTIMIZATIONS_QWEN2_MOE_BLOCK_SIZE": "64, 32",
        "KVPASS_OPTIMIZATIONS_DEFAULT_PREFETCH_DISTANCE": "0",
    }
    family = Config.load(env=env).family("qwen2_moe")
    assert (family.tile, family.prefetch_distance) == ((64, 32), 0)
    with pytest.raises(ConfigError, match="unknown variable KVPASS_OPTIMIZATIONS_LLAMA_TILE = "):
        Config.load(env={"KVPASS_OPTIMIZATIONS_LLAMA_TILE": "1"})


BAD: list[tuple[str, Any, str]] = [
    *[
        ("block_size", value, "write two whole numbers, at least 16 queries and 32 keys")
        for value in (
            64,
            "64",
            [64],
            [64, 64, 64],
            [8, 64],
            [64, 0],
            [64, 31],
            [64, -64],
            "wide",
            {},
            "",
        )
    ],
    *[("block_size", value, "write a whole number") for value in ([64, 1.5], [True, 64])],
    *[("prefetch_distance", value, "at least 0") for value in (-1, "-3")],
    *[("prefetch_distance", value, "whole number") for value in ("far", 1.5, True, float("nan"))],
]


@pytest.mark.parametrize(("option", "value", "advice"), BAD)
def test_values_that_do_not_fit(option: str, value: object, advice: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Config(optimizations={"b": {"block_size": "auto"}, "llama": {option: value}})
    assert str(caught.value).startswith(f"optimizations.llama.{option} = {value!r}: ")
    assert advice in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"optimizations": {"llama": {"blocksize": 1}}}, "did you mean 'block_size'"),
        ({"optimizations": {"llama": {"zzz": 1}}}, "a family has block_size, prefetch_distance"),
        ({"optimizations": {"llama": 3}}, "optimizations.llama = 3: write families below it"),
        ({"optimizations": "llama"}, "optimizations = 'llama': write families below it"),
        ({"optimizations": {"7b!": {"block_size": "auto"}}}, "'7b!' is no model_type"),
        ({"optimisations": {}}, "did you mean 'optimizations'"),
        (
            {"optimizations": {"a-b": {"block_size": "auto"}, "a_b": {"block_size": "auto"}}},
            "optimizations.a_b.block_size is given twice",
        ),
    ],
)
def test_sections_that_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Config(**options)
