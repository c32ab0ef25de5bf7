# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs captured by hand: replays inside steps are right, replays outside write nothing."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kvpass
from kvpass.errors import CacheStateError, UnsupportedError
from tests.models import OPTIONS, compile_with, prompt, tiered, tiny

pytestmark = pytest.mark.gpu
FIRST, LENGTH = 30, 110
"""Tokens of the prompt, and of all: several blocks of 32 come while graphs are replayed."""


@pytest.fixture(autouse=True)
def no_grad():
    torch._dynamo.reset()
    with torch.no_grad():
        yield
    torch._dynamo.reset()


class ByHand:
    """A transformers model whose decode step was captured by hand."""

    def __init__(self, name: str = "llama", size: int = 2, tokens: int = 1) -> None:
        self.plain, self.model = tiny(name).to("cuda"), tiny(name).to("cuda")
        compile_with(self.model, inner="inductor")
        self.ids = prompt(size, LENGTH)[0].to("cuda")
        self.cache = tiered(self.model)
        self.tokens = tokens
        self.new = torch.zeros(size, tokens, dtype=torch.long, device="cuda")
        self.positions = torch.zeros(1, tokens, dtype=torch.long, device="cuda")
        self.model(self.ids[:, :FIRST], past_key_values=self.cache)
        self.at = FIRST
        self.outs: list[torch.Tensor] = []
        for _ in range(3):
            with self.cache.begin_step(tokens):
                self._fill()
                self.outs.append(self._call())
        self.graph = torch.cuda.CUDAGraph()
        with self.cache.begin_step(tokens):
            self._fill()
            with torch.cuda.graph(self.graph):
                self.logits = self._call()
            self.graph.replay()
        self.outs.append(self.logits.clone())

    def _call(self) -> torch.Tensor:
        return self.model(self.new, past_key_values=self.cache, position_ids=self.positions).logits

    def _fill(self) -> None:
        self.new.copy_(self.ids[:, self.at : self.at + self.tokens])
        self.positions.copy_(torch.arange(self.at, self.at + self.tokens, device="cuda"))
        self.at += self.tokens

    def replay(self) -> None:
        with self.cache.begin_step(self.tokens):
            self._fill()
            self.graph.replay()
        self.outs.append(self.logits.clone())

    def check(self) -> None:
        """All logits so far are those of the model without kvpass."""
        self.cache.check_steps()
        got = torch.cat(self.outs, 1)
        want = self.plain(self.ids[:, : self.at]).logits[:, FIRST:]
        torch.testing.assert_close(got, want, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize(("name", "tokens"), [("llama", 1), ("gemma2", 1), ("llama", 3)])
def test_replays_are_right_across_blocks_and_moves(name, tokens):
    hand = ByHand(name, tokens=tokens)
    while hand.at + tokens <= LENGTH:
        hand.replay()
    hand.check()
    assert hand.cache.get_seq_length() == hand.at
    assert hand.cache.snapshot().counters.demoted_blocks > 0, "the tiers were too large to matter"


class Own(nn.Module):
    """A decoder of two layers that is told the positions of its tokens."""

    num_hidden_layers, heads, dim = 2, 2, 16

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        width = self.heads * self.dim
        self.tokens, self.places = nn.Embedding(64, width), nn.Embedding(256, width)
        self.project = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(2))

    def forward(self, ids: Tensor, positions: Tensor, cache: Any = None) -> Tensor:
        x = self.tokens(ids) + self.places(positions)
        for layer, project in enumerate(self.project):
            q, k, v = (
                part.unflatten(-1, (self.heads, self.dim)).transpose(1, 2)
                for part in project(x).chunk(3, -1)
            )
            if cache is not None:
                k, v = cache.update(k, v, layer)
            out = F.scaled_dot_product_attention(q, k, v, is_causal=ids.shape[1] > 1)
            x = x + out.transpose(1, 2).flatten(2)
        return x @ self.tokens.weight.T


def test_a_model_of_ones_own():
    model = Own().to("cuda").eval()
    step = torch.compile(model, backend=kvpass.backend, options={"inner": "inductor", **OPTIONS})
    ids = torch.randint(0, 64, (2, 80), device="cuda")
    places = torch.arange(80, device="cuda")[None]
    cache = kvpass.TieredCache(model, max_tokens=200, **OPTIONS)
    step(ids[:, :30], places[:, :30], cache)
    new, at = ids[:, :1].clone(), places[:, :1].clone()
    graph, outs, logits = torch.cuda.CUDAGraph(), [], torch.empty(0)
    for i in range(30, 80):
        with cache.begin_step(1):
            new.copy_(ids[:, i : i + 1])
            at.fill_(i)
            if i < 33:
                logits = step(new, at, cache)
            elif i == 33:
                with torch.cuda.graph(graph):
                    logits = step(new, at, cache)
            if i >= 33:
                graph.replay()
            outs.append(logits.clone())
    cache.check_steps()
    want = model(ids, places)[:, 30:]
    torch.testing.assert_close(torch.cat(outs, 1), want, rtol=2e-3, atol=2e-3)


