# SPDX-License-Identifier: Apache-2.0
"""The loop of generation: the host runs ahead of the device and reads tokens a little later.

Nothing between two steps waits for the host: tokens go from one step to the next on the device, a
copy of each goes to pinned memory, and the host looks at it when a later step is launched already.
So the end of a text is noticed a step or two late; what was computed behind it is cut off again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from kvpass.cache import TieredCache
from kvpass.errors import CapacityError, ConfigError, ShapeError
from kvpass.generation.calls import Call
from kvpass.generation.sampling import Sampler, Sampling
from kvpass.generation.text import TextOf, decoder_of

AHEAD = 2
"""Steps that are launched before the host reads a token."""

Prompt = str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]] | Tensor
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
        prompt: text, token ids, or several of either (padded on the left here); a tensor
            ``[B, n]``.
        cache: what the prompt continues; None: a new :class:`kvpass.TieredCache`, with the options
            of the environment.
        max_new_tokens: new tokens at most.
        chunk: tokens of the prompt that are processed at once, which bounds the memory of
            activations; None: all.
        attention_mask: ``[B, stored + n]``, 0 for padding on the left, of a prompt that is a
            tensor.
        temperature, top_k, top_p, repetition_penalty: see
            :class:`kvpass.generation.sampling.Sampling`; greedy by default.
        stop: strings that end a text, in front of which it is cut; needs a tokenizer.
        eos_token_id: tokens that end a text; ``"auto"``: those of the model or the tokenizer.
        tokenizer: with ``decode(ids)``, and ``encode(text)`` for prompts of text.
        generator: source of chance; None: torch's own of the device.
        on_tokens: called with a sequence's index and its new tokens, when they are known.
        on_text: called with a sequence's index and new text, likewise; needs a tokenizer.

    Raises:
        CapacityError: the cache is too small for the prompt and ``max_new_tokens``.
        ConfigError: an argument is out of range, or a tokenizer is missing.
        ShapeError: the prompt is empty, or the mask does not belong to it.
        UnsupportedError: the model cannot be called, or not with padding.
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
    ids, shown = _ids_of(prompt, tokenizer, device)
    if cache is None:
        cache = TieredCache(_config_of(model), ids.shape[1] + max_new_tokens)
    past = cache.get_seq_length()
    shown = _shown(ids, shown, attention_mask, past)
    _check_room(cache, past + ids.shape[1] + max_new_tokens - 1)
    call = Call(model, cache)
    texts = [TextOf(decode, stops) for _ in ids] if decode is not None else []
    reader = _Reader(len(ids), ends, max_new_tokens, texts, on_tokens, on_text)
    with torch.no_grad():
        _run(call, ids, shown, past, chunk or ids.shape[1], max_new_tokens, Sampler(
            sampling, ids, None if shown is None else shown[:, past:], generator
        ), reader, ends)  # fmt: skip
    reader.finish()
    kept = past + ids.shape[1] + max(map(len, reader.tokens)) - 1
    if cache.get_seq_length() > kept:
        (cache.truncate if isinstance(cache, TieredCache) else cache.crop)(kept)
    return Generation(reader.tokens, [text.text for text in texts], reader.reasons(), cache)


def _run(
    call: Call,
    ids: Tensor,
    shown: Tensor | None,
    past: int,
    chunk: int,
    count: int,
    sampler: Sampler,
    reader: _Reader,
    ends: frozenset[int],
) -> None:
    """Launch steps until the reader has seen the end of all sequences."""
    size, n = ids.shape
    mask = None
    if shown is None:
        positions = torch.arange(past, past + n, device=ids.device).expand(size, n)
    else:
        mask = torch.ones(size, past + n + count, dtype=torch.int64, device=ids.device)
        mask[:, : past + n] = shown
        positions = (mask[:, : past + n].cumsum(1) - 1).clamp_min(0)[:, past:]
    stopping = torch.tensor(sorted(ends), device=ids.device)
    filler = stopping[:1] if len(stopping) else None
    ended = torch.zeros(size, 1, dtype=torch.bool, device=ids.device)
    last = (n - 1) // chunk * chunk
    for first in range(0, last, chunk):
        part = slice(first, first + chunk)
        call(ids[:, part], positions[:, part], _first(mask, past + part.stop))
    tokens, positions = ids[:, last:], positions[:, last:]
    for i in range(count):
        logits = call(tokens, positions, _first(mask, past + n + i))
        tokens = sampler(logits)
        if filler is not None:
            tokens = torch.where(ended, filler, tokens)
            ended = ended | torch.isin(tokens, stopping)
        positions = positions[:, -1:] + 1
        reader.send(tokens)
        if reader.done():
            return


def _first(mask: Tensor | None, columns: int) -> Tensor | None:
    return None if mask is None else mask[:, :columns]


class _Reader:
    """Tokens on their way to the host, and what becomes of them there."""

    def __init__(
        self,
        size: int,
        ends: frozenset[int],
        count: int,
        texts: list[TextOf],
        on_tokens: Callable[[int, list[int]], None] | None,
        on_text: Callable[[int, str], None] | None,
    ) -> None:
        self.tokens: list[list[int]] = [[] for _ in range(size)]
        self._ended: list[Reason | None] = [None] * size
        self._ends = ends
        self._count = count
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
        while len(self._coming) > AHEAD:
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
            self.tokens[index].append(token)
            if self._on_tokens is not None:
                self._on_tokens(index, [token])
            if token in self._ends:
                self._ended[index] = "eos"
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
    if given == "auto":
        settings = getattr(_plain(model), "generation_config", None)
        given = getattr(settings, "eos_token_id", None)
        if given is None:
            given = getattr(tokenizer, "eos_token_id", None)
    ids = [given] if isinstance(given, int) else [] if given is None else list(given)
    if any(isinstance(each, bool) or not isinstance(each, int) or each < 0 for each in ids):
        raise ConfigError(f"eos_token_id = {given!r}: give token ids")
    return frozenset(ids)


def _ids_of(prompt: Prompt, tokenizer: Any, device: torch.device) -> tuple[Tensor, Tensor | None]:
    """Token ids ``[B, n]``, and where they are no padding; None: nowhere."""
    if isinstance(prompt, Tensor):
        ids = prompt[None] if prompt.dim() == 1 else prompt
        if ids.dim() != 2 or not ids.numel() or ids.is_floating_point():
            raise ShapeError(f"a prompt {tuple(prompt.shape)}, {prompt.dtype}: give ids [B, n]")
        return ids.to(device, torch.int64), None
    rows: list[Any] = [prompt] if isinstance(prompt, str) else list(prompt)
    if rows and all(isinstance(row, int) and not isinstance(row, bool) for row in rows):
        rows = [rows]
    if any(isinstance(row, str) for row in rows):
        if not callable(getattr(tokenizer, "encode", None)):
            raise ConfigError("a prompt of text needs tokenizer=, with encode(text)")
        rows = [tokenizer.encode(row) if isinstance(row, str) else row for row in rows]
    if not rows or not all(len(row) for row in rows):
        raise ShapeError("a prompt has no tokens: give some text")
    longest = max(map(len, rows))
    padded = [[row[0]] * (longest - len(row)) + list(row) for row in rows]
    ids = torch.tensor(padded, dtype=torch.int64, device=device)
    if all(len(row) == longest for row in rows):
        return ids, None
    lengths = torch.tensor([len(row) for row in rows], device=device)
    return ids, torch.arange(longest, device=device) >= longest - lengths[:, None]


def _shown(ids: Tensor, shown: Tensor | None, mask: Tensor | None, past: int) -> Tensor | None:
    """Where there are tokens, bool ``[B, stored + n]``, and no padding; None: there is none.

    Raises:
        ShapeError: the mask does not belong to the prompt, or hides what it may not.
    """
    if mask is None:
        if shown is not None and past:
            before = torch.ones(len(ids), past, dtype=torch.bool, device=ids.device)
            return torch.cat([before, shown], 1)
        return shown
    want = (ids.shape[0], past + ids.shape[1])
    if tuple(mask.shape) != want:
        raise ShapeError(
            f"attention_mask {tuple(mask.shape)}: give {want}, for the {past} tokens stored and "
            f"the {ids.shape[1]} of the prompt"
        )
    found = mask.to(ids.device).bool()
    if not bool(found[:, -1].all()):
        raise ShapeError("attention_mask hides the last token of a prompt: pad on the left")
    return None if bool(found.all()) else found


def _check_room(cache: Any, tokens: int) -> None:
    most = getattr(cache, "max_tokens", None)
    if most is not None and tokens > most:
        raise CapacityError(
            f"prompt and new tokens are {tokens}, the cache is for max_tokens={most}: make it "
            "larger, or lower max_new_tokens"
        )
