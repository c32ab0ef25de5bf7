# SPDX-License-Identifier: Apache-2.0
"""Decode steps as CUDA graphs: captured when a step comes again, then replayed.

A replay costs the host one launch and none of the Python of the step. Everything whose address or
shape may differ between calls is copied into tensors of the graph first; parameters are read where
they are, and a step whose parameters have moved is captured anew. Kernels find lengths and blocks
through the manager's tables, which never move, so neither another cache nor another length nor a
block that changed its place makes a new graph.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from kvpass.graph.prelude import Prelude
from kvpass.runtime.capture import is_capturing
from kvpass.runtime.locks import fork_safe_lock
from kvpass.runtime.staged import is_wanted
from kvpass.runtime.table import tables_for
from kvpass.warn import warn_user

WARM_UP = 2
"""Calls of a shape that run as they are: they compile kernels, and prompts come once."""

MOST_FAILURES = 2
"""Captures that fail before no more are tried: work of other threads may break one of them."""

MOST_GRAPHS = 8
"""Of one step; the one that was not used for longest makes room."""

WORTH = 8
"""Replays that a capture has to bring on average: one takes as long as many steps."""

SMALL = 1 << 20
"""Bytes of an input up to which it is copied at every call; larger ones have to stay in place."""

SHORTEST_MASK = 1024
"""Columns of the shortest mask of a graph; they double, so that few graphs are made."""


class Capture(Protocol):
    """What makes graphs of device work, and orders those who use one."""

    def available(self) -> bool:
        """Whether a call may be captured, or served by a graph, now."""
        ...

    def key(self) -> Any:
        """What else a graph depends on beside its inputs."""
        ...

    def begin(self) -> None:
        """Let what is launched from here on follow what was launched before the last ``end``."""
        ...

    def end(self) -> None:
        """All that uses a graph is launched."""
        ...

    def capture(self, run: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        """How to replay ``run``, and what it returned: tensors that each replay fills again."""
        ...


@dataclass
class Graph:
    """One captured step.

    Attributes:
        fixed: (input, address) of those that are read where they are.
        copied: inputs of one dtype, each with the part that is copied (the rest repeats it), and
            the graph's tensors that they are copied to. Each time: a version counter does not see
            writes through ``.data``, NumPy or other graphs.
        masks: (input, tensor of the graph), whose first columns are filled.
        outputs: what a replay fills.
    """

    replay: Callable[[], None]
    fixed: list[tuple[int, int]]
    copied: list[tuple[list[tuple[int, Any]], list[Tensor]]]
    masks: list[tuple[int, Tensor]]
    outputs: Any


class Replayer:
    """Runs the rest of a step behind its prelude, captured where that is possible.

    Any thread may call it; its graphs are used by one at a time.

    Attributes:
        replays: calls that were served by a graph.
        captures: graphs that were made.

    Args:
        prelude: how the step was cut.
        early: runs the prelude.
        late: runs the rest.
        capture: makes graphs.
    """

    def __init__(
        self,
        prelude: Prelude,
        early: Callable[..., Any] | None,
        late: Callable[..., Any],
        capture: Capture,
    ) -> None:
        self._prelude = prelude
        self._early = early
        self._late = late
        self._capture = capture
        self._graphs: dict[Any, Graph] = {}
        self._seen: dict[Any, int] = {}
        self._given_up = False
        self._failures = 0
        self._lock = threading.Lock()
        self.replays = self.captures = 0

    def __call__(self, *args: Any) -> Any:
        """Run one step."""
        prelude = self._prelude
        found = () if self._early is None else self._early(*args)
        end = prelude.values + prelude.masks
        inputs = [*(args[i] for i in prelude.kept), *found[:end]]
        outputs = self._run(inputs)
        if not prelude.numbers:
            return outputs
        filled = list(outputs)
        for position, number in zip(prelude.numbers, found[end:], strict=True):
            filled[position] = number
        return type(outputs)(filled)

    def _run(self, inputs: list[Any]) -> Any:
        if not self._capture.available():
            return self._late(*inputs)
        with self._lock:
            graph = self._graph(inputs)
            if graph is not None:
                self._capture.begin()
                for places, tensors in graph.copied:
                    values = [inputs[i] if part is None else inputs[i][part] for i, part in places]
                    torch._foreach_copy_(tensors, values, non_blocking=True)
                for i, mask in graph.masks:
                    mask[:, : inputs[i].shape[1]].copy_(inputs[i], non_blocking=True)
                graph.replay()
                outputs = _clones(graph.outputs)
                self._capture.end()
                for i in self._prelude.written:  # as the step itself would have told
                    if not inputs[i].is_inference():
                        torch.autograd.graph.increment_version(inputs[i])
                self.replays += 1
                return outputs
        return self._late(*inputs)

    def _graph(self, inputs: list[Any]) -> Graph | None:
        """The graph of a call, captured where one is due; None: it runs as it is."""
        first_mask = len(inputs) - self._prelude.masks
        key = self._key(inputs, first_mask)
        graph = self._graphs.pop(key, None)
        if graph is None or any(inputs[i].data_ptr() != at for i, at in graph.fixed):
            if graph is not None:
                self._seen[key] = 0  # what it reads has moved
            if self._given_up:
                return None
            count = self._seen[key] = self._seen.get(key, 0) + 1
            if count <= WARM_UP:
                return None
            self._give_up_or_make_room()
            if self._given_up:
                return None
            graph = self._made(inputs, first_mask)
            if graph is None:
                self._seen[key] = 0
                self._given_up = self._failures >= MOST_FAILURES
                return None
            self.captures += 1
        self._graphs[key] = graph  # the one used last comes last
        return graph

    def _give_up_or_make_room(self) -> None:
        """Before one more graph: captures have to be worth it, and memory is bounded."""
        self._given_up = self.captures >= MOST_GRAPHS and self.replays < WORTH * self.captures
        while len(self._graphs) >= MOST_GRAPHS:
            del self._graphs[next(iter(self._graphs))]

    def _key(self, inputs: list[Any], first_mask: int) -> Any:
        parts: list[Any] = [self._capture.key()]
        for i, value in enumerate(inputs):
            if isinstance(value, nn.Parameter):
                continue  # its address is compared
            if not isinstance(value, Tensor):
                parts.append(value)
            elif i >= first_mask:
                parts.append((_capacity(value.shape[1]), value.shape[0], value.dtype))
            else:
                parts.append((value.shape, value.stride(), value.dtype))
        return tuple(parts)

    def _made(self, inputs: list[Any], first_mask: int) -> Graph | None:
        """A graph of this call; None where it cannot be captured (a failure is said once)."""
        written = set(self._prelude.written)
        fixed: list[tuple[int, int]] = []
        copied: dict[torch.dtype, tuple[list[tuple[int, Any]], list[Tensor]]] = {}
        masks: list[tuple[int, Tensor]] = []
        own = list(inputs)
        for i, value in enumerate(inputs):
            if not isinstance(value, Tensor):
                continue
            if i >= first_mask:
                size = (value.shape[0], _capacity(value.shape[1]))
                own[i] = torch.zeros(size, dtype=value.dtype, device=value.device)
                masks.append((i, own[i]))
            elif isinstance(value, nn.Parameter) or i in written or _size(value) > SMALL:
                fixed.append((i, value.data_ptr()))
            else:
                part, tensor = _like(value)
                tensor.copy_(value if part is None else value[part])
                own[i] = tensor.expand(value.shape)
                places, tensors = copied.setdefault(value.dtype, ([], []))
                places.append((i, part))
                tensors.append(tensor)
        for i, tensor in masks:
            tensor[:, : inputs[i].shape[1]].copy_(inputs[i])
        try:
            with _casts_anew():
                replay, outputs = self._capture.capture(lambda: self._late(*own))
        except Exception as error:  # the step itself has run twice: it is the capture that fails
            self._failures += 1
            if self._failures >= MOST_FAILURES:
                warn_user(
                    f"kvpass: a decode step could not be captured into a CUDA graph, and runs "
                    f"without one, which is slower: {type(error).__name__}: "
                    f"{str(error).splitlines()[0]}"
                )
            return None
        memory = {_memory(value) for value in own if isinstance(value, Tensor)}
        results = [out for out in _leaves(outputs) if isinstance(out, Tensor) and out.numel()]
        if any(_memory(out) in memory for out in results):
            # An input that is returned, or a part of it: the caller gets its own.
            self._failures = MOST_FAILURES
            return None
        return Graph(replay, fixed, list(copied.values()), masks, outputs)


@contextmanager
def _casts_anew() -> Iterator[None]:
    """Casts of weights are part of what is captured: autocast keeps others only for its block."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


