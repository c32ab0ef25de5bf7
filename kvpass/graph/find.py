# SPDX-License-Identifier: Apache-2.0
"""Find every attention of a Dynamo graph: a site that is fully understood, or a refusal."""

from __future__ import annotations

import math

import torch
from torch import fx

from kvpass.graph.kv import (
    NoSource,
    Operand,
    check_new,
    find_source,
    is_update,
    kv_heads,
    unrepeat,
)
from kvpass.graph.legality import site_refusal
from kvpass.graph.mask import MaskReader, Reading
from kvpass.graph.score import (
    Chain,
    MaskTerm,
    is_softmax,
    looks_like_attention,
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
from kvpass.graph.values import Keep
from kvpass.graph.walk import (
    NotMatched,
    Size,
    describe,
    is_shape_read,
    live_nodes,
    module_path,
    need_tensor,
    op_name,
    same,
    shape_of,
    value_of,
    written_between,
)

_OPAQUE = {
    "multi_head_attention_forward": "torch.nn.MultiheadAttention is opaque: its projections and "
    "its attention are one call",
    "flex_attention": "flex_attention is opaque: its mask and score function are not read yet; "
    "use attn_implementation='sdpa'",
}


def find_sites(gm: fx.GraphModule) -> FindResult:
    """All attentions of the graph that Dynamo hands to a backend.

    Reads the graph and its ``example_value`` metadata only: it changes neither, and adds no guard.
    Every attention is either a site, whose meaning is carried over in full, or a refusal with the
    reason. A softmax that is not between two products is no attention and is not reported.

    Method: anchor at SDPA or softmax and walk; no list of templates.
    """
    return _Finder(gm).run()


class _Finder:
    def __init__(self, gm: fx.GraphModule) -> None:
        self.nodes = list(gm.graph.nodes)
        self.order = {node: position for position, node in enumerate(self.nodes)}
        self.live = live_nodes(gm.graph)
        self.reader = MaskReader()
        self.result = FindResult()
        self.count = 0

    def run(self) -> FindResult:
        for node in self.nodes:
            if node not in self.live:
                continue
            opaque = self._opaque(node)
            if opaque is not None:
                self._refuse(node, opaque)
            elif op_name(node) == "scaled_dot_product_attention" or (
                is_softmax(node) and looks_like_attention(node, self.live)
            ):
                self._try(node)
        self._refuse_repeated_updates()
        return self.result

    def _refuse_repeated_updates(self) -> None:
        """Two updates of one layer in a graph: which tokens each attention sees is not static."""
        counts: dict[tuple[object, object], int] = {}
        for node in self.nodes:
            if is_update(node):
                key = (node.args[2], node.args[3])
                counts[key] = counts.get(key, 0) + 1
        kept: list[AttentionSite] = []
        for site in self.result.sites:
            update = site.source.update
            if update is not None and counts[update.args[2], update.args[3]] > 1:
                reason = "this layer of the TieredCache is updated more than once in the graph"
                self.result.refusals.append(Refusal(site.anchor, site.module, reason, "tiered"))
            else:
                kept.append(site)
        self.result.sites = kept

    def _opaque(self, node: fx.Node) -> str | None:
        if node.op != "call_function":
            return None
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
        sdpa = op_name(node) == "scaled_dot_product_attention"
        chain = match_sdpa(node) if sdpa else match_softmax(node, self.live)
        keys, values = unrepeat(chain.keys), unrepeat(chain.values)
        source = find_source(keys, values, self.live)
        check_new(source, chain.query)
        self._check_heads(chain, keys, values)
        interior = self._interior(chain, keys, values)
        self._check_users(chain, source, interior)
        mask = self._mask(chain, source)
        self._check_writes(chain, source, mask, interior)
        return AttentionSite(
            anchor=node,
            output=chain.output,
            query=chain.query,
            scale=chain.scale,
            mask=mask,
            source=source,
            module=module_path(node) or f"attention[{self.count}]",
            interior=interior,
        )

    def _check_heads(self, chain: Chain, keys: Operand, values: Operand) -> None:
        heads = need_tensor(chain.query, "the query").shape[1]
        if not isinstance(heads, int):
            raise NotMatched("the number of query heads is not static")
        for operand, what in ((keys, "keys"), (values, "values")):
            kv_heads(operand, heads, chain.grouped, what)

    def _interior(self, chain: Chain, keys: Operand, values: Operand) -> tuple[fx.Node, ...]:
        inside = {*chain.interior, chain.anchor, *keys.between, *values.between}
        inside -= {chain.output}
        return tuple(sorted(inside, key=self.order.__getitem__))

    def _sizes(self, node: fx.Node, inside: set[fx.Node]) -> bool:
        """Whether a node only reads a shape, for nodes that disappear with the site."""
        if not is_shape_read(node):
            return False
        stack = [node]
        while stack:
            for user in stack.pop().users:
                if user in inside or user not in self.live:
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
                        f"{node.name} inside the attention is also used by "
                        f"{'the graph output' if user.op == 'output' else describe(user)}"
                    )
        for node in (source.keys, source.values):
            for user in node.users:
                returned = user.op == "output" and source.form == "functional"
                inner = user in inside or self._sizes(user, inside)
                if user in self.live and not inner and not returned:
                    what = "the graph output" if user.op == "output" else describe(user)
                    if op_name(user) == "getitem" and any(u.op == "output" for u in user.users):
                        raise NoSource(
                            f"a slice of the cache is returned ({user.name}): a cache with a "
                            "sliding window is not supported yet"
                        )
                    raise NoSource(f"the cache {node.name} is also used by {what}")

    def _check_writes(
        self,
        chain: Chain,
        source: CacheSource,
        mask: MaskSpec,
        interior: tuple[fx.Node, ...],
    ) -> None:
        """Inputs are read at the output of the site from now on: nothing may write them before."""
        inputs = [chain.query, source.k_new, source.v_new, mask.kv_mask, mask.operand]
        inputs += [source.past_k, source.past_v, source.keys, source.values]
        given = [node for node in inputs if node is not None]
        start = min(self.order[node] for node in (*given, *interior))
        write = written_between(given, start, self.order[chain.output], self.order)
        if write is not None:
            raise NotMatched(f"{describe(write)} writes in place to an input of the attention")

    def _mask(self, chain: Chain, source: CacheSource) -> MaskSpec:
        query = need_tensor(chain.query, "the query").shape
        batch, heads, queries = query[0], query[1], query[2]
        keys = need_tensor(source.keys, "the keys").shape[2]
        if chain.causal_flag:
            if not same(queries, keys):
                raise NotMatched(
                    f"is_causal=True with {queries} queries and {keys} keys is aligned to the "
                    "first key, not to the last: pass the mask instead"
                )
            return MaskSpec(causal=True)
        scores = (batch, heads, queries, keys)
        parts = [self._term(term, scores, chain) for term in chain.masks]
        return _combine(parts)

    def _term(
        self, term: MaskTerm, scores: tuple[Size, Size, Size, Size], chain: Chain
    ) -> tuple[MaskSpec, bool]:
        """One mask as a spec, and whether reading it relied on every row seeing some key."""
        tensor = need_tensor(term.node, "the mask")
        shape = shape_of(term.node) or ()
        batch, _, queries, keys = scores
        value = self.reader.value(term.node)
        is_bool = tensor.dtype == torch.bool
        if term.kind == "fill":
            if not is_bool:
                raise NotMatched(f"the mask {term.node.name} is {tensor.dtype}, not bool")
            if term.hidden_when and isinstance(value, Keep):
                value = Keep(value.bounds, value.pads, not value.negated)
            readable = isinstance(value, Keep)
            hidden = term.value
        else:
            readable = not isinstance(value, Keep) and value is not None
            hidden = -math.inf
        reading = None
        if readable:
            reading = self.reader.read(value, shape, batch, queries, keys)
        if reading is not None and term.kind == "add":
            hidden = reading.hidden
        if reading is not None and self._exact(reading, hidden, tensor):
            spec = MaskSpec(causal=reading.causal, kv_mask=reading.kv_mask)
            return spec, hidden != -math.inf
        return self._operand(term, tensor, scores, chain), False

    def _exact(self, reading: Reading, hidden: float, mask: torch.Tensor) -> bool:
        """With finfo.min a row without any visible key is the mean of V, so it must not occur."""
        if hidden == -math.inf:
            return True
        if reading.kv_mask is not None:
            return False
        return not mask.is_floating_point() or hidden <= torch.finfo(mask.dtype).min

    def _operand(
        self,
        term: MaskTerm,
        tensor: torch.Tensor,
        scores: tuple[Size, Size, Size, Size],
        chain: Chain,
    ) -> MaskSpec:
        node = term.node
        if term.kind == "fill":
            if term.value != -math.inf:
                raise NotMatched(
                    f"the mask {node.name} is not purely causal and fills with {term.value}: a "
                    "row without visible keys would change; fill with -inf or add a float mask"
                )
            if term.hidden_when:
                if op_name(node) != "invert" or not isinstance(node.args[0], fx.Node):
                    raise NotMatched(
                        f"the mask {node.name} marks hidden keys (negated) and cannot be read"
                    )
                node = node.args[0]
                tensor = need_tensor(node, "the mask")
            if tensor.dtype != torch.bool:
                raise NotMatched(
                    f"the mask {node.name} is {tensor.dtype} under a negation: make it bool first"
                )
        elif tensor.dtype not in (need_tensor(chain.query, "the query").dtype, torch.float32):
            raise NotMatched(f"the mask {node.name} is {tensor.dtype}, not the dtype of the query")
        shape = shape_of(node) or ()
        fits = len(shape) <= 4 and all(
            same(size, 1) or same(size, full)
            for size, full in zip(reversed(shape), reversed(scores), strict=False)
        )
        if not fits:
            raise NotMatched(
                f"the mask {node.name} of shape {tuple(shape)} is not proven to broadcast to the "
                f"scores {tuple(scores)}"
            )
        query = need_tensor(chain.query, "the query")
        if tensor.device != query.device:
            raise NotMatched(f"the mask is on {tensor.device}, the query on {query.device}")
        if tensor.requires_grad and torch.is_grad_enabled():
            raise NotMatched(f"the mask {node.name} needs a gradient")
        return MaskSpec(operand=node)


def _combine(parts: list[tuple[MaskSpec, bool]]) -> MaskSpec:
    """All masks of a site as one.

    Raises:
        NotMatched: their combination is not exact.
    """
    specs = [spec for spec, _ in parts]
    padding = {spec.kv_mask for spec in specs if spec.kv_mask is not None}
    operands = {spec.operand for spec in specs if spec.operand is not None}
    relies = any(finite for _, finite in parts)
    if len(padding) > 1 or len(operands) > 1 or (relies and (padding or operands)):
        raise NotMatched("several masks that cannot be combined exactly: add them to one first")
    return MaskSpec(
        causal=any(spec.causal for spec in specs),
        kv_mask=next(iter(padding), None),
        operand=next(iter(operands), None),
    )
