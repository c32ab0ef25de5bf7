# SPDX-License-Identifier: Apache-2.0
"""The score path: each supported spelling is one site, each near miss is refused with its reason.

All cases share one block: q ``[2, 4, 3, 16]`` over a functional cache of 5 + 3 tokens with 2 KV
heads, written out so that a case replaces one line of it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kvpass.graph.site import AttentionSite, FindResult
from tests.graph.recorder import Recorder, find

BATCH, HEADS, KV, NEW, PAST, DIM = 2, 4, 2, 3, 5, 16
Q = torch.randn(BATCH, HEADS, NEW, DIM)
K = torch.randn(BATCH, KV, NEW, DIM)
V = torch.randn(BATCH, KV, NEW, 32)
PK = torch.randn(BATCH, KV, PAST, DIM)
PV = torch.randn(BATCH, KV, PAST, 32)
MASK = torch.randn(BATCH, 1, NEW, PAST + NEW)

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def repeat(x: Tensor) -> Tensor:
    size, heads, tokens, dim = x.shape
    wide = x[:, :, None].expand(size, heads, HEADS // heads, tokens, dim)
    return wide.reshape(size, HEADS, tokens, dim)


def cached(attend: Attend, again: bool = False) -> FindResult:
    """Find in ``attend(q, k, v)`` with K and V repeated from a functional cache."""

    def step(
        q: Tensor, k: Tensor, v: Tensor, pk: Tensor, pv: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        keys, values = torch.cat([pk, k], dim=-2), torch.cat([pv, v], dim=-2)
        return attend(q, repeat(keys), repeat(values)), keys, values

    return find(step, Q, K, V, PK, PV)


def one_site(found: FindResult) -> AttentionSite:
    assert [refusal.reason for refusal in found.refusals] == []
    assert len(found.sites) == 1
    return found.sites[0]


def one_refusal(found: FindResult, words: str) -> None:
    assert found.sites == []
    assert len(found.refusals) == 1
    assert words in found.refusals[0].reason


SPELLINGS: dict[str, tuple[Attend, float]] = {
    "sdpa": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v), 0.25),
    "sdpa scale": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v, scale=0.7), 0.7),
    "sdpa int": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v, scale=1), 1.0),
    "sdpa positional": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, None, 0.0, False),
        0.25,
    ),
    "sdpa keywords": (
        lambda q, k, v: F.scaled_dot_product_attention(key=k, value=v, query=q),
        0.25,
    ),
    "unscaled": (lambda q, k, v: F.softmax(q @ k.transpose(2, 3), dim=-1) @ v, 1.0),
    "times": (lambda q, k, v: F.softmax(q @ k.transpose(-1, -2) * 0.5, dim=-1) @ v, 0.5),
    "times left": (lambda q, k, v: F.softmax(0.5 * (q @ k.mT), dim=-1) @ v, 0.5),
    "divided": (lambda q, k, v: F.softmax(q @ k.mT / 8, dim=-1) @ v, 0.125),
    "twice": (lambda q, k, v: F.softmax(torch.div(q @ k.mT, 4.0) * 3, dim=-1) @ v, 0.75),
    "torch": (
        lambda q, k, v: torch.matmul(torch.softmax(torch.matmul(q, k.permute(0, 1, 3, 2)), 3), v),
        1.0,
    ),
    "methods": (lambda q, k, v: q.matmul(k.mT).mul(0.5).softmax(-1).matmul(v), 0.5),
    "einsum": (
        lambda q, k, v: torch.einsum(
            "bhqk,bhkd->bhqd", torch.einsum("bhqd, bhkd -> bhqk", q, k).softmax(dim=-1), v
        ),
        1.0,
    ),
    "einsum names": (
        lambda q, k, v: torch.einsum("nhij,nhjd->nhid", (q @ k.mT).softmax(dim=-1), v),
        1.0,
    ),
    "fp32 softmax": (
        lambda q, k, v: F.softmax(q @ k.mT, dim=-1, dtype=torch.float32).to(q.dtype) @ v,
        1.0,
    ),
    "float and back": (lambda q, k, v: F.softmax((q @ k.mT).float(), dim=-1).type_as(q) @ v, 1.0),
    "idle dropout": (
        lambda q, k, v: F.dropout(F.softmax(q @ k.mT, dim=-1), p=0.5, training=False) @ v,
        1.0,
    ),
    "dropout of zero": (
        lambda q, k, v: F.dropout(F.softmax(q @ k.mT, dim=-1), p=0.0, training=True) @ v,
        1.0,
    ),
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_spelling_is_one_site(name: str) -> None:
    attend, scale = SPELLINGS[name]
    site = one_site(cached(attend))
    assert site.scale == pytest.approx(scale, rel=1e-15)
    assert site.mask.describe() == "none"
    assert site.query.op == "placeholder" and "q" in site.query.name
    assert site.source.form == "functional"
    shape = site.output.meta["example_value"].shape
    assert tuple(shape) == (BATCH, HEADS, NEW, 32)
    assert site.anchor is site.output or site.anchor in site.interior


def with_sinks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    join: Callable[[Tensor, Tensor], Tensor] = lambda s, x: torch.cat([s, x], dim=-1),
    shift: Callable[[Tensor], Tensor] = lambda s: s,
    cut: Callable[[Tensor], Tensor] = lambda p: p[..., :-1],
    sinks: Callable[[Tensor], Tensor] = lambda x: x.reshape(1, -1, 1, 1).expand(2, 4, 3, 1),
) -> Tensor:
    """The spelling of gpt-oss, a part of which a case replaces."""
    vector = q[0, :, 0, 0] * 1.0  # [Hq], made in the graph
    scores = join(q @ k.mT * 0.5, sinks(vector))
    return cut(F.softmax(shift(scores), dim=-1)) @ v


SOFTCAPS: dict[str, tuple[Attend, float, float]] = {
    "gemma": (
        lambda q, k, v: F.softmax(torch.tanh(q @ k.mT * 0.25 / 50) * 50, dim=-1) @ v,
        0.25,
        50.0,
    ),
    "left": (lambda q, k, v: F.softmax(30 * torch.tanh(q @ k.mT / 30), dim=-1) @ v, 1.0, 30.0),
    "method": (lambda q, k, v: (q @ k.mT).div(5.0).tanh().mul(5.0).softmax(-1) @ v, 1.0, 5.0),
    "bare": (lambda q, k, v: F.softmax((q @ k.mT).tanh(), dim=-1) @ v, 1.0, 1.0),
    "divided": (lambda q, k, v: F.softmax((q @ k.mT).tanh() / 0.25, dim=-1) @ v, 4.0, 4.0),
    "uneven": (lambda q, k, v: F.softmax((q @ k.mT / 8).tanh() * 2 * 3, dim=-1) @ v, 0.75, 6.0),
    "in fp32": (
        lambda q, k, v: F.softmax((q @ k.mT).float().tanh() * 2, dim=-1).to(q.dtype) @ v,
        2.0,
        2.0,
    ),
    "in place": (lambda q, k, v: (q @ k.mT).div_(5.0).tanh().mul_(5.0).softmax(-1) @ v, 1.0, 5.0),
    "keys scaled": (lambda q, k, v: F.softmax(((q * 2) @ k.mT).tanh() * 3, -1) @ v, 3.0, 3.0),
}


@pytest.mark.parametrize("name", SOFTCAPS)
def test_softcaps(name: str) -> None:
    """The scale is the factor of the products inside: softcap * tanh(scale / softcap * q k^T)."""
    attend, scale, cap = SOFTCAPS[name]
    site = one_site(cached(attend))
    assert site.scale == pytest.approx(scale, rel=1e-12)
    assert site.softcap == pytest.approx(cap, rel=1e-12)


def test_softcap_stands_before_the_mask() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = torch.tanh(q @ k.mT / 5) * 5 + q.new_ones(3, 8)
        return F.softmax(scores, dim=-1) @ v

    site = one_site(cached(attend))
    assert site.softcap == 5.0 and site.mask.operand is not None


SINKS: dict[str, Attend] = {
    "gpt-oss": lambda q, k, v: with_sinks(
        q, k, v, shift=lambda s: s - s.max(dim=-1, keepdim=True).values
    ),
    "plain": with_sinks,
    "amax": lambda q, k, v: with_sinks(q, k, v, shift=lambda s: s - s.amax(-1, keepdim=True)),
    "max by index": lambda q, k, v: with_sinks(
        q, k, v, shift=lambda s: s - torch.max(s, -1, keepdim=True)[0]
    ),
    "in fp32": lambda q, k, v: with_sinks(q, k, v, shift=lambda s: s.float()),
    "view": lambda q, k, v: with_sinks(
        q, k, v, sinks=lambda x: x.view(1, 4, 1, 1).expand(2, -1, 3, -1)
    ),
    "all axes": lambda q, k, v: with_sinks(q, k, v, cut=lambda p: p[:, :, :, :-1]),
}


@pytest.mark.parametrize("name", SINKS)
def test_sinks(name: str) -> None:
    site = one_site(cached(SINKS[name]))
    assert site.scale == 0.5 and site.sinks is not None
    assert tuple(site.sinks.meta["example_value"].shape) == (HEADS,)
    assert site.sinks.name.startswith("vector")


def folded(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scores: Callable[[Tensor, Tensor], Tensor] = lambda a, b: torch.bmm(a, b) * 0.25,
    out: tuple[int, ...] = (),
) -> Tensor:
    """Batch and heads as one axis, as in code from before broadcasting products."""
    a, b, c = q.flatten(0, 1), k.reshape(8, -1, DIM), v.flatten(0, 1)
    weights = F.softmax(scores(a, b.transpose(1, 2)), dim=-1)
    result = torch.bmm(weights.view(8, 3, -1), c)
    return result.view(*out) if out else result


def bias_of(q: Tensor) -> Tensor:
    return torch.arange(8.0).view(1, 1, 8) * q[:, :, 0, 0].reshape(8, 1, 1)


FOLDED: dict[str, tuple[Attend, float, float | None]] = {
    "bmm": (folded, 0.25, None),
    "matmul": (lambda q, k, v: folded(q, k, v, torch.matmul), 1.0, None),
    "unfolded behind": (lambda q, k, v: folded(q, k, v, out=(2, 4, 3, 32)), 0.25, None),
    "unfolded for the mask": (
        lambda q, k, v: folded(
            q, k, v,
            lambda a, b: torch.bmm(a, b).view(2, 4, 3, 8) + bias_of(q).view(2, 4, 1, 8),
        ),
        1.0,
        1.0,
    ),
    "baddbmm": (
        lambda q, k, v: folded(q, k, v, lambda a, b: torch.baddbmm(bias_of(q), a, b)), 1.0, 1.0,
    ),
    "bloom": (
        lambda q, k, v: folded(
            q, k, v, lambda a, b: torch.baddbmm(bias_of(q), a, b, beta=0.5, alpha=0.125)
        ),
        0.125,
        0.5,
    ),
    "baddbmm scaled": (
        lambda q, k, v: folded(q, k, v, lambda a, b: torch.baddbmm(bias_of(q), a, b, alpha=3) * 2),
        6.0,
        2.0,
    ),
    "baddbmm method": (
        lambda q, k, v: folded(q, k, v, lambda a, b: bias_of(q).baddbmm(a, b, alpha=0.5)),
        0.5,
        1.0,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FOLDED)
def test_folded_products(name: str) -> None:
    attend, scale, factor = FOLDED[name]
    site = one_site(cached(attend))
    assert site.scale == pytest.approx(scale, rel=1e-12)
    assert tuple(site.query.meta["example_value"].shape) == (BATCH, HEADS, NEW, DIM)
    assert tuple(site.source.keys.meta["example_value"].shape)[1] == KV
    assert [term.factor for term in site.mask.terms] == ([] if factor is None else [factor])


IN_PLACE: dict[str, tuple[Attend, float]] = {
    "mul_": (lambda q, k, v: F.softmax((q @ k.mT).mul_(0.5), dim=-1) @ v, 0.5),
    "div_": (lambda q, k, v: F.softmax((q @ k.mT).div_(4), dim=-1) @ v, 0.25),
    "add_": (lambda q, k, v: F.softmax((q @ k.mT).add_(q.new_zeros(3, 8)), dim=-1) @ v, 1.0),
    "imul": (lambda q, k, v: F.softmax(operator.imul(q @ k.mT, 0.5), dim=-1) @ v, 0.5),
    "iadd": (
        lambda q, k, v: F.softmax(operator.iadd(q @ k.mT, q.new_zeros(3, 8)), dim=-1) @ v, 1.0,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", IN_PLACE)
def test_operations_in_place_on_the_scores(name: str) -> None:
    attend, scale = IN_PLACE[name]
    site = one_site(cached(attend))
    assert site.scale == pytest.approx(scale, rel=1e-12)
    assert len(site.mask.terms) == ("add" in name)


def test_an_in_place_operation_whose_result_is_dropped_is_refused() -> None:
    """It changes the scores through their memory: the chain of values does not show it."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.mT
        scores.mul_(0.5)
        return F.softmax(scores, dim=-1) @ v

    one_refusal(cached(attend), "is also used by")


