# SPDX-License-Identifier: Apache-2.0
"""Slabs go back when other code of the process runs out of memory of the device.

The allocator of torch tells its observers before it raises ``torch.OutOfMemoryError``, with no lock
held. The request that failed is not repeated by it: whoever made it may try again.
"""

from __future__ import annotations

import functools

import torch

from kvpass.runtime import roster


@functools.cache
def watch(device: torch.device) -> None:
    """Give memory of a GPU back when an allocation there fails; for the rest of the process."""
    attach = getattr(torch._C, "_cuda_attach_out_of_memory_observer", None)
    if attach is not None:
        torch.cuda.init()
        attach(functools.partial(_give_back, device.index))


def _give_back(watched: int, device: int, size: int, *_: int) -> None:
    """``size`` bytes could not be had on ``device``."""
    if device == watched:
        for manager in roster.managers():
            if manager.device == torch.device("cuda", device):
                manager.relieve(size)
