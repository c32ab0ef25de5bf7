# SPDX-License-Identifier: Apache-2.0
"""``torch.compile(..., dynamic=True)``: sizes and numbers of the model are inputs, which stay what
they are; everything is rewritten all the same, and a decode step can be captured.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

import kvpass
from kvpass.errors import KVPassWarning
from kvpass.graph.report import GraphReport, observed
from tests.models import OPTIONS, prompt, tiered, tiny


def compiled(model: Any, inner: str = "eager") -> Any:
    torch._dynamo.reset()
    options = {"inner": inner} | OPTIONS
    return torch.compile(
        model, backend=kvpass.backend, dynamic=True, fullgraph=True, options=options
    )


def cache_of(model: Any, form: str) -> Any:
    from transformers import DynamicCache, StaticCache

    if form == "tiered":
        return tiered(model)
    if form == "static":
        return StaticCache(model.config, 64)
    return DynamicCache(config=model.config)


@pytest.mark.parametrize("form", ["tiered", "dynamic", "static"])
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2"])
def test_all_attentions_are_rewritten_and_steps_can_be_captured(name: str, form: str) -> None:
    model = tiny(name)
    cache, reference = cache_of(model, form), cache_of(model, "dynamic")
    reports: list[GraphReport] = []
    step, ids = compiled(model), prompt(2, 21)[0]
    with torch.no_grad(), observed(reports.append, texts=True):
        for start in (0, *range(21, 33)):
            position = torch.arange(start, start + ids.shape[1])[None]
            inputs = {"input_ids": ids, "position_ids": position, "use_cache": True}
            got = step(past_key_values=cache, **inputs).logits
            wanted = model(past_key_values=reference, **inputs).logits
            torch.testing.assert_close(got, wanted, rtol=0, atol=2e-5)
            ids = wanted[:, -1:].argmax(-1)
    assert reports and all(site.rewritten for report in reports for site in report.sites)
    assert reports[-1].grows == ""
    assert ".item()" not in reports[-1].after, "a number of the host is in the step"


@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_inner_compilers_take_it(inner: str) -> None:
    model = tiny("llama")
    cache, reference = cache_of(model, "tiered"), cache_of(model, "dynamic")
    step, ids = compiled(model, inner), prompt(1, 19)[0]
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error", KVPassWarning)
        for _ in range(4):
            got = step(input_ids=ids, past_key_values=cache, use_cache=True).logits
            wanted = model(input_ids=ids, past_key_values=reference, use_cache=True).logits
            torch.testing.assert_close(got, wanted, rtol=0, atol=2e-5)
            ids = wanted[:, -1:].argmax(-1)


class Attention(nn.Module):
    """Of a cache of its own; ``factor`` is a number that may change."""

    factor = 0.25

    def forward(self, q: Any, k: Any, v: Any, past: Any, tilt: float = 1.0) -> Any:
        keys, values = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
        out = nn.functional.scaled_dot_product_attention(q, keys, values)
        return out * self.factor * tilt, (keys, values)


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
@pytest.mark.parametrize("what", ["attribute", "argument"])
def test_a_number_that_changes_is_followed(what: str, inner: str) -> None:
    """And from its second value on nothing is compiled for it, except where AOTAutograd insists."""
    model = Attention()
    graphs = 0

    def backend(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        nonlocal graphs
        graphs += 1
        return kvpass.backend(gm, inputs, options={"inner": inner} | OPTIONS)

    torch._dynamo.reset()
    step = torch.compile(model, backend=backend, dynamic=True, fullgraph=True)
    seen = []
    for number in (0.25, 0.5, 0.75, 1.25, 3.0):
        past = torch.randn(2, 2, 3, 9, 16).unbind()
        q, k, v = (torch.randn(2, 3, 1, 16) for _ in range(3))
        tilt = number if what == "argument" else 1.0
        model.factor = number if what == "attribute" else 0.25
        with torch.no_grad():
            got, _ = step(q, k, v, past, tilt)
            wanted, _ = model(q, k, v, past, tilt)
        torch.testing.assert_close(got, wanted)
        seen.append(graphs)
    if (what, inner) != ("attribute", "aot_eager"):
        assert seen[-1] == seen[2] <= 3
