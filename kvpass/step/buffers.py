# SPDX-License-Identifier: Apache-2.0
"""Steps of sites that keep their cache in static buffers.

A buffer that a rewritten graph made is a handle without memory. A buffer with memory of its own is
still written by the graph, so that it stays true for everybody who reads it; what is in blocks is
known by the tensor and its version, and copied again when somebody else has written to it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from kvpass.config import Config
from kvpass.errors import CacheStateError
from kvpass.graph.plan import FunctionalSite
from kvpass.runtime.content import Content, Lease
from kvpass.runtime.handle import KVHandle
from kvpass.runtime.manager import Manager
from kvpass.step.functional import FunctionalGroup, dense_of, geometry_of
from kvpass.step.overlap import overlap
from kvpass.step.sizes import CallSizes, NotCounted

_mirrors: Any = WeakIdKeyDictionary()
"""Of buffers with memory of their own: version, address, and the content that equals them."""

Pair = tuple[Content | None, Content | None]


def with_memory(args: Sequence[Any], indices: Iterable[int]) -> list[Any]:
    """Arguments with buffers that have no memory replaced by tensors that have, from now on.

    Raises:
        UnsupportedError: an argument at ``indices`` is a handle that is no buffer.
    """
    changed = list(args)
    for index in indices:
        if isinstance(args[index], KVHandle):
            changed[index] = args[index].with_memory()
    return changed


class BufferGroup(FunctionalGroup):
    """Sites of one graph with static buffers; they share one batch."""

    def open(
        self, manager: Manager, args: Sequence[Any], sizes: CallSizes, config: Config
    ) -> Lease:
        """The batch that holds what is in the buffers.

        Raises:
            NotCounted: the new tokens do not follow those in the buffers, or buffers that were
                separate when the graph was compiled share memory.
        """
        dense = {
            index
            for site in self.sites
            for index in (site.past_k, site.past_v)
            if index is not None and not isinstance(args[index], KVHandle)
        }
        if overlap(args[index] for index in dense):
            raise NotCounted("buffers of different layers share memory")
        pairs = [(_content(args, site.past_k), _content(args, site.past_v)) for site in self.sites]
        before = [
            _kept(
                site,
                *pair,
                sizes,
                site.past_k is not None and not isinstance(args[site.past_k], KVHandle),
            )
            for site, pair in zip(self.sites, pairs, strict=True)
        ]
        lease = self._lease_of(pairs, before, manager, sizes)
        if lease is None:
            lease = self._copied(manager, args, before, sizes, config)
        for layer, site in enumerate(self.sites):
            lease.batch.define(layer, geometry_of(site.shape, config.memory.block_size))
        return lease

    def _lease_of(
        self, pairs: list[Pair], before: list[int], manager: Manager, sizes: CallSizes
    ) -> Lease | None:
        """The lease of buffers that are the layers of one batch, cut to what is kept of them."""
        lease = pairs[0][0].lease if pairs[0][0] is not None else None
        size = sizes.of(self.sites[0].shape.batch)
        if lease is None or lease.manager is not manager or lease.batch.size != size:
            return None
        batch = lease.batch
        if batch.layers != len(self.sites):
            return None
        for layer, pair in enumerate(pairs):
            for values, content in enumerate(pair):
                if content is None or content.lease is not lease:
                    return None
                if (content.layer, content.values) != (layer, bool(values)):
                    return None
                if content.length < before[layer]:
                    return None
        if batch.lengths != before:
            if len({*before}) > 1 or before[0] > min(batch.lengths):
                return None
            manager.crop(batch, before[0])  # written again from an earlier position on
            for pair in pairs:
                for content in pair:
                    assert content is not None
                    content.length = before[0]  # also if this step fails
        return lease

    def _copied(
        self,
        manager: Manager,
        args: Sequence[Any],
        before: list[int],
        sizes: CallSizes,
        config: Config,
    ) -> Lease:
        """A new batch with a copy of what is kept of the buffers."""
        size = sizes.of(self.sites[0].shape.batch)
        uses = [site.buffer for site in self.sites if site.buffer is not None]
        tokens = max(max(before) + sizes.of(self.sites[0].shape.tokens), sizes.of(uses[0].capacity))
        batch = manager.new_batch(size, len(self.sites), tokens, self.family)
        self._warn_of_small_hot(manager, size, config)
        lease = Lease(manager, batch)
        for layer, site in enumerate(self.sites):
            for index in (site.past_k, site.past_v):
                if index is not None and isinstance(args[index], KVHandle):
                    _check_sequences(args[index], size)
            if not before[layer]:
                continue
            assert site.past_k is not None and site.past_v is not None
            axis = 1 if uses[layer].tokens_first else 2
            kept = min(before[layer], sizes.of(uses[layer].capacity))  # of a window that has moved
            dense = []
            for index in (site.past_k, site.past_v):
                tensor = dense_of(args[index])[:size].narrow(axis, 0, kept)
                dense.append(tensor.transpose(1, 2) if axis == 1 else tensor)
            batch.define(layer, geometry_of(site.shape, config.memory.block_size))
            with manager.step(batch, kept, [layer]) as rows:
                torch.ops.kvpass.append(*dense, rows, layer, config.memory.block_size)
        return lease

    def close(
        self, lease: Lease, outputs: list[Any], args: Sequence[Any], sizes: CallSizes
    ) -> None:
        """Note what is in the buffers now."""
        for layer, site in enumerate(self.sites):
            use, shape, length = site.buffer, site.shape, lease.batch.lengths[layer]
            assert use is not None
            capacity = sizes.of(use.capacity)
            start = max(0, length - capacity) if shape.keep else 0
            places = ((site.past_k, site.out_k), (site.past_v, site.out_v))
            for values, (index, positions) in enumerate(places):
                content = Content(
                    lease, layer, bool(values), length, start, capacity, use.tokens_first
                )
                if index is None:
                    whole = tuple(map(sizes.of, use.sizes[values]))
                    handle = KVHandle.of_buffer(content, whole, shape.dtype, lease.batch.device)
                    for position in positions:
                        outputs[position] = handle
                elif isinstance(args[index], KVHandle):
                    args[index].content.become(content)
                elif not args[index].is_inference():
                    tensor = args[index]
                    _mirrors[tensor] = tensor._version, tensor.data_ptr(), content


def _check_sequences(buffer: KVHandle, size: int) -> None:
    """The batch has all sequences that the buffer holds.

    Raises:
        NotCounted: those of the others would be lost.
    """
    content = buffer.content
    assert content is not None
    held = 0 if content.memory is None else buffer.shape[0]
    if content.lease is not None:
        held = content.lease.batch.size
    if held > size:
        raise NotCounted(f"a buffer that holds {held} sequences is used for {size}")


def _content(args: Sequence[Any], index: int | None) -> Content | None:
    """What is known to be in a buffer; None if it has to be copied, or is made by the graph."""
    if index is None:
        return None
    tensor: Tensor = args[index]
    if isinstance(tensor, KVHandle):
        content = tensor.content
        return content if content is not None and content.memory is None else None
    if tensor.is_inference():
        # Writes to it are not counted, so that it would be copied at every step.
        raise NotCounted("a buffer was made under torch.inference_mode(): make it outside")
    known = _mirrors.get(tensor)
    if known is None or known[:2] != (tensor._version, tensor.data_ptr()):
        return None
    equal: Content = known[2]
    return equal


def _kept(
    site: FunctionalSite, k: Content | None, v: Content | None, sizes: CallSizes, dense: bool
) -> int:
    """Tokens of the buffers in front of the new ones; ``dense``: they have their own memory.

    Raises:
        CacheStateError: what is in front of the new tokens has been given up.
        NotCounted: new tokens are written elsewhere than behind those in the buffers.
    """
    use = site.buffer
    assert use is not None
    tokens, capacity = sizes.of(site.shape.tokens), sizes.of(use.capacity)
    if use.position is None:
        known = [content for content in (k, v) if content is not None]
        if len(known) < 2:
            return capacity
        if any(c.length - c.start != capacity for c in known) or k.length != v.length:  # type: ignore[union-attr]
            raise NotCounted("a rolled buffer is not full of tokens")
        return known[0].length
    position = sizes.of(use.position)
    for content in (k, v):
        if content is not None and not dense and content.length < min(position, content.reach):
            raise CacheStateError(
                f"new tokens are written at position {position} of a buffer without memory that "
                f"holds {content.length} tokens, {content.reach} before it was written from an "
                "earlier position on: what was behind has been given up; write tokens in order, or "
                "do not release this buffer"
            )
    made = site.past_k is None
    fits = use.write == "tail" or position + tokens <= capacity
    windowed = position > 0 and any(content is not None and content.start for content in (k, v))
    if not fits or position < 0 or (made and position) or windowed:
        raise NotCounted(
            f"{tokens} new tokens are written at position {position} of a buffer for {capacity}, "
            "not behind those that it holds"
        )
    return position
