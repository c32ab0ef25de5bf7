# SPDX-License-Identifier: Apache-2.0
"""A Llama-family decoder in plain PyTorch that traces without graph breaks.

RMSNorm (Zhang and Sennrich, 2019), rotary embedding in the half-split layout (Su et al., 2021),
grouped-query attention (Ainslie et al., 2023) and SwiGLU (Shazeer, 2020), put together as in Llama
(Touvron et al., 2023). Parameter names are those of Hugging Face checkpoints without `model.`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kvpass.errors import ShapeError
from model_zoo.configs import DecoderConfig


class KVCache(Protocol):
    """What the decoder asks of a cache; `DenseCache` is the plain one."""

    def get_seq_length(self) -> int:
        """Tokens stored before this forward pass."""

    def update(self, k: Tensor, v: Tensor, layer_idx: int) -> tuple[Tensor, Tensor]:
        """Append `[B, Hkv, n, D]` to a layer and return all its K and V, `[B, Hkv, past+n, D]`."""


class RMSNorm(nn.Module):
    """Scale by the reciprocal root mean square of the last dimension, computed in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise `x` `[..., size]`."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


def inverse_frequencies(config: DecoderConfig, device: torch.device | None = None) -> Tensor:
    """Rotary angles per position, float32 `[head_dim / 2]`.

    With `rope_scaling`, frequencies whose wavelength exceeds the original context are divided by
    `factor`, short ones are kept, and those between are blended (Llama 3.1).
    """
    exponent = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device=device)
    frequency = 1.0 / (config.rope_theta ** (exponent / config.head_dim))
    scaling = config.rope_scaling
    if scaling is None:
        return frequency
    wavelength = 2 * math.pi / frequency
    turns = scaling.original_max_position_embeddings / wavelength
    span = scaling.high_freq_factor - scaling.low_freq_factor
    keep = ((turns - scaling.low_freq_factor) / span).clamp(0, 1)
    return keep * frequency + (1 - keep) * frequency / scaling.factor


class RotaryEmbedding(nn.Module):
    """Cosines and sines of positions, in the half-split layout."""

    inv_freq: Tensor

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.register_buffer("inv_freq", inverse_frequencies(config), persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> RotaryEmbedding:
        super()._apply(fn, recurse)
        # Recomputed, so that neither .to(bfloat16) nor .to_empty() leaves rounded or absent angles.
        self.inv_freq = inverse_frequencies(self.config, self.inv_freq.device)
        return self

    def forward(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Map positions `[B, n]` to cos and sin `[B, 1, n, head_dim]` of `dtype`."""
        angles = positions[:, None, :, None].float() * self.inv_freq
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (i, i + D/2) of `x` `[B, H, n, D]`."""
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-high, low), dim=-1) * sin


def repeat_kv(x: Tensor, groups: int) -> Tensor:
    """Repeat every KV head for its query heads: `[B, H, n, D]` to `[B, H * groups, n, D]`."""
    if groups == 1:
        return x
    batch, heads, length, dim = x.shape
    x = x[:, :, None].expand(batch, heads, groups, length, dim)
    return x.reshape(batch, heads * groups, length, dim)


class Attention(nn.Module):
    """Grouped-query attention over the cache and the new tokens."""

    def __init__(self, config: DecoderConfig, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        self.head_dim = config.head_dim
        self.groups = config.num_attention_heads // config.num_key_value_heads
        q_size = config.num_attention_heads * config.head_dim
        kv_size = config.num_key_value_heads * config.head_dim
        bias = config.attention_bias
        self.q_proj = nn.Linear(config.hidden_size, q_size, bias=bias)
        self.k_proj = nn.Linear(config.hidden_size, kv_size, bias=bias)
        self.v_proj = nn.Linear(config.hidden_size, kv_size, bias=bias)
        self.o_proj = nn.Linear(q_size, config.hidden_size, bias=bias)

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(x.shape[0], x.shape[1], -1, self.head_dim).transpose(1, 2)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None, cache: KVCache | None
    ) -> Tensor:
        """Attend from `x` `[B, n, hidden]`; `mask` None means causal without a past."""
        q = rotate(self._heads(self.q_proj(x)), cos, sin)
        k = rotate(self._heads(self.k_proj(x)), cos, sin)
        v = self._heads(self.v_proj(x))
        if cache is not None:
            k, v = cache.update(k, v, self.layer_idx)
        out = F.scaled_dot_product_attention(
            q,
            repeat_kv(k, self.groups),
            repeat_kv(v, self.groups),
            attn_mask=mask,
            is_causal=mask is None,
        )
        return self.o_proj(out.transpose(1, 2).reshape(x.shape[0], x.shape[1], -1))


