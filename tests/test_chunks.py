# SPDX-License-Identifier: Apache-2.0
"""Chunked attention in whole models: positions are the sequence's own, whatever a cache keeps."""

from __future__ import annotations

import copy

import pytest
import torch

pytest.importorskip("transformers")
from transformers import DynamicCache

from kvpass.graph.report import observed
from model_zoo.architectures import ARCHITECTURES, VOCABULARY, WINDOW
from tests.models import compile_with, generate, tiered


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def llama4():
    torch.manual_seed(0)
    return ARCHITECTURES["llama4"].build("sdpa")


def ids(size: int, tokens: int) -> torch.Tensor:
    return torch.randint(1, VOCABULARY, (size, tokens))


def uncompiled(model, *args, **kwargs):
    compiled, model._compiled_call_impl = model._compiled_call_impl, None
    try:
        return model(*args, **kwargs)
    finally:
        model._compiled_call_impl = compiled


def steps(model, held, dense, tokens, size=2):
    """The same calls with both caches; returns what is new and the reports."""
    reports = []
    with torch.no_grad(), observed(reports.append):
        for n in tokens:
            new = ids(size, n)
            expected = uncompiled(model, new, past_key_values=dense)
            got = model(new, past_key_values=held)
            assert (got.logits - expected.logits).abs().max() < 1e-4
    return reports


@pytest.mark.parametrize(
    ("form", "prompt"),
    [("dynamic", 1), ("tiered", WINDOW - 1), ("dynamic", WINDOW), ("tiered", 3 * WINDOW + 2)],
)
def test_turns_across_chunks(form, prompt):
    model = llama4()
    compile_with(model)
    held = DynamicCache(config=model.config) if form == "dynamic" else tiered(model)
    dense = DynamicCache(config=model.config)
    turns = (prompt, *[1] * (WINDOW + 2), 5, 1, 2 * WINDOW + 3, 1, 1)
    reports = steps(model, held, dense, turns)
    masks = {site.mask for report in reports for site in report.sites if site.rewritten}
    assert f"causal in chunks of {WINDOW}" in masks
    assert all(report.rewritten == 2 for report in reports)


@pytest.mark.parametrize("prompt", [WINDOW - 1, 2 * WINDOW + 3])
def test_a_copied_or_reordered_cache_begins_at_an_unknown_position(prompt):
    """Dense copies of a window do not say where they were: the model's own code takes them."""
    model = llama4()
    compile_with(model)
    held, dense = (DynamicCache(config=model.config) for _ in range(2))
    steps(model, held, dense, (prompt, 1, 1))
    for change in (copy.deepcopy, reordered):
        held, dense = change(held), change(dense)
        steps(model, held, dense, (1, 1, 3, 1), size=held.layers[0].keys.shape[0])


def reordered(cache):
    cache.batch_select_indices(torch.tensor([1, 0, 1]))
    return cache


def test_a_window_that_says_it_is_elsewhere():
    """The position is an attribute of the cache: a wrong one gives what the model would give."""
    model = llama4()
    compile_with(model)
    held, dense = (DynamicCache(config=model.config) for _ in range(2))
    steps(model, held, dense, (2 * WINDOW + 1, 1, 1))
    for cache in (held, dense):
        cache.layers[0].cumulative_length += 3
    steps(model, held, dense, (1,))


@pytest.mark.parametrize(("form", "padding"), [("dynamic", 3), ("tiered", 0), ("tiered", 3)])
def test_generate_counts_chunks_from_the_first_token_behind_padding(form, padding):
    model = llama4()
    prompt = ids(2, 11)
    mask = torch.ones_like(prompt)
    mask[0, :padding] = 0
    expected = generate(model, prompt, mask, 20)
    compile_with(model)
    cache = {} if form == "dynamic" else {"past_key_values": tiered(model)}
    got = generate(model, prompt, mask, 20, **cache)
    assert torch.equal(got.sequences, expected.sequences)
