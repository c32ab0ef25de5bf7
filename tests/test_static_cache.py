# SPDX-License-Identifier: Apache-2.0
"""StaticCache of transformers, and the handles of buffers that a rewritten graph has made."""

from __future__ import annotations

import copy
import gc
import io
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import kvpass
from kvpass import backends
from kvpass.errors import CacheStateError, UnsupportedError
from kvpass.graph.report import GraphReport, observed
from kvpass.runtime import handle
from kvpass.runtime.handle import KVHandle
from kvpass.step.buffers import BufferGroup
from kvpass.step.graph import RewrittenGraph
from model_zoo.architectures import ARCHITECTURES
from tests.models import OPTIONS, compile_with, tiny

FAMILIES = ["llama", "mistral", "gemma2"]
CAPACITY = 96


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    backends._warned.clear()
    handle._warned = False
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "aten.* reads a KV cache")
        yield
    torch._dynamo.reset()


@pytest.fixture
def counts(monkeypatch):
    """How often each of these was called: ``_run``, ``_plain`` (once more) and ``_copied``."""
    seen = {"run": 0, "plain": 0, "copied": 0}

    def counted(name, call):
        def wrapper(*args, **kwargs):
            seen[name] += 1
            return call(*args, **kwargs)

        return wrapper

    init = RewrittenGraph.__init__

    def start(self, *args, **kwargs):
        init(self, *args, **kwargs)
        self._plain = counted("plain", self._plain)

    monkeypatch.setattr(RewrittenGraph, "__init__", start)
    monkeypatch.setattr(RewrittenGraph, "_run", counted("run", RewrittenGraph._run))
    monkeypatch.setattr(BufferGroup, "_copied", counted("copied", BufferGroup._copied))
    return seen


def models(name: str) -> tuple[Any, Any]:
    """A compiled model and the same one uncompiled; a window has 8 tokens."""
    model, reference = (ARCHITECTURES[name].build("sdpa") for _ in range(2))
    compile_with(model)
    return model, reference


def caches(model: Any) -> tuple[Any, Any]:
    from transformers import StaticCache

    return tuple(StaticCache(config=model.config, max_cache_len=CAPACITY) for _ in range(2))


def prompts(*tokens: int, size: int = 2) -> list[Tensor]:
    generator = torch.Generator().manual_seed(4)
    return [torch.randint(3, 90, (size, n), generator=generator) for n in tokens]


def close(got: Tensor, expected: Tensor, tolerance: float = 1e-5) -> None:
    assert got.shape == expected.shape
    assert float((got - expected).abs().max()) <= tolerance * float(expected.abs().max())


def turns(pair: tuple[Any, Any], both: tuple[Any, Any], ids: list[Tensor], steps: int = 4) -> None:
    """Each prompt and some greedy tokens after it, the same with and without kvpass."""
    with torch.no_grad():
        for new in ids:
            for _ in range(steps):
                got, expected = (
                    m(input_ids=new, past_key_values=c).logits
                    for m, c in zip(pair, both, strict=True)
                )
                close(got, expected)
                new = expected[:, -1:].argmax(-1)


def equal_buffers(both: tuple[Any, Any]) -> None:
    for held, dense in zip(both[0].layers, both[1].layers, strict=True):
        for got, expected in ((held.keys, dense.keys), (held.values, dense.values)):
            close(got.dense() if isinstance(got, KVHandle) else got, expected, 1e-6)
        assert int(held.cumulative_length) == int(dense.cumulative_length)


@pytest.mark.parametrize("name", FAMILIES)
def test_several_turns(name, counts):
    """Prompts shorter and longer than the window, at which a layer turns to another write."""
    pair = models(name)
    both = caches(pair[0])
    reports: list[GraphReport] = []
    with observed(reports.append):
        turns(pair, both, prompts(5, 3, 1, 12, 9))
    assert reports and all(report.rewritten == len(report.sites) for report in reports)
    assert {site.form for report in reports for site in report.sites} == {"static"}
    assert (counts["plain"], counts["copied"], counts["run"]) == (0, 1, 20)
    assert all(type(layer.keys) is KVHandle for layer in both[0].layers)
    equal_buffers(both)


