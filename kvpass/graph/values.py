# SPDX-License-Identifier: Apache-2.0
"""Abstract values of mask expressions: indices along an axis, and where a tensor is nonzero.

Axes are counted from the right (-1 = last), as broadcasting does, so that it moves none of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx

from kvpass.graph.sizes import Size, same

LARGEST = 1 << 40
"""Numbers below it may be added to positions, which are far smaller, and never wrap in int64."""


def fits(number: int, tensor: torch.Tensor | None) -> bool:
    """Whether positions plus a number cannot wrap in the dtype of an integer tensor."""
    wide = tensor is not None and tensor.dtype == torch.int64
    return abs(number) < (LARGEST if wide else 1 << 29)


@dataclass(frozen=True)
class Index:
    """Integer tensor whose value is the position along ``axis`` plus ``offset``."""

    axis: int | None
    offset: Size
    extent: Size


@dataclass(frozen=True)
class Floor:
    """Integer tensor ``floor(index / divisor)``, below zero too."""

    index: Index
    divisor: int


@dataclass(frozen=True)
class Const:
    """Tensor with one value everywhere."""

    value: float


@dataclass(frozen=True)
class Bound:
    """Visible where key position j <= query position i + ``shift``; ``lower``: where j > that."""

    k_axis: int
    q_axis: int | None
    shift: Size
    k_extent: Size
    q_extent: Size
    lower: bool = False


@dataclass(frozen=True)
class Pad:
    """Visible where ``node``[b, j + ``offset``], a bool tensor [B, keys]."""

    node: fx.Node
    b_axis: int
    k_axis: int
    b_extent: Size
    k_extent: Size
    offset: Size = 0


@dataclass(frozen=True)
class Chunk:
    """Visible where floor((j + ``k_offset``) / size) == floor((i + ``q_offset``) / size)."""

    size: int
    k_axis: int
    q_axis: int
    k_offset: Size
    q_offset: Size
    k_extent: Size
    q_extent: Size


@dataclass(frozen=True)
class Keep:
    """Tensor that is nonzero exactly where all its parts allow (or not, if negated)."""

    bounds: tuple[Bound, ...] = ()
    pads: tuple[Pad, ...] = ()
    negated: bool = False
    chunks: tuple[Chunk, ...] = ()

    @property
    def everywhere(self) -> bool:
        """Whether nothing is hidden."""
        return not (self.bounds or self.pads or self.chunks or self.negated)

    def inverted(self) -> Keep:
        """Nonzero exactly where this is zero."""
        if len(self.bounds) == 1 and not (self.pads or self.chunks or self.negated):
            (bound,) = self.bounds
            return Keep((replace(bound, lower=not bound.lower),))
        return replace(self, negated=not self.negated)


@dataclass(frozen=True)
class Bias:
    """Float tensor that is 0 where ``keep`` holds and ``hidden`` elsewhere."""

    keep: Keep
    hidden: float


Value = Index | Floor | Const | Keep | Bias


def below(small: Index, large: Index, negated: bool) -> Keep | None:
    """Where ``small <= large`` if one is the key index (axis -1 side) and the other is not.

    With the key index on the large side the comparison is turned: i <= j is not (j <= i - 1).
    """
    if small.axis is None and large.axis is None:
        return None
    if small.axis is not None and (large.axis is None or small.axis > large.axis):
        shift = large.offset - small.offset
        bound = Bound(small.axis, large.axis, shift, small.extent, large.extent, lower=negated)
        return Keep(bounds=(bound,))
    if large.axis is not None and (small.axis is None or large.axis > small.axis):
        # small + i <= large + j  <=>  not (j <= i + small - large - 1)
        shift = small.offset - large.offset - 1
        bound = Bound(large.axis, small.axis, shift, large.extent, small.extent, lower=not negated)
        return Keep(bounds=(bound,))
    return None


def same_chunk(a: Floor, b: Floor) -> Keep | None:
    """Where two of them are equal, along two axes; the one further right is that of the keys."""
    if a.divisor != b.divisor or a.index.axis is None or b.index.axis is None:
        return None
    if a.index.axis == b.index.axis:
        return None
    k, q = (a.index, b.index) if a.index.axis > b.index.axis else (b.index, a.index)
    assert k.axis is not None and q.axis is not None
    chunk = Chunk(a.divisor, k.axis, q.axis, k.offset, q.offset, k.extent, q.extent)
    return Keep(chunks=(chunk,))


def move(
    value: Value, before: Sequence[Size], after: Sequence[Size], axes: Sequence[int | None]
) -> Value | None:
    """The value of a tensor of shape ``after`` whose axis i is axis ``axes[i]`` of ``before``.

    None in ``axes`` is an inserted axis. An axis may have been cut to its first entries.
    """
    place: dict[int, int] = {}
    size: dict[int, Size] = {}
    for position, axis in enumerate(axes):
        if axis is not None:
            place[axis - len(before)] = position - len(axes)
            size[axis - len(before)] = after[position]

    def extent(axis: int, old: Size) -> Size:
        if same(size[axis], before[axis]):
            return old
        # A cut of an axis that was broadcast cannot be told from one that was not: give up.
        return size[axis] if same(old, before[axis]) else -1

    if isinstance(value, Const):
        return value
    if isinstance(value, Floor):
        inner = move(value.index, before, after, axes)
        return replace(value, index=inner) if isinstance(inner, Index) else None
    if isinstance(value, Index):
        if value.axis is None:
            return value
        if value.axis not in place:
            return None
        return replace(value, axis=place[value.axis], extent=extent(value.axis, value.extent))
    keep = value.keep if isinstance(value, Bias) else value
    used = [bound.k_axis for bound in keep.bounds] + [pad.k_axis for pad in keep.pads]
    used += [bound.q_axis for bound in keep.bounds if bound.q_axis is not None]
    used += [pad.b_axis for pad in keep.pads]
    used += [axis for chunk in keep.chunks for axis in (chunk.k_axis, chunk.q_axis)]
    if any(axis not in place for axis in used):
        return None
    bounds = tuple(_move_bound(bound, place, extent) for bound in keep.bounds)
    pads = tuple(
        replace(
            pad,
            b_axis=place[pad.b_axis],
            k_axis=place[pad.k_axis],
            b_extent=extent(pad.b_axis, pad.b_extent),
            k_extent=extent(pad.k_axis, pad.k_extent),
        )
        for pad in keep.pads
    )
    chunks = tuple(
        replace(
            chunk,
            k_axis=place[chunk.k_axis],
            q_axis=place[chunk.q_axis],
            k_extent=extent(chunk.k_axis, chunk.k_extent),
            q_extent=extent(chunk.q_axis, chunk.q_extent),
        )
        for chunk in keep.chunks
    )
    moved = replace(keep, bounds=bounds, pads=pads, chunks=chunks)
    return replace(value, keep=moved) if isinstance(value, Bias) else moved


def _move_bound(bound: Bound, place: dict[int, int], extent: Callable[[int, Size], Size]) -> Bound:
    moved = replace(
        bound, k_axis=place[bound.k_axis], k_extent=extent(bound.k_axis, bound.k_extent)
    )
    if bound.q_axis is None:
        return moved
    return replace(moved, q_axis=place[bound.q_axis], q_extent=extent(bound.q_axis, bound.q_extent))
