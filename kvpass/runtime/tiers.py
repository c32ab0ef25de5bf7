# SPDX-License-Identifier: Apache-2.0
"""The two tiers of a manager: which slots there are, and when a slot may be written again."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch

from kvpass.config import Config
from kvpass.errors import ConfigError, OutOfMemoryError
from kvpass.runtime.geometry import BlockGeometry
from kvpass.runtime.memory import (
    DeviceMemory,
    MappedFile,
    MemorySource,
    PinnedMemory,
    auto_cold_bytes,
    auto_hot_bytes,
    available_cold,
    total_memory,
)
from kvpass.runtime.pool import Arena, Budget, Slot
from kvpass.sizes import format_size


def check_hot(hot: int | str, device: torch.device | None = None) -> None:
    """Refuse a hot tier that the machine could never hold: it would end in no memory at all.

    Args:
        hot: bytes, or ``"auto"``, which always fits.
        device: where it will be; None: not known yet, so that any device here may be it.

    Raises:
        ConfigError: it is larger than all memory of the device.
    """
    if not isinstance(hot, int):
        return
    devices = [torch.device("cpu")] if device is None else [device]
    if device is None and hot > total_memory(devices[0]):
        devices += [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
    total, largest = max(((total_memory(d), d) for d in devices), key=lambda pair: pair[0])
    if total and hot > total:
        raise ConfigError(
            f"hot = {format_size(hot)} is more than the {format_size(total)} of memory of "
            f"{largest}: give a part of that, or 'auto'"
        )


def check_cold(
    cold: int | str,
    device: torch.device | None = None,
    directory: Path | str | None = None,
    taken: int = 0,
) -> None:
    """Refuse a cold tier that the machine cannot hold now: it would end long after the start.

    Args:
        cold: bytes, or ``"auto"``, which always fits.
        device: where attention will be computed; None: not known yet, any device here may be it.
        directory: of the files, where that is a CPU; None: the temporary directory.
        taken: bytes of it that the tier has already.

    Raises:
        ConfigError: it is larger than the host memory, or disk, that is available.
    """
    if not isinstance(cold, int):
        return
    place = None if directory is None else str(directory)
    try:
        available, what = _room_for_cold(cold - taken, device, place)
        if cold - taken > available:
            gc.collect()  # tiers of dropped managers are rings of objects, which wait for this
            available, what = _room_for_cold(cold - taken, device, place)
    except FileNotFoundError:  # its first slab says so
        return
    if cold - taken > available:
        raise ConfigError(
            f"cold = {format_size(cold)} is more than the {format_size(available + taken)} of "
            f"{what}give a part of that, or 'auto'"
        )


def _room_for_cold(
    wanted: int, device: torch.device | None, directory: str | None
) -> tuple[int, str]:
    """Bytes available to a cold tier where there are most of them, and what to say of them."""
    disk = f"disk free in {directory or tempfile.gettempdir()!r}: set cold_dir to a larger one, or "
    memory = "host memory available: "
    if device is not None:
        return available_cold(device, directory), memory if device.type == "cuda" else disk
    room = available_cold(torch.device("cpu"), directory), disk
    if wanted > room[0] and torch.cuda.device_count():
        room = max(room, (available_cold(torch.device("cuda"), directory), memory))
    return room


Tier = Literal["hot", "cold"]

POISON = 0xFF
"""Byte that freed slots are filled with in poison mode: NaN in every supported dtype."""


class Tiers:
    """Hot and cold arenas of every block size in use. Needs the manager's lock.

    Args:
        config: sizes, directory, poison mode.
        device: where attention is computed.
    """

    def __init__(self, config: Config, device: torch.device) -> None:
        memory = config.memory
        directory = str(memory.cold_dir) if memory.cold_dir is not None else None
        hot = auto_hot_bytes(device) if memory.hot == "auto" else memory.hot
        cold = auto_cold_bytes(device, directory) if memory.cold == "auto" else memory.cold
        check_hot(int(hot), device)
        check_cold(memory.cold, device, directory)
        self.device = device
        self.poison = memory.poison
        self.threshold = memory.gpu_threshold
        self.page_size = memory.page_size
        self.hot = Budget(int(hot))
        self.cold = Budget(int(cold))
        self._hot_source: MemorySource = DeviceMemory(device)
        self._cold_source: MemorySource = (
            PinnedMemory() if device.type == "cuda" else MappedFile(directory)
        )
        self._directory = directory
        self._arenas: dict[int, tuple[Arena, Arena]] = {}

    def check(self, sizes: Mapping[Tier, int]) -> None:
        """Refuse new sizes, in bytes, that the machine cannot hold; a smaller cold one always fits.

        Raises:
            ConfigError: hot is larger than the memory of the device, or cold than what is available
                and what the tier has taken already.
        """
        check_hot(sizes.get("hot", "auto"), self.device)
        cold = sizes.get("cold", 0)
        if cold > self.cold.capacity:
            check_cold(cold, self.device, self._directory, self.cold.taken)

    @property
    def sizes(self) -> list[int]:
        """Block sizes in bytes that have arenas."""
        return list(self._arenas)

    def budget(self, tier: Tier) -> Budget:
        """What a tier may hold, and holds."""
        return self.hot if tier == "hot" else self.cold

    def arenas(self, tier: Tier) -> list[Arena]:
        """The arenas of a tier, one a block size."""
        return [pair[tier == "cold"] for pair in self._arenas.values()]

    def _pair(self, geometry: BlockGeometry) -> tuple[Arena, Arena]:
        size = geometry.block_bytes
        if size not in self._arenas:
            self._arenas[size] = (
                Arena(self._hot_source, self.hot, size, self.page_size),
                Arena(self._cold_source, self.cold, size),
            )
        return self._arenas[size]

    def hot_slots(self, size: int) -> int:
        """Slots of ``size`` bytes that the hot tier holds when it holds nothing else."""
        return self.hot.capacity // size

    def excess(self) -> int:
        """Bytes in use above the threshold at which demotion starts."""
        return self.hot.used - int(self.hot.capacity * self.threshold)

    def free_hot(self, geometry: BlockGeometry) -> int:
        """Hot slots that can be had now without a demotion."""
        return self._pair(geometry)[0].room()

    def take_hot(self, geometry: BlockGeometry) -> Slot | None:
        """A hot slot, or None; its fences are still to be waited for."""
        return self._take(self._pair(geometry)[0])

    def take_cold(self, geometry: BlockGeometry) -> Slot | None:
        """A cold slot, or None; its fences are still to be waited for.

        Raises:
            ConfigError: the directory of the cold tier cannot hold a file.
        """
        return self._take(self._pair(geometry)[1])

    @staticmethod
    def _take(arena: Arena) -> Slot | None:
        try:
            return arena.allocate()
        except OutOfMemoryError:
            return None  # the other tier may have room; else full() tells

    def ready(self, slot: Slot) -> Slot:
        """Make the current stream wait for whoever may still use the slot."""
        for event in slot.fences:
            torch.cuda.current_stream(self.device).wait_event(event)
        slot.fences = []
        return slot

    def free(self, slot: Slot, events: Iterable[Any] = ()) -> None:
        """Return a slot; its next writer waits for ``events`` of those who may still read it."""
        slot.fences.extend(event for event in events if event is not None)
        if self.poison:
            self.ready(slot)
            if self.device.type == "cuda" and not slot.raw.is_cuda:
                torch.cuda.current_stream(self.device).synchronize()  # the host writes at once
            slot.raw.fill_(POISON)
            if self.device.type == "cuda":
                event = torch.cuda.Event()
                event.record(torch.cuda.current_stream(self.device))
                slot.fences = [event]
        slot.arena.free(slot)

    def full(self) -> OutOfMemoryError:
        """The error of a request that no tier can hold."""
        answers = (self.hot.refused, self.cold.refused)
        reasons = "".join(f"; {error}" for error in answers if error is not None)
        return OutOfMemoryError(
            f"both tiers are full (hot {format_size(self.hot.capacity)}, cold "
            f"{format_size(self.cold.capacity)}): raise hot or cold, lower "
            f"max_tokens, or release caches that are no longer used{reasons}"
        )
