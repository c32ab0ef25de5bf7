# SPDX-License-Identifier: Apache-2.0
"""What every option is in force, where that was written, and what it means."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvpass.config.families import DEFAULT, FamilyConfig, describe_tile, rounded
from kvpass.config.model import GROUPS, Config
from kvpass.config.sources import FAMILIES
from kvpass.config.values import Duration
from kvpass.sizes import format_size

HEAD_SIZES = (64, 128, 256)
"""For which it is said what a tile runs as, with 16-bit numbers."""
SIZES = frozenset({"memory.hot", "memory.cold", "memory.page_size"})


@dataclass(frozen=True)
class OptionRow:
    """One option of a report.

    Attributes:
        option: full name.
        value: in force, as plain data: bytes, seconds, a list of two for a tile; ``auto`` where
            it cannot be resolved here.
        text: the value in words.
        source: ``default``, ``kvpass.yaml:3``, ``variable KVPASS_HOT``, ``keyword argument``.
        meaning: what the option does.
    """

    option: str
    value: Any
    text: str
    source: str
    meaning: str


def report(config: Config, resolved: Mapping[str, int | str] | None = None) -> list[OptionRow]:
    """Return a row for every option, and for each one that a model family sets.

    Args:
        config: the options.
        resolved: by full name, what ``auto`` became on this machine.
    """
    resolved = resolved or {}
    return [
        _row(config, option, value, resolved.get(option)) for option, value in config.flat().items()
    ]


def _row(config: Config, option: str, value: Any, became: int | str | None) -> OptionRow:
    written = config.written(option)
    source = "default" if written is None else written.origin
    if value == "auto" and became is not None:
        # What is free now is nothing to write down exactly; the report as data has the bytes.
        text = format_size(became) if isinstance(became, int) else became
        return OptionRow(option, became, f"auto: {text}", source, _meaning(option))
    return OptionRow(option, _plain(value), _text(option, value), source, _meaning(option))


def _meaning(option: str) -> str:
    group, _, name = option.rpartition(".")
    model: Any = GROUPS.get(group, FamilyConfig if group.startswith(FAMILIES) else Config)
    text = model.model_fields[name].description
    assert text is not None
    if group == f"{FAMILIES}.{DEFAULT}":
        return f"{text} For families without their own."
    return str(text)


def _text(option: str, value: Any) -> str:
    if option in SIZES and isinstance(value, int):
        return f"{format_size(value)} ({value} bytes)"
    if option.startswith(FAMILIES) and option.endswith(".block_size"):
        return "auto: by hidden size and experts" if value == "auto" else _tile(value)
    if value is None:
        return "unset"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _tile(tile: tuple[int, int]) -> str:
    """What a tile runs as, and where less of it fits a GPU."""
    import torch

    from triton_ops.config import extend_config

    runs = (rounded(tile[0]), rounded(tile[1]))
    found = [describe_tile(tile)]
    for size in HEAD_SIZES:
        # Many rows and no mask: the largest tile that the kernel runs.
        cut = extend_config(torch.bfloat16, torch.bfloat16, size, size, 1 << 20, False, runs)
        if (cut.block_m, cut.block_n) != runs:
            found.append(f"on a GPU at head size {size} [{cut.block_m}, {cut.block_n}]")
    return ", ".join(found)


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return list(value)
    if isinstance(value, Duration):
        return float(value)
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)
