# SPDX-License-Identifier: Apache-2.0
"""The two tiers of a manager: which slots there are, and when a slot may be written again."""

from __future__ import annotations

from collections.abc import Iterable
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
        self._arenas: dict[int, tuple[Arena, Arena]] = {}

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
            self.ready(slot).raw.fill_(POISON)
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
