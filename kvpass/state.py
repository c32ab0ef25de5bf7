# SPDX-License-Identifier: Apache-2.0
"""What a TieredCache's handle stands for."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kvpass.config import Config
from kvpass.errors import CapacityError, ShapeError, other_length
from kvpass.runtime.batch import Batch
from kvpass.runtime.geometry import BlockGeometry
from kvpass.runtime.manager import Manager
from kvpass.runtime.manual import check_manual
from kvpass.runtime.shapes import check_pair, no_layer
from kvpass.runtime.table import normalize
from kvpass.sizes import warn_of_small_hot
from kvpass.warn import warn_user


class TieredState:
    """The manager and the batch of a TieredCache, made on first use."""

    def __init__(
        self,
        config: Config,
        layers: int,
        max_tokens: int,
        family: str,
        manager: Manager | None = None,
    ) -> None:
        self.config = config
        self.layers = layers
        self.max_tokens = max_tokens
        self.family = family
        self.manager = manager
        self.batch: Batch | None = None
        self.observer: Callable[[Batch, int], None] | None = None
        self.history: Any = None
        self._finalizer: Any = None
        self._lock = threading.Lock()
        self._warned = False

    def bind(
        self, size: int, device: torch.device, geometries: dict[int, BlockGeometry], tokens: int
    ) -> tuple[Manager, Batch]:
        """The manager and the batch for a step of ``tokens`` tokens.

        Raises:
            CapacityError: the step would pass ``max_tokens``.
            ShapeError: batch size, device or layout differ from what the cache holds.
        """
        with self._lock:
            if self.manager is None:
                self.manager = Manager(self.config, device)
            if self.manager.device != normalize(device):
                raise ShapeError(
                    f"this TieredCache is on {self.manager.device}, layer {min(geometries)} gave "
                    f"keys on {normalize(device)}: a TieredCache lies on one device. Make a new "
                    "one for a model on another device; for a model split over several, pass a "
                    "DynamicCache, or put all layers on one device"
                )
            if self.batch is None:
                self.batch = self.manager.new_batch(
                    size, self.layers, self.max_tokens, self.family, self.config.fairness
                )
                self.batch.observer = self.observer
                self._finalizer = self.manager.lease(self, self.batch)
                block = max(geometry.block_bytes for geometry in geometries.values())
                warn_of_small_hot(self.manager.tiers.hot.capacity, size * self.layers * block)
            batch = self.batch
            if batch.size != size:
                raise ShapeError(
                    f"this cache holds {batch.size} sequences, the model gave {size}: use "
                    "batch_select_indices, batch_repeat_interleave or reset, or a new cache"
                )
            for layer, geometry in geometries.items():
                if not 0 <= layer < self.layers:
                    raise no_layer(layer, self.layers)
                batch.define(layer, geometry)
                if batch.lengths[layer] + tokens > self.max_tokens:
                    raise CapacityError(
                        f"{batch.lengths[layer]} tokens stored + {tokens} new > max_tokens="
                        f"{self.max_tokens}: make the cache with a larger max_tokens"
                    )
            return self.manager, batch

    def update_dense(self, k: Tensor, v: Tensor, layer: int, past: int) -> tuple[Tensor, Tensor]:
        """Append outside a rewritten graph, and return dense copies of everything.

        Raises:
            ShapeError: k and v do not belong together, or there is no such layer.
        """
        check_pair(k, v, layer, self.layers)
        if not self._warned:
            self._warned = True
            warn_user(
                "a TieredCache is used outside a graph rewritten by kvpass: every step copies the "
                "whole cache together. Compile the model with model.compile(backend="
                "kvpass.backend) under torch.no_grad(); kvpass.explain says what is rewritten. If "
                "it is, and Dynamo has warned of its recompile_limit, raise that: "
                "torch._dynamo.config.recompile_limit = 64"
            )
        geometry = BlockGeometry(
            k.shape[1], k.shape[3], v.shape[3], k.dtype, self.config.memory.block_size
        )
        manager, batch = self.bind(k.shape[0], k.device, {layer: geometry}, k.shape[2])
        check_manual(batch, k.shape[2], [layer])
        if batch.lengths[layer] != past:
            raise other_length(layer, batch.lengths[layer], past)
        with manager.step(batch, k.shape[2], [layer]) as rows:
            torch.ops.kvpass.append(k, v, rows, layer, self.config.memory.block_size)
        return manager.gather(batch, layer, past + k.shape[2])

    def read_dense(self, layer: int, past: int) -> tuple[Tensor, Tensor]:
        """Dense copies of what a layer holds.

        Raises:
            CacheStateError: it holds another number of tokens than the caller assumes.
        """
        manager, batch = self.manager, self.batch
        if manager is None or batch is None or batch.lengths[layer] != past:
            stored = 0 if batch is None else batch.lengths[layer]
            raise other_length(layer, stored, past)
        return manager.gather(batch, layer, past)

    def replace(self, batch: Batch | None) -> None:
        """Take another batch's place (after fork); the old one is released."""
        with self._lock:
            old, self.batch = self.batch, batch
            if batch is not None:
                batch.observer = self.observer
            if self.manager is not None:
                if self._finalizer is not None:
                    self._finalizer.detach()
                if old is not None:
                    self.manager.release(old)
                self._finalizer = None if batch is None else self.manager.lease(self, batch)
