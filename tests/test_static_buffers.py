# SPDX-License-Identifier: Apache-2.0
"""Static buffers of fixed size as caches: whatever is done to them, the same as uncompiled."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import kvpass
from kvpass.errors import KVPassWarning
from kvpass.graph.report import GraphReport, observed
from kvpass.step.buffers import BufferGroup
from kvpass.step.graph import PLAIN_CALLS, RewrittenGraph
from kvpass.step.overlap import overlap
from tests.models import OPTIONS

BATCH, CAPACITY, LAYERS = 2, 100, 2
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def counts(monkeypatch):
    """Calls of rewritten graphs, those among them that ran unrewritten, and copies of buffers."""
    seen = SimpleNamespace(runs=0, plain=0, copied=0)
    init, run, copied = RewrittenGraph.__init__, RewrittenGraph._run, BufferGroup._copied

    def start(self, *args, **kwargs):
        init(self, *args, **kwargs)
        plain = self._plain
        self._plain = lambda *given: bump("plain", plain, *given)

    def bump(name, call, *args):
        setattr(seen, name, getattr(seen, name) + 1)
        return call(*args)

    monkeypatch.setattr(RewrittenGraph, "__init__", start)
    monkeypatch.setattr(RewrittenGraph, "_run", lambda *args: bump("runs", run, *args))
    monkeypatch.setattr(BufferGroup, "_copied", lambda *args: bump("copied", copied, *args))
    return seen


def heads(x: Tensor) -> Tensor:
    return x.repeat_interleave(2, dim=1)


class Copied(nn.Module):
    """``index_copy_`` at a length that the module counts itself; the mask is causal."""

    def __init__(self, size: int = BATCH) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(64, 128), nn.Linear(64, 64)
        self.register_buffer("k", torch.zeros(self.shape(size)))
        self.register_buffer("v", torch.zeros(self.shape(size)))
        self.register_buffer("length", torch.tensor(0))

    @staticmethod
    def shape(size: int) -> tuple[int, ...]:
        return size, 2, CAPACITY, 16

    def forward(self, x: Tensor, at: Any, mask: Tensor) -> Tensor:
        q, k, v = self.qkv(x).split([64, 32, 32], -1)
        y = self.attend(*(t.unflatten(-1, (-1, 16)) for t in (q, k, v)), at, mask)
        return self.out(y.transpose(1, 2).flatten(2))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, at: Any, mask: Tensor) -> Tensor:
        positions = torch.arange(q.shape[1]) + self.length
        self.length.add_(q.shape[1])
        self.k.index_copy_(2, positions, k.transpose(1, 2))
        self.v.index_copy_(2, positions, v.transpose(1, 2))
        seen = torch.arange(CAPACITY) <= positions[:, None]
        return F.scaled_dot_product_attention(
            q.transpose(1, 2), heads(self.k), heads(self.v), attn_mask=seen
        )


class Indexed(Copied):
    """As in gpt-fast: assignment at positions, under the same rows of a table."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, at: Any, mask: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        self.k[:, :, at] = k
        self.v[:, :, at] = v
        return F.scaled_dot_product_attention(q, heads(self.k), heads(self.v), attn_mask=mask)


class Sliced(Copied):
    """As in the reference Llama: slices of ``[B, tokens, H, D]`` and of the batch, ``cat`` masks"""

    @staticmethod
    def shape(size: int) -> tuple[int, ...]:
        return size, CAPACITY, 2, 16

    def attend(self, q: Tensor, k: Tensor, v: Tensor, at: Any, mask: Tensor) -> Tensor:
        b, n = q.shape[:2]
        self.k[:b, at : at + n] = k
        self.v[:b, at : at + n] = v
        keys, values = self.k[:b, : at + n], self.v[:b, : at + n]
        q, keys, values = (t.transpose(1, 2) for t in (q, keys, values))
        scores = q @ heads(keys).transpose(2, 3) / math.sqrt(16)
        if n > 1:
            hidden = torch.full((n, n), -math.inf, dtype=q.dtype).triu(diagonal=1)
            scores = scores + torch.hstack([hidden.new_zeros(n, at), hidden])
        return F.softmax(scores.float(), -1).type_as(q) @ heads(values)


