# SPDX-License-Identifier: Apache-2.0
"""Keys and values that are projected from cached latents: multi-head latent attention.

A token is cached as one latent vector and one rotary key for all heads (DeepSeek-V2,
arXiv:2405.04434). ``keys = [latents @ Wk^T | rotary key]`` and ``values = latents @ Wv^T`` are made
anew of all of them at every step, where ``[Wk; Wv]`` of each head are the rows of one weight.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

from torch import fx

from kvpass.graph.sizes import fixed, same, same_shape
from kvpass.graph.walk import (
    NotMatched,
    bind,
    mutates,
    need_tensor,
    op_name,
    shape_of,
    tensor_of,
    writes_to,
)

_MAKERS = ("new_empty", "empty", "new_zeros", "zeros")


@dataclass(frozen=True)
class Latent:
    """How keys and values of all heads come from what is cached.

    Attributes:
        latents: node ``[B, 1, T, L]``.
        rotary: node ``[B, 1, T, R]``, the last channels of every head's keys.
        weight: node ``[H * (Dn + Dv), L]``; for each head Dn rows for keys, then Dv for values.
        heads: H.
        nope: Dn, channels of a key that come from the latents.
        between: nodes between these and the products.
    """

    latents: fx.Node
    rotary: fx.Node
    weight: fx.Node
    heads: int
    nope: int
    between: tuple[fx.Node, ...]


def read_latent(keys: fx.Node, values: fx.Node, live: set[fx.Node]) -> Latent | None:
    """The latents behind keys ``[B, H, T, Dn + R]`` and values ``[B, H, T, Dv]``.

    Returns:
        None where keys are not put together of a projection and a part that all heads share.

    Raises:
        NotMatched: they are, but not in a way that is understood.
    """
    parts = _joined(keys, live)
    if parts is None:
        return None
    projected, shared, between = parts
    shape = need_tensor(keys, "the keys").shape
    rotary = _shared_by_heads(shared, shape[1], between)
    whole = _piece(projected, between)
    rest = _piece(values, between)
    if rotary is None or whole is None or rest is None or whole[0] is not rest[0]:
        return None
    (source, start, stop), (_, begin, end) = whole, rest
    heads, width = shape[1], need_tensor(source, "the projection").shape[3]
    if not isinstance(heads, int) or not isinstance(width, int):
        return None
    if (start, stop, begin, end) != (0, stop, stop, width):
        raise NotMatched("keys and values are not the two parts of what is projected from latents")
    latents, weight = _projection(source, heads, width, between)
    nodes = (keys, values, projected, shared, *between)
    return Latent(latents, rotary, weight, heads, stop, tuple(dict.fromkeys(nodes)))


def _joined(keys: fx.Node, live: set[fx.Node]) -> tuple[fx.Node, fx.Node, list[fx.Node]] | None:
    """The two parts that keys are made of along the last axis, and the nodes that join them."""
    shape = shape_of(keys)
    if shape is None or len(shape) != 4:
        return None
    if op_name(keys) == "cat":
        bound = bind(keys, "tensors", "dim") or bind(keys, "tensors", "axis") or {}
        parts = bound.get("tensors")
        if bound.get("dim", bound.get("axis")) not in (-1, 3) or not isinstance(
            parts, (list, tuple)
        ):
            return None
        if len(parts) != 2 or not all(isinstance(part, fx.Node) for part in parts):
            return None
        return parts[0], parts[1], []
    if op_name(keys) in _MAKERS:
        return _assembled(keys, live)
    return None


def _assembled(keys: fx.Node, live: set[fx.Node]) -> tuple[fx.Node, fx.Node, list[fx.Node]] | None:
    """Parts that are copied into a tensor made for them, which they fill."""
    width = (shape_of(keys) or (0,))[-1]
    filled: list[tuple[int, int, fx.Node]] = []
    between: list[fx.Node] = []
    for user in keys.users:
        assigns = user.target is operator.setitem
        if user not in live or not (assigns or op_name(user) == "getitem"):
            continue
        place = _last_slice(user.args[1], width)
        copies = [user] if assigns else [later for later in user.users if later in live]
        if place is None or len(copies) != 1:
            return None
        source = user.args[2] if assigns else _copied(copies[0], user)
        part = (*(shape_of(keys) or ())[:3], place[1] - place[0])
        if not isinstance(source, fx.Node) or not same_shape(shape_of(source) or (), part):
            return None
        before, after = tensor_of(source), tensor_of(keys)
        if before is None or after is None or before.dtype != after.dtype:
            return None
        if any(reader in live for reader in copies[0].users):
            return None
        filled.append((*place, source))
        between += dict.fromkeys((user, copies[0]))
    filled.sort(key=lambda item: item[:2])
    writes = {node for node in between if mutates(node)}
    if len(filled) != 2 or writes_to(keys) != writes:
        return None
    (start, middle, first), (also_middle, stop, second) = filled
    if (start, middle, stop) != (0, also_middle, width):
        return None
    order = {node: i for i, node in enumerate(keys.graph.nodes)}
    readers = [user for user in keys.users if user in live and user not in between]
    if any(order[reader] < max(order[write] for write in writes) for reader in readers):
        return None
    return first, second, between


def _copied(node: fx.Node, target: fx.Node) -> fx.Node | None:
    """What ``target.copy_(x)`` copies."""
    if node.op != "call_method" or node.target != "copy_" or node.kwargs or len(node.args) != 2:
        return None
    into, source = node.args
    return source if into is target and isinstance(source, fx.Node) else None


def _last_slice(index: object, width: object) -> tuple[int, int] | None:
    """Start and stop of ``[..., start:stop]``."""
    if not isinstance(index, tuple) or not isinstance(width, int):
        return None
    rest, last = index[:-1], index[-1]
    whole = rest == (Ellipsis,) or (
        len(rest) == 3 and all(item == slice(None, None, None) for item in rest)
    )
    if not whole or not isinstance(last, slice) or last.step not in (None, 1):
        return None
    start, stop = last.start or 0, width if last.stop is None else last.stop
    if not isinstance(start, int) or not isinstance(stop, int):
        return None
    start, stop = (place + width if place < 0 else place for place in (start, stop))
    return (start, stop) if 0 <= start < stop <= width else None


def _shared_by_heads(node: fx.Node, heads: object, between: list[fx.Node]) -> fx.Node | None:
    """``x`` of ``x.expand(B, H, T, R)`` with one head."""
    if op_name(node) not in ("expand", "contiguous") or not isinstance(node.args[0], fx.Node):
        return None
    before, after = shape_of(node.args[0]), shape_of(node)
    if before is None or after is None or len(before) != 4 or len(after) != 4:
        return None
    between.append(node)
    if op_name(node) == "contiguous":
        return _shared_by_heads(node.args[0], heads, between)
    if not same_shape(after, (before[0], heads, *before[2:])) or before[1] != 1:  # type: ignore[arg-type]
        return None
    return node.args[0]


def _piece(node: fx.Node, between: list[fx.Node]) -> tuple[fx.Node, int, int] | None:
    """(x, start, stop) of a part of x along its last axis."""
    if op_name(node) != "getitem" or not isinstance(node.args[0], fx.Node):
        return None
    source, index = node.args[0], node.args[1]
    between.append(node)
    if op_name(source) != "split":
        shape = shape_of(source)
        place = _last_slice(index, shape[-1]) if shape and len(shape) == 4 else None
        return None if place is None else (source, *place)
    bound = bind(source, "tensor", "split_size_or_sections", "dim") or (
        bind(source, "tensor", "split_size", "dim") or {}
    )
    tensor, dim = bound.get("tensor"), bound.get("dim", 0)
    sizes = bound.get("split_size_or_sections", bound.get("split_size"))
    if not isinstance(tensor, fx.Node) or dim not in (-1, 3) or not isinstance(index, int):
        return None
    if not isinstance(sizes, (list, tuple)) or not all(isinstance(size, int) for size in sizes):
        return None
    between.append(source)
    index %= len(sizes)
    start = sum(sizes[:index])
    return tensor, start, start + sizes[index]


def _projection(
    node: fx.Node, heads: int, width: int, between: list[fx.Node]
) -> tuple[fx.Node, fx.Node]:
    """(latents, weight) of ``linear(latents, weight).view(B, T, H, width).transpose(1, 2)``.

    Raises:
        NotMatched: the part is something else.
    """
    unknown = NotMatched(
        f"how keys and values reach {node.name} from what is cached is not understood"
    )
    bound = bind(node, "input", "dim0", "dim1") if op_name(node) == "transpose" else None
    view = bound.get("input") if bound else None
    if bound is None or not isinstance(view, fx.Node) or op_name(view) not in ("view", "reshape"):
        raise unknown
    if {bound.get("dim0"), bound.get("dim1")} not in ({1, 2}, {-3, -2}, {1, -2}, {-3, 2}):
        raise unknown
    linear = view.args[0]
    parts = bind(linear, "input", "weight", "bias") if isinstance(linear, fx.Node) else None
    if not isinstance(linear, fx.Node) or op_name(linear) != "linear" or parts is None:
        raise unknown
    if parts.get("bias") is not None:
        raise NotMatched("the projection of the latents has a bias: not supported")
    latents, weight = parts.get("input"), parts.get("weight")
    before, matrix, shape = shape_of(latents), shape_of(weight), shape_of(view)
    if not isinstance(latents, fx.Node) or not isinstance(weight, fx.Node):
        raise unknown
    if before is None or matrix is None or len(before) != 4 or not same(before[1], 1):
        raise unknown
    if not same_shape(shape or (), (before[0], before[2], heads, width)):
        raise unknown
    if [fixed(size) for size in matrix] != [heads * width, fixed(before[3])]:
        raise unknown
    between += [node, view, linear]
    return latents, weight