def test_a_replay_outside_a_step_writes_nothing():
    hand = ByHand()
    hand.replay()
    held = [t.clone() for t in hand.cache.read(0)]
    hand.new.fill_(5)
    hand.graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(hand.cache.read(0), held, strict=True))
    with pytest.raises(CacheStateError, match="found no tokens reserved for it"):
        hand.cache.check_steps()
    with pytest.raises(CacheStateError, match="found no tokens reserved for it"):
        for _ in range(20):  # noticed without waiting, a step or two late
            hand.replay()
            torch.cuda.synchronize()
    with pytest.raises(CacheStateError, match=r"reset\(\) it"):
        hand.model(hand.new, past_key_values=hand.cache, position_ids=hand.positions)
    hand.cache.reset()
    hand.model(hand.ids[:, :FIRST], past_key_values=hand.cache)
    assert hand.cache.get_seq_length() == FIRST


def test_two_replays_in_one_step():
    hand = ByHand()
    with hand.cache.begin_step(1):
        hand._fill()
        hand.graph.replay()
        torch.cuda.synchronize()
        held = [t.clone() for t in hand.cache.manager.gather(hand.cache.batch, 1, hand.at)]
        hand.new.fill_(5)
        hand.graph.replay()
        torch.cuda.synchronize()
        now = hand.cache.manager.gather(hand.cache.batch, 1, hand.at)
    assert all(torch.equal(a, b) for a, b in zip(now, held, strict=True))
    with pytest.raises(CacheStateError, match="found no tokens reserved for it"):
        hand.cache.check_steps()


def test_a_step_without_a_replay():
    hand = ByHand()
    with hand.cache.begin_step(1):
        pass
    with pytest.raises(CacheStateError, match="a step that was begun appended nothing"):
        hand.cache.check_steps()


def test_a_graph_of_other_tokens():
    hand = ByHand()
    before = [t.clone() for t in hand.cache.read(0)]
    with hand.cache.begin_step(2):
        hand.graph.replay()
    after = hand.cache.read(0)
    assert all(torch.equal(a[:, :, : hand.at], b) for a, b in zip(after, before, strict=True))
    with pytest.raises(CacheStateError, match="found no tokens reserved"):
        hand.cache.check_steps()


def test_ordinary_steps_crops_and_cancelled_steps_between():
    hand = ByHand()
    hand.replay()
    hand._fill()
    out = hand.model(hand.new, past_key_values=hand.cache, position_ids=hand.positions).logits
    hand.outs.append(out)
    with hand.cache.begin_step(1) as step:
        step.cancel()
    hand.replay()
    hand.check()
    hand.cache.truncate(hand.at - 4)
    hand.at -= 4
    del hand.outs[-4:]
    while hand.at < LENGTH:
        hand.replay()
    hand.check()


def test_a_graph_of_sequences_that_were_reordered_is_noticed():
    hand = ByHand()
    hand.cache.select([1, 0])
    hand.replay()
    with pytest.raises(CacheStateError, match="appended nothing"):
        hand.cache.check_steps()


def test_a_graph_of_a_cache_that_is_gone_touches_nobody():
    hand = ByHand()
    graph, model, ids = hand.graph, hand.model, hand.ids
    plain, new = hand.plain, hand.new
    hand.cache = None
    gc.collect()
    other = tiered(model)  # gets the rows, and blocks at the same places
    out = [model(ids[:, :FIRST], past_key_values=other).logits]
    for i in range(FIRST, 60):
        new.fill_(7)
        graph.replay()
        out.append(model(ids[:, i : i + 1], past_key_values=other).logits)
    want = plain(ids[:, :60]).logits
    torch.testing.assert_close(torch.cat(out, 1), want, rtol=2e-3, atol=2e-3)


def test_positions_that_would_be_repeated_are_refused():
    model = tiny("llama").to("cuda")
    compile_with(model, inner="inductor")
    ids = prompt(1, 40)[0].to("cuda")
    cache = tiered(model)
    model(ids[:, :30], past_key_values=cache)
    for i in (30, 31, 32):
        model(ids[:, i : i + 1], past_key_values=cache)
    with (
        pytest.raises(UnsupportedError, match="repeat this one's length"),
        cache.begin_step(1),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        model(ids[:, 33:34], past_key_values=cache)
    torch.cuda.synchronize()
    assert cache.get_seq_length() == 33
    assert model(ids[:, 33:34], past_key_values=cache).logits.isfinite().all()


def test_a_call_in_a_capture_without_a_step_is_refused():
    hand = ByHand()
    with (
        pytest.raises(CacheStateError, match="capture inside `with cache.begin_step"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        hand._call()
    torch.cuda.synchronize()
    hand.replay()
    hand.check()
