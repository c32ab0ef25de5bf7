# SPDX-License-Identifier: Apache-2.0
"""Rewrite matched sites to the cached ops; the third step, after match and legality.

Sites of the form ``tiered`` and ``functional`` lose their keys and values: ``append`` stores the
new ones, ``attend`` reads all of them through the table rows that the caller passes in. What only
served the old attention (concatenation, repetition, mask) is erased, nothing else.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from kvpass.graph.emit import (
    call,
    example,
    latent_weights,
    operand,
    scaled_query,
    size_of,
    total,
)
from kvpass.graph.entry import EntryValues
from kvpass.graph.flex import erase_unused
from kvpass.graph.inputs import Rows, give_memory, grown, plain, symbols_of
from kvpass.graph.kv import address, is_handle, is_update, tile_of
from kvpass.graph.plan import BufferUse, FunctionalSite, LayerShape, Plan, TieredGroup
from kvpass.graph.site import AttentionSite, tokens_axis
from kvpass.graph.walk import mutates, shape_of, size_reads


def _shape_of(site: AttentionSite) -> LayerShape:
    source, mask = site.source, site.mask.kv_mask
    reads = source.k_new is None
    k, v = (example(source.keys), example(source.values)) if reads else (
        example(_k_new(site)), example(_v_new(site))
    )  # fmt: skip
    if source.tokens_first:
        k, v = k.transpose(1, 2), v.transpose(1, 2)
    past = source.update.args[2 if reads else 4] if source.update is not None else None
    if isinstance(past, fx.Node):
        past = example(past)
    return LayerShape(
        batch=plain(k.shape[0]),
        tokens=0 if reads else plain(k.shape[2]),
        kv_heads=int(k.shape[1]),
        head_dim_k=int(k.shape[3]),
        head_dim_v=int(v.shape[3]),
        dtype=k.dtype,
        device=k.device,
        past=None if past is None else plain(past),
        mask=None if mask is None else plain(example(mask).shape[1]),
        keep=source.keep,
        mask_offset=None if mask is None and not site.mask.chunk else plain(site.mask.kv_offset),
        absolute=bool(site.mask.terms),
        tokens_first=source.tokens_first,
    )


def _buffer_of(site: AttentionSite) -> BufferUse:
    source = site.source
    sizes = tuple(
        tuple(map(plain, shape_of(node) or ())) for node in (source.past_k, source.past_v)
    )
    return BufferUse(
        write=source.write,
        position=None if source.position is None else plain(source.position),
        capacity=plain(source.capacity),
        tokens_first=source.tokens_first,
        sizes=sizes,  # type: ignore[arg-type]
    )


def _k_new(site: AttentionSite) -> fx.Node:
    assert site.source.k_new is not None
    return site.source.k_new


def _v_new(site: AttentionSite) -> fx.Node:
    assert site.source.v_new is not None
    return site.source.v_new


def rewrite(
    graph: fx.Graph,
    sites: list[AttentionSite],
    entry: EntryValues,
    block_size: int,
    tile: tuple[int, int] | None = None,
) -> Plan:
    """Replace ``sites`` in ``graph``, in place.

    Args:
        graph: a copy of Dynamo's.
        sites: matched and legal sites of it.
        entry: what its integer inputs hold.
        block_size: tokens of a block of functional sites.
        tile: queries and keys of a kernel's tile at functional sites; None: the measured ones.

    Returns:
        How to call the new graph.
    """
    plan = Plan(rewritten=len(sites))
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    number = {node: i for i, node in enumerate(placeholders)}
    plan.symbols = symbols_of(placeholders)
    for node, (symbol, place) in entry.symbols.items():
        if node in number:
            plan.symbols[symbol.node.expr] = number[node], place
    plan.grows = grown(placeholders)
    pairs = [pair for site in sites for pair in (*site.source.assumed, *site.mask.assumed)]
    # A mask may compare positions with themselves: that they are consecutive is checked anyway.
    pairs += [(symbol, symbol) for symbol, kind in entry.symbols.values() if kind == "positions"]
    plan.assumed = list(dict.fromkeys((plain(a), plain(b)) for a, b in pairs))
    plan.tables = list(dict.fromkeys(site.tables for site in sites if site.tables is not None))
    rows = Rows(graph, placeholders)
    groups: dict[tuple[Any, ...], tuple[TieredGroup, fx.Node]] = {}
    tiered = [site for site in sites if site.source.form == "tiered"]
    functional = [site for site in sites if site.source.form in ("functional", "read", "static")]
    handles: set[fx.Node] = set()
    tokens: dict[tuple[fx.Node, fx.Node], fx.Node] = {}
    for site in tiered:
        update = site.source.update
        assert update is not None
        handle, layer, size = address(update)
        handles.add(handle)
        shape = _shape_of(site)
        key = (handle, shape.batch, shape.tokens, shape.device)
        if key not in groups:
            group = TieredGroup(number[handle], size)
            plan.tiered.append(group)
            groups[key] = (group, rows.add(example(site.query)))
        group, node = groups[key]
        group.layers[layer] = shape
        _replace(graph, site, node, layer, size, tile_of(update), tokens)
    families: dict[tuple[Any, ...], list[AttentionSite]] = {}
    for site in functional:
        shape = _shape_of(site)
        family_key = (shape.batch, shape.tokens, shape.device, site.source.form)
        families.setdefault(family_key, []).append(site)
    for family in families.values():
        node = rows.add(example(family[0].query))
        layers: dict[tuple[fx.Node, fx.Node], int] = {}
        for site in family:
            layer = layers.setdefault(_cache_of(site), len(layers))
            _replace(graph, site, node, layer, block_size, tile, tokens)
    # Only now: an attention's own output may be returned, and has just been replaced.
    output = next(node for node in reversed(graph.nodes) if node.op == "output")
    kind = type(output.args[0])
    returned = list(output.args[0]) if isinstance(output.args[0], (tuple, list)) else None
    for family in families.values():
        members: list[FunctionalSite] = []
        for site in _unshared(family):
            source = site.source
            out_k = _positions(returned, source.stored_k)
            out_v = _positions(returned, source.stored_v)
            members.append(
                FunctionalSite(
                    number.get(source.past_k) if source.past_k is not None else None,
                    number.get(source.past_v) if source.past_v is not None else None,
                    out_k,
                    out_v,
                    _shape_of(site),
                    _buffer_of(site) if source.form == "static" else None,
                )
            )
            for position in (*out_k, *out_v):
                assert returned is not None
                returned[position] = None
        plan.functional.append(members)
    for site in functional:
        probe = site.source.probe
        if probe is None:
            continue
        if probe not in plan.probes:
            plan.probes.append(probe)
        if site.source.position is not None:
            probe.ends.append((plain(site.source.position), _shape_of(site).tokens))
    if functional and returned is not None:
        output.args = (kind(returned),)
    erase_unused(graph)
    erased = _erase_dead(graph, sites)
    plan.gone = [_gone(site, erased) for site in sites]
    for node in placeholders:
        gone = node in handles or any(
            node in (site.source.past_k, site.source.past_v) for site in functional
        )
        if gone and not node.users:
            graph.erase_node(node)
        else:
            plan.inputs.append(number[node])
    plan.dense = [number[node] for node in give_memory(graph)]
    plan.inputs.extend(-1 - i for i in range(len(rows.nodes)))
    plan.extra = keep_effects(graph)
    graph.lint()
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
    live = ancestors([output])
    extra: list[fx.Node] = []
    for node in graph.nodes:
        if node in live or node.op != "call_function":
            continue
        if node.target is torch.ops.kvpass.append.default:
            extra.append(node)
        elif is_update(node):
            with graph.inserting_after(node):
                keys = graph.call_function(operator.getitem, (node, 0))
            keys.meta["example_value"] = example(node)[0]
            extra.append(keys)
    output.args = (type(output.args[0])([*output.args[0], *extra]),)
    return len(extra)


def _cache_of(site: AttentionSite) -> tuple[fx.Node, fx.Node]:
    """Equal for sites that share keys and values."""
    source = site.source
    if source.form == "static" and source.write != "tail":
        assert source.past_k is not None and source.past_v is not None
        return source.past_k, source.past_v
    return source.keys, source.values


def _unshared(family: list[AttentionSite]) -> list[AttentionSite]:
    """The first of the sites of each keys and values."""
    first: dict[tuple[fx.Node, fx.Node], AttentionSite] = {}
    for site in family:
        first.setdefault(_cache_of(site), site)
    return list(first.values())


def _replace(
    graph: fx.Graph,
    site: AttentionSite,
    rows: fx.Node,
    layer: int,
    block_size: int,
    tile: tuple[int, int] | None,
    tokens: dict[tuple[fx.Node, fx.Node], fx.Node],
) -> None:
    """Replace one site; ``tokens`` are of the keys and values that have been appended."""
    shared = _cache_of(site)
    site = _up_to_date(site)
    source = site.source
    before = example(site.output)
    with graph.inserting_before(site.output):
        last = site.output.prev
        query = scaled_query(graph, site.query, site.factors)
        if site.query_first:
            query = call(graph, torch.transpose, query, 1, 2)
        heads = example(query).shape[1]
        token = tokens.get(shared)
        k_new, v_new = source.k_new, source.v_new
        if source.tokens_first and k_new is not None:
            k_new, v_new = (call(graph, torch.transpose, node, 1, 2) for node in (k_new, v_new))
        if source.k_new is not None and token is None:
            token = tokens[shared] = call(
                graph, torch.ops.kvpass.append.default, k_new, v_new, rows, layer, block_size
            )
        weights = () if site.latent is None else latent_weights(graph, site.latent)
        out = call(
            graph,
            torch.ops.kvpass.attend_latent.default if weights else torch.ops.kvpass.attend.default,
            query,
            *weights,
            k_new,
            v_new,
            token,
            rows,
            layer,
            block_size,
            site.scale,
            site.mask.causal,
            _beside(graph, site.mask.kv_mask, site.query),
            operand(graph, site.mask.terms, heads),
            **_options(site),
            **({} if tile is None else {"tile": tile}),
        )
        if site.output_first:
            out = call(graph, torch.transpose, out, 1, 2)
        if before.dim() == 3:
            out = call(graph, torch.flatten, out, 0, 1)
        elif before.is_contiguous() and not example(out).is_contiguous():
            # Code behind may .view() the product of a matmul, which is contiguous.
            dense = graph.call_method("contiguous", (out,))
            dense.meta["example_value"] = before
            out = dense
        added = last.next
        while added is not site.output:
            for key in ("nn_module_stack", "stack_trace", "source_fn_stack"):
                if key in site.output.meta:
                    added.meta[key] = site.output.meta[key]
            added = added.next
    site.output.replace_all_uses_with(out)
    site.output.meta[_IN_PLACE] = out
    _replace_sizes(graph, site)


_IN_PLACE = "kvpass_in_place"


def _up_to_date(site: AttentionSite) -> AttentionSite:
    """The site with what stands in place of outputs that have been replaced since it was found."""

    def now(node: Any) -> Any:
        return node.meta.get(_IN_PLACE, node) if isinstance(node, fx.Node) else node

    source = replace(site.source, k_new=now(site.source.k_new), v_new=now(site.source.v_new))
    return replace(site, query=now(site.query), source=source)


def _beside(graph: fx.Graph, mask: fx.Node | None, query: fx.Node) -> fx.Node | None:
    """The padding mask on the query's device: it was read through casts that moved it there."""
    device = example(query).device
    if mask is None or example(mask).device == device:
        return mask
    return call(graph, torch.ops.aten.to.device, mask, device, example(mask).dtype)


