# SPDX-License-Identifier: Apache-2.0
"""A decoder in the form of nanoGPT: no cache, every step computes all tokens again.

With `backend="kvpass"` it is compiled like with any other backend: there is no cache to keep, which
is the reason that `kvpass.explain` gives for each attention.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from model_zoo.forms import Step
from model_zoo.forms.parts import MLP


@dataclass(frozen=True)
class GPTConfig:
    """Sizes; with `flash` attention is one call of PyTorch, else it is written out."""

    block_size: int = 128
    vocab_size: int = 96
    n_layer: int = 2
    n_head: int = 4
    n_embd: int = 64
    flash: bool = True


class CausalSelfAttention(nn.Module):
    """Multi-head attention of all tokens to those before them."""

    bias: Tensor

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.n_head, self.flash = config.n_head, config.flash
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd)
        if not config.flash:
            seen = torch.ones(config.block_size, config.block_size).tril()
            self.register_buffer("bias", seen[None, None], persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Attend within `x` `[B, T, n_embd]`."""
        batch, tokens, width = x.shape
        heads = (batch, tokens, self.n_head, width // self.n_head)
        q, k, v = (part.view(heads).transpose(1, 2) for part in self.c_attn(x).split(width, dim=2))
        if self.flash:
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=None, is_causal=True)
        else:
            att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.shape[-1]))
            att = att.masked_fill(self.bias[:, :, :tokens, :tokens] == 0, float("-inf"))
            y = F.softmax(att, dim=-1) @ v
        return self.c_proj(y.transpose(1, 2).contiguous().view(batch, tokens, width))


class Block(nn.Module):
    """Attention, then the feed-forward network, each with a residual."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd)
        self.attn = CausalSelfAttention(config)
        self.ln_2 = nn.LayerNorm(config.n_embd)
        self.mlp = MLP(config.n_embd)

    def forward(self, x: Tensor) -> Tensor:
        """Map `x` `[B, T, n_embd]` to the same shape."""
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """The decoder, with learned positions."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.block_size, config.n_embd)
        self.h = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.ln_f = nn.LayerNorm(config.n_embd)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)

    def forward(self, idx: Tensor) -> Tensor:
        """Logits of the token after the last one, `[B, 1, V]`, of ids `[B, T]`."""
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1], device=idx.device))
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x[:, [-1], :]))


def stepper(model: Callable[[Tensor], Tensor]) -> Step:
    """A `Step` that keeps all ids, and gives them to the model again."""
    idx: Tensor | None = None

    def step(ids: Tensor, position: int) -> Tensor:
        nonlocal idx
        idx = ids if idx is None or position == 0 else torch.cat((idx, ids), dim=1)
        return model(idx)[:, -1]

    return step
