# SPDX-License-Identifier: Apache-2.0
"""What the decoders here have in common: everything but the attention and its cache."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class FeedForward(nn.Module):
    """SwiGLU with the names of Llama's checkpoints: `w2(silu(w1(x)) * w3(x))`."""

    def __init__(self, dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(dim, hidden_dim, bias=False)
        self.w2 = nn.Linear(hidden_dim, dim, bias=False)
        self.w3 = nn.Linear(dim, hidden_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map `x` `[B, n, dim]` to the same shape."""
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class MLP(nn.Module):
    """Two layers around a GELU, with the names of GPT-2's checkpoints."""

    def __init__(self, n_embd: int) -> None:
        super().__init__()
        self.c_fc = nn.Linear(n_embd, 4 * n_embd)
        self.c_proj = nn.Linear(4 * n_embd, n_embd)

    def forward(self, x: Tensor) -> Tensor:
        """Map `x` `[B, n, n_embd]` to the same shape."""
        return self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))


def rotary_angles(positions: Tensor, head_dim: int, base: float = 10000.0) -> Tensor:
    """Angles of rotary embedding, float32 `[n, head_dim / 2]`, at positions `[n]`."""
    exponent = torch.arange(0, head_dim, 2, device=positions.device) / head_dim
    return positions[:, None] * base**-exponent


def rotate_pairs(x: Tensor, angles: Tensor) -> Tensor:
    """Rotate the pairs (2i, 2i + 1) of `x` `[B, n, H, D]` by `angles` `[n, D / 2]`.

    As a product of complex numbers it is shorter, but Inductor has no kernels for them.
    """
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1)
    return turned.flatten(-2).type_as(x)


def random_weights(model: nn.Module, seed: int = 0) -> None:
    """Weights under which attention matters and greedy tokens vary.

    PyTorch's own initialisation gives nearly equal logits in so small a model.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() > 1:
                parameter.copy_(noise * (1.2 / math.sqrt(parameter.shape[-1])))
            else:
                parameter.copy_(noise * 0.1 + (0.0 if name.endswith("bias") else 1.0))
