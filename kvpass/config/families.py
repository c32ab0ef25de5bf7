# SPDX-License-Identifier: Apache-2.0
"""Options of model families, and the tile of attention kernels that they lead to."""

from __future__ import annotations

import re
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict, Field

from kvpass.config.expressions import Expression
from kvpass.config.values import Distance, ExpressionOrNone, Tile
from kvpass.errors import ConfigError

DEFAULT = "default"
"""The section of all families that have none of their own."""
SMALLEST_TILE, LARGEST_TILE = 16, 128
WIDE = 2048
"""Hidden size from which ``auto`` takes the larger tile."""
_FAMILY = re.compile(r"[a-z][a-z0-9_]*", re.ASCII)


class FamilyConfig(BaseModel):
    """Options of one model family; one that is unset is that of ``default``, or the runtime's."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    block_size: Tile = Field(
        None,
        description="Tile of the attention kernels, [queries, keys], or 'auto' by hidden size and "
        "experts; unset is what was measured to be best.",
    )
    prefetch_distance: Distance = Field(
        None, description="Cold blocks ahead of the one in use that a step reads (on a CPU)."
    )
    retention_priority: ExpressionOrNone = Field(
        None,
        description="Expression over layer_depth, layer and layers; blocks of layers with a higher "
        "value are kept in the hot tier longer, 1 as with twice the accesses.",
    )


@dataclass(frozen=True)
class ResolvedFamily:
    """What holds for one model.

    Attributes:
        family: ``model_type`` of the model.
        tile: queries and keys of a kernel's tile; None leaves it to the measured tables.
        tile_note: in words, where the tile comes from and what it was rounded from.
        prefetch_distance: cold blocks, or None for the runtime's own choice.
        retention_priority: expression by layer, or None for none.
    """

    family: str
    tile: tuple[int, int] | None = None
    tile_note: str = "measured tables"
    prefetch_distance: int | None = None
    retention_priority: Expression | None = None


def family_name(name: str) -> str:
    """Return the name of a family's section: lower case, ``-`` as ``_``, without ``_text``.

    Raises:
        ConfigError: it cannot be the ``model_type`` of a model.
    """
    plain = name.strip().lower().replace("-", "_").removesuffix("_text")
    if not _FAMILY.fullmatch(plain):
        raise ConfigError(
            f"optimizations.{name}: {name!r} is no model_type; write one as llama, qwen2 or "
            "mixtral, or default"
        )
    return plain


def rounded(size: int) -> int:
    """Return the largest power of two that kernels run (16 to 128) and ``size`` reaches."""
    return max(SMALLEST_TILE, min(LARGEST_TILE, 1 << (size.bit_length() - 1)))


def describe_tile(tile: tuple[int, int]) -> str:
    """Say what a tile as given runs as: ``[96, 96], runs as [64, 64]``."""
    runs = [rounded(side) for side in tile]
    given = f"[{tile[0]}, {tile[1]}]"
    return given if list(tile) == runs else f"{given}, runs as {runs}"


def resolve(
    family: str,
    own: FamilyConfig | None,
    shared: FamilyConfig | None,
    *,
    hidden_size: int | None,
    experts: int | None,
) -> ResolvedFamily:
    """Combine a family's section with ``default``, option by option.

    Args:
        family: ``model_type``.
        own: section of the family.
        shared: section ``default``.
        hidden_size: width of the model.
        experts: experts of a mixture; None, 0 or 1 is a dense model.

    Raises:
        ConfigError: the tile is ``auto`` and the hidden size of a dense model is not given.
    """
    both = combined(own, shared)
    tile, note = _resolve_tile(family, both.block_size, hidden_size, experts)
    return ResolvedFamily(family, tile, note, both.prefetch_distance, both.retention_priority)


def combined(own: FamilyConfig | None, shared: FamilyConfig | None) -> FamilyConfig:
    """The options of a family's section, each that it does not set from ``default``."""
    values: dict[str, object] = {}
    for section in (shared, own):
        values |= {name: value for name, value in section or () if value is not None}
    return FamilyConfig.model_construct(**values)  # type: ignore[arg-type]


def _resolve_tile(
    family: str, tile: object, hidden_size: int | None, experts: int | None
) -> tuple[tuple[int, int] | None, str]:
    if tile is None:
        return None, "measured tables"
    if isinstance(tile, tuple):
        return (rounded(tile[0]), rounded(tile[1])), describe_tile(tile)
    if experts is not None and experts > 1:
        return (32, 32), f"auto: {experts} experts"
    if hidden_size is None or hidden_size < 1:
        raise ConfigError(
            f"optimizations.{family}.block_size = 'auto' needs the hidden size of the model, which "
            "a TieredCache made with the model's config knows, and a compiled graph does not: "
            "write the tile as [64, 64]"
        )
    side = 128 if hidden_size >= WIDE else 64
    return (side, side), f"auto: dense, hidden size {hidden_size}"
