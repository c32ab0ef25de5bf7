# SPDX-License-Identifier: Apache-2.0
"""How a rewritten graph is called: what the pass leaves for the runtime."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from kvpass.graph.probe import Probe
from kvpass.graph.tables import TableCheck

DECODE_TOKENS = 16
"""New tokens of a call that counts as a decode step: prompts do not come again."""


@dataclass(frozen=True)
class LayerShape:
    """Shapes of one rewritten site; sizes may be symbolic expressions.

    ``past`` and ``mask`` are lengths that the graph assumes, checked against the cache at every
    call: tokens stored (TieredCache only), and columns of the padding mask. ``keep``: tokens of a
    functional cache that are passed on, 0 for all. ``mask_offset``: column of the padding mask, and
    position, that the graph takes for the first of them. ``absolute``: an operand counts keys from
    the first token of the sequence. ``tokens_first``: the graph has keys and values as
    ``[B, tokens, Hkv, D]``.
    """

    batch: Any
    tokens: Any
    kv_heads: int
    head_dim_k: int
    head_dim_v: int
    dtype: torch.dtype
    device: torch.device
    past: Any = None
    mask: Any = None
    mask_offset: Any = None
    keep: int = 0
    absolute: bool = False
    tokens_first: bool = False


@dataclass(frozen=True)
class BufferUse:
    """How a site with static buffers uses them; see :mod:`kvpass.graph.static`.

    Attributes:
        write: kind of the write: ``at``, ``roll`` or ``tail``.
        position: of the first new token; None: behind those of a full buffer.
        capacity: tokens of a buffer.
        tokens_first: whether buffers are ``[B, tokens, Hkv, D]``.
        sizes: shapes of the two buffers.
    """

    write: str
    position: Any
    capacity: Any
    tokens_first: bool
    sizes: tuple[tuple[Any, ...], tuple[Any, ...]]


@dataclass
class TieredGroup:
    """The sites of one TieredCache in a graph.

    Attributes:
        handle: index of its handle among the graph's inputs.
        block_size: tokens of a block.
        layers: layer index to shape; all on one device.
    """

    handle: int
    block_size: int
    layers: dict[int, LayerShape] = field(default_factory=dict)


@dataclass(frozen=True)
class FunctionalSite:
    """One site whose cache is passed in and returned.

    Attributes:
        past_k, past_v: indices of the past among the graph's inputs, or None at first prefill.
            With no new tokens, keys and values are read only.
        out_k, out_v: positions of the new cache among the graph's outputs.
    """

    past_k: int | None
    past_v: int | None
    out_k: tuple[int, ...]
    out_v: tuple[int, ...]
    shape: LayerShape
    buffer: BufferUse | None = None


@dataclass
class Plan:
    """How to call a rewritten graph.

    Attributes:
        inputs: for each input of the new graph: index of an old input, or the number of the rows
            tensor (tiered groups first, then the functional group) as ``-1 - number``.
        tiered: TieredCache groups; the sites of a group have the same batch and new tokens.
        functional: groups of functional sites, in program order; a group shares one batch.
        extra: outputs at the end that only keep effects alive; the caller drops them.
        symbols: symbol to (input index, dimension) it can be read from; instead of a dimension,
            None for a number, "value" or "positions" for a tensor (:mod:`kvpass.graph.entry`).
        assumed: pairs of sizes that must be equal.
        probes: what must be found of the numbers of masks.
        tables: what must hold of block tables.
        grows: input index of an integer tensor to what the graph adds to it in place.
        dense: input indices of buffers that the graph still writes to, so that they need memory.
        rewritten: number of sites.
        gone: for each site, in the order given, the tensors that are no longer made.
        family: of the model, whose options hold for functional sites.
    """

    inputs: list[int] = field(default_factory=list)
    tiered: list[TieredGroup] = field(default_factory=list)
    functional: list[list[FunctionalSite]] = field(default_factory=list)
    extra: int = 0
    symbols: dict[Any, tuple[int, int | str | None]] = field(default_factory=dict)
    assumed: list[tuple[Any, Any]] = field(default_factory=list)
    probes: list[Probe] = field(default_factory=list)
    tables: list[TableCheck] = field(default_factory=list)
    grows: dict[int, Any] = field(default_factory=dict)
    dense: list[int] = field(default_factory=list)
    rewritten: int = 0
    gone: list[tuple[str, ...]] = field(default_factory=list)
    family: str = "default"

    @property
    def shapes(self) -> list[LayerShape]:
        """Of all sites."""
        tiered = [shape for group in self.tiered for shape in group.layers.values()]
        return tiered + [site.shape for sites in self.functional for site in sites]

    @property
    def is_decode(self) -> bool:
        """Whether a call appends few tokens, so that calls of the same shape follow."""
        return all(
            isinstance(shape.tokens, int) and shape.tokens <= DECODE_TOKENS for shape in self.shapes
        )

    @property
    def begins(self) -> bool:
        """Whether no call finds anything stored: a prompt, of which the next token is another."""
        tiered = [shape.past for group in self.tiered for shape in group.layers.values()]
        passed = [site.past_k for sites in self.functional for site in sites]
        return all(past == 0 for past in tiered) and all(past is None for past in passed)

    @property
    def batch_symbols(self) -> set[Any]:
        """Symbols of the number of sequences."""
        symbolic = [shape.batch for shape in self.shapes if not isinstance(shape.batch, int)]
        return set().union(*(batch.free_symbols for batch in symbolic))
