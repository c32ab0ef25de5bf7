# SPDX-License-Identifier: Apache-2.0
"""Energy that a GPU has used, by the counter of NVML."""

from __future__ import annotations

import ctypes

import torch


class EnergyCounter:
    """Joules since it was made; None where the driver does not count.

    The counter is ``nvmlDeviceGetTotalEnergyConsumption`` (millijoules since the driver was
    loaded), of the whole card.
    """

    def __init__(self) -> None:
        self._library: ctypes.CDLL | None = None
        self._device = ctypes.c_void_p()
        if torch.cuda.is_available():
            try:
                self._library = ctypes.CDLL("libnvidia-ml.so.1")
            except OSError:
                return
            uuid = f"GPU-{torch.cuda.get_device_properties(0).uuid}".encode()
            found = self._library.nvmlInit_v2() == 0 and (
                self._library.nvmlDeviceGetHandleByUUID(uuid, ctypes.byref(self._device)) == 0
            )
            if not found:
                self._library = None
        self._first = self._read()

    def _read(self) -> int | None:
        if self._library is None:
            return None
        value = ctypes.c_ulonglong()
        code = self._library.nvmlDeviceGetTotalEnergyConsumption(self._device, ctypes.byref(value))
        return value.value if code == 0 else None

    def joules(self) -> float | None:
        """Since it was made."""
        now = self._read()
        return None if now is None or self._first is None else (now - self._first) / 1e3
