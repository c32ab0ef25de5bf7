# SPDX-License-Identifier: Apache-2.0
"""kvpass.generate over a cache that holds something: padding, penalties, caches of all kinds."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import kvpass
from kvpass.errors import (
    CacheStateError,
    ConfigError,
    KVPassWarning,
    ShapeError,
    UnsupportedError,
)
from kvpass.generation import reader
from tests.models import compile_with, generate, tiered, tiny

PROMPTS = [[5, 6, 7, 8, 9], [11, 12]]


@pytest.fixture(scope="module")
def models():
    """A plain model, and an equal one that is compiled."""
    torch._dynamo.reset()
    plain, model = tiny("llama"), tiny("llama")
    compile_with(model)
    yield plain, model
    torch._dynamo.reset()


def run(model: Any, prompt: Any, cache: Any, tokens: int = 6, **options: Any) -> kvpass.Generation:
    options.setdefault("eos_token_id", None)
    return kvpass.generate(model, prompt, cache, max_new_tokens=tokens, **options)


def whole(plain, prompts, tokens, **options):
    """What transformers makes of padded prompts in one go."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[1] * (longest - len(row)) + row for row in prompts])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in prompts])
    return generate(plain, ids, mask, tokens, **options).sequences[:, longest:].tolist()


def last(out):
    return [[row[-1]] for row in out.tokens]


def test_padding_is_remembered(models):
    plain, model = models
    want = whole(plain, PROMPTS, 14)
    first = run(model, PROMPTS, tiered(model))
    second = run(model, None, first.cache, 8)
    assert [a + b for a, b in zip(first.tokens, second.tokens, strict=True)] == want
    again = run(model, None, first.cache, 1)  # and on, behind that
    assert again.cache.get_seq_length() == 5 + 14


def test_padding_follows_copies_and_orders(models):
    plain, model = models
    want = whole(plain, PROMPTS, 14)
    first = run(model, PROMPTS, tiered(model))
    fork = copy.deepcopy(first.cache)
    second = run(model, None, fork, 8)
    assert [a + b for a, b in zip(first.tokens, second.tokens, strict=True)] == want
    first.cache.batch_select_indices(torch.tensor([1, 0, 1]))
    third = run(model, None, first.cache, 8)
    tails = [row[6:] for row in want]
    assert third.tokens == [tails[1], tails[0], tails[1]]


def test_a_mask_of_the_user_comes_first(models):
    plain, model = models
    want = whole(plain, PROMPTS, 14)
    first = run(model, PROMPTS, tiered(model))
    mask = torch.ones(2, 11, dtype=torch.long)
    mask[1, :3] = 0
    second = run(model, None, first.cache, 8, attention_mask=mask.tolist())
    assert [a + b for a, b in zip(first.tokens, second.tokens, strict=True)] == want


def test_a_cache_that_was_reset_has_no_padding(models):
    plain, model = models
    first = run(model, PROMPTS, tiered(model))
    first.cache.reset()
    got = run(model, [[5, 6], [7, 8]], first.cache)
    assert got.tokens == whole(plain, [[5, 6], [7, 8]], 6)


def test_padding_of_a_cache_that_others_changed_has_to_be_said(models):
    plain, model = models
    want = whole(plain, PROMPTS, 14)
    first = run(model, PROMPTS, transformers.DynamicCache(config=model.config))
    first.cache.batch_select_indices(torch.tensor([1, 0]))
    with pytest.raises(ShapeError, match=r"was changed since: give attention_mask=, \[B, 10 \+"):
        run(model, last(first), first.cache)
    mask = torch.ones(2, 11, dtype=torch.long)
    mask[0, :3] = 0
    second = run(model, last(first)[::-1], first.cache, 8, attention_mask=mask)
    assert second.tokens == [row[6:] for row in want[::-1]]


@pytest.mark.parametrize("kind", ["tiered", "dynamic", "static"])
def test_a_returned_cache_begins_with_its_last_token(models, kind):
    plain, model = models
    cache = CACHES[kind](model.config)
    first = run(model, [[5, 6, 7]], cache, 6)
    second = run(model, [[20, 21]], cache, 5)
    said = [5, 6, 7, *first.tokens[0], 20, 21]
    assert second.tokens == whole(plain, [said], 5)
    assert int(cache.get_seq_length()) == len(said) + 4
    both = run(model, [[20, 21, 22], [23]], run(model, PROMPTS, None, 6).cache, 4)
    assert len(both.tokens) == 2