MASKED: dict[str, tuple[Attend, list[float], float]] = {
    "mask before scale": (
        lambda q, k, v: F.softmax((q @ k.mT + MASK3) * 0.5, dim=-1) @ v, [0.5], 0.5,
    ),
    "mask between scales": (
        lambda q, k, v: F.softmax((q @ k.mT / 4 + MASK3) * 3 * 0.5, dim=-1) @ v, [1.5], 0.375,
    ),
    "both masks": (
        lambda q, k, v: F.softmax(q @ k.mT + MASK3 + MASK3.flip(-1), -1) @ v, [1.0, 1.0], 1.0,
    ),
    "one on each side": (
        lambda q, k, v: F.softmax((q @ k.mT + MASK3) * 0.5 + MASK3, -1) @ v, [0.5, 1.0], 0.5,
    ),
}  # fmt: skip
MASK3 = torch.randn(1, NEW, PAST + NEW)


@pytest.mark.parametrize("name", MASKED)
def test_masks_and_scales_in_any_order(name: str) -> None:
    attend, factors, scale = MASKED[name]
    site = one_site(cached(attend))
    assert site.scale == pytest.approx(scale, rel=1e-12)
    assert [term.kind for term in site.mask.terms] == ["add"] * len(factors)
    assert [term.factor for term in site.mask.terms] == pytest.approx(factors, rel=1e-12)


