# SPDX-License-Identifier: Apache-2.0
"""The backend through transformers' own ``generate``: same tokens, whatever the cache and tiers."""

from __future__ import annotations

import copy
import random
import warnings

import pytest
import torch

import kvpass
from kvpass import backends
from kvpass.errors import ConfigError, KVPassWarning, UnsupportedError
from kvpass.graph.report import observed
from kvpass.runtime import handle
from kvpass.runtime.handle import KVHandle
from tests.models import OPTIONS, compare, compile_with, generate, prompt, tiered, tiny


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    backends._warned.clear()
    handle._warned = False
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("name", "padding", "form"),
    [
        *(("llama", padding, form) for padding in (0, 5) for form in ("tiered", "dynamic")),
        *(("gpt2", 5, "tiered"), ("gpt2", 0, "dynamic"), ("neox", 0, "tiered")),
        *(("qwen3", 5, "dynamic"), ("phi", 5, "tiered")),
    ],
)
def test_generate_is_rewritten_and_equal(name, padding, form):
    model = tiny(name)
    compile_with(model)
    ids, mask = prompt(2, 70, padding)
    cache = tiered(model) if form == "tiered" else None
    reports, out, difference = compare(model, ids, mask, cache)
    assert difference < 1e-4
    assert len(reports) <= 3
    for report in reports:
        assert report.rewritten == len(report.sites) == 2
        assert {site.form for site in report.sites} == {
            "tiered" if form == "tiered" else "functional"
        }
    assert out.past_key_values.get_seq_length() == 70 + 23
    if form == "tiered":
        snapshot = cache.snapshot()
        assert snapshot.cold_only_bytes > snapshot.kv_bytes / 2
    else:
        layer = out.past_key_values.layers[0]
        assert isinstance(layer.keys, KVHandle)
        assert layer.keys.shape[-2] == 93


@pytest.mark.parametrize("form", ["tiered", "dynamic"])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_eager_attention_is_rewritten_and_equal(name, form):
    model = tiny(name, "eager")
    compile_with(model)
    ids, mask = prompt(2, 50, 3)
    reports, _, difference = compare(model, ids, mask, tiered(model) if form == "tiered" else None)
    assert difference < 1e-4
    assert all(report.rewritten == 2 for report in reports)


@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
@pytest.mark.parametrize("form", ["tiered", "dynamic"])
def test_inner_compilers_agree(inner, form):
    model = tiny("llama", num_hidden_layers=3)
    compile_with(model, inner)
    ids, mask = prompt(2, 70, 4)
    reports, _, difference = compare(model, ids, mask, tiered(model) if form == "tiered" else None)
    assert difference < 1e-4
    assert all(report.rewritten == 3 for report in reports)


@pytest.mark.parametrize("name", ["mistral", "gemma2"])
@pytest.mark.parametrize("form", ["tiered", "dynamic"])
def test_windows_are_rewritten(name, form):
    """Sliding windows are operands of a TieredCache; a DynamicCache's window is left alone."""
    model = tiny(name)
    compile_with(model)
    ids, mask = prompt(2, 60, 5)
    reports, _, difference = compare(model, ids, mask, tiered(model) if form == "tiered" else None)
    assert difference < 1e-4
    sites = [site for report in reports for site in report.sites]
    assert all(site.rewritten for site in sites), [site.reason for site in sites]


@pytest.mark.parametrize("padding", [0, 5])
@pytest.mark.parametrize("tokens", [39, 41])
def test_a_window_that_fills_through_stock_generate(tokens, padding):
    model = tiny("mistral")  # a window of 40
    compile_with(model)
    reports, _, difference = compare(model, *prompt(2, tokens, padding), None, tokens=45)
    assert difference < 1e-4
    assert all(report.rewritten == 2 for report in reports)


def test_a_window_of_tokens_from_an_uncompiled_prompt_is_right():
    """Its first token is the 36th of the sequence, and the mask counts from the first."""
    from transformers import DynamicCache

    model = tiny("mistral")
    ids, mask = prompt(2, 75, 40)
    steps = []
    for compiled in (False, True):
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            model(ids, attention_mask=mask, past_key_values=cache)
            if compiled:
                compile_with(model)
            for i in range(3):
                grown = torch.nn.functional.pad(mask, (0, i + 1), value=1)
                out = model(ids[:, i : i + 1], attention_mask=grown, past_key_values=cache)
        steps.append(out.logits)
    assert (steps[0] - steps[1]).abs().max() < 1e-4


