# SPDX-License-Identifier: Apache-2.0
"""The decode step that a specialist writes by hand: one CUDA graph, contiguous K and V, cuDNN.

The products of a Llama and its attention, in the shape of `models`; only the rotary positions are
left out, which cost nothing beside the rest. Its keys and values lie in one tensor a layer, which
is the fastest place for attention that knows no blocks.
"""

from __future__ import annotations

import time

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.decode_8b import DTYPE, Weights
from benchmarks.models import SHAPE


class HandMade:
    """A captured greedy decode step over ``context`` tokens, every one of which is attended to.

    Args:
        batch: sequences.
        context: tokens of each.
    """

    def __init__(self, batch: int, context: int) -> None:
        self.weights = Weights(SHAPE)
        size = (batch, SHAPE.kv_heads, context, SHAPE.dim)
        self.keys = [torch.randn(size, device="cuda", dtype=DTYPE) for _ in range(SHAPE.layers)]
        self.values = [torch.randn(size, device="cuda", dtype=DTYPE) for _ in range(SHAPE.layers)]
        self.embedding = torch.randn(SHAPE.vocabulary, SHAPE.hidden, device="cuda", dtype=DTYPE)
        self.at = torch.tensor([context - 1], device="cuda")
        self.token = torch.zeros(batch, dtype=torch.long, device="cuda")
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.no_grad(), sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            with torch.cuda.stream(side):
                self._step()
            torch.cuda.current_stream().wait_stream(side)
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self._step()

    def _attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.keys[layer].index_copy_(2, self.at, k)
        self.values[layer].index_copy_(2, self.at, v)
        return F.scaled_dot_product_attention(
            q, self.keys[layer], self.values[layer], enable_gqa=SHAPE.heads != SHAPE.kv_heads
        )

    def _step(self) -> None:
        logits = self.weights.forward(self.embedding[self.token], self._attend)
        self.token.copy_(logits.argmax(-1))

    def intervals(self, count: int, warm: int) -> np.ndarray:
        """Seconds of each of ``count`` tokens, as a host sees them that runs two steps ahead."""
        times: list[float] = []
        events: list[torch.cuda.Event] = []
        for _ in range(warm + count):
            self.graph.replay()
            event = torch.cuda.Event()
            event.record()
            events.append(event)
            if len(events) > 2:
                events.pop(0).synchronize()
                times.append(time.perf_counter())
        torch.cuda.synchronize()
        return np.diff(np.array(times[-count:]))
