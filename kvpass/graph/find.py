# SPDX-License-Identifier: Apache-2.0
"""Find every attention of a Dynamo graph: a site that is fully understood, or a refusal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import fx

from kvpass.graph.anchors import called_attentions, is_anchor
from kvpass.graph.combine import read_mask
from kvpass.graph.entry import EntryValues
from kvpass.graph.flex import FlexCall, is_flex, match_flex
from kvpass.graph.kv import (
    NoSource,
    address,
    check_new,
    find_source,
    is_handle,
    is_read,
    is_source,
    is_update,
    placed_mask,
)
from kvpass.graph.latent import Latent, read_latent
from kvpass.graph.legality import site_refusal
from kvpass.graph.mask import MaskReader
from kvpass.graph.operands import (
    Operand,
    behind_transpose,
    heads_first,
    kv_heads,
    unfold_query,
    unrepeat,
)
from kvpass.graph.probe import Probe, probe_of
from kvpass.graph.score import (
    Chain,
    match_sdpa,
    match_softmax,
)
from kvpass.graph.site import (
    AttentionSite,
    CacheForm,
    CacheSource,
    FindResult,
    MaskSpec,
    Refusal,
)
from kvpass.graph.sizes import same, settled
from kvpass.graph.static import StaticReader, root_of
from kvpass.graph.walk import (
    NotMatched,
    aliases,
    describe,
    is_shape_read,
    live_nodes,
    module_path,
    need_tensor,
    op_name,
    shape_of,
    size_reads,
    value_of,
    written_between,
)

_OPAQUE = {
    "multi_head_attention_forward": "torch.nn.MultiheadAttention is opaque: its projections and "
    "its attention are one call",
}


def find_sites(
    gm: fx.GraphModule | fx.Graph,
    flex: Mapping[fx.Node, FlexCall | str] | None = None,
    owner: torch.nn.Module | None = None,
) -> FindResult:
    """All attentions of the graph that Dynamo hands to a backend.

    Reads the graph and its ``example_value`` metadata only: it changes neither, and adds no guard.
    Every attention is either a site, whose meaning is carried over in full, or a refusal with the
    reason. A softmax that is not between two products is no attention and is not reported.

    Calls of flex_attention are read if :func:`kvpass.graph.flex.spell_out` has added what they
    compute; ``flex`` is what it returned. ``owner`` has the graphs that a bare graph's nodes call.

    Method: anchor at SDPA or softmax and walk; no list of templates.
    """
    if isinstance(gm, fx.GraphModule):
        return _Finder(gm.graph, flex or {}, owner or gm).run()
    return _Finder(gm, flex or {}, owner).run()


class _Finder:
    def __init__(
        self,
        graph: fx.Graph,
        flex: Mapping[fx.Node, FlexCall | str],
        owner: torch.nn.Module | None,
    ) -> None:
        self.flex = flex
        self.owner = owner
        self.nodes = list(graph.nodes)
        self.order = {node: position for position, node in enumerate(self.nodes)}
        self.live = live_nodes(graph)
        self.entry = EntryValues(graph)
        self.reader = MaskReader(self.entry)
        self.probes: dict[tuple[tuple[fx.Node, ...], bool], Probe | str] = {}
        self.readers: dict[fx.Node, list[tuple[fx.Node, fx.Node]]] = {}
        self.static = StaticReader(graph, self.live, self.reader)
        self.result = FindResult(entry=self.entry)
        self.count = 0

    def run(self) -> FindResult:
        for node in self.nodes:
            if node not in self.live:
                continue
            opaque = self._opaque(node)
            if opaque is not None:
                self._refuse(node, opaque)
            elif is_anchor(node, self.live):
                self._try(node)
            else:
                for _ in range(called_attentions(node, self.owner)):
                    self._refuse(
                        node,
                        f"it is in a graph of its own that {node.target} runs, as "
                        "torch.utils.checkpoint and torch.cond do: call the attention directly",
                    )
        self._refuse_repeated_updates()
        self._refuse_other_readers()
        return self.result

    def _refuse_other_readers(self) -> None:
        """Layers may share keys and values, as long as all their attentions are rewritten."""
        sites = self._alike_masks(self.result.sites)
        while True:
            inside: dict[tuple[fx.Node, fx.Node], set[fx.Node]] = {}
            for site in sites:
                nodes = inside.setdefault((site.source.keys, site.source.values), set())
                nodes.update((*site.interior, site.output))
            strays = {
                site.anchor: [
                    (node, user)
                    for node, user in self.readers[site.anchor]
                    if user not in inside[site.source.keys, site.source.values]
                ]
                for site in sites
            }
            if not any(strays.values()):
                break
            for site in sites:
                for node, user in strays[site.anchor][:1]:
                    reason = f"the cache {node.name} is also used by {_user(user)}"
                    self.result.refusals.append(Refusal(site.anchor, site.module, reason))
            sites = [site for site in sites if not strays[site.anchor]]
        self.result.sites = sites

    def _refuse_repeated_updates(self) -> None:
        """Two updates of one layer in a graph: which tokens each attention sees is not static."""
        counts: dict[tuple[fx.Node, int], int] = {}
        for node in self.nodes:
            if is_update(node):
                layer = address(node)[:2]
                counts[layer] = counts.get(layer, 0) + 1
        kept: list[AttentionSite] = []
        for site in self.result.sites:
            update = site.source.update
            reason = None
            times = 0 if update is None else counts.get(address(update)[:2], 0)
            if times and is_read(update):
                reason = "this layer of the TieredCache is updated and read in one graph"
            elif times > 1:
                reason = "this layer of the TieredCache is updated more than once in the graph"
            if reason is None:
                kept.append(site)
            else:
                self.result.refusals.append(Refusal(site.anchor, site.module, reason, "tiered"))
        self.result.sites = kept

    def _alike_masks(self, sites: list[AttentionSite]) -> list[AttentionSite]:
        """Sites without those that see one shortened cache under different padding or operands."""
        seen: dict[tuple[fx.Node, fx.Node], set[object]] = {}
        for site in sites:
            masks = seen.setdefault((site.source.keys, site.source.values), set())
            terms = tuple(term.node for term in site.mask.terms)
            masks.add((site.mask.kv_mask, terms, site.mask.chunk))
        kept: list[AttentionSite] = []
        for site in sites:
            if site.source.keep and len(seen[site.source.keys, site.source.values]) > 1:
                reason = "layers share keys and values of a window, under different masks"
                self.result.refusals.append(Refusal(site.anchor, site.module, reason))
            else:
                kept.append(site)
        return kept

    def _opaque(self, node: fx.Node) -> str | None:
        if node.op != "call_function":
            return None
        if is_flex(node):
            call = self.flex.get(node, "flex_attention is opaque: it has not been spelled out")
            return call if isinstance(call, str) else None
        name = str(getattr(node.target, "__name__", node.target))
        if name in _OPAQUE:
            return _OPAQUE[name]
        if isinstance(node.target, torch._ops.OpOverload) and "scaled_dot_product" in name:
            return f"{name} is a lowered attention: compile the model itself, not an export of it"
        return None

    def _module(self, node: fx.Node) -> str:
        path = module_path(node) or f"attention[{self.count}]"
        self.count += 1
        return path

    def _refuse(self, node: fx.Node, reason: str, form: CacheForm | None = None) -> None:
        self.result.refusals.append(Refusal(node, self._module(node), reason, form))

    def _try(self, node: fx.Node) -> None:
        try:
            site = self._match(node)
        except NoSource as failure:
            self._refuse(node, str(failure), failure.form)
            return
        except NotMatched as failure:
            self._refuse(node, str(failure))
            return
        reason = site_refusal(site)
        if reason is not None:
            self._refuse(node, reason, site.source.form)
        else:
            self.result.sites.append(site)
            self.count += 1

    def _match(self, node: fx.Node) -> AttentionSite:
        chain = self._chain(node)
        keys = unrepeat(chain.keys, "keys" in chain.tokens_first)
        values = unrepeat(chain.values, "values" in chain.tokens_first)
        query = unfold_query(chain.query)
        query_first = "query" in chain.tokens_first
        queries = heads_first(need_tensor(query.base, "the query"), query_first)
        factor = keys.factor
        latent = None if chain.tokens_first else read_latent(keys.base, values.base, self.live)
        if latent is not None:
            _check_operands(query, keys, values)
            self._check_heads(queries, keys, values, chain.grouped)
            chain.interior += [*keys.between, *values.between, *latent.between]
            keys, values = (
                Operand(latent.latents, latent.latents, ()),
                Operand(latent.rotary, latent.rotary, ()),
            )
        first = min((*chain.interior, chain.anchor), key=self.order.__getitem__)
        keys, values, source = self._source(keys, values, first)
        _check_operands(query, keys, values)
        check_new(source, query.base)
        if latent is None:
            factor = keys.factor
            self._check_heads(queries, keys, values, chain.grouped)
        interior = self._interior(chain, keys, values)
        self._check_users(chain, source, interior)
        mask = read_mask(self.reader, chain, query.base, source)
        source = self._with_assumptions(source, mask)
        mask = placed_mask(source, queries, mask)
        self._check_writes(chain, query.base, source, mask, interior, latent)
        scores = chain.scores
        return AttentionSite(
            anchor=node,
            output=chain.output,
            query=query.base,
            scale=scores.scale * factor,
            softcap=scores.softcap,
            factors=tuple(scores.factors),
            sinks=scores.sinks,
            query_first=query_first,
            output_first="output" in chain.tokens_first,
            mask=mask,
            source=source,
            module=module_path(node) or f"attention[{self.count}]",
            interior=interior,
            latent=latent,
            tables=chain.tables,
        )

    def _chain(self, node: fx.Node) -> Chain:
        call = self.flex.get(node)
        if isinstance(call, FlexCall):
            return match_flex(node, call, self.live)
        sdpa = op_name(node) == "scaled_dot_product_attention"
        return match_sdpa(node) if sdpa else match_softmax(node, self.live)

    def _source(
        self, keys: Operand, values: Operand, first: fx.Node
    ) -> tuple[Operand, Operand, CacheSource]:
        """The cache behind the operands, and the operands as far back as it is.

        ``first`` is the first node of the attention.
        """
        further = behind_transpose(keys), behind_transpose(values)
        for k, v in (further, (keys, values)):
            source = self.static.source(k, v, first) if k and v else None
            if k and v and source is not None:
                return k, v, source
        if further[0] is not None and is_source(further[0]):
            keys = further[0]
        if further[1] is not None and is_source(further[1]):
            values = further[1]
        return keys, values, find_source(keys, values, self.live)

    def _with_assumptions(self, source: CacheSource, mask: MaskSpec) -> CacheSource:
        """What the graph takes for granted about the position of the new tokens."""
        if mask.terms and (source.fills_buffer or source.write == "roll"):
            source = replace(source, probe=self._probe(source, mask))
        if not source.fills_buffer or not mask.causal:
            return source
        assert source.position is not None
        # Under is_causal there are as many keys as queries.
        past = 0 if mask.past is None else mask.past
        if same(source.position, past):
            return source
        pair = (source.position, past)
        if not any(map(self.entry.knows, pair)):
            raise NoSource(f"new tokens are written at {pair[0]}, the mask takes them at {pair[1]}")
        return replace(source, assumed=(*source.assumed, pair))

    def _probe(self, source: CacheSource, mask: MaskSpec) -> Probe:
        nodes = tuple(term.node for term in mask.terms)
        for term in mask.terms:
            columns = (shape_of(term.node) or (1,))[-1]
            if term.factor != 1.0 or not same(columns, source.capacity):
                raise NoSource(
                    f"the mask {term.node.name} does not say of each token of the static buffer "
                    "whether it is seen"
                )
        all_seen = source.write == "roll"
        key = nodes, all_seen
        if key not in self.probes:
            self.probes[key] = probe_of(mask.terms, all_seen)
        found = self.probes[key]
        if isinstance(found, str):
            raise NoSource(found)
        return found

    def _check_heads(
        self, query: torch.Tensor, keys: Operand, values: Operand, grouped: bool
    ) -> None:
        shape = query.shape
        if len(shape) != 4 or (heads := settled(shape[1])) is None:
            raise NotMatched("the query is not [batch, heads, tokens, head_dim] with static heads")
        for operand, what in ((keys, "keys"), (values, "values")):
            kv_heads(operand, heads, grouped, what)

    def _interior(self, chain: Chain, keys: Operand, values: Operand) -> tuple[fx.Node, ...]:
        inside = {*chain.interior, chain.anchor, *keys.between, *values.between}
        inside -= {chain.output}
        return tuple(sorted(inside, key=self.order.__getitem__))

    def _sizes(
        self, node: fx.Node, inside: set[fx.Node], known: frozenset[fx.Node] = frozenset()
    ) -> bool:
        """Whether a node only reads a shape, for nodes that disappear with the site.

        Sizes in ``known`` do not disappear: the rewritten graph knows them in another way.
        """
        if node in known:
            return True
        if not is_shape_read(node):
            return False
        stack = [node]
        while stack:
            for user in stack.pop().users:
                if user in inside or user in known or user not in self.live:
                    continue
                if isinstance(value_of(user), (tuple, int, torch.SymInt)):
                    stack.append(user)
                else:
                    return False
        return True

    def _check_users(
        self, chain: Chain, source: CacheSource, interior: tuple[fx.Node, ...]
    ) -> None:
        inside = {*interior, chain.output}
        for node in interior:
            for user in node.users:
                if user in self.live and user not in inside and not self._sizes(user, inside):
                    raise NotMatched(
                        f"{node.name} inside the attention is also used by {_user(user)}"
                    )
        if source.form == "static":
            self._check_buffers(source, inside)
            self.readers[chain.anchor] = []
            return
        readers = self.readers[chain.anchor] = []
        stored = {node for node in (source.stored_k, source.stored_v) if node is not None}
        for node in (source.keys, source.values, *stored):
            known = frozenset(read for read, _ in size_reads(node))
            for user in node.users:
                returned = user.op == "output" and source.form == "functional"
                inner = user in inside or user in stored or self._sizes(user, inside, known)
                # An input stays an input for those who ask for its shape.
                inner |= source.form == "read" and is_shape_read(user)
                if user in self.live and not inner and not returned:
                    readers.append((node, user))

    def _check_buffers(self, source: CacheSource, inside: set[fx.Node]) -> None:
        """A buffer without memory of its own is read by its attention only, as is what is joined.

        Dense memory is still written, so that it may be read elsewhere.
        """
        allowed = {*inside, *source.writes, source.keys, source.values}
        nodes = {source.keys, source.values} - {source.k_new, source.v_new}
        for buffer in (source.past_k, source.past_v):
            made = buffer in (source.stored_k, source.stored_v)
            if buffer is None or not (made or is_handle(buffer)):
                nodes.discard(buffer)
            else:
                nodes.add(buffer)
        made = source.stored_k is not None
        # Calls that give back what they got are the buffer itself.
        same_tensor = {user for node in nodes for user in aliases(node) if root_of(user) in nodes}
        buffers = {source.past_k, source.past_v, *same_tensor}
        nodes |= same_tensor
        allowed |= same_tensor
        for node in nodes:
            for user in node.users:
                if user not in self.live or user in allowed or self._sizes(user, inside):
                    continue
                returned = user.op == "output" and (made or node in same_tensor)
                if node in buffers and (is_shape_read(user) or returned):
                    continue
                raise NoSource(f"the cache {node.name} is also used by {_user(user)}")

    def _check_writes(
        self,
        chain: Chain,
        query: fx.Node,
        source: CacheSource,
        mask: MaskSpec,
        interior: tuple[fx.Node, ...],
        latent: Latent | None,
    ) -> None:
        """Inputs are read at the output of the site from now on: nothing may write them before."""
        inputs = [query, source.k_new, source.v_new, mask.kv_mask, chain.scores.sinks]
        inputs += [term.node for term in mask.terms]
        inputs += [latent.weight] if latent is not None else []
        inputs += [source.past_k, source.past_v, source.keys, source.values]
        given = [node for node in inputs if node is not None]
        start = min(self.order[node] for node in (*given, *interior))
        if source.form == "static":  # whatever else is written to buffers has been excluded
            given = [n for n in given if n not in (source.past_k, source.past_v, source.keys)]
            given = [n for n in given if n is not source.values or n is source.v_new]
        write = written_between(given, start, self.order[chain.output], self.order)
        if write is not None:
            raise NotMatched(f"{describe(write)} writes in place to an input of the attention")


def _user(node: fx.Node) -> str:
    return "the graph output" if node.op == "output" else describe(node)


def _check_operands(query: Operand, keys: Operand, values: Operand) -> None:
    """What is passed between the cache and the products must not change what the op computes.

    Raises:
        NotMatched: values are scaled, or only one of query and keys is widened.
    """
    dtypes = [need_tensor(o.base, "an operand").dtype for o in (query, keys, values)]
    if values.factor != 1.0:
        raise NotMatched("the values are scaled between the cache and the product")
    if need_tensor(values.node, "the values").dtype != dtypes[2]:
        raise NotMatched(
            f"the values are widened from {dtypes[2]} between the cache and the product: cast the "
            "probabilities to the dtype of the values instead"
        )
    if dtypes[0] != dtypes[1]:
        raise NotMatched(
            f"query ({dtypes[0]}) and cached keys ({dtypes[1]}) have different dtypes: keep the "
            "cache in the dtype of the query"
        )
