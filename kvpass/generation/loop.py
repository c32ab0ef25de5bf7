# SPDX-License-Identifier: Apache-2.0
"""The loop of generation: the host runs ahead of the device and reads tokens a little later.

Nothing between two steps waits for the host: tokens go from one step to the next on the device, a
copy of each goes to pinned memory, and the host looks at it when a later step is launched already.
So the end of a text is noticed a step or two late; what was computed behind it is cut off again.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from kvpass.cache import TieredCache
from kvpass.errors import (
    CacheStateError,
    CapacityError,
    ConfigError,
    ShapeError,
    UnsupportedError,
)
from kvpass.generation import history
from kvpass.generation.calls import Call, vocabulary_of
from kvpass.generation.prompts import Prompt, read_mask, read_prompt
from kvpass.generation.sampling import Sampler, Sampling
from kvpass.generation.text import TextOf, decoder_of, special_ids

NO_TOKEN = -1
"""In place of a token that could not be chosen."""

AHEAD = 2
"""Steps that are launched before the host reads a token."""

FIRST_COLUMNS = 1024
"""Of a mask for new tokens, which doubles: nobody may live to need all of ``max_new_tokens``."""

Reason = Literal["eos", "stop", "length"]


@dataclass
class Generation:
    """What was generated, by sequence.

    Attributes:
        tokens: new tokens; one that ended the text is the last.
        text: of them, without special tokens and from a stop string on; empty without a tokenizer.
        reasons: why it ended: a token of ``eos_token_id``, a string of ``stop``, or
            ``max_new_tokens``.
        cache: keys and values of the prompt and all tokens but the last one, of the longest
            sequence; pass it on to go on.
    """

    tokens: list[list[int]]
    text: list[str]
    reasons: list[Reason]
    cache: Any = field(repr=False)


def generate(
    model: Any,
    prompt: Prompt,
    cache: Any = None,
    *,
    max_new_tokens: int = 128,
    chunk: int | None = None,
    attention_mask: Tensor | None = None,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    repetition_penalty: float = 1.0,
    stop: str | Sequence[str] = (),
    eos_token_id: int | Sequence[int] | None | Literal["auto"] = "auto",
    tokenizer: Any = None,
    generator: torch.Generator | None = None,
    on_tokens: Callable[[int, list[int]], None] | None = None,
    on_text: Callable[[int, str], None] | None = None,
) -> Generation:
    """Generate with a model of transformers, or of one's own, over a KV cache in tiers.

    Args:
        model: its ``forward`` takes ``past_key_values`` or ``cache``; compiled with
            ``kvpass.backend`` unless it is compiled.
        prompt: text, token ids, or several of either (padded on the left here); a tensor or array
            ``[B, n]``; or what a tokenizer returns, a mapping with ``input_ids``.
        cache: what the prompt continues; None: a new :class:`kvpass.TieredCache`, with the options
            of the environment.
        max_new_tokens: new tokens at most.
        chunk: tokens of the prompt that are processed at once, which bounds the memory of
            activations; None: all.
        attention_mask: ``[B, stored + n]``, 0 for padding on the left, of a prompt that is a
            tensor. Of what a :class:`kvpass.TieredCache` holds it is remembered.
        temperature, top_k, top_p, repetition_penalty: see
            :class:`kvpass.generation.sampling.Sampling`; greedy by default. A penalty counts what
            this and earlier calls put into the cache.
        stop: strings that end a text, in front of which it is cut, or special tokens; needs a
            tokenizer.
        eos_token_id: tokens that end a text; ``"auto"``: those of the model or the tokenizer.
        tokenizer: with ``decode(ids)``, and ``encode(text)`` for prompts of text.
        generator: source of chance; None: torch's own of the device.
        on_tokens: called with a sequence's index and its new tokens, when they are known.
        on_text: called with a sequence's index and new text, likewise; needs a tokenizer.

    Raises:
        CacheStateError: somebody else changes the cache meanwhile.
        CapacityError: the cache is too small for the prompt and ``max_new_tokens``.
        ConfigError: an argument is out of range, or a tokenizer is missing.
        ShapeError: the prompt is empty, no token ids of the model, or the mask does not belong to
            it.
        UnsupportedError: the model cannot be called, or not with padding, or its logits are NaN.
    """
    sampling = Sampling(temperature, top_k, top_p, repetition_penalty)
    _check_count("max_new_tokens", max_new_tokens)
    if chunk is not None:
        _check_count("chunk", chunk)
    stops = [stop] if isinstance(stop, str) else list(stop)
    if not all(isinstance(each, str) and each for each in stops):
        raise ConfigError(f"stop = {stop!r}: give strings that are not empty")
    if tokenizer is None and (stops or on_text is not None):
        raise ConfigError("stop and on_text need tokenizer=")
    decode = None if tokenizer is None else decoder_of(tokenizer)
    device = _device_of(model)
    ends = _ends(model, tokenizer, eos_token_id)
    ids, shown = read_prompt(prompt, tokenizer, device, vocabulary_of(model))
    if cache is None:
        cache = TieredCache(_config_of(model), ids.shape[1] + max_new_tokens)
    call = Call(model, cache)
    past = cache.get_seq_length()
    old, old_shown = history.stored(cache, past, len(ids), masked=attention_mask is not None)
    shown = _shown(ids, shown, attention_mask, past, old_shown)
    _check_room(cache, past + ids.shape[1] + max_new_tokens - 1)
    whole = ids if old is None else torch.cat([old, ids], 1)
    sampler = Sampler(
        sampling, whole, None if shown is None else shown[:, -whole.shape[1] :], generator
    )
    texts = [TextOf(decode, stops) for _ in ids] if decode is not None else []
    special = special_ids(tokenizer, stops)
    ahead = AHEAD if not (ends or stops) or _can_be_cut(cache) else 0
    reader = _Reader(len(ids), ends, special, max_new_tokens, ahead, texts, on_tokens, on_text)
    run = _Run(call, cache, sampler, reader, ends | special)
    with torch.no_grad():
        run.all(ids, shown, past, chunk or ids.shape[1], max_new_tokens)
    reader.finish()
    kept = past + ids.shape[1] + max(map(len, reader.tokens)) - 1
    if cache.get_seq_length() > kept:
        (cache.truncate if isinstance(cache, TieredCache) else cache.crop)(kept)
    known = None if past and old is None else torch.cat([whole, *run.tokens], 1)[:, : kept + 1]
    history.remember(cache, history.History(len(ids), known, shown))
    return Generation(reader.tokens, [text.text for text in texts], reader.reasons(), cache)


class _Run:
    """The steps of one call.

    Attributes:
        tokens: ``[B, 1]`` of each step that was launched.
    """

    def __init__(
        self, call: Call, cache: Any, sampler: Sampler, reader: _Reader, ends: frozenset[int]
    ) -> None:
        self._call = call
        self._cache = cache
        self._sampler = sampler
        self._reader = reader
        self._ends = ends
        self._mask: Tensor | None = None
        self.tokens: list[Tensor] = []

    def all(self, ids: Tensor, shown: Tensor | None, past: int, chunk: int, count: int) -> None:
        """Launch steps until the reader has seen the end of all sequences."""
        size, n = ids.shape
        self._mask = None if shown is None else shown.to(torch.int64)
        if self._mask is None:
            positions = torch.arange(past, past + n, device=ids.device).expand(size, n)
        else:
            positions = (self._mask.cumsum(1) - 1).clamp_min(0)[:, past:]
        stopping = torch.tensor(sorted(self._ends), device=ids.device)
        filler = stopping[:1] if len(stopping) else None
        ended = torch.zeros(size, 1, dtype=torch.bool, device=ids.device)
        last = (n - 1) // chunk * chunk
        for first in range(0, last, chunk):
            part = slice(first, first + chunk)
            self._step(ids[:, part], positions[:, part], past + first)
        tokens, positions = ids[:, last:], positions[:, last:]
        stored = past + last
        for _ in range(count):
            logits = self._step(tokens, positions, stored)
            stored += tokens.shape[1]
            tokens = self._sampler(logits)
            if filler is not None:
                tokens = torch.where(ended, filler, tokens)
            valid = self._sampler.valid | ended
            if filler is not None:
                ended = ended | torch.isin(tokens, stopping)
            self.tokens.append(tokens)
            positions = positions[:, -1:] + 1
            self._reader.send(torch.where(valid, tokens, NO_TOKEN))
            if self._reader.done():
                return

    def _step(self, tokens: Tensor, positions: Tensor, stored: int) -> Tensor:
        if isinstance(self._cache, TieredCache) and self._cache.get_seq_length() != stored:
            raise CacheStateError(
                f"this cache holds {self._cache.get_seq_length()} tokens and not {stored}: "
                "something else changed it while kvpass.generate ran; give it a cache of its own"
            )
        return self._call(tokens, positions, self._first(stored + tokens.shape[1]))

    def _first(self, columns: int) -> Tensor | None:
        """The mask of the first tokens; new ones are no padding."""
        mask = self._mask
        if mask is None:
            return None
        if mask.shape[1] < columns:
            more = max(FIRST_COLUMNS, mask.shape[1], columns - mask.shape[1])
            mask = torch.cat([mask, mask.new_ones(len(mask), more)], 1)
            self._mask = mask
        return mask[:, :columns]


class _Reader:
    """Tokens on their way to the host, and what becomes of them there."""

    def __init__(
        self,
        size: int,
        ends: frozenset[int],
        stops: frozenset[int],
        count: int,
        ahead: int,
        texts: list[TextOf],
        on_tokens: Callable[[int, list[int]], None] | None,
        on_text: Callable[[int, str], None] | None,
    ) -> None:
        self.tokens: list[list[int]] = [[] for _ in range(size)]
        self._ended: list[Reason | None] = [None] * size
        self._ends = ends
        self._stops = stops
        self._count = count
        self._ahead = ahead
        self._texts = texts
        self._on_tokens = on_tokens
        self._on_text = on_text
        self._coming: deque[tuple[Tensor, Any]] = deque()

    def send(self, tokens: Tensor) -> None:
        """Tokens ``[B, 1]`` of a step that is launched; reads those of an earlier one."""
        if tokens.device.type != "cuda":
            self._read(tokens)
            return
        staging = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
        staging.copy_(tokens, non_blocking=True)
        self._coming.append((staging, torch.cuda.current_stream(tokens.device).record_event()))
        while len(self._coming) > self._ahead:
            self._next()

    def done(self) -> bool:
        """Whether all sequences have ended, as far as is known."""
        return None not in self._ended

    def finish(self) -> None:
        """Read what is still coming."""
        while self._coming and not self.done():
            self._next()
        self._coming.clear()
        for index, text in enumerate(self._texts):
            if self._ended[index] != "stop":
                self._tell(index, text.end())
                if text.stopped:
                    self._ended[index] = "stop"

    def reasons(self) -> list[Reason]:
        """Why each sequence ended."""
        return [reason or "length" for reason in self._ended]

    def _next(self) -> None:
        staging, event = self._coming.popleft()
        event.synchronize()
        self._read(staging)

    def _read(self, tokens: Tensor) -> None:
        for index, token in enumerate(tokens[:, 0].tolist()):
            if self._ended[index] is not None:
                continue
            if token == NO_TOKEN:
                raise UnsupportedError(
                    f"the model's logits for new token {len(self.tokens[index])} of sequence "
                    f"{index} are NaN or infinite: no token can be chosen; check its weights and "
                    "dtype"
                )
            self.tokens[index].append(token)
            if self._on_tokens is not None:
                self._on_tokens(index, [token])
            if token in self._ends or token in self._stops:
                self._ended[index] = "stop" if token in self._stops else "eos"
                continue
            if self._texts:
                self._tell(index, self._texts[index].add(token))
                if self._texts[index].stopped:
                    self._ended[index] = "stop"
                    continue
            if len(self.tokens[index]) == self._count:
                self._ended[index] = "length"

    def _tell(self, index: int, piece: str) -> None:
        if self._on_text is not None and piece:
            self._on_text(index, piece)


# ------------------------------------------------------------------ arguments


def _check_count(name: str, number: object) -> None:
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise ConfigError(f"{name} = {number!r}: give an integer from 1")


def _plain(model: Any) -> Any:
    return getattr(model, "_orig_mod", model)


def _device_of(model: Any) -> torch.device:
    parameters = getattr(_plain(model), "parameters", None)
    first = next(parameters(), None) if callable(parameters) else None
    return torch.device("cpu") if first is None else first.device


def _config_of(model: Any) -> Any:
    config = getattr(_plain(model), "config", None)
    if config is None:
        raise ConfigError(
            f"{type(_plain(model)).__name__} has no config: pass a cache, "
            "kvpass.TieredCache(config, max_tokens=...)"
        )
    return config


def _ends(model: Any, tokenizer: Any, given: Any) -> frozenset[int]:
    """Tokens that end a text.

    Raises:
        ConfigError: not token ids.
    """
    if isinstance(given, str) and given == "auto":
        settings = getattr(_plain(model), "generation_config", None)
        given = getattr(settings, "eos_token_id", None)
        if given is None:
            given = getattr(tokenizer, "eos_token_id", None)
    try:
        ids = [] if given is None else _several(given)
        if any(isinstance(each, bool) for each in ids):
            raise TypeError
        found = frozenset(map(operator.index, ids))
    except TypeError:
        raise ConfigError(f"eos_token_id = {given!r}: give token ids") from None
    if found and not 0 <= min(found) <= max(found) < 2**63:
        raise ConfigError(f"eos_token_id = {given!r}: give token ids")
    return found


def _several(given: Any) -> list[Any]:
    try:
        operator.index(given)  # an array of several has one too, and raises
    except TypeError:
        return list(given)
    return [given]


def _shown(
    ids: Tensor, shown: Tensor | None, mask: Any, past: int, before: Tensor | None
) -> Tensor | None:
    """Where there are tokens, bool ``[B, stored + n]``, and no padding; None: there is none.

    Raises:
        ShapeError: the mask does not belong to the prompt, or hides what it may not.
    """
    if mask is None:
        if shown is None and before is None:
            return None
        if before is None:
            before = torch.ones(len(ids), past, dtype=torch.bool, device=ids.device)
        found = torch.cat([before, torch.ones_like(ids, dtype=torch.bool)], 1)
        if shown is not None:
            found[:, past:] = shown
    else:
        found = read_mask(mask, ids.device)
    want = (ids.shape[0], past + ids.shape[1])
    if tuple(found.shape) != want:
        raise ShapeError(
            f"attention_mask {tuple(found.shape)}: give {want}, for the {past} tokens stored and "
            f"the {ids.shape[1]} of the prompt"
        )
    if not bool(found[:, -1].all()):
        raise ShapeError("attention_mask hides the last token of a prompt: pad on the left")
    return None if bool(found.all()) else found


def _can_be_cut(cache: Any) -> bool:
    """Whether tokens behind the end of a text can be taken off a cache again."""
    if isinstance(cache, TieredCache):
        return True
    layers = getattr(cache, "layers", ())
    sliding = getattr(cache, "is_sliding", ())
    return (
        callable(getattr(cache, "crop", None))
        and all(hasattr(layer, "crop") for layer in layers)
        and not any(sliding if isinstance(sliding, Sequence) else (sliding,))
    )


def _check_room(cache: Any, tokens: int) -> None:
    most = getattr(cache, "max_tokens", None)
    if most is not None and tokens > most:
        raise CapacityError(
            f"prompt and new tokens are {tokens}, the cache is for max_tokens={most}: make it "
            "larger, or lower max_new_tokens"
        )
