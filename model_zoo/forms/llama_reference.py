# SPDX-License-Identifier: Apache-2.0
"""A decoder in the form of Llama's reference code: buffers written at a slice from `start_pos`.

Tokens come before heads in the buffers, a batch may be smaller than they are, and the attention
reads the part that is filled. With `backend="kvpass"` it reads blocks instead; the buffers are
still written, and still true. `start_pos` is an integer, which Dynamo makes a symbol when it has
seen it change, so that decode steps are one graph.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from model_zoo.decoder import RMSNorm
from model_zoo.forms import Step
from model_zoo.forms.parts import FeedForward, rotary_angles, rotate_pairs


@dataclass(frozen=True)
class ModelArgs:
    """Sizes of the model and of its buffers."""

    dim: int = 64
    n_layers: int = 2
    n_heads: int = 4
    n_kv_heads: int = 2
    vocab_size: int = 96
    hidden_dim: int = 96
    norm_eps: float = 1e-5
    max_batch_size: int = 4
    max_seq_len: int = 128

    @property
    def head_dim(self) -> int:
        """Width of a head."""
        return self.dim // self.n_heads


def repeat_kv(x: Tensor, n_rep: int) -> Tensor:
    """Repeat every KV head for its query heads: `[B, S, H, D]` to `[B, S, H * n_rep, D]`."""
    batch, tokens, heads, head_dim = x.shape
    if n_rep == 1:
        return x
    x = x[:, :, :, None, :].expand(batch, tokens, heads, n_rep, head_dim)
    return x.reshape(batch, tokens, heads * n_rep, head_dim)


class Attention(nn.Module):
    """Grouped-query attention with buffers `[max_batch, max_seq, kv_heads, head_dim]`."""

    cache_k: Tensor
    cache_v: Tensor

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.head_dim = args.head_dim
        self.n_rep = args.n_heads // args.n_kv_heads
        kv_dim = args.n_kv_heads * args.head_dim
        self.wq = nn.Linear(args.dim, args.dim, bias=False)
        self.wk = nn.Linear(args.dim, kv_dim, bias=False)
        self.wv = nn.Linear(args.dim, kv_dim, bias=False)
        self.wo = nn.Linear(args.dim, args.dim, bias=False)
        shape = (args.max_batch_size, args.max_seq_len, args.n_kv_heads, args.head_dim)
        # Registered, so that the model's `.to` casts and moves them. The original does that in
        # `forward`, which makes new tensors and leaves the attention of that call as it is.
        self.register_buffer("cache_k", torch.zeros(shape), persistent=False)
        self.register_buffer("cache_v", torch.zeros(shape), persistent=False)

    def forward(self, x: Tensor, start_pos: int, angles: Tensor, mask: Tensor | None) -> Tensor:
        """Attend from `x` `[B, n, dim]`, at positions from `start_pos` on.

        `mask` `[n, start_pos + n]` is added to the scores; one token needs none.
        """
        batch, n, dim = x.shape
        xq = self.wq(x).view(batch, n, -1, self.head_dim)
        xk = self.wk(x).view(batch, n, -1, self.head_dim)
        xv = self.wv(x).view(batch, n, -1, self.head_dim)
        xq, xk = rotate_pairs(xq, angles), rotate_pairs(xk, angles)
        self.cache_k[:batch, start_pos : start_pos + n] = xk
        self.cache_v[:batch, start_pos : start_pos + n] = xv
        keys = repeat_kv(self.cache_k[:batch, : start_pos + n], self.n_rep)
        values = repeat_kv(self.cache_v[:batch, : start_pos + n], self.n_rep)
        xq, keys, values = (item.transpose(1, 2) for item in (xq, keys, values))
        scores = torch.matmul(xq, keys.transpose(2, 3)) / math.sqrt(self.head_dim)
        if mask is not None:
            scores = scores + mask
        scores = F.softmax(scores.float(), dim=-1).type_as(xq)
        output = torch.matmul(scores, values)
        return self.wo(output.transpose(1, 2).contiguous().view(batch, n, dim))


class TransformerBlock(nn.Module):
    """Attention, then the feed-forward network, each with a residual."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.attention = Attention(args)
        self.feed_forward = FeedForward(args.dim, args.hidden_dim)
        self.attention_norm = RMSNorm(args.dim, args.norm_eps)
        self.ffn_norm = RMSNorm(args.dim, args.norm_eps)

    def forward(self, x: Tensor, start_pos: int, angles: Tensor, mask: Tensor | None) -> Tensor:
        """Map `x` `[B, n, dim]` to the same shape."""
        h = x + self.attention(self.attention_norm(x), start_pos, angles, mask)
        return h + self.feed_forward(self.ffn_norm(h))


class Transformer(nn.Module):
    """The decoder; its buffers are in its attentions."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(args.vocab_size, args.dim)
        self.layers = nn.ModuleList(TransformerBlock(args) for _ in range(args.n_layers))
        self.norm = RMSNorm(args.dim, args.norm_eps)
        self.output = nn.Linear(args.dim, args.vocab_size, bias=False)
        # No buffer, so that `.to(bfloat16)` does not round it.
        self.angles = rotary_angles(torch.arange(args.max_seq_len), args.head_dim)

    def forward(self, tokens: Tensor, start_pos: int) -> Tensor:
        """Logits `[B, n, V]` of ids `[B, n]` at positions from `start_pos` on."""
        n = tokens.shape[1]
        h = self.tok_embeddings(tokens)
        angles = self.angles[start_pos : start_pos + n].to(h.device)
        mask = None
        if n > 1:
            mask = torch.full((n, n), float("-inf"), device=tokens.device).triu(diagonal=1)
            past = torch.zeros((n, start_pos), device=tokens.device)
            mask = torch.hstack((past, mask)).type_as(h)
        for layer in self.layers:
            h = layer(h, start_pos, angles, mask)
        return self.output(self.norm(h)).float()


def stepper(model: Callable[[Tensor, int], Tensor]) -> Step:
    """A `Step` of a model with at most as many sequences as its buffers have."""
    return lambda ids, position: model(ids, position)[:, -1]
