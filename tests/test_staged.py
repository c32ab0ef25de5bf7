# SPDX-License-Identifier: Apache-2.0
"""Decode steps that stage the next layer's cold blocks: as graphs ask for it, and what is read."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")
import kvpass
import triton_ops
from kvpass import backends
from kvpass.graph.stage import stage_ahead
from kvpass.runtime import staged
from kvpass.tuning import stages
from tests.long_steps import chunk, token, worst
from tests.models import OPTIONS, compile_with, generate, prompt, tiered, tiny
from tests.runtime.harness import Driver

SMALL = {"hot": "16KiB", "resident_tokens": 0}
"""Four blocks of 4 KiB: nearly all of what follows is cold."""


@pytest.fixture
def attends(monkeypatch):
    """The tables of words that decode kernels were given; None: those of the rows."""
    seen: list[torch.Tensor | None] = []
    real = triton_ops.attend_decode

    def note(*args, **options):
        seen.append(options["words"])
        return real(*args, **options)

    monkeypatch.setattr(triton_ops, "attend_decode", note)
    return seen


def test_staged_steps_are_right_to_the_bit(attends):
    outs = []
    for ahead in (False, True):
        torch.manual_seed(1)
        driver = Driver(size=2, layers=3, **SMALL)
        chunk(driver, 155)
        attends.clear()
        outs.append([token(driver, staged=ahead) for _ in range(8)])  # a block begins at 160
        assert all(worst(step) < 1e-5 for step in outs[-1])
        driver.check()
        tables = [words is not None for words in attends]
        assert tables == [False, ahead, ahead] * 8
        assert not any(staged._coming.values())
    for plain, early in zip(*outs, strict=True):
        assert all(torch.equal(a, b) for (a, _), (b, _) in zip(plain, early, strict=True))


def test_windows_stage_what_they_see(attends, monkeypatch):
    driver = Driver(layers=3, **SMALL)
    spans = {1: {"window": 40}, 2: {"chunk": 64}}
    chunk(driver, 210, spans)
    seen = []
    real = triton_ops.stage

    def note(rows, base, length, copies, table, **options):
        table.fill_(-1)
        real(rows, base, length, copies, table, **options)
        inside = (table >= copies.data_ptr()) & (table < copies.data_ptr() + copies.numel())
        seen.append(inside[0].nonzero().flatten().tolist())

    monkeypatch.setattr(triton_ops, "stage", note)
    assert worst(token(driver, spans, staged=True)) < 1e-5
    cold = {
        layer: [i for i, block in enumerate(driver.batch.blocks[layer][0]) if block.hot is None]
        for layer in (1, 2)
    }
    first = {1: (210 + 1 - 40) // 32, 2: 210 // 64 * 64 // 32}
    assert seen == [[i for i in cold[layer] if first[layer] <= i < 210 // 32] for layer in (1, 2)]


def test_what_has_no_room_is_read_in_place(attends, monkeypatch):
    driver = Driver(size=2, layers=2, **SMALL)
    chunk(driver, 150)
    for name, value, tables in (
        ("COPIES", 2 * driver.geometry.block_bytes, True),
        ("COPIES", driver.geometry.block_bytes, False),
        ("WIDTH", 3, False),
    ):
        attends.clear()
        with monkeypatch.context() as patch:
            patch.setattr(staged, name, value)
            assert worst(token(driver, staged=True)) < 1e-5
        assert [words is not None for words in attends] == [False, tables]
    driver.check()


def test_hot_blocks_are_not_staged(attends):
    driver = Driver(layers=2, hot="1MiB")
    chunk(driver, 100)
    attends.clear()
    with staged.step_over([driver.batch.rows]):
        assert worst(token(driver, staged=True)) < 1e-5
    assert attends == [None, None]


def test_a_step_that_fails_leaves_nothing_to_the_next(attends, monkeypatch):
    driver = Driver(layers=2, **SMALL)
    chunk(driver, 150)

    def fail(*args, **options):
        raise RuntimeError("no kernel")

    with monkeypatch.context() as patch:
        patch.setattr(triton_ops, "attend_decode", fail)
        with pytest.raises(RuntimeError, match="no kernel"):
            token(driver, staged=True)
    assert sum(map(len, staged._coming.values())) == 1
    for _ in range(3):
        assert worst(token(driver, staged=True)) < 1e-5
    staged._coming.clear()


# ------------------------------------------------------------------ what graphs ask for


@pytest.fixture
def graphs(monkeypatch):
    """Rewritten graphs, staged as they are for a GPU; the op does nothing on a CPU."""
    seen = []
    real = backends.rewrite

    def staging(graph, *args):
        plan = real(graph, *args)
        seen.append(SimpleNamespace(graph=graph, count=stage_ahead(graph)))
        return plan

    monkeypatch.setattr(backends, "rewrite", staging)
    torch._dynamo.reset()
    yield seen
    torch._dynamo.reset()


@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_each_layer_stages_the_next(graphs, name, inner):
    model = tiny(name, num_hidden_layers=3)
    compile_with(model, inner=inner)
    ids, mask = prompt(2, 60)
    got = generate(model, ids, mask, 8, past_key_values=tiered(model)).sequences
    assert torch.equal(got, generate(tiny(name, num_hidden_layers=3), ids, mask, 8).sequences)
    assert [each.count for each in graphs] == [0, *[2] * (len(graphs) - 1)] and len(graphs) > 1
    order = [
        (str(node.target).split(".")[1], next(x for x in node.args if isinstance(x, int)), node)
        for node in graphs[-1].graph.nodes
        if str(node.target).startswith("kvpass.")
    ]
    assert [(what, layer) for what, layer, _ in order] == [
        ("append", 0), ("stage", 1), ("attend", 0),
        ("append", 1), ("stage", 2), ("attend", 1),
        ("append", 2), ("attend", 2),
    ]  # fmt: skip
    nodes = {(what, layer): node for what, layer, node in order}
    for layer in (0, 1):
        stage = nodes["stage", layer + 1]
        assert nodes["attend", layer].kwargs["following"] is stage
        assert nodes["attend", layer + 1].kwargs["staged"] is stage
    if name == "gemma2":  # its even layers have a window of 40 tokens
        assert [nodes["stage", layer].args[5] for layer in (1, 2)] == [0, 40]
    heads, dim = 2, 16
    assert nodes["stage", 1].args[4] == heads * 2 * dim * 4 * 32


@pytest.mark.parametrize(("new", "count"), [(1, 1), (5, 0)])
def test_one_query_over_many_new_keys_is_not_staged(graphs, new, count):
    """They may fill blocks that the tables of a staged layer do not name."""

    class Model(torch.nn.Module):
        num_hidden_layers = 2

        def forward(self, q, x, cache):
            for layer in range(2):
                k, v = cache.update(x, x, layer)
                q = torch.nn.functional.scaled_dot_product_attention(q, k, v)
            return q

    model = Model().eval()
    compile_with(model)
    cache = kvpass.TieredCache(model, 100, **OPTIONS)
    with torch.no_grad():
        for _ in range(3):
            model(torch.randn(1, 2, 1, 16), torch.randn(1, 2, new, 16), cache)
    assert graphs[-1].count == count


def test_all_stage_but_who_says_otherwise(monkeypatch):
    assert stages(kvpass.Config()) and stages(kvpass.Config(prefetch=True))
    assert not stages(kvpass.Config(prefetch=False))
    monkeypatch.setenv("KVPASS_PREFETCH", "false")
    assert not stages(kvpass.Config.load())
    assert stages(kvpass.Config.load(prefetch=True))


@pytest.mark.parametrize("hot", ["1MiB", "16KiB"])
def test_a_step_says_whether_it_has_cold_blocks(hot):
    driver = Driver(layers=2, **{**SMALL, "hot": hot})
    chunk(driver, 150)
    token(driver, staged=True)
    assert staged.is_wanted(), "whoever says nothing is served"
    with staged.step_over([driver.batch.rows]):
        assert staged.is_wanted() == (hot == "16KiB")
        with staged.step_over([torch.zeros(3, 1, dtype=torch.int32)]):
            assert staged.is_wanted(), "rows that nobody knows"
    assert staged.is_wanted()
    staged._coming.clear()


def test_prompts_and_defaults_stage_nothing(monkeypatch):
    seen = []
    monkeypatch.setattr(backends, "stage_ahead", seen.append)
    model = tiny("llama")
    for options in ({}, {"prefetch": True}):
        compile_with(model, **options)
        ids, mask = prompt(1, 30)
        generate(model, ids, mask, 3, past_key_values=tiered(model))
    assert not seen, "a CPU reads ahead in another way"
    torch._dynamo.reset()
