# SPDX-License-Identifier: Apache-2.0
"""Random attention modules: what the pass rewrites is right, and all of a grammar is rewritten.

The grammar, in the words of ``Spec`` and ``Site`` (tests/graph/spec.py)::

    module  := batch dtype cache call+ site{1,2}
    batch   := 1 | 2 | 3
    dtype   := float32 | bfloat16 | float16
    cache   := functional (tuples of tensors in and out) | tiered (kvpass.TieredCache.update)
    call    := a prompt of 1..40 tokens, then steps of 1 token, or of 2..5 now and then
    dynamic := None | False | True         (torch.compile's; True makes a float a run-time scale)

    site    := heads anchor repeat start
    heads   := 1..3 KV heads x (1 | 2 | 3 | 4 | 7) query heads; K and V of 16 | 20 | 33 | 64 | 80
    anchor  := sdpa | eager
    repeat  := expand+reshape | unsqueeze+expand+flatten | repeat_interleave | broadcast of one
               head | enable_gqa (sdpa)
    start   := cat with an empty tensor made in the graph | with an input without tokens | with a
               dense past of 1..40 tokens | no cat in the first call (which is then left alone)
    keep    := the whole cache is returned | its last window - 1 tokens

    sdpa    := F.scaled_dot_product_attention(q, k, v, scale, mask)
    eager   := dropout?(cast?(softmax(sinks?(masked)))) product v
    masked  := bias, then mask, then scale | scale, then softcap?, then bias and mask in any order
    product := @ | torch.matmul | einsum | bmm, 3-d matmul or baddbmm over [B * H, n, D]
    scale   := default | x * c | c * x | x / c | int | attribute | in place | twice | none | in q
               | split over q and the cached keys | alpha of baddbmm
    softcap := cap * tanh(x / cap), cap 2 | 30
    sinks   := a logit a head, concatenated; the maximum is subtracted or not
    cast    := none | softmax(dtype=float32) | .float() of operands, scores or the softmax's input
    mask    := none | visible padding?
    visible := causal | causal in a window of 1..24 | arbitrary, key 0 always visible
    padding := holes, key 0 visible | left, so that some queries see no key at all; a slice, or
               indexed by sequence and key, which counts from the first key that is kept
    apply   := (sdpa) bool | float | is_causal while nothing is cached
             | (eager) masked_fill(~visible) | masked_fill(hidden) | where | add | in place
    hidden  := -inf | finfo.min
    bias    := [1, H, n, k] | [B, 1, n, k] | [B, H, n, k] | [B, 1, 1, k] | ALiBi

A foreign piece (``FOREIGN``) is anything else. Where one is mixed in, the attention must be left
alone, equal to eager bit by bit, or still be right.
"""

from __future__ import annotations

import dataclasses
import gc
import os
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, currently_in_test_context, given, note, settings
from hypothesis import strategies as st
from torch import Tensor

import kvpass
from kvpass.graph.report import GraphReport, SiteReport, observed
from tests.grammar import Model, PlainCache, inputs, meaning
from tests.graph.spec import FOLDED, Site, Spec
from tests.models import OPTIONS

EXAMPLES = int(os.environ.get("GRAMMAR_EXAMPLES", "500"))
TOLERANCE = {"float32": 2e-5, "float16": 4e-3, "bfloat16": 3e-2, "float64": 2e-5}
"""Relative to the largest value; outputs are means of values, rounded to their dtype."""

# fmt: off
FOREIGN = {
    "any": (
        "keys reversed", "values reversed", "values rolled", "values scrambled", "values scaled",
        "values are keys", "keys narrowed", "keys shifted", "scale negative", "scale zero",
        "dropout", "heads tiled", "small heads",
    ),
    "mask": (
        "mask negated", "sees the next key", "chunked", "window on the wrong side",
        "late keys per head", "late keys per head and causal",
    ),
    "functional": ("cache not returned", "past read elsewhere", "float64"),
    "sdpa": ("is_causal with a past",),
    "eager": (
        "sin", "bent by sin", "number added", "mean added", "scores narrowed", "clamped",
        "maximum of queries", "maximum of keys", "weights squared", "weights bent",
        "weights scaled", "weights clamped", "softmax twice", "softmax of queries",
        "softmax of heads", "weights returned", "late write", "scale by a tensor",
        "softcap by data", "softcap of one head", "sinks in front", "not cast back",
        "run-time scale behind", "bias of no weight",
    ),
}
# fmt: on