def test_softcap_is_rewritten():
    model = tiny("gemma2", "eager")
    compile_with(model)
    ids, mask = prompt(2, 60, 5)
    reports, _, difference = compare(model, ids, mask, tiered(model))
    assert difference < 1e-4
    assert all(site.rewritten for report in reports for site in report.sites)


def test_migration_forced_at_every_step_changes_no_bit():
    model = tiny("llama")
    compile_with(model)
    ids, mask = prompt(2, 90, 5)

    def logits(cache, seed=None):
        if seed is not None:
            rng = random.Random(seed)
            with torch.no_grad():  # the manager exists after the first step
                model(ids[:, :1], past_key_values=cache)
            cache.truncate(0)
            cache.manager.before_step = lambda manager, batch: manager.place(
                batch, lambda *_: rng.random() < 0.5
            )
        return generate(model, ids, mask, 40, past_key_values=cache).logits

    hot = logits(tiered(model, hot="64MiB"))
    for other in (logits(tiered(model, hot=1)), logits(tiered(model), 1), logits(tiered(model), 2)):
        assert all(torch.equal(a, b) for a, b in zip(hot, other, strict=True))


def test_batch_invariance():
    """B09: a left-padded batch gives each prompt what it gets alone, also permuted."""
    model = tiny("llama")
    compile_with(model)
    prompts = [prompt(1, n, seed=n)[0][0] for n in (3, 7, 12)]
    ids = torch.zeros(3, 12, dtype=torch.long)
    mask = torch.zeros(3, 12, dtype=torch.long)
    for row, tokens in enumerate(prompts):
        ids[row, 12 - len(tokens) :] = tokens
        mask[row, 12 - len(tokens) :] = 1
    together = generate(model, ids, mask, 20, past_key_values=tiered(model))
    order = [2, 0, 1]
    permuted = generate(model, ids[order], mask[order], 20, past_key_values=tiered(model))
    assert torch.equal(permuted.sequences[:, 12:], together.sequences[order, 12:])
    for row, tokens in enumerate(prompts):
        alone = generate(
            model, tokens[None], torch.ones(1, len(tokens), dtype=torch.long), 20,
            past_key_values=tiered(model),
        )  # fmt: skip
        assert torch.equal(alone.sequences[0, len(tokens) :], together.sequences[row, 12:])
        for a, b in zip(alone.logits, together.logits, strict=True):
            assert (a[0] - b[row]).abs().max() < 1e-4


@pytest.mark.parametrize("chunks", [(20,), (7, 7, 6), (1,) * 20, (2, 3, 15)])
def test_chunks_give_the_logits_of_one_prompt(chunks):
    """B04 (c), with a chunk that continues a cache."""
    model = tiny("llama")
    ids, _ = prompt(1, 20)
    with torch.no_grad():
        expected = model(ids).logits[:, -1]
        compile_with(model)
        cache, past = tiered(model), None
        for tokens in ids.split(chunks, 1):
            got = model(tokens, past_key_values=cache).logits[:, -1]
            out = model(tokens, past_key_values=past)
            past = out.past_key_values
    assert (got - expected).abs().max() < 1e-5
    assert (out.logits[:, -1] - expected).abs().max() < 1e-5


@pytest.mark.parametrize("form", ["tiered", "dynamic"])
def test_beam_search_reorders_the_cache(form):
    model = tiny("llama")
    compile_with(model)
    ids, mask = prompt(2, 40, 3)
    kwargs = {"num_beams": 3, "early_stopping": False}
    compiled, model._compiled_call_impl = model._compiled_call_impl, None
    expected = generate(model, ids, mask, 30, **kwargs)
    model._compiled_call_impl = compiled
    if form == "tiered":
        kwargs["past_key_values"] = tiered(model)
    assert torch.equal(generate(model, ids, mask, 30, **kwargs).sequences, expected.sequences)


