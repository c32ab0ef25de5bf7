# SPDX-License-Identifier: Apache-2.0
"""Rewrite matched sites to the cached ops; the third step, after match and legality.

Sites of the form ``tiered`` and ``functional`` lose their keys and values: ``append`` stores the
new ones, ``attend`` reads all of them through the table rows that the caller passes in. What only
served the old attention (concatenation, repetition, mask) is erased, nothing else.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from kvpass.graph.kv import is_update
from kvpass.graph.site import AttentionSite
from kvpass.graph.walk import mutates
from kvpass.runtime.table import MAX_LAYERS


@dataclass(frozen=True)
class LayerShape:
    """Shapes of one rewritten site; sizes may be symbolic expressions.

    ``past`` and ``mask`` are lengths that the graph assumes, checked against the cache at every
    call: tokens stored (TieredCache only), and columns of the padding mask.
    """

    batch: Any
    tokens: Any
    kv_heads: int
    head_dim_k: int
    head_dim_v: int
    dtype: torch.dtype
    past: Any = None
    mask: Any = None


@dataclass
class TieredGroup:
    """The sites of one TieredCache in a graph.

    Attributes:
        handle: index of its handle among the graph's inputs.
        block_size: tokens of a block.
        layers: layer index to shape.
    """

    handle: int
    block_size: int
    layers: dict[int, LayerShape] = field(default_factory=dict)


@dataclass(frozen=True)
class FunctionalSite:
    """One site whose cache is passed in and returned.

    Attributes:
        past_k, past_v: indices of the past among the graph's inputs, or None at first prefill.
        out_k, out_v: positions of the new cache among the graph's outputs.
    """

    past_k: int | None
    past_v: int | None
    out_k: tuple[int, ...]
    out_v: tuple[int, ...]
    shape: LayerShape


@dataclass
class Plan:
    """How to call a rewritten graph.

    Attributes:
        inputs: for each input of the new graph: index of an old input, or the number of the rows
            tensor (tiered groups first, then the functional group) as ``-1 - number``.
        tiered: TieredCache groups; the sites of a group have the same batch and new tokens.
        functional: groups of functional sites, in program order; a group shares one batch.
        extra: outputs at the end that only keep effects alive; the caller drops them.
        symbols: symbol to (input index, dimension or None) it can be read from.
        rewritten: number of sites.
    """

    inputs: list[int] = field(default_factory=list)
    tiered: list[TieredGroup] = field(default_factory=list)
    functional: list[list[FunctionalSite]] = field(default_factory=list)
    extra: int = 0
    symbols: dict[Any, tuple[int, int | None]] = field(default_factory=dict)
    rewritten: int = 0


def _example(node: fx.Node) -> Any:
    return node.meta["example_value"] if "example_value" in node.meta else node.meta["val"]


def _shape_of(site: AttentionSite) -> LayerShape:
    k, v = _example(_k_new(site)), _example(_v_new(site))
    past = site.source.update.args[4] if site.source.update is not None else None
    if isinstance(past, fx.Node):
        past = _example(past)
    mask = site.mask.kv_mask
    return LayerShape(
        batch=_plain(k.shape[0]),
        tokens=_plain(k.shape[2]),
        kv_heads=int(k.shape[1]),
        head_dim_k=int(k.shape[3]),
        head_dim_v=int(v.shape[3]),
        dtype=k.dtype,
        past=None if past is None else _plain(past),
        mask=None if mask is None else _plain(_example(mask).shape[1]),
    )


def _k_new(site: AttentionSite) -> fx.Node:
    assert site.source.k_new is not None
    return site.source.k_new


def _v_new(site: AttentionSite) -> fx.Node:
    assert site.source.v_new is not None
    return site.source.v_new


def _plain(size: Any) -> Any:
    """An int, or the symbolic expression of a SymInt."""
    if isinstance(size, torch.SymInt):
        expression = size.node.expr
        return int(expression) if expression.is_number else expression
    return int(size)


def rewrite(gm: fx.GraphModule, sites: list[AttentionSite], block_size: int) -> Plan:
    """Replace ``sites`` in ``gm``, in place.

    Args:
        gm: graph of Dynamo.
        sites: matched and legal sites of it.
        block_size: tokens of a block of functional sites.

    Returns:
        How to call the new graph.
    """
    plan = Plan(rewritten=len(sites))
    graph = gm.graph
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    number = {node: i for i, node in enumerate(placeholders)}
    plan.symbols = _symbols(placeholders)
    rows = _Rows(graph, placeholders)
    groups: dict[tuple[Any, ...], tuple[TieredGroup, fx.Node]] = {}
    tiered = [site for site in sites if site.source.form == "tiered"]
    functional = [site for site in sites if site.source.form == "functional"]
    handles: set[fx.Node] = set()
    for site in tiered:
        update = site.source.update
        assert update is not None
        handle, layer, size = update.args[2], update.args[3], update.args[5]
        assert isinstance(handle, fx.Node) and isinstance(layer, int) and isinstance(size, int)
        handles.add(handle)
        shape = _shape_of(site)
        key = (handle, shape.batch, shape.tokens)
        if key not in groups:
            group = TieredGroup(number[handle], size)
            plan.tiered.append(group)
            groups[key] = (group, rows.add(_example(_k_new(site))))
        group, node = groups[key]
        group.layers[layer] = shape
        _replace(graph, site, node, layer, size)
    families: dict[tuple[Any, ...], list[AttentionSite]] = {}
    for site in functional:
        shape = _shape_of(site)
        families.setdefault((shape.batch, shape.tokens), []).append(site)
    for family in families.values():
        node = rows.add(_example(_k_new(family[0])))
        for layer, site in enumerate(family):
            _replace(graph, site, node, layer, block_size)
    # Only now: an attention's own output may be returned, and has just been replaced.
    output = next(node for node in reversed(graph.nodes) if node.op == "output")
    kind = type(output.args[0])
    returned = list(output.args[0]) if isinstance(output.args[0], (tuple, list)) else None
    for family in families.values():
        members: list[FunctionalSite] = []
        for site in family:
            source = site.source
            out_k, out_v = _positions(returned, source.keys), _positions(returned, source.values)
            members.append(
                FunctionalSite(
                    None if source.past_k is None else number[source.past_k],
                    None if source.past_v is None else number[source.past_v],
                    out_k,
                    out_v,
                    _shape_of(site),
                )
            )
            for position in (*out_k, *out_v):
                assert returned is not None
                returned[position] = None
        plan.functional.append(members)
    if functional and returned is not None:
        output.args = (kind(returned),)
    _erase_dead(graph, sites)
    for node in placeholders:
        gone = node in handles or any(
            node in (site.source.past_k, site.source.past_v) for site in functional
        )
        if gone and not node.users:
            graph.erase_node(node)
        else:
            plan.inputs.append(number[node])
    plan.inputs.extend(-1 - i for i in range(len(rows.nodes)))
    plan.extra = keep_effects(graph)
    graph.lint()
    gm.recompile()
    return plan


def keep_effects(graph: fx.Graph) -> int:
    """Return what only matters for its effect, so that no compiler drops it as dead.

    A cache may be filled in a graph that uses nothing of the attention behind it: the last layer
    of a prompt whose logits are not asked for, say.

    Returns:
        Outputs added at the end; the caller drops them.
    """
    output = next(node for node in reversed(graph.nodes) if node.op == "output")
    if not isinstance(output.args[0], (tuple, list)):
        return 0
    live = _ancestors([output])
    extra: list[fx.Node] = []
    for node in graph.nodes:
        if node in live or node.op != "call_function":
            continue
        if node.target is torch.ops.kvpass.append.default:
            extra.append(node)
        elif is_update(node):
            with graph.inserting_after(node):
                keys = graph.call_function(operator.getitem, (node, 0))
            keys.meta["example_value"] = _example(node)[0]
            extra.append(keys)
    output.args = (type(output.args[0])([*output.args[0], *extra]),)
    return len(extra)


class _Rows:
    """Placeholders for the table rows of each group, after all others."""

    def __init__(self, graph: fx.Graph, placeholders: list[fx.Node]) -> None:
        self.graph = graph
        self.last = placeholders[-1]
        self.nodes: list[fx.Node] = []

    def add(self, example: Any) -> fx.Node:
        """A placeholder int32 ``[MAX_LAYERS, B]`` on the device of ``example`` ``[B, ...]``."""
        with self.graph.inserting_after(self.last):
            node = self.graph.placeholder(f"kvpass_rows_{len(self.nodes)}")
        size = (MAX_LAYERS, example.shape[0])
        with example.fake_mode:
            fake = torch.empty(size, dtype=torch.int32, device=example.device)
        node.meta["example_value"] = fake
        self.nodes.append(node)
        self.last = node
        return node


def _replace(
    graph: fx.Graph, site: AttentionSite, rows: fx.Node, layer: int, block_size: int
) -> None:
    k_new, v_new = _k_new(site), _v_new(site)
    before = _example(site.output)
    query = site.query
    with graph.inserting_before(site.output):
        token = graph.call_function(
            torch.ops.kvpass.append.default, (k_new, v_new, rows, layer, block_size)
        )
        out = graph.call_function(
            torch.ops.kvpass.attend.default,
            (
                query,
                k_new,
                v_new,
                token,
                rows,
                layer,
                block_size,
                site.scale,
                site.mask.causal,
                site.mask.kv_mask,
                site.mask.operand,
            ),
        )
        with before.fake_mode:
            token.meta["example_value"] = _example(k_new).new_empty(0)
            size, heads, tokens, _ = before.shape
            fake = before.new_empty((size, tokens, heads, before.shape[3])).transpose(1, 2)
        out.meta["example_value"] = fake
        if before.is_contiguous() and not fake.is_contiguous():
            # Code behind may .view() the product of a matmul, which is contiguous.
            dense = graph.call_method("contiguous", (out,))
            dense.meta["example_value"] = before
            out = dense
        for node in (token, out):
            for key in ("nn_module_stack", "stack_trace", "source_fn_stack"):
                if key in site.output.meta:
                    node.meta[key] = site.output.meta[key]
    site.output.replace_all_uses_with(out)


def _positions(returned: list[Any] | None, node: fx.Node) -> tuple[int, ...]:
    if returned is None:
        return ()
    return tuple(i for i, value in enumerate(returned) if value is node)


def _ancestors(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    seen: set[fx.Node] = set()
    stack = list(nodes)
    while stack:
        node = stack.pop()
        if node not in seen:
            seen.add(node)
            stack.extend(node.all_input_nodes)
    return seen


def _erase_dead(graph: fx.Graph, sites: list[AttentionSite]) -> None:
    """Erase what only the replaced attentions used; ops with effects always stay."""
    candidates = _ancestors(
        node for site in sites for node in (site.output, site.source.keys, site.source.values)
    )
    updates = {site.source.update for site in sites}
    for node in reversed(list(graph.nodes)):
        if node in candidates and not node.users and (node in updates or _is_pure(node)):
            graph.erase_node(node)


def _is_pure(node: fx.Node) -> bool:
    if node.op == "get_attr":
        return True
    if node.op not in ("call_method", "call_function") or mutates(node):
        return False
    return not is_update(node)


def _symbols(placeholders: list[fx.Node]) -> dict[Any, tuple[int, int | None]]:
    """Where each symbol of the shapes can be read when the graph is called."""
    found: dict[Any, tuple[int, int | None]] = {}
    for index, node in enumerate(placeholders):
        value = node.meta.get("example_value")
        if isinstance(value, torch.SymInt):
            if value.node.expr.is_Symbol:
                found.setdefault(value.node.expr, (index, None))
        elif isinstance(value, torch.Tensor):
            for dimension, size in enumerate(value.shape):
                if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol:
                    found.setdefault(size.node.expr, (index, dimension))
    return found
