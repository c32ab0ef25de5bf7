# SPDX-License-Identifier: Apache-2.0
"""The forms in which well-known code writes a cache: rewritten where there is one, and equal."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kvpass
from kvpass.backends import manager_for
from kvpass.config import Config
from kvpass.graph.report import GraphReport, observed
from kvpass.runtime.handle import KVHandle
from model_zoo.forms import (
    Step,
    generate_greedy,
    gpt_fast,
    legacy_tuples,
    llama_reference,
    nano_gpt,
    random_weights,
)

COUNT = 25  # tokens: one of the prompt, and 24 of decode steps
# The hot tier holds a third of a conversation of 94 tokens of `legacy_tuples`, two of the others.
TINY = {"block_size": 32, "hot": "64KiB", "resident_tokens": 32, "heat_interval": 8}
LARGE = TINY | {"hot": "4MiB"}
CACHED = ("gpt_fast", "llama_reference", "legacy_tuples")
BUFFERS = {"gpt_fast": "*.?_cache", "llama_reference": "*.cache_?"}
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def build(name: str) -> tuple[nn.Module, Callable[[Any], Step]]:
    """A form's model, always with the same weights, and its `stepper`."""
    model: nn.Module
    if name == "gpt_fast":
        model = gpt_fast.Transformer(gpt_fast.ModelArgs())
        model.setup_caches(max_batch_size=2, max_seq_length=128)
        stepper: Callable[[Any], Step] = gpt_fast.stepper
    elif name == "llama_reference":
        model = llama_reference.Transformer(llama_reference.ModelArgs(max_batch_size=3))
        stepper = llama_reference.stepper
    elif name == "legacy_tuples":
        model, stepper = legacy_tuples.Transformer(legacy_tuples.Config()), legacy_tuples.stepper
    else:
        model = nano_gpt.GPT(nano_gpt.GPTConfig(flash=name == "flash"))
        stepper = nano_gpt.stepper
    random_weights(model)
    return model.eval().requires_grad_(False), stepper


class Pair:
    """A form uncompiled and compiled; ``reports`` are of graphs compiled since the last call."""

    def __init__(self, name: str, inner: str = "eager", **options: Any) -> None:
        (plain, stepper), (model, _) = build(name), build(name)
        self.models = plain, model
        compiled = torch.compile(
            model, backend="kvpass", fullgraph=True, options={"inner": inner, **(options or TINY)}
        )
        self.plain, self.compiled = stepper(plain), stepper(compiled)
        self._reports: list[GraphReport] = []

    def talk(self, tokens: int, seed: int = 0, exact: bool = False) -> Tensor:
        """A conversation of both; returns the compiled one's logits."""
        prompt = ids(tokens, seed)
        expected, logits = generate_greedy(self.plain, prompt, COUNT)
        with observed(self._reports.append):
            found, ours = generate_greedy(self.compiled, prompt, COUNT)
        assert len(expected.unique()) > 5, "a text that repeats one token shows no mistake"
        assert torch.equal(found, expected)
        close(ours, logits, exact)
        return ours

    def step(self, new: Tensor, position: int) -> None:
        """One step of both."""
        with torch.no_grad(), observed(self._reports.append):
            close(self.compiled(new, position), self.plain(new, position))

    def reports(self) -> list[GraphReport]:
        found, self._reports[:] = [*self._reports], []
        return found


def close(ours: Tensor, expected: Tensor, exact: bool = False) -> None:
    """Equal to the last bit, or to 1e-5 of the largest number."""
    assert ours.shape == expected.shape
    if exact:
        assert torch.equal(ours, expected)
    assert (ours - expected).abs().max() <= 1e-5 * expected.abs().max()


def ids(tokens: int, seed: int = 0, batch: int = 2) -> Tensor:
    return torch.randint(0, 96, (batch, tokens), generator=torch.Generator().manual_seed(seed))


def all_rewritten(reports: list[GraphReport], name: str) -> bool:
    form = "functional" if name == "legacy_tuples" else "static"
    assert {site.form for report in reports for site in report.sites} == {form}
    return all(report.rewritten == len(report.sites) == 2 for report in reports)


@pytest.mark.parametrize("name", CACHED)
def test_conversations_are_rewritten_and_equal(name: str) -> None:
    pair = Pair(name)
    pair.talk(70)
    first = pair.reports()
    assert 1 <= len(first) <= 3 and all_rewritten(first, name)
    pair.talk(11, seed=1)  # in the same buffers, from position 0 again
    second = pair.reports()
    assert 1 <= len(second) <= 2 and all_rewritten(second, name)
    pair.talk(70, seed=2)
    pair.talk(23, seed=3)
    assert pair.reports() == []


