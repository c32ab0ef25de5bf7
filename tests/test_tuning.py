# SPDX-License-Identifier: Apache-2.0
"""Retention and reading ahead of a family: the pure functions, and the batches that have them."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
import transformers.models.auto.configuration_auto  # the names of all families
from hypothesis import given
from hypothesis import strategies as st

import kvpass
from kvpass import tuning
from kvpass.config import Config
from kvpass.errors import ConfigError, KVPassWarning, ShapeError
from kvpass.runtime.readahead import ReadAhead
from tests.models import compile_with, prompt, tiny
from tests.runtime.harness import Driver

FAMILIES: dict[str, Any] = {
    "optimizations": {
        "llama": {"retention_priority": "layer_depth * 0.8", "prefetch_distance": 3},
        "default": {"retention_priority": "2 - layer"},
    }
}


@given(st.integers(1, 100), st.sampled_from(["llama", "qwen2", "LLaMA", "llama-text"]))
def test_retention_is_the_value_of_each_layer(layers: int, family: str) -> None:
    values = tuning.retention(Config(**FAMILIES), family, layers)
    if family == "qwen2":
        assert values == [2.0 - layer for layer in range(layers)]
    else:
        assert values == pytest.approx([0.8 * layer / layers for layer in range(layers)])
    assert tuning.retention(Config(), family, layers) == [0.0] * layers


def test_a_priority_without_a_value_at_a_layer_is_refused_when_the_cache_is_made() -> None:
    options = {"optimizations": {"default": {"retention_priority": "1 / (layers - 2)"}}}
    with pytest.raises(ConfigError, match="divides by zero at layer 0 of 2"):
        kvpass.TieredCache(tiny("llama").config, 64, **options)
    manager = Driver(**options, layers=3).manager
    manager.tables.take(0)  # fetches what finalizers have returned
    free = len(manager.tables._free)
    with pytest.raises(ConfigError, match="divides by zero"):
        manager.new_batch(1, 2, 64)
    manager.tables.take(0)
    assert len(manager.tables._free) == free, "no rows are lost"


def step(cache: kvpass.TieredCache) -> kvpass.TieredCache:
    k = torch.randn(1, 2, 40, 16)
    for layer in range(len(cache)):
        cache.update(k, k, layer)
    return cache


def test_batches_have_what_their_family_says() -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "a TieredCache is used outside")
        llama = step(kvpass.TieredCache(tiny("llama").config, 64, **FAMILIES))
        own = SimpleNamespace(num_hidden_layers=2)
        other = step(kvpass.TieredCache(own, 64, **FAMILIES, lookahead=1))
        off = step(kvpass.TieredCache(own, 64, prefetch=False))
    assert llama.batch.retention == (0.0, 0.4)
    assert llama.batch.ahead == ReadAhead(3, 4)
    assert other.batch.retention == (2.0, 1.0)
    assert other.batch.ahead == ReadAhead(tuning.PREFETCH_DISTANCE, 1)
    assert off.batch.ahead == ReadAhead(tuning.PREFETCH_DISTANCE, 0)
    llama.select([0, 0])
    assert llama.batch.retention == (0.0, 0.4), "a fork goes on as it was"
    assert llama.batch.ahead == ReadAhead(3, 4)


def test_functional_caches_have_what_their_family_says(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, list[float]]] = []
    real = tuning.tune

    def note(batch: Any, config: Config, family: str) -> None:
        real(batch, config, family)
        seen.append((family, list(batch.retention)))

    monkeypatch.setattr("kvpass.runtime.manager.tune", note)
    for name in ("llama", "gpt2"):
        model = tiny(name)
        compile_with(model, **FAMILIES)
        caches = [transformers.DynamicCache(config=model.config)]
        if name == "llama":
            caches.append(transformers.StaticCache(config=model.config, max_cache_len=64))
        for cache in caches:
            with torch.no_grad():
                model(prompt(1, 8)[0], past_key_values=cache)
    torch._dynamo.reset()
    assert seen == [("llama", [0.0, 0.4])] * 2 + [("gpt2", [2.0, 1.0])]


def test_one_retention_a_layer() -> None:
    batch = Driver(layers=2).batch
    batch.retain([1, 2])
    assert batch.retention == (1, 2)
    with pytest.raises(ShapeError, match="3 retentions of 2 layers"):
        batch.retain([1, 2, 3])


def test_reading_ahead_on_a_gpu_is_said_to_have_no_effect() -> None:
    """Once for the same options, and only where they were set."""
    batch: Any = SimpleNamespace(layers=2, device=torch.device("cuda"), retain=lambda _: None)
    tuning._warn_of_prefetch.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tuning.tune(batch, Config(), "llama")
        tuning.tune(batch, Config(**FAMILIES), "qwen2")
    with pytest.warns(KVPassWarning, match=r"the backend was told otherwise, options="):
        tuning.tune(batch, Config(prefetch=False), "llama")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tuning.tune(batch, Config(prefetch=True), "llama")
        given = Config.load(origin="options= of torch.compile", prefetch=False)
        tuning.tune(batch, given, "llama")
    for options in (FAMILIES, {"lookahead": 2}):
        with pytest.warns(KVPassWarning, match="without effect on a GPU"):
            tuning.tune(batch, Config(**options), "llama")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            tuning.tune(batch, Config(**options), "llama")
    assert not hasattr(batch, "ahead")


@pytest.mark.parametrize(
    ("section", "warned"), [("lama", True), ("lllama", True), ("llama4", False), ("gemma2", False)]
)
def test_a_misspelt_family_is_named_once(section: str, warned: bool) -> None:
    """Names of other models are nobody's mistake, however much alike."""
    tuning._warn_of_misspelt.cache_clear()
    config = Config(optimizations={section: {"retention_priority": "layer_depth"}})
    batch: Any = SimpleNamespace(layers=2, device=torch.device("cpu"), retain=lambda _: None)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        tuning.tune(batch, config, "llama")
        tuning.tune(batch, config, "llama")
    words = f"optimizations.{section} does not hold for this model, whose family is llama"
    assert [words in str(warning.message) for warning in caught] == [True] * warned
