# SPDX-License-Identifier: Apache-2.0
"""``kvpass config``: check the options, and say what each is and where it was written."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from kvpass.config import Config
    from kvpass.config.report import OptionRow


def command(
    show: Annotated[bool, typer.Option("--show", help="Print every option.")] = False,
    config: Annotated[
        Path | None,
        typer.Option(help="YAML file of options; default the one that KVPASS_CONFIG names."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print every option as a JSON list.")
    ] = False,
) -> None:
    """Check a YAML file and the KVPASS_ variables; exits with 2 where one does not fit."""
    from kvpass.config import Config
    from kvpass.config.report import report
    from kvpass.runtime.tiers import check_hot

    options = Config.load(config)
    check_hot(options.memory.hot)
    if not show and not as_json:
        count = sum(options.written(option) is not None for option in options.flat())
        print(f"valid: {count} option{'s' * (count != 1)} set; --show prints all of them")
        return
    rows = report(options, resolve_auto(options))
    if as_json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
    else:
        _print_table(rows)


def resolve_auto(config: Config) -> dict[str, int | str]:
    """Return what ``auto`` becomes on this machine now, by full name; sizes are bytes.

    Raises:
        OSError: the free space of the cold tier's directory cannot be read.
    """
    import torch

    from kvpass.backends import resolve_inner
    from kvpass.runtime.memory import auto_cold_bytes, auto_hot_bytes

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    memory = config.memory
    directory = None if memory.cold_dir is None else str(memory.cold_dir)
    found: dict[str, int | str] = {}
    if memory.hot == "auto":
        found["memory.hot"] = auto_hot_bytes(device)
    if memory.cold == "auto":
        found["memory.cold"] = auto_cold_bytes(device, directory)
    if config.inner == "auto":
        found["inner"] = resolve_inner("auto", device.type == "cuda")
    return found


def _print_table(rows: list[OptionRow]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table("option", "value", "from", "meaning", show_lines=False)
    table.columns[0].no_wrap = True
    table.columns[2].overflow = "fold"
    for row in rows:
        table.add_row(*map(escape, (row.option, row.text, row.source, row.meaning)))
    Console().print(table)
