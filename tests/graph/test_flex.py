# SPDX-License-Identifier: Apache-2.0
"""flex_attention: which mask and score functions are read as what, and which are refused.

All cases share one block: q ``[2, 4, 3, 16]`` over a functional cache of 5 + 3 tokens with 2 KV
heads.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.nn.attention.flex_attention import (
    BlockMask,
    and_masks,
    create_block_mask,
    flex_attention,
    or_masks,
)

from kvpass.backends import _copy
from kvpass.graph import find_sites
from kvpass.graph.flex import erase_unused, spell_out
from kvpass.graph.site import AttentionSite, FindResult

BATCH, HEADS, KV, NEW, PAST, DIM = 2, 4, 2, 3, 5, 16
KEYS = PAST + NEW
Q = torch.randn(BATCH, HEADS, NEW, DIM)
K = torch.randn(BATCH, KV, NEW, DIM)
V = torch.randn(BATCH, KV, NEW, 32)
PK = torch.randn(BATCH, KV, PAST, DIM)
PV = torch.randn(BATCH, KV, PAST, 32)
PAD = torch.ones(BATCH, KEYS, dtype=torch.bool)
DOCUMENT = torch.arange(KEYS).repeat(BATCH, 1) // 3
BIAS = torch.randn(HEADS, NEW, KEYS)
SLOPES = torch.rand(HEADS)
SCALAR = torch.tensor(2.0)

Mod = Callable[..., Any]


class Reader:
    """A backend that reads a copy of each graph, as kvpass does, and runs the graph as it is."""

    def __init__(self) -> None:
        self.found: list[FindResult] = []

    def __call__(self, gm: fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        text = gm.print_readable(print_output=False)
        graph = _copy(gm.graph)
        before = str(graph)
        self.found.append(find_sites(graph, spell_out(graph, gm)))
        erase_unused(graph)
        assert str(graph) == before, "something that was spelled out is left"
        assert gm.print_readable(print_output=False) == text, "the graph of Dynamo was changed"
        return gm.forward


def read(
    mask: Mod | BlockMask | None = None,
    score: Mod | None = None,
    *,
    attend: Callable[..., Any] | None = None,
    **options: Any,
) -> FindResult:
    block = mask
    if mask is not None and not isinstance(mask, BlockMask):
        block = create_block_mask(mask, BATCH, HEADS, NEW, KEYS, device="cpu")

    def step(q: Tensor, k: Tensor, v: Tensor, pk: Tensor, pv: Tensor) -> tuple[Tensor, ...]:
        keys, values = torch.cat([pk, k], dim=-2), torch.cat([pv, v], dim=-2)
        if attend is not None:
            return attend(q, keys, values), keys, values
        out = flex_attention(
            q, keys, values, score_mod=score, block_mask=block, enable_gqa=True, **options
        )
        return out, keys, values

    reader = Reader()
    with torch.no_grad():
        torch.compile(step, backend=reader, fullgraph=True)(Q, K, V, PK, PV)
    assert len(reader.found) == 1
    return reader.found[0]


def one_site(found: FindResult) -> AttentionSite:
    assert [refusal.reason for refusal in found.refusals] == []
    assert len(found.sites) == 1
    return found.sites[0]


def causal(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return i + PAST >= j


MASKS: dict[str, tuple[Mod | None, str]] = {
    "none": (None, "none"),
    "all": (lambda b, h, i, j: b.new_ones((), dtype=torch.bool), "none"),
    "causal": (causal, "causal"),
    "turned": (lambda b, h, i, j: j <= PAST + i, "causal"),
    "strict": (lambda b, h, i, j: j < i + (PAST + 1), "causal"),
    "distance": (lambda b, h, i, j: i - j >= -PAST, "causal"),
    "distance turned": (lambda b, h, i, j: j - i <= PAST, "causal"),
    "window": (
        lambda b, h, i, j: (i + PAST >= j) & (i + PAST - j < 4),
        "causal in a window of 4",
    ),
    "window turned": (
        lambda b, h, i, j: (i + PAST >= j) & (j - i > PAST - 4),
        "causal in a window of 4",
    ),
    "joined": (and_masks(causal, lambda b, h, i, j: PAD[b, j]), "causal and padding"),
    "in two steps": (lambda b, h, i, j: (i + PAST >= j) & PAD[b][j], "causal and padding"),
    "prefix": (or_masks(causal, lambda b, h, i, j: j < 2), "operand or_"),
    "documents": (
        lambda b, h, i, j: (i + PAST >= j) & (DOCUMENT[b, i + PAST] == DOCUMENT[b, j]),
        "operand and_",
    ),
    "heads": (lambda b, h, i, j: (i + PAST >= j) & (j >= h), "operand and_"),
    "elsewhere": (lambda b, h, i, j: i + PAST - 1 >= j, "operand"),
}


@pytest.mark.parametrize("name", MASKS)
def test_masks(name: str) -> None:
    mask, words = MASKS[name]
    site = one_site(read(mask))
    assert site.mask.describe().startswith(words)
    assert (site.mask.operand is not None) == words.startswith("operand")
    assert site.scale == 1 / math.sqrt(DIM)
    assert (site.tables is None) == (mask is None), "an own BlockMask is compared"


def cap(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return 20.0 * torch.tanh(score / 20.0)


def in_place(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    score = score * 3
    score += BIAS[h, i, j]
    return score


SCORES: dict[str, tuple[Mod, float, float, int]] = {
    # scale, softcap and operands
    "same": (lambda s, b, h, i, j: s, 0.25, 0.0, 0),
    "times": (lambda s, b, h, i, j: s * 2, 0.5, 0.0, 0),
    "softcap": (cap, 0.25, 20.0, 0),
    "alibi": (lambda s, b, h, i, j: s + SLOPES[h] * (j - i), 0.25, 0.0, 1),
    "alibi subtracted": (lambda s, b, h, i, j: s - SLOPES[h] * (i - j), 0.25, 0.0, 1),
    "relative": (lambda s, b, h, i, j: s + (j - i), 0.25, 0.0, 1),
    "table": (lambda s, b, h, i, j: s + BIAS[h, i, j], 0.25, 0.0, 1),
    "table in steps": (lambda s, b, h, i, j: BIAS[h][i][j] + s, 0.25, 0.0, 1),
    "in place": (in_place, 0.75, 0.0, 1),
    "softcap then table": (
        lambda s, b, h, i, j: cap(s, b, h, i, j) + BIAS[h, i, j], 0.25, 20.0, 1
    ),
    "hidden": (
        lambda s, b, h, i, j: torch.where(i + PAST >= j, s, -float("inf")), 0.25, 0.0, 0
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SCORES)
def test_scores(name: str) -> None:
    score, scale, softcap, operands = SCORES[name]
    site = one_site(read(causal, score))
    assert site.scale == pytest.approx(scale)
    assert site.softcap == softcap
    assert site.mask.causal
    assert len(site.mask.terms) == operands


def test_scale_is_applied_before_the_score_function() -> None:
    site = one_site(read(None, cap, scale=0.5))
    assert (site.scale, site.softcap) == (0.5, 20.0)


def test_options_of_the_kernel_do_not_matter() -> None:
    one_site(read(causal, kernel_options={"BLOCK_M": 32, "PRESCALE_QK": True}))


def changed(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    kept = score
    score += 1.0
    return kept


REFUSED: dict[str, tuple[Mod | None, Mod | None, str]] = {
    "square": (None, lambda s, b, h, i, j: s * s, "is a tensor"),
    "absolute": (None, lambda s, b, h, i, j: s.abs(), "not understood"),
    "negative": (None, lambda s, b, h, i, j: -s, "not understood"),
    "subtracted from": (None, lambda s, b, h, i, j: 1.0 - s, "not understood"),
    "sine": (None, lambda s, b, h, i, j: torch.sin(s), "not understood"),
    "scaled by heads": (None, lambda s, b, h, i, j: s * SLOPES[h], "is a tensor"),
    "scaled by a position": (None, lambda s, b, h, i, j: s * (i + 1), "is a tensor"),
    "another score": (
        None,
        lambda s, b, h, i, j: torch.where(i + PAST >= j, s, s * 2),
        "not understood",
    ),
    "hidden a little": (
        None, lambda s, b, h, i, j: torch.where(i + PAST >= j, s, -10.0), "hidden scores are set"
    ),
    "rounded": (None, lambda s, b, h, i, j: s.half().float() * 2, "rounds the scores"),
    "bias before the softcap": (
        None, lambda s, b, h, i, j: cap(s + BIAS[h, i, j], b, h, i, j), "before they are"
    ),
    "no score": (None, lambda s, b, h, i, j: BIAS[h, i, j], "not understood"),
    "kept from a change": (None, changed, "writes in place"),
    "sum of a row": (
        lambda b, h, i, j: (i + PAST >= j) & (PAD[b].sum() > 0), None, "neither elementwise"
    ),
    "a whole row": (
        lambda b, h, i, j: ((i + PAST >= j) & PAD[b])[0], None, "without indexing each"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_understood_is_refused(name: str) -> None:
    mask, score, words = REFUSED[name]
    found = read(mask, score)
    assert found.sites == []
    assert [words in refusal.reason for refusal in found.refusals] == [True]


@pytest.mark.parametrize("used", [0, 1])
def test_statistics_of_the_scores(used: int) -> None:
    """The logarithm of the sum is not there any more; nothing is lost if nobody looks."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        from torch._higher_order_ops.flex_attention import flex_attention as operator

        out, lse, _ = operator(
            q, k, v, lambda s, b, h, i, j: s, tuple(_whole().as_tuple()), 0.25, {}
        )
        return out + lse[..., None] if used else out

    found = read(attend=attend)
    if used:
        assert [r.reason.startswith("flex_attention also returns") for r in found.refusals] == [
            True
        ]
    else:
        one_site(found)


def _whole() -> BlockMask:
    return create_block_mask(causal, BATCH, HEADS, NEW, KEYS, device="cpu")


def test_without_its_functions_a_call_is_opaque() -> None:
    found: list[FindResult] = []

    def backend(gm: fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        found.append(find_sites(gm))
        return gm.forward

    def step(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flex_attention(q, k, v, enable_gqa=True)

    torch.compile(step, backend=backend)(Q, K, K)
    assert found[0].sites == []
    assert "opaque" in found[0].refusals[0].reason


def test_layers_share_one_mask_and_one_comparison() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        block = _whole_at_call
        first = flex_attention(q, k, v, block_mask=block, enable_gqa=True)
        again = flex_attention(q * 2, k, v, block_mask=block, enable_gqa=True)
        return first + again

    _whole_at_call = _whole()
    found = read(attend=attend)
    assert len(found.sites) == 2
    assert found.sites[0].tables is not None
    assert found.sites[0].tables is found.sites[1].tables