class Model(nn.Module):
    def __init__(self, layer: type[Copied], size: int = BATCH) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(layer(size) for _ in range(LAYERS))
        table = torch.ones(CAPACITY, CAPACITY, dtype=torch.bool).tril()
        self.register_buffer("table", table)
        self.eval().requires_grad_(False)

    def forward(self, x: Tensor, at: Any) -> Tensor:
        mask = self.table[None, None, at] if isinstance(at, Tensor) else self.table
        for layer in self.layers:
            x = x + layer(x, at, mask)
        return x


class Pair:
    """A compiled model and the same one uncompiled."""

    def __init__(
        self, layer: type[Copied], counts: Any, size: int = BATCH,
        dtype: torch.dtype = torch.float32, **options: Any,
    ) -> None:  # fmt: skip
        self.kind, self.counts, self.dtype = layer, counts, dtype
        self.model = Model(layer, size).to(dtype)
        self.reference = copy.deepcopy(self.model)
        options = {"inner": "eager"} | OPTIONS | options
        self.compiled = torch.compile(self.model, backend=kvpass.backend, options=options)
        self.generator = torch.Generator().manual_seed(5)
        self.reports: list[GraphReport] = []

    def place(self, start: int, tokens: int) -> Any:
        """What the form of the model is told about positions."""
        if self.kind is not Copied:
            return torch.arange(start, start + tokens) if self.kind is Indexed else start
        for model in (self.model, self.reference):
            for layer in model.layers:
                layer.length.fill_(start)
        return 0

    def call(self, start: int, tokens: int, size: int = BATCH, at: Any = None) -> Tensor:
        """One call of both, compared; returns the compiled result."""
        x = torch.randn(size, tokens, 64, generator=self.generator).to(self.dtype)
        at = self.place(start, tokens) if at is None else at
        with torch.no_grad(), observed(self.reports.append):
            got, expected = self.compiled(x, at), self.reference(x, at)
        close(got, expected, TOLERANCE[self.dtype])
        return got

    def calls(self, *sizes: int, start: int = 0, **kwargs: Any) -> list[Tensor]:
        found = []
        for tokens in sizes:
            found.append(self.call(start, tokens, **kwargs))
            start += tokens
        return found

    def both(self, change: Callable[[Any], object]) -> None:
        for model in (self.model, self.reference):
            with torch.no_grad():
                change(model)

    def check(self, plain: int = 0, copied: int = 1) -> None:
        """Buffers are equal, all was rewritten, and so many calls were not served from blocks."""
        assert self.reports and all(r.rewritten == LAYERS for r in self.reports), self.reports
        assert (self.counts.plain, self.counts.copied) == (plain, copied)
        assert self.counts.runs > plain
        tolerance = 1e-6 if self.dtype == torch.float32 else TOLERANCE[self.dtype]
        for name, buffer in self.model.named_buffers():
            close(buffer, self.reference.get_buffer(name.removeprefix("_orig_mod.")), tolerance)


def close(got: Tensor, expected: Tensor, tolerance: float) -> None:
    assert got.shape == expected.shape and got.dtype == expected.dtype
    got, expected = got.double(), expected.double()
    assert float((got - expected).abs().max()) <= tolerance * float(expected.abs().max().clamp(1))


FORMS = [Copied, Indexed, Sliced]
forms = pytest.mark.parametrize("form", FORMS)
TURNS = (40, 1, 1, 7, 1, 1, 20, 1)


@forms
def test_several_turns(form, counts):
    pair = Pair(form, counts)
    pair.calls(*TURNS)
    pair.check()


@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
@forms
def test_other_inner_compilers(form, inner, counts):
    pair = Pair(form, counts, inner=inner)
    pair.calls(12, 1, 1, 1, 5)
    pair.call(9, 1)
    pair.check()


@forms
def test_rewinds(form, counts):
    pair = Pair(form, counts)
    pair.calls(*TURNS)
    for start in (31, 5, 0):
        pair.calls(3, 1, 1, start=start)
    pair.check()


@forms
def test_a_gap_shows_what_the_buffer_has(form, counts):
    """Behind the gap everything is read from the buffer, which has older tokens in it."""
    pair = Pair(form, counts)
    pair.calls(40, 1)
    pair.calls(3, 1, start=10)
    pair.calls(3, 1, start=35)
    pair.calls(2, 1, start=60)
    pair.check(copied=3)


def test_scattered_positions(counts):
    pair = Pair(Indexed, counts)
    pair.calls(20, 1)
    for at in ([24, 22, 23], [3, 3, 4], [22, 21, 20], [30, 32, 34]):
        pair.call(0, 3, at=torch.tensor(at))
    assert counts.plain == 4
    pair.calls(3, 1, start=35)
    pair.check(plain=4, copied=2)


