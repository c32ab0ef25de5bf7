# SPDX-License-Identifier: Apache-2.0
"""Blocks, and the batch of sequences that owns them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from kvpass.errors import ShapeError
from kvpass.runtime import directory
from kvpass.runtime.geometry import BlockGeometry
from kvpass.runtime.pool import Slot
from kvpass.runtime.readahead import ReadAhead
from kvpass.runtime.table import MAX_LAYERS, RowTables

STAGING_BUFFERS = 4
"""Pinned copies of a table that may be on their way to the device at once."""


class Block:
    """K and V of ``block_size`` tokens of one layer of one sequence (or of several that share it).

    A full block is immutable. ``hot`` and ``cold`` are its copies; readers use the hot one.

    Attributes:
        k, v: views of the copy in use, ``[kv_heads * pages, 32, head_dim]``.
        owners: (batch, layer, sequence, index) of every table word that names this block.
        frequency: accesses in the last window, NaN before one has passed.
        heat: 2-bit saturating counter.
        move: the copy in flight, or None.
    """

    __slots__ = (
        "cold",
        "frequency",
        "full",
        "geometry",
        "heat",
        "hot",
        "index",
        "k",
        "move",
        "owners",
        "resident",
        "v",
    )

    def __init__(self, geometry: BlockGeometry, index: int) -> None:
        self.geometry = geometry
        self.index = index
        self.hot: Slot | None = None
        self.cold: Slot | None = None
        self.full = False
        self.resident = False
        self.owners: list[tuple[Batch, int, int, int]] = []
        self.frequency = float("nan")
        self.heat = 0
        self.move: Any = None
        self.k: torch.Tensor = None  # type: ignore[assignment]  # set by publish
        self.v: torch.Tensor = None  # type: ignore[assignment]

    @property
    def slot(self) -> Slot:
        """The copy that readers use."""
        slot = self.hot or self.cold
        assert slot is not None, "a block without a copy"
        return slot

    def publish(self) -> None:
        """Make every table that names this block name the copy in use."""
        slot = self.slot
        with torch.inference_mode(False):  # a later step may run outside inference mode
            self.k = self.geometry.keys(slot.raw)
            self.v = self.geometry.values(slot.raw)
        for batch, layer, sequence, index in self.owners:
            batch.words[layer, sequence, index] = slot.address
            batch.dirty = True


class Batch:
    """The sequences that one cache holds, processed together; all methods need the manager's lock.

    Attributes:
        size: sequences (B).
        geometries: block layout of each of the L layers, None before its first use.
        rows: int32 ``[MAX_LAYERS, B]`` on the device: the table rows that kernels look up, -1 where
            there is no layer.
        lengths: tokens stored, of each layer.
        blocks: ``[L][B]`` lists of blocks.
        active: thread that is in a step of this batch, or None.
        steps: layers of the step it is in, and of the steps nested in that.
        event: CUDA event after the last step, or None.
        retention: of each layer, how much longer its blocks stay hot; 1 is twice the accesses.
        ahead: how far ahead cold blocks are asked for, or None.
        cold: ``[L][B]`` indices of blocks without a hot copy as the step began; None: there are
            none, or nobody asks.
        first_read: of each layer, the first block that its last decode step read.
    """

    def __init__(
        self, tables: RowTables, size: int, layers: int, block_size: int, tokens: int
    ) -> None:
        if layers > MAX_LAYERS:
            raise ShapeError(f"{layers} layers with a KV cache; at most {MAX_LAYERS} are supported")
        self.tables = tables
        self.device = tables.device
        self.size = size
        self.layers = layers
        self.block_size = block_size
        self.geometries: list[BlockGeometry | None] = [None] * layers
        self.lengths = [0] * layers
        self.blocks: list[list[list[Block]]] = [[[] for _ in range(size)] for _ in range(layers)]
        self.active: int | None = None
        self.steps: list[frozenset[int]] = []
        self.event: Any = None
        self.tokens_since_heat = 0
        self.retention = [0.0] * layers
        self.ahead: ReadAhead | None = None
        self.cold: list[list[list[int]]] | None = None
        self.first_read = [0] * layers
        self.released = False
        self._row_list = tables.take(layers * size)
        self.first_row = self._row_list[0] if self._row_list else -1
        self._device_lengths: list[int | None] = [None] * layers
        self._staging: list[tuple[torch.Tensor, Any]] = []
        self._heat_copy: tuple[torch.Tensor, Any] | None = None
        self.words: np.ndarray[Any, np.dtype[np.int64]] = np.zeros((layers, size, 0), np.int64)
        self.heat_before: np.ndarray[Any, np.dtype[np.int32]] = np.zeros(
            (layers, size, 0), np.int32
        )
        with torch.inference_mode(False):
            rows = torch.full((MAX_LAYERS, size), -1, dtype=torch.int32)
            rows[:layers] = torch.tensor(self._row_list, dtype=torch.int32).view(layers, size)
            self.rows = rows.to(self.device)
            self._row_index = self.rows[:layers].to(torch.int64)
        self.dirty = True
        self.reserve_words(tokens)
        directory.enlist(self)

    def retain(self, values: Sequence[float]) -> None:
        """State how much longer the blocks of each layer stay hot; 1 is twice the accesses.

        Raises:
            ShapeError: not one value a layer.
        """
        if len(values) != self.layers:
            raise ShapeError(f"{len(values)} retentions of {self.layers} layers: give one a layer")
        self.retention = list(values)

    def define(self, layer: int, geometry: BlockGeometry) -> None:
        """State the block layout of a layer, on its first use.

        Raises:
            ShapeError: the layer holds keys and values of another layout already.
        """
        known = self.geometries[layer]
        if known is None:
            if geometry.block_size != self.block_size:
                raise ShapeError(f"block_size {geometry.block_size} != {self.block_size}")
            self.geometries[layer] = geometry
        elif known != geometry:
            raise ShapeError(
                f"layer {layer} of this cache holds {known}; new keys and values are {geometry}: "
                "use a new cache for another model or dtype"
            )

    def geometry(self, layer: int) -> BlockGeometry:
        """The block layout of a layer that has been defined."""
        geometry = self.geometries[layer]
        assert geometry is not None, f"layer {layer} has no layout yet"
        return geometry

    def reserve_words(self, tokens: int) -> None:
        """Make the tables long enough for ``tokens`` tokens; addresses change when they grow."""
        have = self.words.shape[2]
        wanted = max(-(-tokens // self.block_size), 1)
        if wanted <= have:
            return
        if have:
            wanted = max(wanted, 2 * have)  # growth by doubling keeps the copies few
        words = np.zeros((self.layers, self.size, wanted), dtype=np.int64)
        words[:, :, :have] = self.words
        heat_before = np.zeros_like(words, dtype=np.int32)
        heat = np.zeros_like(words, dtype=np.int32)
        if have:
            heat[:, :, :have] = self._read_heat_now()
            heat_before[:, :, :have] = self.heat_before
        self.words = words
        self.heat_before = heat_before
        with torch.inference_mode(False):
            if self.device.type == "cpu":
                self.device_words = torch.from_numpy(self.words)
                self.heat = torch.from_numpy(heat)
            else:
                self.device_words = torch.zeros(words.shape, dtype=torch.int64, device=self.device)
                self.heat = torch.from_numpy(heat).to(self.device)
            index = self._row_index.flatten()
            offsets = torch.arange(self.layers * self.size, device=self.device) * wanted
            self.tables.max_blocks = max(self.tables.max_blocks, wanted)
            self.tables.base[index] = self.device_words.data_ptr() + offsets * 8
            self.tables.heat[index] = self.heat.data_ptr() + offsets * 4
        self._staging.clear()
        self._heat_copy = None
        self.dirty = True

    def _read_heat_now(self) -> Any:
        return self.heat.cpu().numpy()

    def upload(self) -> None:
        """Bring the device's tables up to date, in order of the current stream."""
        if self.dirty and self.device.type == "cuda":
            self._upload_words()
        if self.dirty and self.ahead is not None:
            self.cold = self._find_cold()
        self.dirty = False
        if len(set(self.lengths)) == 1:
            if any(n != self.lengths[0] for n in self._device_lengths):
                self.tables.length.index_fill_(0, self._row_index.flatten(), self.lengths[0])
        else:
            for layer, length in enumerate(self.lengths):
                if self._device_lengths[layer] != length:
                    self.tables.length.index_fill_(0, self._row_index[layer], length)
        self._device_lengths = list(self.lengths)

    def _find_cold(self) -> list[list[list[int]]] | None:
        cold = [
            [[i for i, block in enumerate(row) if block.hot is None] for row in rows]
            for rows in self.blocks
        ]
        return cold if any(indices for rows in cold for indices in rows) else None

    def _upload_words(self) -> None:
        stream = torch.cuda.current_stream(self.device)
        staging = None
        for position, (_, event) in enumerate(self._staging):
            if event.query():
                staging = self._staging.pop(position)[0]
                break
        if staging is None and len(self._staging) >= STAGING_BUFFERS:
            staging, event = self._staging.pop(0)
            event.synchronize()
        if staging is None:
            with torch.inference_mode(False):
                staging = torch.empty(self.words.shape, dtype=torch.int64, pin_memory=True)
        staging.numpy()[...] = self.words
        self.device_words.copy_(staging, non_blocking=True)
        event = torch.cuda.Event()
        event.record(stream)
        self._staging.append((staging, event))

    def poll_heat(self, start: bool) -> Any:
        """Access counts of the window that ended, or None while they are on their way.

        Args:
            start: begin reading the counters back (without waiting).

        Returns:
            int32 ``[L, B, blocks]`` accesses since the last window, summed over KV heads.
        """
        if self.device.type == "cpu":
            if not start:
                return None
            counts = self.heat.numpy()
        else:
            if start and self._heat_copy is None:
                target = torch.empty(self.heat.shape, dtype=torch.int32, pin_memory=True)
                target.copy_(self.heat, non_blocking=True)
                event = torch.cuda.Event()
                event.record(torch.cuda.current_stream(self.device))
                self._heat_copy = (target, event)
                return None
            if self._heat_copy is None or not self._heat_copy[1].query():
                return None
            counts = self._heat_copy[0].numpy()
            self._heat_copy = None
        delta = counts - self.heat_before
        self.heat_before = counts.copy()
        return delta

    def attach(self, layer: int, sequence: int, block: Block) -> None:
        """Append a block to a row."""
        row = self.blocks[layer][sequence]
        block.owners.append((self, layer, sequence, len(row)))
        row.append(block)

    def release_rows(self) -> None:
        """Give the table rows back; the batch can not be used any more."""
        if not self.released:
            self.released = True
            self.tables.give(self._row_list)
