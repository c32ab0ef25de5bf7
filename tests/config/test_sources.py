# SPDX-License-Identifier: Apache-2.0
"""Files, variables, relations between options, and where each value came from (case B73)."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpass import backends
from kvpass.cli import main
from kvpass.config import OPTIONS, Config, Duration, Written
from kvpass.config.report import report
from kvpass.errors import ConfigError

README = (Path(__file__).resolve().parents[2] / "README.md").read_text(encoding="utf-8")
GROUPED = """\
memory: {block_size: 256, gpu_threshold: 0.8, min_frequency: 2}
attention: {prefetch: true, lookahead: 4}
optimizations: {llama: {block_size: [96, 96], prefetch_distance: 4, retention_priority: layer_depth * 0.8}}
"""  # noqa: E501
FLAT = """\
page_size: 2MiB
hot_zone_ratio: 0.6
migration_threshold: 0.8
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "kvpass.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_the_grouped_template_loads(tmp_path: Path) -> None:
    config = Config.load(write(tmp_path, GROUPED), env={})
    assert (config.memory.block_size, config.memory.gpu_threshold) == (256, 0.8)
    assert (config.memory.min_frequency, config.attention.prefetch) == (2.0, True)
    assert config.attention.lookahead == 4
    llama = config.family("llama")
    assert (llama.tile, llama.prefetch_distance) == ((64, 64), 4)
    assert llama.retention_priority is not None
    assert llama.retention_priority.evaluate(layer=16, layers=32) == 0.4
    assert config.family("mixtral").tile is None


def test_the_flat_template_loads(tmp_path: Path) -> None:
    text = FLAT.replace("0.8", "0.75").replace("0.6", "0.55").replace("2MiB", "4MiB")
    for content, values in ((FLAT, (2 << 20, 0.6, 0.8)), (text, (4 << 20, 0.55, 0.75))):
        memory = Config.load(write(tmp_path, content), env={}).memory
        assert (memory.page_size, memory.hot_zone_ratio, memory.gpu_threshold) == values


def test_a_file_without_bottom_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="too deeply nested"):
        Config.load(write(tmp_path, "hot: " + "[" * 3000), env={})


def test_a_bad_value_of_a_file_names_its_line(tmp_path: Path) -> None:
    file = write(tmp_path, "memory:\n  block_size: 256\n  hot: 2GiBB\n")
    with pytest.raises(ConfigError, match=r"kvpass.yaml:3: hot = '2GiBB': .*unknown unit"):
        Config.load(file, env={})
    with pytest.raises(ConfigError, match=r"^hot = '2GiBB'"):
        Config(hot="2GiBB")


def test_migration_threshold_is_another_name_of_gpu_threshold(tmp_path: Path) -> None:
    assert Config(migration_threshold=0.7) == Config(gpu_threshold=0.7)
    assert Config(**{"memory.migration_threshold": 0.7}) == Config(memory={"gpu_threshold": 0.7})
    assert Config(migration_threshold=0.7, gpu_threshold="0.70").memory.gpu_threshold == 0.7
    with pytest.raises(ConfigError, match=r"gpu_threshold is given twice.*migration_threshold"):
        Config(gpu_threshold=0.8, migration_threshold=0.7)
    with pytest.raises(ConfigError, match="kvpass.yaml: memory.gpu_threshold is given twice"):
        Config.load(write(tmp_path, "gpu_threshold: 0.8\nmigration_threshold: 0.7"), env={})
    env = {"KVPASS_MIGRATION_THRESHOLD": "0.7"}
    assert Config.load(write(tmp_path, "gpu_threshold: 0.8"), env).memory.gpu_threshold == 0.7
    with pytest.raises(ConfigError, match="KVPASS_GPU_THRESHOLD = '0.8' contradicts KVPASS_MIG"):
        Config.load(env=env | {"KVPASS_GPU_THRESHOLD": "0.8"})


