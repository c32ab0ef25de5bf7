# SPDX-License-Identifier: Apache-2.0
"""Programs whose caches are filled in ways a rewrite could lose: always the tokens of eager."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

import kvpass
from kvpass.graph.report import observed
from tests.models import OPTIONS, compile_with, prompt, tiered, tiny


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Config:
    num_hidden_layers = 3


class Layer(torch.nn.Module):
    """Attention over a cache; ``local`` computes the prompt from the new keys alone."""

    def __init__(self, index: int, local: bool = False) -> None:
        super().__init__()
        self.index = index
        self.local = local
        self.qkv = torch.nn.Linear(32, 96)

    def forward(self, x, cache, mask=None):
        q, k, v = (y.unflatten(-1, (2, 16)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        keys, values = cache.update(k, v, self.index)
        if self.local and x.shape[1] > 1:
            keys, values = k, v
        n, total = q.shape[2], keys.shape[2]
        if mask is None:
            seen = torch.arange(total)[None] <= torch.arange(n)[:, None] + (total - n)
            out = F.scaled_dot_product_attention(q, keys, values, attn_mask=seen)
        else:
            out = mask(q, keys, values)
        return x + out.transpose(1, 2).flatten(2)


def stack(local: bool = False, count: int = 3) -> list[Layer]:
    torch.manual_seed(0)
    return [Layer(i, local).eval().requires_grad_(False) for i in range(count)]


def cache() -> kvpass.TieredCache:
    return kvpass.TieredCache(Config(), 300, **OPTIONS)


class Dense:
    def __init__(self) -> None:
        self.kv = {}

    def update(self, k, v, layer):
        if layer in self.kv:
            k, v = torch.cat((self.kv[layer][0], k), 2), torch.cat((self.kv[layer][1], v), 2)
        self.kv[layer] = (k, v)
        return k, v


def run_both(function, calls, inner="aot_eager"):
    """Results of eager with a dense cache, and compiled with a TieredCache."""
    compiled = torch.compile(function, backend=kvpass.backend, options={"inner": inner} | OPTIONS)
    reports = []
    with torch.no_grad(), observed(reports.append):
        dense, ours = Dense(), cache()
        expected = [function(x, dense) for x in calls]
        got = [compiled(x, ours) for x in calls]
    return expected, got, reports


def inputs(*tokens: int):
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(2, n, 32, generator=generator) for n in tokens]


def same(expected, got) -> None:
    for a, b in zip(expected, got, strict=True):
        if a is not None:
            assert (a - b).abs().max() < 1e-5


@pytest.mark.parametrize("inner", ["eager", "aot_eager", "inductor"])
def test_a_prompt_computed_from_the_new_keys_still_fills_the_cache(inner):
    layers = stack(local=True)

    def step(x, cache):
        for layer in layers:
            x = layer(x, cache)
        return x

    expected, got, _ = run_both(step, inputs(40, 1, 1), inner)
    same(expected, got)


@pytest.mark.parametrize("inner", ["eager", "aot_eager", "inductor"])
def test_a_prompt_whose_output_nobody_needs_still_fills_the_cache(inner):
    layers = stack()

    def step(x, cache):
        n = x.shape[1]
        for layer in layers:
            x = layer(x, cache)
        return None if n > 1 else x

    expected, got, reports = run_both(step, inputs(40, 1, 1), inner)
    same(expected, got)
    assert reports[-1].rewritten == 3


def test_the_same_with_a_transformers_model_and_inductor():
    model = tiny("llama")
    ids, _ = prompt(1, 41)
    with torch.no_grad():
        expected = model(ids).logits[:, -1]
        compile_with(model, "inductor")
        ours = tiered(model)

        @torch.compile(backend=kvpass.backend, options={"inner": "inductor"} | OPTIONS)
        def read(tokens):
            model.forward(tokens, past_key_values=ours)

        read(ids[:, :40])
        got = model(ids[:, 40:], past_key_values=ours).logits[:, -1]
    assert (got - expected).abs().max() < 1e-5


def test_two_steps_in_one_graph():
    layers = stack()

    def two(x, cache):
        for part in (x[:, :-1], x[:, -1:]):
            y = part
            for layer in layers:
                y = layer(y, cache)
        return y

    expected, got, reports = run_both(two, inputs(40, 2, 2), "eager")
    same(expected, got)
    assert any("more than once" in site.reason for report in reports for site in report.sites)


def test_layers_that_share_an_index():
    torch.manual_seed(0)
    layers = [Layer(i).eval().requires_grad_(False) for i in (0, 0, 1)]

    def step(x, cache):
        for layer in layers:
            x = layer(x, cache)
        return x

    expected, got, _ = run_both(step, inputs(40, 1, 1), "eager")
    same(expected, got)


@pytest.mark.parametrize("swap", [False, True])
def test_layers_with_different_numbers_of_new_tokens(swap):
    layers = stack(count=2)

    def step(x, cache):
        short, full = (layers[0], layers[1]) if swap else (layers[1], layers[0])
        x = full(x, cache)
        return short(x[:, -1:], cache) if not swap else short(x[:, -1:], cache)

    expected, got, _ = run_both(step, inputs(40, 5, 1, 3))
    same(expected, got)


def test_layers_with_different_batches():
    layers = stack(count=2)

    def step(x, caches):
        return layers[0](x, caches[0]).sum() + layers[1](x[:1], caches[1]).sum()

    compiled = torch.compile(step, backend=kvpass.backend, options={"inner": "eager"} | OPTIONS)
    with torch.no_grad():
        dense, ours = (Dense(), Dense()), (cache(), cache())
        for x in inputs(40, 1, 1):
            assert (step(x, dense) - compiled(x, ours)).abs() < 1e-3


def test_two_models_with_prompts_of_different_length_in_one_graph():
    one, two = tiny("llama"), tiny("qwen3")

    def both(a, b, past_a, past_b):
        x = one(a, past_key_values=past_a, use_cache=True)
        y = two(b, past_key_values=past_b, use_cache=True)
        return x.logits, y.logits, x.past_key_values, y.past_key_values

    compiled = torch.compile(both, backend=kvpass.backend, options={"inner": "eager"} | OPTIONS)
    a, b = prompt(1, 40)[0], prompt(3, 25)[0]
    with torch.no_grad():
        *expected, pa, pb = both(a, b, None, None)
        *got, qa, qb = compiled(a, b, None, None)
        same(expected, got)
        for _ in range(3):
            *expected, pa, pb = both(a[:, :1], b[:, :1], pa, pb)
            *got, qa, qb = compiled(a[:, :1], b[:, :1], qa, qb)
            same(expected, got)


def shaped_masks():
    def rows(q, k):
        return torch.arange(q.shape[2], device=q.device)[:, None] + (k.shape[2] - q.shape[2])

    def band(q, k):
        distance = rows(q, k) - torch.arange(k.shape[2], device=q.device)[None]
        return (distance >= 0) & (distance < 45)

    def hidden(q, k):
        hide = torch.arange(k.shape[2], device=q.device) % 7 == 3
        return hide[None, None, None].expand(2, 1, 1, -1)

    def sdpa(mask):
        return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=mask(q, k))

    def chain(change):
        def attention(q, k, v):
            return F.softmax(change(q @ k.transpose(2, 3) * 0.25, q, k), -1) @ v

        return attention

    floats = torch.finfo(torch.float32).min
    return {
        "2-D bool": sdpa(band),
        "2-D float": sdpa(lambda q, k: torch.where(band(q, k), 0.0, -math.inf)),
        "3-D": sdpa(lambda q, k: band(q, k)[None].expand(2, -1, -1)),
        "keys only": sdpa(lambda q, k: (1.0 - (~hidden(q, k)).float()) * floats),
        "keys only, bool": sdpa(lambda q, k: ~hidden(q, k)),
        "queries only": sdpa(lambda q, k: (rows(q, k) * 0.1).view(1, 1, -1, 1)),
        "filled by a 2-D mask": chain(lambda s, q, k: s.masked_fill(~band(q, k), -math.inf)),
        "filled by a negated integer": chain(
            lambda s, q, k: s.masked_fill(torch.logical_not(band(q, k).long()), -math.inf)
        ),
        "chosen by a negated float": chain(
            lambda s, q, k: torch.where(torch.logical_not(band(q, k).float()), -math.inf, s)
        ),
    }


@pytest.mark.parametrize("name", shaped_masks())
def test_masks_of_every_shape(name):
    """More than one query tile (256) and block, so that a wrong broadcast shows."""
    layer = stack(count=1)[0]
    attention = shaped_masks()[name]

    def step(x, cache):
        return layer(x, cache, attention)

    expected, got, _ = run_both(step, inputs(280, 1, 3, 1), "eager")
    same(expected, got)


def test_autocast_costs_no_precision():
    layer = stack(count=1)[0].to(torch.bfloat16)

    def step(x, cache):
        return layer(x * 4, cache)

    compiled = torch.compile(step, backend=kvpass.backend, options={"inner": "eager"} | OPTIONS)
    calls = [x.to(torch.bfloat16) for x in inputs(40, 5, 1)]
    with torch.no_grad():
        plain = cache()
        expected = [compiled(x, plain) for x in calls]
        mixed = cache()
        with torch.autocast("cpu", torch.bfloat16):
            got = [compiled(x, mixed) for x in calls]
    for a, b in zip(expected, got, strict=True):
        assert (a.float() - b.float()).abs().max() < 0.02


def test_an_attention_that_is_the_graph_output_is_replaced_too():
    def attention(q, k, v, past):
        k, v = torch.cat((past[0], k), 2), torch.cat((past[1], v), 2)
        return F.scaled_dot_product_attention(q, k, v), (k, v)

    graphs = []

    def spy(gm, example_inputs):
        run = kvpass.backend(gm, example_inputs, options={"inner": "eager"} | OPTIONS)
        graphs.append(run)
        return run

    compiled = torch.compile(attention, backend=spy)
    q, past = torch.randn(1, 2, 1, 16), (torch.randn(1, 2, 9, 16), torch.randn(1, 2, 9, 16))
    with torch.no_grad():
        expected, _ = attention(q, q, q, past)
        got, kept = compiled(q, q, q, past)
    assert (expected - got).abs().max() < 1e-6
    code = graphs[0].inner.__self__.code
    assert "kvpass.attend" in code
    assert "scaled_dot_product" not in code and "torch.cat" not in code
    assert type(kept[0]).__name__ == "KVHandle"


def ramp(x):
    """Of the last two axes; the same for all tokens would be lost in the softmax."""
    return torch.full_like(x, 0.1).cumsum(-1).cumsum(-2)


ALIASED = {
    "unbind": lambda x: x.unbind(1)[0].mul_(-2.0),
    "unbind of the last axis": lambda x: torch.unbind(x, dim=3)[1].mul_(-2.0),
    "movedim": lambda x: x.movedim(1, 0)[1].mul_(-2.0),
    "moveaxis": lambda x: torch.moveaxis(x, -1, 0)[0].mul_(-3.0),
    "foreach": lambda x: torch._foreach_add_([x], [ramp(x)]),
    "foreach of views": lambda x: torch._foreach_add_([x[..., 1:]], [ramp(x[..., 1:])]),
    "foreach of unbind": lambda x: torch._foreach_add_(x.unbind(1), [ramp(y) for y in x.unbind(1)]),
    "foreach of another": lambda x: torch._foreach_mul_([x.new_ones(2), x.movedim(3, 0)[0]], -2.0),
}


def written_to(write, target):
    """An attention whose scores or keys are written to by way of something else."""

    def attention(q, k, v):
        if target == "keys":
            write(k)
        scores = q @ k.transpose(2, 3) * 0.25
        if target == "scores":
            write(scores)
        return F.softmax(scores, -1) @ v

    return attention


@pytest.mark.parametrize("target", ["scores", "keys"])
@pytest.mark.parametrize("name", ALIASED)
@pytest.mark.filterwarnings("ignore:a TieredCache is used outside")
def test_a_write_through_an_alias_is_not_lost(name, target):
    """Uncompiled, a TieredCache gives copies: a write to the keys lasts for one step."""
    layer = stack(count=1)[0]
    attention, unwritten = written_to(ALIASED[name], target), written_to(lambda x: None, target)

    def step(x, cache):
        return layer(x, cache, attention)

    compiled = torch.compile(step, backend=kvpass.backend, options={"inner": "eager"} | OPTIONS)
    calls, plain, uncompiled, ours = inputs(40, 1), cache(), cache(), cache()
    with torch.no_grad():
        expected = [step(x, uncompiled) for x in calls]
        same(expected, [compiled(x, ours) for x in calls])
        for x, written in zip(calls, expected, strict=True):
            assert (layer(x, plain, unwritten) - written).abs().max() > 1e-3


@pytest.mark.parametrize("target", ["scores", "keys"])
@pytest.mark.parametrize("name", ALIASED)
def test_a_write_through_an_alias_of_concatenated_tuples_is_not_lost(name, target):
    attention = written_to(ALIASED[name], target)

    def step(q, k, v, past):
        k, v = torch.cat((past[0], k), 2), torch.cat((past[1], v), 2)
        return attention(q, k, v), (k, v)

    compiled = torch.compile(step, backend=kvpass.backend, options={"inner": "eager"} | OPTIONS)
    past = got_past = (torch.randn(2, 2, 9, 16), torch.randn(2, 2, 9, 16))
    with torch.no_grad():
        for tokens in (5, 1, 1):
            q, k, v = torch.randn(3, 2, 2, tokens, 16)
            expected, past = step(q, k, v, past)
            got, got_past = compiled(q, k, v, got_past)
            same([expected, *past], [got, *(x + 0 for x in got_past)])


@pytest.mark.parametrize("beta", [0, -0.5, -2])
@pytest.mark.parametrize("content", [math.nan, math.inf, "numbers"])
def test_baddbmm_of_every_beta(beta, content):
    """With beta 0 the input is not read, not even where it is NaN; a negative one is a factor."""
    layer = stack(count=1)[0]

    def attention(q, k, v):
        a, b, c = q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)
        bias = torch.sin(torch.arange(k.shape[2])) * q[..., 0].flatten(0, 1)[..., None]
        if content != "numbers":
            bias = torch.where(bias > 0.5, content, bias)
        scores = torch.baddbmm(bias, a, b.transpose(1, 2), beta=beta, alpha=0.25)
        return torch.bmm(F.softmax(scores, -1), c).unflatten(0, q.shape[:2])

    def step(x, cache):
        return layer(x, cache, attention)

    expected, got, reports = run_both(step, inputs(40, 1, 3), "eager")
    for a, b in zip(expected, got, strict=True):
        assert torch.allclose(a, b, atol=1e-5, equal_nan=True)
    assert all(torch.isfinite(a).all() for a in expected) or beta
    assert reports[-1].sites
