# SPDX-License-Identifier: Apache-2.0
"""Chunks of a prompt through the ops of a GPU, on a GPU or under Triton's interpreter."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvpass import ops
from tests.runtime.harness import BLOCK, Driver
from tests.test_ops import plain_attention

HEADS = 4


def chunk(driver: Driver, tokens: int, spans: dict[int, dict[str, Any]] | None = None) -> list[Any]:
    """One step of many tokens; (got, wanted) of each layer.

    Args:
        driver: whose sequences get the tokens.
        tokens: of each.
        spans: by layer, ``window`` or ``chunk`` of its attention.
    """
    g = driver.geometry
    outs = []
    with driver.manager.step(driver.batch, tokens, driver.layers) as rows:
        for layer in driver.layers:
            options = (spans or {}).get(layer, {})
            k = driver.random(tokens, g.kv_heads, g.head_dim_k)
            v = driver.random(tokens, g.kv_heads, g.head_dim_v)
            q = driver.random(tokens, HEADS, g.head_dim_k)
            token = ops._append_cuda(k, v, rows, layer, BLOCK)
            got = ops._attend_cuda(
                q, k, v, token, rows, layer, BLOCK, 0.3, True, None, None, **options
            )
            old_k, old_v = driver.dense[layer]
            driver.dense[layer] = (torch.cat([old_k, k], 2), torch.cat([old_v, v], 2))
            outs.append((got, plain_attention(q, *driver.dense[layer], **options)))
    return outs


def token(
    driver: Driver, spans: dict[int, dict[str, Any]] | None = None, *, staged: bool = False
) -> list[tuple[Tensor, Tensor]]:
    """One step of one token; (got, wanted) of each layer.

    Args:
        driver: whose sequences get the token.
        spans: by layer, ``window`` or ``chunk`` of its attention.
        staged: each layer stages the next one, as graphs do.
    """
    g = driver.geometry
    outs = []
    with driver.manager.step(driver.batch, 1, driver.layers) as rows:
        buffer = None
        for layer in driver.layers:
            options = (spans or {}).get(layer, {})
            k, v = (driver.random(1, g.kv_heads, d) for d in (g.head_dim_k, g.head_dim_v))
            q = driver.random(1, HEADS, g.head_dim_k)
            behind = ops._append_cuda(k, v, rows, layer, BLOCK)
            following = None
            if staged and layer + 1 in driver.layers:
                span = (spans or {}).get(layer + 1, {})
                following = ops._stage_cuda(
                    behind, rows, layer + 1, BLOCK, g.block_bytes, span.get("window", 0),
                    span.get("chunk", 0),
                )  # fmt: skip
            got = ops._attend_cuda(
                q, k, v, behind, rows, layer, BLOCK, 0.3, True, None, None, **options,
                staged=buffer, following=following,
            )  # fmt: skip
            buffer = following
            old_k, old_v = driver.dense[layer]
            driver.dense[layer] = (torch.cat([old_k, k], 2), torch.cat([old_v, v], 2))
            outs.append((got, plain_attention(q, *driver.dense[layer], **options)))
    return outs


def worst(outs: list[tuple[Tensor, Tensor]]) -> float:
    """Largest error of all layers."""
    return max((got.double() - wanted).abs().max().item() for got, wanted in outs)
