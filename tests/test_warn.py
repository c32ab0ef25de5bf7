# SPDX-License-Identifier: Apache-2.0
"""Warnings and errors of options as a user meets them: at their line, and with what to write."""

from __future__ import annotations

import warnings

import pytest
import torch
from transformers import DynamicCache

import kvpass
from kvpass.errors import ConfigError, KVPassWarning
from kvpass.runtime.memory import total_memory
from kvpass.sizes import format_size
from tests.models import compile_with, prompt, tiered, tiny


def test_a_warning_points_at_the_line_of_the_caller():
    model = tiny("llama")
    cache = tiered(model)
    ids, _ = prompt(1, 5)
    with warnings.catch_warnings(record=True) as caught, torch.no_grad():
        warnings.simplefilter("always")
        model(ids, past_key_values=cache)  # uncompiled
    (found,) = [item for item in caught if issubclass(item.category, KVPassWarning)]
    assert found.filename == __file__
    assert "outside a graph" in str(found.message)


def test_a_warning_of_a_compiled_model_does_too():
    model = tiny("llama")
    compile_with(model, hot="1KiB")
    ids, _ = prompt(1, 5)
    with warnings.catch_warnings(record=True) as caught, torch.no_grad():
        warnings.simplefilter("always")
        model(ids)
    files = [item.filename for item in caught if issubclass(item.category, KVPassWarning)]
    assert files
    assert set(files) == {__file__}


def test_hot_larger_than_all_memory_is_refused():
    model = tiny("llama")
    size = total_memory(torch.device("cpu")) + 1
    compile_with(model, hot=size)
    ids, _ = prompt(1, 5)
    words = f"more than the {format_size(size - 1)} of memory of cpu"
    with torch.no_grad(), pytest.raises(ConfigError, match=words):
        model(ids, past_key_values=DynamicCache(config=model.config))
    # Of a TieredCache it is known when it is made, unless a GPU has as much.
    with torch.no_grad(), pytest.raises(ConfigError, match=words):
        model(ids, past_key_values=kvpass.TieredCache(model.config, 64, hot=size))
    with pytest.raises(ConfigError, match="hot = 900 TiB is more than the .* of memory of"):
        kvpass.TieredCache(model.config, 64, hot="900TiB")


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("resident_tokens", -1, "write at least 0"),
        ("gpu_threshold", 0, "write more than 0"),
        ("gpu_threshold", 1.5, "write at most 1"),
        ("heat_interval", 0, "write at least 1"),
        ("inner", "tvm", "write one of 'auto', 'inductor', 'aot_eager' or 'eager'"),
        ("hot", "64M", "did you mean MiB?"),
        ("hot", "64k", "did you mean KiB?"),
        ("hot", "64x", "unknown unit 'x';"),
    ],
)
def test_what_to_write_instead(option, value, words):
    with pytest.raises(ConfigError) as caught:
        kvpass.Config(**{option: value})
    assert words in str(caught.value)
    assert repr(value) in str(caught.value)
    assert "Input should" not in str(caught.value)
