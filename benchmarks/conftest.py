# SPDX-License-Identifier: Apache-2.0
"""What the benchmark results say of the machine: what it is made of, never which one it is."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PACKAGES = ("torch", "triton", "transformers", "numpy")


def pytest_configure(config: pytest.Config) -> None:
    """Keep the results in benchmarks/results unless another place is asked for."""
    storage = getattr(config.option, "benchmark_storage", None)
    if storage in ("file://./.benchmarks", "./.benchmarks"):
        config.option.benchmark_storage = RESULTS.as_uri()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> Iterator[None]:
    """Forget a benchmark that was stopped before it measured: the plugin would fail to write it."""
    found = getattr(session.config, "_benchmarksession", None)
    if found is not None:
        found.benchmarks = [each for each in found.benchmarks if each.stats.data]
    yield


def pytest_benchmark_update_machine_info(config: pytest.Config, machine_info: dict) -> None:
    """Replace pytest-benchmark's description, host name included, by our own."""
    machine_info.clear()
    machine_info.update(describe_machine())


def pytest_benchmark_update_json(
    config: pytest.Config, benchmarks: list, output_json: dict
) -> None:
    """Remove absolute paths, and commit facts that name a person or a branch."""
    commit = output_json.get("commit_info", {})
    output_json["commit_info"] = {key: commit.get(key) for key in ("id", "time", "dirty")}
    for key, value in list(output_json.items()):
        output_json[key] = without_paths(value)


def describe_machine() -> dict[str, Any]:
    """Return CPU, cores, RAM in bytes, GPUs and versions."""
    gpus = [
        {
            "name": torch.cuda.get_device_name(index),
            "memory_bytes": torch.cuda.get_device_properties(index).total_memory,
            "compute_capability": list(torch.cuda.get_device_capability(index)),
        }
        for index in range(torch.cuda.device_count())
    ]
    return {
        "system": platform.system(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "ram_bytes": psutil.virtual_memory().total,
        "gpus": gpus,
        "cuda": torch.version.cuda,
        "versions": {name: version(name) for name in PACKAGES},
        "torch_threads": torch.get_num_threads(),
    }


def cpu_model() -> str:
    """Return the CPU's model name as the kernel gives it."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor() or "unknown"
    match = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return match.group(1) if match else platform.machine()


def version(package: str) -> str | None:
    """Return the version of a package, or None when it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def without_paths(value: Any) -> Any:
    """Return the JSON value with the checkout's path made relative and the home folder as ``~``."""
    if isinstance(value, dict):
        return {key: without_paths(item) for key, item in value.items()}
    if isinstance(value, list):
        return [without_paths(item) for item in value]
    if isinstance(value, str):
        return value.replace(f"{ROOT}/", "").replace(str(ROOT), ".").replace(str(Path.home()), "~")
    return value
