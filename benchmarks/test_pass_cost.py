# SPDX-License-Identifier: Apache-2.0
"""How long does the pass take on a deep model?

A Llama of 80 layers (tiny widths: the pass sees nodes, not numbers), prompt and decode step with a
DynamicCache and a TieredCache. Measured is everything kvpass adds to a compilation: copying the
graph, finding and rewriting its attentions, and writing the code of the new graph; the rest of the
model is not compiled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import kvpass

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.slow

LAYERS = 80
LIMIT_SECONDS = 1.0


def graphs(form: str) -> list[tuple[torch.fx.GraphModule, list[Any]]]:
    """The graphs of a prompt and two decode steps, as Dynamo hands them over."""
    config = transformers.LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    seen: list[tuple[torch.fx.GraphModule, list[Any]]] = []

    def keep(gm: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        seen.append((gm, inputs))
        return kvpass.backend(gm, inputs, options={"inner": "eager"})

    torch._dynamo.reset()
    cache: Any = transformers.DynamicCache(config=config)
    if form == "tiered":
        cache = kvpass.TieredCache(config, 256)
    compiled = torch.compile(model, backend=keep)
    with torch.no_grad():
        for tokens in (9, 1, 1):
            compiled(input_ids=torch.ones(1, tokens, dtype=torch.int64), past_key_values=cache)
    return seen


@pytest.mark.parametrize("form", ["dynamic", "tiered"])
def test_pass(benchmark: Any, form: str) -> None:
    # The last one has symbolic sizes: the most expensive.
    gm, inputs = graphs(form)[-1]
    benchmark.group = f"pass over a graph of {LAYERS} layers, seconds"
    benchmark.extra_info.update(nodes=len(gm.graph.nodes), asked_for_seconds=LIMIT_SECONDS)

    def run() -> None:
        with torch.no_grad():
            kvpass.backend(gm, inputs, options={"inner": "eager"})

    benchmark.pedantic(run, rounds=9, iterations=1, warmup_rounds=1)
