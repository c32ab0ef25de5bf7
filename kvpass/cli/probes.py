# SPDX-License-Identifier: Apache-2.0
"""What ``kvpass doctor`` measures: compiler, memory, links and disk of this machine."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import Any

LINK_BYTES = 256 * 2**20
DISK_BYTES = 64 * 2**20

_CPP_PROBE = """
#include <Python.h>
#include <omp.h>
extern "C" int kvpass_probe() { return omp_get_max_threads() + (PY_VERSION_HEX > 0); }
"""


def installed(package: str) -> str | None:
    """Return the version of an installed package, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def nvidia_driver() -> bool:
    """Return whether the system has an NVIDIA driver, whatever torch says."""
    return Path("/dev/nvidiactl").exists() or shutil.which("nvidia-smi") is not None


def run_triton_kernel() -> bool:
    """Compile a kernel that adds one to 128 numbers and return whether the sums are right."""
    import torch
    import triton
    import triton.language as tl

    @triton.jit
    def add_one(source, target, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
        offsets = tl.arange(0, SIZE)
        tl.store(target + offsets, tl.load(source + offsets) + 1)

    source = torch.arange(128, dtype=torch.int32, device="cuda")
    target = torch.zeros_like(source)
    add_one[(1,)](source, target, SIZE=128)
    return bool(torch.equal(target, source + 1))


def find_compiler() -> str:
    """Return the compiler that Inductor would call.

    Raises:
        RuntimeError: none is found.
    """
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        return get_cpp_compiler()
    except InvalidCxxCompiler as error:
        raise RuntimeError(first_line(error)) from None


def compile_fault(compiler: str) -> str | None:
    """Compile C++ with OpenMP and the Python headers, as Inductor does; return what is wrong."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "probe.cpp")
        source.write_text(_CPP_PROBE, encoding="utf-8")
        include = sysconfig.get_paths()["include"]
        flags = ["-shared", "-fPIC", "-fopenmp", "-std=c++17", f"-I{include}"]
        run = subprocess.run(
            [compiler, *flags, str(source), "-o", str(Path(folder, "probe.so"))],
            capture_output=True,
            text=True,
            timeout=60,
        )
    if run.returncode == 0:
        return None
    lines = [line for line in run.stderr.splitlines() if "error" in line]
    return (lines or [f"exit status {run.returncode}"])[0].strip()[:200]


def link_rates() -> tuple[float, float]:
    """Return GB/s host to GPU and back: the best of three copies of pinned memory."""
    import torch

    host = torch.empty(LINK_BYTES, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(LINK_BYTES, dtype=torch.uint8, device="cuda")

    def rate(target: Any, source: Any) -> float:
        best = float("inf")
        for _ in range(4):  # the first warms up, and is never the best
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            target.copy_(source, non_blocking=True)
            end.record()
            end.synchronize()
            best = min(best, start.elapsed_time(end) / 1e3)
        return LINK_BYTES / best / 1e9

    return rate(device, host), rate(host, device)


def ram_copy_rate() -> float:
    """Return GB/s of a copy within RAM: the best of three, after one that touches the pages."""
    import torch

    source = torch.ones(LINK_BYTES, dtype=torch.uint8)
    target = torch.empty_like(source)
    best = float("inf")
    for _ in range(4):
        start = time.perf_counter()
        target.copy_(source)
        best = min(best, time.perf_counter() - start)
    return LINK_BYTES / best / 1e9


def read_rate(gpu: bool) -> float:
    """Return GB/s at which device memory, or RAM, is read: the best of three sums over a tensor.

    Args:
        gpu: read the memory of the current GPU, else RAM.
    """
    import torch

    size = 4 * LINK_BYTES if gpu else LINK_BYTES
    source = torch.ones(size // 4, dtype=torch.float32, device="cuda" if gpu else "cpu")
    best = float("inf")
    for _ in range(4):  # the first warms up
        start = time.perf_counter()
        source.sum()
        if gpu:
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return size / best / 1e9


def disk_rates(folder: Path) -> tuple[float, float]:
    """Return GB/s of writing a temporary file through to the disk, and of reading it back.

    Raises:
        OSError: the file cannot be made or written.
    """
    chunk = os.urandom(2**20)  # random, so that a compressing file system gains nothing
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        start = time.perf_counter()
        for _ in range(DISK_BYTES // len(chunk)):
            file.write(chunk)
        os.fsync(file.fileno())
        write = DISK_BYTES / (time.perf_counter() - start) / 1e9
        if hasattr(os, "posix_fadvise"):
            # Drop the pages just written, or the read would come from RAM.
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.seek(0)
        start = time.perf_counter()
        while file.read(len(chunk)):
            pass
        read = DISK_BYTES / (time.perf_counter() - start) / 1e9
    return write, read


def file_system(folder: Path) -> str:
    """Return the kind of file system that holds ``folder`` (ext4, tmpfs ...), or ``unknown``."""
    try:
        mounts = Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines()
    except OSError:
        return "unknown"
    path = folder.resolve()
    best, kind = -1, "unknown"
    for line in mounts:
        _, point, name, *_ = line.split()
        # The longest mount point above the folder holds it; of equals the last is on top.
        if path.is_relative_to(point) and len(point) >= best:
            best, kind = len(point), name
    return kind


def first_line(error: BaseException) -> str:
    """Return the first line of a message, or the error's type where it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
