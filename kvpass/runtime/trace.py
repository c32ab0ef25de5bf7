# SPDX-License-Identifier: Apache-2.0
"""Traces: which blocks attention accessed, step by step, recorded to a file.

A trace is a compressed ``.npz`` (NumPy) with four arrays:

``header``
    uint8, UTF-8 JSON: ``format`` "kvpass-trace", ``version`` 1, ``model`` (any text), ``layers``,
    ``sequences``, ``block_size`` (tokens), ``kv_heads`` and
    ``block_bytes`` (of each layer), ``prompt_tokens`` and ``tokens`` (stored at the start and the
    end), ``interval`` (decode steps of a tick).
``counts``
    uint8 to int64 ``[ticks, layers, sequences, blocks]``: accesses of each block in the tick,
    summed over KV heads. An access: the block's share of a head's softmax reached 1 / blocks.
``start``
    int32 ``[layers, sequences]``: blocks at the first tick, its own new ones included.
``blocks``
    int32 ``[ticks, layers, sequences]``: blocks at the end of each tick; what is more than before
    was created in it.
"""

from __future__ import annotations

import json
import os
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

from kvpass.errors import CacheStateError, ConfigError, TraceError

if TYPE_CHECKING:
    from kvpass.cache import TieredCache
    from kvpass.runtime.batch import Batch

FORMAT = "kvpass-trace"
VERSION = 1


