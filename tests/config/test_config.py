# SPDX-License-Identifier: Apache-2.0
"""Sizes and options: what is accepted, what is refused, and what the message says (case B73)."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpass.config import OPTIONS, Config, MemoryConfig, Written
from kvpass.errors import ConfigError
from kvpass.sizes import format_size, parse_size

UNITS = {"B": 0, "KiB": 10, "MiB": 20, "GiB": 30, "TiB": 40}


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("10GB", 10**10),
        ("10GiB", 10 * 2**30),
        ("64MiB", 64 * 2**20),
        ("1.5 GiB", 3 * 2**29),
        (" 3kb ", 3000),
        (".5TiB", 2**39),
        ("2.kib", 2048),
        ("1B", 1),
        ("1.9B", 1),
        ("0.1GB", 10**8),
        (4096, 4096),
    ],
)
def test_sizes_that_are_read(text: str | int, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("10", "unit is missing"),
        ("10 apples", "unknown unit 'apples'"),
        ("64M", "unknown unit 'M'"),
        ("64gibB", "unknown unit 'gibB'"),
        ("64Gb", "Gb may mean bits; write GB for bytes"),
        ("1.5 Mib", "Mib may mean bits; write MiB for bytes"),
        ("-1", "between 1 byte"),
        ("", "not a number"),
        ("GiB", "not a number"),
        ("1e3MB", "not a number"),
        ("1,5GiB", "not a number"),
        ("-1GiB", "between 1 byte"),
        ("0MiB", "between 1 byte"),
        ("0.3B", "between 1 byte"),
        ("9000000TiB", "between 1 byte"),
        ("nan GiB", "not a number"),
        ("infGB", "not a number"),
        (0, "between 1 byte"),
        (-5, "between 1 byte"),
        (True, "a bool is not a size"),
        (math.nan, "a float is not a size"),
        (math.inf, "a float is not a size"),
        (64.0, "a float is not a size"),
        (None, "a NoneType is not a size"),
        ([1], "a list is not a size"),
    ],
)
def test_sizes_that_are_refused(value: object, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as caught:
        parse_size(value)
    assert repr(value) in str(caught.value)
    assert "64MiB" in str(caught.value), "the message shows how a size is written"


@given(st.integers(1, 1023), st.sampled_from(sorted(UNITS)))
def test_whole_units_survive_a_round_trip(count: int, unit: str) -> None:
    size = count << UNITS[unit]
    assert format_size(size) == f"{count} {unit}"
    assert parse_size(format_size(size)) == size


@given(st.integers(1, 2**60))
def test_any_size_survives_a_round_trip_to_two_decimals(size: int) -> None:
    text = format_size(size)
    assert abs(parse_size(text) - size) <= 0.005 * 2 ** UNITS[text.split()[1]] + 1


def test_format_size_changes_unit_instead_of_showing_1024() -> None:
    assert format_size(2**20 - 1) == "1 MiB"
    assert format_size(0) == "0 B"


WORDS = {
    False: [False, 0, "false", "False", "0", "no", "off", ""],
    True: [True, 1, "true", "1", " yes ", "ON"],
}


@pytest.mark.parametrize(
    ("value", "meaning"), [(value, meaning) for meaning in WORDS for value in WORDS[meaning]]
)
def test_booleans(value: object, meaning: bool) -> None:
    assert Config(poison=value).memory.poison is meaning


GOOD: list[tuple[str, Any, Any]] = [
    ("block_size", 32, 32),
    ("block_size", "4096", 4096),
    ("hot", "64MiB", 2**26),
    ("hot", " Auto ", "auto"),
    ("cold", 10**9, 10**9),
    ("cold_dir", None, None),
    ("gpu_threshold", 1, 1.0),
    ("gpu_threshold", " 0.5", 0.5),
    ("min_frequency", 0, 0.0),
    ("min_frequency", "1.5", 1.5),
    ("resident_tokens", 0, 0),
    ("heat_interval", 1, 1),
]


@pytest.mark.parametrize(("name", "value", "meaning"), GOOD)
def test_values_that_fit(name: str, value: object, meaning: object) -> None:
    assert getattr(Config(**{name: value}).memory, name) == meaning


BAD: list[tuple[str, Any]] = [
    *[("memory.block_size", value) for value in (0, 16, 48, 8192, -32, 256.0, "big", True, None)],
    *[("memory.hot", value) for value in ("10", 0, -1, math.nan, math.inf, "", "none", None, True)],
    *[("memory.cold", value) for value in ("0GiB", "-1GiB", 1.5)],
    *[("memory.gpu_threshold", value) for value in (0, -0.1, 1.01, math.nan, "nan", "", True)],
    *[("memory.min_frequency", value) for value in (-1, math.nan, math.inf, "often", None)],
    *[("memory.resident_tokens", value) for value in (-1, 1.5, "1k", False)],
    *[("memory.heat_interval", value) for value in (0, -64, "0")],
    *[("memory.poison", value) for value in ("maybe", 2, 0.5, None)],
    *[("inner", value) for value in ("nvcc", "", None, 1)],
    *[("cuda_graphs", value) for value in ("maybe", 2, None)],
    *[("memory.cold_dir", value) for value in ("", 3, "/no/such/folder")],
]


@pytest.mark.parametrize(("option", "value"), BAD)
def test_values_that_do_not_fit(option: str, value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        Config(**{option: value})
    message = str(caught.value)
    assert message.startswith(f"{option} = {value!r}: ")
    advice = message.removeprefix(f"{option} = {value!r}: ")
    assert any(word in advice for word in ("write", "should be", "create it")), advice


def test_all_faults_are_reported_at_once() -> None:
    with pytest.raises(ConfigError, match=r"^hot = '10'.*inner = 'gcc'"):
        Config(hot="10", inner="gcc")


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"hot": "10"}, "hot"),
        ({"memory.hot": "10"}, "memory.hot"),
        ({"memory": {"hot": "10"}}, "memory.hot"),
        ({"hot": Written("--hot", "10")}, "--hot"),
    ],
)
def test_a_message_names_the_option_as_it_was_written(options: dict[str, Any], name: str) -> None:
    for make in (Config, Config().merge, lambda **given: Config.load(env={}, **given)):
        with pytest.raises(ConfigError) as caught:
            make(**options)
        assert str(caught.value).startswith(f"{name} = '10': ")


def test_a_flag_that_was_not_given_leaves_the_environment() -> None:
    env = {"KVPASS_HOT": "1MiB"}
    assert Config.load(env=env, hot=Written("--hot", None)).memory.hot == 2**20


def test_cold_dir_must_be_a_writable_directory(tmp_path: Path) -> None:
    assert Config(cold_dir=str(tmp_path)).memory.cold_dir == tmp_path
    assert list(tmp_path.iterdir()) == [], "the check leaves nothing behind"

    missing = tmp_path / "missing"
    with pytest.raises(ConfigError, match=f"{missing} does not exist.*mkdir -p {missing}"):
        Config(cold_dir=missing)

    file = tmp_path / "file"
    file.touch()
    with pytest.raises(ConfigError, match=f"{file} is not a directory"):
        Config(cold_dir=file)


def test_cold_dir_without_write_permission(tmp_path: Path, monkeypatch: Any) -> None:
    # Root may write anywhere, so the refusal of the system is simulated.
    def refuse(**_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("kvpass.config.values.tempfile.TemporaryFile", refuse)
    with pytest.raises(ConfigError, match=f"in {tmp_path} .Permission denied.; make it writable"):
        Config(cold_dir=tmp_path)


@pytest.mark.parametrize(
    "options",
    [
        {"hot": "64MiB"},
        {"memory": {"hot": "64MiB"}},
        {"memory.hot": "64MiB"},
        {"memory": MemoryConfig(hot="64MiB")},
    ],
)
def test_one_option_written_four_ways(options: dict[str, Any]) -> None:
    assert Config(**options) == Config(hot=2**26)


def test_every_option_is_accepted_by_its_full_and_its_short_name() -> None:
    defaults = Config().flat()
    assert tuple(defaults) == OPTIONS
    assert Config(**defaults) == Config()
    assert Config(**{name.rpartition(".")[2]: value for name, value in defaults.items()}) == (
        Config()
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hott": 1}, r"unknown option 'hott' \(value 1\): did you mean 'hot'"),
        ({"fairnes": {"qos": 0.5}}, r"'fairnes' \(value {'qos': 0.5}\): did you mean 'fairness'"),
        ({"memory": {"qos": 0.5}}, r"'memory.qos' \(value 0.5\): did you mean 'fairness.qos'"),
        ({"memory": {"bloc_size": 32}}, r"'memory.bloc_size'.*did you mean 'memory.block_size'"),
        ({"iner": "eager"}, "did you mean 'inner'"),
        ({"zzz": 1}, "the options are block_size, hot"),
        ({"memory": "64MiB"}, "memory = '64MiB': write options below it"),
        (
            {"hot": "1GB", "memory": {"hot": "2GB"}},
            "memory.hot is given twice, hot = '1GB' and memory.hot = '2GB'",
        ),
    ],
)
def test_unknown_and_doubled_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Config(**options)


def test_config_is_frozen_and_hashable() -> None:
    config = Config()
    with pytest.raises(pydantic.ValidationError):
        config.inner = "eager"  # type: ignore[misc]
    with pytest.raises(pydantic.ValidationError):
        config.memory.hot = 1  # type: ignore[misc]
    assert len({config, Config(), Config(hot=1)}) == 2


def test_precedence_is_keyword_environment_file_default(tmp_path: Path) -> None:
    file = tmp_path / "kvpass.yaml"
    file.write_text("memory:\n  hot: 1MiB\n  cold: 1MiB\n  poison: true\ninner: eager\n")
    env = {"KVPASS_MEMORY_HOT": "2MiB", "KVPASS_COLD": "2MiB", "PATH": "/bin"}
    config = Config.load(file, env, hot="3MiB", cold=None)
    assert config.memory.hot == 3 * 2**20
    assert config.memory.cold == 2 * 2**20
    assert config.memory.poison is True
    assert config.inner == "eager"
    assert config.memory.block_size == 256


def test_load_reads_the_environment_of_the_process(monkeypatch: Any) -> None:
    monkeypatch.setenv("KVPASS_POISON", "off")
    monkeypatch.setenv("KVPASS_HEAT_INTERVAL", "8")
    config = Config.load()
    assert (config.memory.poison, config.memory.heat_interval) == (False, 8)


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"KVPASS_HOTT": "1GB"}, "KVPASS_HOTT = '1GB': did you mean KVPASS_HOT?"),
        ({"KVPASS_MEMORY_BLOKSIZE": "1"}, "did you mean KVPASS_MEMORY_BLOCK_SIZE?"),
        ({"KVPASS_MEMORY_ZZZ": "1"}, "unknown variable KVPASS_MEMORY_ZZZ.*KVPASS_HOT, KVPASS_COLD"),
        ({"KVPASS_HOT": "10"}, "^KVPASS_HOT = '10': .*unit is missing"),
        (
            {"KVPASS_HOT": "1GB", "KVPASS_MEMORY_HOT": "2GB"},
            "KVPASS_MEMORY_HOT = '2GB' contradicts KVPASS_HOT = '1GB'",
        ),
        ({"KVPASS_MEMORY_POISON": "maybe"}, "^KVPASS_MEMORY_POISON = 'maybe'"),
    ],
)
def test_environment_that_is_refused(env: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Config.load(env=env)


def test_variables_that_are_no_options_are_left_alone() -> None:
    env = {"KVPASS_CACHE": "/x", "KVPASS_SMOLLM2_WHEEL": "/y", "KVPASS_MYJOB_TITLE": "z"}
    assert Config.load(env=env) == Config()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("memory: {hto: 1GB}", "did you mean 'memory.hot'"),
        ("- hot", "holds list"),
        ("hot: [", "is not YAML"),
        ("hot: '10'", "unit is missing"),
        ("hot: 12:30", r"hot = '12:30'"),
        ("latency_target: 1:30.5", r"latency_target = '1:30.5'"),
    ],
)
def test_files_that_are_refused(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "options.yaml"
    file.write_text(content)
    with pytest.raises(ConfigError, match=message):
        Config.load(file, env={})


def test_a_missing_file_is_an_error_and_an_empty_one_is_not(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.yaml cannot be read"):
        Config.load(tmp_path / "none.yaml", env={})
    empty = tmp_path / "empty.yaml"
    empty.touch()
    assert Config.load(empty, env={}) == Config()


def test_merge_changes_only_what_is_given() -> None:
    first = Config(hot="64MiB", poison=True)
    second = first.merge(hot=None, memory={"block_size": 64})
    assert second == Config(hot="64MiB", poison=True, block_size=64)
    assert first.memory.block_size == 256
    with pytest.raises(ConfigError, match="did you mean"):
        first.merge(blocksize=64)