@pytest.mark.parametrize("form", ["tiered", "dynamic"])
def test_several_turns_of_a_dialogue(form):
    model = tiny("llama")
    compile_with(model)
    compiled, model._compiled_call_impl = model._compiled_call_impl, None
    first, mask = prompt(1, 30)
    expected = generate(model, first, mask, 10).sequences
    turn = torch.cat([expected, prompt(1, 9, seed=5)[0]], 1)
    expected_2 = generate(model, turn, torch.ones_like(turn), 12).sequences
    model._compiled_call_impl = compiled
    cache = tiered(model) if form == "tiered" else None
    out = generate(model, first, mask, 10, **({"past_key_values": cache} if cache else {}))
    assert torch.equal(out.sequences, expected)
    again = generate(model, turn, torch.ones_like(turn), 12, past_key_values=out.past_key_values)
    assert torch.equal(again.sequences, expected_2)


def test_an_old_handle_continues_from_where_it_was():
    """Functional caches are values: a second continuation of one past never sees the first."""
    model = tiny("llama")
    compile_with(model)
    ids, _ = prompt(1, 40)
    with torch.no_grad():
        past = model(ids, use_cache=True).past_key_values
        kept = copy.copy(past)
        kept.layers = [copy.copy(layer) for layer in past.layers]
        tokens = [torch.tensor([[i]]) for i in (5, 9)]
        one = model(tokens[0], past_key_values=past).logits
        for _ in range(40):
            model(tokens[1], past_key_values=past)
        two = model(tokens[0], past_key_values=kept).logits
    assert (one - two).abs().max() < 1e-6


def test_a_handle_read_by_other_code_is_a_dense_copy():
    model = tiny("llama")
    ids, _ = prompt(2, 40)
    with torch.no_grad():
        expected = model(ids, use_cache=True).past_key_values
        compile_with(model)
        got = model(ids, use_cache=True).past_key_values
    keys = got.layers[1].keys
    with pytest.warns(KVPassWarning, match="dense copy"):
        assert torch.allclose(keys + 0, expected.layers[1].keys, atol=1e-6)
    assert torch.allclose(copy.deepcopy(keys), expected.layers[1].keys, atol=1e-6)
    assert torch.allclose(keys[:, :, 3:7], expected.layers[1].keys[:, :, 3:7], atol=1e-6)
    with pytest.raises(UnsupportedError, match="in place"):
        keys.add_(1)
    got.crop(-10)
    expected.crop(-10)
    with torch.no_grad():
        a = model(ids[:, :1], past_key_values=got).logits
        model._compiled_call_impl = None
        b = model(ids[:, :1], past_key_values=expected).logits
    assert (a - b).abs().max() < 1e-5


def test_gradients_are_left_alone_with_one_warning():
    """B07: under grad mode nothing is rewritten, and gradients equal eager's."""
    model = tiny("llama")
    ids, _ = prompt(2, 12)
    model(ids, use_cache=False).logits.square().mean().backward()
    expected = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    compile_with(model)
    reports = []
    with observed(reports.append), pytest.warns(KVPassWarning, match="no_grad") as caught:
        model(ids, use_cache=True).logits.square().mean().backward()
        model(ids[:, :5], use_cache=True)
    assert len([w for w in caught if "gradients" in str(w.message)]) == 1
    sites = [site for report in reports for site in report.sites]
    assert sites and not any(site.rewritten for site in sites)
    assert all("grad" in site.reason for site in sites)
    assert expected
    for name, parameter in model.named_parameters():
        assert (parameter.grad - expected[name]).abs().max() < 1e-4
    with torch.no_grad():
        kvpass_report = kvpass.explain(model, ids, verbose=False)
    assert kvpass_report.rewritten == 2


def test_a_backward_through_a_tiered_cache_is_a_typed_error():
    model = tiny("llama")
    ids, _ = prompt(1, 8)
    with pytest.warns(KVPassWarning, match="outside a graph"):
        loss = model(ids, past_key_values=tiered(model)).logits.sum()
    with pytest.raises(UnsupportedError, match="without a cache"):
        loss.backward()


@pytest.mark.parametrize("inner", ["eager", "inductor"])
def test_a_tiered_cache_runs_where_gradients_are_enabled(inner):
    """A user who forgot no_grad: right, slow, one warning; only a backward is an error."""
    model = tiny("llama", num_hidden_layers=1)
    ids, _ = prompt(1, 12)
    expected = model(ids).logits
    compile_with(model, inner)
    cache = tiered(model)
    with pytest.warns(KVPassWarning, match="no_grad"):
        model(ids[:, :8], past_key_values=cache)
        got = model(ids[:, 8:], past_key_values=cache).logits
    assert (got - expected[:, 8:]).abs().max() < 1e-5
    with pytest.raises(UnsupportedError, match="without a cache"):
        got.sum().backward()


