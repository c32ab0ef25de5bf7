# SPDX-License-Identifier: Apache-2.0
"""Buffers whose memory was given back: right, or an error, whatever is done with them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kvpass
from kvpass.errors import CacheStateError, ConfigError, UnsupportedError
from kvpass.step.buffers import BufferGroup

ROOM, KV, D = 64, 2, 16
OPTIONS = {"inner": "eager", "block_size": 32, "hot": "256KiB", "resident_tokens": 32}


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(64, 128)
        for name in ("k", "v"):
            self.register_buffer(name, torch.zeros(2, KV, ROOM, D))

    def forward(self, x: Tensor, at: Tensor, masks: tuple[Tensor, ...]) -> Tensor:
        parts = self.qkv(x).split([64, 32, 32], -1)
        q, k, v = (part.unflatten(-1, (-1, D)).transpose(1, 2) for part in parts)
        self.k[:, :, at], self.v[:, :, at] = k, v
        keys, values = (b.repeat_interleave(2, 1) for b in (self.k, self.v))
        out = sum(F.scaled_dot_product_attention(q, keys, values, attn_mask=m) for m in masks)
        return out.transpose(1, 2).flatten(2)


class Model(nn.Module):
    def __init__(self, masks: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.register_buffer("table", torch.ones(masks, ROOM, ROOM, dtype=torch.bool).tril())
        self.embed = nn.Embedding(8, 64)
        self.eval().requires_grad_(False)

    def forward(self, x: Tensor, at: Tensor) -> Tensor:
        if not x.is_floating_point():
            x = self.embed(x)
        masks = tuple(mask[None, None, at] for mask in self.table)
        for layer in self.layers:
            x = x + layer(x, at, masks)
        return x


class Pair:
    """A compiled and an uncompiled model that get the same calls."""

    def __init__(self, *patterns: str, masks: int = 1) -> None:
        torch._dynamo.reset()
        self.model = Model(masks)
        self.plain = copy.deepcopy(self.model)
        if patterns:
            kvpass.release_buffers(self.model, *patterns)
        self.compiled = torch.compile(self.model, backend=kvpass.backend, options=OPTIONS)

    def __call__(self, *at: int, compiled: bool = True) -> None:
        x, positions = torch.randn(2, len(at), 64), torch.tensor(at, dtype=torch.int64)
        with torch.no_grad():
            expected = self.plain(x, positions)
            got = (self.compiled if compiled else self.model)(x, positions)
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


BOTH = ("*.k", "*.v")


@pytest.mark.parametrize("patterns", [BOTH, ("*.k",), ("*.v",), ("layers.0.*[kv]",)])
def test_some_or_all_buffers(patterns: tuple[str, ...]) -> None:
    pair = Pair(*patterns)
    pair(*range(10))
    pair(10)
    for model in (pair.model, pair.plain):
        model.layers[0].v.mul_(0.5)
    pair(11)
    pair(12, compiled=False)
    pair(13)


def test_a_call_without_new_tokens_forgets_nothing() -> None:
    pair = Pair(*BOTH)
    pair(*range(10))
    pair()
    pair(10)


def test_what_was_given_up_is_an_error_and_never_zeros() -> None:
    pair = Pair(*BOTH)
    pair(*range(10))
    pair(5)
    with pytest.raises(CacheStateError, match="given up"):
        pair.model.layers[0].k.dense()
    with pytest.raises(CacheStateError, match="given up"):
        pair(11, compiled=False)
    with pytest.raises(CacheStateError, match="given up"):
        pair(11)
    pair(6)
    for model in (pair.model, pair.plain):
        for layer in model.layers:
            layer.k.zero_(), layer.v.zero_()
    pair(*range(4))


def test_a_step_that_fails_after_a_rewind_leaves_a_state_that_is_known() -> None:
    pair = Pair(*BOTH)
    pair(*range(40))  # two blocks
    ids = torch.tensor([[99], [99]])  # no such embedding
    with torch.no_grad(), pytest.raises(IndexError):
        pair.compiled(ids, torch.tensor([5]))
    with pytest.raises(CacheStateError, match="given up"):
        pair(40)
    pair(*range(3))
    pair(3)


@pytest.mark.parametrize("release", [False, True])
def test_two_masks_over_one_buffer_are_both_probed(release: bool) -> None:
    """The second shows what is not filled, so that the model's own code has to run."""
    pair = Pair(*(BOTH if release else ()), masks=2)
    for model in (pair.model, pair.plain):
        model.table[1] = True
    pair(*range(10))
    pair(10)


def test_two_attentions_that_slice_one_buffer_copy_it_once(monkeypatch: Any) -> None:
    copies = []
    original = BufferGroup._copied
    monkeypatch.setattr(
        BufferGroup, "_copied", lambda self, *args: copies.append(1) or original(self, *args)
    )

    class Sliced(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name in ("k", "v"):
                self.register_buffer(name, torch.zeros(1, KV, ROOM, D))

        def forward(self, x: Tensor, start: int) -> Tensor:
            end = start + x.shape[2]
            self.k[:, :, start:end], self.v[:, :, start:end] = x, x + 1
            read = [(self.k[:, :, :end], self.v[:, :, :end]) for _ in range(2)]
            return sum(F.scaled_dot_product_attention(x * (i + 1), *r) for i, r in enumerate(read))

    torch._dynamo.reset()
    model, plain = Sliced(), Sliced()
    compiled = torch.compile(model, backend=kvpass.backend, options=OPTIONS)
    with torch.no_grad():
        for start in range(4):
            x = torch.randn(1, KV, 1, D)
            torch.testing.assert_close(compiled(x, start), plain(x, start))
    assert len(copies) == 1


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_another_backend_cannot_lose_a_write(backend: str) -> None:
    pair = Pair(*BOTH)
    pair(*range(4))
    other = torch.compile(pair.model, backend=backend)
    with torch.no_grad(), pytest.raises(Exception, match="changes a .* that kvpass holds|KV cache"):
        other(torch.randn(2, 1, 64), torch.tensor([4]))
    pair(4)


def test_memory_cannot_be_put_under_a_handle() -> None:
    pair = Pair(*BOTH)
    with pytest.raises(UnsupportedError, match="data"):
        pair.model.layers[0].k.data = torch.zeros(2, KV, ROOM, D)


def test_what_is_refused() -> None:
    model = Model()
    for patterns, words in (((), "needs the names"), (("*.kk",), "no tensor of the model")):
        with pytest.raises(ConfigError, match=words):
            kvpass.release_buffers(model, *patterns)
    with pytest.raises(UnsupportedError, match="only dense float tensors"):
        kvpass.release_buffers(model, "table")
    held = model.layers[0].k
    with pytest.raises(UnsupportedError, match=r"layers.0.k is also held elsewhere"):
        kvpass.release_buffers(model, *BOTH)
    assert model.layers[1].k.data_ptr()  # nothing has been released
    del held
    with pytest.raises(UnsupportedError, match="takes a module or a StaticCache"):
        kvpass.release_buffers(3)
    assert sum(kvpass.release_buffers(model, *BOTH).values()) == 4 * 2 * KV * ROOM * D * 4


def test_buffers_on_the_meta_device() -> None:
    model = Model()
    for layer in model.layers:
        layer.k, layer.v = layer.k.to("meta"), layer.v.to("meta")
    assert set(kvpass.release_buffers(model, *BOTH).values()) == {0}
    plain = Model()
    compiled = torch.compile(model, backend=kvpass.backend, options=OPTIONS)
    x = torch.randn(2, 5, 64)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x, torch.arange(5)), plain(x, torch.arange(5)))