_DECODE = Spec(batch=2, steps=(6, 1, 1), cache="tiered", dynamic=False)
_EAGER = Site(anchor="eager", group=2, apply="fill")
ONCE_WRONG = {
    # With one query, keys that only later heads hide were shown to all heads.
    "late keys per head": dataclasses.replace(
        _DECODE, sites=(Site(group=4, foreign="late keys per head", visible="causal"),)
    ),
    # A run-time factor behind a softcap was folded into the query, inside the softcap.
    "run-time scale behind": Spec(
        batch=2, steps=(6, 1), dynamic=True,
        sites=(dataclasses.replace(_EAGER, softcap=2.0, foreign="run-time scale behind"),),
    ),
    # baddbmm(beta=0) ignores its bias even where that is NaN; 0 * NaN was added.
    "bias of no weight": dataclasses.replace(
        _DECODE,
        sites=(
            dataclasses.replace(
                _EAGER, product="baddbmm", bias="heads", scale="alpha", foreign="bias of no weight",
            ),
        ),
    ),
}  # fmt: skip


# ------------------------------------------------------------------ the grammar, drawn


def sample(draw: Any, *items: Any) -> Any:
    return draw(st.sampled_from(items))


def chance(draw: Any, share: int) -> bool:
    """True for ``share`` in 10."""
    return bool(draw(st.integers(0, 9)) < share)


