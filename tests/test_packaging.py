# SPDX-License-Identifier: Apache-2.0
"""What is shipped: metadata, typed packages, licence lines, and a command line that starts fast."""

from __future__ import annotations

import re
import resource
import subprocess
import sys
import tomllib
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

import model_zoo
from kvpass._version import __version__
from kvpass.cli import COMMANDS, doctor, main
from kvpass.errors import CheckpointError, ConfigError, DownloadError, KVPassError

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("kvpass", "triton_ops", "model_zoo")
SOURCES = sorted(
    path for folder in (*PACKAGES, "tests", "benchmarks") for path in (ROOT / folder).rglob("*.py")
)
README = (ROOT / "README.md").read_text(encoding="utf-8")
FLAG = r"(?<!\S)`?(--[a-z][a-z-]*)"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def requirements(lines: list[str]) -> dict[str, Requirement]:
    return {item.name: item for item in map(Requirement, lines)}


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    found = {}
    for line in lines:
        if line and not line.startswith("#"):
            name, version = line.split("==")
            found[name] = version
    return found


def test_entry_points() -> None:
    project = PROJECT["project"]
    assert project["scripts"] == {"kvpass": "kvpass.cli:main"}
    assert project["entry-points"]["torch_dynamo_backends"] == {"kvpass": "kvpass.backends:backend"}


def test_the_version_has_one_source() -> None:
    assert PROJECT["project"]["dynamic"] == ["version"]
    assert PROJECT["tool"]["setuptools"]["dynamic"]["version"] == {
        "attr": "kvpass._version.__version__"
    }
    assert f"## [{__version__}]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_dependencies_are_those_promised() -> None:
    needs = requirements(PROJECT["project"]["dependencies"])
    assert set(needs) == {
        *("torch", "triton", "safetensors", "sentencepiece", "numpy"),
        *("prometheus-client", "pydantic", "PyYAML", "rich", "typer"),
    }
    assert str(needs["torch"].specifier) == ">=2.11"
    marker = needs["triton"].marker
    assert marker is not None
    linux = {"platform_system": "Linux", "platform_machine": "x86_64"}
    assert marker.evaluate(linux)
    assert not marker.evaluate({**linux, "platform_system": "Darwin"})
    assert not marker.evaluate({**linux, "platform_machine": "aarch64"})


def test_constraints_pin_every_direct_dependency_inside_its_range() -> None:
    project = PROJECT["project"]
    pinned = pins()
    extras = [line for lines in project["optional-dependencies"].values() for line in lines]
    for name, need in requirements(project["dependencies"] + extras).items():
        if name != "kvpass":
            assert need.specifier.contains(pinned[name]), f"{need} excludes {pinned[name]}"


def test_constraints_fit_any_build_of_torch() -> None:
    for name, version in pins().items():
        assert "+" not in version, f"{name}=={version} names one build"
        assert not name.startswith(("nvidia-", "cuda-")), f"{name} is chosen by torch itself"


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_are_typed(package: str) -> None:
    assert resources.files(package).joinpath("py.typed").is_file()


def test_the_document_ships_and_is_long_and_varied() -> None:
    text = resources.files("kvpass").joinpath("data/document.txt").read_text(encoding="utf-8")
    assert len(text.split()) >= 3700
    paragraphs = [part for part in text.split("\n\n") if part.strip()]
    assert len(set(paragraphs)) == len(paragraphs)
    assert text.isascii(), "plain text has one tokenization whatever the normaliser"