def _replace_sizes(graph: fx.Graph, site: AttentionSite) -> None:
    """Code behind may ask for the shape of keys and values that are made no more."""
    source = site.source
    if source.form in ("read", "static"):
        return
    axis = tokens_axis(source.tokens_first)
    for node, new in ((source.keys, source.k_new), (source.values, source.v_new)):
        for read, dim in size_reads(node):
            with graph.inserting_before(read):
                size: Any = example(node).shape[dim]
                if isinstance(size, int):
                    pass
                elif dim != axis:
                    size = size_of(graph, new or site.query, dim)
                elif new is None:
                    assert source.update is not None
                    size = source.update.args[2]
                else:
                    past = source.past_k if node is source.keys else source.past_v
                    stored: Any = 0 if past is None else size_of(graph, past, axis)
                    if source.update is not None:
                        stored = source.update.args[4]
                    size = total(graph, stored, size_of(graph, new, axis))
            for user in list(read.users):
                user.args = _swapped(user.args, read, size)
                user.kwargs = _swapped(user.kwargs, read, size)
            parent = read.args[0]
            graph.erase_node(read)
            if isinstance(parent, fx.Node) and parent is not node and not parent.users:
                graph.erase_node(parent)


def _swapped(arguments: Any, old: fx.Node, new: Any) -> Any:
    return fx.map_arg(arguments, lambda node: new if node is old else node)


