# SPDX-License-Identifier: Apache-2.0
"""Four ways to write a decoder with a KV cache, or without one, as well-known code does.

Each file is a small decoder that can be read by itself, with the names its original uses:

- `gpt_fast`: buffers of a fixed size, written at an index tensor `input_pos`.
- `llama_reference`: buffers of a fixed size, written at a slice that begins at `start_pos`.
- `legacy_tuples`: tuples of past keys and values that grow by concatenation.
- `nano_gpt`: no cache; every step computes all tokens again.

They take different arguments, so each file has a `stepper(model)`. It makes a `Step` of its model,
compiled or not: a function of the new ids `[B, n]` and the number of tokens before them, which
returns the logits of the next token `[B, V]`. A step from position 0 begins a new conversation.

    model = gpt_fast.Transformer(gpt_fast.ModelArgs()).eval()
    model.setup_caches(max_batch_size=2, max_seq_length=128)
    step = gpt_fast.stepper(torch.compile(model, backend="kvpass"))
    tokens, logits = generate_greedy(step, prompt, 24)
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from model_zoo.forms.parts import random_weights

__all__ = ["Step", "generate_greedy", "random_weights"]

Step = Callable[[Tensor, int], Tensor]
"""From new ids `[B, n]` and the tokens before them to the logits of the next token `[B, V]`."""


@torch.no_grad()
def generate_greedy(step: Step, prompt: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Continue a prompt with the most likely tokens.

    Args:
        step: see above.
        prompt: int64 `[B, n]`.
        count: tokens to generate; the first is of the prompt, each other one of one more step.

    Returns:
        The tokens, int64 `[B, count]`, and the logits that they are the largest of,
        `[B, count, V]`.
    """
    ids, position = prompt, 0
    tokens: list[Tensor] = []
    logits: list[Tensor] = []
    for _ in range(count):
        last = step(ids, position)
        position += ids.shape[1]
        ids = last.argmax(-1, keepdim=True)
        tokens.append(ids)
        logits.append(last)
    return torch.cat(tokens, dim=1), torch.stack(logits, dim=1)
