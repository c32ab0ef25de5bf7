# SPDX-License-Identifier: Apache-2.0
"""``kvpass doctor``: the rows on this machine, and each fault with its status and fix."""

from __future__ import annotations

import json
import subprocess
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.config

from kvpass.cli import doctor, main, probes

Rows = dict[str, doctor.Check]
Usage = namedtuple("Usage", "total used free")


@pytest.fixture(autouse=True)
def small_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure little, so that the tests are quick."""
    monkeypatch.setattr(probes, "LINK_BYTES", 2**20)
    monkeypatch.setattr(probes, "DISK_BYTES", 2 * 2**20)


def rows(probe: Callable[[], Any]) -> Rows:
    return {check.check: check for check in probe()}


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(["doctor", *arguments])
    assert isinstance(caught.value.code, int)
    return caught.value.code


def test_json_lists_every_check_with_its_fix(capsys: pytest.CaptureFixture[str]) -> None:
    code = run("--json")
    found = json.loads(capsys.readouterr().out)
    assert all(list(row) == ["check", "result", "status", "fix"] for row in found)
    names = [row["check"] for row in found]
    assert len(names) == len(set(names))
    assert {"python", "torch", "triton", "transformers", "Triton kernels", "C++ compiler"} < set(
        names
    )
    assert {"host memory", "pinned memory", "configuration", "cold directory", "disk rate"} < set(
        names
    )
    for row in found:
        assert row["result"]
        assert bool(row["fix"]) == (row["status"] != "ok"), row
    assert code == any(row["status"] == "fail" for row in found)


def test_table_shows_every_row(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    checks = [doctor.Check("disk", "[not markup]", "warn", "buy one"), doctor.Check("cpu", "fast")]
    monkeypatch.setattr(doctor, "examine", lambda: checks)
    assert run() == 0
    shown = capsys.readouterr().out
    assert all(text in shown for text in ("disk", "[not markup]", "warn", "buy one", "cpu", "fast"))


def test_a_failed_row_sets_the_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "examine", lambda: [doctor.Check("x", "y", "fail", "z")])
    assert run("--json") == 1


def test_a_broken_probe_becomes_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise OSError("no such thing\nsecond line")

    monkeypatch.setattr(doctor, "check_host_memory", broken)
    found = rows(doctor.examine)
    assert found["host memory"].status == "warn"
    assert found["host memory"].result == "the probe broke: OSError: no such thing"
    assert "disk rate" in found, "later probes still run"


@pytest.mark.parametrize(
    ("package", "version", "status", "words"),
    [
        ("torch", "2.11.0", "ok", ""),
        ("torch", "2.13.0+cu130", "ok", ""),
        ("torch", "2.14.0a0", "warn", "2.11 to 2.13"),
        ("torch", "3.0.0", "warn", "2.11 to 2.13"),
        ("torch", "2.10.1", "fail", "2.11 to 2.13"),
        ("torch", None, "fail", "pip install 'torch>=2.11'"),
        ("triton", "3.8.0", "warn", "3.6 to 3.7"),
        ("triton", "3.5.1", "warn", "3.6 to 3.7"),
        ("triton", None, "ok", ""),
        ("transformers", "5.18.0", "warn", "5.17"),
        ("transformers", None, "ok", ""),
    ],
)
def test_versions(
    monkeypatch: pytest.MonkeyPatch, package: str, version: str | None, status: str, words: str
) -> None:
    monkeypatch.setattr(probes, "installed", {package: version}.get)
    check = rows(doctor.check_versions)[package]
    assert check.status == status
    assert words in check.fix
    assert (version or "not installed") in check.result


def test_untested_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.sys, "version_info", (3, 15, 0))
    check = rows(doctor.check_python)["python"]
    assert (check.status, "3.11 to 3.12" in check.fix) == ("warn", True)


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch says of a GPU, for the logic of the rows; a real one is measured below."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (20 * 2**30, 24 * 2**30))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "Some GPU")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


@pytest.mark.usefixtures("no_gpu")
def test_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "nvidia_driver", lambda: False)
    assert rows(doctor.check_gpu)["GPU"].status == "ok"
    assert "interpreter" in rows(doctor.check_triton)["Triton kernels"].result
    assert rows(doctor.check_pinned)["pinned memory"].result == "not used without a GPU"
    assert list(rows(doctor.check_copy_rate)) == ["RAM copy"]


@pytest.mark.usefixtures("no_gpu")
def test_a_driver_that_torch_cannot_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "nvidia_driver", lambda: True)
    check = rows(doctor.check_gpu)["GPU"]
    assert (check.status, "CUDA build" in check.fix) == ("warn", True)


@pytest.mark.usefixtures("gpu")
def test_gpu_row_and_a_gpu_that_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    check = rows(doctor.check_gpu)["GPU 0"]
    assert check == doctor.Check("GPU 0", "Some GPU, compute 9.0, 20 GiB of 24 GiB free")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (2**30, 24 * 2**30))
    check = rows(doctor.check_gpu)["GPU 0"]
    assert (check.status, "nvidia-smi" in check.fix) == ("warn", True)


@pytest.mark.usefixtures("gpu")
def test_triton_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def check() -> doctor.Check:
        return rows(doctor.check_triton)["Triton kernels"]

    def uncompilable() -> bool:
        raise subprocess.CalledProcessError(1, ["gcc"])

    monkeypatch.setattr(probes, "installed", lambda package: "3.7.1")
    monkeypatch.setattr(probes, "run_triton_kernel", lambda: True)
    assert check().status == "ok"
    monkeypatch.setattr(probes, "run_triton_kernel", lambda: False)
    assert (check().status, "reinstall" in check().fix) == ("fail", True)
    monkeypatch.setattr(probes, "run_triton_kernel", uncompilable)
    assert (check().status, "gcc" in check().fix) == ("fail", True)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert (check().status, check().fix) == ("warn", "unset TRITON_INTERPRET")
    monkeypatch.setattr(probes, "installed", lambda package: None)
    assert (check().status, "pip install" in check().fix) == ("fail", True)


def test_compiler_that_works_or_fails_or_is_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def check() -> doctor.Check:
        return rows(doctor.check_compiler)["C++ compiler"]

    def script(text: str) -> str:
        path = tmp_path / "compiler"
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
        return str(path)

    monkeypatch.setattr(probes, "find_compiler", lambda: script("exit 0"))
    assert check().status == "ok"
    fault = script("echo 'x.cpp:2: fatal error: Python.h: No such file' >&2; exit 1")
    monkeypatch.setattr(probes, "find_compiler", lambda: fault)
    assert check().status == "warn"
    assert "Python.h: No such file" in check().result
    assert "python3-dev" in check().fix

    monkeypatch.undo()
    # Not monkeypatch: undoing it deletes the setting, for every later test of the process.
    with torch._inductor.config.patch({"cpp.cxx": ("no-such-compiler",)}):
        assert check().status == "warn"
        assert "none found" in check().result
        assert "aot_eager" in check().fix
    assert torch._inductor.config.cpp.cxx


@pytest.mark.usefixtures("gpu")
def test_memory_that_cannot_be_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("CUDA error: out of memory\nmore")

    monkeypatch.setattr(torch, "empty", refuse)
    check = rows(doctor.check_pinned)["pinned memory"]
    assert check.status == "fail"
    assert check.result == "16 MiB cannot be pinned: CUDA error: out of memory"
    assert "free host memory" in check.fix
    assert "ulimit" not in check.fix, "CUDA does not count what it pins as locked"


@pytest.mark.usefixtures("gpu")
def test_slow_link(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "link_rates", lambda: (55.0, 3.0))
    found = rows(doctor.check_copy_rate)
    assert found["host to GPU"] == doctor.Check("host to GPU", "55.0 GB/s")
    assert (found["GPU to host"].status, "slot" in found["GPU to host"].fix) == ("warn", True)


def test_cold_directory_is_measured_and_left_clean(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("KVPASS_COLD_DIR", str(tmp_path))
    monkeypatch.setattr(probes, "file_system", lambda folder: "ext4")
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda folder: Usage(2**40, 0, 2**40))
    found = rows(doctor.check_disk)
    assert all(check.status == "ok" for check in found.values())
    assert found["cold directory"].result == f"{tmp_path} (ext4), 1 TiB free"
    assert found["disk rate"].result.startswith("write ")
    assert list(tmp_path.iterdir()) == []


def test_faults_of_the_cold_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def full(folder: Path) -> tuple[float, float]:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(probes, "file_system", lambda folder: "tmpfs")
    check = rows(doctor.check_disk)["cold directory"]
    assert (check.status, "KVPASS_COLD_DIR" in check.fix) == ("warn", True)
    assert "is RAM" in check.result

    monkeypatch.setattr(probes, "file_system", lambda folder: "ext4")
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda folder: Usage(2**40, 2**40, 2**20))
    found = rows(doctor.check_disk)
    assert (found["cold directory"].status, found["disk rate"].status) == ("warn", "warn")
    assert "free some space" in found["cold directory"].fix

    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda folder: Usage(2**40, 0, 2**40))
    monkeypatch.setattr(probes, "disk_rates", full)
    check = rows(doctor.check_disk)["disk rate"]
    assert (check.status, "No space left" in check.result) == ("fail", True)
    assert "KVPASS_COLD_DIR" in check.fix


def test_configuration_that_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVPASS_HOT", "10")
    check = rows(doctor.check_disk)["configuration"]
    assert (check.status, "KVPASS_HOT = '10'" in check.result) == ("fail", True)


def test_file_system_is_that_of_the_nearest_mount() -> None:
    assert probes.file_system(Path("/proc/self")) == "proc"
    assert probes.file_system(Path("/")) not in ("unknown", "proc")


def test_rates_are_rates(tmp_path: Path) -> None:
    assert all(0 < rate < 1000 for rate in (probes.ram_copy_rate(), *probes.disk_rates(tmp_path)))


@pytest.mark.gpu
def test_kernel_and_link_of_a_real_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert probes.run_triton_kernel()
    assert all(rate > 1 for rate in probes.link_rates())
