# SPDX-License-Identifier: Apache-2.0
"""Random attention modules, to run and to compare.

``Model`` runs the code that tests/graph/written.py writes for a specification. ``meaning`` computes
in fp64 what a specification without a foreign piece stands for, and shares no code with that.
"""

from __future__ import annotations

import linecache
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.graph.spec import Site, Spec
from tests.graph.written import source

LOWEST = torch.finfo(torch.float32).min


class Model(nn.Module):
    """Runs a specification. Its tables are buffers ``table0``, ``pad0``, ... by attention."""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self.text = source(spec)
        name = f"<{spec!r}>"
        linecache.cache[name] = (len(self.text), None, self.text.splitlines(True), name)
        scope = {"torch": torch, "F": F, "math": math}
        exec(compile(self.text, name, "exec"), scope)
        self.forward = scope["forward"].__get__(self)  # type: ignore[attr-defined]
        self.late = 0.5
        for number, site in enumerate(spec.sites):
            self._tables(spec, site, number)
        self.eval()

    def _tables(self, spec: Spec, site: Site, number: int) -> None:
        size, heads, dtype = spec.batch, site.heads, spec.torch_dtype
        total = site.stored + sum(spec.steps)
        generator = torch.Generator().manual_seed(spec.seed * 7 + number)

        def keep(name: str, value: Tensor) -> None:
            self.register_buffer(f"{name}{number}", value)

        def coins(*shape: int) -> Tensor:
            seen = torch.rand(*shape, generator=generator) < 0.6
            seen[..., 0] = True
            return seen

        if site.scale == "attribute":
            setattr(self, f"scale{number}", site.factor)
        biases = {
            "heads": (1, heads, total, total),
            "batch": (size, 1, total, total),
            "all": (size, heads, total, total),
            "keys": (size, 1, 1, total),
        }
        if site.bias in biases:
            keep("bias", torch.randn(*biases[site.bias], generator=generator).to(dtype))
        if site.bias.startswith("alibi"):
            keep("slopes", (torch.arange(1, heads + 1) / (4 * heads)).to(dtype))
        if site.padding == "holes":
            keep("pad", coins(size, total))
        elif site.padding:
            keep("pad", torch.arange(total) >= torch.arange(size)[:, None] % 3 * 2)
        shapes = {
            "arbitrary": (total, total),
            "arbitrary per head": (1, heads, total, total),
            "arbitrary per sequence": (size, 1, total, total),
        }
        table = torch.ones(total, total, dtype=torch.bool).tril()
        if site.visible in shapes:
            table = coins(*shapes[site.visible])
        if site.visible in shapes or site.spelling == "buffer":
            keep("table", table)
            keep("hidden", ~table)
        if site.sinks:
            keep("sinks", torch.randn(heads, generator=generator).to(dtype))


class PlainCache:
    """What a TieredCache does, by concatenation."""

    def __init__(self) -> None:
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}

    def update(self, k: Tensor, v: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Append keys and values; return all of them."""
        if layer in self.kept:
            past = self.kept[layer]
            k, v = torch.cat((past[0], k), 2), torch.cat((past[1], v), 2)
        self.kept[layer] = k, v
        return k, v


# ------------------------------------------------------------------ inputs and their meaning


def inputs(spec: Spec) -> tuple[list[Tensor], list[tuple[Tensor, Tensor] | None]]:
    """The input of each call, and the dense past of each attention that starts with one."""
    generator = torch.Generator().manual_seed(spec.seed)
    columns = sum(width for site in spec.sites for width in site.widths)
    dtype = spec.torch_dtype

    def normal(*shape: int) -> Tensor:
        return (0.7 * torch.randn(*shape, generator=generator)).to(dtype)

    xs = [normal(spec.batch, n, columns) for n in spec.steps]
    pasts: list[tuple[Tensor, Tensor] | None] = []
    for site in spec.sites:
        shape = (spec.batch, site.kv_heads, site.stored)
        pair = normal(*shape, site.head_dim_k), normal(*shape, site.head_dim_v)
        pasts.append(pair if site.start in ("dense", "zero") else None)
    return xs, pasts


def meaning(spec: Spec, model: Model, number: int) -> list[Tensor]:
    """fp64 outputs ``[B, n, Hq * Dv]`` of each call; NaN where a query sees nothing at all.

    Hidden keys of ``min`` lie so low that their scores do not matter: where a query sees no other,
    they share it evenly.
    """
    site = spec.sites[number]
    xs, pasts = inputs(spec)
    past = pasts[number]
    keys = [] if past is None else [past[0].double()]
    values = [] if past is None else [past[1].double()]

    def table(name: str) -> Tensor:
        found: Tensor = getattr(model, f"{name}{number}")
        return found

    scale = {"default": site.head_dim_k**-0.5, "int": 2.0, "none": 1.0}.get(site.scale, site.factor)
    start = sum(sum(other.widths) for other in spec.sites[:number])
    found = []
    for x in xs:
        pieces = x[..., start : start + sum(site.widths)].double().split(site.widths, -1)
        q, k, v = (
            piece.unflatten(-1, (heads, -1)).transpose(1, 2)
            for piece, heads in zip(pieces, (site.heads, site.kv_heads, site.kv_heads), strict=True)
        )
        keys.append(k)
        values.append(v)
        all_k, all_v = (
            torch.cat(parts, 2).repeat_interleave(site.group, dim=1) for parts in (keys, values)
        )
        n, total = q.shape[2], all_k.shape[2]
        scores = torch.einsum("bhid,bhjd->bhij", q, all_k) * scale
        if site.softcap:
            scores = site.softcap * torch.tanh(scores / site.softcap)
        i, j = torch.arange(total - n, total)[:, None], torch.arange(total)[None, :]
        seen = torch.ones(n, total, dtype=torch.bool)
        if site.visible in ("causal", "window"):
            seen = (j <= i) & (j > i - (site.window or total))
        elif site.visible != "none":
            seen = table("table")[..., i, j]
        if site.padding:
            seen = seen & table("pad")[:, None, None, :total]
        if site.bias:
            if site.bias.startswith("alibi"):
                bias = table("slopes").view(-1, 1, 1) * (j if "keys" in site.bias else j - i)
            else:
                bias = table("bias")[..., 0 if site.bias == "keys" else i, j]
            share = 0.5 if site.product == "baddbmm" else 1.0
            scores = scores + bias.double() * share * (scale if site.mask_first else 1.0)
        low = LOWEST if site.hidden == "min" and site.apply != "bool" else -math.inf
        scores = scores.masked_fill(~seen, low)
        if site.sinks:
            sinks = table("sinks").double().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
            scores = torch.cat([scores, sinks], -1)
        weights = scores.softmax(-1)[..., :total]
        if low == -math.inf:
            weights = weights.masked_fill(~seen.any(-1, keepdim=True), math.nan)
        found.append((weights @ all_v).transpose(1, 2).flatten(2))
    return found