@pytest.mark.parametrize("inner", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", CACHED)
def test_inner_compilers_agree(name: str, inner: str) -> None:
    pair = Pair(name, inner)
    pair.talk(70)
    pair.talk(70, seed=1)
    reports = pair.reports()
    assert 1 <= len(reports) <= 3 and all_rewritten(reports, name)


@pytest.mark.parametrize("name", CACHED)
def test_blocks_in_the_cold_tier_change_nothing(name: str) -> None:
    config = Config.load(inner="eager", **TINY)
    before = manager_for(config, CPU).snapshot().counters.steps
    tiny, large = Pair(name), Pair(name, **LARGE)
    for tokens, seed in ((70, 0), (11, 1), (70, 2)):
        assert torch.equal(tiny.talk(tokens, seed), large.talk(tokens, seed))
    snapshot = manager_for(config, CPU).snapshot()
    assert snapshot.cold_only_bytes > 0
    assert snapshot.counters.steps - before == 3 * COUNT, "every step ran the rewritten graph"
    everything = manager_for(Config.load(inner="eager", **LARGE), CPU).snapshot()
    assert everything.cold_only_bytes == 0


@pytest.mark.parametrize("name", CACHED)
def test_a_prompt_in_pieces(name: str) -> None:
    pair = Pair(name)
    position = 0
    for tokens in (40, 1, 9, 1, 1, 7, 1):
        pair.step(ids(tokens, seed=position), position)
        position += tokens
    reports = pair.reports()
    assert len(reports) <= 4 and all_rewritten(reports, name)


@pytest.mark.parametrize("name", BUFFERS)
def test_dense_buffers_stay_true(name: str) -> None:
    """They are written still, may be written by others, and from any position on."""
    pair = Pair(name)
    pair.talk(70)
    pair.step(ids(1, 1), 94)
    buffers = [
        {key: value for key, value in model.named_buffers() if "cache" in key}
        for model in pair.models
    ]
    assert len(buffers[0]) == 4
    for key, expected in buffers[0].items():
        assert expected.abs().sum() > 0
        close(buffers[1][key], expected)
    for both in buffers:
        next(iter(both.values())).mul_(0.5)
    for position in (95, 96, 50, 51, 97):  # the last three: back, on, and over old tokens
        pair.step(ids(1, position), position)
    pair.step(ids(4, 3), 30)
    assert all_rewritten(pair.reports(), name)


@pytest.mark.parametrize("name", BUFFERS)
def test_released_buffers(name: str) -> None:
    pair = Pair(name)
    freed = kvpass.release_buffers(pair.models[1], BUFFERS[name])
    assert len(freed) == 4 and all(freed.values())
    pair.talk(70)
    pair.talk(11, seed=1)
    assert all_rewritten(pair.reports(), name)
    buffers = [value for key, value in pair.models[1].named_buffers() if "cache" in key]
    assert len(buffers) == 4 and all(isinstance(value, KVHandle) for value in buffers)


def test_a_batch_smaller_than_the_buffers_of_the_reference_form() -> None:
    pair = Pair("llama_reference")
    for batch in (3, 1, 2):
        for position, tokens in ((0, 20), (20, 1), (21, 1)):
            pair.step(ids(tokens, position, batch), position)
    assert all_rewritten(pair.reports(), "llama_reference")


@pytest.mark.parametrize("name", CACHED)
def test_bfloat16_is_rewritten_too(name: str) -> None:
    pair = Pair(name)
    for model in pair.models:
        model.to(torch.bfloat16)
    reports: list[GraphReport] = []
    with torch.no_grad(), observed(reports.append):
        for position, tokens in ((0, 40), (40, 1), (41, 1)):
            new = ids(tokens, position)
            ours, expected = pair.compiled(new, position), pair.plain(new, position)
            assert ours.dtype == expected.dtype
            assert (ours - expected).abs().max() < 0.03 * expected.abs().max()
    assert all_rewritten(reports, name)


@pytest.mark.parametrize(
    ("name", "inner"),
    [
        ("flash", "eager"),
        ("written out", "eager"),
        ("flash", "aot_eager"),
        ("written out", "aot_eager"),
        ("flash", "inductor"),
    ],
)
def test_without_a_cache_nothing_is_rewritten(name: str, inner: str) -> None:
    pair = Pair(name, inner)
    for seed, tokens in enumerate((70, 11)):
        pair.talk(tokens, seed, exact=inner != "inductor")
    reports = pair.reports()
    assert 1 <= len(reports) <= 2
    for report in reports:
        assert len(report.sites) == 2 and report.rewritten == 0
        assert all("no KV cache" in site.reason for site in report.sites)


@pytest.mark.parametrize("handles", [True, False])
def test_a_past_of_a_narrower_dtype_is_promoted_as_cat_does(handles: bool) -> None:
    plain, _ = build("legacy_tuples")
    narrow = copy.deepcopy(plain).bfloat16()
    options = {"inner": "eager", **TINY}
    compiled = torch.compile(plain, backend="kvpass", options=options)
    with torch.no_grad():
        if handles:
            narrow = torch.compile(narrow, backend="kvpass", options=options)
        _, past = narrow(ids(40))
        assert all(type(x) is (KVHandle if handles else Tensor) for layer in past for x in layer)
        expected, _ = plain(ids(1, 1), tuple((k.clone(), v.clone()) for k, v in past))
        ours, grown = compiled(ids(1, 1), past)
    assert grown[0][0].dtype == torch.float32
    close(ours, expected)
