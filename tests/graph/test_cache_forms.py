# SPDX-License-Identifier: Apache-2.0
"""Where K and V come from: each supported source is found, each other one is named and refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kvpass.graph import graph_refusal
from kvpass.graph.site import FindResult
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
        (lambda past, new: torch.cat([new, past], dim=2), "5 new keys for 3 queries"),
        (lambda past, new: torch.cat([past, new], dim=2)[:, :, -6:], "slice of the cache"),
        (lambda past, new: torch.cat([past, new], dim=2) * 1.5, "mul"),
        (lambda past, new: torch.cat([past, new], dim=2).double().float(), "cast"),
        (lambda past, new: torch.cat([past, new], dim=2).roll(1, 2), "between the cache"),
        (lambda past, new: torch.cat([past, new, new], dim=2), "no KV cache"),
    ],
)
def test_changed_cache_is_refused(join: Callable[[Tensor, Tensor], Tensor], words: str) -> None:
    found = grown(join)
    assert found.sites == [] and len(found.refusals) == 1
    assert words in found.refusals[0].reason


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


def test_cache_shared_by_two_layers_is_refused_twice() -> None:
    def step(q: Tensor, k: Tensor, v: Tensor, pk: Tensor, pv: Tensor) -> tuple[Tensor, ...]:
        keys, values = torch.cat([pk, k], dim=2), torch.cat([pv, v], dim=2)
        return product(product(q, keys, values), keys, values), keys, values

    found = find(step, Q, K, V, PK, PV)
    assert found.sites == [] and len(found.refusals) == 2


def test_cache_that_is_not_returned_is_refused() -> None:
    def step(q: Tensor, k: Tensor, v: Tensor, pk: Tensor, pv: Tensor) -> tuple[Tensor, ...]:
        return (product(q, torch.cat([pk, k], dim=2), torch.cat([pv, v], dim=2)),)

    refused(find(step, Q, K, V, PK, PV), "is not returned")


def test_window_of_the_cache_returned_is_refused() -> None:
    def step(q: Tensor, k: Tensor, v: Tensor, pk: Tensor, pv: Tensor) -> tuple[Tensor, ...]:
        keys, values = torch.cat([pk, k], dim=2), torch.cat([pv, v], dim=2)
        return product(q, keys, values), keys[:, :, -4:], values[:, :, -4:]

    refused(find(step, Q, K, V, PK, PV), "sliding window")


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


def _index_copy(buffer: Tensor, new: Tensor, at: Tensor) -> Tensor:
    buffer.index_copy_(2, at, new)
    return buffer


def _set(buffer: Tensor, new: Tensor, at: Tensor) -> Tensor:
    buffer[:, :, at] = new
    return buffer


def _index_put(buffer: Tensor, new: Tensor, at: Tensor) -> Tensor:
    return torch.ops.aten.index_put_(buffer, [None, None, at], new)


def _slice(buffer: Tensor, new: Tensor, at: Tensor) -> Tensor:
    buffer[:, :, 2:5].copy_(new)
    return buffer[:, :, :5]


@pytest.mark.parametrize("write", [_index_copy, _set, _index_put, _slice])
def test_static_buffers_are_refused(write: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
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