def _like(value: Tensor) -> tuple[Any, Tensor]:
    """Memory for a tensor with the same strides, which compiled code counts on.

    Returns:
        The part of it that all the rest repeats (None: all of it), and memory for that.
    """
    part = None
    if 0 in value.stride():
        part = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in value.stride())
        value = value[part]
    size, stride = value.shape, value.stride()
    return part, torch.empty_strided(size, stride, dtype=value.dtype, device=value.device)


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _capacity(columns: int) -> int:
    return max(SHORTEST_MASK, 1 << (columns - 1).bit_length())


def _leaves(outputs: Any) -> list[Any]:
    return list(outputs) if isinstance(outputs, (tuple, list)) else [outputs]


def _clones(outputs: Any) -> Any:
    """Copies that the next replay does not change."""
    if isinstance(outputs, (tuple, list)):
        return type(outputs)(map(_clones, outputs))
    return outputs.clone() if isinstance(outputs, Tensor) else outputs


_capturing = fork_safe_lock()


class CudaCapture:
    """CUDA graphs with a memory pool of their own.

    Args:
        device: where the step runs.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None
        self._stream: Any = None
        self._last: Any = None

    def available(self) -> bool:
        """See :class:`Capture`."""
        return not is_capturing(self._device)

    def key(self) -> Any:
        """See :class:`Capture`: where workspaces of kernels end, and whether blocks are staged."""
        return tables_for(self._device).max_blocks, is_wanted()

    def begin(self) -> None:
        """See :class:`Capture`."""
        if self._last is not None:
            torch.cuda.current_stream(self._device).wait_event(self._last)

    def end(self) -> None:
        """See :class:`Capture`."""
        self._last = torch.cuda.current_stream(self._device).record_event()

    def capture(self, run: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        """See :class:`Capture`."""
        graph = torch.cuda.CUDAGraph()
        # Not torch.cuda.graph: it captures on a stream of the device of its first use, empties
        # everybody's caches, and leaves the caller on that stream where a capture fails.
        with _capturing, torch.cuda.device(self._device):
            if self._pool is None:
                self._pool = torch.cuda.graph_pool_handle()
            if self._stream is None:
                self._stream = torch.cuda.Stream(self._device)
            with torch.cuda.stream(self._stream):
                # Other threads go on with work of their own, as the copy engine does.
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    outputs = run()
                    graph.capture_end()
                except BaseException:
                    self._abandon(graph)
                    raise
        return graph.replay, outputs

    def _abandon(self, graph: torch.cuda.CUDAGraph) -> None:
        """End a capture that failed; its end fails too, before memory is the allocator's again."""
        with suppress(Exception):
            graph.capture_end()
        with suppress(Exception):
            torch._C._cuda_endAllocateToPool(self._device.index, self._pool)
        self._pool = None
