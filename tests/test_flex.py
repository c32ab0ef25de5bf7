# SPDX-License-Identifier: Apache-2.0
"""Decoders that call flex_attention give what flex_attention gives in float64."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as flex
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

import kvpass
from kvpass.errors import KVPassWarning
from kvpass.graph.report import GraphReport, observed
from kvpass.step.graph import RewrittenGraph, _warn_of_tables
from tests.models import OPTIONS

BATCH, HEADS, KV, DIM, LONGEST = 2, 4, 2, 16, 128
CALLS = (40, 1, 1, 1)
PAD = torch.ones(BATCH, LONGEST, dtype=torch.bool)
PAD[0, :7] = False
DOCUMENT = torch.arange(LONGEST).repeat(BATCH, 1) // 11
PREFIX = torch.tensor([3, 9])
BIAS = torch.randn(HEADS, LONGEST, generator=torch.Generator().manual_seed(5))
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])

Past = tuple[Tensor, Tensor] | None


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    torch._dynamo.reset()
    _warn_of_tables.cache_clear()
    with torch.no_grad():
        yield
    torch._dynamo.reset()


def grow(k: Tensor, v: Tensor, past: Past) -> tuple[Tensor, Tensor]:
    empty = k.new_empty(BATCH, KV, 0, DIM)
    before = (empty, empty) if past is None else past
    return torch.cat((before[0], k), 2), torch.cat((before[1], v), 2)


def step(
    q: Tensor, k: Tensor, v: Tensor, past: Past, block: BlockMask | None, score: Any = None
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    k, v = grow(k, v, past)
    return flex_attention(q, k, v, score_mod=score, block_mask=block, enable_gqa=True), (k, v)


def qkv(tokens: int, seed: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(
        torch.randn(BATCH, heads, tokens, DIM, generator=generator).to(dtype)
        for heads in (HEADS, KV, KV)
    )


def exact(
    function: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor, past: Any, *args: Any
) -> tuple[Tensor, Any]:
    """The same in float64, by torch's own dense implementation."""
    old, flex._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = (
        flex._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG,
        True,
    )
    try:
        result: tuple[Tensor, Any] = function(q.double(), k.double(), v.double(), past, *args)
        return result
    finally:
        flex._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = old


