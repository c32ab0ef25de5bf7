# SPDX-License-Identifier: Apache-2.0
"""Static buffers on a GPU: their length is in a tensor there, and their memory is given back."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kvpass
from kvpass.graph.report import observed
from model_zoo.architectures import ARCHITECTURES
from model_zoo.forms import gpt_fast

pytestmark = pytest.mark.gpu
transformers = pytest.importorskip("transformers")
OPTIONS = {"block_size": 32, "resident_tokens": 32}


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> None:
    torch._dynamo.reset()


def greedy(model: Any, cache: Any, ids: torch.Tensor, steps: int) -> tuple[list[Any], torch.Tensor]:
    logits = []
    with torch.no_grad():
        for _ in range(steps):
            logits.append(model(input_ids=ids, past_key_values=cache).logits[:, -1])
            ids = logits[-1].argmax(-1)[:, None]
    return logits, ids


@pytest.mark.parametrize("inner", ["eager", "inductor"])
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2"])
def test_static_cache_equals_uncompiled(name, inner):
    model = ARCHITECTURES[name].build("sdpa").to("cuda")
    plain = ARCHITECTURES[name].build("sdpa").to("cuda")
    model.compile(backend=kvpass.backend, options={"inner": inner, "hot": "64KiB", **OPTIONS})
    caches = [transformers.StaticCache(config=model.config, max_cache_len=256) for _ in range(2)]
    reports = []
    with observed(reports.append):
        for tokens in (70, 5, 1):  # turns of a dialogue; the first fills blocks
            ids = torch.randint(3, 90, (2, tokens), device="cuda")
            got, _ = greedy(model, caches[0], ids, 20)
            expected, _ = greedy(plain, caches[1], ids, 20)
            for a, b in zip(got, expected, strict=True):
                assert (a - b).abs().max() < 1e-4
    assert all(report.rewritten == len(report.sites) for report in reports)
    keys = caches[0].layers[0].keys
    assert type(keys).__name__ == "KVHandle"
    assert (keys.dense() - caches[1].layers[0].keys).abs().max() < 1e-5


def test_a_step_does_not_wait_to_read_the_length():
    model = ARCHITECTURES["llama"].build("sdpa").to("cuda")
    model.compile(backend=kvpass.backend, options={"inner": "eager", "hot": "64MiB"})
    cache = transformers.StaticCache(config=model.config, max_cache_len=512)
    _, ids = greedy(model, cache, torch.randint(3, 90, (1, 20), device="cuda"), 3)
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.no_grad():
            for _ in range(8):
                logits = model(input_ids=ids, past_key_values=cache).logits
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert logits.isfinite().all()
    assert int(cache.layers[0].cumulative_length) == 20 + 2 + 8


@pytest.mark.parametrize("place", ["cuda", "meta"])
def test_released_buffers_take_no_memory(place):
    config = gpt_fast.ModelArgs()
    model, plain = (gpt_fast.Transformer(config).eval().to("cuda") for _ in range(2))
    plain.load_state_dict(model.state_dict())
    tokens = 1 << 14
    model.setup_caches(1, tokens)
    plain.setup_caches(1, 256)
    names = ("*.k_cache", "*.v_cache")
    if place == "meta":
        for layer in model.layers:
            kv = layer.attention.kv_cache
            kv.k_cache, kv.v_cache = kv.k_cache.to("meta"), kv.v_cache.to("meta")
    held = torch.cuda.memory_allocated()
    freed = kvpass.release_buffers(model, *names)
    size = tokens * config.n_local_heads * config.head_dim * 4
    assert sum(freed.values()) == (0 if place == "meta" else 4 * size)
    assert held - torch.cuda.memory_allocated() >= sum(freed.values())
    compiled = torch.compile(
        model, backend=kvpass.backend, options={"inner": "eager", "hot": "64KiB", **OPTIONS}
    )
    reports = []
    ids = torch.randint(3, 90, (1, 200), device="cuda")
    with torch.no_grad(), observed(reports.append):
        for first, count in ((0, 150), (150, 1), (151, 1), (152, 7), (159, 1), (100, 1)):
            at = torch.arange(first, first + count, device="cuda")
            step = ids[:, first : first + count]
            got, expected = compiled(step, at), plain(step, at)
            assert (got - expected).abs().max() < 1e-4
    assert all(report.rewritten == 2 for report in reports)
