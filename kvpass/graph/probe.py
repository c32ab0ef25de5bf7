# SPDX-License-Identifier: Apache-2.0
"""Masks over static buffers that are not read: what must hold of their numbers, found before a run.

The attention of the model reads a whole buffer, the rewritten one its filled part only. That is the
same if the mask hides the rest, and leaves no row without a key. Of a buffer that keeps the last
tokens, all must be seen. Whether that holds is not in the graph but in the numbers, so that the
part of the graph that makes the mask is run by itself first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from kvpass.graph.pointwise import MaskTerm
from kvpass.graph.walk import is_written, mutates

_LARGEST = 64
"""Nodes of a mask; a larger one is no index arithmetic, and would cost too much to run twice."""


@dataclass(eq=False)
class Probe:
    """One mask of a graph.

    Attributes:
        graph: makes the mask's terms from the inputs of the whole graph.
        terms: what each output is.
        all_seen: whether the mask must hide nothing.
        ends: tokens in the buffer after the call, of each site with this mask.
        run: the graph, compiled; set by the backend.
    """

    graph: fx.Graph
    terms: tuple[MaskTerm, ...]
    all_seen: bool = False
    ends: list[tuple[Any, Any]] = field(default_factory=list)
    run: Callable[..., Any] | None = None

    def holds(self, args: Sequence[Any], end: int) -> bool:
        """Whether keys from ``end`` on are hidden, and every query sees a key before it.

        Or, if all must be seen, whether no key is hidden.
        """
        assert self.run is not None
        masks: Sequence[Tensor] = self.run(*args)
        hidden = [_hidden(term, mask) for term, mask in zip(self.terms, masks, strict=True)]
        beyond, finite = hidden[0][0], all(lowest for _, lowest in hidden)
        for more, _ in hidden[1:]:
            beyond = beyond | more
        if self.all_seen:
            return all(not bool(mask.any()) for mask, _ in hidden)
        if not bool(beyond[..., end:].all()):
            return False
        # Of a row that sees nothing, equal scores would make the mean of all values.
        return not finite or not bool(beyond[..., :end].all(-1).any())


def _hidden(term: MaskTerm, mask: Tensor) -> tuple[Tensor, bool]:
    """Where a term hides keys, and whether by a finite number."""
    if term.kind == "fill":
        return (mask if term.hidden_when else ~mask), term.value != -math.inf
    if mask.dtype == torch.bool:
        return ~mask, False
    return mask <= torch.finfo(mask.dtype).min, True


def probe_of(terms: tuple[MaskTerm, ...], all_seen: bool) -> Probe | str:
    """The part of a graph that makes masks, or why it cannot be run by itself."""
    needed: set[fx.Node] = set()
    stack = [term.node for term in terms]
    while stack:
        node = stack.pop()
        if node in needed:
            continue
        needed.add(node)
        stack.extend(node.all_input_nodes)
        if mutates(node) or is_written(node):
            return f"{node.name}, from which the mask is made, is written in the graph"
        if node.op not in ("placeholder", "get_attr") and (
            node.is_impure() or node.op not in ("call_function", "call_method")
        ):
            return f"{node.name}, from which the mask is made, has effects"
        if len(needed) > _LARGEST:
            return "the mask over the static buffer takes many operations to make"
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in terms[0].node.graph.nodes:
        if node.op == "placeholder" or node in needed:
            copies[node] = graph.node_copy(node, lambda old: copies[old])
    graph.output(tuple(copies[term.node] for term in terms))
    return Probe(graph, terms, all_seen)