@st.composite
def sites(draw: Any, spec: Spec, anchor: str = "", forced: str = "") -> Site:
    """A site within the grammar; ``forced`` is a foreign piece that it must have a place for."""
    kv_heads, group = sample(draw, 1, 2, 3), sample(draw, 1, 2, 3, 4, 7)
    sdpa = anchor == "sdpa" or (not anchor and chance(draw, 4))
    start, stored = "tensor", 0
    if spec.cache == "functional":
        start = sample(draw, "tensor", "tensor", "empty", "zero", "none")
        if len(spec.steps) == 1 or chance(draw, 3) or forced == "past read elsewhere":
            start, stored = "dense", draw(st.integers(1, 40))
    product = "@"
    if not sdpa:
        product = sample(draw, "@", "matmul", "einsum", "bmm", "3-d matmul", "baddbmm")
    if forced == "bias of no weight":
        product = "baddbmm"
    softcap = 0.0
    if not sdpa and product != "baddbmm" and chance(draw, 3):
        softcap = sample(draw, 2.0, 30.0)
    plain = sdpa or softcap or product == "baddbmm" or forced
    mask_first = not plain and chance(draw, 2)
    visible = sample(
        draw, "none", "causal", "causal", "causal", "window", "window", "arbitrary",
        "arbitrary per head", "arbitrary per sequence",
    )  # fmt: skip
    if forced in FOREIGN["mask"]:
        visible = "causal" if forced != "mask negated" else sample(draw, "window", "arbitrary")
    keep = visible == "window" and spec.cache == "functional" and not forced
    keep = keep and product != "baddbmm" and chance(draw, 5)
    spelling = sample(draw, "le", "ge", "not gt", "tril", "arange", "buffer")
    if keep and spelling == "buffer":
        spelling = "le"
    window = draw(st.integers(2 if keep else 1, 24)) if visible == "window" else 0
    padding = ""
    if not visible.startswith("arbitrary") and not forced and chance(draw, 3):
        padding = sample(draw, "holes", "left")
    hidden = sample(draw, "-inf", "min")
    # In fp16 the lowest number does not swallow a score: a row that sees nothing is eager's affair.
    if mask_first or (padding == "left" and spec.dtype == "float16") or (keep and padding):
        hidden = "-inf"
    if sdpa:
        apply = sample(draw, "bool", "bool", "float")
    else:
        options = ["fill", "fill_", "where", "where hidden", "add", "add left", "add_"]
        table = visible == "causal" and spelling == "buffer" and not padding
        if not forced and (table or visible.startswith("arbitrary")):
            options += ["hidden", "hidden", "hidden", "hidden", "buffer == 0"]
        apply = sample(draw, *options)
    bias = ""
    if product == "baddbmm" or (not keep and chance(draw, 3)):
        bias = sample(draw, "heads", "batch", "all", "keys", "alibi", "alibi of keys")
    single = all(n == 1 for n in spec.steps[1:]) and start != "dense"
    single &= spec.dynamic is not True  # else how much is cached is a symbol in the prompt too
    if sdpa and visible == "causal" and not padding and not bias and single and chance(draw, 5):
        apply = "is_causal" if not forced else apply
    elif sdpa and bias:
        apply = "float"
    if product == "baddbmm":
        scale = "alpha"
    elif spec.dynamic and not mask_first and chance(draw, 6):
        scale = "attribute"
    elif sdpa:
        scale = sample(draw, "default", "times", "int", "attribute", "into q", "split")
    elif mask_first:
        scale = sample(draw, "default", "times", "left", "divided", "int", "in place", "twice")
    else:
        scale = sample(
            draw, "default", "times", "left", "divided", "int", "attribute", "in place",
            "assigned", "twice", "none", "into q", "split",
        )  # fmt: skip
    repeats = ["expand", "unsqueeze", "interleave", "torch"]
    if kv_heads == 1 and product not in FOLDED:
        repeats.append("broadcast")
    if sdpa:
        repeats.append("enable_gqa")
    precision = ""
    if not sdpa:
        precision = sample(draw, "", "", "dtype", "scores", "late", "operands")
        if product == "baddbmm" and precision == "operands":
            precision = "dtype"
    return Site(
        kv_heads=kv_heads,
        group=group,
        head_dim_k=sample(draw, 16, 20, 33, 64, 80),
        head_dim_v=sample(draw, 16, 20, 33, 64, 80),
        anchor="sdpa" if sdpa else "eager",
        product=product,
        transpose=sample(draw, "mT", "transpose", "permute", "swapaxes"),
        repeat=sample(draw, *repeats),
        scale=scale,
        factor=sample(draw, 0.05, 0.25, 0.3),
        mask_first=bool(mask_first),
        softcap=softcap,
        softcap_form=sample(draw, "steps", "left", "in place"),
        sinks=sample(draw, "plain", "max", "amax") if not sdpa and chance(draw, 2) else "",
        softmax=sample(draw, "F", "torch", "method"),
        precision=precision,
        dropout=not sdpa and chance(draw, 2),
        visible=visible,
        spelling=spelling,
        window=window,
        padding=padding,
        apply=apply,
        hidden=hidden,
        bias=bias,
        bias_first=draw(st.booleans()),
        start=start,
        stored=stored,
        keep=keep,
        join=sample(draw, "list", "tuple", "concat"),
    )


@st.composite
def calls(draw: Any, cache: str = "") -> Spec:
    """Batch, dtype, cache and calls, without sites. Few compilations: most of the time goes there.

    Lengths that are symbols cost three times as much, so that half of the modules run with static
    ones, and then with one or two calls.
    """
    cache = cache or sample(draw, "functional", "tiered")
    dynamic = sample(draw, None, None, None, False, False, False, False, False, False, True)
    steps = [draw(st.integers(1, 40))]
    if dynamic is not False:
        for _ in range(draw(st.integers(1, 4))):
            steps.append(draw(st.integers(2, 5)) if chance(draw, 1) else 1)
    elif cache == "tiered":
        steps.append(draw(st.integers(2, 5)) if chance(draw, 2) else 1)
    else:
        steps = [draw(st.integers(1, 12)) if chance(draw, 5) else 1]
    return Spec(
        batch=sample(draw, 1, 2, 3),
        dtype=sample(draw, "float32", "float32", "bfloat16", "float16"),
        steps=tuple(steps),
        cache=cache,
        dynamic=dynamic,
        seed=draw(st.integers(0, 99)),
        sites=(),
    )


@st.composite
def supported(draw: Any) -> Spec:
    """A module within the grammar."""
    spec = draw(calls())
    count = 2 if chance(draw, 1) else 1
    return dataclasses.replace(spec, sites=tuple(draw(sites(spec)) for _ in range(count)))


