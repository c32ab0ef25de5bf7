# SPDX-License-Identifier: Apache-2.0
"""A step that the user begins: for CUDA graphs captured by hand, which run no Python."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from kvpass.errors import CacheStateError
from kvpass.runtime.capture import is_capturing
from kvpass.runtime.guard import StepGuard

if TYPE_CHECKING:
    from kvpass.runtime.batch import Batch


class ManualStep:
    """What :meth:`kvpass.TieredCache.begin_step` returns; a context manager.

    Blocks for the new tokens are reserved when it is made. Steps of rewritten graphs join it
    meanwhile; when it ends, the tokens count. One that nobody holds any more is cancelled.

    Args:
        manager: of the batch.
        batch: whose step it is.
        tokens: that each sequence gets.
        ended: called when it has ended.

    Raises:
        CacheStateError: the batch is in a step, or an earlier step went wrong.
        OutOfMemoryError: no tier has room; nothing was reserved.
    """

    def __init__(self, manager: Any, batch: Batch, tokens: int, ended: Callable[[], None]) -> None:
        self._manager = manager
        self._batch = batch
        self._tokens = tokens
        self._ended = ended
        self._layers = [i for i, known in enumerate(batch.geometries) if known is not None]
        self._appended: set[int] = set()
        self._failed = self.done = False
        if batch.device.type == "cuda" and batch.guard is None and not is_capturing(batch.device):
            batch.guard = StepGuard(batch)
        manager.begin(batch, tokens, self._layers)
        batch.manual = weakref.ref(self)
        # One that is dropped without an end is cancelled by the manager, when it has its lock.
        self._dropped = weakref.finalize(self, manager.dropped.append, batch)
        self._dropped.atexit = False

    def __enter__(self) -> ManualStep:
        """Itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        """End the step; nothing counts if there was an error."""
        if kind is not None:
            self.cancel()
        else:
            self.end()

    def end(self) -> None:
        """The new tokens count from here on; safe to call twice.

        Raises:
            CacheStateError: the model did not append them, as far as that is known here; nothing
                counts then. Of a replayed graph it is known when a later step begins.
        """
        if self.done:
            return
        missing = set(self._layers) - self._appended
        if self._failed or (missing and self._batch.device.type != "cuda"):
            self.cancel()
            raise CacheStateError(
                f"the step that was begun got no new keys and values in layer {min(missing)}: call "
                "the model inside `with cache.begin_step(n):`, or .cancel() the step"
            )
        self._close()
        self._manager.commit(self._batch, self._tokens, self._layers)
        self._ended()

    def cancel(self) -> None:
        """End the step without counting its tokens; safe to call twice."""
        if not self.done:
            self._close()
            self._manager.abort(self._batch)
            self._ended()

    def _close(self) -> None:
        self.done = True
        self._dropped.detach()
        self._batch.manual = None

    @contextmanager
    def join(self, tokens: int, layers: Sequence[int]) -> Iterator[torch.Tensor]:
        """The step of a rewritten graph inside this one.

        Yields:
            The rows, int32 ``[MAX_LAYERS, B]``.

        Raises:
            CacheStateError: see :meth:`check`.
        """
        self.check(tokens, layers)
        try:
            yield self._batch.rows
        except BaseException:
            self._failed = True
            raise
        if not is_capturing(self._batch.device):  # what is captured has not run
            self._appended.update(layers)

    def check(self, tokens: int, layers: Sequence[int]) -> None:
        """Whether a step may join.

        Raises:
            CacheStateError: another thread's, or of other tokens or layers than were reserved.
        """
        if self._batch.active != threading.get_ident():
            raise CacheStateError(
                "this cache is in a step already (a cache serves one thread at a time): "
                "give each thread a cache of its own"
            )
        if tokens != self._tokens:
            raise CacheStateError(
                f"the step was begun for {self._tokens} tokens, the model appends {tokens}: "
                f"begin_step({tokens})"
            )
        unknown, twice = set(layers) - set(self._layers), self._appended & set(layers)
        if unknown:
            raise CacheStateError(
                f"layer {min(unknown)} was never used before, so nothing is reserved for it: run "
                "the prompt through the model before the first begin_step"
            )
        if twice:
            raise CacheStateError(
                f"layer {min(twice)} got its tokens of this step already: begin another step"
            )


def check_manual(batch: Batch, tokens: int, layers: Sequence[int]) -> None:
    """Whether a step fits the one of its batch that was begun by hand, if there is one.

    Raises:
        CacheStateError: see :meth:`ManualStep.check`.
    """
    manual = None if batch.manual is None else batch.manual()
    if manual is not None:
        manual.check(tokens, layers)
