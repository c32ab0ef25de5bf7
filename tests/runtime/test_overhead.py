# SPDX-License-Identifier: Apache-2.0
"""What blocks cost beside their keys and values: metadata, and slots that are partly empty."""

from __future__ import annotations

import gc
import random
import tracemalloc

import pytest
import torch

import kvpass
from kvpass.runtime.batch import Batch
from kvpass.runtime.geometry import BlockGeometry
from kvpass.runtime.manager import Manager

LAYERS = 8


def stored(manager: Manager, geometry: BlockGeometry, tokens: int, layers: int) -> Batch:
    batch = manager.new_batch(1, layers, tokens)
    for layer in range(layers):
        batch.define(layer, geometry)
    with manager.step(batch, tokens, range(layers)):
        pass
    return batch


@pytest.mark.parametrize(
    ("heads", "dim", "dtype"), [(8, 128, torch.bfloat16), (3, 64, torch.float32)]
)
def test_metadata_is_under_one_percent_of_keys_and_values(heads, dim, dtype):
    geometry = BlockGeometry(heads, dim, dim, dtype, 256)
    size = 40 * LAYERS * geometry.block_bytes
    manager = kvpass.Manager(device="cpu", hot=size, cold=size)
    stored(manager, geometry, 256, LAYERS)  # what is made once
    manager.settle()
    gc.collect()
    tracemalloc.start()
    try:
        batch = stored(manager, geometry, 4096, LAYERS)
        manager.settle()
        gc.collect()
        seen = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    blocks = sum(len(row) for layer in batch.blocks for row in layer)
    assert blocks == 16 * LAYERS
    tensors = 2 * 400 * blocks  # a slot has a tensor, which tracemalloc does not see in full
    assert seen > 500 * blocks, "something was measured"
    assert seen + tensors < 0.01 * 4096 * geometry.token_bytes * LAYERS


@pytest.mark.parametrize(
    ("least", "most", "low", "high"), [(2000, 8000, 0.015, 0.05), (100, 500, 0.2, 0.4)]
)
def test_slots_that_are_partly_empty(least, most, low, high):
    """Half a block a sequence: little of a long one, a lot of a short one."""
    rng = random.Random(0)
    manager = kvpass.Manager(device="cpu", hot="600MiB", cold="600MiB")
    geometry = BlockGeometry(1, 16, 16, torch.float32, 256)
    batches = [stored(manager, geometry, rng.randint(least, most), 1) for _ in range(64)]
    manager.settle()
    snapshot = manager.snapshot()
    assert snapshot.sequences == len(batches) == 64
    assert low < snapshot.tiers["hot"].internal_fragmentation < high
    assert snapshot.tiers["cold"].internal_fragmentation == 0