def test_a_variable_names_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, "hot: 1MiB\ncold: 1MiB")
    other = tmp_path / "other.yaml"
    other.write_text("hot: 3MiB", encoding="utf-8")
    env = {"KVPASS_CONFIG": str(path), "KVPASS_COLD": "2MiB"}
    memory = Config.load(env=env).memory
    assert (memory.hot, memory.cold) == (1 << 20, 2 << 20)
    assert Config.load(other, env).memory.hot == 3 << 20, "an argument is nearer than a variable"
    with pytest.raises(ConfigError, match="KVPASS_CONFIG = ' ': name a YAML file"):
        Config.load(env={"KVPASS_CONFIG": " "})
    with pytest.raises(ConfigError, match="cannot be read"):
        Config.load(env={"KVPASS_CONFIG": str(tmp_path / "none.yaml")})
    with pytest.raises(ConfigError, match="did you mean KVPASS_CONFIG"):
        Config.load(env={"KVPASS_CONFG": str(path)})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("hot: 1MiB\nhot: 2MiB", r"kvpass.yaml:2: hot is given twice"),
        ("memory: {hot: 1MiB}\nhot: 2MiB", "memory.hot is given twice"),
        ("3: 4", "kvpass.yaml:1: 3 is no name of an option"),
        ("memory: 5", "memory = 5: write options below it"),
        ("memory: {hot: {a: {b: {c: 1}}}}", "memory.hot|hot = "),
        ("a: &a {b: *a}", "unknown option|recursive|is not YAML|optimizations"),
    ],
)
def test_files_that_are_refused(tmp_path: Path, content: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Config.load(write(tmp_path, content), env={})


def test_every_option_remembers_where_it_was_written(tmp_path: Path) -> None:
    path = write(tmp_path, "memory:\n  hot: 1MiB\n\n  cold: 1MiB\n")
    env = {"KVPASS_COLD": "2MiB", "KVPASS_OPTIMIZATIONS_LLAMA_PREFETCH_DISTANCE": "3"}
    config = Config.load(path, env, poison=True, block_size=Written("--block-size", 64))
    sources = {row.option: row.source for row in report(config)}
    assert sources["memory.hot"] == f"{path}:2"
    assert sources["memory.cold"] == "variable KVPASS_COLD"
    assert sources["memory.poison"] == "keyword argument"
    assert sources["memory.block_size"] == "flag --block-size"
    assert sources["inner"] == "default"
    name = "optimizations.llama.prefetch_distance"
    assert sources[name] == "variable KVPASS_OPTIMIZATIONS_LLAMA_PREFETCH_DISTANCE"
    merged = config.merge(inner="eager")
    assert merged.written("inner") == Written("inner", "eager")
    assert merged.written("memory.hot") == config.written("memory.hot")
    assert Config.load(env={}, poison=True) == Config(poison="yes"), "sources do not count"


def test_options_of_the_backend_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    seen: list[Config] = []
    monkeypatch.setattr(
        backends, "compile_inner", lambda gm, inputs, config: seen.append(config) or gm.forward
    )
    torch.compile(lambda x: x + 1, backend=backends.backend, options={"hot": "1MiB"})(torch.ones(1))
    written = seen[0].written("memory.hot")
    assert written is not None
    assert written.origin == "options= of torch.compile"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"latency_weight": 0, "token_weight": 0}, "latency_weight = 0 and token_weight = 0"),
        ({"page_size": "3KiB"}, "page_size = '3KiB': write at least 4 KiB"),
        ({"page_size": 0}, "page_size = 0: size 0"),
        ({"page_size": "auto"}, "page_size = 'auto': size 'auto'"),
        ({"hot_zone_ratio": 1}, "hot_zone_ratio = 1: write less than 1"),
        ({"lookahead": 0}, "lookahead = 0: write at least 1"),
        ({"latency_target": 20}, "latency_target = 20: the unit is missing"),
        ({"latency_target": "20"}, "latency_target = '20': the unit is missing"),
        ({"latency_target": "0ms"}, "between 1us and 3600s"),
        ({"latency_target": "-5ms"}, "write a duration as"),
        ({"latency_target": "nan"}, "write a duration as"),
        ({"latency_target": "2h"}, "write a duration as"),
        ({"latency_target": True}, "write a duration as"),
    ],
)
def test_options_that_contradict_or_do_not_fit(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Config(**options)
    with pytest.raises(ConfigError, match=message):
        Config().merge(**options)


@pytest.mark.parametrize(
    ("text", "seconds"), [("20ms", 0.02), ("0.1s", 0.1), ("150us", 150e-6), (" 3 S", 3.0)]
)
def test_durations(text: str, seconds: float) -> None:
    target = Config(latency_target=text).fairness.latency_target
    assert target == pytest.approx(seconds)
    assert Config().fairness.latency_target is None


@given(st.floats(1e-6, 3600))
def test_a_duration_survives_its_own_text(seconds: float) -> None:
    config = Config(latency_target=Duration(seconds))
    again = Config(latency_target=str(config.fairness.latency_target))
    assert again.fairness.latency_target == pytest.approx(seconds, rel=1e-5)


def test_every_option_of_the_readme_is_one_with_that_default() -> None:
    """Names and defaults that are documented and those that are accepted are the same (B73)."""
    section = README.split("## Options")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `([a-z_]+)` \| ([^|]+?) \|", section, re.MULTILINE)
    documented = dict(rows)
    assert len(rows) == len(documented)
    assert set(documented) == {option.rpartition(".")[2] for option in OPTIONS}
    defaults = {name.rpartition(".")[2]: value for name, value in Config().flat().items()}
    for name, text in documented.items():
        value = text.strip('`"')
        if defaults[name] is None:
            assert value in ("unset", "temporary directory"), name
        else:
            config = Config(**{name: value})
            assert config == Config(), f"{name}: the README says {value}"


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as exit_:
        main(["config", *arguments])
    out = capsys.readouterr()
    return int(exit_.value.code or 0), out.out, out.err


def test_the_command_shows_value_source_and_meaning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path, GROUPED)
    monkeypatch.setenv("KVPASS_COLD", "3GiB")
    code, out, _ = run(capsys, "--config", str(path), "--json")
    rows = {row["option"]: row for row in json.loads(out)}
    assert code == 0
    assert list(rows)[: len(OPTIONS)] == list(OPTIONS)
    assert rows["memory.cold"]["text"] == "3 GiB (3221225472 bytes)"
    assert rows["memory.cold"]["source"] == "variable KVPASS_COLD"
    assert rows["memory.hot"]["value"] > 0, "auto is resolved"
    assert rows["memory.hot"]["text"].startswith("auto: ")
    assert rows["inner"]["value"] in ("inductor", "aot_eager")
    tile = rows["optimizations.llama.block_size"]
    assert tile["value"] == [96, 96]
    assert tile["text"] == "[96, 96], runs as [64, 64], on a GPU at head size 256 [64, 32]"
    assert tile["source"] == f"{path}:3"
    assert all(row["meaning"].endswith(".") for row in rows.values())

    monkeypatch.setenv("COLUMNS", "200")
    code, out, _ = run(capsys, "--config", str(path), "--show")
    assert code == 0
    assert re.search(r"memory.poison +│ false +│ default +│ Fill freed", out), out
    assert re.search(r"fairness.qos +│ 0.5 +│ default +│ Service quality", out), out
    assert "layer_depth * 0.8" in out


def test_the_command_checks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "--config", str(write(tmp_path, FLAT)))[:2] == (
        0,
        "valid: 3 options set; --show prints all of them\n",
    )
    code, out, err = run(capsys, "--config", str(write(tmp_path, "hot: 10")))
    assert (code, out) == (0, "valid: 1 option set; --show prints all of them\n")
    code, out, err = run(capsys, "--config", str(write(tmp_path, "hto: 10MiB")))
    assert (code, out) == (2, "")
    assert "did you mean 'hot'" in err