NEAR_MISSES: dict[str, tuple[Attend, str]] = {
    "pointwise": (
        lambda q, k, v: F.softmax((s := q @ k.mT) + 0.1 * torch.sin(s), dim=-1) @ v,
        "unclear which operand",
    ),
    "sigmoid": (lambda q, k, v: F.softmax(torch.sigmoid(q @ k.mT), dim=-1) @ v, "sigmoid"),
    "queries": (lambda q, k, v: F.softmax(q @ k.mT, dim=-2) @ v, "softmax over dim -2"),
    "heads": (lambda q, k, v: F.softmax(q @ k.mT, dim=1) @ v, "softmax over dim 1"),
    "number added": (lambda q, k, v: F.softmax(q @ k.mT + 1.0, dim=-1) @ v, "adds a number"),
    "negative": (lambda q, k, v: F.softmax(q @ k.mT * -0.5, dim=-1) @ v, "not positive"),
    "zero": (lambda q, k, v: F.softmax(q @ k.mT * 0.0, dim=-1) @ v, "not positive"),
    "tensor scale": (
        lambda q, k, v: F.softmax(q @ k.mT * q.new_tensor(0.5), dim=-1) @ v,
        "is a tensor, not a number",
    ),
    "data scale": (lambda q, k, v: F.softmax(q @ k.mT / q.max(), dim=-1) @ v, "is a tensor"),
    "sdpa dropout": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, dropout_p=0.5),
        "model.eval()",
    ),
    "dropout": (
        lambda q, k, v: F.dropout(F.softmax(q @ k.mT, dim=-1), p=0.5, training=True) @ v,
        "model.eval()",
    ),
    "softcap by data": (
        lambda q, k, v: F.softmax(torch.tanh((s := q @ k.mT) / s.amax()) * 50, dim=-1) @ v,
        "is a tensor",
    ),
    "tanh of another product": (
        lambda q, k, v: F.softmax(torch.tanh((s := q @ k.mT) * s) * 50, dim=-1) @ v,
        "is a tensor",
    ),
    "softcap times scores": (
        lambda q, k, v: F.softmax(torch.tanh((s := q @ k.mT) / 50) * s, dim=-1) @ v,
        "the softcap",
    ),
    "softcap added to scores": (
        lambda q, k, v: F.softmax((s := q @ k.mT) + torch.tanh(s), dim=-1) @ v,
        "unclear which operand",
    ),
    "softcap of some heads": (
        lambda q, k, v: (
            F.softmax(torch.cat([(s := q @ k.mT)[:, :2].tanh(), s[:, 2:]], dim=1), dim=-1) @ v
        ),
        "cat",
    ),
    "softcap twice": (
        lambda q, k, v: F.softmax(((q @ k.mT).tanh() * 5).tanh() * 5, dim=-1) @ v,
        "soft-capped twice",
    ),
    "softcap negative": (
        lambda q, k, v: F.softmax((q @ k.mT / 50).tanh() * -50, dim=-1) @ v,
        "not positive",
    ),
    "mask before softcap": (
        lambda q, k, v: F.softmax((q @ k.mT + q.new_ones(3, 8)).tanh() * 5, dim=-1) @ v,
        "before they are soft-capped",
    ),
    "other cap": (lambda q, k, v: F.softmax((q @ k.mT).sigmoid() * 5, dim=-1) @ v, "sigmoid"),
    "sinks per query": (
        lambda q, k, v: with_sinks(q, k, v, sinks=lambda _: q[..., :1]),
        "not one logit a query head",
    ),
    "sinks per sequence": (
        lambda q, k, v: with_sinks(
            q, k, v, sinks=lambda _: q[:, 0, 0, 0].reshape(2, 1, 1, 1).expand(2, 4, 3, 1)
        ),
        "not one logit a query head",
    ),
    "one sink for all": (
        lambda q, k, v: with_sinks(
            q, k, v, sinks=lambda x: x[:1].reshape(1, 1, 1, 1).expand(2, 4, 3, 1)
        ),
        "not one logit a query head",
    ),
    "two sinks": (
        lambda q, k, v: with_sinks(
            q,
            k,
            F.pad(v, (0, 0, 0, 1)),
            sinks=lambda x: x.reshape(1, -1, 1, 1).expand(2, 4, 3, 2),
        ),
        "not one logit a query head",
    ),
    "sinks in front": (
        lambda q, k, v: with_sinks(q, k, v, lambda s, x: torch.cat([x, s], dim=-1)),
        "behind the scores",
    ),
    "sinks cut in front": (
        lambda q, k, v: with_sinks(q, k, v, cut=lambda p: p[..., 1:]),
        "between softmax and V is not understood",
    ),
    "sinks cut twice": (
        lambda q, k, v: with_sinks(
            q, k, torch.cat([v, v], 2)[:, :, : v.shape[2] - 1], cut=lambda p: p[..., :-2]
        ),
        "between softmax and V is not understood",
    ),
    "sinks without a cut": (
        lambda q, k, v: with_sinks(q, k, F.pad(v, (0, 0, 0, 1)), cut=lambda p: p),
        "",
    ),
    "cut without sinks": (
        lambda q, k, v: with_sinks(q, k, v[:, :, :-1], lambda s, x: s),
        "without an attention sink",
    ),
    "sinks scaled": (
        lambda q, k, v: with_sinks(q, k, v, shift=lambda s: s * 2.0),
        "cat",
    ),
    "maximum of heads": (
        lambda q, k, v: with_sinks(q, k, v, shift=lambda s: s - s.max(dim=1, keepdim=True).values),
        "sub",
    ),
    "maximum of queries": (
        lambda q, k, v: with_sinks(q, k, v, shift=lambda s: s - s.amax(2, keepdim=True)),
        "sub",
    ),
    "maximum of other scores": (
        lambda q, k, v: with_sinks(q, k, v, shift=lambda s: s - (s * 2).amax(-1, keepdim=True)),
        "sub",
    ),
    "minimum": (
        lambda q, k, v: with_sinks(q, k, v, shift=lambda s: s - s.amin(-1, keepdim=True)),
        "sub",
    ),
    "maximum to come": (
        lambda q, k, v: with_sinks(q, k, v, shift=lambda s: s.amax(-1, keepdim=True) - s),
        "sub",
    ),
    "negative alpha": (
        lambda q, k, v: folded(q, k, v, lambda a, b: torch.baddbmm(bias_of(q), a, b, alpha=-0.5)),
        "beta and alpha",
    ),
    "alpha zero": (
        lambda q, k, v: folded(q, k, v, lambda a, b: torch.baddbmm(bias_of(q), a, b, alpha=0)),
        "beta and alpha",
    ),
    "baddbmm soft-capped": (
        lambda q, k, v: folded(q, k, v, lambda a, b: torch.baddbmm(bias_of(q), a, b).tanh() * 5),
        "soft-capped or scaled",
    ),
    "folded scores swapped": (
        lambda q, k, v: folded(q, k, v, lambda a, b: torch.bmm(a, b).view(8, 8, 3).mT * 1.0),
        "between product and softmax",
    ),
    "in place on a mask": (
        lambda q, k, v: F.softmax(MASK.clone().expand(2, 4, 3, 8).add(0).add_(q @ k.mT), -1) @ v,
        "writes in place to something else",
    ),
    "maximum": (
        lambda q, k, v: F.softmax((s := q @ k.mT) - s.amax(-1, keepdim=True), dim=-1) @ v,
        "sub",
    ),
    "weights scaled": (lambda q, k, v: (F.softmax(q @ k.mT, dim=-1) * 2.0) @ v, "mul"),
    "half weights": (
        lambda q, k, v: F.softmax(q @ k.mT, dim=-1).half().float() @ v,
        "this cast is not supported",
    ),
    "double softmax": (
        lambda q, k, v: F.softmax(q @ k.mT, dim=-1, dtype=torch.float64).float() @ v,
        "this cast is not supported",
    ),
    "wrong einsum": (
        lambda q, k, v: torch.einsum("bhqk,bhkd->bhdq", (q @ k.mT).softmax(-1), v),
        "not probabilities times V",
    ),
    "not transposed": (
        lambda q, k, v: F.softmax(q @ k.reshape(2, 4, 16, 8), dim=-1) @ v,
        "last two axes swapped",
    ),
}


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_near_miss_is_refused(name: str) -> None:
    attend, words = NEAR_MISSES[name]
    one_refusal(cached(attend), words)