def _options(site: AttentionSite) -> dict[str, Any]:
    """Arguments of ``attend`` that differ from their default."""
    options: dict[str, Any] = {
        "softcap": site.softcap, "window": site.mask.window, "chunk": site.mask.chunk,
        "sinks": site.sinks,
    }  # fmt: skip
    if site.source.k_new is None:
        options["kv_heads"] = int(site.source.shapes[0][1])
        options["head_dim_v"] = int(site.source.shapes[1][3])
    return {key: value for key, value in options.items() if value not in (0, None)}


def _positions(returned: list[Any] | None, node: fx.Node | None) -> tuple[int, ...]:
    if returned is None or node is None:
        return ()
    return tuple(i for i, value in enumerate(returned) if value is node)


def ancestors(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """The nodes, and all that they are computed from."""
    seen: set[fx.Node] = set()
    stack = list(nodes)
    while stack:
        node = stack.pop()
        if node not in seen:
            seen.add(node)
            stack.extend(node.all_input_nodes)
    return seen


def _gone(site: AttentionSite, erased: set[fx.Node]) -> tuple[str, ...]:
    """Tensors of a site that are no longer made, with their shapes."""
    nodes = dict.fromkeys((site.source.keys, site.source.values, *site.interior))
    shapes = {node: shape_of(node) for node in nodes if node in erased}
    return tuple(
        f"{node.name} [{', '.join(map(str, shape))}]"
        for node, shape in shapes.items()
        if shape is not None
    )


def _erase_dead(graph: fx.Graph, sites: list[AttentionSite]) -> set[fx.Node]:
    """Erase what only the replaced attentions used; ops with effects always stay."""
    erased: set[fx.Node] = set()
    candidates = ancestors(
        node
        for site in sites
        for node in (
            site.output, site.source.keys, site.source.values,
            site.source.stored_k, site.source.stored_v,
        )
        if node is not None
    )  # fmt: skip
    gone: set[fx.Node | None] = {site.source.update for site in sites}
    # An operation in place inside the attention changed the scores only.
    gone |= {node for site in sites for node in (site.output, *site.interior)}
    gone |= _buffer_writes(sites)
    candidates |= {node for node in gone if node is not None}
    for node in reversed(list(graph.nodes)):
        size = isinstance(node.meta.get("example_value"), torch.SymInt)
        if (node in candidates or size) and not node.users and (node in gone or _is_pure(node)):
            graph.erase_node(node)
            erased.add(node)
    return erased


def _buffer_writes(sites: list[AttentionSite]) -> set[fx.Node | None]:
    """Writes to buffers that have no memory of their own from now on."""
    found: set[fx.Node | None] = set()
    for site in sites:
        source = site.source
        if source.stored_k is not None or (source.past_k is not None and is_handle(source.past_k)):
            found |= {*source.writes, source.stored_k, source.stored_v} - {None}
    return found


def _is_pure(node: fx.Node) -> bool:
    if node.op == "get_attr":
        return True
    if node.op not in ("call_method", "call_function") or mutates(node):
        return False
    return not is_update(node)
