# SPDX-License-Identifier: Apache-2.0
"""A manager with tiny blocks, driven through the public ops, beside a plain list of tensors."""

from __future__ import annotations

import torch
from torch import Tensor

import kvpass.ops
from kvpass.config import Config
from kvpass.runtime.batch import Batch
from kvpass.runtime.geometry import BlockGeometry
from kvpass.runtime.manager import Manager

BLOCK = 32
OPS = kvpass.ops


class Driver:
    """Sequences of random keys and values in a manager, and the same in dense tensors."""

    def __init__(
        self,
        *,
        size: int = 1,
        layers: int = 2,
        heads: int = 2,
        width: int = 16,
        width_v: int | None = None,
        dtype: torch.dtype = torch.float32,
        hot: int | str = "1MiB",
        cold: int | str = "64MiB",
        manager: Manager | None = None,
        device: str = "cpu",
        **options: object,
    ) -> None:
        config = Config.load(block_size=BLOCK, hot=hot, cold=cold, **options)
        self.manager = manager or Manager(config, device)
        self.geometry = BlockGeometry(heads, width, width_v or width, dtype, BLOCK)
        self.batch: Batch = self.manager.new_batch(size, layers, 64)
        for layer in range(layers):
            self.batch.define(layer, self.geometry)
        self.layers = range(layers)
        self.dense: list[tuple[Tensor, Tensor]] = [
            (self.random(0, heads, width), self.random(0, heads, width_v or width))
            for _ in self.layers
        ]

    def random(self, tokens: int, heads: int, width: int) -> Tensor:
        x = torch.randn(self.batch.size, heads, tokens, width, device=self.manager.device)
        return x.to(self.geometry.dtype)

    def append(self, tokens: int, queries: Tensor | None = None) -> list[Tensor]:
        """One step; returns the attention of ``queries`` (random if None) in each layer."""
        g = self.geometry
        outputs = []
        with self.manager.step(self.batch, tokens, self.layers) as rows:
            for layer in self.layers:
                k = self.random(tokens, g.kv_heads, g.head_dim_k)
                v = self.random(tokens, g.kv_heads, g.head_dim_v)
                q = queries if queries is not None else self.random(tokens, 6, g.head_dim_k)
                token = torch.ops.kvpass.append(k, v, rows, layer, BLOCK)
                outputs.append(
                    torch.ops.kvpass.attend(
                        q, k, v, token, rows, layer, BLOCK, 0.3, True, None, None
                    )
                )
                old_k, old_v = self.dense[layer]
                self.dense[layer] = (torch.cat([old_k, k], 2), torch.cat([old_v, v], 2))
        return outputs

    def attention(self, queries: Tensor, layer: int) -> Tensor:
        """Reference attention of the last queries, in float64."""
        k, v = (x.double() for x in self.dense[layer])
        group = queries.shape[1] // k.shape[1]
        n, total = queries.shape[2], k.shape[2]
        return torch.nn.functional.scaled_dot_product_attention(
            queries.double(),
            k.repeat_interleave(group, 1),
            v.repeat_interleave(group, 1),
            attn_mask=torch.ones(n, total, dtype=torch.bool, device=k.device).tril(total - n),
            scale=0.3,
        )

    def check(self) -> None:
        """Everything stored is what was appended."""
        for layer, (k, v) in enumerate(self.dense):
            got_k, got_v = self.manager.gather(self.batch, layer, k.shape[2])
            assert torch.equal(got_k, k)
            assert torch.equal(got_v, v)
