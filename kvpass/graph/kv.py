# SPDX-License-Identifier: Apache-2.0
"""From the K and V operands of an attention back to the cache that they come from."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from kvpass.graph.site import CacheForm, CacheSource
from kvpass.graph.walk import (
    NotMatched,
    bind,
    describe,
    inserted_axes,
    is_cast,
    mutates,
    need_tensor,
    op_name,
    proven,
    same,
    same_shape,
    shape_of,
    tensor_of,
    upwards,
)

NO_CACHE = "no KV cache: left to the inner compiler"


class NoSource(NotMatched):
    """No supported cache behind the operands; ``form`` is "none" when there is no cache at all."""

    def __init__(self, reason: str, form: CacheForm | None = None) -> None:
        super().__init__(reason)
        self.form = form


@dataclass(frozen=True)
class Operand:
    """K or V as the product sees it (``node``), before head repeats (``base``), nodes between."""

    node: fx.Node
    base: fx.Node
    between: tuple[fx.Node, ...]


def unrepeat(node: fx.Node) -> Operand:
    """Walk back over ``contiguous`` and over repeats of each KV head for its group of query heads.

    Only repeats with the interleaved order (query head i uses KV head i // r) are passed.
    """
    current = node
    between: list[fx.Node] = []
    while True:
        step = _step(current)
        if step is None:
            return Operand(node, current, tuple(between))
        inner, passed = step
        between.extend(passed)
        current = inner


def _step(node: fx.Node) -> tuple[fx.Node, list[fx.Node]] | None:
    name = op_name(node)
    source = node.args[0] if node.args else None
    if not isinstance(source, fx.Node):
        return None
    if name == "contiguous" and len(node.args) == 1 and not node.kwargs:
        return source, [node]
    if name == "repeat_interleave":
        return _repeat_interleave(node)
    if name in ("reshape", "view", "flatten"):
        return _expanded(node, source)
    return None


def _repeat_interleave(node: fx.Node) -> tuple[fx.Node, list[fx.Node]] | None:
    bound = bind(node, "input", "repeats", "dim", "output_size")
    if bound is None:
        return None
    source, repeats, dim = bound.get("input"), bound.get("repeats"), bound.get("dim")
    before, after = shape_of(source), shape_of(node)
    if not isinstance(source, fx.Node) or before is None or after is None:
        return None
    if not isinstance(repeats, int) or len(before) != 4 or dim not in (1, -3):
        return None
    expected = (before[0], before[1] * repeats, before[2], before[3])
    return (source, [node]) if same_shape(after, expected) else None


def _expanded(node: fx.Node, source: fx.Node) -> tuple[fx.Node, list[fx.Node]] | None:
    """``x[:, :, None].expand(B, H, r, S, D).reshape(B, H * r, S, D)``."""
    passed = [node]
    if op_name(source) == "contiguous" and isinstance(source.args[0], fx.Node):
        passed.append(source)
        source = source.args[0]
    if op_name(source) != "expand" or not isinstance(source.args[0], fx.Node):
        return None
    widened = source.args[0]
    if op_name(widened) not in ("getitem", "unsqueeze"):
        return None
    origin = widened.args[0]
    shapes = [shape_of(item) for item in (origin, widened, source, node)]
    if not isinstance(origin, fx.Node) or any(shape is None for shape in shapes):
        return None
    first, with_axis, grown, last = (tuple(shape or ()) for shape in shapes)
    if (len(first), len(with_axis), len(grown), len(last)) != (4, 5, 5, 4):
        return None
    if op_name(widened) == "unsqueeze":
        bound = bind(widened, "input", "dim")
        if bound is None or bound["dim"] not in (2, -3):
            return None
    elif inserted_axes(widened.args[1], 4) != [0, 1, None, 2, 3]:
        return None
    batch, heads, length, dim = first
    repeats = grown[2]
    fits = (
        same_shape(with_axis, (batch, heads, 1, length, dim))
        and same_shape(grown, (batch, heads, repeats, length, dim))
        and same_shape(last, (batch, heads * repeats, length, dim))
    )
    return (origin, [*passed, source, widened]) if fits else None


def find_source(keys: Operand, values: Operand, live: set[fx.Node]) -> CacheSource:
    """The cache both operands come from.

    Raises:
        NoSource: there is none, or it has a form that is not supported.
    """
    k, v = keys.base, values.base
    if k is v:
        raise NoSource("keys and values are the same tensor")
    update = _update_of(k)
    if update is not None or _update_of(v) is not None:
        return _tiered(k, v, update, live)
    if op_name(k) == "cat" and op_name(v) == "cat":
        return _functional(k, v, live)
    for operand, what in ((keys, "keys"), (values, "values")):
        _explain(operand, what)
    raise NoSource(NO_CACHE, "none")


def is_update(node: object) -> bool:
    """Whether the node is a ``kvpass.cache_update`` call."""
    if not isinstance(node, fx.Node) or node.op != "call_function":
        return False
    return str(node.target) in ("kvpass.cache_update.default", "kvpass.cache_update")


def _update_of(node: fx.Node) -> fx.Node | None:
    if op_name(node) != "getitem":
        return None
    source = node.args[0]
    return source if isinstance(source, fx.Node) and is_update(source) else None


def _tiered(k: fx.Node, v: fx.Node, update: fx.Node | None, live: set[fx.Node]) -> CacheSource:
    if update is None or _update_of(v) is not update:
        raise NoSource("keys and values do not come from the same TieredCache update")
    if (k.args[1], v.args[1]) != (0, 1):
        raise NoSource("keys and values of the TieredCache update are swapped")
    others = [user for user in update.users if user in live and user not in (k, v)]
    if others:
        raise NoSource(f"the TieredCache update is also used by {describe(others[0])}")
    bound = bind(update, "k", "v", "handle", "layer", "past", "block_size")
    new_k = bound.get("k") if bound else None
    new_v = bound.get("v") if bound else None
    if not isinstance(new_k, fx.Node) or not isinstance(new_v, fx.Node):
        raise NoSource("the arguments of the TieredCache update cannot be read")
    return CacheSource("tiered", k, v, k_new=new_k, v_new=new_v, update=update)


def _cat_parts(node: fx.Node) -> tuple[fx.Node, fx.Node]:
    bound = bind(node, "tensors", "dim") or bind(node, "tensors", "axis") or {}
    parts, dim = bound.get("tensors"), bound.get("dim", bound.get("axis", 0))
    if not isinstance(parts, (list, tuple)) or len(parts) != 2 or dim not in (-2, 2):
        raise NoSource(NO_CACHE, "none")
    past, new = parts
    if not isinstance(past, fx.Node) or not isinstance(new, fx.Node):
        raise NoSource(NO_CACHE, "none")
    if past is new:
        raise NoSource("the past is concatenated with itself")
    return past, new


def _is_past(node: fx.Node) -> bool:
    return node.op == "placeholder" and tensor_of(node) is not None


def _is_empty(node: fx.Node) -> bool:
    """An empty tensor made in the graph: ``torch.tensor([])`` or size zero on the token axis."""
    if op_name(node) not in ("tensor", "empty", "zeros", "new_empty", "new_zeros"):
        return False
    shape = shape_of(node)
    if shape is None:
        return False
    if len(shape) == 1:
        return proven(shape[0] == 0)
    return len(shape) == 4 and proven(shape[2] == 0)


def _functional(k: fx.Node, v: fx.Node, live: set[fx.Node]) -> CacheSource:
    (past_k, new_k), (past_v, new_v) = _cat_parts(k), _cat_parts(v)
    if _is_empty(past_k) and _is_empty(past_v):
        source = CacheSource("functional", k, v, k_new=new_k, v_new=new_v)
    elif _is_past(past_k) and _is_past(past_v):
        if past_k is past_v:
            raise NoSource("keys and values share one past tensor")
        source = CacheSource(
            "functional", k, v, k_new=new_k, v_new=new_v, past_k=past_k, past_v=past_v
        )
        for past, cat in ((past_k, k), (past_v, v)):
            others = [user for user in past.users if user in live and user is not cat]
            if others:
                raise NoSource(
                    f"the past {past.name} is also used by {describe(others[0])}: "
                    "a cache that something else reads cannot be replaced"
                )
    elif not any((_is_empty(past_k), _is_past(past_k), _is_empty(past_v), _is_past(past_v))):
        raise NoSource(NO_CACHE, "none")
    else:
        raise NoSource("keys and values are cached in different ways")
    for cat in (k, v):
        if not any(user.op == "output" for user in cat.users):
            slices = [user for user in cat.users if op_name(user) == "getitem" and _returned(user)]
            if slices:
                raise NoSource(
                    f"only a slice of the grown cache is returned ({slices[0].name}): "
                    "a cache with a sliding window is not supported yet"
                )
            raise NoSource(f"the grown cache {cat.name} is not returned by the graph")
    return source


def _returned(node: fx.Node) -> bool:
    return any(user.op == "output" for user in node.users)


def check_new(source: CacheSource, query: fx.Node) -> None:
    """The new keys and values are one token for each query row, and alike.

    Raises:
        NoSource: they are not, as in cross attention.
    """
    q = need_tensor(query, "the query").shape
    k = need_tensor(source.k_new, "the new keys").shape
    v = need_tensor(source.v_new, "the new values").shape
    if len(k) != 4 or len(v) != 4 or len(q) != 4:
        raise NoSource("queries, keys and values must be [batch, heads, tokens, head_dim]")
    if not same(k[2], v[2]) or not same(k[1], v[1]) or not same(k[0], v[0]):
        raise NoSource(
            f"new keys {tuple(k)} and values {tuple(v)} differ in batch, heads or tokens"
        )
    if not same(k[2], q[2]):
        raise NoSource(f"{k[2]} new keys for {q[2]} queries: cross attention is not supported yet")


# fmt: off
_REARRANGING = frozenset((
    "add", "bfloat16", "cat", "chunk", "contiguous", "double", "expand", "flatten", "float",
    "getitem", "half", "index_select", "mul", "narrow", "neg", "permute", "repeat",
    "repeat_interleave", "reshape", "roll", "select", "split", "squeeze", "to", "transpose", "type",
    "type_as", "unflatten", "unsqueeze", "view",
))
# fmt: on


_MAKERS = ("empty", "new_empty", "zeros", "new_zeros")


def _explain(operand: Operand, what: str) -> None:
    """Raise the most useful reason why the base of an operand is no supported source, if any."""
    base = operand.base
    near = [base, *upwards(base, lambda node: op_name(node) in _REARRANGING)]
    if op_name(base) not in _REARRANGING and base.op == "call_function":
        near = [base]
    writes = [write for node in near for write in _writes(node)]
    made_here = [node for node in near if op_name(node) in _MAKERS]
    if writes and made_here and not any(_returned(node) for node in made_here):
        raise NoSource(
            f"{what} are assembled in place by {describe(writes[0])}, as in multi-head latent "
            "attention: not supported yet"
        )
    if writes:
        raise NoSource(
            f"{what} are kept in a static buffer written by {describe(writes[0])}: "
            "StaticCache-like buffers are not supported yet, use a DynamicCache or TieredCache"
        )
    if base.op in ("placeholder", "get_attr"):
        raise NoSource(
            f"{what} are the read-only input {base.name}, as in cross attention: not supported yet"
        )
    caches = [node for node in near if node is not base and _is_cache(node)]
    if caches and op_name(base) == "getitem":
        raise NoSource(f"{what} are a slice of the cache ({describe(base)}): not supported yet")
    if caches and is_cast(base):
        raise NoSource(
            f"{what} are cast by {describe(base)} between the cache and the product: "
            "keep the cache in the dtype of the query"
        )
    if caches:
        raise NoSource(f"{describe(base)} between the cache and the {what} is not understood")
    for node in near:
        if op_name(node) == "linear" and isinstance(node.args[0], fx.Node):
            behind = upwards(node, lambda item: op_name(item) in _REARRANGING - {"add", "mul"})
            if any(_is_cache(item) for item in behind):
                raise NoSource(
                    f"{what} are projected from cached latents by {describe(node)} "
                    "(multi-head latent attention): not supported yet"
                )


def _writes(node: fx.Node) -> list[fx.Node]:
    """Calls that write to a node or directly to a view of it."""
    if mutates(node):
        return [node]
    found = []
    for user in node.users:
        if node in mutates(user):
            found.append(user)
        elif op_name(user) in ("getitem", "transpose", "view", "narrow", "select"):
            found.extend(later for later in user.users if user in mutates(later))
    return found


def _is_cache(node: fx.Node) -> bool:
    """A TieredCache result, or ``cat(past, new)`` with a past as functional caches have it."""
    if _update_of(node) is not None:
        return True
    if op_name(node) != "cat":
        return False
    bound = bind(node, "tensors", "dim") or {}
    parts = bound.get("tensors")
    if not isinstance(parts, (list, tuple)) or len(parts) != 2 or bound.get("dim") in (-1, 3):
        return False
    return isinstance(parts[0], fx.Node) and (_is_past(parts[0]) or _is_empty(parts[0]))


def kv_heads(operand: Operand, query_heads: int, grouped: bool, what: str) -> int:
    """KV heads in the cache, after checking how query heads are spread over them.

    Raises:
        NotMatched: the heads of the product do not follow "query head i uses KV head i // r".
    """
    product = need_tensor(operand.node, what).shape[1]
    stored = need_tensor(operand.base, what).shape[1]
    if not isinstance(product, int) or not isinstance(stored, int):
        raise NotMatched(f"the number of heads of the {what} is not static")
    fits = product in (query_heads, 1) or (grouped and query_heads % max(product, 1) == 0)
    if not fits or stored < 1 or query_heads % stored:
        raise NotMatched(
            f"{query_heads} query heads cannot be spread over {product} heads of the {what}"
        )
    return stored
