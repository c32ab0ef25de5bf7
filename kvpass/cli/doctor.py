# SPDX-License-Identifier: Apache-2.0
"""``kvpass doctor``: what this machine can do, each row with its status and the fix."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from kvpass.cli import probes
from kvpass.config import Config
from kvpass.errors import ConfigError
from kvpass.sizes import format_size

Status = Literal["ok", "warn", "fail"]
Version = tuple[int, int]

# package -> first and last tested release (major, minor), and whether kvpass needs it at all.
TESTED: dict[str, tuple[Version, Version, bool]] = {
    "torch": ((2, 11), (2, 13), True),
    "triton": ((3, 6), (3, 7), False),
    "transformers": ((5, 17), (5, 17), False),
}
TESTED_PYTHON: tuple[Version, Version] = ((3, 11), (3, 12))

PIN_BYTES = 16 * 2**20
SLOW_LINK_GBS = 10.0  # PCIe 3 x16 gives about 12, so less means fewer lanes or pageable memory
LOW_DISK = 2**30


@dataclass(frozen=True)
class Check:
    """One row: what was looked at, what was found, and what to do about it (empty when ok)."""

    check: str
    result: str
    status: Status = "ok"
    fix: str = ""


def command(
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list of objects.")] = False,
    live: Annotated[
        bool, typer.Option("--live", help="Judge the health of a running process instead.")
    ] = False,
    port: Annotated[
        int | None, typer.Option(help="With --live: port of that process; default 9464.")
    ] = None,
    host: Annotated[
        str | None, typer.Option(help="With --live: its address; default 127.0.0.1.")
    ] = None,
    seconds: Annotated[
        str | None, typer.Option(help="With --live: how long to look, e.g. 4s; default 4s.")
    ] = None,
) -> None:
    """Say what this machine can do: GPU, Triton, compiler, memory, links, disk, versions.

    With --live: whether the caches of a running process are healthy, and what to change.
    Exits with 1 when a row is marked fail, else with 0.
    """
    given: dict[str, Any] = {
        name: value
        for name, value in (("port", port), ("host", host), ("seconds", seconds))
        if value is not None
    }
    if live:
        from kvpass.cli import live as running_process

        running_process.examine(**given, as_json=as_json)
        return
    for name, value in given.items():
        raise ConfigError(f"--{name} {value}: it belongs to --live; add that, or leave it out")
    checks = examine()
    if as_json:
        print(json.dumps([asdict(check) for check in checks], indent=2))
    else:
        _print_table(checks)
    if any(check.status == "fail" for check in checks):
        raise typer.Exit(1)


def examine() -> list[Check]:
    """Run every probe; one that breaks becomes a row of its own."""
    steps: list[tuple[str, Callable[[], Iterable[Check]]]] = [
        ("python", check_python),
        ("versions", check_versions),
        ("GPU", check_gpu),
        ("Triton kernels", check_triton),
        ("C++ compiler", check_compiler),
        ("host memory", check_host_memory),
        ("pinned memory", check_pinned),
        ("copy rate", check_copy_rate),
        ("configuration", check_disk),
    ]
    checks: list[Check] = []
    for name, step in steps:
        try:
            checks.extend(step())
        except (ImportError, OSError, RuntimeError, subprocess.SubprocessError) as error:
            reason = f"{type(error).__name__}: {probes.first_line(error)}"
            checks.append(Check(name, f"the probe broke: {reason}", "warn", "see the message"))
    return checks


def check_python() -> Iterable[Check]:
    """Compare the interpreter with the tested versions."""
    text = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    yield _version_row("python", text, sys.version_info[:2], TESTED_PYTHON)


def check_versions() -> Iterable[Check]:
    """Compare torch, triton and transformers with the tested ranges, without importing them."""
    for package, (first, last, needed) in TESTED.items():
        text = probes.installed(package)
        if text is not None:
            yield _version_row(package, text, _numbers(text), (first, last), needed)
        elif needed:
            yield Check(package, "not installed", "fail", f"pip install '{package}>={_dot(first)}'")
        elif package == "transformers":
            yield Check(package, "not installed; only its own models need it: pip install '.[hf]'")
        else:
            yield Check(package, "not installed; only the GPU kernels need it")


def check_gpu() -> Iterable[Check]:
    """Name each GPU with its memory and compute capability."""
    import torch

    if not torch.cuda.is_available():
        if probes.nvidia_driver():
            build = torch.version.cuda or "CPU"
            fix = f"install a CUDA build of torch that fits the driver; this one is for {build}"
            yield Check("GPU", "an NVIDIA driver is there, but torch cannot use it", "warn", fix)
        else:
            yield Check("GPU", "none: the hot tier is RAM, the cold tier a memory-mapped file")
        return
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        major, minor = torch.cuda.get_device_capability(index)
        name = torch.cuda.get_device_name(index)
        result = (
            f"{name}, compute {major}.{minor}, {format_size(free)} of {format_size(total)} free"
        )
        low = free < total // 10
        fix = "end the processes that hold its memory (nvidia-smi), or set hot=" if low else ""
        yield Check(f"GPU {index}", result, "warn" if low else "ok", fix)


def check_triton() -> Iterable[Check]:
    """Compile and run a one-line kernel where there is a GPU."""
    import torch

    name = "Triton kernels"
    version = probes.installed("triton")
    if not torch.cuda.is_available():
        how = "under the interpreter only (TRITON_INTERPRET=1)" if version else "not here"
        yield Check(name, f"no GPU: kernels run {how}; the CPU path does not need them")
    elif version is None:
        yield Check(name, "triton is not installed", "fail", "pip install 'triton>=3.6'")
    elif os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        fix = "unset TRITON_INTERPRET"
        yield Check(name, "TRITON_INTERPRET is set, so kernels are interpreted", "warn", fix)
    else:
        try:
            right = probes.run_triton_kernel()
        # Triton raises its own errors, subprocess errors and OSError; each means the same here.
        except Exception as error:
            fix = "install gcc and the Python headers (apt-get install gcc python3-dev)"
            yield Check(name, f"no kernel can be compiled: {probes.first_line(error)}", "fail", fix)
            return
        fix = "" if right else "reinstall the triton that this torch was released with"
        result = "compile and run" if right else "a kernel gave a wrong result"
        yield Check(name, result, "ok" if right else "fail", fix)


def check_compiler() -> Iterable[Check]:
    """Compile a file the way Inductor does: C++ with OpenMP and the Python headers."""
    name = "C++ compiler"
    fix = (
        "install one (apt-get install g++ python3-dev), or use options={'inner': 'aot_eager'}, "
        "which is slower on a CPU"
    )
    try:
        compiler = probes.find_compiler()
    except RuntimeError as error:
        yield Check(name, f"none found: {probes.first_line(error)}", "warn", fix)
        return
    fault = probes.compile_fault(compiler)
    if fault:
        yield Check(name, f"{compiler} fails: {fault}", "warn", fix)
    else:
        yield Check(name, f"{compiler}: compiles for Inductor")


def check_host_memory() -> Iterable[Check]:
    """Say how much host memory a tier can take."""
    from kvpass.runtime.memory import available_memory

    yield Check("host memory", f"{format_size(available_memory())} available")


def check_pinned() -> Iterable[Check]:
    """Pin a little memory; without a GPU nothing is pinned.

    CUDA does not count what it pins as locked memory, so the limit of that (``ulimit -l``) has no
    part in it: under one of 64 KiB it pinned 1 GiB (H200).
    """
    import torch

    if not torch.cuda.is_available():
        yield Check("pinned memory", "not used without a GPU")
        return
    try:
        pinned = torch.empty(PIN_BYTES, dtype=torch.uint8, pin_memory=True)
    except RuntimeError as error:
        fix = "free host memory (free -h), or GPU memory (nvidia-smi) if that is what ran out"
        reason = probes.first_line(error)
        result = f"{format_size(PIN_BYTES)} cannot be pinned: {reason}"
        yield Check("pinned memory", result, "fail", fix)
        return
    yield Check("pinned memory", f"{format_size(pinned.nbytes)} can be pinned")


def check_copy_rate() -> Iterable[Check]:
    """Measure the link both ways, or on a CPU a copy within RAM (GB = 10^9 bytes moved once)."""
    import torch

    if not torch.cuda.is_available():
        yield Check("RAM copy", f"{probes.ram_copy_rate():.1f} GB/s")
        return
    fix = "see that the GPU sits in a full-width slot (nvidia-smi -q: PCIe Link Width)"
    for name, rate in zip(("host to GPU", "GPU to host"), probes.link_rates(), strict=True):
        slow = rate < SLOW_LINK_GBS
        yield Check(name, f"{rate:.1f} GB/s", "warn" if slow else "ok", fix if slow else "")


def check_disk() -> Iterable[Check]:
    """Read the configuration, then measure the directory of the cold tier's file."""
    try:
        config = Config.load()
    except ConfigError as error:
        yield Check("configuration", str(error), "fail", "mend or unset that variable")
        return
    yield Check("configuration", "the KVPASS_ variables of the environment are valid")
    folder = config.memory.cold_dir or Path(tempfile.gettempdir())
    fix = "set KVPASS_COLD_DIR to a directory on a local disk"
    free = shutil.disk_usage(folder).free
    kind = probes.file_system(folder)
    result = f"{folder} ({kind}), {format_size(free)} free"
    if kind in ("tmpfs", "ramfs"):
        yield Check("cold directory", f"{result}: a file there is RAM", "warn", fix)
    elif free < LOW_DISK:
        yield Check("cold directory", result, "warn", f"free some space, or {fix}")
    else:
        yield Check("cold directory", result)
    if free < 2 * probes.DISK_BYTES:
        yield Check("disk rate", "not measured: too little space", "warn", fix)
        return
    try:
        write, read = probes.disk_rates(folder)
    except OSError as error:
        yield Check("disk rate", f"writing failed: {error.strerror}", "fail", fix)
        return
    yield Check("disk rate", f"write {write:.2f} GB/s, read {read:.2f} GB/s")


def _version_row(
    name: str, text: str, found: Version, tested: tuple[Version, Version], needed: bool = True
) -> Check:
    first, last = tested
    span = _dot(first) if first == last else f"{_dot(first)} to {_dot(last)}"
    if found < first:
        status: Status = "fail" if needed else "warn"
        return Check(name, f"{text}: too old", status, f"install {name} {span}")
    if found > last:
        return Check(name, text, "warn", f"newer than the tested {span}: install one of those")
    return Check(name, text)


def _numbers(version: str) -> Version:
    major, minor = version.split("+")[0].split(".")[:2]
    return int(major), int("".join(digit for digit in minor if digit.isdigit()) or 0)


def _dot(version: Version) -> str:
    return ".".join(map(str, version))


def _print_table(checks: list[Check]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("check", "result", "status", "fix")
    color = {"ok": "green", "warn": "yellow", "fail": "red"}
    for row in checks:
        status = f"[{color[row.status]}]{row.status}[/]"
        table.add_row(row.check, _plain(row.result), status, _plain(row.fix))
    Console().print(table)


def _plain(text: str) -> str:
    from rich.markup import escape

    return escape(text)
