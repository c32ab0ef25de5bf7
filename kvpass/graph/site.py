# SPDX-License-Identifier: Apache-2.0
"""The records a match produces: what an attention site computes, or why it is left alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from torch import fx

from kvpass.graph.entry import EntryValues
from kvpass.graph.latent import Latent
from kvpass.graph.pointwise import MaskTerm
from kvpass.graph.probe import Probe
from kvpass.graph.sizes import Size, same
from kvpass.graph.tables import TableCheck
from kvpass.graph.walk import shape_of

CacheForm = Literal["tiered", "functional", "read", "static", "none"]


def tokens_axis(tokens_first: bool) -> int:
    """The axis of tokens: 1 of ``[B, tokens, H, D]``, 2 of ``[B, H, tokens, D]``."""
    return 1 if tokens_first else 2


@dataclass(frozen=True)
class CacheSource:
    """Where the keys and values of a site come from.

    ``tiered``: ``update`` is the ``kvpass.cache_update`` node traced from ``TieredCache.update``.
    In a read of a TieredCache, as of cross attention, nothing is new: ``k_new`` is None.
    ``functional``: ``keys = cat(past, new)``; ``past_k``/``past_v`` are placeholders, or None when
    the past is an empty tensor made in the graph (first prefill). The graph returns ``stored_k``
    and ``stored_v``: the keys and values themselves, or with ``keep`` their last ``keep`` tokens.
    ``read``: keys and values are the inputs ``past_k`` and ``past_v``, handles of an earlier graph.
    ``static``: the graph writes the new tokens to the buffers ``past_k`` and ``past_v`` of
    ``capacity`` tokens, by ``writes`` of the kind ``write`` (:mod:`kvpass.graph.static`), the first
    of them at ``position`` (None: behind those of a full buffer). Buffers that the graph makes
    itself are ``stored_k`` and ``stored_v``. With ``keep`` they hold the last tokens only.
    ``none``: no cache; the site is left to the inner compiler.

    With ``tokens_first`` keys, values, new and stored ones are ``[B, tokens, Hkv, D]``. ``assumed``
    are pairs of sizes that the runtime must find equal before it runs the graph; ``probe`` finds
    whether the numbers of a mask let it.
    """

    form: CacheForm
    keys: fx.Node
    values: fx.Node
    k_new: fx.Node | None = None
    v_new: fx.Node | None = None
    past_k: fx.Node | None = None
    past_v: fx.Node | None = None
    update: fx.Node | None = None
    stored_k: fx.Node | None = None
    stored_v: fx.Node | None = None
    keep: int = 0
    write: Literal["", "at", "tail", "roll"] = ""
    writes: tuple[fx.Node, ...] = ()
    position: Size | None = None
    capacity: Size = 0
    tokens_first: bool = False
    probe: Probe | None = None
    assumed: tuple[tuple[Size, Size], ...] = ()

    @property
    def fills_buffer(self) -> bool:
        """Whether the keys are a whole buffer of which only the first tokens are filled."""
        return self.write == "at" and same(self.shapes[0][2], self.capacity)

    @property
    def shapes(self) -> tuple[tuple[Size, ...], tuple[Size, ...]]:
        """Shapes of keys and values, ``[B, Hkv, tokens, D]``."""
        found = [shape_of(node) or () for node in (self.keys, self.values)]
        if self.tokens_first:
            found = [(s[0], s[2], s[1], *s[3:]) for s in found]
        return found[0], found[1]


@dataclass(frozen=True)
class MaskSpec:
    """What the mask of a site means.

    ``causal``: query i sees key positions <= past + i, proven from the graph (lower-right aligned).
    ``kv_mask``: node of a bool tensor [B, >= keys], True = may be seen (padding); or None. Its
    column ``kv_offset`` stands for the first key: 0 unless the cache keeps a window of tokens.
    ``window``: with ``causal``, the query at position p sees keys j > p - window only; 0: all.
    ``chunk``: with ``causal``, it sees keys with j // chunk == p // chunk only, where ``kv_offset``
    is the position of the first key; 0: all.
    ``terms``: masks and biases that are not read, in the order in which they are applied; each
    broadcasts to [B, Hq, n, keys], or is [B * Hq, 1|n, 1|keys]. Parts are combined by logical and /
    addition. ``past``: where a causal mask takes the queries to begin. ``assumed``: pairs of sizes
    that the runtime must find equal.
    """

    causal: bool = False
    window: int = 0
    chunk: int = 0
    kv_mask: fx.Node | None = None
    kv_offset: Size = 0
    terms: tuple[MaskTerm, ...] = ()
    past: Size | None = None
    assumed: tuple[tuple[Size, Size], ...] = ()

    @property
    def operand(self) -> fx.Node | None:
        """The node of the only term that is not read; None if there is none, or several."""
        return self.terms[0].node if len(self.terms) == 1 else None

    def describe(self) -> str:
        """The mask in words."""
        parts = []
        if self.causal:
            inside = f" in a window of {self.window}" if self.window else ""
            parts.append("causal" + (f" in chunks of {self.chunk}" if self.chunk else inside))
        if self.kv_mask is not None:
            parts.append("padding")
        parts.extend(f"operand {term.node.name}" for term in self.terms)
        return " and ".join(parts) or "none"


@dataclass(frozen=True)
class AttentionSite:
    """One attention of the graph: ``out = softmax(softcap(scale * q k^T) + mask) v``.

    ``anchor`` is the SDPA or softmax node, ``output`` the node whose value is [B, Hq, n, Dv] (or
    [B * Hq, n, Dv]) and is replaced, ``query`` the node [B, Hq, n, Dk] before any scaling that
    ``scale`` carries. ``factors`` are scales known at run time only, ``softcap`` 0 for none,
    ``sinks`` extra logits [Hq] of the softmax without values. ``query_first`` and ``output_first``:
    the query, and the output, are [B, n, Hq, D].
    ``interior`` are the nodes between the source and the output, which must have no other users.
    With ``latent`` the source holds latents and rotary keys, of which keys and values are made.
    ``tables`` is what must hold of flex_attention's block tables in a call.
    """

    anchor: fx.Node
    output: fx.Node
    query: fx.Node
    scale: float
    mask: MaskSpec
    source: CacheSource
    module: str
    interior: tuple[fx.Node, ...] = ()
    softcap: float = 0.0
    factors: tuple[fx.Node, ...] = ()
    sinks: fx.Node | None = None
    query_first: bool = False
    output_first: bool = False
    tables: TableCheck | None = None
    latent: Latent | None = None

    @property
    def form(self) -> str:
        """The cache form in words."""
        return f"{self.source.form} latents" if self.latent else self.source.form


@dataclass(frozen=True)
class Refusal:
    """An attention that is left exactly as it was, and the reason in words a user can act on."""

    anchor: fx.Node
    module: str
    reason: str
    form: CacheForm | None = None


@dataclass
class FindResult:
    """All attentions of one graph in program order; ``entry``: what integer inputs hold."""

    entry: EntryValues
    sites: list[AttentionSite] = field(default_factory=list)
    refusals: list[Refusal] = field(default_factory=list)