@pytest.mark.parametrize("name", FAMILIES)
def test_reset_and_used_again(name, counts):
    pair = models(name)
    both = caches(pair[0])
    for first in (12, 3, 20):
        turns(pair, both, prompts(first, 2), 3)
        equal_buffers(both)
        for cache in both:
            cache.reset()
        assert all(not layer.keys.dense().any() for layer in both[0].layers)
    assert (counts["plain"], counts["copied"]) == (0, 1)


@pytest.mark.parametrize(
    ("name", "tokens", "padded"),
    [
        *(("llama", 13, False), ("llama", 13, True), ("mistral", 5, True), ("mistral", 13, False)),
        *(("gemma2", 5, False), ("gemma2", 13, True)),
    ],
)
def test_generate(name, tokens, padded, counts):
    model, reference = models(name)
    (ids,) = prompts(tokens)
    mask = torch.ones_like(ids)
    mask[0, : 3 * padded] = 0
    reports: list[GraphReport] = []
    found = []
    for each in (reference, model):
        with observed(reports.append):
            found.append(
                each.generate(
                    input_ids=ids, attention_mask=mask, max_new_tokens=20, do_sample=False,
                    cache_implementation="static", eos_token_id=None, pad_token_id=0,
                )
            )  # fmt: skip
    assert torch.equal(*found)
    assert counts["run"] and reports
    forms = {site.form for report in reports for site in report.sites if site.rewritten}
    assert forms == {"static"}
    if not padded:
        assert all(report.rewritten == len(report.sites) for report in reports)


def test_a_dense_cache_goes_on_in_a_compiled_model(counts):
    """Buffers with memory of their own: written by the graph, known by their version."""
    pair = models("llama")
    both = caches(pair[0])
    with torch.no_grad():
        for cache in both:
            pair[1](input_ids=prompts(9)[0], past_key_values=cache)
    assert type(both[0].layers[0].keys) is Tensor
    turns(pair, both, prompts(4, 2))
    assert (counts["plain"], counts["copied"], counts["run"]) == (0, 1, 8)
    equal_buffers(both)
    for cache in both:
        cache.layers[1].values[:, :, 3:7] = 0.5
    turns(pair, both, prompts(4))
    assert (counts["plain"], counts["copied"]) == (0, 2)
    equal_buffers(both)


# ------------------------------------------------------------------ handles


def held(name: str = "llama") -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    pair = models(name)
    both = caches(pair[0])
    turns(pair, both, prompts(12, 3), 2)
    return pair, both


def test_copies_are_dense_and_independent():
    pair, both = held("mistral")
    keys, expected = both[0].layers[1].keys, both[1].layers[1].keys
    file = io.BytesIO()
    torch.save(keys, file)
    file.seek(0)
    for dense in (keys.dense(), copy.deepcopy(keys), torch.load(file), keys.clone(), keys + 0):
        assert type(dense) is Tensor
        close(dense, expected, 1e-6)
        dense.fill_(3.0)
    close(keys.dense(), expected, 1e-6)
    copied = tuple(copy.deepcopy(cache) for cache in both)
    turns(pair, copied, prompts(3, 2))
    turns(pair, both, prompts(2, 4))
    equal_buffers(both)
    equal_buffers(copied)


def test_zeroing_some_of_the_buffers_is_seen():
    pair, both = held()
    for cache in both:
        cache.layers[0].keys.zero_()
        cache.layers[1].values.zero_()
    assert not both[0].layers[0].keys.dense().any()
    equal_buffers(both)
    turns(pair, both, prompts(3, 1))
    equal_buffers(both)


