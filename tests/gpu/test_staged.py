# SPDX-License-Identifier: Apache-2.0
"""Decode steps that copy the next layer's cold blocks beside their own work, on a GPU."""

from __future__ import annotations

import pytest
import torch

from kvpass.runtime import staged
from tests.long_steps import chunk, token, worst
from tests.models import compile_with, generate, prompt, tiered, tiny
from tests.runtime.harness import Driver

pytestmark = pytest.mark.gpu
SMALL = {"hot": "1MiB", "resident_tokens": 0, "device": "cuda"}
DTYPES = {torch.float32: 2e-3, torch.float16: 6e-3, torch.bfloat16: 4e-2}


@pytest.fixture
def stages(monkeypatch):
    """Buffers that were begun."""
    torch._dynamo.reset()
    seen = []
    real = staged.start

    def note(buffer, *args):
        real(buffer, *args)
        seen.append(any(x.buffer is buffer for each in staged._coming.values() for x in each))

    monkeypatch.setattr("kvpass.ops.start", note)
    yield seen
    torch._dynamo.reset()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 3])
def test_staged_steps_are_right_to_the_bit(stages, dtype, size):
    outs = []
    for ahead in (False, True):
        torch.manual_seed(1)
        driver = Driver(size=size, layers=6, width=64, dtype=dtype, **SMALL)
        chunk(driver, 1500)
        outs.append([token(driver, staged=ahead) for _ in range(60)])
        assert max(map(worst, outs[-1])) < DTYPES[dtype]
        driver.check()
    assert len(stages) == 60 * 5 and all(stages)
    for plain, early in zip(*outs, strict=True):
        assert all(torch.equal(a, b) for (a, _), (b, _) in zip(plain, early, strict=True))


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_tokens_and_bits_are_those_of_steps_that_read_in_place(stages, name, graphs):
    plain, model = tiny(name).to("cuda"), tiny(name).to("cuda")
    ids, mask = (x.to("cuda") for x in prompt(2, 200))
    outs = []
    for ahead in (False, True):
        compile_with(model, inner="inductor", cuda_graphs=graphs, prefetch=ahead)
        out = generate(model, ids, mask, 90, past_key_values=tiered(model))
        outs.append(torch.stack(out.logits))
        if not ahead:
            assert not stages
            assert torch.equal(out.sequences, generate(plain, ids, mask, 90).sequences)
    assert any(stages)
    assert torch.equal(*outs)


def test_blocks_move_while_graphs_are_replayed(stages):
    """Poisoned slots show any copy of a block that was gone."""
    plain, model = tiny("llama").to("cuda"), tiny("llama").to("cuda")
    compile_with(model, inner="inductor", prefetch=True)
    ids, mask = (x.to("cuda") for x in prompt(1, 60))
    for seed in range(3):
        ids, mask = (x.to("cuda") for x in prompt(1, 60 + 31 * seed, seed=seed))
        cache = tiered(model, hot="128KiB", poison=True)
        got = generate(model, ids, mask, 200, past_key_values=cache).sequences
        assert torch.equal(got, generate(plain, ids, mask, 200).sequences)
        assert cache.snapshot().counters.demoted_blocks > 0
    assert any(stages)


def test_memory_is_flat(stages):
    model = tiny("llama").to("cuda")
    compile_with(model, inner="inductor", prefetch=True)
    ids, mask = (x.to("cuda") for x in prompt(1, 100))
    reserved = []
    for _ in range(4):
        generate(model, ids, mask, 60, past_key_values=tiered(model))
        reserved.append(torch.cuda.memory_reserved())
    assert reserved[3] <= reserved[1] + (2 << 20)