def test_training_mode_with_dropout_is_left_alone():
    model = tiny("gpt2", "eager", attn_pdrop=0.5)
    compile_with(model)
    ids, _ = prompt(1, 12)
    reports = []
    with observed(reports.append), torch.no_grad():
        model.train()
        model(ids, use_cache=True)
        model.eval()
        model(ids, use_cache=True)
    assert [report.rewritten for report in reports] == [0, 2]
    assert all("dropout" in site.reason for site in reports[0].sites)


def test_no_cache_is_left_to_the_inner_compiler():
    model = tiny("llama")
    ids, _ = prompt(2, 12)
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
        report = kvpass.explain(model, ids, use_cache=False, verbose=False)
        compile_with(model)
        assert torch.equal(model(ids, use_cache=False).logits, expected)
    assert report.rewritten == 0
    assert {site.form for site in report.sites} == {"none"}


def test_a_tiered_cache_without_a_compiled_model_is_right_and_warns():
    model = tiny("llama")
    ids, mask = prompt(2, 50, 4)
    expected = generate(model, ids, mask, 10)
    cache = tiered(model)
    with pytest.warns(KVPassWarning, match=r"model\.compile"):
        out = generate(model, ids, mask, 10, past_key_values=cache)
    assert torch.equal(out.sequences, expected.sequences)


def test_torch_compile_finds_the_backend_by_name():
    model = tiny("llama")
    ids, _ = prompt(1, 12)
    with torch.no_grad():
        expected = model(ids).logits
        compiled = torch.compile(model, backend="kvpass", options={"inner": "eager"} | OPTIONS)
        reports = []
        with observed(reports.append):
            got = compiled(ids, past_key_values=tiered(model)).logits
    assert [report.rewritten for report in reports] == [2]
    assert (got - expected).abs().max() < 1e-5


def test_modes_options_and_arguments():
    model = tiny("llama")
    ids, _ = prompt(1, 12)
    graph = torch.fx.symbolic_trace(torch.nn.Identity())
    with pytest.raises(ConfigError, match="hot"):
        kvpass.backend(graph, [], options={"hott": "1GiB"})
    with pytest.raises(TypeError, match="dynamik"):
        kvpass.backend(graph, [], dynamik=True)
    torch._dynamo.reset()
    with torch.no_grad(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.compile(backend=kvpass.backend, mode="reduce-overhead")
        model(ids, past_key_values=tiered(model))
        assert not any("mode=" in str(w.message) for w in caught)
        torch._dynamo.reset()
        model.compile(backend=kvpass.backend, mode="max-autotune")
        model(ids, past_key_values=tiered(model))
    assert any("tunes nothing" in str(w.message) for w in caught)


def test_steps_cost_no_further_graphs():
    """B57: 60 steps, moves between tiers and a fresh cache compile nothing new."""
    model = tiny("llama")
    compile_with(model)
    ids, mask = prompt(1, 40)
    reports = []
    with observed(reports.append):
        generate(model, ids, mask, 60, past_key_values=tiered(model))
        assert len(reports) <= 3
        cache = tiered(model, hot=1)
        generate(model, ids, mask, 30, past_key_values=cache)
        cache.manager.place(cache.batch, lambda *_: False)
        generate(model, prompt(1, 55)[0], torch.ones(1, 55), 10, past_key_values=tiered(model))
    assert len(reports) <= 5


def test_grad_modes_mix():
    """B63: caches made under one mode are used under another."""
    model = tiny("llama")
    ids, _ = prompt(1, 12)
    with torch.no_grad():
        expected = model(ids).logits[:, -1]
    compile_with(model)
    modes = [torch.inference_mode, torch.no_grad, torch.enable_grad]
    for build in modes:
        for decode in modes:
            with build():
                cache = tiered(model)
                model(ids[:, :7], past_key_values=cache)
            with decode():
                got = model(ids[:, 7:], past_key_values=cache).logits[:, -1]
            cache.truncate(3)
            cache.reset()
            assert (got.detach() - expected).abs().max() < 1e-5
