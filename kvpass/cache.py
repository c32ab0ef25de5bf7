# SPDX-License-Identifier: Apache-2.0
"""TieredCache: a KV cache whose blocks live in a hot and a cold tier.

``update`` traces to one op without a graph break. In a graph compiled by ``kvpass.backend`` that
op and the attention behind it become ``kvpass::append`` and ``kvpass::attend``; anywhere else it
still gives the right keys and values, as dense copies.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import kvpass.latent_ops  # defines ops that graphs call
import kvpass.ops  # likewise
import kvpass.source_ops  # noqa: F401  # likewise
from kvpass.config import Config, option_names, refuse_options_of_backend
from kvpass.errors import (
    CacheStateError,
    CapacityError,
    ConfigError,
    ShapeError,
    UnsupportedError,
)
from kvpass.runtime import directory
from kvpass.runtime.batch import Batch
from kvpass.runtime.manager import Manager
from kvpass.runtime.manual import ManualStep
from kvpass.runtime.metrics import Snapshot
from kvpass.runtime.shapes import no_layer
from kvpass.runtime.tiers import check_cold, check_hot
from kvpass.state import TieredState
from kvpass.tuning import family_of, retention, tile_of

KNOWN_LAYER_TYPES = ("full_attention", "sliding_attention", "chunked_attention")


class TieredCache:
    """KV cache in two tiers for a decoder of ``config``'s shape.

    With a transformers config the object is also a transformers ``Cache`` and goes into
    ``generate(past_key_values=...)``. A cache serves one thread at a time.

    Args:
        config: model config (transformers, or any object with ``num_hidden_layers``).
        max_tokens: tokens a sequence can hold at most.
        hot: size of the hot arena, ``"64MiB"``, bytes, or ``"auto"``.
        cold: size of the cold tier, likewise.
        manager: whose arenas the cache shares with others; None: its own. The tiers are then as
            the manager was configured, and only options of fairness are given here.
        **options: any other key of :class:`kvpass.Config`, e.g. ``resident_tokens=256`` or
            ``qos=0.9``.

    Raises:
        ConfigError: an option is unknown or out of range, ``max_tokens`` is not a positive integer,
            ``hot`` is more than any device here has, ``cold`` more than the host has left, or an
            option is one of the given manager's.
        UnsupportedError: the model has layers that keep other state than keys and values.
    """

    def __new__(cls, config: Any = None, *args: Any, **kwargs: Any) -> TieredCache:
        """A transformers ``Cache`` too, where the config is of transformers."""
        if cls is TieredCache and _is_transformers(config):
            from kvpass.hf import TransformersTieredCache

            cls = TransformersTieredCache
        return object.__new__(cls)

    def __init__(
        self,
        config: Any,
        max_tokens: int,
        hot: int | str | None = None,
        cold: int | str | None = None,
        *,
        manager: Manager | None = None,
        **options: Any,
    ) -> None:
        given = {"hot": hot, "cold": cold}
        options.update({key: value for key, value in given.items() if value is not None})
        if isinstance(max_tokens, bool) or not isinstance(max_tokens, int) or max_tokens < 1:
            raise ConfigError(
                f"max_tokens={max_tokens!r}: write the number of tokens of the longest sequence, "
                "prompt and new ones, as an integer from 1 on"
            )
        family = family_of(config)
        if hasattr(config, "get_text_config"):
            config = config.get_text_config(decoder=True)
        layers = getattr(config, "num_hidden_layers", None)
        if not isinstance(layers, int) or layers < 1:
            raise UnsupportedError(
                f"{type(config).__name__} has no num_hidden_layers: pass the model's config"
            )
        for kind in getattr(config, "layer_types", None) or ():
            if kind not in KNOWN_LAYER_TYPES:
                raise UnsupportedError(
                    f"layer type {kind!r} keeps other state than keys and values: kvpass cannot "
                    "hold it; use the model's own cache"
                )
        refuse_options_of_backend(options, "cache")
        self.kvpass_config = _configuration(options, manager)
        check_hot(self.kvpass_config.memory.hot)
        if manager is None:  # one that is there has a part of its cold tier already
            memory = self.kvpass_config.memory
            check_cold(memory.cold, directory=memory.cold_dir)
        self.block_size: int = self.kvpass_config.memory.block_size
        self.tile = tile_of(self.kvpass_config, config, family)
        retention(self.kvpass_config, family, layers)  # a bad one is refused here
        self.max_tokens = max_tokens
        self._lengths = [0] * layers
        self._state = TieredState(self.kvpass_config, layers, max_tokens, family, manager)
        self._handle = directory.enroll(self._state)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append keys and values; return all of them.

        Args:
            key_states: ``[B, Hkv, n, Dk]``.
            value_states: ``[B, Hkv, n, Dv]``.
            layer_idx: index of the layer.
            *args: ignored, for the protocol of transformers.
            **kwargs: likewise.

        Returns:
            ``[B, Hkv, stored + n, Dk]`` and ``[B, Hkv, stored + n, Dv]``.

        Raises:
            CapacityError: more than ``max_tokens`` tokens.
            ShapeError: keys and values do not belong together or to this cache, or there is no
                such layer.
            UnsupportedError: they are on the device ``meta``.
        """
        if not 0 <= layer_idx < len(self._lengths):
            raise no_layer(layer_idx, len(self._lengths))
        if key_states.device.type == "meta" or value_states.device.type == "meta":
            raise UnsupportedError(
                "keys and values on the device 'meta' have no numbers to keep: load the model to a "
                "real device, or call it with use_cache=False"
            )
        kind = key_states.device.type
        if key_states.dtype != value_states.dtype and torch.is_autocast_enabled(kind):
            # Rotary positions leave keys in float32; every product under autocast casts them.
            dtype = torch.get_autocast_dtype(kind)
            key_states, value_states = key_states.to(dtype), value_states.to(dtype)
        past = self._lengths[layer_idx]
        keys, values = torch.ops.kvpass.cache_update(
            key_states, value_states, self._handle, layer_idx, past, self.block_size, self.tile
        )
        self._lengths[layer_idx] = past + key_states.shape[2]
        return keys, values

    def read(self, layer_idx: int) -> tuple[Tensor, Tensor]:
        """All keys and values of a layer, without adding any.

        Args:
            layer_idx: index of the layer.

        Returns:
            ``[B, Hkv, stored, Dk]`` and ``[B, Hkv, stored, Dv]``.

        Raises:
            CacheStateError: the layer holds nothing yet.
        """
        batch = self._state.batch
        geometry = None if batch is None else batch.geometries[layer_idx]
        if batch is None or geometry is None:
            raise CacheStateError(
                f"layer {layer_idx} holds no keys and values yet: update it first"
            )
        keys, values = torch.ops.kvpass.cache_read(
            self._handle, layer_idx, self._lengths[layer_idx], batch.size, geometry.kv_heads,
            geometry.head_dim_k, geometry.head_dim_v, geometry.dtype, batch.device, self.block_size,
            self.tile,
        )  # fmt: skip
        return keys, values

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens stored."""
        return self._lengths[layer_idx]

    @property
    def shortest(self) -> int:
        """Tokens in the layer with the fewest, of those that hold any.

        Layers that share keys and values with others hold none.
        """
        return min((stored for stored in self._lengths if stored), default=0)

    def __len__(self) -> int:
        """Layers."""
        return len(self._lengths)

    def reset(self) -> None:
        """Forget all sequences."""
        self._state.replace(None)
        self._set_lengths(0)
        self._state.history = None

    def truncate(self, length: int) -> None:
        """Keep the first ``length`` tokens of every sequence; more than stored keeps all.

        Raises:
            CapacityError: ``length`` is not an integer, or negative.
        """
        if isinstance(length, bool) or not isinstance(length, int) or length < 0:
            raise CapacityError(f"truncate({length!r}): give the number of tokens to keep, >= 0")
        state = self._state
        if state.batch is not None and state.manager is not None:
            length = min(length, self.shortest)
            if state.history is not None and length < self.shortest:
                state.history = state.history.first(length)
            state.manager.crop(state.batch, length)
            self._lengths[:] = [min(length, stored) for stored in self._lengths]

    def resize(self, hot: int | str | None = None, cold: int | str | None = None) -> None:
        """Let the tiers hold more or less from now on; what is stored stays.

        Args:
            hot: size of the hot arena, as ``"64MiB"`` or bytes; None leaves it.
            cold: size of the cold arena, likewise.

        Raises:
            ConfigError: not a size, ``hot`` is more than any device here has, or ``cold`` more than
                the host has left.
            OutOfMemoryError: the other tier has no room for what has to leave this one.
        """
        config = self._state.config.merge(hot=hot, cold=cold)
        check_hot(config.memory.hot)
        if self._state.manager is not None:
            self._state.manager.resize(hot, cold)
        elif cold is not None:
            check_cold(config.memory.cold, directory=config.memory.cold_dir)
        self._state.config = self.kvpass_config = config

    def select(self, sequences: list[int]) -> None:
        """Keep these sequences, in this order; repeated ones share full blocks.

        Raises:
            ShapeError: no indices, or of sequences that are not there.
        """
        try:
            sequences = [operator.index(sequence) for sequence in sequences]
        except TypeError:
            raise ShapeError(
                f"select({sequences!r}): give indices of sequences, such as [0, 0, 2]"
            ) from None
        state = self._state
        if state.batch is not None and state.manager is not None:
            state.replace(state.manager.fork(state.batch, sequences))
            if state.history is not None:
                state.history = state.history.select(sequences)

    def begin_step(self, tokens: int = 1) -> ManualStep:
        """Reserve room for ``tokens`` more tokens a sequence, for a CUDA graph captured by hand.

        Use it in a ``with``: the model is called, captured or replayed inside, once a step, and
        when the step ends its tokens count. A replay anywhere else writes nothing, and the next
        ``begin_step`` or call that notices raises, as every later one does.

        Args:
            tokens: that each sequence gets, as many as the graph was captured with.

        Raises:
            CacheStateError: the last step has not ended or went wrong, or no prompt was run yet.
            CapacityError: ``tokens`` is no positive integer, or passes ``max_tokens``.
            OutOfMemoryError: no tier has room; nothing was reserved.
        """
        if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 1:
            raise CapacityError(f"begin_step({tokens!r}): give the number of new tokens, 1 or more")
        batch, manager = self._state.batch, self._state.manager
        if batch is None or manager is None or not any(batch.geometries):
            raise CacheStateError(
                "begin_step before anything was stored: run the prompt through the model first"
            )
        if batch.manual is not None and batch.manual() is not None:
            raise CacheStateError(
                "the last step has not ended: write `with cache.begin_step(n):`, or .end() it"
            )
        longest = max(batch.lengths)
        if longest + tokens > self.max_tokens:
            raise CapacityError(
                f"{longest} tokens stored + {tokens} new > max_tokens={self.max_tokens}: make the "
                "cache with a larger max_tokens"
            )

        lengths, state = self._lengths, weakref.ref(self._state)

        def ended() -> None:
            live = state()
            if live is not None and live.batch is batch:
                lengths[:] = batch.lengths

        return ManualStep(manager, batch, tokens, ended)

    def check_steps(self) -> None:
        """Wait for the device, and raise what went wrong in steps that were begun by hand.

        Raises:
            CacheStateError: a graph was replayed outside a step, or was not in one.
        """
        batch = self._state.batch
        if batch is not None and batch.guard is not None:
            batch.guard.check(wait=True)

    def snapshot(self) -> Snapshot | None:
        """Where the bytes of this cache are; None before the first use."""
        manager = self._state.manager
        return manager.snapshot() if manager is not None else None

    @property
    def history(self) -> Any:
        """What :func:`kvpass.generate` knows of the tokens in it, or None."""
        return self._state.history

    @history.setter
    def history(self, history: Any) -> None:
        self._state.history = history

    @property
    def manager(self) -> Manager | None:
        """The manager of this cache; None before the first use."""
        return self._state.manager

    @property
    def batch(self) -> Batch | None:
        """The batch of this cache; None before the first use."""
        return self._state.batch

    def observe(self, observer: Callable[[Batch, int], None] | None) -> None:
        """Call ``observer`` with the batch and the tokens appended after each step; None: stop."""
        self._state.observer = observer
        if self._state.batch is not None:
            self._state.batch.observer = observer

    def _set_lengths(self, length: int) -> None:
        for layer in range(len(self._lengths)):
            self._lengths[layer] = length

    def __deepcopy__(self, memo: dict[int, Any]) -> TieredCache:
        """A cache of its own that shares full blocks until either writes."""
        copy = object.__new__(type(self))
        copy.__dict__.update(self.__dict__)
        copy._lengths = list(self._lengths)
        state = self._state
        copy._state = TieredState(
            self.kvpass_config, len(self._lengths), self.max_tokens, state.family, state.manager
        )
        copy._state.history = state.history
        copy._handle = directory.enroll(copy._state)
        if state.batch is not None and state.manager is not None:
            copy._state.replace(state.manager.fork(state.batch, range(state.batch.size)))
        return copy

    def __copy__(self) -> TieredCache:
        """Another name for the same sequences, as a shallow copy is."""
        copy = object.__new__(type(self))
        copy.__dict__.update(self.__dict__)
        return copy

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refused: blocks belong to the process.

        Raises:
            UnsupportedError: always.
        """
        raise UnsupportedError(
            f"a {type(self).__name__} cannot be pickled or saved, its blocks belong to this "
            "process: save the token ids and run them again, or take copy.deepcopy for a cache of "
            "its own in this process"
        )

    def __repr__(self) -> str:
        """Length, capacity and hot size."""
        return (
            f"{type(self).__name__}(tokens={self._lengths[0]}, max_tokens={self.max_tokens}, "
            f"layers={len(self._lengths)}, hot={self.kvpass_config.memory.hot!r})"
        )


def _configuration(options: dict[str, Any], manager: Manager | None) -> Config:
    """The configuration of a cache.

    Raises:
        ConfigError: an option is unknown or out of range, or not the cache's to give.
    """
    if manager is None:
        return Config.load(**options)
    if not isinstance(manager, Manager):
        raise ConfigError(f"manager={manager!r}: make one with kvpass.Manager(hot=...)")
    for name in sorted(option_names(options)):
        if not name.startswith("fairness."):
            raise ConfigError(
                f"{name} beside manager=: all caches of a manager share its tiers; give it to "
                "kvpass.Manager(...)"
            )
    return manager.config.merge(**options)


def _is_transformers(config: Any) -> bool:
    return any(base.__module__.startswith("transformers.") for base in type(config).__mro__)
