# SPDX-License-Identifier: Apache-2.0
"""The score path: each supported spelling is one site, each near miss is refused with its reason.

All cases share one block: q ``[2, 4, 3, 16]`` over a functional cache of 5 + 3 tokens with 2 KV
heads, written out so that a case replaces one line of it.
"""

from __future__ import annotations

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


NEAR_MISSES: dict[str, tuple[Attend, str]] = {
    "pointwise": (
        lambda q, k, v: F.softmax((s := q @ k.mT) + 0.1 * torch.sin(s), dim=-1) @ v,
        "unclear which operand",
    ),
    "sigmoid": (lambda q, k, v: F.softmax(torch.sigmoid(q @ k.mT), dim=-1) @ v, "sigmoid"),
    "softcap": (
        lambda q, k, v: F.softmax(torch.tanh(q @ k.mT / 50) * 50, dim=-1) @ v,
        "soft-capped with tanh",
    ),
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
    "in place": (lambda q, k, v: F.softmax((q @ k.mT).mul_(0.5), dim=-1) @ v, "mul_"),
    "sinks": (
        lambda q, k, v: F.softmax(torch.cat([q @ k.mT, q[..., :1]], dim=-1), dim=-1)[..., :-1] @ v,
        "sinks",
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
        lambda q, k, v: torch.einsum("bhqk,bhkd->bqhd", (q @ k.mT).softmax(-1), v),
        "not probabilities times V",
    ),
    "3d": (
        lambda q, k, v: (
            F.softmax(torch.bmm(q.flatten(0, 1), k.flatten(0, 1).mT), dim=-1) @ v.flatten(0, 1)
        ),
        "rank 3",
    ),
    "baddbmm": (
        lambda q, k, v: (
            torch.baddbmm(q.new_zeros(8, 3, 8), q.flatten(0, 1), k.flatten(0, 1).mT)
            .view(2, 4, 3, 8)
            .softmax(-1)
            @ v
        ),
        "view",
    ),
    "mask before scale": (
        lambda q, k, v: F.softmax((q @ k.mT + q.new_zeros(3, 8)) * 0.5, dim=-1) @ v,
        "before the scale",
    ),
    "not transposed": (
        lambda q, k, v: F.softmax(q @ k.reshape(2, 4, 16, 8), dim=-1) @ v,
        "last two axes swapped",
    ),
    "both masks": (
        lambda q, k, v: F.softmax(q @ k.mT + q.new_zeros(3, 8) + q.new_ones(3, 8), -1) @ v,
        "cannot be combined",
    ),
}


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_near_miss_is_refused(name: str) -> None:
    attend, words = NEAR_MISSES[name]
    one_refusal(cached(attend), words)


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


def test_flex_attention_is_opaque() -> None:
    from torch.nn.attention.flex_attention import flex_attention

    one_refusal(
        cached(lambda q, k, v: flex_attention(q, k, v[..., :16])), "flex_attention is opaque"
    )


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


def test_eager_scale_that_is_a_free_symbol_is_refused() -> None:
    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scaling = 0.3
            self.project = torch.nn.Linear(32, 32)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            heads = self.project(x).view(x.shape[0], -1, 2, 16).transpose(1, 2)
            empty = torch.tensor([])
            keys, values = torch.cat([empty, heads], dim=2), torch.cat([empty, heads], dim=2)
            return F.softmax(heads @ keys.mT * self.scaling, dim=-1) @ values, keys, values

    block = Block().eval()
    one_refusal(find(block, torch.randn(2, 3, 32), dynamic=True), "not a number known at compile")


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


def test_casts_before_the_product_are_refused() -> None:
    def step(
        q: Tensor, k: Tensor, v: Tensor, pk: Tensor, pv: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        keys, values = torch.cat([pk, k], dim=-2), torch.cat([pv, v], dim=-2)
        weights = F.softmax(q.float() @ repeat(keys).float().mT, dim=-1).half()
        return weights @ repeat(values), keys, values

    found = find(step, *(x.half() for x in (Q, K, V, PK, PV)))
    assert found.sites == [] and len(found.refusals) == 1


def test_narrowed_scores_are_refused() -> None:
    def step(
        q: Tensor, k: Tensor, v: Tensor, pk: Tensor, pv: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        keys, values = torch.cat([pk, k], dim=-2), torch.cat([pv, v], dim=-2)
        scores = (q @ repeat(keys).mT).float().half()
        return F.softmax(scores, dim=-1) @ repeat(values), keys, values

    one_refusal(find(step, *(x.half() for x in (Q, K, V, PK, PV))), "narrowed before")
