# SPDX-License-Identifier: Apache-2.0
"""TieredCache as a ``Cache`` of transformers (5.x)."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from kvpass.cache import TieredCache
from kvpass.errors import CapacityError, ShapeError


class LayerView:
    """One layer of a TieredCache, as models that read a layer again expect it.

    Args:
        cache: the cache.
        layer: index of the layer.
    """

    is_sliding = False
    is_compileable = False

    def __init__(self, cache: TransformersTieredCache, layer: int) -> None:
        self.cache = cache
        self.layer = layer

    @property
    def keys(self) -> Tensor:
        """``[B, Hkv, stored, Dk]``, see :meth:`kvpass.TieredCache.read`."""
        return self.cache.read(self.layer)[0]

    @property
    def values(self) -> Tensor:
        """``[B, Hkv, stored, Dv]``, see :meth:`kvpass.TieredCache.read`."""
        return self.cache.read(self.layer)[1]

    @property
    def is_initialized(self) -> bool:
        """Whether the layer holds tokens."""
        return self.cache.get_seq_length(self.layer) > 0

    def get_seq_length(self) -> int:
        """Tokens stored."""
        return self.cache.get_seq_length(self.layer)


class TransformersTieredCache(TieredCache, Cache):
    """The protocol of transformers' ``Cache`` over a TieredCache.

    ``is_compileable`` is False on purpose: when it is True, ``generate`` compiles with a backend of
    its own and builds the mask outside the graph, where it cannot be read.
    """

    is_compileable = False
    is_croppable = True
    offloading = False
    layer_class_to_replicate = None

    @property
    def is_initialized(self) -> bool:
        """Whether a step has been made."""
        return self._state.batch is not None

    @property
    def layers(self) -> list[LayerView]:
        """The layers; their keys and values are read only, by cross attention for example."""
        return [LayerView(self, layer) for layer in range(len(self._lengths))]

    @property
    def is_sliding(self) -> list[bool]:
        """All layers keep all tokens; windows are in the mask."""
        return [False] * len(self._lengths)

    @property
    def is_linear(self) -> list[bool]:
        """No layer is linear attention."""
        return [False] * len(self._lengths)

    @property
    def batch_size(self) -> int:
        """Sequences, or -1 before the first step."""
        batch = self._state.batch
        return -1 if batch is None else batch.size

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens stored."""
        return self._lengths[layer_idx or 0]

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Position of the next query."""
        return self._lengths[layer_idx or 0]

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Length of the keys after the next step, and the position of the first one."""
        return self._lengths[layer_idx or 0] + query_length, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """-1: masks are made for the tokens that are stored, not for the capacity."""
        return -1

    def has_previous_state(
        self, layer_idx: int | None = None, state_idx: int | None = None
    ) -> bool:
        """No layer is linear attention."""
        return False

    def crop(self, tokens_to_remove: Any) -> None:
        """Remove tokens from the end, as ``DynamicCache.crop`` of transformers 5.17 does.

        Args:
            tokens_to_remove: anything with ``__index__``, also a tensor of one integer. Negative:
                minus the tokens to remove; 0 removes none; positive (old form): the length to
                keep. :meth:`truncate` has no such cases.

        Raises:
            CapacityError: not an integer.
        """
        given = tokens_to_remove
        try:
            if isinstance(given, bool) or (isinstance(given, Tensor) and given.dtype == torch.bool):
                raise TypeError
            count = operator.index(given)
        except TypeError:
            raise CapacityError(f"crop({given!r}): give a whole number of tokens") from None
        if count < 0:
            self.truncate(max(0, self.shortest + count))
        elif count > 0:
            self.truncate(count)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Reorder the sequences for beam search.

        Args:
            beam_idx: int ``[B']``, as for :meth:`batch_select_indices`.

        Raises:
            ShapeError: not a vector of integers, or out of range.
        """
        beam_idx = torch.as_tensor(beam_idx)
        if beam_idx.dtype == torch.bool:
            raise ShapeError("reorder_cache takes indices, not a bool mask: batch_select_indices")
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every sequence; full blocks are shared."""
        if self._state.batch is not None:
            size = self._state.batch.size
            self.select([s for s in range(size) for _ in range(repeats)])

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the given sequences, as ``tensor[indices]`` does.

        Args:
            indices: int ``[B']``, negative ones count from the end; or a bool mask ``[B]``.

        Raises:
            ShapeError: of another shape or dtype, or out of range.
        """
        if self._state.batch is not None:
            self.select(_sequences(torch.as_tensor(indices), self._state.batch.size))

    def activate_past_recording(self) -> None:
        """Nothing to do: all tokens are kept."""

    def early_initialization(self, *args: object, **kwargs: object) -> None:
        """Nothing to do: blocks are reserved as tokens come."""

    def __repr__(self) -> str:
        """Length, capacity and hot size."""
        return TieredCache.__repr__(self)


def _sequences(indices: Tensor, size: int) -> list[int]:
    """Indices 0..size-1 from indices or a mask, see ``batch_select_indices``."""
    kind = f"{indices.dtype} {tuple(indices.shape)}"
    if indices.dtype == torch.bool:
        if indices.shape != (size,):
            raise ShapeError(f"a mask {kind} of {size} sequences: give one of shape ({size},)")
        indices = indices.nonzero().flatten()
    elif indices.ndim != 1 or (
        indices.numel() and (indices.is_floating_point() or indices.is_complex())
    ):
        raise ShapeError(f"indices {kind}: give a vector of integers, or a bool mask")
    chosen: list[int] = [int(i) for i in indices.tolist()]
    bad = [i for i in chosen if not -size <= i < size]
    if bad:
        raise ShapeError(f"sequence {bad[0]} of a batch of {size}: give -{size}..{size - 1}")
    return [i % size for i in chosen]