class MLP(nn.Module):
    """SwiGLU: `down(silu(gate(x)) * up(x))`."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj = nn.Linear(hidden, inner, bias=bias)
        self.up_proj = nn.Linear(hidden, inner, bias=bias)
        self.down_proj = nn.Linear(inner, hidden, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """Map `x` `[B, n, hidden]` to the same shape."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """One pre-norm block: attention, then the feed-forward network, each with a residual."""

    def __init__(self, config: DecoderConfig, layer_idx: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, layer_idx)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None, cache: KVCache | None
    ) -> Tensor:
        """Map `x` `[B, n, hidden]` to the same shape; arguments as in `Attention`."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, mask, cache)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    """A decoder with a language-model head; `config` carries the sizes a cache needs."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, i) for i in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary = RotaryEmbedding(config)
        self.lm_head: nn.Linear | None = None
        if not config.tie_word_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(
        self,
        input_ids: Tensor,
        cache: KVCache | None = None,
        attention_mask: Tensor | None = None,
        last_only: bool = False,
    ) -> Tensor:
        """Logits of the next token after every position, or after the last one only.

        Args:
            input_ids: int64 `[B, n]`, the tokens that follow those in the cache.
            cache: holds `past` tokens of each sequence and takes the new ones; None means no past.
            attention_mask: `[B, past + n]`, nonzero where a token is real. Padding goes on the
                left; positions count real tokens only. Logits of padding are finite and without
                meaning.
            last_only: compute the logits of the last position alone.

        Returns:
            Logits `[B, n, V]`, or `[B, 1, V]`, in the dtype of the weights.

        Raises:
            ShapeError: `attention_mask` does not cover exactly the cached and the new tokens.
        """
        n = input_ids.shape[1]
        past = cache.get_seq_length() if cache is not None else 0
        if attention_mask is not None and attention_mask.shape[1] != past + n:
            raise ShapeError(
                f"attention_mask covers {attention_mask.shape[1]} tokens, but there are {past} "
                f"cached and {n} new ones; pass a mask of {past + n}"
            )
        q_idx = torch.arange(n, device=input_ids.device)
        positions = (q_idx + past)[None]
        mask: Tensor | None = None
        if cache is not None or attention_mask is not None:
            kv_idx = torch.arange(past + n, device=input_ids.device)
            mask = (kv_idx[None, :] <= q_idx[:, None] + past)[None, None]
            if attention_mask is not None:
                visible = attention_mask.bool()
                mask = mask & visible[:, None, None, :]
                positions = (visible.long().cumsum(-1) - 1).clamp(min=0)[:, past:]

        x = self.embed_tokens(input_ids)
        cos, sin = self.rotary(positions, x.dtype)
        for layer in self.layers:
            x = layer(x, cos, sin, mask, cache)
        x = self.norm(x[:, -1:] if last_only else x)
        head = self.embed_tokens if self.lm_head is None else self.lm_head
        return F.linear(x, head.weight)


class DenseCache:
    """A cache that keeps each layer's K and V whole and grows them by concatenation."""

    def __init__(self) -> None:
        self.keys: list[Tensor] = []  # one [B, Hkv, length, D] a layer
        self.values: list[Tensor] = []

    def get_seq_length(self) -> int:
        """Tokens stored so far."""
        return self.keys[0].shape[-2] if self.keys else 0

    def update(
        self, k: Tensor, v: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Append `k`, `v` `[B, Hkv, n, D]` to a layer; return all of it `[B, Hkv, past+n, D]`."""
        if layer_idx == len(self.keys):
            self.keys.append(k)
            self.values.append(v)
        else:
            self.keys[layer_idx] = torch.cat((self.keys[layer_idx], k), dim=-2)
            self.values[layer_idx] = torch.cat((self.values[layer_idx], v), dim=-2)
        return self.keys[layer_idx], self.values[layer_idx]
