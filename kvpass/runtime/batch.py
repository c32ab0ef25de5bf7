# SPDX-License-Identifier: Apache-2.0
"""Blocks, and the batch of sequences that owns them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from kvpass.config import FairnessConfig
from kvpass.errors import OutOfMemoryError, ShapeError
from kvpass.runtime import directory
from kvpass.runtime.columns import NO_BLOCK, Columns
from kvpass.runtime.geometry import BlockGeometry
from kvpass.runtime.guard import StepGuard
from kvpass.runtime.manual import ManualStep
from kvpass.runtime.pool import Slot
from kvpass.runtime.prompt import LongStep
from kvpass.runtime.readahead import ReadAhead
from kvpass.runtime.service import Service
from kvpass.runtime.table import MAX_LAYERS, RowTables
from kvpass.sizes import format_size
from triton_ops.tickets import UNCHECKED
from triton_ops.words import COLD

STAGING_BUFFERS = 4
"""Pinned copies of a table that may be on their way to the device at once."""


def _column(name: str, kind: type) -> Any:
    """An attribute of a block that lies in a column."""

    def read(block: Block) -> Any:
        return kind(getattr(block.columns, name)[block.id])

    def write(block: Block, value: Any) -> None:
        getattr(block.columns, name)[block.id] = value

    return property(read, write)


class Block:
    """K and V of ``block_size`` tokens of one layer of one sequence (or of several that share it).

    A full block is immutable. ``hot`` and ``cold`` are its copies; readers use the hot one.

    Attributes:
        columns: where what is known of it lies.
        id: its row there; ``NO_BLOCK`` once it is gone.
        owners: (batch, layer, sequence, index) of every table word that names this block.
        frequency, heat, rate, protected, resident, demoted: what the policy knows of it; see
            :class:`kvpass.runtime.policy.BlockArrays`.
        full: no more tokens fit.
    """

    __slots__ = ("_cold", "_hot", "_move", "_views", "columns", "geometry", "id", "owners")

    frequency = _column("frequency", float)
    rate = _column("rate", float)
    heat = _column("heat", int)
    protected = _column("protected", bool)
    resident = _column("resident", bool)
    demoted = _column("demoted", int)
    index = _column("index", int)
    full = _column("full", bool)

    def __init__(self, columns: Columns, geometry: BlockGeometry, index: int) -> None:
        self.columns = columns
        self.id = columns.enlist(self)
        self.geometry = geometry
        columns.size[self.id] = geometry.block_bytes
        columns.index[self.id] = index
        self._hot: Slot | None = None
        self._cold: Slot | None = None
        self._move: Any = None
        self.owners: list[tuple[Batch, int, int, int]] = []
        self._views: tuple[torch.Tensor, torch.Tensor] | None = None

    @property
    def hot(self) -> Slot | None:
        """Its copy in the hot tier."""
        return self._hot

    @hot.setter
    def hot(self, slot: Slot | None) -> None:
        self._changed()
        self._hot = slot
        self.columns.has_hot[self.id] = slot is not None

    @property
    def cold(self) -> Slot | None:
        """Its copy in the cold tier."""
        return self._cold

    @cold.setter
    def cold(self, slot: Slot | None) -> None:
        self._changed()
        self._cold = slot
        self.columns.has_cold[self.id] = slot is not None

    @property
    def move(self) -> Any:
        """The copy in flight, or None."""
        return self._move

    @move.setter
    def move(self, move: Any) -> None:
        self._changed()
        self._move = move
        self.columns.moving[self.id] = move is not None

    def _changed(self) -> None:
        """Whoever would append to it has to look at it first."""
        if not self.full:
            for batch, *_ in self.owners:
                batch.ready = None

    def retire(self) -> None:
        """Give its row back; the block has no copy and no owner any more."""
        self.columns.delist(self.id)
        self.id = NO_BLOCK
        self._views = None

    @property
    def slot(self) -> Slot:
        """The copy that readers use."""
        slot = self.hot or self.cold
        assert slot is not None, "a block without a copy"
        return slot

    @property
    def word(self) -> int:
        """What tables say of it: the address of the copy that readers use, and its tier."""
        return self.slot.address | (0 if self.hot is not None else COLD)

    @property
    def k(self) -> torch.Tensor:
        """Keys, ``[kv_heads * pages, 32, head_dim]``: a view of the copy in use."""
        return self._parts()[0]

    @property
    def v(self) -> torch.Tensor:
        """Values, likewise."""
        return self._parts()[1]

    def _parts(self) -> tuple[torch.Tensor, torch.Tensor]:
        views = self._views
        if views is None:  # made when asked for: a GPU never asks, and they cost more than a move
            raw = self.slot.raw
            with torch.inference_mode(False):  # a later step may run outside inference mode
                views = self._views = self.geometry.keys(raw), self.geometry.values(raw)
        return views

    def publish(self) -> None:
        """Make every table that names this block name the copy in use."""
        word = self.word
        self._views = None
        for batch, layer, sequence, index in self.owners:
            batch.words[layer, sequence, index] = word
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
        long: what goes on beside the step it is in, if that has many tokens.
        manual: the step that was begun by hand and has not ended, weakly, or None.
        guard: checks appends on the device once a step was begun by hand there, or None.
        service: what its sequences are promised, and their weight.
        shares: by block size, hot bytes ``[B]`` that the sequences were due when that was last
            decided.
        ids: int32 ``[L, B, blocks]``, the block that each table word names, or ``NO_BLOCK``.
        window: decode steps of the window that runs.
        observer: called with the batch and the tokens appended after each step, or None.
        cold_bytes: of the blocks that steps read in place, as the last one began.
        ahead: how far ahead cold blocks are asked for, or None.
        cold: ``[L][B]`` indices of blocks without a hot copy as the step began; None: there are
            none, or nobody asks.
        spans: of layers that were attended by many queries, their window and chunk; 0 = all.
        ready: layers, and the tokens up to which each has blocks of its own that may be written as
            they are; None: not known.
        unfinished: tokens up to which a pass was ended, and the layers that did not end it.
        first_read: of each layer, the first block that its last decode step read.
    """

    def __init__(
        self,
        tables: RowTables,
        size: int,
        layers: int,
        block_size: int,
        tokens: int,
        fairness: FairnessConfig | None = None,
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
        self.long: LongStep | None = None
        self.manual: weakref.ref[ManualStep] | None = None
        self.guard: StepGuard | None = None
        self.service = Service(fairness or FairnessConfig())
        self.shares: dict[int, np.ndarray[Any, np.dtype[np.float64]]] = {}
        self._retention = (0.0,) * layers
        self.observer: Callable[[Batch, int], None] | None = None
        self.window = 1
        self.steps_in_window = 0
        self.steps_read = 0
        self.cold_bytes = 0
        self.ahead: ReadAhead | None = None
        self.cold: list[list[list[int]]] | None = None
        self.first_read = [0] * layers
        self.ready: tuple[tuple[int, ...], int] | None = None
        self.spans: dict[int, tuple[int, int]] = {}
        self.unfinished: tuple[int, tuple[int, ...]] | None = None
        self.released = False
        self._device_lengths: list[int | None] = [None] * layers
        self._staging: list[tuple[torch.Tensor, Any]] = []
        self._heat_copy: tuple[torch.Tensor, Any] | None = None
        self.words: np.ndarray[Any, np.dtype[np.int64]] = np.zeros((layers, size, 0), np.int64)
        self.ids: np.ndarray[Any, np.dtype[np.int32]] = np.zeros((layers, size, 0), np.int32)
        self.heat_before = self.ids.copy()
        self.dirty = True
        self._row_list = tables.take(layers * size)
        self.first_row = self._row_list[0] if self._row_list else -1
        try:
            with torch.inference_mode(False):
                rows = torch.full((MAX_LAYERS, size), -1, dtype=torch.int32)
                rows[:layers] = torch.tensor(self._row_list, dtype=torch.int32).view(layers, size)
                self.rows = rows.to(self.device)
                self._row_index = self.rows[:layers].to(torch.int64)
                self._all_rows = self._row_index.flatten()
                if tables.checked:
                    for table, value in zip(tables.tickets, (UNCHECKED, 0, 0), strict=True):
                        table.index_fill_(0, self._all_rows, value)
            self.reserve_words(tokens)
        except BaseException:
            self.release_rows()
            raise
        directory.enlist(self)

    def retain(self, values: Sequence[float]) -> None:
        """State how much longer the blocks of each layer stay hot; 1 is twice the accesses.

        Raises:
            ShapeError: not one value a layer.
        """
        if len(values) != self.layers:
            raise ShapeError(f"{len(values)} retentions of {self.layers} layers: give one a layer")
        self._retention = tuple(values)
        for sequences, retention in zip(self.blocks, self._retention, strict=True):
            for block in (block for row in sequences for block in row):
                block.columns.retention[block.id] = retention

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
        """Make the tables long enough for ``tokens`` tokens; addresses change when they grow.

        Raises:
            OutOfMemoryError: no memory for longer ones; those there are stay.
        """
        have = self.words.shape[2]
        wanted = max(-(-tokens // self.block_size), 1)
        if wanted <= have:
            return
        if have:
            wanted = max(wanted, 2 * have)  # growth by doubling keeps the copies few
        try:
            # All is had before anything changes, so that a failure leaves the old tables.
            words = np.zeros((self.layers, self.size, wanted), dtype=np.int64)
            ids = np.full(words.shape, NO_BLOCK, dtype=np.int32)
            heat_before = np.zeros_like(ids)
            heat = np.zeros_like(ids)
            if have:
                heat[:, :, :have] = self._read_heat_now()
                heat_before[:, :, :have] = self.heat_before
            words[:, :, :have] = self.words
            ids[:, :, :have] = self.ids
            with torch.inference_mode(False):
                device_words = torch.from_numpy(words)
                device_heat = torch.from_numpy(heat)
                if self.device.type != "cpu":
                    device_words = torch.zeros(words.shape, dtype=torch.int64, device=self.device)
                    device_heat = device_heat.to(self.device)
        except (MemoryError, torch.OutOfMemoryError) as error:
            size = self.layers * self.size * wanted * 20
            raise OutOfMemoryError(
                f"no {format_size(size)} for the tables of {self.layers} layers and {self.size} "
                f"sequences of {tokens} tokens: release caches that are no longer used, or free "
                "memory of other tensors"
            ) from error
        self.words, self.device_words, self.ids = words, device_words, ids
        self.heat_before, self.heat = heat_before, device_heat
        with torch.inference_mode(False):
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
                self.tables.length.index_fill_(0, self._all_rows, self.lengths[0])
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
            int32 ``[L, B, blocks]`` accesses since the last window, summed over KV heads; it took
            ``steps_read`` steps.
        """
        if start and self._heat_copy is None:
            self.steps_read, self.steps_in_window = self.steps_in_window, 0
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

    def lengthen(self, layers: Sequence[int], tokens: int) -> list[Block]:
        """Count new tokens that are stored; returns the blocks that they made full."""
        full: list[Block] = []
        for layer in layers:
            first = self.lengths[layer] // self.block_size
            self.lengths[layer] += tokens
            last = self.lengths[layer] // self.block_size
            if last > first:
                full += [block for row in self.blocks[layer] for block in row[first:last]]
        for block in full:
            block.full = True
        return full

    def attach(self, layer: int, sequence: int, block: Block) -> None:
        """Append a block to a row."""
        row = self.blocks[layer][sequence]
        row.append(block)
        self._own(block, layer, sequence, len(row) - 1)

    def exchange(self, layer: int, sequence: int, position: int, block: Block) -> None:
        """Put a block in the place of another one."""
        row = self.blocks[layer][sequence]
        self.ready = None
        row[position].owners.remove((self, layer, sequence, position))
        row[position] = block
        self._own(block, layer, sequence, position)

    def detach(self, layer: int, sequence: int) -> Block:
        """Take the last block off a row; returns it."""
        row = self.blocks[layer][sequence]
        block = row.pop()
        self.ready = None
        block.owners.remove((self, layer, sequence, len(row)))
        self.words[layer, sequence, len(row)] = 0
        self.ids[layer, sequence, len(row)] = NO_BLOCK
        self.dirty = True
        return block

    def _own(self, block: Block, layer: int, sequence: int, position: int) -> None:
        for batch, *_ in block.owners:  # what was one batch's own is shared from here on
            batch.ready = None
        self.ready = None
        block.owners.append((self, layer, sequence, position))
        block.columns.retention[block.id] = self._retention[layer]
        self.ids[layer, sequence, position] = block.id

    @property
    def retention(self) -> tuple[float, ...]:
        """Of each layer, how much longer its blocks are kept hot; 1 counts as twice the accesses.

        A block that several batches share follows the one that set it last.
        """
        return self._retention

    def rows_of(self, layers: Sequence[int]) -> list[int]:
        """Table rows of all sequences in the given layers."""
        size = self.size
        return [row for i in layers for row in self._row_list[i * size : (i + 1) * size]]

    @property
    def fill(self) -> float:
        """Tokens stored over the capacity of the blocks held, 0 to 1; 1 where there are none."""
        held = sum(len(row) for layer in self.blocks for row in layer) * self.block_size
        return sum(self.lengths) * self.size / held if held else 1.0

    def release_rows(self) -> None:
        """Give the table rows back; the batch can not be used any more."""
        if not self.released:
            self.released = True
            if self.guard is not None:
                self.tables.give_captured(self.rows, self._row_list)
            else:
                self.tables.give(self._row_list)
