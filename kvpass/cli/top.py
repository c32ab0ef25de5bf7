# SPDX-License-Identifier: Apache-2.0
"""``kvpass top``: the tiers of a running process, drawn anew every second."""

from __future__ import annotations

import contextlib
import time
from typing import Annotated

import typer
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table

from kvpass import health
from kvpass.errors import MetricsError
from kvpass.metrics import client
from kvpass.metrics.page import Page
from kvpass.runtime.metrics import Snapshot
from kvpass.sizes import format_size, parse_seconds

MOST_SEQUENCES = 12


def command(
    port: Annotated[int, typer.Option(help="Port of the running process.")] = 9464,
    host: Annotated[str, typer.Option(help="Its address.")] = "127.0.0.1",
    interval: Annotated[str, typer.Option(help="Time between two frames, e.g. 1s or 500ms.")] = (
        "1s"
    ),
    once: Annotated[
        bool, typer.Option("--once", help="Print one frame, of one interval, and end.")
    ] = False,
) -> None:
    """Watch the tiers of a process that runs kvpass.serve_metrics, or --metrics-port.

    Ends with the process, or with Ctrl-C.
    """
    from rich.console import Console
    from rich.live import Live

    seconds = parse_seconds(interval, "--interval")
    console = Console()
    before = client.fetch_page(port, host)
    with contextlib.suppress(KeyboardInterrupt):
        if once:
            time.sleep(seconds)
            console.print(frame(before, client.fetch_page(port, host)))
            return
        ended = ""
        with Live(frame(before, before), console=console, auto_refresh=False) as live:
            while not ended:
                time.sleep(seconds)
                try:
                    page = client.fetch_page(port, host)
                except MetricsError:
                    ended = f"process {before.process} does not answer any more"
                else:
                    live.update(frame(before, page), refresh=True)
                    before = page
        console.print(ended)


def frame(before: Page, after: Page) -> RenderableType:
    """One frame.

    Args:
        before: the last page, for rates; of another process: no rates.
        after: what to show.
    """
    title = (
        f"kvpass {after.version}, process {after.process}, host memory "
        f"{format_size(after.host_memory)}"
    )
    known = {s.manager: s for s in before.managers} if before.process == after.process else {}
    parts: list[RenderableType] = [
        Panel(_cache(known.get(s.manager), s), title=f"cache {s.manager} on {s.device}")
        for s in after.managers
    ]
    return Group(title, *(parts or ["no cache is alive"]))


def _cache(before: Snapshot | None, after: Snapshot) -> RenderableType:
    return Group(_tiers(after), _numbers(before, after), _sequences(after))


def _tiers(after: Snapshot) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("tier", "", "used", "of", "blocks", "unfilled", "slabs free"):
        table.add_column(name, justify="left" if name in ("tier", "") else "right")
    for tier, use in after.tiers.items():
        blocks = sum(g.blocks for state, g in after.blocks.items() if state.startswith(tier))
        if tier == "cold":  # those in both tiers are read from the hot one, but lie here too
            blocks += after.blocks["hot_written_through"].blocks
        table.add_row(
            tier,
            ProgressBar(total=max(use.capacity, 1), completed=use.used, width=24),
            format_size(use.used),
            format_size(use.capacity),
            str(blocks),
            f"{use.internal_fragmentation:.1%}",
            f"{use.external_fragmentation:.1%}",
        )
    return table


def _numbers(before: Snapshot | None, after: Snapshot) -> Table:
    """Two columns of names and values; rates are of the time between the frames."""
    table = Table(box=None, show_header=False, pad_edge=False)
    for _ in range(2):
        table.add_column(style="bold")
        table.add_column(min_width=24)
    moved = health.throughput(before, after) if before else {}
    recent = health.recent_hit_ratio(before, after) if before else None
    steps = health.steps_a_second(before, after) if before else None
    cells = [
        ("hit ratio", f"{_percent(after.counters.hit_ratio)} (now {_percent(recent)})"),
        ("steps", f"{after.counters.steps} ({_rate(steps, '/s')})"),
        ("store", _moved(after.counters.stored_blocks, moved.get("store"))),
        ("load", _moved(after.counters.loaded_blocks, moved.get("load"))),
        ("demoted", f"{after.counters.demoted_blocks} blocks"),
        ("failed copies", str(after.counters.failed_moves)),
        ("queue", f"{after.queue - after.backlog} in flight, {after.backlog} waiting"),
        ("threshold", f"{after.threshold:.2f}"),
        ("thrash", f"{after.counters.thrash_events} windows"),
        ("KV cache", f"{format_size(after.kv_bytes)}, {_hot(after.hot_bytes, after.kv_bytes)} hot"),
    ]
    for left, right in zip(cells[::2], cells[1::2], strict=True):
        table.add_row(*left, *right)
    return table


def _sequences(after: Snapshot) -> RenderableType:
    table = Table(box=None, pad_edge=False)
    for name in ("sequence", "tokens", "KV", "hot", "share held", "share due"):
        table.add_column(name, justify="right")
    largest = sorted(after.by_sequence, key=lambda use: -use.tokens)
    for use in largest[:MOST_SEQUENCES]:
        table.add_row(
            f"{use.batch}.{use.sequence}",
            str(use.tokens),
            format_size(use.kv_bytes),
            _hot(use.hot_bytes, use.kv_bytes),
            _percent(use.held_share),
            _percent(use.fair_share),
        )
    more = len(largest) - MOST_SEQUENCES
    return Group(table, f"and {more} more") if more > 0 else table


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def _hot(hot: int, whole: int) -> str:
    return _percent(hot / whole if whole else None)


def _rate(number: float | None, unit: str) -> str:
    return "-" if number is None else f"{number:.1f}{unit}"


def _moved(blocks: int, rate: float | None) -> str:
    return f"{blocks} blocks ({'-' if rate is None else format_size(int(rate)) + '/s'})"