@dataclass(frozen=True)
class Trace:
    """A recorded run; the module's docstring says what each part means.

    Attributes:
        model: name of the model.
        block_size: tokens of a block.
        kv_heads: of each layer.
        block_bytes: of a block of each layer.
        prompt_tokens: tokens stored when decoding began.
        tokens: tokens stored at the end.
        interval: decode steps of a tick.
        counts: ``[ticks, layers, sequences, blocks]`` accesses.
        start: int32 ``[layers, sequences]``.
        blocks: int32 ``[ticks, layers, sequences]``.
    """

    model: str
    block_size: int
    kv_heads: tuple[int, ...]
    block_bytes: tuple[int, ...]
    prompt_tokens: int
    tokens: int
    interval: int
    counts: NDArray[Any]
    start: NDArray[np.int32]
    blocks: NDArray[np.int32]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the trace.

        Raises:
            TraceError: the file cannot be written.
        """
        header = {
            "format": FORMAT,
            "version": VERSION,
            "model": self.model,
            "layers": self.counts.shape[1],
            "sequences": self.counts.shape[2],
            "block_size": self.block_size,
            "kv_heads": list(self.kv_heads),
            "block_bytes": list(self.block_bytes),
            "prompt_tokens": self.prompt_tokens,
            "tokens": self.tokens,
            "interval": self.interval,
        }
        most = int(self.counts.max(initial=0))
        narrow = next(t for t in (np.uint8, np.uint16, np.int64) if most <= np.iinfo(t).max)
        try:
            with open(path, "wb") as file:
                np.savez_compressed(
                    file,
                    header=np.frombuffer(json.dumps(header).encode(), dtype=np.uint8),
                    counts=self.counts.astype(narrow),
                    start=self.start.astype(np.int32),
                    blocks=self.blocks.astype(np.int32),
                )
        except OSError as error:
            raise TraceError(
                f"trace {os.fspath(path)!r} cannot be written ({error.strerror}): name a file in a "
                "writable folder"
            ) from None


def load_trace(path: str | os.PathLike[str]) -> Trace:
    """Read a trace and check that its parts fit together.

    Raises:
        TraceError: the file cannot be read, is no trace, of another version, or damaged.
    """
    name = os.fspath(path)
    try:
        with np.load(name, allow_pickle=False) as file:
            parts = {key: file[key] for key in ("header", "counts", "start", "blocks")}
        header = json.loads(bytes(parts["header"].astype(np.uint8)).decode())
    except OSError as error:
        raise TraceError(
            f"trace {name!r} cannot be read ({error.strerror or error}): check the path"
        ) from None
    except (ValueError, KeyError, EOFError, AttributeError, TypeError, zipfile.BadZipFile) as error:
        # NumPy's own words for a foreign file advise to load it unsafely.
        why = "" if "pickle" in str(error) else f": {error}"
        raise TraceError(f"{name!r} is no trace, or a damaged one{why}; {_RECORD}") from None
    except Exception as error:  # zlib.error and struct.error of damaged members
        raise TraceError(f"trace {name!r} is damaged: {error}; {_RECORD}") from None
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise TraceError(f"{name!r} is not a trace of kvpass; {_RECORD}")
    if type(header.get("version")) is not int or header["version"] != VERSION:
        raise TraceError(
            f"trace {name!r} has version {header.get('version')!r}, this is version {VERSION}: "
            "record it again"
        )
    wrong = _fault(header, parts)
    if wrong:
        raise TraceError(f"trace {name!r} is damaged: {wrong}; {_RECORD}")
    return Trace(
        model=str(header["model"]),
        block_size=header["block_size"],
        kv_heads=tuple(header["kv_heads"]),
        block_bytes=tuple(header["block_bytes"]),
        prompt_tokens=header["prompt_tokens"],
        tokens=header["tokens"],
        interval=header["interval"],
        counts=parts["counts"],
        start=parts["start"],
        blocks=parts["blocks"],
    )


_RECORD = "record one with kvpass generate --record-trace"


def _fault(header: dict[str, Any], parts: dict[str, NDArray[Any]]) -> str | None:
    """What does not fit in a trace, or None."""
    counts, start, blocks = parts["counts"], parts["start"], parts["blocks"]
    for name in ("layers", "sequences", "block_size", "interval"):
        if type(header.get(name)) is not int or header[name] < 1:
            return f"{name} is {header.get(name)!r}"
    for name in ("prompt_tokens", "tokens"):
        if type(header.get(name)) is not int or header[name] < 0:
            return f"{name} is {header.get(name)!r}"
    layers, sequences = header["layers"], header["sequences"]
    for name in ("kv_heads", "block_bytes"):
        value = header.get(name)
        if not isinstance(value, list) or not all(type(n) is int and n > 0 for n in value):
            return f"{name} is {value!r}"
        if len(value) != layers:
            return f"{name} has {len(value)} numbers for {layers} layers"
    if not isinstance(header.get("model"), str):
        return "the header names no model"
    if any(part.dtype.kind not in "iu" for part in (counts, start, blocks)):
        return "an array holds no integers"
    ticks = len(counts)
    if (
        counts.ndim != 4
        or counts.shape[1:3] != (layers, sequences)
        or start.shape != (layers, sequences)
        or blocks.shape != (ticks, layers, sequences)
    ):
        return f"shapes {counts.shape}, {start.shape}, {blocks.shape} do not fit"
    if not ticks:
        return "it has no step of decoding"
    grown = np.diff(np.concatenate([start[None], blocks]).astype(np.int64), axis=0)
    if (grown < 0).any() or (start < 0).any() or int(blocks[-1].max()) > counts.shape[3]:
        return "the numbers of blocks do not fit"
    beyond = np.arange(counts.shape[3]) >= blocks[..., None]
    if (counts < 0).any() or counts[beyond].any():
        return "accesses of blocks that are not there"
    return None


class Recorder:
    """Records the accesses of a cache's blocks while it is open.

    ::

        with Recorder(cache, model="smollm2-135m") as recorder:
            ...  # a prompt, then decode steps
        recorder.trace().save("run.npz")

    A trace starts with the first step of one token. On a GPU every tick waits for the device to
    read its counters back, so decoding is slower while recorded.

    Args:
        cache: the cache; may be unused yet.
        model: name for the header.
        interval: decode steps of a tick.

    Raises:
        ConfigError: ``interval`` is not a whole number of at least 1.
    """

    def __init__(self, cache: TieredCache, *, model: str = "", interval: int = 1) -> None:
        if isinstance(interval, bool) or not isinstance(interval, int) or interval < 1:
            raise ConfigError(f"interval = {interval!r}: give decode steps of a tick, at least 1")
        self.model = model
        self.interval = interval
        self._cache = cache
        self._batch: Batch | None = None
        self._steps = 0
        self._prompt = 0
        self._tokens = 0
        self._start: NDArray[np.int32] | None = None
        self._before: NDArray[Any] | None = None
        self._counts: list[NDArray[Any]] = []
        self._blocks: list[NDArray[np.int32]] = []
        self._broken: str | None = None

    def __enter__(self) -> Self:
        """Start to listen to the cache's steps."""
        batch = self._cache.batch
        if batch is not None:
            self._batch = batch
            self._before = batch.heat.cpu().numpy().copy()
        self._cache.observe(self._step)
        return self

    def __exit__(self, *exc: object) -> None:
        """Stop listening."""
        self._cache.observe(None)

    def _step(self, batch: Batch, tokens: int) -> None:
        """After a step; called with the manager's lock held."""
        if self._batch is None:
            self._batch = batch
        sizes = np.array([[len(row) for row in layer] for layer in batch.blocks], dtype=np.int32)
        last = self._blocks[-1] if self._blocks else self._start
        if batch is not self._batch or (last is not None and (sizes < last).any()):
            self._broken = "its sequences were cropped, selected or reset while it was recorded"
        if self._broken:
            return
        counts = batch.heat.cpu().numpy().copy() if self._due(tokens) else None
        if self._start is None:
            # Steps of several tokens count no accesses, so a prompt leaves no tick.
            if tokens > 1:
                return
            self._start = sizes
            self._prompt = max(batch.lengths) - tokens
        self._steps += tokens <= 1
        self._tokens = max(batch.lengths)
        if counts is not None:
            before = np.zeros_like(counts)
            if self._before is not None:  # tables may have grown since
                before[:, :, : self._before.shape[2]] = self._before
            self._counts.append(counts - before)
            self._blocks.append(sizes)
            self._before = counts
            self._steps = 0

    def _due(self, tokens: int) -> bool:
        return tokens <= 1 and self._steps + 1 >= self.interval

    def trace(self) -> Trace:
        """What was recorded; steps of an unfinished last tick are left out.

        Raises:
            TraceError: there was no tick yet.
            CacheStateError: blocks were taken away in between.
        """
        if self._broken:
            raise CacheStateError(f"no trace of this cache: {self._broken}; record it again")
        if self._batch is None or self._start is None or not self._counts:
            raise TraceError(
                "nothing was recorded: run at least one decode step of a compiled model "
                f"(of {self.interval} tokens) while the recorder is open"
            )
        wide = max(counts.shape[2] for counts in self._counts)
        wide = min(wide, int(self._blocks[-1].max()))
        counts = np.zeros((len(self._counts), *self._start.shape, wide), dtype=np.int64)
        for tick, part in enumerate(self._counts):
            counts[tick, :, :, : part.shape[2]] = part[:, :, :wide]
        geometries = self._batch.geometries
        return Trace(
            model=self.model,
            block_size=self._batch.block_size,
            kv_heads=tuple(1 if g is None else g.kv_heads for g in geometries),
            block_bytes=tuple(1 if g is None else g.block_bytes for g in geometries),
            prompt_tokens=self._prompt,
            tokens=self._tokens,
            interval=self.interval,
            counts=counts,
            start=self._start,
            blocks=np.array(self._blocks, dtype=np.int32),
        )


def check_target(path: Path) -> None:
    """Refuse, before anything slow is done, a file that a trace cannot be written to.

    Raises:
        ConfigError: the folder is missing or not writable, or the path is a folder.
    """
    folder = path.absolute().parent
    if path.is_dir():
        raise ConfigError(f"--record-trace {path} is a folder: name a file in it")
    if not folder.is_dir():
        raise ConfigError(f"--record-trace {path}: the folder {folder} does not exist; create it")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise ConfigError(f"--record-trace {path} cannot be written: name a file elsewhere")
