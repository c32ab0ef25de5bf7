# SPDX-License-Identifier: Apache-2.0
"""One decode step of a Llama-3.1-8B-shaped model with random weights, captured by hand.

All of a step but the rotary positions, which cost nothing beside it: norms, projections, append and
attend over a manager's blocks, MLP and the head. bf16, batch 1.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

import kvpass.ops  # noqa: F401  # defines ops
from benchmarks.models import LLAMA_8B, Shape
from kvpass.config import FairnessConfig
from kvpass.runtime.geometry import BlockGeometry
from kvpass.runtime.manager import Manager

LAYERS, HIDDEN, HEADS, KV_HEADS, DIM = 32, 4096, 32, 8, 128
BLOCK = 256
DTYPE = torch.bfloat16
GEOMETRY = BlockGeometry(KV_HEADS, DIM, DIM, DTYPE, BLOCK)
FILL = 4096


Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""From the layer, q ``[B, H, 1, D]``, k and v ``[B, Hkv, 1, D]`` to ``[B, H, 1, D]``."""


class Weights:
    """Random weights of a Llama, about 16 GB for that of 8B."""

    def __init__(self, shape: Shape = LLAMA_8B) -> None:
        self.shape = shape
        width = shape.heads * shape.dim

        def random(rows: int, columns: int) -> Tensor:
            return torch.randn(rows, columns, device="cuda", dtype=DTYPE) * columns**-0.5

        self.layers = [
            (
                random(width + 2 * shape.kv_heads * shape.dim, shape.hidden),
                random(shape.hidden, width),
                random(2 * shape.mlp, shape.hidden),
                random(shape.hidden, shape.mlp),
            )
            for _ in range(shape.layers)
        ]
        self.head = random(shape.vocabulary, shape.hidden)

    def step(self, x: Tensor, rows: Tensor) -> Tensor:
        """Logits ``[1, V]`` of one token ``[1, hidden]``, over the blocks of ``rows``."""

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            token = torch.ops.kvpass.append(k, v, rows, layer, BLOCK)
            result: Tensor = torch.ops.kvpass.attend(
                q, k, v, token, rows, layer, BLOCK, DIM**-0.5, True, None, None
            )
            return result

        return self.forward(x, attend)

    def forward(self, x: Tensor, attend: Attend) -> Tensor:
        """Logits ``[B, V]`` of one token a sequence, ``[B, hidden]``."""
        shape, norm = self.shape, (self.shape.hidden,)
        for layer, (qkv, out, up, down) in enumerate(self.layers):
            h = F.linear(F.rms_norm(x, norm), qkv).view(len(x), 1, -1, shape.dim).transpose(1, 2)
            a = attend(layer, *h.split([shape.heads, shape.kv_heads, shape.kv_heads], 1))
            x = x + F.linear(a.transpose(1, 2).reshape(len(x), -1), out)
            gate, value = F.linear(F.rms_norm(x, norm), up).chunk(2, -1)
            x = x + F.linear(F.silu(gate) * value, down)
        return F.linear(F.rms_norm(x, norm), self.head)


class Sequence:
    """A sequence of random keys and values in a manager.

    Args:
        manager: whose blocks it gets.
        tokens: stored at once.
        qos: its quality of service.
    """

    def __init__(self, manager: Manager, tokens: int, qos: float = 0.5) -> None:
        self.manager = manager
        self.tokens = tokens
        self.layers = range(LAYERS)
        self.batch = manager.new_batch(1, LAYERS, tokens + 4096, fairness=FairnessConfig(qos=qos))
        for layer in self.layers:
            self.batch.define(layer, GEOMETRY)
        self._replay: Callable[[], None] | None = None
        for first in range(0, tokens, FILL):
            count = min(FILL, tokens - first)
            with manager.step(self.batch, count, self.layers) as rows:
                for layer in self.layers:
                    k, v = (
                        torch.randn(1, KV_HEADS, count, DIM, device="cuda", dtype=DTYPE)
                        for _ in range(2)
                    )
                    torch.ops.kvpass.append(k, v, rows, layer, BLOCK)
        torch.cuda.synchronize()
        manager.settle()

    def capture(self, weights: Weights) -> None:
        """Capture a decode step, whose token is always the same."""
        x = self._input = torch.randn(1, HIDDEN, device="cuda", dtype=DTYPE)
        with self.manager.step(self.batch, 1, self.layers) as rows:
            weights.step(x, rows)  # compiles the kernels
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self.logits = weights.step(x, rows)
        self._replay = graph.replay
        self.rewind()

    def step(self) -> None:
        """One decode step; returns before the GPU has made it."""
        assert self._replay is not None
        with self.manager.step(self.batch, 1, self.layers):
            self._replay()

    def rewind(self) -> None:
        """Forget what the steps appended, so that every round of a benchmark is the same."""
        self.manager.crop(self.batch, self.tokens)

    @property
    def cold_bytes(self) -> int:
        """Bytes that a step reads over the link."""
        cold = sum(block.hot is None for row in self.batch.blocks for block in row[0])
        return cold * GEOMETRY.payload_bytes
