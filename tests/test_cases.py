# SPDX-License-Identifier: Apache-2.0
"""Failures that other caches have had, each with numbers that can be checked by hand."""

from __future__ import annotations

import copy
import math
import threading

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache

import kvpass
from kvpass.errors import CapacityError, KVPassWarning, ShapeError
from kvpass.graph.report import observed
from tests.models import OPTIONS, prompt, tiered, tiny

WIDTH = 16


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Layers:
    """The part of a config that a TieredCache needs."""

    num_hidden_layers = 1


class Alibi(nn.Module):
    """Attention with a bias of ``slope * (key position - query position)``."""

    def __init__(self, slopes: Tensor) -> None:
        super().__init__()
        self.register_buffer("slopes", slopes)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, cache: kvpass.TieredCache) -> Tensor:
        past = cache.get_seq_length()
        k, v = cache.update(k, v, 0)
        total, n = k.shape[2], q.shape[2]
        keys = torch.arange(total)
        queries = torch.arange(n) + past
        distance = (keys[None, :] - queries[:, None]).to(q.dtype)
        scores = q @ k.transpose(-1, -2) / math.sqrt(WIDTH)
        scores = scores + self.slopes[None, :, None, None] * distance
        scores = scores.masked_fill(keys[None, :] > queries[:, None], -math.inf)
        return torch.softmax(scores, -1) @ v


def compiled(module, **options):
    return torch.compile(
        module, backend=kvpass.backend, options={"inner": "eager"} | OPTIONS | options
    )


def cache_of(tokens: int = 400, **options) -> kvpass.TieredCache:
    return kvpass.TieredCache(Layers(), tokens, **OPTIONS | options)


def test_b10_alibi_adds_its_bias_in_decode_too():
    # slope ln 2, K = 0, V = 0, 1, 2: weights 1/7, 2/7, 4/7
    module = compiled(Alibi(torch.tensor([math.log(2.0)])))
    reports = []
    with torch.no_grad(), observed(reports.append):
        cache = cache_of()
        zero = torch.zeros(1, 1, 1, WIDTH)
        for value in (0.0, 1.0, 2.0):
            out = module(zero, zero, torch.full_like(zero, value), cache)
    assert all(report.rewritten == 1 for report in reports)
    assert torch.allclose(out, torch.full_like(out, 10 / 7), atol=1e-6)


def test_b10_alibi_token_by_token_equals_one_prompt_with_old_blocks_cold():
    torch.manual_seed(0)
    slopes = 2.0 ** -torch.arange(1, 9, dtype=torch.float32)
    module = compiled(Alibi(slopes))
    q, k, v = (torch.randn(2, 8, 130, WIDTH) for _ in range(3))
    with torch.no_grad():
        whole = module(q, k, v, cache_of(hot="64MiB"))
        cache = cache_of(hot=1)
        parts = [module(*(x[:, :, :100] for x in (q, k, v)), cache)]
        for i in range(100, 130):
            parts.append(module(*(x[:, :, i : i + 1] for x in (q, k, v)), cache))
        snapshot = cache.snapshot()
    assert snapshot.cold_only_bytes > 0
    assert (torch.cat(parts, 2) - whole).abs().max() < 1e-5


def filled(tokens: int) -> tuple[kvpass.TieredCache, Tensor]:
    cache = cache_of(hot=1)
    k = torch.arange(tokens, dtype=torch.float32).view(1, 1, -1, 1).expand(1, 1, -1, WIDTH)
    cache.update(k, k, 0)
    return cache, k


def test_b29_crop_keeps_removes_and_appends_at_the_right_place():
    for left, expected in ((0, 0), (7, 3), (2, 2)):
        cache, _ = filled(3)
        cache.truncate(left)
        assert cache.get_seq_length() == expected
    cache, k = filled(3)
    cache.truncate(2)
    keys, _ = cache.update(torch.full((1, 1, 1, WIDTH), 9.0), torch.zeros(1, 1, 1, WIDTH), 0)
    assert keys[0, 0, :, 0].tolist() == [0.0, 1.0, 9.0]


def test_b29_crop_inside_a_cold_block_that_another_cache_shares():
    cache, k = filled(100)
    cache.manager.place(cache.batch, lambda *_: False)
    other = copy.deepcopy(cache)
    cache.truncate(45)  # in the middle of the second block of 32
    keys, _ = cache.update(torch.full((1, 1, 2, WIDTH), -5.0), torch.zeros(1, 1, 2, WIDTH), 0)
    assert torch.equal(keys[:, :, :45], k[:, :, :45])
    assert (keys[:, :, 45:] == -5.0).all()
    assert torch.equal(other.read(0)[0], k)


