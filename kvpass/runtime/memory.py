# SPDX-License-Identifier: Apache-2.0
"""Where slabs of bytes come from: device memory, pinned host memory, or a memory-mapped file."""

from __future__ import annotations

import errno
import mmap
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import torch

from kvpass.errors import ConfigError, KVPassError, OutOfMemoryError
from kvpass.runtime.geometry import SLOT_ALIGNMENT
from kvpass.sizes import format_size

CGROUP = Path("/sys/fs/cgroup")
"""Limits of the container, if any."""

SLAB_BYTES = 64 << 20
"""Slab of the cold tier; a power of two, because torch rounds pinned allocations up to one."""


NO_ROOM = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EFBIG, errno.EMFILE, errno.ENFILE}
)
"""Errors of a file system that is full, or of a process that may have no more files or memory."""


class MemorySource(Protocol):
    """One kind of memory; gives slabs of bytes."""

    name: str

    def slab(self, size: int) -> torch.Tensor:
        """A uint8 tensor of ``size`` bytes whose address is a multiple of 128.

        Raises:
            OutOfMemoryError: the memory or disk has no room; nothing is half-built.
        """
        ...


class DeviceMemory:
    """Memory of the device that computes: HBM, or RAM on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.name = "HBM" if device.type == "cuda" else "RAM"

    def slab(self, size: int) -> torch.Tensor:
        """See :class:`MemorySource`."""
        # CUDA allocations are aligned already; the odd bytes would spoil their packing.
        extra = 0 if self.device.type == "cuda" else SLOT_ALIGNMENT
        try:
            raw = torch.empty(size + extra, dtype=torch.uint8, device=self.device)
        except RuntimeError as error:  # torch.OutOfMemoryError is one; a CPU raises plain ones
            raise OutOfMemoryError(
                f"no {format_size(size)} of {self.name} left on {self.device}: "
                "lower hot, or free memory of other tensors"
            ) from error
        return _aligned(raw, size)


class PinnedMemory:
    """Page-locked host memory, which kernels read in place over the link."""

    name = "pinned host memory"

    def slab(self, size: int) -> torch.Tensor:
        """See :class:`MemorySource`."""
        available = available_memory()
        if size > available:
            raise OutOfMemoryError(
                f"no {format_size(size)} of host memory left to pin ({format_size(available)} "
                "available): lower cold or max_tokens"
            )
        try:
            return torch.empty(size, dtype=torch.uint8, pin_memory=True)
        except RuntimeError as error:
            raise OutOfMemoryError(
                f"the driver refused to pin {format_size(size)} of host memory: {error}; "
                "lower cold, or free host memory"
            ) from error


class MappedFile:
    """A file mapped into memory and unlinked at once, so that no crash leaves it behind."""

    name = "memory-mapped file"

    def __init__(self, directory: str | None = None) -> None:
        self.directory = directory or tempfile.gettempdir()

    def slab(self, size: int) -> torch.Tensor:
        """See :class:`MemorySource`."""
        try:
            descriptor, path = tempfile.mkstemp(prefix="kvpass-", dir=self.directory)
        except OSError as error:
            raise self._refusal(error, size) from error
        try:
            os.unlink(path)
            # Reserve the blocks now: a full disk would otherwise be a SIGBUS at the first write.
            os.posix_fallocate(descriptor, 0, size)
            mapped = mmap.mmap(descriptor, size, mmap.MAP_SHARED)
        except OSError as error:
            raise self._refusal(error, size) from error
        finally:
            os.close(descriptor)
        return torch.frombuffer(mapped, dtype=torch.uint8)

    def _refusal(self, error: OSError, size: int) -> KVPassError:
        if error.errno in NO_ROOM:
            return OutOfMemoryError(
                f"no {format_size(size)} left for the cold tier in {self.directory!r} "
                f"({error.strerror}): free disk space, lower max_tokens, or set cold_dir"
            )
        return ConfigError(
            f"cold_dir={self.directory!r} cannot hold the cold tier: {error.strerror}; "
            "name an existing, writable directory"
        )


def _aligned(raw: torch.Tensor, size: int) -> torch.Tensor:
    shift = -raw.data_ptr() % SLOT_ALIGNMENT
    return raw[shift : shift + size]


def available_memory() -> int:
    """Bytes of host memory that can be had without swapping.

    MemAvailable of Linux, or less where a cgroup (container) allows less.
    """
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    with suppress(OSError, StopIteration):
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvail"))
    # A cgroup without a limit says "max", which is no number.
    with suppress(OSError, ValueError):
        limit = int((CGROUP / "memory.max").read_text(encoding="ascii"))
        used = int((CGROUP / "memory.current").read_text(encoding="ascii"))
        free = min(free, max(limit - used, 0))
    return free


def total_memory(device: torch.device) -> int:
    """Bytes of memory of a device, or of the host for a CPU."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def auto_hot_bytes(device: torch.device) -> int:
    """The hot size that ``hot="auto"`` takes: what the device has left, less room to compute.

    80 % of the free memory of a GPU (torch's own unused cache counts as free), half of the
    available RAM on a CPU.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int((free + cached) * 0.8)
    return available_memory() // 2


def _unused_pinned() -> int:
    """Bytes of host memory that torch keeps pinned for the next slabs; they count as in use."""
    if not torch.cuda.is_initialized():
        return 0
    stats = torch.cuda.host_memory_stats()
    held, active = (int(stats.get(f"{name}_bytes.current", 0)) for name in ("allocated", "active"))
    return max(0, held - active)


def available_cold(device: torch.device, directory: str | None) -> int:
    """Bytes that slabs of a cold tier can take now.

    Args:
        device: where attention is computed.
        directory: of the files, where that is a CPU; None: the temporary directory.

    Raises:
        FileNotFoundError: there is no such directory.
    """
    if device.type == "cuda":
        return available_memory() + _unused_pinned()
    return shutil.disk_usage(directory or tempfile.gettempdir()).free


def auto_cold_bytes(device: torch.device, directory: str | None) -> int:
    """The cold size that ``cold="auto"`` takes: half of the host memory, or disk, that is free."""
    return available_cold(device, directory) // 2
