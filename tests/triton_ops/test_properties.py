# SPDX-License-Identifier: Apache-2.0
"""Random shapes, lengths, dtypes, masks, splits, windows, caps and sinks against the reference."""

from __future__ import annotations

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import triton_ops
from tests.triton_ops.paged import check_decode, check_extend, close, decode, lse_close, ragged
from triton_ops.reference import place_rows

GROUPS = [(1, 1), (2, 1), (4, 2), (12, 2), (28, 4), (14, 2), (7, 1), (40, 8), (5, 5)]
DIMS = [16, 24, 33, 40, 64, 80, 96]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# zero, one, and both sides of every page and block edge
EDGES = [0, 1, 31, 32, 33, 63, 64, 65, 96, 127, 128, 129]
QUICK = settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow])


@st.composite
def problems(draw: st.DrawFn) -> dict[str, object]:
    """Arguments of one problem."""
    lengths = draw(st.lists(st.one_of(st.sampled_from(EDGES), st.integers(0, 200)), min_size=1,
                            max_size=3))  # fmt: skip
    return {
        "heads": draw(st.sampled_from(GROUPS)),
        "dims": (draw(st.sampled_from(DIMS)), draw(st.sampled_from(DIMS))),
        "lengths": lengths,
        "dtype": draw(st.sampled_from(DTYPES)),
        "block_size": draw(st.sampled_from([32, 64, 96, 128])),
        "splits": draw(st.sampled_from([1, 2, 5])),
        "mask": draw(st.booleans()),
        "bias": draw(st.sampled_from(["none", "float", "bool", "shared"])),
        "softcap": draw(st.sampled_from([0.0, 0.7, 30.0])),
        "window": draw(st.one_of(st.just(0), st.sampled_from(EDGES[1:]), st.integers(1, 300))),
        "sinks": draw(st.sampled_from([None, *DTYPES])),
        "seed": draw(st.integers(0, 2**31)),
    }


def operands(p: dict, batch: int, heads: int, n: int, total: int) -> dict[str, object]:
    """The mask, bias, softcap, window and sinks of a problem."""
    kwargs: dict[str, object] = {"softcap": p["softcap"], "window": p["window"]}
    if p["sinks"]:
        kwargs["sinks"] = (torch.randn(heads) * 3).to(p["sinks"])
    if p["mask"]:
        kwargs["kv_mask"] = torch.rand(batch, total + 3) > 0.3
    if p["bias"] != "none":
        kwargs["bias"] = torch.randn(batch, heads, n, total)
        if p["bias"] == "bool":
            kwargs["bias"] = kwargs["bias"] > -0.5
        elif p["bias"] == "shared":
            kwargs["bias"] = kwargs["bias"][:1, :1].to(p["dtype"])
    return kwargs


@QUICK
@given(problems())
def test_decode(p: dict) -> None:
    torch.manual_seed(p["seed"])
    (heads, kv_heads), (dk, dv) = p["heads"], p["dims"]
    keys = ragged(p["lengths"], kv_heads, dk, p["dtype"])
    values = ragged(p["lengths"], kv_heads, dv, p["dtype"])
    batch = len(keys)
    q = torch.randn(batch, heads, 1, dk).to(p["dtype"])
    kwargs = operands(p, batch, heads, 1, max(*p["lengths"], 1))
    check_decode(q, keys, values, p["block_size"], dk**-0.5, splits=p["splits"], **kwargs)


@QUICK
@given(problems(), st.sampled_from([1, 2, 5, 17]), st.booleans())
def test_extend(p: dict, n: int, causal: bool) -> None:
    torch.manual_seed(p["seed"])
    (heads, kv_heads), (dk, dv) = p["heads"], p["dims"]
    lengths = p["lengths"][:2]
    keys = ragged(lengths, kv_heads, dk, p["dtype"])
    values = ragged(lengths, kv_heads, dv, p["dtype"])
    batch = len(keys)
    q, k, v = (
        torch.randn(batch, h, n, d).to(p["dtype"])
        for h, d in ((heads, dk), (kv_heads, dk), (kv_heads, dv))
    )
    kwargs = operands(p, batch, heads, n, max(lengths) + n)
    if not causal:
        kwargs["window"] = 0
    config = triton_ops.ExtendConfig(block_m=64, block_n=64, splits=1 if n > 5 else p["splits"])
    check_extend(q, k, v, keys, values, p["block_size"], dk**-0.5, causal, config=config, **kwargs)


@QUICK
@given(problems(), st.integers(1, 300), st.integers(1, 4))
def test_a_longer_window_is_a_shorter_one_and_the_rest(p: dict, window: int, splits: int) -> None:
    """Keys in a window and the earlier ones merge to all: none is lost, none counted twice."""
    torch.manual_seed(p["seed"])
    keys, values = ragged(p["lengths"][:1], 1, 16), ragged(p["lengths"][:1], 1, 16)
    tables = place_rows(keys, values, p["block_size"], "cpu")
    q = torch.randn(1, 2, 1, 16)
    length = p["lengths"][0]
    whole, whole_lse = decode(q, tables, 1, 16, p["block_size"], 0.3, splits=splits)
    near = decode(q, tables, 1, 16, p["block_size"], 0.3, splits=splits, window=window)
    old = torch.arange(length + 1)[None] < length - window
    far = decode(q, tables, 1, 16, p["block_size"], 0.3, splits=splits, kv_mask=old)
    out, lse = triton_ops.merge(
        torch.stack([near[0][:, :, 0], far[0][:, :, 0]]),
        torch.stack([near[1][:, :, 0], far[1][:, :, 0]]),
    )
    close(out, whole[:, :, 0], torch.float32)
    lse_close(lse, whole_lse[:, :, 0])
