# SPDX-License-Identifier: Apache-2.0
"""SmolLM2 on a GPU with three quarters of its KV cache in pinned host memory."""

from __future__ import annotations

from importlib import resources

import pytest
import torch

import kvpass
import model_zoo
from kvpass.cli import running
from kvpass.errors import DownloadError

pytestmark = [pytest.mark.gpu, pytest.mark.checkpoint]


@pytest.fixture(scope="module")
def loaded() -> model_zoo.LoadedModel:
    try:
        return model_zoo.load("smollm2-135m", device="cuda")
    except DownloadError as error:
        pytest.skip(f"no network here: {error}")


@pytest.mark.parametrize("inner", ["eager", "inductor"])
def test_same_tokens_as_sdpa_with_three_quarters_in_host_memory(loaded, inner):
    text = resources.files("kvpass").joinpath("data/document.txt").read_text(encoding="utf-8")
    prompt = torch.tensor([loaded.tokenizer.encode(text)[:4000]], device="cuda")
    step = running.own_step(loaded.decoder, model_zoo.DenseCache())
    expected = running.decode(step, prompt, 64, keep_logits=True)
    config = loaded.config
    total = 4064 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 8
    cache = kvpass.TieredCache(config, 4064, hot=total // 4, heat_interval=16)
    got = running.decode(
        running.own_step(running.compiled(loaded.decoder, inner), cache),
        prompt,
        64,
        keep_logits=True,
    )
    assert got.tokens == expected.tokens
    for a, b in zip(got.logits, expected.logits, strict=True):
        assert (a - b).abs().max() < 2e-3
    snapshot = cache.snapshot()
    assert snapshot.cold_only_bytes >= 0.7 * snapshot.kv_bytes
    counters = snapshot.counters
    assert counters.stored_blocks > 0
    print(f"{inner}: {snapshot}, {got.tokens_a_second:.1f} against {expected.tokens_a_second:.1f}")
