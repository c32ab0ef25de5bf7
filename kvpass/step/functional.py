# SPDX-License-Identifier: Apache-2.0
"""Steps of sites whose cache goes through the inputs and outputs of a graph."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kvpass.config import Config
from kvpass.errors import ShapeError
from kvpass.graph.plan import FunctionalSite, LayerShape
from kvpass.runtime.batch import Batch
from kvpass.runtime.content import Content, Lease
from kvpass.runtime.geometry import BlockGeometry
from kvpass.runtime.handle import KVHandle
from kvpass.runtime.manager import Manager
from kvpass.sizes import warn_of_small_hot
from kvpass.step.sizes import CallSizes, NotCounted


def check_mask(shape: LayerShape, keys: int, sizes: CallSizes) -> None:
    """A padding mask that is too short fails here, as it does in eager."""
    if shape.mask is not None and sizes.of(shape.mask) < keys:
        raise ShapeError(
            f"the padding mask covers {sizes.of(shape.mask)} tokens, the cache will hold {keys}: "
            "pass an attention_mask for the past and the new tokens"
        )


def geometry_of(shape: LayerShape, block_size: int) -> BlockGeometry:
    """The block layout of a site's layer."""
    return BlockGeometry(
        shape.kv_heads, shape.head_dim_k, shape.head_dim_v, shape.dtype, block_size
    )


