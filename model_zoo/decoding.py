# SPDX-License-Identifier: Apache-2.0
"""Greedy decoding with any cache and any callable that has the decoder's signature."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kvpass.errors import ShapeError
from model_zoo.decoder import KVCache


@torch.no_grad()
def greedy(
    decoder: Callable[..., Tensor],
    input_ids: Tensor,
    cache: KVCache,
    max_new_tokens: int,
    attention_mask: Tensor | None = None,
    on_token: Callable[[Tensor], None] | None = None,
    prefill_chunk: int | None = None,
    eos_token_id: int | Sequence[int] | None = None,
) -> Tensor:
    """Continue prompts with the most likely token, step by step.

    Args:
        decoder: a `Decoder`, or a compiled one.
        input_ids: int64 `[B, n]`, the tokens that follow those in the cache.
        cache: takes the prompt and every new token but the last, which is never fed back.
        max_new_tokens: steps to take, at least 1.
        attention_mask: `[B, past + n]`, nonzero where a token is real; padding goes on the left.
        on_token: called after every step with the new ids `[B]`.
        prefill_chunk: feed the prompt in pieces of this many tokens.
        eos_token_id: stop when every sequence has produced one of these; a sequence that ends
            earlier is filled up with the (first) id.

    Returns:
        The new ids, int64 `[B, m]` with `1 <= m <= max_new_tokens`.

    Raises:
        ShapeError: the prompt is empty, or a count is not positive.
    """
    batch, length = input_ids.shape
    if length < 1:
        raise ShapeError("the prompt is empty; give at least one token per sequence")
    if max_new_tokens < 1:
        raise ShapeError(f"max_new_tokens is {max_new_tokens}; it must be at least 1")
    if prefill_chunk is not None and prefill_chunk < 1:
        raise ShapeError(f"prefill_chunk is {prefill_chunk}; it must be at least 1, or None")
    stops = None
    if eos_token_id is not None:
        ids = [eos_token_id] if isinstance(eos_token_id, int) else list(eos_token_id)
        stops = torch.tensor(ids, device=input_ids.device)

    past = cache.get_seq_length()
    step = prefill_chunk or length
    for start in range(0, length, step):
        end = min(start + step, length)
        seen = None if attention_mask is None else attention_mask[:, : past + end]
        logits = decoder(input_ids[:, start:end], cache, seen, last_only=True)

    new_ids: list[Tensor] = []
    done = torch.zeros(batch, dtype=torch.bool, device=input_ids.device)
    while True:
        token = logits[:, -1].argmax(-1)
        if stops is not None:
            token = torch.where(done, stops[0], token)
            done = done | torch.isin(token, stops)
        new_ids.append(token)
        if on_token is not None:
            on_token(token)
        if len(new_ids) == max_new_tokens or (stops is not None and bool(done.all())):
            return torch.stack(new_ids, dim=1)
        if attention_mask is not None:
            one = attention_mask.new_ones(batch, 1)
            attention_mask = torch.cat((attention_mask, one), dim=1)
        logits = decoder(token[:, None], cache, attention_mask, last_only=True)