def test_b29_crop_frees_blocks():
    cache, _ = filled(320)
    before = cache.snapshot()
    cache.truncate(32)
    after = cache.snapshot()
    assert before.kv_bytes == 10 * after.kv_bytes
    assert after.hot_used + after.cold_used < before.hot_used + before.cold_used


def test_b34_positions_go_on_when_old_blocks_have_left_the_hot_tier():
    model = tiny("llama")
    ids, _ = prompt(1, 300)
    with torch.no_grad():
        expected = model(ids).logits[:, -1]
        cache = tiered(model, hot=1)
        module = compiled(model)
        module(input_ids=ids[:, :299], past_key_values=cache)
        assert cache.snapshot().cold_only_bytes > 0
        assert cache.get_seq_length() == 299
        got = module(input_ids=ids[:, 299:], past_key_values=cache).logits[:, -1]
    assert cache.get_seq_length() == 300
    assert (got - expected).abs().max() < 1e-4


def test_b35_a_prompt_touches_no_other_sequence():
    """Prompts of lengths off the block size leave other caches of the manager as they were."""
    model = tiny("llama")
    module = compiled(model)
    first, second = prompt(1, 45, seed=3)[0], prompt(1, 5, seed=4)[0]
    with torch.no_grad():
        expected = model(torch.cat((first, torch.tensor([[7]])), 1)).logits[:, -1]
        one, two = DynamicCache(config=model.config), DynamicCache(config=model.config)
        module(input_ids=first, past_key_values=one)
        before = [layer.keys.clone() for layer in one.layers]
        for _ in range(3):
            two = DynamicCache(config=model.config)
            module(input_ids=second, past_key_values=two)
        assert all(
            torch.equal(layer.keys.clone(), old)
            for layer, old in zip(one.layers, before, strict=True)
        )
        assert two.get_seq_length() == 5
        got = module(input_ids=torch.tensor([[7]]), past_key_values=one).logits[:, -1]
    assert (got - expected).abs().max() < 1e-4


def test_b62_no_tier_is_an_input_of_the_graph():
    """A pool that is an input may be copied whole at every step."""
    model = tiny("llama")
    sizes: list[int] = []

    def inner(gm, inputs):
        sizes.extend(x.numel() * x.element_size() for x in inputs if isinstance(x, Tensor))
        return gm.forward

    weights = max(p.numel() * p.element_size() for p in model.parameters())
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr("kvpass.backends.compile_inner", lambda gm, inputs, config: inner(gm, inputs))
        cache = tiered(model, max_tokens=4000, hot="8MiB")
        module = compiled(model)
        for tokens in (1500, 1, 1):
            module(input_ids=torch.ones(1, tokens, dtype=torch.int64), past_key_values=cache)
    assert cache.snapshot().kv_bytes > 8 * weights
    assert max(sizes) <= weights


def test_b64_threads_with_a_cache_each_get_serial_results():
    model = tiny("llama")
    module = compiled(model)

    def decode(seed: int) -> list[int]:
        ids = prompt(1, 20 + seed, seed=seed)[0]
        cache, tokens = tiered(model, hot=1), []
        with torch.no_grad():
            for _ in range(25):
                logits = module(input_ids=ids, past_key_values=cache).logits[:, -1]
                ids = logits.argmax(-1, keepdim=True)
                tokens.append(int(ids))
        return tokens

    expected = [decode(seed) for seed in range(4)]
    got: dict[int, list[int]] = {}
    threads = [
        threading.Thread(target=lambda seed=seed: got.update({seed: decode(seed)}))
        for seed in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [got.get(seed) for seed in range(4)] == expected


def test_b65_a_cache_that_is_full_says_so_and_stays_usable():
    model = tiny("llama")
    module = compiled(model)
    cache = tiered(model, max_tokens=64)
    ids = prompt(1, 64)[0]
    with torch.no_grad():
        module(input_ids=ids[:, :60], past_key_values=cache)
        with pytest.raises(CapacityError, match="max_tokens=64"):
            module(input_ids=ids[:, :8], past_key_values=cache)
        assert cache.get_seq_length() == 60
        got = module(input_ids=ids[:, 60:], past_key_values=cache).logits[:, -1]
        expected = model(ids).logits[:, -1]
    assert (got - expected).abs().max() < 1e-4


def test_a_cache_of_another_model_says_what_to_pass():
    model = tiny("llama")
    cache = kvpass.TieredCache(tiny("llama", num_hidden_layers=1).config, 64, **OPTIONS)
    with (
        torch.no_grad(),
        pytest.warns(KVPassWarning, match="outside a graph"),
        pytest.raises(ShapeError, match=r"layer 1 of a cache made for 1 layers.*config of the"),
    ):
        model(prompt(1, 5)[0], past_key_values=cache)