class FunctionalGroup:
    """The sites whose cache goes through the graph's inputs and outputs."""

    def __init__(self, sites: list[FunctionalSite], family: str) -> None:
        self.sites = sites
        self.family = family
        self.reads = sites[0].shape.tokens == 0 and not sites[0].out_k
        self._copy: tuple[tuple[weakref.ref[Content], ...], Lease] | None = None

    def open(
        self, manager: Manager, args: Sequence[Any], sizes: CallSizes, config: Config
    ) -> Lease:
        """The batch that the past handles stand for, or a new one."""
        contents: list[Content] | None = []
        for site in self.sites:
            if site.past_k is None or site.past_v is None:
                contents = None
                break
            for index in (site.past_k, site.past_v):
                content = getattr(args[index], "content", None)
                other = content is not None and content.tokens_first != site.shape.tokens_first
                if content is None or content.capacity or other:
                    contents = None
                    break
                assert contents is not None
                contents.append(content)
            if contents is None:
                break
        lease = self._same_batch(contents, manager) if contents else None
        if lease is None and contents and self.reads:
            lease = self._repacked(contents, manager, args, sizes, config)
        if lease is None:
            lease = self._adopt(manager, args, sizes, config)
        for layer, site in enumerate(self.sites):
            lease.batch.define(layer, geometry_of(site.shape, config.memory.block_size))
            keep, offset = site.shape.keep, site.shape.mask_offset
            start = max(0, lease.batch.lengths[layer] - keep)
            if keep and offset is not None and sizes.of(offset) != start:
                raise NotCounted("the mask does not begin where the kept window of tokens does")
        return lease

    def step(self, manager: Manager, lease: Lease, sizes: CallSizes) -> Any:
        """The step that appends this call's tokens."""
        tokens = sizes.of(self.sites[0].shape.tokens)
        for layer, site in enumerate(self.sites):
            check_mask(site.shape, lease.batch.lengths[layer] + tokens, sizes)
        return manager.step(lease.batch, tokens, range(len(self.sites)))

    def _same_batch(self, contents: list[Content], manager: Manager) -> Lease | None:
        """The lease of handles that are the layers of one batch, in order; else None."""
        first = contents[0]
        lease = first.lease
        assert lease is not None
        if lease.manager is not manager or lease.batch.layers != len(self.sites):
            return None
        lengths = [content.length for content in contents[::2]]
        for position, content in enumerate(contents):
            layer, values = divmod(position, 2)
            keep = self.sites[layer].shape.keep
            start = max(0, lengths[layer] - keep) if keep else 0
            wanted = (layer, bool(values), lengths[layer], start)
            if content.lease is not lease:
                return None
            if (content.layer, content.values, content.length, content.start) != wanted:
                return None
            if start and self.sites[layer].shape.absolute:
                return None  # a copy, whose first token is the first that was kept
        batch = lease.batch
        if any(batch.geometry(i).dtype != s.shape.dtype for i, s in enumerate(self.sites)):
            return None
        if lengths == batch.lengths:
            return lease
        if len({*lengths}) > 1 or len({*batch.lengths}) > 1:
            return None
        # An older handle of a sequence that has gone on since: continue from there, on its own.
        return Lease(manager, manager.fork(batch, range(batch.size), first.length))

    def _repacked(
        self,
        contents: list[Content],
        manager: Manager,
        args: Sequence[Any],
        sizes: CallSizes,
        config: Config,
    ) -> Lease:
        """Handles that are only read, of several batches: a copy that is kept while they live."""
        if self._copy is not None:
            known, lease = self._copy
            if [reference() for reference in known] == contents and lease.manager is manager:
                return lease
        lease = self._adopt(manager, args, sizes, config)
        references = tuple(weakref.ref(content, self._forget_copy) for content in contents)
        self._copy = references, lease
        return lease

    def _forget_copy(self, _: object) -> None:
        self._copy = None

    def _adopt(
        self, manager: Manager, args: Sequence[Any], sizes: CallSizes, config: Config
    ) -> Lease:
        """A new batch that holds a copy of the dense past, if there is one."""
        past: list[tuple[Tensor, Tensor] | None] = []
        for site in self.sites:
            if site.past_k is None or site.past_v is None:
                past.append(None)
            else:
                dense = (dense_of(args[site.past_k]), dense_of(args[site.past_v]))
                if dense[0].shape[:3] != dense[1].shape[:3]:
                    raise ShapeError(
                        f"past keys {tuple(dense[0].shape)} and values {tuple(dense[1].shape)} of "
                        f"{site.shape} differ in more than the head size"
                    )
                # As cat promotes, where a model of another dtype goes on.
                dense = (dense[0].to(site.shape.dtype), dense[1].to(site.shape.dtype))
                if site.shape.tokens_first:
                    dense = (dense[0].transpose(1, 2), dense[1].transpose(1, 2))
                past.append(dense)
        size = sizes.of(self.sites[0].shape.batch)
        longest = max((pair[0].shape[2] for pair in past if pair is not None), default=0)
        tokens = longest + sizes.of(self.sites[0].shape.tokens)
        batch = manager.new_batch(
            size, len(self.sites), tokens + config.memory.block_size, self.family
        )
        self._warn_of_small_hot(manager, size, config)
        lease = Lease(manager, batch)
        for layer, pair in enumerate(past):
            if pair is None or pair[0].shape[2] == 0:
                continue
            k, v = pair
            batch.define(layer, geometry_of(self.sites[layer].shape, config.memory.block_size))
            with manager.step(batch, k.shape[2], [layer]) as rows:
                torch.ops.kvpass.append(k, v, rows, layer, config.memory.block_size)
        return lease

    def _warn_of_small_hot(self, manager: Manager, size: int, config: Config) -> None:
        shapes = [site.shape for site in self.sites]
        block = max(geometry_of(s, config.memory.block_size).block_bytes for s in shapes)
        warn_of_small_hot(manager.tiers.hot.capacity, size * len(shapes) * block)

    def close(
        self, lease: Lease, outputs: list[Any], args: Sequence[Any], sizes: CallSizes
    ) -> None:
        """Put handles where the graph returned keys and values."""
        batch: Batch = lease.batch
        for layer, site in enumerate(self.sites):
            length = batch.lengths[layer]
            shape = site.shape
            for positions, values, width in (
                (site.out_k, False, shape.head_dim_k),
                (site.out_v, True, shape.head_dim_v),
            ):
                if positions:
                    start = max(0, length - shape.keep) if shape.keep else 0
                    content = Content(
                        lease, layer, values, length, start, tokens_first=shape.tokens_first
                    )
                    size = (batch.size, shape.kv_heads, length - start, width)
                    if shape.tokens_first:
                        size = (batch.size, length - start, shape.kv_heads, width)
                    handle = KVHandle.of(content, size, shape.dtype)
                    for position in positions:
                        outputs[position] = handle


def dense_of(past: Tensor) -> Tensor:
    """The numbers of a past, whether a handle stands for it or not."""
    return past.dense() if isinstance(past, KVHandle) else past
