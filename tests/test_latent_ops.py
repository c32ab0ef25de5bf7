# SPDX-License-Identifier: Apache-2.0
"""Attention over cached latents on a CPU, absorbed and expanded, against plain attention."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kvpass.latent_ops  # noqa: F401  # defines the op
from kvpass import cpu_latent
from kvpass.errors import ShapeError
from tests.runtime.harness import BLOCK, Driver
from tests.test_ops import DTYPES, TOLERANCE, plain_attention


class Latents:
    """A layer of latents and rotary keys, and the weights that make keys and values of them."""

    def __init__(
        self,
        heads=4,
        latent=32,
        rotary=16,
        nope=16,
        values=24,
        dtype=torch.float32,
        **tiers,
    ):
        tiers = {"hot": "64KiB", "size": 2} | tiers
        self.driver = Driver(layers=1, heads=1, width=latent, width_v=rotary, dtype=dtype, **tiers)
        self.sizes = heads, latent, rotary, nope, values
        scale = latent**-0.5
        self.key_weight = (torch.randn(heads, nope, latent) * scale).to(dtype)
        self.value_weight = (torch.randn(heads, values, latent) * scale).to(dtype)

    def query(self, tokens):
        heads, _, rotary, nope, _ = self.sizes
        return self.driver.random(tokens, heads, nope + rotary)

    def new(self, tokens):
        _, latent, rotary, *_ = self.sizes
        return self.driver.random(tokens, 1, latent), self.driver.random(tokens, 1, rotary)

    def step(self, q, c, r, *, scale=0.3, causal=True, kv_mask=None, bias=None, **features):
        """The op, after c and r were appended."""
        driver = self.driver
        with driver.manager.step(driver.batch, c.shape[2], [0]) as rows:
            token = torch.ops.kvpass.append(c, r, rows, 0, BLOCK)
            out = torch.ops.kvpass.attend_latent(
                q, self.key_weight, self.value_weight, c, r, token, rows, 0, BLOCK, scale, causal,
                kv_mask, bias, **features,
            )  # fmt: skip
        old_c, old_r = driver.dense[0]
        driver.dense[0] = torch.cat([old_c, c], 2), torch.cat([old_r, r], 2)
        return out

    def expected(self, q, **options):
        """In float64, over keys and values of all heads."""
        heads = self.sizes[0]
        c, r = (x.double() for x in self.driver.dense[0])
        keys = torch.cat(
            (c @ self.key_weight.double().transpose(1, 2), r.expand(-1, heads, -1, -1)), -1
        )
        return plain_attention(q, keys, c @ self.value_weight.double().transpose(1, 2), **options)


def close(out, expected):
    assert torch.isfinite(out).all()
    assert (out.double() - expected).abs().max() <= TOLERANCE[out.dtype] * 2


@pytest.mark.parametrize("dtype", DTYPES)
@given(
    heads=st.sampled_from([1, 3, 4]),
    widths=st.sampled_from(
        [(32, 16, 16, 24), (48, 20, 33, 16), (96, 32, 16, 16), (16, 16, 40, 40)]
    ),
    past=st.sampled_from([0, 1, 31, 32, 33, 70]),
    tokens=st.sampled_from([1, 2, 33, 40]),
    mask=st.sampled_from(["none", "padding", "bool", "float", "row", "full"]),
    window=st.sampled_from([0, 1, BLOCK, 50, 1000]),
    softcap=st.sampled_from([0.0, 0.8]),
    seed=st.integers(0, 2**31),
)
def test_attend_latent(dtype, heads, widths, past, tokens, mask, window, softcap, seed):
    torch.manual_seed(seed)
    layer = Latents(heads, *widths, dtype=dtype)
    if past:
        layer.step(layer.query(past), *layer.new(past))
    total = past + tokens
    options = {"window": window, "softcap": softcap}
    if mask == "padding":
        options["kv_mask"] = torch.rand(2, total + 3) > 0.3
        options["kv_mask"][:, -1] = True
    elif mask == "full":
        options["kv_mask"] = torch.zeros(2, total, dtype=torch.bool)
    elif mask == "bool":
        options["bias"] = torch.rand(2, 1, tokens, total) > 0.3
    elif mask == "float":
        options["bias"] = torch.randn(1, heads, tokens, total)
    elif mask == "row":
        options["bias"] = torch.zeros(1, 1, tokens, total)
        options["bias"][:, :, 0] = -math.inf
    q = layer.query(tokens)
    out = layer.step(q, *layer.new(tokens), **options)
    assert out.dtype == dtype
    assert out.shape == (2, heads, tokens, widths[3])
    close(out, layer.expected(q, **options))


@pytest.mark.parametrize("tokens", [2, 40])
@pytest.mark.parametrize("absorbed", [True, False])
def test_both_forms_give_the_same(monkeypatch, tokens, absorbed):
    monkeypatch.setattr(cpu_latent, "absorbs", lambda *sizes: absorbed)
    layer = Latents()
    layer.step(layer.query(70), *layer.new(70))
    q = layer.query(tokens)
    close(layer.step(q, *layer.new(tokens)), layer.expected(q))


def test_the_form_with_fewer_products_is_chosen():
    deepseek = {"latent": 512, "rotary": 64, "keys": 128, "values": 128}
    assert cpu_latent.absorbs(1, **deepseek)
    assert cpu_latent.absorbs(170, **deepseek)
    assert not cpu_latent.absorbs(171, **deepseek)  # 131072 / (1088 - 320) = 170.7
    assert cpu_latent.absorbs(10**6, latent=32, rotary=16, keys=128, values=128)


@pytest.mark.parametrize("tokens", [1, 3, 60])
def test_placement_changes_no_bit(tokens):
    outputs = []
    for hot in ("1MiB", "16KiB"):
        torch.manual_seed(0)
        layer = Latents(hot=hot)
        layer.step(layer.query(300), *layer.new(300))
        outputs.append(layer.step(layer.query(tokens), *layer.new(tokens)))
    snapshot = layer.driver.manager.snapshot()
    assert snapshot.cold_only_bytes > 0
    assert torch.equal(*outputs)


def test_a_step_counts_accesses():
    """A block whose latents draw most of the softmax is hot, one that draws none is not."""
    layer = Latents(heads=2, size=1)
    c, r = layer.new(3 * BLOCK)
    c[:, :, :BLOCK] = 0
    layer.step(layer.query(3 * BLOCK), c, r)
    layer.driver.batch.heat.zero_()
    q = torch.zeros(1, 2, 1, 32)
    q[..., :16] = 30 * (layer.key_weight @ c[0, 0, BLOCK + 3]).unsqueeze(1)
    layer.step(q, *(x * 0 for x in layer.new(1)))
    heat = layer.driver.batch.heat[0, 0].tolist()
    assert heat[1] == 1
    assert heat[0] == 0


def test_autocast_does_not_round():
    layer = Latents()
    layer.step(layer.query(40), *layer.new(40))
    q = layer.query(3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = layer.step(q, *layer.new(3))
    assert out.dtype == torch.float32
    close(out, layer.expected(q))


def test_empty_batch():
    layer = Latents(size=0)
    assert layer.step(layer.query(3), *layer.new(3)).shape == (0, 4, 3, 24)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"q": (2, 4, 3, 33)}, "do not fit together"),
        ({"q": (2, 5, 3, 32)}, "do not fit together"),
        ({"c": (2, 2, 3, 32)}, "are not those of 2 sequences"),
        ({"c": (2, 1, 3, 31)}, "are not those of 2 sequences"),
        ({"q": (2, 4, 2, 32)}, "as many new tokens as queries"),
        ({"window": 4, "causal": False}, "needs causal"),
        ({"softcap": -1.0}, "softcap"),
    ],
)
def test_arguments_that_do_not_fit(change, words):
    layer = Latents()
    q, (c, r) = layer.query(3), layer.new(3)
    q = torch.randn(change.pop("q")) if "q" in change else q
    new = torch.randn(change.pop("c")) if "c" in change else c
    with layer.driver.manager.step(layer.driver.batch, 3, [0]) as rows:
        token = torch.ops.kvpass.append(c, r, rows, 0, BLOCK)
        causal = change.pop("causal", True)
        with pytest.raises(ShapeError, match=words):
            torch.ops.kvpass.attend_latent(
                q, layer.key_weight, layer.value_weight, new, r, token, rows, 0, BLOCK, 0.3,
                causal, None, None, **change,
            )  # fmt: skip


def test_gradients_are_refused():
    layer = Latents()
    q = layer.query(3).requires_grad_()
    out = layer.step(q, *layer.new(3))
    with pytest.raises(RuntimeError, match="gradients cannot flow"):
        out.sum().backward()