class Counted:
    """Runs of rewritten graphs, and of the graphs before they were rewritten."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.runs = self.plain = 0
        make, call = RewrittenGraph.__init__, RewrittenGraph.__call__

        def init(graph: Any, *args: Any, **kwargs: Any) -> None:
            *rest, plain = args

            def counted(*inputs: Any) -> Any:
                self.plain += 1
                return plain(*inputs)

            make(graph, *rest, counted, **kwargs)

        def run(graph: Any, *inputs: Any) -> Any:
            self.runs += 1
            return call(graph, *inputs)

        monkeypatch.setattr(RewrittenGraph, "__init__", init)
        monkeypatch.setattr(RewrittenGraph, "__call__", run)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counted:
    return Counted(monkeypatch)


def compiled(function: Callable[..., Any], inner: str = "eager") -> Callable[..., Any]:
    options = {"inner": inner} | OPTIONS
    return torch.compile(function, backend=kvpass.backend, options=options)


def blocks(mask: Any, queries: int, keys: int, heads: int | None = None) -> BlockMask:
    return create_block_mask(mask, BATCH, heads, queries, keys, device="cpu", BLOCK_SIZE=16)


def masks(past: int) -> dict[str, Any]:
    def causal(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return i + past >= j

    return {
        "causal": causal,
        "window": lambda b, h, i, j: (i + past >= j) & (i + past - j < 12),
        "padding": lambda b, h, i, j: (i + past >= j) & PAD[b, j],
        "prefix": lambda b, h, i, j: (i + past >= j) | (j < PREFIX[b]),
        "documents": lambda b, h, i, j: (i + past >= j) & (DOCUMENT[b, i + past] == DOCUMENT[b, j]),
        "heads": lambda b, h, i, j: (i + past >= j) & (j >= h),
        "none": None,
    }


def scores(past: int) -> dict[str, Any]:
    return {
        "none": None,
        "softcap": lambda s, b, h, i, j: 2.0 * torch.tanh(s / 2.0),
        "alibi": lambda s, b, h, i, j: s + SLOPES[h] * (j - (i + past)),
        "relative": lambda s, b, h, i, j: s + (j - i - past),
        "table": lambda s, b, h, i, j: 3.0 * torch.tanh(s / 3.0) + BIAS[h, j],
    }


@pytest.mark.parametrize(
    ("mask", "score", "dtype"),
    [
        ("causal", "none", torch.float32),
        ("causal", "alibi", torch.bfloat16),
        ("window", "softcap", torch.float32),
        ("padding", "relative", torch.float16),
        ("prefix", "softcap", torch.float32),
        ("documents", "none", torch.float32),
        ("heads", "table", torch.float32),
        ("none", "alibi", torch.float32),
    ],
)
def test_own_decoder(counted: Counted, mask: str, score: str, dtype: torch.dtype) -> None:
    """Each with a BlockMask that is made anew outside of the compiled function, in small blocks."""
    run, reports = compiled(step), []
    ours: Any = None
    theirs: Any = None
    past = 0
    with observed(reports.append):
        for seed, tokens in enumerate(CALLS):
            function = masks(past)[mask]
            heads = HEADS if mask == "heads" else None
            block = None if function is None else blocks(function, tokens, past + tokens, heads)
            args = (*qkv(tokens, seed, dtype),)
            got, ours = run(*args, ours, block, scores(past)[score])
            wanted, theirs = exact(step, *args, theirs, block, scores(past)[score])
            torch.testing.assert_close(got.double(), wanted, **_near(dtype))
            past += tokens
    sites = [site for report in reports for site in report.sites]
    assert [site.reason for site in sites if not site.rewritten] == []
    assert counted.runs == len(CALLS)
    assert counted.plain == 0


def _near(dtype: torch.dtype) -> dict[str, float]:
    return {"rtol": 0.0, "atol": 5e-6 if dtype == torch.float32 else 2e-2}


def test_a_row_that_sees_no_key_is_zero(counted: Counted) -> None:
    run = compiled(step)
    block = blocks(masks(0)["padding"], 20, 20)
    got, _ = run(*qkv(20, 1), None, block)
    wanted, _ = exact(step, *qkv(20, 1), None, block)
    assert not got[0, :, :7].any()
    torch.testing.assert_close(got.double(), wanted, rtol=0.0, atol=5e-6)
    assert (counted.runs, counted.plain) == (1, 0)


def made_inside(
    q: Tensor, k: Tensor, v: Tensor, past: Past, pad: Tensor
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    k, v = grow(k, v, past)
    queries, keys = q.shape[2], k.shape[2]
    before = keys - queries

    def mask(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (i + before >= j) & pad[b, j]

    block = create_block_mask(mask, BATCH, None, queries, keys, device="cpu", BLOCK_SIZE=16)
    return flex_attention(q, k, v, block_mask=block, enable_gqa=True), (k, v)


def test_a_block_mask_made_in_the_graph_and_a_captured_tensor_that_changes(
    counted: Counted,
) -> None:
    run, reports = compiled(made_inside), []
    ours = theirs = None
    pad = PAD.clone()
    with observed(reports.append):
        for seed, tokens in enumerate(CALLS):
            pad[1, 3 * seed] = False
            args = qkv(tokens, seed)
            got, ours = run(*args, ours, pad)
            wanted, theirs = exact(made_inside, *args, theirs, pad)
            torch.testing.assert_close(got.double(), wanted, rtol=0.0, atol=5e-6)
    assert {site.mask for report in reports for site in report.sites} == {"causal and padding"}
    assert (counted.runs, counted.plain) == (len(CALLS), 0)


def tables(kind: str, queries: int, keys: int, past: int) -> BlockMask:
    """A BlockMask of a causal function whose tables say something else."""
    right = blocks(masks(past)["causal"], queries, keys)
    count, index = right.kv_num_blocks, right.kv_indices
    full_count, full_index = right.full_kv_num_blocks, right.full_kv_indices
    assert full_count is not None and full_index is not None
    everything = torch.arange(index.shape[3], dtype=torch.int32).expand_as(index).contiguous()
    if kind == "hidden":
        count = torch.zeros_like(count)
    elif kind == "all full":
        count = torch.zeros_like(count)
        full_count, full_index = torch.full_like(full_count, index.shape[3]), everything
    elif kind == "twice":
        full_count, full_index = count, index
    made = BlockMask.from_kv_blocks(
        count, index, full_count, full_index, BLOCK_SIZE=16,
        mask_mod=right.mask_mod, seq_lengths=(queries, keys),
    )  # fmt: skip
    if kind == "outside":
        made.kv_indices = index + 1000
    return made


# Calls that are not rewritten: in the second, all keys are seen anyway.
WRONG = {"as they are": 0, "hidden": 2, "all full": 1, "twice": 2, "outside": 2}


@pytest.mark.parametrize("kind", WRONG)
def test_tables_that_contradict_their_mask_function(counted: Counted, kind: str) -> None:
    """The result is that of uncompiled code, which follows the function; later calls go on."""
    run = compiled(step)
    ours = theirs = None
    past = 0
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for seed, tokens in enumerate(CALLS):
            wrong = kind if seed in (0, 2) else "as they are"
            block = tables(wrong, tokens, past + tokens, past)
            args = qkv(tokens, seed)
            got, ours = run(*args, ours, block)
            wanted, theirs = exact(step, *args, theirs, block)
            torch.testing.assert_close(got.double(), wanted, rtol=0.0, atol=5e-6)
            past += tokens
    said = [
        w for w in caught if issubclass(w.category, KVPassWarning) and "lists" in str(w.message)
    ]
    assert counted.plain == WRONG[kind]
    assert len(said) == min(1, WRONG[kind])


def test_a_block_mask_of_tables_alone(counted: Counted) -> None:
    """Its function shows every key; compiled kernels would not, so nothing is taken for granted."""
    run = compiled(step)
    index = torch.zeros(1, 1, 2, 2, dtype=torch.int32)
    count = torch.ones(1, 1, 2, dtype=torch.int32)
    block = BlockMask.from_kv_blocks(count, index, BLOCK_SIZE=16, seq_lengths=(20, 20))
    got, _ = run(*qkv(20, 1), None, block)
    wanted, _ = exact(step, *qkv(20, 1), None, block)
    torch.testing.assert_close(got.double(), wanted, rtol=0.0, atol=5e-6)
    assert (counted.runs, counted.plain) == (1, 1)


def test_queries_that_begin_elsewhere(counted: Counted) -> None:
    """A mask may have another position than the cache: then nothing is rewritten in this call."""
    run = compiled(step)
    ours = theirs = None
    past = 0
    for seed, tokens in enumerate((20, 1, 1, 1, 1, 1)):
        said = past - 6 if seed in (3, 4) else past
        block = blocks(_shifted(said), tokens, past + tokens)
        args = qkv(tokens, seed)
        got, ours = run(*args, ours, block)
        wanted, theirs = exact(step, *args, theirs, block)
        torch.testing.assert_close(got.double(), wanted, rtol=0.0, atol=5e-6)
        past += tokens
    assert counted.plain > 0
    assert counted.plain < counted.runs


def _shifted(past: int) -> Any:
    return lambda b, h, i, j: i + past >= j


REFUSED: dict[str, Any] = {
    "square": lambda s, b, h, i, j: s * s,
    "position": lambda s, b, h, i, j: s * (1.0 + i),
    "sign": lambda s, b, h, i, j: -s,
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_is_bit_equal(name: str) -> None:
    reports: list[GraphReport] = []
    run = compiled(step)
    plain = torch.compile(step, backend="eager")
    ours = theirs = None
    with observed(reports.append):
        for seed, tokens in enumerate((20, 1)):
            block = blocks(masks(20 * seed)["causal"], tokens, 20 * seed + tokens)
            got, ours = run(*qkv(tokens, seed), ours, block, REFUSED[name])
            wanted, theirs = plain(*qkv(tokens, seed), theirs, block, REFUSED[name])
            assert torch.equal(got, wanted)
    assert not any(site.rewritten for report in reports for site in report.sites)


def only_reads(q: Tensor, past: tuple[Tensor, Tensor]) -> Tensor:
    return flex_attention(q, *past, enable_gqa=True)


@pytest.mark.parametrize("rewrites", [True, False])
def test_flex_attention_of_handles(rewrites: bool) -> None:
    """What a rewritten graph returned can be passed to flex_attention, in and out of kvpass."""
    _, past = compiled(step)(*qkv(20, 1), None, blocks(masks(0)["causal"], 20, 20))
    q = qkv(3, 2)[0]
    read = compiled(only_reads) if rewrites else torch.compile(only_reads, backend="eager")
    got = read(q, past)
    _, dense = exact(step, *qkv(20, 1), None, None)
    torch.testing.assert_close(
        got.double(),
        torch.nn.functional.scaled_dot_product_attention(q.double(), *dense, enable_gqa=True),
        rtol=0.0,
        atol=5e-6,
    )


def static_step(
    q: Tensor, k: Tensor, v: Tensor, buffers: tuple[Tensor, Tensor], at: Tensor, block: BlockMask
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    keys, values = buffers
    keys.index_copy_(2, at, k)
    values.index_copy_(2, at, v)
    return flex_attention(q, keys, values, block_mask=block, enable_gqa=True), buffers


@pytest.mark.parametrize("window", [0, 12])
def test_static_buffers(counted: Counted, window: int) -> None:
    """Their mask function gets the position of the first query in a tensor."""
    run, reports = compiled(static_step), []
    buffers = tuple(torch.zeros(BATCH, KV, 64, DIM) for _ in range(2))
    dense = tuple(torch.zeros(BATCH, KV, 64, DIM, dtype=torch.float64) for _ in range(2))
    past = 0
    with observed(reports.append):
        for seed, tokens in enumerate(CALLS):
            start = torch.tensor(past)

            def mask(b: Any, h: Any, i: Any, j: Any, start: Tensor = start) -> Tensor:
                seen = i + start >= j
                return seen & (i + start - j < window) if window else seen

            block = blocks(mask, tokens, 64)
            at = torch.arange(past, past + tokens)
            args = qkv(tokens, seed)
            got, _ = run(*args, buffers, at, block)
            wanted, _ = exact(static_step, *args, dense, at, block)
            torch.testing.assert_close(got.double(), wanted, rtol=0.0, atol=5e-6)
            past += tokens
    sites = [site for report in reports for site in report.sites]
    assert [site.reason for site in sites if not site.rewritten] == []
    assert {site.form for site in sites} == {"static"}
    assert (counted.runs, counted.plain) == (len(CALLS), 0)


class Config:
    num_hidden_layers = 2


def two_layers(x: tuple[Tensor, ...], cache: Any, block: BlockMask) -> Tensor:
    q, k, v = x
    for layer in range(2):
        keys, values = cache.update(k, v, layer)
        q = flex_attention(q, keys, values, block_mask=block, enable_gqa=True) + 0.1
        k = k + 0.1
    return q


class Dense:
    """A cache of dense tensors."""

    def __init__(self) -> None:
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}

    def update(self, k: Tensor, v: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        self.layers[layer] = grow(k, v, self.layers.get(layer))
        return self.layers[layer]


def test_tiered_cache_with_a_wrong_call_in_between(counted: Counted) -> None:
    run = compiled(two_layers)
    cache, dense = kvpass.TieredCache(Config(), 128, **OPTIONS), Dense()
    past = 0
    for seed, tokens in enumerate((40, 1, 1, 1, 1)):
        block = tables("hidden" if seed == 3 else "as they are", tokens, past + tokens, past)
        args = qkv(tokens, seed)
        got = run(args, cache, block)
        wanted, _ = exact(lambda *a: (two_layers(a[:3], dense, a[4]), None), *args, None, block)
        torch.testing.assert_close(got.double(), wanted, rtol=0.0, atol=5e-6)
        past += tokens
    assert counted.runs == 5
    assert counted.plain == 1
    assert cache.get_seq_length() == past


def test_padded_prompts_of_transformers(counted: Counted) -> None:
    """A window and padding; transformers makes the BlockMask outside of the graph it is used in."""
    pytest.importorskip("transformers")
    from transformers import DynamicCache

    from tests.models import prompt, tiny

    model = tiny("mistral", "flex_attention", sliding_window=8)
    ids, padding = prompt(2, 10, padding=3)
    reports: list[GraphReport] = []

    def decode(run: Any) -> list[Tensor]:
        cache, tokens, mask, found = DynamicCache(config=model.config), ids, padding, []
        for _ in range(5):
            logits = run(tokens, attention_mask=mask, past_key_values=cache).logits[:, -1]
            tokens = logits.argmax(-1)[:, None]
            mask = torch.cat((mask, torch.ones_like(tokens)), 1)
            found.append(logits.clone())
        return found

    with torch.compiler.set_stance("force_eager"):
        wanted = decode(model)
    with observed(reports.append):
        got = decode(compiled(model))
    for ours, theirs in zip(got, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0.0, atol=5e-5)
    sites = [site for report in reports for site in report.sites]
    assert [site.reason for site in sites if not site.rewritten] == []
    assert {"causal in a window of 8 and padding"} == {site.mask for site in sites}
    assert counted.runs == 5
    assert counted.plain == 0


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.int64])
def test_differences_that_wrap(dtype: torch.dtype) -> None:
    """Of captured numbers a difference is compared as it is, wrapped or not."""
    scale = {torch.int8: 1, torch.int32: 2**24, torch.int64: 2**56}[dtype]
    table = torch.tensor([100, -100, 50, -80, 90, 3, -128, 127, 5, -5]).to(dtype) * scale
    _same_as_uncompiled(lambda b, h, i, j: (table[i] - table[j] < 10 * scale) | (i == j))


def test_a_window_of_any_number() -> None:
    wide = torch.tensor(2**63 - 1)
    _same_as_uncompiled(lambda b, h, i, j: (i >= j) & (i - j < wide))
    _same_as_uncompiled(lambda b, h, i, j: (i >= j) & (i - j <= 2**63 - 1))


def _same_as_uncompiled(mask_mod: Any) -> None:
    def step(q: Tensor, pk: Tensor, pv: Tensor, mask: Any) -> tuple[Tensor, ...]:
        keys, values = torch.cat((pk, q * 2), 2), torch.cat((pv, q + 1), 2)
        return flex_attention(q, keys, values, block_mask=mask), keys, values

    torch._dynamo.reset()
    mask = create_block_mask(mask_mod, None, None, 9, 9, device="cpu", BLOCK_SIZE=16)
    compiled = torch.compile(step, backend=kvpass.backend, options={"inner": "eager"})
    q, past = torch.randn(1, 2, 9, 16), torch.zeros(1, 2, 0, 16)
    with torch.no_grad():
        torch.testing.assert_close(compiled(q, past, past, mask)[0], step(q, past, past, mask)[0])
