# SPDX-License-Identifier: Apache-2.0
"""A decoder in the form of older libraries: tuples of past keys and values that grow.

The model takes `(keys, values)` of each layer and returns them with the new tokens behind. With
`backend="kvpass"` it returns handles of the same shapes that hold no memory; the tokens are in
blocks. A first call concatenates too, with a past of no tokens, so that kvpass sees a cache there:
keys that are only returned are left dense, and copied to blocks by the next call.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from model_zoo.forms import Step
from model_zoo.forms.parts import MLP

Past = tuple[Tensor, Tensor]
"""Keys and values of one layer, each `[B, H, past, D]`."""


@dataclass(frozen=True)
class Config:
    """Sizes."""

    vocab_size: int = 96
    n_positions: int = 128
    n_embd: int = 64
    n_layer: int = 2
    n_head: int = 4


class Attention(nn.Module):
    """Multi-head attention over the past and the new tokens."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.n_head = config.n_head
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd)

    def forward(self, x: Tensor, layer_past: Past | None) -> tuple[Tensor, Past]:
        """Attend from `x` `[B, n, n_embd]`; also returns the past with the new tokens."""
        batch, n, width = x.shape
        head_dim = width // self.n_head
        qkv = self.c_attn(x).view(batch, n, 3, self.n_head, head_dim)
        query, key, value = (item.transpose(1, 2) for item in qkv.unbind(2))
        if layer_past is None:
            empty = key.new_zeros(batch, self.n_head, 0, head_dim)
            layer_past = (empty, empty)
        key = torch.cat((layer_past[0], key), dim=2)
        value = torch.cat((layer_past[1], value), dim=2)
        total = key.shape[2]

        scores = torch.einsum("bhqd,bhkd->bhqk", query, key) / math.sqrt(head_dim)
        rows = torch.arange(total - n, total, device=x.device)
        hidden = torch.arange(total, device=x.device)[None, :] > rows[:, None]
        weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
        out = torch.einsum("bhqk,bhkd->bhqd", weights, value)
        return self.c_proj(out.transpose(1, 2).reshape(batch, n, width)), (key, value)


class Block(nn.Module):
    """Attention, then the feed-forward network, each with a residual."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd)
        self.attn = Attention(config)
        self.ln_2 = nn.LayerNorm(config.n_embd)
        self.mlp = MLP(config.n_embd)

    def forward(self, x: Tensor, layer_past: Past | None) -> tuple[Tensor, Past]:
        """Map `x` `[B, n, n_embd]` to the same shape; also returns the grown past."""
        out, present = self.attn(self.ln_1(x), layer_past)
        x = x + out
        return x + self.mlp(self.ln_2(x)), present


class Transformer(nn.Module):
    """The decoder, with learned positions."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.n_positions, config.n_embd)
        self.h = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.ln_f = nn.LayerNorm(config.n_embd)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)

    def forward(
        self, input_ids: Tensor, past_key_values: tuple[Past, ...] | None = None
    ) -> tuple[Tensor, tuple[Past, ...]]:
        """Logits `[B, n, V]` of ids `[B, n]` behind the past, and the grown past of each layer."""
        past = 0 if past_key_values is None else past_key_values[0][0].shape[2]
        positions = torch.arange(past, past + input_ids.shape[1], device=input_ids.device)
        x = self.wte(input_ids) + self.wpe(positions)
        presents: list[Past] = []
        for i, block in enumerate(self.h):
            x, present = block(x, None if past_key_values is None else past_key_values[i])
            presents.append(present)
        return self.lm_head(self.ln_f(x)), tuple(presents)


def stepper(model: Callable[..., tuple[Tensor, tuple[Past, ...]]]) -> Step:
    """A `Step` that keeps the past of the last one."""
    past: tuple[Past, ...] | None = None

    def step(ids: Tensor, position: int) -> Tensor:
        nonlocal past
        logits, past = model(ids, past if position else None)
        return logits[:, -1]

    return step