@st.composite
def foreign(draw: Any) -> Spec:
    """A module with one foreign piece."""
    drawn = [(kind, piece) for kind, pieces in FOREIGN.items() for piece in pieces]
    kind, piece = draw(st.sampled_from(drawn))
    spec = draw(calls("functional" if kind == "functional" else ""))
    anchor = kind if kind in ("sdpa", "eager") else ""
    if piece == "not cast back":
        spec = dataclasses.replace(spec, dtype="bfloat16")
    elif piece == "float64":
        spec = dataclasses.replace(spec, dtype="float64", cache="functional")
    elif piece == "run-time scale behind":
        spec = dataclasses.replace(spec, dynamic=True, cache="functional", steps=(5, 1))
    site = dataclasses.replace(draw(sites(spec, anchor, piece)), foreign=piece)
    changes: dict[str, Any] = {}
    if piece == "heads tiled":
        changes = {"kv_heads": 2, "group": 3, "repeat": sample(draw, "expand", "interleave")}
    elif piece == "small heads":
        changes = {sample(draw, "head_dim_k", "head_dim_v"): sample(draw, 8, 15)}
    elif piece == "values are keys":
        changes = {"head_dim_v": site.head_dim_k}
    elif piece == "sinks in front" and not site.sinks:
        changes = {"sinks": "max"}
    elif piece == "run-time scale behind":
        changes = {"softcap": 2.0, "product": "@", "scale": "times", "repeat": "expand"}
    site = dataclasses.replace(site, **changes)
    if spec.dtype == "float64" and site.precision:
        site = dataclasses.replace(site, precision="")
    others = [draw(sites(spec))] if chance(draw, 1) and spec.dtype != "float64" else []
    return dataclasses.replace(spec, sites=(site, *others))


@st.composite
def modules(draw: Any) -> Spec:
    """A module; three in ten have a foreign piece."""
    return draw(foreign() if chance(draw, 3) else supported())


# ------------------------------------------------------------------ running a module


class Run:
    """All calls of a module: outputs, returned probabilities and the reports of its graphs."""

    def __init__(self, spec: Spec, model: Any, compiled: bool = False, double: bool = False):
        self.outs: list[list[Tensor]] = []
        self.weights: list[list[Tensor | None]] = []
        self.reports: list[GraphReport] = []
        xs, pasts = inputs(spec)
        if double:
            model = model.double()
            xs = [x.double() for x in xs]
            pasts = [None if pair is None else (pair[0].double(), pair[1].double())
                     for pair in pasts]  # fmt: skip
        cache: Any = list(pasts)
        if spec.cache == "tiered":
            layers = SimpleNamespace(num_hidden_layers=len(spec.sites))
            cache = kvpass.TieredCache(layers, sum(spec.steps) + 8, **OPTIONS)
            cache = PlainCache() if double else cache
        if compiled:
            torch._dynamo.reset()
            model = torch.compile(
                model, backend=kvpass.backend, options={"inner": "eager"} | OPTIONS,
                fullgraph=True, dynamic=spec.dynamic,
            )  # fmt: skip
        torch.manual_seed(spec.seed)  # of dropout
        with torch.no_grad(), observed(self.reports.append):
            for call, x in enumerate(xs):
                outs, stored, weights = model(x, cache, sum(spec.steps[:call]))
                self.outs.append(outs)
                self.weights.append(weights)
                if spec.cache == "functional":
                    cache = stored

    def of(self, number: int) -> list[Tensor]:
        """Outputs of one attention."""
        return [outs[number] for outs in self.outs]


def assert_right(spec: Spec, number: int, got: list[Tensor], expected: list[Tensor]) -> None:
    """Each output is near what it should be, where a query sees anything at all."""
    xs, pasts = inputs(spec)
    largest = max(x.abs().max().item() for x in (*xs, *(p[1] for p in pasts if p and p[1].numel())))
    limit = TOLERANCE[spec.dtype] * largest
    for call, (out, wanted) in enumerate(zip(got, expected, strict=True)):
        assert out.shape == wanted.shape and out.dtype == spec.torch_dtype
        seen = ~wanted.isnan()
        assert not out[seen].isnan().any(), f"call {call}, attention {number}: NaN"
        error = (out.double() - wanted)[seen].abs().max().item() if seen.any() else 0.0
        assert error <= limit, (
            f"call {call}, attention {number}: {error:.3g} from fp64, limit {limit:.3g}"
        )