@pytest.mark.parametrize("kind", ["tiered", "dynamic"])
def test_tokens_of_others_are_not_taken_for_those_of_before(models, kind):
    """The cache is cut back, fed something else, and is as long as it was."""
    plain, model = models
    cache = CACHES[kind](model.config)
    run(model, [[5, 6, 7]], cache, 6)
    cache.truncate(3) if kind == "tiered" else cache.crop(-5)
    with torch.no_grad():
        model(torch.tensor([[40, 41, 42, 43, 44]]), past_key_values=cache)
    out = run(model, [[45]], cache, 5, repetition_penalty=1.5)
    said = [5, 6, 7, 40, 41, 42, 43, 44, 45]
    again = run(model, [said[-1:]], kvpass_filled(model, said[:-1]), 5, repetition_penalty=1.5)
    assert out.tokens == again.tokens


@pytest.mark.parametrize("kind", ["tiered", "dynamic"])
def test_a_prompt_from_elsewhere_goes_on_too(models, kind):
    plain, model = models
    cache = CACHES[kind](model.config)
    with torch.no_grad():
        model(torch.tensor([[5, 6, 7, 8]]), past_key_values=cache)
    first = run(model, [[9]], cache, 4)
    second = run(model, [[20, 21]], cache, 5)
    third = run(model, None, cache, 3)
    said = [5, 6, 7, 8, 9, *first.tokens[0], 20, 21]
    want = whole(plain, [said], 8)[0]
    assert second.tokens[0] + third.tokens[0] == want
    assert cache.get_seq_length() == len(said) + 7


def test_another_name_for_a_cache_knows_the_same(models):
    _, model = models
    first = run(model, PROMPTS, tiered(model))
    other = copy.copy(first.cache)
    second = run(model, None, other, 4)
    third = run(model, None, first.cache, 4)
    whole_ = run(model, PROMPTS, tiered(model), 14)
    assert [
        a + b + c for a, b, c in zip(first.tokens, second.tokens, third.tokens, strict=True)
    ] == (whole_.tokens)


def test_padding_is_known_behind_an_interrupt(models):
    plain, model = models
    cache = tiered(model)

    def stop(index, tokens):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(model, PROMPTS, cache, on_tokens=stop)
    assert cache.get_seq_length() == 5
    want = whole(plain, PROMPTS, 6)
    again = run(model, [[row[0]] for row in want], cache, 5)
    assert again.tokens == [row[1:] for row in want]


def kvpass_filled(model, ids):
    cache = tiered(model)
    with torch.no_grad():
        model(torch.tensor([ids]), past_key_values=cache)
    return cache


def test_a_cache_of_ones_own_is_for_what_the_model_takes(models):
    _, model = models
    out = run(model, PROMPTS[:1], None, 4)
    assert out.cache.max_tokens == model.config.max_position_embeddings
    assert len(run(model, [[1, 2]], out.cache, 30).tokens[0]) == 30


def test_options_without_effect_are_named(models):
    _, model = models
    for options in ({"top_k": 5}, {"top_p": 0.5}, {"generator": torch.Generator()}):
        with pytest.warns(KVPassWarning, match="no part without a temperature"):
            run(model, PROMPTS[:1], tiered(model), 1, **options)
    for options in (
        {"stop": 5},
        {"stop": [""]},
        {"on_text": 5},
        {"on_tokens": 5},
        {"generator": 5},
    ):
        with pytest.raises(ConfigError, match=f"{next(iter(options))} = "):
            run(model, PROMPTS[:1], tiered(model), 1, **options)
    assert run(model, PROMPTS[:1], tiered(model), 1, stop=None).reasons == ["length"]


@pytest.mark.parametrize("kind", ["tiered", "dynamic"])
def test_a_penalty_counts_what_was_generated_before(models, kind):
    plain, model = models
    want = whole(plain, PROMPTS[:1], 16, repetition_penalty=1.7)
    cache = tiered(model) if kind == "tiered" else transformers.DynamicCache(config=model.config)
    first = run(model, PROMPTS[:1], cache, repetition_penalty=1.7)
    second = run(model, None, first.cache, 10, repetition_penalty=1.7)
    assert first.tokens[0] + second.tokens[0] == want[0]