def test_negative_positions(counts):
    pair = Pair(Indexed, counts)
    pair.calls(20, 1)
    pair.call(0, 3, at=torch.arange(-3, 0))
    pair.check(plain=1)


def test_a_mask_that_shows_what_is_not_filled(counts):
    pair = Pair(Indexed, counts)
    pair.calls(20, 1)
    pair.both(lambda model: model.table.fill_(True))
    pair.calls(1, 3, start=21)
    pair.check(plain=2)


def test_a_graph_that_is_rewritten_in_vain_is_said_once(counts):
    """Each call is served by the model's own attention, so `explain` alone would mislead."""
    pair = Pair(Indexed, counts)
    pair.calls(20, 1)
    pair.both(lambda model: model.table.fill_(True))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pair.calls(*[1] * (PLAIN_CALLS - 1), start=21)
    with pytest.warns(KVPassWarning, match="hold no token yet"):
        pair.call(20 + PLAIN_CALLS, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pair.calls(*[1] * PLAIN_CALLS, start=21 + PLAIN_CALLS)
    pair.check(plain=2 * PLAIN_CALLS)


def test_a_mask_that_hides_every_key_of_a_query(counts):
    pair = Pair(Indexed, counts)
    pair.calls(20, 1)
    pair.both(lambda model: model.table[22:].fill_(False))
    x, at = torch.randn(BATCH, 3, 64), torch.arange(21, 24)
    with torch.no_grad():
        got, expected = pair.compiled(x, at), pair.reference(x, at)
    assert torch.allclose(got, expected, atol=1e-5, equal_nan=True)


@forms
def test_positions_beyond_the_capacity_fail_as_uncompiled(form, counts):
    pair = Pair(form, counts)
    pair.calls(40, 1)
    x, at, messages = torch.randn(BATCH, 3, 64), pair.place(98, 3), []
    for call in (pair.compiled, pair.reference):
        with torch.no_grad(), pytest.raises((IndexError, RuntimeError)) as raised:
            call(x, at)
        messages.append((type(raised.value), str(raised.value).split("\n")[0]))
    if form is not Sliced:  # whose sizes are checked while it is traced
        assert messages[0] == messages[1]
    pair.calls(3, 1, start=41)
    assert counts.plain <= 1
    pair.check(plain=counts.plain, copied=counts.copied)


CHANGES: dict[str, Callable[[Any], object]] = {
    "zero_": lambda m: [b.zero_() for b in (m.layers[0].k, m.layers[0].v)],
    "keys of one layer": lambda m: m.layers[1].k.zero_(),
    "values of one layer": lambda m: m.layers[1].v.mul_(0.5),
    "all": lambda m: m.layers[0].k.__setitem__(..., torch.ones(())),
    "a slice": lambda m: m.layers[1].v[:, :, 3:9].fill_(0.25),
    "a view": lambda m: m.layers[1].v.view(-1)[7:300].neg_(),
    "copy_": lambda m: m.layers[0].v.copy_(torch.linspace(-1, 1, CAPACITY * 16).view(CAPACITY, 16)
                                           .expand(m.layers[0].k.shape) if m.layers[0].k.shape[2]
                                           == CAPACITY else 0.5),
    "state dict": lambda m: m.load_state_dict(
        {n: x.flip(0) if x.dim() == 4 else x for n, x in m.state_dict().items()}
    ),
    "foreach": lambda m: torch._foreach_mul_([layer.k for layer in m.layers], 1.5),
    "another tensor": lambda m: setattr(m.layers[0], "k", m.layers[0].k.clone() * 2),
    "layers swapped": lambda m: swap(m.layers[0], "k", m.layers[1], "k"),
    "keys and values swapped": lambda m: swap(m.layers[1], "k", m.layers[1], "v"),
    "both layers": lambda m: [swap(m.layers[0], n, m.layers[1], n) for n in "kv"],
}  # fmt: skip


def swap(a: Any, first: str, b: Any, second: str) -> None:
    one, other = getattr(a, first), getattr(b, second)
    setattr(a, first, other)
    setattr(b, second, one)


@pytest.mark.parametrize(
    ("form", "name"), [((Copied, Sliced)[i % 2], name) for i, name in enumerate(CHANGES)]
)
def test_changes_from_outside_are_seen(form, name, counts):
    pair = Pair(form, counts)
    pair.calls(40, 1)
    pair.both(CHANGES[name])
    pair.calls(1, 3, 1, start=41)
    pair.check(copied=2)
    pair.both(CHANGES[name])
    pair.calls(1, 1, start=20)
    pair.check(copied=3)


def test_the_batch_changes(counts):
    """Of sequences that are not written, the buffers stay as they are."""
    pair = Pair(Sliced, counts, size=4)
    pair.calls(30, 1, size=3)
    pair.calls(5, 1, size=2, start=31)
    pair.calls(3, 1, size=4, start=20)
    pair.calls(6, 1, size=1)
    pair.calls(2, 1, size=4, start=7)
    pair.check(copied=counts.copied)
    assert counts.copied <= 5


def test_copies_of_a_model(counts):
    pair = Pair(Copied, counts)
    pair.calls(40, 1)
    other = Pair(Copied, counts)
    other.model, other.reference = copy.deepcopy(pair.model), copy.deepcopy(pair.reference)
    options = {"inner": "eager"} | OPTIONS
    other.compiled = torch.compile(other.model, backend=kvpass.backend, options=options)
    for start in (41, 45):
        other.calls(3, 1, start=start)
        pair.calls(1, 3, start=start)
    other.check(copied=2)
    pair.check(copied=2)


@pytest.mark.parametrize(
    ("form", "dtype"),
    [(Copied, torch.float16), (Indexed, torch.bfloat16), (Sliced, torch.bfloat16)],
)
def test_narrow_dtypes(form, dtype, counts):
    pair = Pair(form, counts, dtype=dtype)
    pair.calls(*TURNS)
    pair.check()


@forms
def test_blocks_in_the_cold_tier_change_no_bit(form, counts):
    found = []
    for hot in ("32KiB", "4MiB"):
        torch._dynamo.reset()
        pair = Pair(form, counts, hot=hot, heat_interval=2, resident_tokens=0)
        found.append([*pair.calls(*TURNS), *pair.calls(3, 1, 1, start=37)])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_under_inference_mode(counts):
    pair = Pair(Copied, counts)
    with torch.inference_mode():
        pair.calls(20, 1, 1)
        pair.both(lambda model: model.layers[0].k.zero_())
        pair.calls(1, 3, start=22)
    pair.check(copied=2)


def test_keys_and_values_in_one_tensor(counts):
    """Not rewritten: a write to one of them is a write to the memory of both."""

    class Joined(Copied):
        def attend(self, q, k, v, at, mask):
            self.k, self.v = self.kv
            return super().attend(q, k, v, at, mask)

    pair = Pair(Joined, counts)
    for model in (pair.model, pair.reference):
        for layer in model.layers:
            del layer.k, layer.v
            layer.kv = torch.zeros(2, *Copied.shape(BATCH))
    pair.kind = Copied
    pair.calls(20, 1, 1)


def share_layers(model: Any) -> None:
    for name in "kv":
        setattr(model.layers[1], name, getattr(model.layers[0], name)[:])


def share_rows(model: Any) -> None:
    """The sequences of one layer's keys begin among those of the other's."""
    first, second = model.layers[0], model.layers[1]
    whole = torch.zeros(BATCH + 1, *first.k.shape[1:])
    whole[:BATCH] = first.k
    first.k, second.k = whole[:BATCH], whole[1:]


def share_keys_and_values(model: Any) -> None:
    model.layers[0].v = model.layers[0].k[:]


@pytest.mark.parametrize("change", [share_layers, share_rows, share_keys_and_values])
@pytest.mark.parametrize("form", [Copied, Sliced])
def test_buffers_that_come_to_share_memory_are_read_as_the_model_does(form, change, counts):
    """Dynamo guards no overlap: the graph made for separate buffers is called with views of one."""
    pair = Pair(form, counts)
    pair.calls(20, 1)
    pair.both(change)
    pair.calls(1, 3, 1, start=21)
    assert counts.plain == 2  # the third call is compiled anew, and refused


@given(
    shape=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    moved=st.integers(0, 40),
    step=st.integers(1, 3),
)
def test_overlap_is_an_element_in_common(shape, moved, step):
    memory = torch.zeros(400)
    strides = [step * 4**axis for axis in range(len(shape))]
    one = memory.as_strided(shape, strides, 0)
    other = memory.as_strided(shape, strides, moved)
    one.fill_(1)
    assert overlap([one, other]) == bool(other.any())
    assert overlap([other, one, one[:0]]) == bool(other.any())
