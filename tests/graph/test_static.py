# SPDX-License-Identifier: Apache-2.0
"""Static buffers as caches: each write and read that is understood, and what is found of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kvpass.graph.pointwise import MaskTerm
from kvpass.graph.probe import Probe
from kvpass.graph.site import FindResult
from tests.graph.buffers import (
    ALL,
    KV,
    WRITES,
    B,
    D,
    H,
    N,
    P,
    Read,
    T,
    assign,
    at,
    attention,
    causal,
    inputs,
    only,
    operand,
    put,
    refused,
    roll,
    tail,
    wide,
)
from tests.graph.recorder import find

STARTS = [0, P, T - N, torch.tensor(P), torch.tensor(P).int()]


@pytest.mark.parametrize(
    ("name", "start"),
    [(n, s) for n in WRITES for s in STARTS if "slice" not in n or isinstance(s, int)],
)
def test_writes(name: str, start: Any) -> None:
    write, first = WRITES[name]
    found = at(write, first=first, start=start)
    site = only(found)
    source = site.source
    assert (source.form, source.write, source.capacity, source.keep) == ("static", "at", T, 0)
    assert source.tokens_first is first and source.assumed == () and source.fills_buffer
    assert source.keys is source.past_k and source.values is source.past_v
    for node, words in ((source.past_k, "kb"), (source.past_v, "vb"), (source.k_new, "k_")):
        assert node is not None and node.op == "placeholder" and words in node.name
    assert len(source.writes) == 2 and source.stored_k is None and source.probe is None
    assert site.mask.causal and site.mask.terms == ()
    assert source.shapes == ((B, KV, T, D),) * 2
    if isinstance(start, Tensor):
        ((node, (symbol, kind)),) = found.entry.symbols.items()
        assert (node.name, kind) == ("l_given_0_", "value") and source.position is not None
        assert source.position.node.expr == symbol.node.expr
    else:
        assert source.position == start and found.entry.symbols == {}


def test_a_position_that_is_a_size() -> None:
    """Slices of a length that changes: a symbol of the shapes, not of what a tensor holds."""

    def step(q: Tensor, k: Tensor, v: Tensor, kb: Tensor, vb: Tensor, past: Tensor) -> Tensor:
        start = past.shape[0]
        kb[:, :, start : start + N] = k
        vb[:, :, start : start + N] = v
        return attention(q, kb, vb, causal(start))

    past = torch.zeros(P)
    torch._dynamo.mark_dynamic(past, 0)
    found = find(step, *inputs(), past)
    source = only(found).source
    assert isinstance(source.position, torch.SymInt) and found.entry.symbols == {}
    assert (source.write, source.assumed, source.capacity) == ("at", (), T)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("index_copy_", torch.int64), ("index_copy_ 1", torch.int64), ("tensor", torch.int64),
     ("tensor", torch.int32), ("aten.index_put_", torch.int64), ("aten.index_put_", torch.int32)],
)  # fmt: skip
def test_positions_that_a_graph_gets(name: str, dtype: torch.dtype) -> None:
    """That they are consecutive is for the runtime; the symbol is the first."""
    first = WRITES[name][1]

    def step(q: Tensor, k: Tensor, v: Tensor, kb: Tensor, vb: Tensor, positions: Tensor) -> Tensor:
        for buffer, new in ((kb, k), (vb, v)):
            if name.startswith("index_copy_"):
                buffer.index_copy_(1 if first else 2, positions, new)
            elif name == "tensor":
                buffer[:, :, positions] = new
            else:
                put(buffer, [None, None, positions], new)
        keys, values = (kb.transpose(1, 2), vb.transpose(1, 2)) if first else (kb, vb)
        return attention(q, keys, values, torch.arange(T) <= positions[:, None])

    found = find(step, *inputs(first=first), torch.arange(P, P + N, dtype=dtype))
    source = only(found).source
    ((node, (symbol, kind)),) = found.entry.symbols.items()
    assert (node.name, kind) == ("l_positions_", "positions") and source.position is not None
    assert source.position.node.expr == symbol.node.expr and source.assumed == ()


FIRST: Read = lambda b, start: b[:, :, : start + N]  # noqa: E731
READS: dict[str, tuple[Read, bool, bool, bool]] = {  # read, tokens first, whole, masked
    "filled": (FIRST, False, False, False),
    "filled, masked": (FIRST, False, False, True),
    "filled, all dims": (lambda b, start: b[:, :, : start + N, :], False, False, False),
    "filled from 0": (lambda b, start: b[:, :, 0 : start + N : 1], False, False, False),
    "filled, tokens first": (lambda b, start: b[:, : start + N], True, False, False),
    "capacity": (lambda b, start: b[:, :, :T], False, True, True),
    "beyond the capacity": (lambda b, start: b[:, :, : T + 5], False, True, True),
    "beyond, tokens first": (lambda b, start: b[:, : T + 5], True, True, True),
    "no-op cast": (lambda b, start: b.to(torch.float32), False, True, True),
    "no-op cast of a part": (lambda b, start: FIRST(b.to(b.dtype), start), False, False, False),
}


@pytest.mark.parametrize("name", READS)
def test_reads(name: str) -> None:
    read, first, whole, masked = READS[name]
    write = assign(ALL, "slice") if first else assign(ALL, ALL, "slice")
    keys = T if whole else P + N

    def mask(start: int) -> Tensor | None:
        return causal(start, keys=keys) if masked else None

    site = only(at(write, read, first, mask))
    source = site.source
    assert (source.write, source.position, source.capacity) == ("at", P, T)
    assert source.tokens_first is first and source.fills_buffer is whole
    assert site.mask.causal is masked and source.assumed == ()
    assert source.shapes[0] == (B, KV, keys, D)
    assert source.past_k is not None and source.past_k.op == "placeholder"


def test_a_read_up_to_a_number_beside_a_position_in_a_tensor() -> None:
    """That both are the same is not in the graph: the runtime has to find it."""
    stop = P + N
    found = at(read=lambda b, start: b[:, :, :stop], start=torch.tensor(P), mask=lambda start: None)
    ((have, wanted), other) = only(found).source.assumed
    assert have == stop and (have, str(wanted)) == (other[0], str(other[1]))
    ((symbol, _),) = found.entry.symbols.values()
    assert wanted.node.expr == symbol.node.expr + N  # type: ignore[union-attr]


@pytest.mark.parametrize("first", [False, True])
def test_a_batch_smaller_than_the_buffers(first: bool) -> None:
    q, k, v, *buffers = inputs(first=first)
    buffers = [torch.cat([x, x]) for x in buffers]

    def index(stop: int, start: int = 0) -> tuple[slice, ...]:
        part = (slice(start, stop),)
        return (slice(None, B), *(part if first else (ALL, *part)))

    def write(buffer: Tensor, new: Tensor, start: int) -> None:
        buffer[index(start + N, start)] = new

    data = [q, k, v, *buffers]
    read: Read = lambda b, start: b[index(start + N)]  # noqa: E731
    source = only(at(write, read, first, lambda start: None, data=data)).source
    assert (source.position, source.tokens_first) == (P, first)
    assert source.past_k is not None and source.past_k.meta["example_value"].shape[0] == 2 * B

    def whole(buffer: Tensor, start: int) -> Tensor:
        return buffer[:, : start + N] if first else buffer[:, :, : start + N]

    def step(q: Tensor, k: Tensor, v: Tensor, kb: Tensor, vb: Tensor) -> Tensor:
        write(kb, k, P)
        write(vb, v, P)
        keys, values = (x.transpose(1, 2) if first else x for x in (whole(kb, P), whole(vb, P)))
        return attention(torch.cat([q, q]), keys, values)

    refused(find(step, *data), "other sequences are read than were written")


REPEATS: dict[str, Callable[[Tensor], Tensor]] = {  # of [B, T, KV, D]
    "behind": lambda x: wide(x.transpose(1, 2)),
    "before": lambda x: x.repeat_interleave(2, dim=2).transpose(1, 2),
    "before, -2": lambda x: x.repeat_interleave(2, dim=-2).swapaxes(1, 2),
    "reference Llama": lambda x: (
        x[:, :, :, None, :].expand(B, -1, KV, 2, D).reshape(B, -1, H, D).transpose(1, 2)
    ),
    "unsqueeze": lambda x: (
        x.unsqueeze(-2).expand(-1, -1, -1, 2, -1).reshape(B, -1, H, D).transpose(2, 1)
    ),
    "negative dims": lambda x: x.repeat_interleave(2, 2).transpose(-3, -2).contiguous(),
}
WRONG_REPEATS: dict[str, Callable[[Tensor], Tensor]] = {
    "tiled": lambda x: x.repeat(1, 1, 2, 1).transpose(1, 2),
    "tiled by expand": lambda x: (
        x[:, :, None].expand(B, -1, 2, KV, D).reshape(B, -1, H, D).transpose(1, 2)
    ),
    "reversed": lambda x: x.repeat_interleave(2, 2).flip(1).transpose(1, 2),
    "tokens repeated": lambda x: wide(x.repeat_interleave(2, 1)[:, ::2].flip(1).transpose(1, 2)),
}


@pytest.mark.parametrize("name", [*REPEATS, *WRONG_REPEATS])
def test_heads_repeated_on_either_side_of_the_transposition(name: str) -> None:
    repeat = (REPEATS | WRONG_REPEATS)[name]

    def step(q: Tensor, k: Tensor, v: Tensor, kb: Tensor, vb: Tensor) -> Tensor:
        kb[:, P : P + N], vb[:, P : P + N] = k, v
        return F.scaled_dot_product_attention(q, repeat(kb), repeat(vb), attn_mask=causal(P))

    found = find(step, *inputs(first=True))
    if name in WRONG_REPEATS:
        assert found.sites == [] and len(found.refusals) == 1
    else:
        source = only(found).source
        assert source.tokens_first and source.shapes == ((B, KV, T, D),) * 2
        x = inputs(first=True)[3]
        assert torch.equal(repeat(x), wide(x.transpose(1, 2))), "the table itself must be right"


def test_buffers_that_the_graph_makes() -> None:
    def step(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        kb, vb = torch.zeros(B, KV, T, D), k.new_zeros((B, KV, T, D))
        for buffer, new in ((kb, k), (vb, v)):
            buffer.index_copy_(2, torch.arange(N), new)
        return attention(q, kb, vb, causal(0)), kb, vb

    source = only(find(step, *inputs()[:3])).source
    assert source.stored_k is source.past_k and source.stored_v is source.past_v
    assert source.stored_k is not None and source.position == 0 and source.capacity == T


@pytest.mark.parametrize("dims", [-2, 2, (2,)])
@pytest.mark.parametrize("last", [(ALL, ALL, [-1]), (ALL, ALL, slice(-1, None))], ids=repr)
def test_roll(last: Any, dims: Any) -> None:
    site = only(roll(dims=dims, last=last))
    source = site.source
    assert (source.write, source.position, source.capacity, source.keep) == ("roll", None, T, T)
    assert (site.mask.causal, site.mask.window, source.probe) == (True, T, None)
    assert len(source.writes) == 6 and source.keys is source.past_k
    assert source.k_new is not None and source.k_new.meta["example_value"].shape[2] == 1


TAILS: dict[str, tuple[FindResult | Callable[[], FindResult], int | None]] = {
    "full": (lambda: tail(lambda b: b[:, :, 1:, :]), None),
    "full, three dims": (lambda: tail(lambda b: b[:, :, 1:], lambda x: x[:, :, -T:]), None),
    "partly": (lambda: tail(lambda b: b[:, :, :7, :]), 7),
    "partly from 0, dim 2": (lambda: tail(lambda b: b[:, :, 0:8], dim=2), 8),
    "new alone": (lambda: tail(lambda b: None, tokens=T + 4), 0),
    "new alone, exactly": (lambda: tail(lambda b: None, tokens=T, window=4), 0),
    "narrow window": (lambda: tail(lambda b: b[:, :, 1:], window=4), None),
}


@pytest.mark.parametrize("name", TAILS)
def test_tail(name: str) -> None:
    make, position = TAILS[name]
    site = only(make())
    source = site.source
    assert (source.write, source.position) == ("tail", position)
    assert (source.capacity, source.keep, source.tokens_first) == (T, T, False)
    assert source.keys is not source.past_k and site.mask.causal
    assert (source.keys is source.k_new) is (position == 0)


def test_a_mask_that_is_not_read_is_probed() -> None:
    found = operand(lambda table, pos: table[None, None, pos])
    site = only(found)
    probe = site.source.probe
    assert probe is not None and not probe.all_seen and not site.mask.causal
    assert [term.node.op for term in probe.terms] == ["call_function"]
    with torch.no_grad():
        probe.run = torch.fx.GraphModule({}, probe.graph)
        args = (*inputs(), torch.ones(T, T).tril().bool(), torch.arange(P, P + N))
        names = [n.name for n in probe.graph.nodes if n.op == "placeholder"]
        order = ["l_q_", "l_k_", "l_v_", "l_kb_", "l_vb_", "l_given_", "l_pos_"]
        given = [args[order.index(name)] for name in names]
        assert [probe.holds(given, end) for end in (P + N - 1, P + N, T)] == [False, True, True]


def test_a_roll_under_a_mask_is_probed_for_all_seen() -> None:
    site = only(roll(mask=torch.ones(1, 1, 1, T, dtype=torch.bool)))
    assert site.source.probe is not None and site.source.probe.all_seen
    assert site.mask.terms == () and site.source.probe.ends == []


@pytest.mark.parametrize("rolled_first", [False, True])
def test_one_mask_over_two_kinds_of_buffers_is_probed_for_each(rolled_first: bool) -> None:
    """Of the one all keys must be seen, of the other none behind the last that is filled."""

    def step(q: Tensor, k: Tensor, v: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        kb, vb, kr, vr, mask, pos = rest

        def filled() -> Tensor:
            for buffer, new in ((kb, k), (vb, v)):
                buffer.index_copy_(2, pos, new)
            return attention(q, kb, vb, mask)

        def rolled() -> Tensor:
            for buffer, new in ((kr, k), (vr, v)):
                moved = buffer.roll(-1, dims=-2)
                moved[:, :, torch.tensor([-1])] = new
                buffer.copy_(moved)
            return attention(q, kr, vr, mask)

        return (rolled(), filled()) if rolled_first else (filled(), rolled())

    data, mask = [*inputs(1), *inputs(1)[3:]], torch.ones(1, 1, 1, T, dtype=torch.bool)
    found = find(step, *data, mask, torch.tensor([P]))
    probes = [(s.source.write, s.source.probe) for s in found.sites if s.source.probe is not None]
    assert len(probes) + len(found.refusals) == 2
    assert all(probe.all_seen is (write == "roll") for write, probe in probes)


def test_a_whole_buffer_of_new_tokens_under_is_causal() -> None:
    """``is_causal`` is aligned to the first key, where the new tokens begin."""
    data = inputs(T)

    def step(q: Tensor, k: Tensor, v: Tensor, kb: Tensor, vb: Tensor) -> Tensor:
        kb[:, :, :T], vb[:, :, :T] = k, v
        return F.scaled_dot_product_attention(q, wide(kb), wide(vb), is_causal=True)

    assert only(find(step, *data)).mask.causal


@pytest.mark.parametrize("hidden", [-torch.inf, torch.finfo(torch.float32).min, -1e4])
@pytest.mark.parametrize("kind", ["add", "fill"])
def test_a_probe_of_a_query_that_sees_nothing(kind: Any, hidden: float) -> None:
    """Scores that are all the lowest number would weigh the part that is not filled as well."""
    seen = torch.ones(N, T).tril(P).bool()
    graph = torch.fx.Graph()
    term = MaskTerm(kind, graph.placeholder("mask"), value=hidden)
    mask = torch.where(seen, 0.0, hidden) if kind == "add" else ~seen
    probe = Probe(graph, (term,), run=lambda mask: (mask,))
    if kind == "add" and hidden == -1e4:
        assert not probe.holds([mask], P + N)  # not hidden, only unlikely
        return
    assert probe.holds([mask], P + N) and not probe.holds([mask], P + N - 1)
    mask[1] = hidden if kind == "add" else True
    finite = kind == "add" or hidden != -torch.inf
    assert probe.holds([mask], P + N) is not finite