def found(spec: Spec, report: GraphReport) -> list[SiteReport | None]:
    """The report of each attention; None for one that a foreign piece made into something else."""
    reports: list[SiteReport | None] = list(report.sites)
    if len(reports) < len(spec.sites):
        reports.insert(next(i for i, site in enumerate(spec.sites) if site.foreign), None)
    assert len(reports) == len(spec.sites)
    return reports


def check(spec: Spec) -> bool:
    """Compile and run a module; whether all of it was rewritten."""
    model = Model(spec)
    if currently_in_test_context():
        note(model.text)
    run = Run(spec, model, compiled=True)
    graphs = [found(spec, report) for report in run.reports]
    if spec.cache == "functional":  # the first call of an attention without a past is none of ours
        for number, site in enumerate(spec.sites):
            first = graphs[0][number]
            if site.start == "none" and first is not None and not site.foreign:
                assert "no KV cache" in first.reason
                graphs[0][number] = dataclasses.replace(first, rewritten=True)
    for number, site in enumerate(spec.sites):
        reports = [graph[number] for graph in graphs]
        if not site.foreign:
            reasons = [report.reason for report in reports if report and not report.rewritten]
            assert not reasons, reasons
            assert_right(spec, number, run.of(number), meaning(spec, model, number))
        elif any(report and report.rewritten for report in reports):
            twin = Run(spec, Model(spec), double=True)
            assert_right(spec, number, run.of(number), twin.of(number))
        else:
            eager = Run(spec, model)
            for got, wanted in zip(run.of(number), eager.of(number), strict=True):
                assert torch.equal(got.nan_to_num(7.0), wanted.nan_to_num(7.0))
            assert all(report.reason for report in reports if report)
    return all(report and report.rewritten for graph in graphs for report in graph)


@pytest.fixture(autouse=True)
def _quick_compilation() -> Iterator[None]:
    """No two modules are alike: a sixth of the time goes into keys that are never found again."""
    gc.collect()
    gc.freeze()
    with torch._dynamo.config.patch(fake_tensor_cache_enabled=False):
        yield
    gc.unfreeze()
    torch._dynamo.reset()


QUIET = settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_random_modules(record_property: Callable[[str, object], None]) -> None:
    counts: Counter[tuple[bool, bool]] = Counter()

    @settings(QUIET, max_examples=EXAMPLES)
    @given(modules())
    def example(spec: Spec) -> None:
        counts[bool(spec.foreign), check(spec)] += 1

    example()
    total = sum(counts.values())
    whole = counts[False, True] + counts[True, True]
    record_property(
        "summary",
        f"random modules: {whole} of {total} rewritten ({whole / total:.0%}); of "
        f"{counts[True, True] + counts[True, False]} with a foreign piece "
        f"{counts[True, True]} were rewritten and right, the others left alone",
    )
    assert total >= EXAMPLES and whole >= total / 2 and not counts[False, False]


@settings(QUIET, max_examples=100)
@given(supported())
def test_the_grammar_means_what_eager_computes(spec: Spec) -> None:
    """The fp64 meaning is right: uncompiled, each module computes it up to rounding."""
    model = Model(spec)
    if currently_in_test_context():
        note(model.text)
    run = Run(spec, model)
    for number in range(len(spec.sites)):
        for out, wanted in zip(run.of(number), meaning(spec, model, number), strict=True):
            seen = ~wanted.isnan()
            error = (out.double() - wanted)[seen].abs().max().item() if seen.any() else 0.0
            assert error <= {"float32": 1e-4, "float16": 0.05, "bfloat16": 0.3}[spec.dtype]


@pytest.mark.parametrize("piece", ONCE_WRONG)
def test_what_was_once_wrong(piece: str) -> None:
    check(ONCE_WRONG[piece])


def test_tiered_cache_in_a_dynamic_graph() -> None:
    """With dynamic=True the block size and the layer of a TieredCache are symbols."""
    site = Site(group=2, visible="causal")
    assert check(Spec(batch=2, steps=(5, 1, 1), cache="tiered", dynamic=True, sites=(site,)))