def test_scores_added_into_a_mask_that_others_read_are_refused() -> None:
    def step(
        q: Tensor, k: Tensor, v: Tensor, pk: Tensor, pv: Tensor, mask: Tensor
    ) -> tuple[Tensor, ...]:
        keys, values = torch.cat([pk, k], dim=-2), torch.cat([pv, v], dim=-2)
        mask += q @ repeat(keys).mT
        return F.softmax(mask, dim=-1) @ repeat(values), mask * 2, keys, values

    mask = torch.zeros(BATCH, HEADS, NEW, PAST + NEW)
    one_refusal(find(step, Q, K, V, PK, PV, mask), "writes in place to something else")


def test_returned_probabilities_are_refused() -> None:
    def step(
        q: Tensor, k: Tensor, v: Tensor, pk: Tensor, pv: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        keys, values = torch.cat([pk, k], dim=-2), torch.cat([pv, v], dim=-2)
        weights = F.softmax(q @ repeat(keys).mT, dim=-1)
        return weights @ repeat(values), weights, keys, values

    one_refusal(find(step, Q, K, V, PK, PV), "output_attentions=False")


def test_scores_used_elsewhere_are_refused() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.mT
        return F.softmax(scores, dim=-1) @ v + scores.mean()

    one_refusal(cached(attend), "is also used by mean")


def test_router_softmax_is_not_reported() -> None:
    def route(x: Tensor, w: Tensor, e: Tensor) -> Tensor:
        gates = F.softmax(F.linear(x, w), dim=-1)
        return (gates[..., None] * e).sum(-2)

    found = find(route, torch.randn(2, 3, 16), torch.randn(4, 16), torch.randn(2, 3, 4, 16))
    assert found.sites == [] and found.refusals == []


def test_multi_head_attention_module_is_opaque() -> None:
    layer = torch.nn.MultiheadAttention(32, 2, batch_first=True).train()

    def step(x: Tensor) -> Tensor:
        return layer(x, x, x, need_weights=True)[0]

    one_refusal(find(step, torch.randn(2, 3, 32)), "MultiheadAttention is opaque")


def test_scale_of_a_dynamic_graph_is_exact_and_guarded() -> None:
    """Under ``dynamic=True`` a float attribute is a symbol; its value is used only if guarded."""

    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scaling = 0.3
            self.project = torch.nn.Linear(32, 32)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            heads = self.project(x).view(x.shape[0], -1, 2, 16).transpose(1, 2)
            empty = torch.tensor([])
            keys, values = torch.cat([empty, heads], dim=2), torch.cat([empty, heads], dim=2)
            out = F.scaled_dot_product_attention(heads, keys, values, scale=self.scaling)
            return out, keys, values

    block, recorder = Block().eval(), Recorder()
    compiled = torch.compile(block, backend=recorder, dynamic=True)
    x = torch.randn(2, 3, 32)
    with torch.no_grad():
        compiled(x)
        assert not isinstance(recorder.found[-1].sites[0].anchor.kwargs["scale"], float)
        assert [site.scale for site in recorder.found[-1].sites] == [0.3]
        block.scaling = 0.1
        compiled(x)
    assert len(recorder.found) == 2
    assert [site.scale for site in recorder.found[-1].sites] == [0.1]


class Scaled(torch.nn.Module):
    """An eager block whose scale is an attribute: a free symbol under ``dynamic=True``."""

    def __init__(self, apply: Callable[[Tensor, float], Tensor]) -> None:
        super().__init__()
        self.scaling = 0.3
        self.project = torch.nn.Linear(32, 32)
        self.apply_scale = apply

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        heads = self.project(x).view(x.shape[0], -1, 2, 16).transpose(1, 2)
        empty = torch.tensor([])
        keys, values = torch.cat([empty, heads], dim=2), torch.cat([empty, heads], dim=2)
        scores = self.apply_scale(heads @ keys.mT, self.scaling)
        return F.softmax(scores, dim=-1) @ values, keys, values


RUN_TIME: dict[str, tuple[Callable[[Tensor, float], Tensor], float, float]] = {
    "times": (lambda s, c: s * c, 1.0, 0.0),
    "with a number": (lambda s, c: s * c * 0.5, 0.5, 0.0),
    "inside a softcap": (lambda s, c: torch.tanh(s * c / 5) * 5, 1.0, 5.0),
}


@pytest.mark.parametrize("name", RUN_TIME)
def test_a_scale_that_is_a_free_symbol_is_a_factor(name: str) -> None:
    apply, scale, cap = RUN_TIME[name]
    site = one_site(find(Scaled(apply).eval(), torch.randn(2, 3, 32), dynamic=True))
    assert site.scale == pytest.approx(scale, rel=1e-12) and site.softcap == cap
    (factor,) = site.factors
    assert isinstance(factor.meta["example_value"], torch.SymFloat)


RUN_TIME_REFUSED: dict[str, tuple[Callable[[Tensor, float], Tensor], str]] = {
    "divided": (lambda s, c: s / c, "not a number known at compile"),
    "mask before": (
        lambda s, c: (s + torch.zeros(s.shape[-1])) * c, "before a scale that is not known",
    ),
    "softcap": (lambda s, c: torch.tanh(s) * c, "the softcap"),
}  # fmt: skip


def test_a_free_symbol_behind_a_softcap_is_not_moved_inside() -> None:
    block = Scaled(lambda s, c: torch.tanh(s / 5) * 5 * c).eval()
    found = find(block, torch.randn(2, 3, 32), dynamic=True)
    assert not any(site.softcap and site.factors for site in found.sites)


@pytest.mark.parametrize("name", RUN_TIME_REFUSED)
def test_other_uses_of_a_free_symbol_are_refused(name: str) -> None:
    apply, words = RUN_TIME_REFUSED[name]
    one_refusal(find(Scaled(apply).eval(), torch.randn(2, 3, 32), dynamic=True), words)


@pytest.mark.parametrize(
    ("dtype", "softmax_dtype"),
    [
        (torch.float16, torch.float32),
        (torch.float16, None),
        (torch.bfloat16, torch.float32),
        (torch.bfloat16, None),
    ],
)
def test_low_precision_keeps_its_output_dtype(
    dtype: torch.dtype, softmax_dtype: torch.dtype | None
) -> None:
    def step(
        q: Tensor, k: Tensor, v: Tensor, pk: Tensor, pv: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        keys, values = torch.cat([pk, k], dim=-2), torch.cat([pv, v], dim=-2)
        weights = F.softmax(q @ repeat(keys).mT * 0.25, dim=-1, dtype=softmax_dtype)
        return weights.to(q.dtype) @ repeat(values), keys, values

    site = one_site(find(step, *(x.to(dtype) for x in (Q, K, V, PK, PV))))
    assert site.output.meta["example_value"].dtype == dtype


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_casts_that_widen_before_the_product(dtype: torch.dtype) -> None:
    def step(
        q: Tensor, k: Tensor, v: Tensor, pk: Tensor, pv: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        keys, values = torch.cat([pk, k], dim=-2), torch.cat([pv, v], dim=-2)
        weights = F.softmax(q.float() @ repeat(keys).float().mT, dim=-1).to(dtype)
        return weights @ repeat(values), keys, values

    site = one_site(find(step, *(x.to(dtype) for x in (Q, K, V, PK, PV))))
    assert site.query.op == "placeholder"
    assert site.query.meta["example_value"].dtype == dtype
    assert site.output.meta["example_value"].dtype == dtype


def test_values_that_are_widened_are_refused() -> None:
    def step(
        q: Tensor, k: Tensor, v: Tensor, pk: Tensor, pv: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        keys, values = torch.cat([pk, k], dim=-2), torch.cat([pv, v], dim=-2)
        weights = F.softmax(q.float() @ repeat(keys).float().mT, dim=-1)
        return weights @ repeat(values).float(), keys, values

    one_refusal(find(step, *(x.half() for x in (Q, K, V, PK, PV))), "the values are widened")


NARROWING: dict[str, Attend] = {
    "queries": lambda q, k, v: F.softmax(q.half().float() @ k.mT, dim=-1) @ v,
    "keys": lambda q, k, v: F.softmax(q @ k.half().float().mT, dim=-1) @ v,
    "scores": lambda q, k, v: F.softmax((q @ k.mT).half().float(), dim=-1) @ v,
    "softmax": lambda q, k, v: F.softmax(q @ k.mT, dim=-1, dtype=torch.half).float() @ v,
    "probabilities": lambda q, k, v: F.softmax(q @ k.mT, dim=-1).bfloat16().float() @ v,
    "integers": lambda q, k, v: F.softmax((q @ k.mT).int().float(), dim=-1) @ v,
    "flags": lambda q, k, v: F.softmax((q @ k.mT).bool().float(), dim=-1) @ v,
}


@pytest.mark.parametrize("name", NARROWING)
def test_narrowing_casts_are_kept(name: str) -> None:
    found = cached(NARROWING[name])
    assert found.sites == [] and len(found.refusals) == 1


def test_narrowed_scores_are_refused() -> None:
    def step(
        q: Tensor, k: Tensor, v: Tensor, pk: Tensor, pv: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        keys, values = torch.cat([pk, k], dim=-2), torch.cat([pv, v], dim=-2)
        scores = (q @ repeat(keys).mT).float().half()
        return F.softmax(scores, dim=-1) @ repeat(values), keys, values

    one_refusal(find(step, *(x.half() for x in (Q, K, V, PK, PV))), "narrowed before")
