# SPDX-License-Identifier: Apache-2.0
"""A decoder in the form of gpt-fast: buffers of a fixed size, written at an index tensor.

Every shape of a decode step is the same, so that it is compiled once. The price is that the
attention reads the whole buffer, and a mask hides what is not filled. With `backend="kvpass"` the
attention reads blocks with the filled part only; the buffers are still written, and still true.
"""

from __future__ import annotations

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
    """Sizes; `n_local_heads` is the number of heads of keys and values."""

    vocab_size: int = 96
    n_layer: int = 2
    n_head: int = 4
    n_local_heads: int = 2
    dim: int = 64
    intermediate_size: int = 96
    norm_eps: float = 1e-5

    @property
    def head_dim(self) -> int:
        """Width of a head."""
        return self.dim // self.n_head


class KVCache(nn.Module):
    """Keys and values of one layer, `[B, H, T, D]` with room for T tokens."""

    k_cache: Tensor
    v_cache: Tensor

    def __init__(self, shape: tuple[int, int, int, int], like: Tensor) -> None:
        super().__init__()
        self.register_buffer("k_cache", like.new_zeros(shape), persistent=False)
        self.register_buffer("v_cache", like.new_zeros(shape), persistent=False)

    def update(self, input_pos: Tensor, k_val: Tensor, v_val: Tensor) -> tuple[Tensor, Tensor]:
        """Write `[B, H, n, D]` at positions `input_pos` `[n]`; return the whole buffers."""
        k_out, v_out = self.k_cache, self.v_cache
        k_out[:, :, input_pos] = k_val
        v_out[:, :, input_pos] = v_val
        return k_out, v_out


class Attention(nn.Module):
    """Grouped-query attention; `kv_cache` is set by `Transformer.setup_caches`."""

    kv_cache: KVCache

    def __init__(self, config: ModelArgs) -> None:
        super().__init__()
        self.n_head, self.n_local_heads = config.n_head, config.n_local_heads
        self.head_dim = config.head_dim
        heads = config.n_head + 2 * config.n_local_heads
        self.wqkv = nn.Linear(config.dim, heads * config.head_dim, bias=False)
        self.wo = nn.Linear(config.dim, config.dim, bias=False)

    def forward(self, x: Tensor, angles: Tensor, mask: Tensor, input_pos: Tensor) -> Tensor:
        """Attend from `x` `[B, n, dim]`; `mask` `[1, 1, n, T]` is true where a token is seen."""
        batch, n, dim = x.shape
        kv_heads = self.n_local_heads
        qkv = self.wqkv(x).view(batch, n, -1, self.head_dim)
        q, k, v = qkv.split((self.n_head, kv_heads, kv_heads), dim=2)
        q, k = rotate_pairs(q, angles), rotate_pairs(k, angles)
        q, k, v = (item.transpose(1, 2) for item in (q, k, v))
        k, v = self.kv_cache.update(input_pos, k, v)
        k = k.repeat_interleave(self.n_head // kv_heads, dim=1)
        v = v.repeat_interleave(self.n_head // kv_heads, dim=1)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=0.0)
        return self.wo(y.transpose(1, 2).reshape(batch, n, dim))


class TransformerBlock(nn.Module):
    """Attention, then the feed-forward network, each with a residual."""

    def __init__(self, config: ModelArgs) -> None:
        super().__init__()
        self.attention = Attention(config)
        self.feed_forward = FeedForward(config.dim, config.intermediate_size)
        self.attention_norm = RMSNorm(config.dim, config.norm_eps)
        self.ffn_norm = RMSNorm(config.dim, config.norm_eps)

    def forward(self, x: Tensor, angles: Tensor, mask: Tensor, input_pos: Tensor) -> Tensor:
        """Map `x` `[B, n, dim]` to the same shape."""
        h = x + self.attention(self.attention_norm(x), angles, mask, input_pos)
        return h + self.feed_forward(self.ffn_norm(h))


class Transformer(nn.Module):
    """The decoder; call `setup_caches` before the first forward."""

    causal_mask: Tensor

    def __init__(self, config: ModelArgs) -> None:
        super().__init__()
        self.config = config
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleList(TransformerBlock(config) for _ in range(config.n_layer))
        self.norm = RMSNorm(config.dim, config.norm_eps)
        self.output = nn.Linear(config.dim, config.vocab_size, bias=False)

    def setup_caches(self, max_batch_size: int, max_seq_length: int) -> None:
        """Make the buffers, and the mask `[T, T]` whose rows are taken at `input_pos`."""
        config, weight = self.config, self.output.weight
        shape = (max_batch_size, config.n_local_heads, max_seq_length, config.head_dim)
        for module in self.modules():
            if isinstance(module, Attention):
                module.kv_cache = KVCache(shape, weight)
        seen = weight.new_ones(max_seq_length, max_seq_length, dtype=torch.bool).tril()
        self.register_buffer("causal_mask", seen, persistent=False)

    def forward(self, idx: Tensor, input_pos: Tensor) -> Tensor:
        """Logits `[B, n, V]` of ids `[B, n]` at positions `input_pos` `[n]`."""
        mask = self.causal_mask[None, None, input_pos]
        angles = rotary_angles(input_pos, self.config.head_dim)
        x = self.tok_embeddings(idx)
        for layer in self.layers:
            x = layer(x, angles, mask, input_pos)
        return self.output(self.norm(x))


def stepper(model: Callable[[Tensor, Tensor], Tensor]) -> Step:
    """A `Step` of a model with as many sequences as its buffers have."""

    def step(ids: Tensor, position: int) -> Tensor:
        input_pos = torch.arange(position, position + ids.shape[1], device=ids.device)
        return model(ids, input_pos)[:, -1]

    return step
