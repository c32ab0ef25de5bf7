# SPDX-License-Identifier: Apache-2.0
"""How many graphs a model costs: growing caches, moving blocks and new caches recompile nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import kvpass
from tests.models import OPTIONS, prompt, tiered, tiny

STEPS = 200


class Counting:
    """kvpass.backend that counts the graphs it compiles; a graph break is an error."""

    def __init__(self, model: Any) -> None:
        self.graphs = 0
        torch._dynamo.reset()

        def backend(gm: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
            self.graphs += 1
            return kvpass.backend(gm, inputs, options={"inner": "eager"} | OPTIONS)

        self.model = torch.compile(model, backend=backend, fullgraph=True)

    def __call__(self, ids: torch.Tensor, cache: Any) -> int:
        """A step; returns the graphs compiled so far."""
        with torch.no_grad():
            self.model(input_ids=ids, past_key_values=cache, use_cache=True)
        return self.graphs


def new_cache(model: Any, form: str) -> Any:
    if form == "tiered":
        return tiered(model)
    from transformers import DynamicCache

    return DynamicCache(config=model.config)


@pytest.mark.parametrize("form", ["dynamic", "tiered"])
@pytest.mark.parametrize(("name", "most"), [("llama", 3), ("gemma2", 4)])
def test_two_hundred_steps_and_what_changes_between_them(name: str, most: int, form: str) -> None:
    model = tiny(name)
    counting = Counting(model)
    token = torch.tensor([[5], [9]])
    cache = new_cache(model, form)
    counting(prompt(2, 60)[0], cache)
    for _ in range(STEPS):
        counting(token, cache)
    assert counting.graphs <= most
    before = counting.graphs
    for i in range(20):  # a fresh cache, another prompt length, blocks elsewhere
        cache = new_cache(model, form)
        counting(prompt(2, 41 + 7 * i)[0], cache)
        if form == "tiered":
            cache.manager.place(cache.batch, lambda *at, i=i: (at[2] + i) % 2 == 0)
        counting(token, cache)
        counting(token, cache)
    assert counting.graphs <= before + 2
