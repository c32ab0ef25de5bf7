# SPDX-License-Identifier: Apache-2.0
"""Random shapes, lengths, dtypes, masks and splits against the float64 reference."""

from __future__ import annotations

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import triton_ops
from tests.triton_ops.paged import check_decode, check_extend, ragged

GROUPS = [(1, 1), (2, 1), (4, 2), (12, 2), (28, 4), (14, 2), (7, 1), (40, 8), (5, 5)]
DIMS = [16, 24, 40, 64, 80, 96]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# zero, one, and both sides of every page and block edge
EDGES = [0, 1, 31, 32, 33, 63, 64, 65, 96, 127, 128, 129]
QUICK = settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow])


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
        "seed": draw(st.integers(0, 2**31)),
    }


def operands(p: dict, batch: int, heads: int, n: int, total: int) -> dict[str, object]:
    """The mask and bias of a problem."""
    kwargs: dict[str, object] = {}
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
    config = triton_ops.ExtendConfig(block_m=64, block_n=64, splits=1 if n > 5 else p["splits"])
    check_extend(q, k, v, keys, values, p["block_size"], dk**-0.5, causal, config=config, **kwargs)