class Own:
    """A cache with no more than models need."""

    def __init__(self) -> None:
        self.layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def update(self, k, v, layer, *args):
        if layer in self.layers:
            old = self.layers[layer]
            k, v = torch.cat([old[0], k], 2), torch.cat([old[1], v], 2)
        self.layers[layer] = k, v
        return k, v

    def get_seq_length(self, layer=0):
        return self.layers[layer][0].shape[2] if layer in self.layers else 0

    def get_mask_sizes(self, count, layer=0):
        return self.get_seq_length() + count, 0

    def get_query_offset(self, layer=0):
        return self.get_seq_length(layer)

    is_compileable = False


CACHES = {
    "tiered": lambda config: kvpass.TieredCache(config, 64),
    "dynamic": lambda config: transformers.DynamicCache(config=config),
    "sliding": lambda config: transformers.DynamicCache(config=config),
    "static": lambda config: transformers.StaticCache(config=config, max_cache_len=64),
    "own": lambda config: Own(),
}


@pytest.mark.parametrize("kind", CACHES)
def test_a_text_that_ends_early_leaves_what_it_is_made_of(monkeypatch, kind):
    """Also where the host reads tokens late, as beside a GPU: those behind are taken off again."""
    model = tiny("mistral" if kind == "sliding" else "llama", **(
        {"sliding_window": 8} if kind == "sliding" else {}
    ))  # fmt: skip
    late: list[torch.Tensor] = []

    def send(self, tokens):
        late.append(tokens)
        while len(late) > self._ahead:
            self._read(late.pop(0))

    def finish(self, real=reader.Reader.finish):
        while late and not self.done():
            self._read(late.pop(0))
        late.clear()
        real(self)

    monkeypatch.setattr(reader.Reader, "send", send)
    monkeypatch.setattr(reader.Reader, "finish", finish)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager")
    plain = run(compiled, PROMPTS[:1], transformers.DynamicCache(config=model.config), 12)
    end = plain.tokens[0][4]
    at = plain.tokens[0].index(end)
    cache = CACHES[kind](model.config)
    out = run(compiled, PROMPTS[:1], cache, 12, eos_token_id=end)
    assert out.tokens[0] == plain.tokens[0][: at + 1]
    assert int(cache.get_seq_length()) == 5 + at
    more = run(compiled, last(out) if kind == "own" else None, cache, 12 - at - 1)
    assert more.tokens[0] == plain.tokens[0][at + 1 :]


def test_somebody_who_changes_the_cache_meanwhile_is_noticed(models):
    _, model = models
    cache = tiered(model)

    def nested(index, tokens):
        run(model, [[3]], cache, 1)

    with pytest.raises(CacheStateError, match="something else changed it while kvpass.generate"):
        run(model, PROMPTS[:1], cache, on_tokens=nested)
    cache = tiered(model)
    with pytest.raises(CacheStateError, match="give it a cache of its own"):
        run(model, PROMPTS[:1], cache, on_tokens=lambda *_: cache.truncate(3))


def test_a_model_that_was_not_compiled_is_freed():
    torch._dynamo.reset()
    model = tiny("llama")
    run(model, PROMPTS[:1], tiered(model), 2)
    other = copy.deepcopy(model)
    assert run(other, PROMPTS[:1], tiered(other), 2).tokens == (
        run(model, PROMPTS[:1], tiered(model), 2).tokens
    )
    gone = weakref.ref(model)
    assert set(model.state_dict()) == set(tiny("llama").state_dict())
    del model
    torch._dynamo.reset()
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_no_numbers(value, temperature):
    class Broken(nn.Module):
        def forward(self, input_ids, cache):
            cache.update(
                torch.zeros(1, 2, input_ids.shape[1], 16),
                torch.zeros(1, 2, input_ids.shape[1], 16),
                0,
            )
            logits = torch.zeros(1, input_ids.shape[1], 8)
            if cache.get_seq_length() > 3:
                logits[..., 3] = value
                if value < 0:
                    logits[:] = value
            return logits

    torch._dynamo.reset()
    broken = torch.compile(Broken(), backend="eager")
    if temperature == 0.0 and value == value:
        out = run(broken, [[1, 2]], Own(), 4, temperature=temperature)
        assert len(out.tokens[0]) == 4  # one infinite logit is the likeliest
        return
    with pytest.raises(UnsupportedError, match="logits for new token 2 of sequence 0 are NaN or i"):
        run(broken, [[1, 2]], Own(), 4, temperature=temperature)
