# SPDX-License-Identifier: Apache-2.0
"""A call that ends between two layers: what was begun is not appended a second time."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
import kvpass
from kvpass.errors import CacheStateError, OutOfMemoryError, ShapeError
from tests.models import OPTIONS, prompt, tiered, tiny

TOKENS = 400


def logits(model: Any, ids: torch.Tensor, cache: Any = None) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=ids, past_key_values=cache, use_cache=True).logits


def compile_how(model: Any, how: str) -> None:
    torch._dynamo.reset()
    options = {"inner": "eager"} | OPTIONS
    if how == "by layer":
        for layer in model.model.layers:
            layer.compile(backend=kvpass.backend, options=options)
    if how == "whole":
        model.compile(backend=kvpass.backend, options=options)


@pytest.mark.parametrize("how", ["uncompiled", "by layer", "whole"])
def test_out_of_memory_between_two_layers(how: str) -> None:
    model = tiny("llama")
    ids, _ = prompt(1, TOKENS)
    wanted = logits(model, ids)
    compile_how(model, how)
    cache = tiered(model, hot="32KiB", cold="8KiB")  # five blocks for two layers
    count = 0
    with pytest.raises(OutOfMemoryError):
        for count in range(TOKENS):
            logits(model, ids[:, count : count + 1], cache)
    cache.resize(hot="1MiB", cold="4MiB")
    assert cache.batch.lengths == ([64, 64] if how == "whole" else [65, 64])
    if how != "whole":
        before = list(cache.batch.lengths)
        for _ in range(2):
            with pytest.raises(CacheStateError, match=rf"cache\.truncate\({count}\)"):
                logits(model, ids[:, count : count + 1], cache)
        assert cache.batch.lengths == before
        cache.truncate(count)
    assert set(cache.batch.lengths) == {count}
    got = logits(model, ids[:, count : count + 20], cache)
    torch.testing.assert_close(got, wanted[:, count : count + 20], rtol=0, atol=2e-5)
    torch._dynamo.reset()


def test_a_prompt_that_fails_behind_its_first_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("llama")
    ids, _ = prompt(1, 40)
    wanted, cache = logits(model, ids), tiered(model)
    real = kvpass.Manager.begin

    def fail(self: Any, batch: Any, tokens: int, layers: Any) -> None:
        real(self, batch, tokens, layers)
        if 1 in layers:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("kvpass.runtime.manager.Manager.begin", fail)
        logits(model, ids, cache)
    assert cache.batch.lengths == [40, 0]
    with pytest.raises(CacheStateError, match=r"cache\.truncate\(0\)"):
        logits(model, ids, cache)
    cache.truncate(0)
    torch.testing.assert_close(logits(model, ids, cache), wanted, rtol=0, atol=2e-5)


def test_a_layer_may_be_filled_before_the_next() -> None:
    """And where one of its chunks fails, only that one is given again."""
    model = tiny("llama")
    heads, dim = model.config.num_key_value_heads, model.config.head_dim
    k, v = torch.randn(2, 2, 1, heads, 60, dim).unbind()
    cache = tiered(model)
    for layer in range(2):
        for first in (0, 30):
            part = slice(first, first + 30)
            keys, values = cache.update(k[layer][:, :, part], v[layer][:, :, part], layer)
    assert torch.equal(keys, k[1]) and torch.equal(values, v[1])


@pytest.mark.parametrize("bad", [None, [0.5], ["0"], 3, torch.tensor([0.0])])
def test_indices_of_sequences_are_integers(bad: Any) -> None:
    model = tiny("llama")
    cache = tiered(model)
    logits(model, prompt(2, 20)[0], cache)
    with pytest.raises(ShapeError, match="select"):
        cache.select(bad)
    cache.select(torch.tensor([1, 1]).tolist())
