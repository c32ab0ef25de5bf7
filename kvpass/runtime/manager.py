# SPDX-License-Identifier: Apache-2.0
"""The manager: the only owner of blocks, slots and tables of one device and configuration.

Concurrency: one reentrant lock guards all host state of a manager. A step holds it only while it
begins (reserve blocks, publish finished copies, bring the tables up to date) and while it ends
(account, choose moves), never while it computes. Between the two the batch is *active*: none of
its blocks changes place, so a reader needs no lock. Copies run beside compute and never take the
lock; what they produced is published when the next step begins. On a GPU, work already launched
may still read a slot that the host has given up: every slot carries the events (its fences) that
the next writer's stream waits for.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from kvpass import cpu_ops
from kvpass.config import Config, FairnessConfig, refuse_options_of_backend
from kvpass.config.families import DEFAULT
from kvpass.errors import CacheStateError, CapacityError, ConfigError, ShapeError
from kvpass.runtime import observe, pressure, roster
from kvpass.runtime.batch import Batch
from kvpass.runtime.capture import is_capturing
from kvpass.runtime.columns import Columns
from kvpass.runtime.critical import Section
from kvpass.runtime.heat import learn
from kvpass.runtime.metrics import Counters, LinkRate, Snapshot
from kvpass.runtime.migrate import copier_for
from kvpass.runtime.mover import Mover, movable
from kvpass.runtime.pacing import pacer_for
from kvpass.runtime.process import OfThisProcess, device_for
from kvpass.runtime.ranges import ranged
from kvpass.runtime.reserve import Reserver
from kvpass.runtime.resize import Resizer
from kvpass.runtime.table import tables_for
from kvpass.runtime.tiers import Tier, Tiers
from kvpass.sizes import format_size, parse_size
from kvpass.tuning import tune
from kvpass.warn import warn_user


class Manager(OfThisProcess):
    """Tiers, blocks and migration of the caches that share one hot and one cold arena.

    A :class:`kvpass.TieredCache` makes its own, or is given one that several share; those compete
    for hot blocks and for the link by their weights.

    Args:
        config: every option; None: those given by name, the environment and the defaults.
        device: where attention is computed; None: the current GPU, or the CPU where there is none.
        **options: keys of :class:`kvpass.Config`, e.g. ``hot="16GiB"``; not beside ``config``.

    Raises:
        ConfigError: an option is unknown or out of range, or given beside ``config``, or the
            machine cannot hold the tiers.

    Attributes:
        before_step: called with the manager and the batch when a step begins, before blocks are
            reserved; tests force migration here.
        columns: what is known of all blocks.
        number: of this manager, never used twice in a process; names it in metrics.
        dropped: batches whose step was begun by hand and forgotten.
    """

    def __init__(
        self,
        config: Config | None = None,
        device: torch.device | str | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        if config is not None and not isinstance(config, Config):
            raise ConfigError(f"{config!r} is no config: write kvpass.Manager(hot=...)")
        refuse_options_of_backend(options, "manager")
        if config is not None and options:
            raise ConfigError(
                f"{', '.join(options)} beside a config: give them to the config, or no config"
            )
        self.config = config if config is not None else Config.load(**options)
        self.device = device_for(device)
        config = self.config
        self.tables = tables_for(self.device)
        self.counters = Counters()
        self.tiers = Tiers(config, self.device)
        self._batches: list[Batch] = []
        self.columns = Columns(self._batches)
        self._section = Section(self.device)
        link = LinkRate()
        copier = copier_for(self.device, pacer_for(self.columns, link, self._section))
        self.mover = Mover(self.tiers, copier, self.counters, self.columns, config.memory, link)
        self._reserver = Reserver(
            self.tiers, self.mover, self.counters, self._batches, config.memory.resident_tokens
        )
        self._resizer = Resizer(self.tiers, self.mover, self.columns.blocks)
        self.before_step: Callable[[Manager, Batch], None] | None = None
        self._dead: deque[Batch] = deque()
        self.dropped: deque[Batch] = deque()
        weakref.finalize(self, _close, self._batches).atexit = False
        self.number = roster.enroll(self)
        if self.device.type == "cuda":
            pressure.watch(self.device)

    # ---------------------------------------------------------------- batches

    def new_batch(
        self,
        size: int,
        layers: int,
        tokens: int,
        family: str | None = DEFAULT,
        fairness: FairnessConfig | None = None,
    ) -> Batch:
        """Make room in the tables for ``size`` new, empty sequences.

        Args:
            size: sequences.
            layers: layers that keep keys and values.
            tokens: capacity to plan for; tables grow when more are appended.
            family: of the model, whose options hold; None: the caller sees to them.
            fairness: what the sequences are promised; None: as configured.

        Raises:
            OutOfMemoryError: the tables have no rows left.
            ConfigError: an option of the family does not fit this many layers.
        """
        self.check_process()
        with self._section.lock, self._section.whole:
            self._bury()
            batch = Batch(
                self.tables, size, layers, self.config.memory.block_size, tokens,
                fairness or self.config.fairness,
            )  # fmt: skip
            if family is not None:
                try:
                    tune(batch, self.config, family)
                except ConfigError:
                    batch.release_rows()
                    raise
            self._batches.append(batch)
            return batch

    def lease(self, owner: object, batch: Batch) -> weakref.finalize[..., object]:
        """Release ``batch`` when ``owner`` is garbage collected (from any thread, at any time).

        Returns:
            The finalizer; detach it when another batch takes this one's place.
        """
        # A deque append takes no lock, so a collection inside our own locked code is harmless.
        finalizer = weakref.finalize(owner, self._dead.append, batch)
        finalizer.atexit = False
        return finalizer

    def _check(self, batch: Batch) -> None:
        if batch.released:
            raise CacheStateError("this cache was released; make a new one")

    def release(self, batch: Batch) -> None:
        """Give back all blocks of a batch, once no step uses it; safe to call twice.

        Does nothing in a forked child, whose parent goes on with the same memory.
        """
        if not self.usable:
            return
        with self._section.lock, self._section.whole:
            if batch.released:
                return
            if batch.active is not None:
                self._dead.append(batch)
                return
            for layer in range(batch.layers):
                self._reserver.trim(batch, layer, 0)
            if batch.guard is not None:
                batch.guard.disarm(range(batch.layers))
            batch.release_rows()
            self._batches.remove(batch)

    def _bury(self) -> None:
        while self.dropped:
            batch = self.dropped.popleft()
            batch.manual = None
            self.abort(batch)
        for _ in range(len(self._dead)):  # one that is in a step comes back
            self.release(self._dead.popleft())

    # ------------------------------------------------------------------ steps

    @contextmanager
    def step(self, batch: Batch, tokens: int, layers: Sequence[int]) -> Iterator[torch.Tensor]:
        """One forward pass that appends ``tokens`` tokens to ``layers`` of every sequence.

        Yields:
            The rows, int32 ``[MAX_LAYERS, B]``, with a block reserved for every new token.

        Raises:
            CacheStateError: the batch was released, or is in a step on another thread.
            OutOfMemoryError: no tier has room; nothing was appended.
        """
        manual = None if batch.manual is None else batch.manual()
        if manual is not None:
            with manual.join(tokens, layers) as rows:
                yield rows
            return
        outer = len(batch.steps)
        try:
            self.begin(batch, tokens, layers)
            yield batch.rows
        except BaseException:
            if len(batch.steps) > outer:  # an interrupt may come when it has begun
                self.abort(batch)
            raise
        self.commit(batch, tokens, layers)

    @ranged("kvpass::begin")
    def begin(self, batch: Batch, tokens: int, layers: Sequence[int]) -> None:
        """First half of :meth:`step`."""
        self.check_process()
        with self._section.lock, self._section.whole:
            if is_capturing(self.device):
                raise CacheStateError(
                    "a step cannot begin while its stream is captured into a CUDA graph: capture "
                    "inside `with cache.begin_step(n):`"
                )
            self._bury()
            self._check(batch)
            if batch.active is not None:
                self._begin_nested(batch, tokens, layers)
                return
            if batch.event is not None:  # the caller may have changed streams
                torch.cuda.current_stream(self.device).wait_event(batch.event)
            if self.before_step is not None:
                self.before_step(self, batch)
            batch.service.step(time.perf_counter(), tokens)
            self.mover.collect()
            if self._resizer.pending:
                self._resizer.go_on()
            self._use_heat(batch, start=False)
            self._reserver.reserve(batch, tokens, layers)
            batch.active = threading.get_ident()
            batch.steps.append(frozenset(layers))

    def _begin_nested(self, batch: Batch, tokens: int, layers: Sequence[int]) -> None:
        """A layer whose attention was not rewritten, in a graph where others were."""
        taken = frozenset[int]().union(*batch.steps)
        if batch.active != threading.get_ident() or taken & frozenset(layers):
            raise CacheStateError(
                "this cache is in a step already (a cache serves one thread at a time): "
                "give each thread a cache of its own"
            )
        self._reserver.reserve(batch, tokens, layers)
        batch.steps.append(frozenset(layers))

    def _end(self, batch: Batch) -> None:
        batch.steps.pop()
        if batch.long is not None:
            batch.long.end()
            batch.long = None
        if not batch.steps:
            batch.active = None
        if self.device.type == "cuda":
            batch.event = torch.cuda.Event()
            batch.event.record(torch.cuda.current_stream(self.device))

    def abort(self, batch: Batch) -> None:
        """End a step that failed: nothing it appended counts, and the blocks for it are freed."""
        with self._section.lock, self._section.whole:
            layers = sorted(batch.steps[-1])
            self._end(batch)
            if batch.guard is not None:
                batch.guard.disarm(layers)
            self._reserver.give_back(batch, layers)

    @ranged("kvpass::commit")
    def commit(self, batch: Batch, tokens: int, layers: Sequence[int]) -> None:
        """Second half of :meth:`step`: the new tokens count from here on."""
        with self._section.lock, self._section.whole:
            self._end(batch)
            self.mover.write_through(batch.lengthen(layers, tokens))
            if layers and layers[0] == 0:
                self.counters.steps += 1
                # Only steps of one query count accesses, so only they make a window; more tell that
                # what is attended to changes.
                if tokens <= 1:
                    batch.steps_in_window += 1
                else:
                    batch.window = 1
                if batch.steps_in_window >= batch.window:
                    self._use_heat(batch, start=True)
            if batch.observer is not None and not batch.steps:
                batch.observer(batch, tokens)

    # ------------------------------------------------------------------- heat

    @ranged("kvpass::heat")
    def _use_heat(self, batch: Batch, *, start: bool) -> None:
        """Fold a finished window of access counts into the blocks, then choose what moves."""
        counts = batch.poll_heat(start)
        if counts is None or not any(batch.geometries):
            return
        batch.service.window(batch.fill)
        learn(
            batch,
            counts,
            self.columns,
            self.config.memory,
            self.counters,
            slots=self.tiers.hot_slots(max(g.block_bytes for g in batch.geometries if g)),
            rows=sum(b.layers * b.size for b in self._batches),
        )
        self.mover.rebalance()

    # ------------------------------------------------- operations on sequences

    def crop(self, batch: Batch, length: int) -> None:
        """Keep the first ``length`` tokens of every sequence; layers that hold none stay so.

        Raises:
            CacheStateError: the batch is in a step.
            CapacityError: ``length`` is negative or more than is stored.
        """
        self.check_process()
        with self._section.lock, self._section.whole:
            self._idle(batch)
            stored = min((n for n in batch.lengths if n), default=0)
            if not 0 <= length <= stored:
                raise CapacityError(f"crop to {length} tokens: the cache holds {stored}")
            batch.ready = None
            for layer in range(batch.layers):
                left = min(length, batch.lengths[layer])
                # First, so that no error leaves a layer longer than its blocks.
                batch.lengths[layer] = left
                self._reserver.trim(batch, layer, left)

    def fork(self, batch: Batch, sequences: Sequence[int], length: int | None = None) -> Batch:
        """A new batch of the given sequences; full blocks are shared, written ones copied on write.

        Args:
            batch: the batch to fork from; stays as it is.
            sequences: indices into it, repeated or reordered as wished.
            length: tokens to keep, default all; more than stored keeps all.

        Raises:
            CacheStateError: the batch is in a step.
            CapacityError: ``length`` is negative.
            OutOfMemoryError: the tables have no room.
            ShapeError: the batch has no such sequence.
        """
        self.check_process()
        with self._section.lock, self._section.whole:
            self._idle(batch)
            bad = [s for s in sequences if not 0 <= s < batch.size]
            if bad:
                raise ShapeError(f"sequence {bad[0]} of a batch of {batch.size}")
            if length is not None and length < 0:
                raise CapacityError(f"fork of {length} tokens: keep 0 or more")
            lengths = [n if length is None else min(length, n) for n in batch.lengths]
            new = self.new_batch(
                len(sequences), batch.layers, max(lengths), None, batch.service.options
            )
            try:
                self._share(batch, sequences, lengths, new)
            except BaseException:
                self.release(new)
                raise
            return new

    @staticmethod
    def _share(batch: Batch, sequences: Sequence[int], lengths: list[int], new: Batch) -> None:
        """Let ``new`` own the first blocks of sequences of ``batch`` too."""
        new.geometries, new.unfinished = list(batch.geometries), batch.unfinished
        new.retain(batch.retention)
        new.ahead = batch.ahead
        new.event = batch.event  # its first step may run on another stream
        for layer, length in enumerate(lengths):
            for target, source in enumerate(sequences):
                for block in batch.blocks[layer][source][: -(-length // batch.block_size)]:
                    new.attach(layer, target, block)
                    block.publish()
        new.lengths = lengths

    def _idle(self, batch: Batch) -> None:
        self._bury()
        self._check(batch)
        if batch.active is not None:
            raise CacheStateError("this cache is in a step; wait until it ends")
        self.mover.collect()

    def gather(self, batch: Batch, layer: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Dense copies of the first ``length`` keys and values of a layer.

        Returns:
            ``[B, Hkv, length, Dk]`` and ``[B, Hkv, length, Dv]``.
        """
        self.check_process()
        with self._section.lock, self._section.whole:
            self._check(batch)
            # Inside a step, its begin and end order what is read and written.
            ordered = self.device.type == "cuda" and batch.active is None
            if ordered and batch.event is not None:
                torch.cuda.current_stream(self.device).wait_event(batch.event)
            with torch.autocast("cpu", enabled=False):
                dense = cpu_ops.gather(batch, layer, length)
            if ordered:  # who takes a slot of these blocks waits for this read
                batch.event = torch.cuda.current_stream(self.device).record_event()
            return dense

    def resize(self, hot: int | str | None = None, cold: int | str | None = None) -> None:
        """Let the tiers hold more or less from now on; what is stored stays.

        A tier that becomes smaller gives its slabs back now, as far as no step uses them, and the
        rest when later steps begin. A larger one takes them as blocks come.

        Args:
            hot: size of the hot arena, as ``"64MiB"`` or bytes; None leaves it.
            cold: size of the cold arena, likewise.

        Raises:
            ConfigError: not a size, or more than the device has, or the host has left for cold.
            OutOfMemoryError: the other tier has no room for what has to leave; this one stays as
                it was.
        """
        given: dict[Tier, int | str | None] = {"hot": hot, "cold": cold}
        sizes = {tier: parse_size(size, tier) for tier, size in given.items() if size is not None}
        if not sizes:
            raise ConfigError("resize() without a size: give hot= or cold=")
        self.check_process()
        with self._section.lock, self._section.whole:
            self._bury()
            self.tiers.check(sizes)
            self._resizer.resize_all(sizes)

    def relieve(self, size: int) -> None:
        """Give ``size`` bytes of the device back for other code: the hot tier becomes smaller.

        What a step still uses follows when later steps begin. Does nothing inside the manager's own
        code: a tier that finds no memory takes what there is.
        """
        if self._section.mine or not self.usable:
            return
        with self._section.lock, self._section.whole:
            before = self.tiers.hot.capacity
            self._resizer.relieve(size)
            after = self.tiers.hot.capacity
        if after < before:
            warn_user(
                f"{self.device} ran out of memory: the hot tier gives {format_size(size)} back to "
                f"other code and holds {format_size(after)} from now on; lower hot, or call "
                "resize() when there is memory again"
            )

    def settle(self) -> None:
        """Wait for all copies in flight and account for them; for tests and measurements."""
        self.check_process()
        with self._section.lock, self._section.whole:
            self.mover.settle()

    def place(self, batch: Batch, hot: Callable[[int, int, int], bool]) -> None:
        """Put every full block of a batch where ``hot(layer, sequence, index)`` says, now.

        For tests and measurements of placement; a block that finds no hot slot stays cold.
        """
        self.check_process()
        with self._section.lock, self._section.whole:
            self._idle(batch)
            self.mover.settle()
            chosen = [
                (block, hot(layer, sequence, i))
                for layer, row in enumerate(batch.blocks)
                for sequence, blocks in enumerate(row)
                for i, block in enumerate(blocks)
            ]
            for block, is_hot in chosen:
                if not is_hot and block.hot is not None and movable(block):
                    self.mover.demote(block)
            for block, is_hot in chosen:
                if is_hot and block.hot is None and movable(block) and self.mover.promote(block):
                    self.mover.settle()

    def snapshot(self) -> Snapshot:
        """Where the KV bytes are now, and what was done; the reading is consistent."""
        self.check_process()
        with self._section.lock, self._section.whole:
            self._bury()
            self.mover.collect()
            return observe.take(self, self._batches)


def _close(batches: list[Batch]) -> None:
    """The manager is gone: give its table rows back (its slots go with it)."""
    for batch in batches:
        batch.release_rows()
