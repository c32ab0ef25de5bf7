# SPDX-License-Identifier: Apache-2.0
"""The loop of generation: the host runs ahead of the device and reads tokens a little later.

Nothing between two steps waits for the host: tokens go from one step to the next on the device, a
copy of each goes to pinned memory, and the host looks at it when a later step is launched already.
So the end of a text is noticed a step or two late; what was computed behind it is cut off again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from kvpass.cache import TieredCache
from kvpass.errors import CacheStateError, ConfigError, UnsupportedError
from kvpass.generation import arguments, history
from kvpass.generation.calls import Call, vocabulary_of
from kvpass.generation.prompts import Prompt, read_prompt
from kvpass.generation.reader import NO_TOKEN, Reader, Reason
from kvpass.generation.sampling import Sampler, Sampling
from kvpass.generation.text import TextOf, decoder_of, special_ids
from kvpass.warn import warn_user

AHEAD = 2
"""Steps that are launched before the host reads a token."""

FIRST_COLUMNS = 1024
"""Of a mask for new tokens, which doubles: nobody may live to need all of ``max_new_tokens``."""


@dataclass
class Generation:
    """What was generated, by sequence.

    Attributes:
        tokens: new tokens; one that ended the text is the last.
        text: of them, without special tokens and from a stop string on; empty without a tokenizer.
        reasons: why it ended: a token of ``eos_token_id``, a string of ``stop``, or
            ``max_new_tokens``.
        cache: keys and values of the prompt and all tokens but the last one, of the longest
            sequence; pass it on to go on, the next call begins with that token.
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
        prompt: what comes next: text, token ids, or several of either (padded on the left here); a
            tensor or array ``[B, n]``; or what a tokenizer returns, a mapping with ``input_ids``.
            None: nothing, the texts of a returned cache go on.
        cache: what the prompt continues; None: a new :class:`kvpass.TieredCache`, with the options
            of the environment. Of one that was returned, the last token is not stored yet: it is
            put in front of the prompt (of a cache that is neither of kvpass nor of transformers,
            nothing is remembered).
        max_new_tokens: new tokens at most.
        chunk: tokens of the prompt that are processed at once, which bounds the memory of
            activations; None: all.
        attention_mask: ``[B, tokens so far + n]``, 0 for padding on the left. Of a returned cache
            it is remembered.
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
    arguments.check_count("max_new_tokens", max_new_tokens)
    if chunk is not None:
        arguments.check_count("chunk", chunk)
    stops = arguments.stops(stop)
    for name, call_back in (("on_tokens", on_tokens), ("on_text", on_text)):
        if call_back is not None and not callable(call_back):
            raise ConfigError(f"{name} = {call_back!r}: give a function of an index and a piece")
    if generator is not None and not isinstance(generator, torch.Generator):
        raise ConfigError(f"generator = {generator!r}: give torch.Generator(device)")
    if sampling.greedy and (top_k or 1, top_p, generator) != (1, None, None):
        warn_user(
            "top_k, top_p and generator have no part without a temperature: kvpass.generate takes "
            "the likeliest token"
        )
    if tokenizer is None and (stops or on_text is not None):
        raise ConfigError("stop and on_text need tokenizer=")
    decode = None if tokenizer is None else decoder_of(tokenizer)
    device = arguments.device_of(model)
    ends = arguments.ends(model, tokenizer, eos_token_id)
    known = None if cache is None else history.recall(cache)
    past = 0 if cache is None else _length(cache)
    waiting = history.waiting(known, past)
    if prompt is None and waiting is not None:
        ids, shown = waiting, None
    else:
        ids, shown = read_prompt(prompt, tokenizer, device, vocabulary_of(model))
        if waiting is not None and len(waiting) == len(ids):
            ids = torch.cat([waiting, ids], 1)
            shown = None if shown is None else arguments.behind(waiting, shown)
    if cache is None:
        config = arguments.config_of(model)
        cache = TieredCache(config, arguments.room(config, ids.shape[1] + max_new_tokens))
    call = Call(model, cache)
    if attention_mask is None:
        history.refuse_padding_unknown(cache, past)
    old, old_shown = history.stored(known, past, len(ids), masked=attention_mask is not None)
    shown = arguments.shown(ids, shown, attention_mask, past, old_shown)
    arguments.check_room(cache, past + ids.shape[1] + max_new_tokens - 1)
    whole = ids if old is None else torch.cat([old, ids], 1)
    sampler = Sampler(
        sampling, whole, None if shown is None else shown[:, -whole.shape[1] :], generator
    )
    texts = [TextOf(decode, stops) for _ in ids] if decode is not None else []
    special = special_ids(tokenizer, stops)
    ahead = AHEAD if not (ends or stops) or arguments.can_be_cut(cache) else 0
    reader = Reader(len(ids), ends, special, max_new_tokens, ahead, texts, on_tokens, on_text)
    run = _Run(call, cache, sampler, reader, ends | special)
    # In case of an interrupt: what is stored then, and in which order, nobody may know.
    history.remember(cache, history.History(len(ids), 0, None, None, shown))
    with torch.no_grad():
        run.all(ids, shown, past, chunk or ids.shape[1], max_new_tokens)
    reader.finish()
    kept = past + ids.shape[1] + max(map(len, reader.tokens)) - 1
    if cache.get_seq_length() > kept:
        (cache.truncate if isinstance(cache, TieredCache) else cache.crop)(kept)
    spoken = None if past and old is None else torch.cat([whole, *run.tokens], 1)[:, : kept + 1]
    last = run.tokens[kept - past - ids.shape[1]]
    history.remember(cache, history.History(len(ids), kept + 1, last, spoken, shown))
    return Generation(reader.tokens, [text.text for text in texts], reader.reasons(), cache)


def _length(cache: Any) -> int:
    """Tokens that a cache holds.

    Raises:
        UnsupportedError: it is none.
    """
    length = getattr(cache, "get_seq_length", None)
    if not callable(length):
        raise UnsupportedError(
            f"cache = {cache!r}: give a kvpass.TieredCache, a cache of transformers, or an object "
            "with update(k, v, layer) and get_seq_length()"
        )
    return int(length())


class _Run:
    """The steps of one call.

    Attributes:
        tokens: ``[B, 1]`` of each step that was launched.
    """

    def __init__(
        self, call: Call, cache: Any, sampler: Sampler, reader: Reader, ends: frozenset[int]
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