WRITES = {
    "fill_": lambda x: x.fill_(1.0),
    "mul_": lambda x: x.mul_(2.0),
    "copy_": lambda x: x.copy_(torch.zeros(())),
    "index_copy_": lambda x: x.index_copy_(2, torch.tensor([3]), torch.zeros(2, 2, 1, 16)),
}
VIEWS = {
    "assignment": lambda x: x.__setitem__(0, 1.0),
    "fill_ of a view": lambda x: x[:, :, :4].fill_(1.0),
    "foreach": lambda x: torch._foreach_zero_([x[:1]]),
}


@pytest.mark.parametrize("name", [*WRITES, *VIEWS])
def test_changes_in_place(name):
    """A buffer gets its memory back; a change of a view of it, which has none, is refused."""
    pair, both = held()
    with torch.no_grad():
        if name in VIEWS:
            with pytest.raises(UnsupportedError, match="changes a view of a static buffer"):
                VIEWS[name](both[0].layers[1].keys)
        else:
            for cache in both:
                WRITES[name](cache.layers[1].keys)
    equal_buffers(both)
    turns(pair, both, prompts(3), 2)
    if name != "fill_":  # blocks hold no tokens behind the last one that was written
        equal_buffers(both)


def test_buffers_of_many_sizes(counts):
    """The second size makes it a symbol, another one for keys than for values."""
    model = tiny("llama")
    reference = copy.deepcopy(model)
    compile_with(model)
    (ids,) = prompts(9)
    reports: list[GraphReport] = []
    with observed(reports.append):
        for new in (6, 12, 20, 9):
            options = {"max_new_tokens": new, "do_sample": False, "cache_implementation": "static"}
            got = model.generate(input_ids=ids, **options)
            assert torch.equal(got, reference.generate(input_ids=ids, **options))
    assert all(report.rewritten == len(report.sites) for report in reports)
    assert len(reports) <= 4 and counts["plain"] == 0


def test_memory_is_freed_with_the_cache():
    pair, both = held()
    batch, tiers = (getattr(both[0].layers[0].keys.content.lease, n) for n in ("batch", "manager"))
    tiers = tiers.tiers
    used = tiers.hot.used + tiers.cold.used
    assert used > 0 and not batch.released
    del both
    gc.collect()
    turns(pair, caches(pair[0]), prompts(1), 1)  # the next step frees the blocks of dead caches
    assert batch.released
    assert tiers.hot.used + tiers.cold.used <= used  # those of the new cache


def test_an_uncompiled_model_gives_the_same():
    pair, both = held()
    turns((pair[1], pair[1]), both, prompts(2))
    equal_buffers(both)
    turns(pair, both, prompts(2))
    equal_buffers(both)


B, KV, D, ROOM = 2, 2, 16, 40


class Own:
    """A function whose buffers are made in its first call; beside them it may have a tuple cache"""

    def __init__(self, size: int = B, joined: bool = False) -> None:
        self.size, self.joined = size, joined

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, at: Tensor, state: Any) -> Any:
        b, n = q.shape[0], q.shape[2]
        kb, vb, *past = state or [torch.zeros(self.size, KV, ROOM, D) for _ in range(2)]
        positions = torch.arange(n) + at
        kb[:b, :, positions], vb[:b, :, positions] = k, v
        seen = torch.arange(ROOM) <= positions[:, None]
        keys, values = (x if b == self.size else x[:b, :, :ROOM] for x in (kb, vb))
        out = F.scaled_dot_product_attention(q, keys, values, attn_mask=seen)
        if self.joined:
            past = [torch.cat(x, 2) for x in zip(past, (k, v), strict=True)] if past else [k, v]
            past = [x + 0 for x in past] if not state else past
            total = past[0].shape[2]
            mask = torch.arange(total) <= torch.arange(n)[:, None] + total - n
            out = out + F.scaled_dot_product_attention(q, *past, attn_mask=mask)
        return out, [kb, vb, *past]


