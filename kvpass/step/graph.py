# SPDX-License-Identifier: Apache-2.0
"""Running a rewritten graph: resolve caches, reserve blocks, run, account, make new handles."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import cache
from typing import Any

import torch
from torch import Tensor

from kvpass.config import Config
from kvpass.errors import UnsupportedError, other_length
from kvpass.graph.plan import Plan, TieredGroup
from kvpass.runtime import directory
from kvpass.runtime.capture import is_capturing
from kvpass.runtime.content import Lease
from kvpass.runtime.handle import KVHandle
from kvpass.runtime.manager import Manager
from kvpass.runtime.manual import check_manual
from kvpass.runtime.staged import step_over
from kvpass.step.buffers import BufferGroup, with_memory
from kvpass.step.functional import FunctionalGroup, check_mask, geometry_of
from kvpass.step.sizes import CallSizes, NotCounted, has_grown, known_number
from kvpass.warn import warn_user

PLAIN_CALLS = 4
"""Calls in a row that the rewritten graph does not describe, after which that is said."""


class RewrittenGraph:
    """Callable with the inputs and outputs of the graph before it was rewritten.

    Args:
        plan: how the rewritten graph is called.
        inner: the rewritten graph, compiled.
        config: configuration of functional caches.
        manager_for: gives the manager of functional caches.
        plain: the graph before it was rewritten, for a past that the rewritten one cannot place.
        repeats: names what a captured step would repeat although it differs from step to step.
    """

    def __init__(
        self,
        plan: Plan,
        inner: Callable[..., Any],
        config: Config,
        manager_for: Callable[[Config, torch.device], Manager],
        plain: Callable[..., Any],
        *,
        repeats: Callable[[], str] = str,
    ) -> None:
        self.plan = plan
        self.inner = inner
        self.config = config
        self._manager_for = manager_for
        self._plain = plain
        self._repeats = repeats
        self._plain_calls = 0
        self._warned = False
        self._functional = [
            (BufferGroup if sites[0].buffer is not None else FunctionalGroup)(sites, plan.family)
            for sites in plan.functional
        ]

    def __call__(self, *args: Any) -> Any:
        """Run one step."""
        try:
            outputs = self._run(*args)
            self._plain_calls = 0
            return outputs
        except NotCounted as reason:
            self._note_plain_call(str(reason))
            # A window of tokens from elsewhere under a mask of the whole sequence, or tokens that
            # a static buffer gets at positions that are not the next ones.
            buffers = [i for i, arg in enumerate(args) if isinstance(arg, KVHandle)]
            return self._plain(*with_memory(args, [i for i in buffers if args[i].is_buffer]))

    def _note_plain_call(self, reason: str) -> None:
        """Warn once of a graph that is rewritten in vain; single calls are expected."""
        self._plain_calls += 1
        if self._plain_calls == PLAIN_CALLS and reason != _TABLES and not self._warned:
            self._warned = True
            warn_user(
                f"kvpass: the last {PLAIN_CALLS} calls of a rewritten graph ran the model's own "
                f"attention, which is right, but neither faster nor smaller: {reason}"
            )

    def _run(self, *args: Any) -> Any:
        plan = self.plan
        if is_capturing(plan.shapes[0].device):
            self._check_capture()
        if plan.dense:
            args = tuple(with_memory(args, plan.dense))
        sizes = CallSizes(plan.symbols, args)
        if any(sizes.of(a) != sizes.of(b) for a, b in plan.assumed):
            raise NotCounted("the mask takes the new tokens at another position than the cache")
        for probe in plan.probes:
            end = min(
                (sizes.of(first) + sizes.of(tokens) for first, tokens in probe.ends), default=0
            )
            if not probe.holds(args, end):
                raise NotCounted(
                    "the mask hides tokens of a window, all of which must be seen"
                    if probe.all_seen
                    else "the mask shows positions of a static buffer that hold no token yet, or "
                    "hides every token from a query"
                )
        for check in plan.tables:
            if not check.holds(args, sizes):
                _warn_of_tables()
                raise NotCounted(_TABLES)
        rows: list[Tensor] = []
        leases: list[Lease] = []
        with ExitStack() as steps:
            for group in plan.tiered:
                rows.append(steps.enter_context(self._tiered_step(group, args, sizes)))
            # All before the first step: one may fork what another steps through.
            for functional in self._functional:
                manager = self._manager_for(self.config, functional.sites[0].shape.device)
                leases.append(functional.open(manager, args, sizes, self.config))
            for functional, lease in zip(self._functional, leases, strict=True):
                rows.append(steps.enter_context(functional.step(lease.manager, lease, sizes)))
            numbers = {i: known_number(args[i]) for i in plan.grows if args[i].is_cuda}
            with step_over(rows):
                outputs = self.inner(*[args[i] if i >= 0 else rows[-1 - i] for i in plan.inputs])
            for i, before in numbers.items():
                has_grown(args[i], before, sizes.of(plan.grows[i]))
        if not leases and not plan.extra:
            return outputs
        if not isinstance(outputs, (list, tuple)):
            for functional, lease in zip(self._functional, leases, strict=True):
                functional.close(lease, [], args, sizes)
            return outputs
        values = list(outputs)[: len(outputs) - plan.extra]
        for functional, lease in zip(self._functional, leases, strict=True):
            functional.close(lease, values, args, sizes)
        return type(outputs)(values)

    def _check_capture(self) -> None:
        """A graph that is captured by hand must hold nothing that belongs to this step alone.

        Raises:
            UnsupportedError: it would.
        """
        if self._functional:
            raise UnsupportedError(
                "a step over a cache that the graph returns cannot be captured by hand: pass a "
                "kvpass.TieredCache, and capture inside `with cache.begin_step(n):`"
            )
        pasts = [shape.past for group in self.plan.tiered for shape in group.layers.values()]
        if any(not getattr(past, "free_symbols", ()) for past in pasts):
            raise UnsupportedError(
                "this step was compiled for one length of the sequence alone, which a captured one "
                "would repeat: leave dynamic= to torch.compile, and call the model at two lengths "
                "above 0 before you capture"
            )
        what = self._repeats()
        if self.plan.probes or self.plan.tables:
            what = "its mask, which the host has to look at"
        if what:
            raise UnsupportedError(
                f"a captured step would repeat this one's length in every replay: {what}. Give the "
                "model its positions as a tensor that you fill before each replay (position_ids="
                ", in transformers), and no padding mask"
            )

    def _tiered_step(self, group: TieredGroup, args: Sequence[Any], sizes: CallSizes) -> Any:
        state = directory.tiered(args[group.handle])
        shape = next(iter(group.layers.values()))
        tokens = sizes.of(shape.tokens)
        geometries = {
            layer: geometry_of(shape, group.block_size) for layer, shape in group.layers.items()
        }
        manager, batch = state.bind(sizes.of(shape.batch), shape.device, geometries, tokens)
        layers = sorted(group.layers)
        check_manual(batch, tokens, layers)
        for layer, assumed in group.layers.items():
            stored = batch.lengths[layer]
            if sizes.of(assumed.past) != stored:
                raise other_length(layer, stored, sizes.of(assumed.past))
            check_mask(assumed, stored + tokens, sizes)
        return manager.step(batch, tokens, layers)


_TABLES = "the blocks of a BlockMask are not those of its mask_mod"


@cache
def _warn_of_tables() -> None:
    """Once a process: such a call cannot be rewritten, and is slow."""
    warn_user(
        "kvpass: the blocks that a BlockMask of flex_attention lists are not those that its "
        "mask_mod shows: the attention runs uncompiled, which follows the mask_mod; make the "
        "BlockMask with create_block_mask from the same mask_mod, captured tensors and sizes"
    )
