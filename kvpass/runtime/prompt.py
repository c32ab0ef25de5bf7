# SPDX-License-Identifier: Apache-2.0
"""Long steps on a GPU: keys and values leave for the host, and come from it, beside the attention.

A layer of a prompt computes for milliseconds. What it appends to cold blocks goes over the link on
a stream of its own, by few programs, while its attention computes. Cold blocks of earlier tokens
come in large pieces, a layer ahead, to device memory that lives as long as one attention: a kernel
that read them in place would read them once for each tile of queries.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from kvpass.runtime.capture import is_capturing
from kvpass.runtime.move import range_of
from kvpass.runtime.readahead import first_seen

if TYPE_CHECKING:
    from kvpass.runtime.batch import Batch, Block
    from kvpass.runtime.pool import Slot

LONG = 128
"""New tokens from which on a step is worth the events of two more streams."""

PROGRAMS = 16
"""That append to cold blocks: enough to fill the link, few enough to leave the SMs to the model."""


@functools.cache
def _streams(device: torch.device) -> tuple[Any, Any]:
    """Two of a device, once: torch hands out 32 in turn, and then those of others again."""
    return torch.cuda.Stream(device), torch.cuda.Stream(device)


class LongStep:
    """One step of many tokens.

    Args:
        batch: whose step it is; it has begun.
    """

    def __init__(self, batch: Batch) -> None:
        self._batch = batch
        self._out: Any = None
        self._in: Any = None
        if batch.device.type == "cuda":
            self._out, self._in = _streams(batch.device)
        self._left: Any = None
        self._coming: dict[int, tuple[Past, Any]] = {}

    @classmethod
    def of(cls, batch: Batch | None, tokens: int) -> LongStep | None:
        """That of the step which a batch is in, if the step is long and it has cold blocks."""
        if batch is None or tokens < LONG or not batch.cold_bytes or is_capturing(batch.device):
            return None
        if batch.long is None:
            batch.long = cls(batch)
        return batch.long

    def append(self, layer: int, tensors: Sequence[Tensor], run: Callable[[int], None]) -> None:
        """Append to a layer, beside what follows if some of it goes to cold blocks.

        The tensors must stay as they are until :meth:`join`.

        Args:
            layer: of the batch.
            tensors: that are read.
            run: launches the append, by as many programs as it is told; 0 = as it likes.
        """
        first = self._batch.lengths[layer] // self._batch.block_size
        if all(block.hot for row in self._batch.blocks[layer] for block in row[first:]):
            run(0)
            return
        if self._out is None:
            run(PROGRAMS)
            return
        self._out.wait_stream(torch.cuda.current_stream(self._batch.device))
        with torch.cuda.stream(self._out):
            run(PROGRAMS)
            for tensor in tensors:  # in case nobody attends to them, and they are freed
                tensor.record_stream(self._out)
            self._left = self._out.record_event()

    def past(self, layer: int) -> Past | None:
        """Where a layer's earlier tokens can be read at the speed of the device.

        The next layer's begin to come as well.

        Args:
            layer: of the batch.

        Returns:
            None where the blocks are read as they are: they are hot, or there is no room.
        """
        found = self._coming.pop(layer, None) or self._bring(layer)
        following = layer + 1
        if following < self._batch.layers and following not in self._coming:
            ahead = self._bring(following)
            if ahead is not None:
                self._coming[following] = ahead
        if found is None:
            return None
        past, event = found
        if event is not None:
            torch.cuda.current_stream(self._batch.device).wait_event(event)
        return past

    def _bring(self, layer: int) -> tuple[Past, Any] | None:
        batch = self._batch
        stored = batch.lengths[layer]
        first = first_seen(stored, *batch.spans.get(layer, (0, 0))) // batch.block_size
        end = -(-stored // batch.block_size)
        cold = [
            (sequence, i, block)
            for sequence, row in enumerate(batch.blocks[layer])
            for i, block in enumerate(row[:end])
            if i >= first and block.hot is None
        ]
        if not cold:
            return None
        try:
            if self._in is None:
                return Past(batch, layer, cold), None
            past = Past(batch, layer, cold, self._in)
            return past, self._in.record_event()
        except torch.OutOfMemoryError:
            return None  # slower, and as right

    def join(self) -> None:
        """What follows sees everything that was appended."""
        if self._left is not None:
            torch.cuda.current_stream(self._batch.device).wait_event(self._left)

    def end(self) -> None:
        """What follows comes after everything that was launched beside the step."""
        self.join()
        for _, event in self._coming.values():
            if event is not None:
                torch.cuda.current_stream(self._batch.device).wait_event(event)
        self._coming.clear()


class Past:
    """Earlier blocks of one layer, the cold ones as copies in device memory.

    Attributes:
        rows: int32 ``[B]``, row ``b`` of the next two is sequence ``b``.
        base: int64 ``[B]``, as :attr:`kvpass.runtime.table.RowTables.base`.
        length: int32 ``[B]``, tokens stored before the step.

    Args:
        batch: whose blocks they are.
        layer: of the batch.
        cold: (sequence, index, block) of those to copy.
        stream: where to copy; None: here and now.
    """

    def __init__(
        self,
        batch: Batch,
        layer: int,
        cold: Sequence[tuple[int, int, Block]],
        stream: Any = None,
    ) -> None:
        device = batch.device
        size = batch.geometry(layer).block_bytes
        with torch.inference_mode(False):
            # Allocated for the stream of the step, which alone frees and reuses it.
            self._copies = torch.empty(len(cold) * size, dtype=torch.uint8, device=device)
            self._words = torch.empty(batch.words[layer].shape, dtype=torch.int64, device=device)
            self.rows = torch.arange(batch.size, dtype=torch.int32, device=device)
            self.length = torch.full_like(self.rows, batch.lengths[layer])
            steps = torch.arange(batch.size, dtype=torch.int64, device=device)
            self.base = self._words.data_ptr() + steps * (self._words.shape[1] * 8)
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream(device))
        words = batch.words[layer].copy()
        for number, (sequence, i, _) in enumerate(cold):
            words[sequence, i] = self._copies.data_ptr() + number * size
        with torch.cuda.stream(stream) if stream is not None else nullcontext():
            self._words.copy_(_staged(words, device), non_blocking=True)
            at = 0
            for run in _neighbours([block.cold for *_, block in cold]):
                source = range_of(run)
                self._copies[at : at + len(source)].copy_(source, non_blocking=True)
                at += len(source)


def _staged(words: np.ndarray[Any, np.dtype[np.int64]], device: torch.device) -> Tensor:
    tensor = torch.from_numpy(words)
    return tensor.pin_memory() if device.type == "cuda" else tensor


def _neighbours(slots: Sequence[Slot | None]) -> Iterator[list[Slot]]:
    """Slots in order, those together that follow each other in one slab."""
    run: list[Slot] = []
    for slot in slots:
        assert slot is not None, "a block without a copy"
        if run and (slot.slab is not run[-1].slab or slot.index != run[-1].index + 1):
            yield run
            run = []
        run.append(slot)
    if run:
        yield run