def run(function: Own, *calls: tuple[int, int, int]) -> None:
    """Calls (sequences, tokens, position), compared with the uncompiled; so are the buffers."""
    torch._dynamo.reset()
    options = {"inner": "eager"} | OPTIONS
    compiled = torch.compile(function.__call__, backend=kvpass.backend, options=options)
    generator = torch.Generator().manual_seed(2)
    states: list[Any] = [None, None]
    reports: list[GraphReport] = []
    with torch.no_grad(), observed(reports.append):
        for size, tokens, position in calls:
            data = torch.randn(3, size, KV, tokens, D, generator=generator)
            data = [x.clone() for x in data]
            at, outs = torch.tensor(position), []
            for i, call in enumerate((compiled, function)):
                out, states[i] = call(*data, at, states[i])
                outs.append(out)
            close(*outs)
            for got, expected in zip(*states, strict=True):
                close(got + 0, expected, 1e-6)
    assert any(report.rewritten for report in reports)


def test_buffers_that_a_graph_makes(counts):
    run(Own(), (2, 5, 0), (2, 1, 5), (2, 3, 6))
    assert (counts["plain"], counts["copied"]) == (0, 1)


def test_buffers_made_and_written_behind_their_first_token(counts):
    run(Own(), (2, 5, 2), (2, 1, 7))
    assert counts["plain"] == 1


def test_a_gap_in_a_handle_has_zeros(counts):
    run(Own(), (2, 5, 0), (2, 2, 9), (2, 1, 11))
    assert counts["plain"] == 0


def test_a_rewound_handle_forgets_what_was_behind_and_says_so():
    """Blocks behind the last token are given back: a jump over them is an error, not zeros."""
    compiled = torch.compile(Own().__call__, backend=kvpass.backend, options=OPTIONS)
    state = None
    with torch.no_grad():
        for tokens, position in ((9, 0), (1, 3), (1, 4)):
            data = torch.randn(3, 2, KV, tokens, D).unbind()
            _, state = compiled(*data, torch.tensor(position), state)
        with pytest.raises(CacheStateError, match="has been given up"):
            compiled(*data, torch.tensor(9), state)
        out, _ = compiled(*data, torch.tensor(0), state)
    assert out.isfinite().all()


def test_a_smaller_batch_keeps_the_other_sequences():
    torch._dynamo.config.automatic_dynamic_shapes = False
    try:
        run(Own(3), (3, 5, 0), (2, 4, 0), (3, 1, 5))
        run(Own(3), (3, 5, 0), (2, 4, 5), (3, 1, 9))
    finally:
        torch._dynamo.config.automatic_dynamic_shapes = True


def test_static_buffers_beside_concatenated_tuples(counts):
    run(Own(joined=True), (2, 5, 0), (2, 1, 5), (2, 1, 6))
    assert counts["plain"] == 0


def test_handles_of_tuples_in_a_call_that_is_not_counted(counts):
    """Positions that the blocks cannot take: the graph before rewriting reads dense copies."""
    with pytest.raises((IndexError, RuntimeError), match="out of"):
        run(Own(joined=True), (2, 5, 0), (2, 1, 5), (2, 1, ROOM))


def test_a_part_of_a_sliding_cache_of_handles_goes_on():
    """Fewer sequences of a window under a padding mask: read densely, as before static buffers."""
    model = tiny("mistral", sliding_window=8)
    reference = copy.deepcopy(model)
    compile_with(model)
    (ids,) = prompts(20)
    mask = torch.ones(2, 21, dtype=torch.int64)
    mask[0, :3] = 0
    found = []
    with torch.no_grad():
        for each in (model, reference):
            cache = each(ids, attention_mask=mask[:, :20]).past_key_values
            for layer in cache.layers:
                layer.keys, layer.values = layer.keys[:1], layer.values[:1]
            new = {"attention_mask": mask[:1], "past_key_values": cache}
            found.append(each(ids[:1, :1], **new).logits)
    close(*found)
