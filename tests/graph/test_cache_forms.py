# SPDX-License-Identifier: Apache-2.0
"""Where K and V come from: each supported source is found, each other one is named and refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kvpass.graph import graph_refusal
from kvpass.graph.site import FindResult
from kvpass.runtime.handle import Content, KVHandle
from tests.graph.recorder import Recorder, find

B, H, KV, N, P, D = 2, 4, 2, 3, 5, 16
Q = torch.randn(B, H, N, D)
K, V = torch.randn(B, KV, N, D), torch.randn(B, KV, N, D)
PK, PV = torch.randn(B, KV, P, D), torch.randn(B, KV, P, D)
Step = Callable[..., tuple[Tensor, ...]]


def refused(found: FindResult, words: str, form: str | None = None) -> None:
    assert found.sites == []
    assert len(found.refusals) == 1
    assert words in found.refusals[0].reason
    assert found.refusals[0].form == form


def product(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    keys, values = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (keys, values))
    return F.scaled_dot_product_attention(q, keys, values)


def grown(join: Callable[[Tensor, Tensor], Tensor]) -> FindResult:
    """Find in attention over ``join(past, new)`` that returns the grown cache."""

    def step(q: Tensor, k: Tensor, v: Tensor, pk: Tensor, pv: Tensor) -> tuple[Tensor, ...]:
        keys, values = join(pk, k), join(pv, v)
        return product(q, keys, values), keys, values

    return find(step, Q, K, V, PK, PV)


@pytest.mark.parametrize(
    "join",
    [
        lambda past, new: torch.cat([past, new], dim=-2),
        lambda past, new: torch.cat((past, new), 2),
        lambda past, new: torch.cat(tensors=[past, new], dim=2),
        lambda past, new: torch.concat([past, new], axis=-2),
        lambda past, new: torch.cat([past, new.contiguous()], dim=-2),
    ],
)
def test_functional_cache(join: Callable[[Tensor, Tensor], Tensor]) -> None:
    found = grown(join)
    assert found.refusals == [] and len(found.sites) == 1
    source = found.sites[0].source
    assert source.form == "functional" and source.update is None
    assert source.past_k is not None and source.past_v is not None
    assert "pk" in source.past_k.name and "pv" in source.past_v.name
    for new in (source.k_new, source.v_new):
        assert new is not None and new.meta["example_value"].shape == (B, KV, N, D)


@pytest.mark.parametrize(
    ("join", "words"),
    [
        (lambda past, new: torch.cat([past, new], dim=2)[:, :, -6:], "slice of the cache"),
        (lambda past, new: torch.cat([past, new], dim=2) * 1.5, "is not returned"),
        (lambda past, new: torch.cat([past, new], dim=2) + 1.5, "add"),
        (lambda past, new: torch.cat([past, new], dim=2).double().float(), "cast"),
        (lambda past, new: torch.cat([past, new], dim=2).roll(1, 2), "between the cache"),
        (lambda past, new: torch.cat([past, new, new], dim=2), "no KV cache"),
    ],
)
def test_changed_cache_is_refused(join: Callable[[Tensor, Tensor], Tensor], words: str) -> None:
    found = grown(join)
    assert found.sites == [] and len(found.refusals) == 1
    assert words in found.refusals[0].reason


def changed(keys_change: Step, values_change: Step, *inputs: Tensor) -> FindResult:
    """Find in an attention whose keys and values are changed between the cache and the product."""

    def step(q: Tensor, k: Tensor, v: Tensor, pk: Tensor, pv: Tensor) -> tuple[Tensor, ...]:
        keys, values = torch.cat([pk, k], dim=2), torch.cat([pv, v], dim=2)
        wide = [x.repeat_interleave(2, 1) for x in (keys_change(keys), values_change(values))]
        scores = (q.float() if wide[0].dtype != q.dtype else q) @ wide[0].mT
        return F.softmax(scores, dim=-1).to(wide[1].dtype) @ wide[1], keys, values

    return find(step, *(inputs or (Q, K, V, PK, PV)))


KEY_SCALES: dict[str, tuple[Step, float]] = {
    "times": (lambda x: x * 1.5, 1.5),
    "left": (lambda x: 0.25 * x, 0.25),
    "divided": (lambda x: x / 8, 0.125),
    "twice": (lambda x: torch.div(x.mul(3), 4.0), 0.75),
}


@pytest.mark.parametrize("name", KEY_SCALES)
def test_keys_scaled_behind_the_cache(name: str) -> None:
    scale, expected = KEY_SCALES[name]
    found = changed(scale, lambda x: x)
    assert found.refusals == [] and len(found.sites) == 1
    assert found.sites[0].scale == pytest.approx(expected, rel=1e-15)
    assert found.sites[0].source.keys.target is torch.cat


CHANGES: dict[str, tuple[Step, Step, str]] = {
    "keys times a tensor": (lambda x: x * x.new_tensor(2.0), lambda x: x, "mul"),
    "keys times a vector": (lambda x: x * torch.arange(16.0), lambda x: x, "mul"),
    "keys negated": (lambda x: x * -1.0, lambda x: x, "mul"),
    "keys times zero": (lambda x: x * 0, lambda x: x, "mul"),
    "keys divided by a tensor": (lambda x: x / torch.full((), 2.0), lambda x: x, ""),
    "keys floored": (lambda x: torch.div(x, 2, rounding_mode="floor"), lambda x: x, ""),
    "keys in place": (lambda x: x.mul_(2.0), lambda x: x, ""),
    "keys reversed": (lambda x: x.flip(2), lambda x: x, "flip"),
    "values scaled": (lambda x: x, lambda x: x * 2.0, "the values are scaled"),
    "values reversed": (lambda x: x, lambda x: x.flip(2), "flip"),
    "values widened to fp64": (lambda x: x, lambda x: x.double(), "cast"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_other_changes_behind_the_cache_are_refused(name: str) -> None:
    keys_change, values_change, words = CHANGES[name]
    found = changed(keys_change, values_change)
    assert found.sites == [] and len(found.refusals) == 1
    assert words in found.refusals[0].reason


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_keys_widened_behind_the_cache(dtype: torch.dtype) -> None:
    inputs = [x.to(dtype) for x in (Q, K, V, PK, PV)]
    found = changed(lambda x: x.float() * 0.5, lambda x: x, *inputs)
    assert found.refusals == [] and [site.scale for site in found.sites] == [0.5]
    assert found.sites[0].query.op == "placeholder"
    refused(changed(lambda x: x.float(), lambda x: x.float(), *inputs), "the values are widened")


def test_narrowed_keys_are_refused() -> None:
    def step(q: Tensor, k: Tensor, v: Tensor, pk: Tensor, pv: Tensor) -> tuple[Tensor, ...]:
        keys, values = torch.cat([pk, k], dim=2), torch.cat([pv, v], dim=2)
        narrow = keys.half().float()
        return (
            F.softmax(q @ narrow.repeat_interleave(2, 1).mT, dim=-1)
            @ (values.repeat_interleave(2, 1)),
            keys,
            values,
        )

    found = find(step, Q, K, V, PK, PV)
    assert found.sites == [] and "cast" in found.refusals[0].reason


def test_what_comes_first_is_the_past() -> None:
    """Without a mask the order of keys does not matter; with one it does, and does not fit."""
    source = grown(lambda past, new: torch.cat([new, past], dim=2)).sites[0].source
    assert source.past_k is not None and source.k_new is not None
    assert ("pk" in source.past_k.name, "pk" in source.k_new.name) == (False, True)

    def step(q: Tensor, k: Tensor, v: Tensor, pk: Tensor, pv: Tensor) -> tuple[Tensor, ...]:
        keys, values = torch.cat([k, pk], dim=2), torch.cat([v, pv], dim=2)
        mask = torch.arange(P + N)[None, :] <= torch.arange(N)[:, None] + P
        keys_, values_ = (x.repeat_interleave(2, 1) for x in (keys, values))
        return F.scaled_dot_product_attention(q, keys_, values_, attn_mask=mask), keys, values

    refused(find(step, Q, K, V, PK, PV), "not one new key for each query")


REPEATS: dict[str, Callable[[Tensor], Tensor]] = {
    "expand": lambda x: x[:, :, None].expand(B, KV, 2, -1, D).reshape(B, H, -1, D),
    "all slices": lambda x: x[:, :, None, :, :].expand(B, KV, 2, -1, D).reshape(B, H, -1, D),
    "ellipsis": lambda x: x[:, :, None, ...].expand(B, KV, 2, -1, D).reshape(B, H, -1, D),
    "unsqueeze": lambda x: x.unsqueeze(2).expand(-1, -1, 2, -1, -1).flatten(1, 2),
    "unsqueeze -3": lambda x: torch.unsqueeze(x, -3).expand(-1, -1, 2, -1, -1).flatten(1, 2),
    "interleave": lambda x: torch.repeat_interleave(x, 2, dim=1),
    "interleave -3": lambda x: x.repeat_interleave(repeats=2, dim=-3),
    "contiguous": lambda x: x.repeat_interleave(2, 1).contiguous(),
}


def repeated(repeat: Callable[[Tensor], Tensor]) -> FindResult:
    def step(q: Tensor, k: Tensor, v: Tensor, pk: Tensor, pv: Tensor) -> tuple[Tensor, ...]:
        keys, values = torch.cat([pk, k], dim=2), torch.cat([pv, v], dim=2)
        out = F.scaled_dot_product_attention(q, repeat(keys), repeat(values))
        return out, keys, values

    return find(step, Q, K, V, PK, PV)


@pytest.mark.parametrize("name", REPEATS)
def test_head_repeats(name: str) -> None:
    found = repeated(REPEATS[name])
    assert found.refusals == [] and len(found.sites) == 1
    keys = found.sites[0].source.keys.meta["example_value"]
    assert tuple(keys.shape) == (B, KV, P + N, D)
    expected = PK.repeat_interleave(2, dim=1)
    assert torch.equal(REPEATS[name](PK), expected), "the table itself must be right"


TILES: dict[str, Callable[[Tensor], Tensor]] = {
    "repeat": lambda x: x.repeat(1, 2, 1, 1),
    "tiled expand": lambda x: x[:, None].expand(-1, 2, -1, -1, -1).flatten(1, 2),
    "tiled unsqueeze": lambda x: x.unsqueeze(1).expand(-1, 2, -1, -1, -1).flatten(1, 2),
    "cat": lambda x: torch.cat([x, x], dim=1),
    "wrong axis": lambda x: x.unsqueeze(3).expand(-1, -1, -1, 2, -1).reshape(B, H, -1, D),
    "flip": lambda x: x.repeat_interleave(2, 1).flip(1),
    "slice": lambda x: x.repeat_interleave(4, 1)[:, :H],
}


@pytest.mark.parametrize("name", TILES)
def test_other_head_orders_are_refused(name: str) -> None:
    found = repeated(TILES[name])
    assert found.sites == [] and len(found.refusals) == 1


def test_tile_names_the_operation() -> None:
    refused(repeated(TILES["repeat"]), "repeat between the cache and the keys")


def test_grouped_heads_without_repeat() -> None:
    def step(q: Tensor, k: Tensor, v: Tensor, pk: Tensor, pv: Tensor) -> tuple[Tensor, ...]:
        keys, values = torch.cat([pk, k], dim=2), torch.cat([pv, v], dim=2)
        out = F.scaled_dot_product_attention(q, keys, values, enable_gqa=True)
        return out, keys, values

    found = find(step, Q, K, V, PK, PV)
    assert found.refusals == [] and len(found.sites) == 1


@pytest.mark.parametrize("eager", [False, True])
def test_one_kv_head_broadcasts(eager: bool) -> None:
    def step(q: Tensor, k: Tensor, v: Tensor, pk: Tensor, pv: Tensor) -> tuple[Tensor, ...]:
        keys, values = torch.cat([pk, k], dim=2), torch.cat([pv, v], dim=2)
        if eager:
            return F.softmax(q @ keys.mT, dim=-1) @ values, keys, values
        return F.scaled_dot_product_attention(q, keys, values), keys, values

    found = find(step, Q, *(x[:, :1] for x in (K, V, PK, PV)))
    assert found.refusals == [] and len(found.sites) == 1


def test_past_used_elsewhere_is_refused() -> None:
    def step(q: Tensor, k: Tensor, v: Tensor, pk: Tensor, pv: Tensor) -> tuple[Tensor, ...]:
        keys, values = torch.cat([pk, k], dim=2), torch.cat([pv, v], dim=2)
        return product(q, keys, values) + pk.mean(), keys, values

    refused(find(step, Q, K, V, PK, PV), "is also used by mean")


def test_grown_cache_used_elsewhere_is_refused() -> None:
    def step(q: Tensor, k: Tensor, v: Tensor, pk: Tensor, pv: Tensor) -> tuple[Tensor, ...]:
        keys, values = torch.cat([pk, k], dim=2), torch.cat([pv, v], dim=2)
        return product(q, keys, values) + values.sum(), keys, values

    refused(find(step, Q, K, V, PK, PV), "is also used by sum")


@pytest.mark.parametrize("read", [False, True])
def test_two_layers_share_a_cache_unless_something_else_reads_it(read: bool) -> None:
    def step(q: Tensor, k: Tensor, v: Tensor, pk: Tensor, pv: Tensor) -> tuple[Tensor, ...]:
        keys, values = torch.cat([pk, k], dim=2), torch.cat([pv, v], dim=2)
        out = product(product(q, keys, values), keys, values)
        return (out + keys.sum() if read else out), keys, values

    found = find(step, Q, K, V, PK, PV)
    assert len(found.sites) == (0 if read else 2)
    assert ["also used by sum" in refusal.reason for refusal in found.refusals] == [True] * 2 * read


def test_cache_that_is_not_returned_is_refused() -> None:
    def step(q: Tensor, k: Tensor, v: Tensor, pk: Tensor, pv: Tensor) -> tuple[Tensor, ...]:
        return (product(q, torch.cat([pk, k], dim=2), torch.cat([pv, v], dim=2)),)

    refused(find(step, Q, K, V, PK, PV), "is not returned")


def kept(
    keep: Callable[[Tensor], Tensor],
    keep_v: Callable[[Tensor], Tensor] | None = None,
    window: int = 0,
    extra: Callable[[Tensor], Tensor] | None = None,
    prefill: bool = False,
) -> FindResult:
    """Find in a step that returns ``keep`` of its grown keys and ``keep_v`` of its values."""

    def step(q: Tensor, k: Tensor, v: Tensor, pk: Tensor, pv: Tensor) -> tuple[Tensor, ...]:
        if prefill:
            pk, pv = pk.new_zeros((B, KV, 0, D)), pv.new_zeros((B, KV, 0, D))
        keys, values = torch.cat([pk, k], dim=2), torch.cat([pv, v], dim=2)
        total = keys.shape[2]
        rows, columns = torch.arange(N)[:, None] + (total - N), torch.arange(total)[None, :]
        mask = None
        if window:
            mask = (columns <= rows) & (columns > rows - window)
        if extra is not None:
            mask = extra(mask)
        repeats = [x.repeat_interleave(2, 1) for x in (keys, values)]
        out = F.scaled_dot_product_attention(q, *repeats, attn_mask=mask)
        return out, keep(keys), (keep_v or keep)(values)

    return find(step, Q, K, V, PK, PV)


LAST: dict[str, Callable[[Tensor], Tensor]] = {
    "slices": lambda x: x[:, :, -4:, :],
    "short": lambda x: x[:, :, -4:],
}


@pytest.mark.parametrize("window", [1, 4, 5])
@pytest.mark.parametrize("name", LAST)
def test_a_cache_that_keeps_its_last_tokens(name: str, window: int) -> None:
    found = kept(LAST[name], window=window)
    assert found.refusals == [] and len(found.sites) == 1
    site = found.sites[0]
    assert (site.mask.causal, site.mask.window, site.source.keep) == (True, window, 4)
    for stored, grown_ in (
        (site.source.stored_k, site.source.keys),
        (site.source.stored_v, site.source.values),
    ):
        assert stored is not None and stored.args[0] is grown_


def opposite(mask: Tensor) -> Tensor:
    return ~mask


KEPT_BADLY: dict[str, tuple[FindResult | Callable[[], FindResult], str]] = {
    "no window": (lambda: kept(LAST["slices"]), "keeps 4 tokens, the mask shows all"),
    "window too wide": (lambda: kept(LAST["slices"], window=6), "keeps 4 tokens, the mask shows 6"),
    "negated window": (lambda: kept(LAST["slices"], window=5, extra=opposite), "shows all of them"),
    "keys and values differ": (
        lambda: kept(LAST["slices"], lambda x: x[:, :, -5:], window=5),
        "different numbers of tokens: 4 and 5",
    ),
    "only keys": (
        lambda: kept(LAST["slices"], lambda x: x, window=5),
        "different numbers of tokens: 4 and 0",
    ),
    "first tokens": (lambda: kept(lambda x: x[:, :, :4], window=5), "is returned (getitem"),
    "without the last": (lambda: kept(lambda x: x[:, :, -5:-1], window=5), "is returned (getitem"),
    "every second": (lambda: kept(lambda x: x[:, :, -4::2], window=5), "is returned (getitem"),
    "some heads": (lambda: kept(lambda x: x[:, :1, -4:], window=5), "is returned (getitem"),
    "some channels": (lambda: kept(lambda x: x[:, :, -4:, :8], window=5), "is returned (getitem"),
    "last channels": (lambda: kept(lambda x: x[..., -4:], window=5), "is returned (getitem"),
    "copied": (lambda: kept(lambda x: x[:, :, -4:].clone(), window=5), "is not returned"),
    "operand": (
        lambda: kept(LAST["slices"], window=5, extra=lambda m: m | (torch.arange(8) == 0)),
        "shows all of them",
    ),
}


@pytest.mark.parametrize("name", KEPT_BADLY)
def test_other_parts_of_the_cache_are_refused(name: str) -> None:
    make, words = KEPT_BADLY[name]
    found = make()
    assert found.sites == [] and len(found.refusals) == 1
    assert words in found.refusals[0].reason


def test_padding_over_kept_tokens_says_from_which_one_it_counts() -> None:
    """Whether that is the first one that is kept is checked when the graph is called."""
    pad = torch.ones(B, P + N, dtype=torch.bool)

    def step(q: Tensor, k: Tensor, v: Tensor, pk: Tensor, pv: Tensor, pad: Tensor) -> Tensor:
        keys, values = torch.cat([pk, k], dim=2), torch.cat([pv, v], dim=2)
        rows, columns = torch.arange(N)[:, None] + P, torch.arange(P + N)[None, :]
        mask = (columns <= rows) & (columns > rows - keep - 1) & pad[:, None, None, :]
        repeats = [x.repeat_interleave(2, 1) for x in (keys, values)]
        out = F.scaled_dot_product_attention(q, *repeats, attn_mask=mask)
        return out, keys[:, :, -keep:], values[:, :, -keep:]

    for keep in (P, P + 1):  # noqa: B007  # read by step
        found = find(step, Q, K, V, PK, PV, pad)
        assert found.refusals == [] and found.sites[0].mask.kv_mask is not None
        assert found.sites[0].mask.kv_offset == 0


def test_an_operand_over_kept_tokens_is_refused() -> None:
    """After a cut nothing tells which tokens the columns of an operand belong to."""
    bias = torch.randn(1, 1, N, P + N)

    def step(q: Tensor, k: Tensor, v: Tensor, pk: Tensor, pv: Tensor, bias: Tensor) -> Tensor:
        keys, values = torch.cat([pk, k], dim=2), torch.cat([pv, v], dim=2)
        rows, columns = torch.arange(N)[:, None] + P, torch.arange(P + N)[None, :]
        repeats = [x.repeat_interleave(2, 1) for x in (keys, values)]
        scores = q @ repeats[0].mT * 0.25 + bias
        visible = (columns <= rows) & (columns > rows - keep - 1)
        scores = scores.masked_fill(~visible, -math.inf)
        out = torch.softmax(scores, -1) @ repeats[1]
        return out, keys[:, :, -keep:], values[:, :, -keep:]

    keep = P
    refused(find(step, Q, K, V, PK, PV, bias), "counts from the first one that is kept")
    keep = P + 1  # the past is shorter than what is kept, so nothing has been cut
    assert find(step, Q, K, V, PK, PV, bias).refusals == []


def test_kept_tokens_of_a_first_prompt() -> None:
    """A window wider than the prompt hides nothing yet; what is kept bounds it later."""
    site = kept(LAST["slices"], window=3, prefill=True).sites[0]
    assert (site.mask.causal, site.mask.window) == (True, 5)
    assert (site.source.keep, site.source.past_k) == (4, None)


def test_keys_and_values_of_one_past_are_refused() -> None:
    def step(q: Tensor, k: Tensor, v: Tensor, past: Tensor) -> tuple[Tensor, ...]:
        keys, values = torch.cat([past, k], dim=2), torch.cat([past, v], dim=2)
        return product(q, keys, values), keys, values

    refused(find(step, Q, K, V, PK), "share one past")


def test_swapped_products_stay_swapped() -> None:
    """Swapping K and V is another function, not an error: the records must say so."""

    def step(q: Tensor, k: Tensor, v: Tensor, pk: Tensor, pv: Tensor) -> tuple[Tensor, ...]:
        keys, values = torch.cat([pk, k], dim=2), torch.cat([pv, v], dim=2)
        return product(q, values, keys), keys, values

    source = find(step, Q, K, V, PK, PV).sites[0].source
    assert source.past_k is not None and "pv" in source.past_k.name


def test_no_cache() -> None:
    weight = torch.randn(H * D, H * D)

    def step(x: Tensor) -> tuple[Tensor, ...]:
        q, k, v = (F.linear(x, weight).view(B, N, H, D).transpose(1, 2) for _ in range(3))
        return (F.scaled_dot_product_attention(q, k, v, is_causal=True),)

    found = find(step, torch.randn(B, N, H * D))
    refused(found, "no KV cache: left to the inner compiler", "none")


def test_cross_attention_over_an_input_is_refused() -> None:
    refused(
        find(lambda q, k, v: (product(q, k, v),), Q, PK, PV),
        "read-only input",
    )


def handle(width: int, values: bool) -> KVHandle:
    """An input as a graph gets it: a handle without numbers, of P tokens of KV heads."""
    lease: Any = SimpleNamespace(batch=SimpleNamespace(device=torch.device("cpu")))
    return KVHandle.of(Content(lease, 0, values, P), (B, KV, P, width), torch.float32)


def read(step: Step, *inputs: Tensor) -> FindResult:
    recorder = Recorder(run=False)
    with torch.no_grad():
        torch.compile(step, backend=recorder, fullgraph=True)(*inputs)
    assert len(recorder.found) == 1 and not recorder.mutated
    return recorder.found[0]


def test_cross_attention_reads_handles() -> None:
    found = read(lambda q, k, v: (product(q, k, v),), Q, handle(D, False), handle(32, True))
    assert found.refusals == [] and len(found.sites) == 1
    site = found.sites[0]
    source = site.source
    assert source.form == "read" and not site.mask.causal
    assert (source.k_new, source.v_new, source.update, source.stored_k) == (None,) * 4
    assert source.keys is source.past_k and source.values is source.past_v
    assert source.keys.op == source.values.op == "placeholder"


READ_BADLY: dict[str, tuple[Step, str]] = {
    "causal": (
        lambda q, k, v: (
            F.scaled_dot_product_attention(
                q, *(x.repeat_interleave(2, 1) for x in (k, v)),
                attn_mask=torch.arange(P)[None, :] <= torch.arange(N)[:, None] + P - N,
            ),
        ),
        "not one new key for each query",
    ),
    "keys alone": (lambda q, k, v: (product(q, k, k),), "the same tensor"),
    "values are no handle": (lambda q, k, v: (product(q, k, q[:, :KV]),), "read-only input"),
    "used elsewhere": (lambda q, k, v: (product(q, k, v) + k.mean(),), "is also used by mean"),
    "sliced": (lambda q, k, v: (product(q, k[:, :, 1:], v[:, :, 1:]),), ""),
    "reversed": (lambda q, k, v: (product(q, k, v.flip(2)),), ""),
}  # fmt: skip


@pytest.mark.parametrize("name", READ_BADLY)
def test_other_reads_of_handles_are_refused(name: str) -> None:
    step, words = READ_BADLY[name]
    found = read(step, Q, handle(D, False), handle(D, True))
    assert found.sites == [] and len(found.refusals) == 1
    assert words in found.refusals[0].reason


def _returned(buffer: Tensor, new: Tensor, at: Tensor) -> Tensor:
    return torch.ops.aten.index_put_(buffer, [None, None, at], new)


def _copy(buffer: Tensor, new: Tensor, at: Tensor) -> Tensor:
    buffer = buffer.clone()
    buffer[:, :, at] = new
    return buffer


@pytest.mark.parametrize("write", [_returned, _copy])
def test_what_is_no_buffer_itself_is_refused(
    write: Callable[[Tensor, Tensor, Tensor], Tensor],
) -> None:
    """Of buffers: tests/graph/test_static.py and test_static_refused.py."""

    def step(
        q: Tensor, k: Tensor, v: Tensor, kb: Tensor, vb: Tensor, at: Tensor
    ) -> tuple[Tensor, ...]:
        return (product(q, write(kb, k, at), write(vb, v, at)),)

    found = find(step, Q, K, V, torch.zeros(B, KV, 9, D), torch.zeros(B, KV, 9, D), torch.arange(3))
    refused(found, "static buffer")


def test_latents_are_refused() -> None:
    weight = torch.randn(H * D * 2, D)

    def step(q: Tensor, c: Tensor, past: Tensor) -> tuple[Tensor, ...]:
        latent = torch.cat([past, c], dim=1)
        kv = F.linear(latent, weight).view(B, -1, H, 2 * D).transpose(1, 2)
        keys, values = kv.split(D, dim=-1)
        return F.scaled_dot_product_attention(q, keys, values), latent

    refused(find(step, Q, torch.randn(B, N, D), torch.randn(B, P, D)), "latent")


def tiered(step: Step, *extra: Tensor, dynamic: bool | None = None) -> FindResult:
    return find(step, Q, K, V, torch.zeros(1), *extra, dynamic=dynamic)


def update(k: Tensor, v: Tensor, handle: Tensor, past: int = P) -> tuple[Tensor, Tensor]:
    return torch.ops.kvpass.cache_update.default(k, v, handle, 3, past, 256)


def _trace(step: Step) -> FindResult:
    """Like ``find`` without running the graph: the handle here stands for no cache."""
    recorder = Recorder(run=False)
    with torch.no_grad():
        torch.compile(step, backend=recorder, fullgraph=True)(Q, K, V, torch.zeros(1))
    assert len(recorder.found) == 1 and not recorder.mutated
    return recorder.found[0]


def test_tiered_cache() -> None:
    def step(q: Tensor, k: Tensor, v: Tensor, handle: Tensor) -> tuple[Tensor, ...]:
        keys, values = update(k, v, handle)
        mask = torch.arange(P + N)[None, :] <= torch.arange(N)[:, None] + P
        return (
            F.scaled_dot_product_attention(
                q,
                keys.repeat_interleave(2, 1),
                values.repeat_interleave(2, 1),
                attn_mask=mask,
            ),
        )

    found = _trace(step)
    assert found.refusals == [] and len(found.sites) == 1
    site = found.sites[0]
    assert site.mask.causal and site.source.form == "tiered"
    assert site.source.update is not None
    assert site.source.update.target is torch.ops.kvpass.cache_update.default
    assert site.source.k_new is site.source.update.args[0]
    assert site.source.v_new is site.source.update.args[1]


def test_tiered_keys_and_values_swapped_are_refused() -> None:
    def step(q: Tensor, k: Tensor, v: Tensor, handle: Tensor) -> tuple[Tensor, ...]:
        keys, values = update(k, v, handle)
        return (product(q, values, keys),)

    refused(_trace(step), "swapped")


def test_tiered_values_of_another_update_are_refused() -> None:
    def step(q: Tensor, k: Tensor, v: Tensor, handle: Tensor) -> tuple[Tensor, ...]:
        return (product(q, update(k, v, handle)[0], update(v, k, handle)[1]),)

    refused(_trace(step), "same TieredCache update")


def test_tiered_cache_returned_is_refused() -> None:
    def step(q: Tensor, k: Tensor, v: Tensor, handle: Tensor) -> tuple[Tensor, ...]:
        keys, values = update(k, v, handle)
        return product(q, keys, values), keys

    refused(_trace(step), "is also used by the graph output")


def test_write_to_an_input_before_the_output_is_refused() -> None:
    def step(q: Tensor, k: Tensor, v: Tensor, pk: Tensor, pv: Tensor) -> tuple[Tensor, ...]:
        keys, values = torch.cat([pk, k], dim=2), torch.cat([pv, v], dim=2)
        scores = q @ keys.repeat_interleave(2, 1).mT
        q.add_(1.0)
        k[:, :, 0] = 0.0
        return F.softmax(scores, dim=-1) @ values.repeat_interleave(2, 1), keys, values

    refused(find(step, Q.clone(), K.clone(), V, PK, PV), "writes in place")


def test_write_by_a_custom_operator_is_seen() -> None:
    def bump(x: Tensor) -> None:
        x.add_(1.0)

    with torch.library._scoped_library("kvpass_test", "FRAGMENT") as library:
        library.define("bump(Tensor(a!) x) -> ()")
        library.impl("bump", bump, "CPU")
        library.impl("bump", lambda x: None, "Meta")

        def step(q: Tensor, k: Tensor, v: Tensor, pk: Tensor, pv: Tensor) -> tuple[Tensor, ...]:
            keys, values = torch.cat([pk, k], dim=2), torch.cat([pv, v], dim=2)
            scores = q @ keys.repeat_interleave(2, 1).mT
            torch.ops.kvpass_test.bump(k)
            return F.softmax(scores, dim=-1) @ values.repeat_interleave(2, 1), keys, values

        refused(find(step, Q, K.clone(), V, PK, PV), "writes in place")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda q, k, v: (q, k[..., :8], v[..., :8]), "head_dim 8"),
        (lambda q, k, v: (q, k.double(), v.double()), "dtype torch.float64"),
    ],
)
def test_legality(change: Callable[..., tuple[Tensor, ...]], words: str) -> None:
    _, k, v = change(Q, K, V)
    _, pk, pv = change(Q, PK, PV)
    q = Q[..., : k.shape[-1]].to(k.dtype)

    def step(q: Tensor, k: Tensor, v: Tensor, pk: Tensor, pv: Tensor) -> tuple[Tensor, ...]:
        keys, values = torch.cat([pk, k], dim=2), torch.cat([pv, v], dim=2)
        return product(q, keys, values), keys, values

    refused(find(step, q, k, v, pk, pv), words, "functional")


@pytest.mark.parametrize(("grad", "trainable", "reason"), [
    (False, True, None), (True, False, None), (True, True, "torch.no_grad()"),
])  # fmt: skip
def test_graph_refusal(grad: bool, trainable: bool, reason: str | None) -> None:
    seen: list[str | None] = []

    def backend(gm: torch.fx.GraphModule, _: list[Tensor]) -> Callable[..., object]:
        seen.append(graph_refusal(gm))
        return gm.forward

    layer = torch.nn.Linear(4, 4).requires_grad_(trainable)
    with torch.set_grad_enabled(grad):
        torch.compile(layer, backend=backend)(torch.randn(2, 4))
    assert len(seen) == 1
    assert (reason is None and seen[0] is None) or (reason or "?") in (seen[0] or "")
