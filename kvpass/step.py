# SPDX-License-Identifier: Apache-2.0
"""Running a rewritten graph: resolve caches, reserve blocks, run, account, make new handles."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from kvpass.config import Config
from kvpass.errors import CacheStateError, ShapeError
from kvpass.graph.plan import FunctionalSite, LayerShape, Plan, TieredGroup
from kvpass.runtime import directory
from kvpass.runtime.batch import Batch
from kvpass.runtime.geometry import BlockGeometry
from kvpass.runtime.handle import Content, KVHandle, Lease
from kvpass.runtime.manager import Manager


class RewrittenGraph:
    """Callable with the inputs and outputs of the graph before it was rewritten.

    Args:
        plan: how the rewritten graph is called.
        inner: the rewritten graph, compiled.
        config: configuration of functional caches.
        device: where attention is computed.
        manager_for: gives the manager of functional caches.
        plain: the graph before it was rewritten, for a past that the rewritten one cannot place.
    """

    def __init__(
        self,
        plan: Plan,
        inner: Callable[..., Any],
        config: Config,
        device: torch.device,
        manager_for: Callable[[Config, torch.device], Manager],
        plain: Callable[..., Any],
    ) -> None:
        self.plan = plan
        self.inner = inner
        self.config = config
        self.device = device
        self._manager_for = manager_for
        self._plain = plain
        self._functional = [_Functional(sites) for sites in plan.functional]

    def __call__(self, *args: Any) -> Any:
        """Run one step."""
        try:
            return self._run(*args)
        except _NotCounted:
            # A window of tokens from elsewhere, under a mask of the whole sequence.
            return self._plain(*args)

    def _run(self, *args: Any) -> Any:
        plan = self.plan
        sizes = _Sizes(plan.symbols, args)
        rows: list[Tensor] = []
        leases: list[Lease] = []
        with ExitStack() as steps:
            for group in plan.tiered:
                rows.append(steps.enter_context(self._tiered_step(group, args, sizes)))
            for functional in self._functional:
                manager = self._manager_for(self.config, self.device)
                lease = functional.open(manager, args, sizes, self.config)
                rows.append(steps.enter_context(functional.step(manager, lease, sizes)))
                leases.append(lease)
            outputs = self.inner(*[args[i] if i >= 0 else rows[-1 - i] for i in plan.inputs])
        if not leases and not plan.extra:
            return outputs
        values = list(outputs)[: len(outputs) - plan.extra]
        for functional, lease in zip(self._functional, leases, strict=True):
            functional.close(lease, values)
        return type(outputs)(values)

    def _tiered_step(self, group: TieredGroup, args: Sequence[Any], sizes: _Sizes) -> Any:
        state = directory.tiered(args[group.handle])
        shape = next(iter(group.layers.values()))
        tokens = sizes.of(shape.tokens)
        geometries = {
            layer: _geometry(shape, group.block_size) for layer, shape in group.layers.items()
        }
        manager, batch = state.bind(sizes.of(shape.batch), self.device, geometries, tokens)
        for layer, assumed in group.layers.items():
            stored = batch.lengths[layer]
            if sizes.of(assumed.past) != stored:
                raise CacheStateError(
                    f"layer {layer} holds {stored} tokens, the graph was given "
                    f"{sizes.of(assumed.past)}: the cache was changed from outside in between"
                )
            _check_mask(assumed, stored + tokens, sizes)
        return manager.step(batch, tokens, sorted(group.layers))


class _NotCounted(Exception):
    """A padding mask counts tokens from another one than the cache does."""


class _Sizes:
    """Values of the symbols in one call."""

    def __init__(self, symbols: dict[Any, tuple[int, int | None]], args: Sequence[Any]) -> None:
        self.symbols = symbols
        self.args = args
        self.known: dict[Any, int] = {}

    def of(self, size: Any) -> int:
        """Value of an int or a symbolic expression."""
        if isinstance(size, int):
            return size
        if size not in self.known:
            if size.is_Symbol:  # substitution is slow, and most sizes are plain symbols
                self.known[size] = self._read(size)
            else:
                values = {symbol: self._read(symbol) for symbol in size.free_symbols}
                self.known[size] = int(size.subs(values))
        return self.known[size]

    def _read(self, symbol: Any) -> int:
        if symbol not in self.symbols:
            raise CacheStateError(f"the size {symbol} cannot be read from the graph's inputs")
        index, dimension = self.symbols[symbol]
        value = self.args[index]
        return int(value if dimension is None else value.shape[dimension])


def _check_mask(shape: LayerShape, keys: int, sizes: _Sizes) -> None:
    """A padding mask that is too short fails here, as it does in eager."""
    if shape.mask is not None and sizes.of(shape.mask) < keys:
        raise ShapeError(
            f"the padding mask covers {sizes.of(shape.mask)} tokens, the cache will hold {keys}: "
            "pass an attention_mask for the past and the new tokens"
        )


def _geometry(shape: LayerShape, block_size: int) -> BlockGeometry:
    return BlockGeometry(
        shape.kv_heads, shape.head_dim_k, shape.head_dim_v, shape.dtype, block_size
    )


class _Functional:
    """The sites whose cache goes through the graph's inputs and outputs."""

    def __init__(self, sites: list[FunctionalSite]) -> None:
        self.sites = sites
        self.reads = sites[0].shape.tokens == 0 and not sites[0].out_k
        self._copy: tuple[tuple[weakref.ref[Content], ...], Lease] | None = None

    def open(self, manager: Manager, args: Sequence[Any], sizes: _Sizes, config: Config) -> Lease:
        """The batch that the past handles stand for, or a new one."""
        contents: list[Content] | None = []
        for site in self.sites:
            if site.past_k is None or site.past_v is None:
                contents = None
                break
            for index in (site.past_k, site.past_v):
                content = getattr(args[index], "content", None)
                if content is None:
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
            lease.batch.define(layer, _geometry(site.shape, config.memory.block_size))
            keep, offset = site.shape.keep, site.shape.mask_offset
            start = max(0, lease.batch.lengths[layer] - keep)
            if keep and offset is not None and sizes.of(offset) != start:
                raise _NotCounted
        return lease

    def step(self, manager: Manager, lease: Lease, sizes: _Sizes) -> Any:
        """The step that appends this call's tokens."""
        tokens = sizes.of(self.sites[0].shape.tokens)
        for layer, site in enumerate(self.sites):
            _check_mask(site.shape, lease.batch.lengths[layer] + tokens, sizes)
        return manager.step(lease.batch, tokens, range(len(self.sites)))

    def _same_batch(self, contents: list[Content], manager: Manager) -> Lease | None:
        """The lease of handles that are the layers of one batch, in order; else None."""
        first = contents[0]
        lease = first.lease
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
        sizes: _Sizes,
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

    def _adopt(self, manager: Manager, args: Sequence[Any], sizes: _Sizes, config: Config) -> Lease:
        """A new batch that holds a copy of the dense past, if there is one."""
        past: list[tuple[Tensor, Tensor] | None] = []
        for site in self.sites:
            if site.past_k is None or site.past_v is None:
                past.append(None)
            else:
                dense = (_dense(args[site.past_k]), _dense(args[site.past_v]))
                if dense[0].shape[:3] != dense[1].shape[:3]:
                    raise ShapeError(
                        f"past keys {tuple(dense[0].shape)} and values {tuple(dense[1].shape)} of "
                        f"{site.shape} differ in more than the head size"
                    )
                past.append(dense)
        size = sizes.of(self.sites[0].shape.batch)
        longest = max((pair[0].shape[2] for pair in past if pair is not None), default=0)
        tokens = longest + sizes.of(self.sites[0].shape.tokens)
        batch = manager.new_batch(size, len(self.sites), tokens + config.memory.block_size)
        lease = Lease(manager, batch)
        for layer, pair in enumerate(past):
            if pair is None or pair[0].shape[2] == 0:
                continue
            k, v = pair
            batch.define(layer, _geometry(self.sites[layer].shape, config.memory.block_size))
            with manager.step(batch, k.shape[2], [layer]) as rows:
                torch.ops.kvpass.append(k, v, rows, layer, config.memory.block_size)
        return lease

    def close(self, lease: Lease, outputs: list[Any]) -> None:
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
                    content = Content(lease, layer, values, length, start)
                    size = (batch.size, shape.kv_heads, length - start, width)
                    handle = KVHandle.of(content, size, shape.dtype)
                    for position in positions:
                        outputs[position] = handle


def _dense(past: Tensor) -> Tensor:
    return past.dense() if isinstance(past, KVHandle) else past
