# SPDX-License-Identifier: Apache-2.0
"""From the K and V operands of an attention back to the cache that they come from."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import fx

from kvpass.graph.operands import Operand
from kvpass.graph.site import CacheForm, CacheSource, MaskSpec, tokens_axis
from kvpass.graph.sizes import proven, same, settled
from kvpass.graph.walk import (
    NotMatched,
    bind,
    constant_int,
    describe,
    is_cast,
    is_written,
    mutates,
    need_tensor,
    op_name,
    scalar_of,
    shape_of,
    tensor_of,
    upwards,
)
from kvpass.runtime.handle import KVHandle

NO_CACHE = "no KV cache: left to the inner compiler"


class NoSource(NotMatched):
    """No supported cache behind the operands; ``form`` is "none" when there is no cache at all."""

    def __init__(self, reason: str, form: CacheForm | None = None) -> None:
        super().__init__(reason)
        self.form = form


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
        if keys.tokens_first or values.tokens_first:
            raise NoSource("the attention takes the tokens of a TieredCache for its heads")
        return _tiered(k, v, update, live)
    joined = op_name(k) == "cat" and op_name(v) == "cat"
    read = is_handle(k) and is_handle(v)
    if (joined or read) and keys.tokens_first != values.tokens_first:
        raise NoSource("keys and values lie in different orders of heads and tokens")
    if joined:
        return _functional(k, v, live, keys.tokens_first)
    if read:
        return _read(k, v, keys.tokens_first)
    for operand, what in ((keys, "keys"), (values, "values")):
        _explain(operand, what)
    raise NoSource(NO_CACHE, "none")


def is_source(operand: Operand) -> bool:
    """Whether the base may be all keys or values of a cache that is no static buffer."""
    base = operand.base
    if is_handle(base) or _update_of(base) is not None:
        return True
    try:
        return op_name(base) == "cat" and bool(_cat_parts(base, tokens_axis(operand.tokens_first)))
    except NoSource:
        return False


def is_update(node: object) -> bool:
    """Whether the node is a ``kvpass.cache_update`` call."""
    return _is_op(node, "cache_update")


def is_read(node: object) -> bool:
    """Whether the node is a ``kvpass.cache_read`` call."""
    return _is_op(node, "cache_read")


def _is_op(node: object, name: str) -> bool:
    if not isinstance(node, fx.Node) or node.op != "call_function":
        return False
    return str(node.target) in (f"kvpass.{name}.default", f"kvpass.{name}")


def address(update: fx.Node) -> tuple[fx.Node, int, int]:
    """Handle, layer and block size of a TieredCache update or read."""
    first = 0 if is_read(update) else 2
    handle, layer = update.args[first : first + 2]
    assert isinstance(handle, fx.Node)
    return handle, constant_int(layer), constant_int(update.args[9 if is_read(update) else 5])


def tile_of(update: fx.Node) -> tuple[int, int] | None:
    """Queries and keys of a tile that a TieredCache asks for; None: the measured ones."""
    given = update.args[10 if is_read(update) else 6 :]
    if not given or given[0] is None:
        return None
    assert isinstance(given[0], (list, tuple))
    rows, columns = map(constant_int, given[0])
    return rows, columns


def is_handle(node: fx.Node) -> bool:
    """Whether a node is an input that stands for the keys or values of an earlier graph."""
    return node.op == "placeholder" and isinstance(tensor_of(node), KVHandle)


def _read(k: fx.Node, v: fx.Node, tokens_first: bool) -> CacheSource:
    if is_written(k) or is_written(v):
        raise NoSource("the cached keys or values are written in place")
    return CacheSource("read", k, v, past_k=k, past_v=v, tokens_first=tokens_first)


def _update_of(node: fx.Node) -> fx.Node | None:
    if op_name(node) != "getitem":
        return None
    source = node.args[0]
    return (
        source if isinstance(source, fx.Node) and (is_update(source) or is_read(source)) else None
    )


def _tiered(k: fx.Node, v: fx.Node, update: fx.Node | None, live: set[fx.Node]) -> CacheSource:
    other = _update_of(v)
    if update is None or other is None:
        raise NoSource("keys and values do not come from the same TieredCache update")
    if (k.args[1], v.args[1]) != (0, 1):
        raise NoSource("keys and values of the TieredCache update are swapped")
    if is_read(update) and is_read(other):
        # Keys and values are asked for one after the other.
        if update.args != other.args:
            raise NoSource("keys and values are read from different layers of a TieredCache")
        return CacheSource("tiered", k, v, update=update)
    if other is not update:
        raise NoSource("keys and values do not come from the same TieredCache update")
    others = [user for user in update.users if user in live and user not in (k, v)]
    if others:
        raise NoSource(f"the TieredCache update is also used by {describe(others[0])}")
    bound = bind(update, "k", "v", "handle", "layer", "past", "block_size", "tile")
    new_k = bound.get("k") if bound else None
    new_v = bound.get("v") if bound else None
    if not isinstance(new_k, fx.Node) or not isinstance(new_v, fx.Node):
        raise NoSource("the arguments of the TieredCache update cannot be read")
    return CacheSource("tiered", k, v, k_new=new_k, v_new=new_v, update=update)


def _cat_parts(node: fx.Node, axis: int) -> tuple[fx.Node, fx.Node]:
    """Past and new tokens of ``cat((past, new))`` along the axis of tokens."""
    bound = bind(node, "tensors", "dim") or bind(node, "tensors", "axis") or {}
    parts, dim = bound.get("tensors"), bound.get("dim", bound.get("axis", 0))
    if not isinstance(parts, (list, tuple)) or len(parts) != 2 or dim not in (axis, axis - 4):
        raise NoSource(NO_CACHE, "none")
    past, new = parts
    if not isinstance(past, fx.Node) or not isinstance(new, fx.Node):
        raise NoSource(NO_CACHE, "none")
    if past is new:
        raise NoSource("the past is concatenated with itself")
    return past, new


def _is_past(node: fx.Node) -> bool:
    return node.op == "placeholder" and tensor_of(node) is not None


def _uncast(node: fx.Node) -> fx.Node:
    while is_cast(node) and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


def _is_empty(node: fx.Node, axis: int) -> bool:
    """An empty tensor made in the graph: ``torch.tensor([])`` or size zero on the token axis."""
    if op_name(node) not in ("tensor", "empty", "zeros", "new_empty", "new_zeros"):
        return False
    shape = shape_of(node)
    if shape is None:
        return False
    if len(shape) == 1:
        return proven(shape[0] == 0)
    return len(shape) == 4 and proven(shape[axis] == 0)


def _functional(k: fx.Node, v: fx.Node, live: set[fx.Node], tokens_first: bool) -> CacheSource:
    axis = tokens_axis(tokens_first)
    (past_k, new_k), (past_v, new_v) = _cat_parts(k, axis), _cat_parts(v, axis)
    for past, what in ((past_k, "keys"), (past_v, "values")):
        if is_cast(past) and _is_past(_uncast(past)):
            raise NoSource(
                f"the past {what} are cast by {describe(past)} before new ones are added: keep the "
                "cache in the dtype of the new tokens"
            )
    stored_k, keep = _stored(k, axis)
    stored_v, keep_v = _stored(v, axis)
    if keep != keep_v:
        raise NoSource(f"keys and values keep different numbers of tokens: {keep} and {keep_v}")
    source = CacheSource(
        "functional", k, v, k_new=new_k, v_new=new_v, stored_k=stored_k, stored_v=stored_v,
        keep=keep, tokens_first=tokens_first,
    )  # fmt: skip
    empty_k, empty_v = _is_empty(past_k, axis), _is_empty(past_v, axis)
    if empty_k and empty_v:
        return source
    if _is_past(past_k) and _is_past(past_v):
        if past_k is past_v:
            raise NoSource("keys and values share one past tensor")
        for past, cat in ((past_k, k), (past_v, v)):
            others = [user for user in past.users if user in live and user is not cat]
            if others:
                raise NoSource(
                    f"the past {past.name} is also used by {describe(others[0])}: "
                    "a cache that something else reads cannot be replaced"
                )
        return replace(source, past_k=past_k, past_v=past_v)
    if not any((empty_k, _is_past(past_k), empty_v, _is_past(past_v))):
        raise NoSource(NO_CACHE, "none")
    raise NoSource("keys and values are cached in different ways")


def _stored(cat: fx.Node, axis: int) -> tuple[fx.Node, int]:
    """What the graph returns of a grown cache, and the tokens it keeps (0: all)."""
    if _returned(cat):
        return cat, 0
    for user in cat.users:
        if op_name(user) != "getitem" or not _returned(user):
            continue
        keep = last_tokens(user.args[1], axis)
        if keep is None:
            raise NoSource(f"a slice of the grown cache is returned ({user.name}) and not read")
        return user, keep
    raise NoSource(f"the grown cache {cat.name} is not returned by the graph")


def last_tokens(index: object, axis: int) -> int | None:
    """``k`` of the index ``[:, :, -k:, :]``, or of ``[:, -k:]`` where tokens are on axis 1."""
    whole = slice(None, None, None)
    if not isinstance(index, tuple) or not axis < len(index) <= 4:
        return None
    if any(item != whole for i, item in enumerate(index) if i != axis):
        return None
    tokens = index[axis]
    if not isinstance(tokens, slice) or tokens.stop is not None or tokens.step not in (None, 1):
        return None
    start = scalar_of(tokens.start)
    known = None if start is None else settled(start)
    return -known if known is not None and known < 0 else None


def _returned(node: fx.Node) -> bool:
    return any(user.op == "output" for user in node.users)


def check_new(source: CacheSource, query: fx.Node) -> None:
    """The new keys and values are alike.

    Raises:
        NoSource: they are not.
    """
    q = need_tensor(query, "the query").shape
    if source.k_new is None:
        return
    k = need_tensor(source.k_new, "the new keys").shape
    v = need_tensor(source.v_new, "the new values").shape
    if len(k) != 4 or len(v) != 4 or len(q) != 4:
        raise NoSource("queries, keys and values must be [batch, heads, tokens, head_dim]")
    if not all(same(k[i], v[i]) for i in range(3)):
        raise NoSource(
            f"new keys {tuple(k)} and values {tuple(v)} differ in batch, heads or tokens"
        )


def placed_mask(source: CacheSource, query: torch.Tensor, mask: MaskSpec) -> MaskSpec:
    """What a mask for queries ``[B, Hq, n, D]`` means with the positions of the cache's tokens.

    Raises:
        NoSource: it is not.
    """
    queries = query.shape[2]
    axis = tokens_axis(source.tokens_first)
    if mask.causal and (
        source.k_new is None or not same(need_tensor(source.k_new, "keys").shape[axis], queries)
    ):
        raise NoSource("the mask is causal, but there is not one new key for each query")
    if source.fills_buffer and not (mask.causal or mask.terms):
        raise NoSource(
            "the mask is not causal, and the attention reads a static buffer as far as it is not "
            "filled"
        )
    if source.form == "static" and source.keep:
        return _in_buffer(source, mask)
    if source.keep:
        shown = mask.window or mask.chunk
        keys = source.shapes[0][2]
        if not shown and mask.causal and proven(keys <= source.keep + 1):
            mask = replace(mask, window=source.keep + 1)  # all tokens that are kept, no older ones
            shown = mask.window
        if not 0 < shown <= source.keep + 1:
            raise NoSource(
                f"the cache keeps {source.keep} tokens, the mask shows "
                f"{shown or 'all of them'}: a shortened cache needs a window that fits"
            )
        past = shape_of(source.past_k)
        whole = past is None or proven(past[axis] < source.keep)
        if mask.terms and not whole:
            raise NoSource(
                "a mask over a cache that keeps a window of tokens counts from the first one that "
                "is kept: pass a TieredCache, which keeps positions"
            )
    return mask


def _in_buffer(source: CacheSource, mask: MaskSpec) -> MaskSpec:
    """A mask over a buffer that keeps the last ``capacity`` tokens, all of them seen at most.

    Raises:
        NoSource: it shows others.
    """
    shown = mask.window
    if mask.chunk:
        raise NoSource(
            "a mask in chunks over a buffer that keeps the last tokens: pass a TieredCache, which "
            "keeps positions"
        )
    if source.position is not None and same(source.position, 0):
        return mask  # nothing is in the buffer yet: keys are the new ones
    if source.write == "roll":
        shown = shown or source.keep
        # The only query is the last token; the runtime finds whether a mask hides anything.
        mask = replace(mask, causal=True, terms=())
    if not mask.causal or not 0 < shown <= source.keep:
        raise NoSource(
            f"the buffer keeps {source.capacity} tokens, the mask shows {shown or 'all of them'}: "
            "a window that fits is needed"
        )
    if mask.terms or mask.kv_mask is not None:
        raise NoSource(
            "a mask over a buffer that keeps the last tokens counts from the first one that is "
            "kept: pass a TieredCache, which keeps positions"
        )
    return replace(mask, window=shown)


# fmt: off
_REARRANGING = frozenset((
    "add", "bfloat16", "cat", "chunk", "contiguous", "div", "double", "expand", "flatten", "float",
    "function normalize", "getitem", "half", "index_select", "mul", "narrow", "neg", "permute",
    "repeat", "repeat_interleave", "reshape", "roll", "select", "split", "squeeze", "to",
    "transpose", "type", "type_as", "unflatten", "unsqueeze", "view",
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
            f"{what} are kept in a static buffer written by {describe(writes[0])}, and reach the "
            "attention in a way that is not understood: use a DynamicCache or TieredCache"
        )
    if base.op in ("placeholder", "get_attr"):
        raise NoSource(
            f"{what} are the read-only input {base.name}, a dense tensor: only what a rewritten "
            "graph has cached is in the tiers (code outside has made, reordered or copied it)"
        )
    caches = [node for node in near if node is not base and _is_cache(node)]
    if caches and op_name(base) == "getitem":
        raise NoSource(
            f"{what} are a slice of the cache ({describe(base)}): only whole caches are read. "
            "transformers cuts keys to the number of queries where a causal layer gets no mask: "
            "pass the model its masks, such as cross_attention_mask"
        )
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
    if not isinstance(parts[0], fx.Node):
        return False
    first = _uncast(parts[0])
    return _is_past(first) or _is_empty(first, 2) or _is_empty(first, 1)
