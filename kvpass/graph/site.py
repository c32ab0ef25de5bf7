# SPDX-License-Identifier: Apache-2.0
"""The records a match produces: what an attention site computes, or why it is left alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from torch import fx

CacheForm = Literal["tiered", "functional", "none"]


@dataclass(frozen=True)
class CacheSource:
    """Where the keys and values of a site come from.

    ``tiered``: ``update`` is the ``kvpass.cache_update`` node traced from ``TieredCache.update``.
    ``functional``: ``keys = cat(past, new)``; ``past_k``/``past_v`` are placeholders, or None when
    the past is an empty tensor made in the graph (first prefill).
    ``none``: no cache; the site is left to the inner compiler.
    """

    form: CacheForm
    keys: fx.Node
    values: fx.Node
    k_new: fx.Node | None = None
    v_new: fx.Node | None = None
    past_k: fx.Node | None = None
    past_v: fx.Node | None = None
    update: fx.Node | None = None


@dataclass(frozen=True)
class MaskSpec:
    """What the mask of a site means.

    ``causal``: query i sees key positions <= past + i, proven from the graph (lower-right aligned).
    ``kv_mask``: node of a bool tensor [B, >= keys], True = may be seen (padding); or None.
    ``operand``: node of an opaque mask or bias, broadcastable to [B, Hq, n, keys], bool (True =
    visible) or float (added to the scores); or None. Parts are combined by logical and / addition.
    """

    causal: bool = False
    kv_mask: fx.Node | None = None
    operand: fx.Node | None = None

    def describe(self) -> str:
        """The mask in words."""
        parts = []
        if self.causal:
            parts.append("causal")
        if self.kv_mask is not None:
            parts.append("padding")
        if self.operand is not None:
            parts.append(f"operand {self.operand.name}")
        return " and ".join(parts) or "none"


@dataclass(frozen=True)
class AttentionSite:
    """One attention of the graph: ``out = softmax(scale * q k^T + mask) v``.

    ``anchor`` is the SDPA or softmax node, ``output`` the node whose value is [B, Hq, n, Dv] and is
    replaced, ``query`` the node [B, Hq, n, Dk] before any scaling that ``scale`` carries.
    ``interior`` are the nodes between the source and the output, which must have no other users.
    """

    anchor: fx.Node
    output: fx.Node
    query: fx.Node
    scale: float
    mask: MaskSpec
    source: CacheSource
    module: str
    interior: tuple[fx.Node, ...] = ()


@dataclass(frozen=True)
class Refusal:
    """An attention that is left exactly as it was, and the reason in words a user can act on."""

    anchor: fx.Node
    module: str
    reason: str
    form: CacheForm | None = None


@dataclass
class FindResult:
    """All attentions of one graph in program order."""

    sites: list[AttentionSite] = field(default_factory=list)
    refusals: list[Refusal] = field(default_factory=list)