def test_licence_is_apache_2() -> None:
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert "Apache License" in text
    assert "END OF TERMS AND CONDITIONS" in text
    assert PROJECT["project"]["license"] == "Apache-2.0"


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_sources_have_a_licence_line_and_one_idea(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    assert lines, "an empty source file says nothing: give it a licence line and a docstring"
    assert lines[0] == "# SPDX-License-Identifier: Apache-2.0"
    if path.relative_to(ROOT).parts[0] in PACKAGES:
        assert len(lines) <= 500


def test_help_lists_the_commands_without_importing_torch() -> None:
    code = (
        "import sys\n"
        "from kvpass.cli import main\n"
        "try:\n"
        "    main(['--help'])\n"
        "except SystemExit as exit:\n"
        "    assert exit.code == 0, exit.code\n"
        "slow = {'torch', 'triton', 'transformers', 'numpy'} & set(sys.modules)\n"
        "assert not slow, slow\n"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert run.returncode == 0, run.stderr
    for name in ("demo", "generate", "explain", "doctor"):
        assert re.search(rf"\b{name}\b", run.stdout), run.stdout
    # Processor time, so that a busy machine does not count.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1.5


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_explains_itself(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([name, "--help"])
    assert caught.value.code == 0
    assert f"kvpass {name}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("error", "status"), [(ConfigError, 2), (CheckpointError, 1), (DownloadError, 1)]
)
def test_an_error_is_one_line_unless_debugging(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    error: type[KVPassError],
    status: int,
) -> None:
    def fail() -> None:
        raise error("hot = 'x': write '64MiB'")

    monkeypatch.setattr(doctor, "examine", fail)
    with pytest.raises(SystemExit) as caught:
        main(["doctor"])
    assert caught.value.code == status
    assert capsys.readouterr().err == "error: hot = 'x': write '64MiB'\n"
    with pytest.raises(error):
        main(["--debug", "doctor"])


def test_help_and_readme_name_the_exit_statuses(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "Exit status: 0 success, 1 failure" in capsys.readouterr().out
    assert "exits with 0 on success, 1 when it fails" in README


def test_every_flag_in_the_readme_exists(capsys: pytest.CaptureFixture[str]) -> None:
    known: dict[str, set[str]] = {}
    for name in COMMANDS:
        with pytest.raises(SystemExit):
            main([name, "--help"])
        known[name] = set(re.findall(FLAG, capsys.readouterr().out))
    lines = re.findall(r"kvpass ([a-z]+)\b([^`\n]* --[^`\n]*)", README)
    assert {name for name, _ in lines} >= {"generate", "explain"}
    for name, rest in lines:
        assert set(re.findall(FLAG, rest)) <= known[name], (name, rest)
    assert set(re.findall(FLAG, README)) <= set().union(*known.values())


@pytest.mark.checkpoint
def test_the_snippets_of_the_readme_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of a whole program, uncompiled and shorter, with a folder in place of the hub."""
    folder = model_zoo.load("smollm2-135m").path
    monkeypatch.setenv("KVPASS_INNER", "eager")
    snippets = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(snippets) == 5
    first: dict[str, Any] = {}
    for snippet in snippets:
        text = re.sub(r'^path = ".*"', f"path = {str(folder)!r}", snippet, flags=re.MULTILINE)
        text = text.replace("backend=kvpass.backend", 'backend="kvpass"')
        text = text.replace('backend="kvpass"', 'backend="kvpass", options={"inner": "eager"}')
        text = text.replace("max_new_tokens=64", "max_new_tokens=4")
        if "import" not in text:  # goes on after the first one
            exec(text, first)
            assert first["chat"].manager is first["batch_job"].manager is first["manager"]
            continue
        names: dict[str, Any] = {}
        exec(text, names)
        first = first or names
        if "cache" in names:
            assert names["cache"].get_seq_length() >= 8
        assert "cache" in names or names["logits"].isfinite().all()
    assert "A cache keeps" in capsys.readouterr().out


def test_benchmarks_without_pytest_say_what_to_install(tmp_path: Path) -> None:
    """Isolated from site-packages, as in a clone where nothing is installed."""
    script = str(ROOT / "benchmarks" / "run.py")
    for arguments, code, words in (
        (["--help"], 0, "which benchmarks"),
        (["cpu"], 1, "error: the benchmarks need pytest and pytest-benchmark: pip install"),
    ):
        run = subprocess.run(
            [sys.executable, "-I", "-S", script, *arguments],
            capture_output=True, text=True, cwd=tmp_path,
        )  # fmt: skip
        assert run.returncode == code, run.stderr
        assert words in (run.stdout if code == 0 else run.stderr)
        assert "Traceback" not in run.stderr
    assert len(run.stderr.splitlines()) == 1
    assert '".[bench]"' in run.stderr


def test_version_and_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert (caught.value.code, capsys.readouterr().out) == (0, f"kvpass {__version__}\n")
    with pytest.raises(SystemExit) as caught:
        main(["no-such-command"])
    assert caught.value.code == 2
