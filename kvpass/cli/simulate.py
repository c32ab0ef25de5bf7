# SPDX-License-Identifier: Apache-2.0
"""``kvpass simulate``: recorded traces against replacement policies."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from kvpass.runtime.simulate import Comparison
    from kvpass.runtime.trace import Trace


def command(
    traces: Annotated[
        list[Path], typer.Argument(metavar="TRACE...", help="Files of generate --record-trace.")
    ],
    hot: Annotated[
        list[str] | None,
        typer.Option(help="Hot size: a share of the blocks, 25%, or 64MiB; may be repeated."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Replay traces with LRU, LFU, ARC, LRU-2, kvpass's policy and the clairvoyant optimum.

    A request is a block that attention accessed in a step, and hits if the block is hot. Classic
    policies promote on every miss; kvpass decides at the ends of windows. Options of the policy
    come from KVPASS_ variables, as in the runtime; hot is 25% and 50% unless given.
    """
    import json
    from dataclasses import asdict

    from kvpass.config import Config
    from kvpass.errors import ConfigError
    from kvpass.runtime.simulate import compare, hot_slots
    from kvpass.runtime.trace import load_trace

    for path in traces:
        if not path.is_file():
            raise ConfigError(f"TRACE {str(path)!r}: no such file; check the path")
    memory = Config.load().memory
    loaded = [load_trace(path) for path in traces]
    sizes = hot or ["25%", "50%"]
    for trace in loaded:
        for size in sizes:
            hot_slots(size, trace)
    results = []
    for path, trace in zip(traces, loaded, strict=True):
        comparisons = [compare(trace, size, memory) for size in sizes]
        if not as_json:
            _print(path, trace, comparisons)
        results.append(
            {
                "trace": path.name,
                "model": trace.model,
                "block_size": trace.block_size,
                "prompt_tokens": trace.prompt_tokens,
                "tokens": trace.tokens,
                "sizes": [asdict(comparison) for comparison in comparisons],
            }
        )
    if as_json:
        typer.echo(json.dumps(results, indent=2))


def _print(path: Path, trace: Trace, comparisons: list[Comparison]) -> None:
    from rich.console import Console
    from rich.table import Table

    first = comparisons[0]
    table = Table(
        title=f"{path.name}: {trace.model}, {trace.tokens} tokens ({trace.prompt_tokens} of them "
        f"the prompt), {first.blocks} blocks of {trace.block_size}, {first.requests} requests",
        title_justify="left",
    )
    table.add_column("policy")
    for comparison in comparisons:
        table.add_column(f"hit ratio\n{comparison.hot} ({comparison.slots})", justify="right")
        table.add_column("gap to\nBelady", justify="right")
        table.add_column("moves", justify="right")
    for rows in zip(*(comparison.rows for comparison in comparisons), strict=True):
        cells = [
            cell
            for row in rows
            for cell in (
                f"{row.hit_ratio:.2%}",
                f"{row.gap:.2%}",
                "" if row.moves is None else str(row.moves),
            )
        ]
        table.add_row(rows[0].policy, *cells)
    Console().print(table)
