# SPDX-License-Identifier: Apache-2.0
"""``kvpass doctor --live``: samples of a running process and what they say of its health."""

from __future__ import annotations

import json
import time
from dataclasses import asdict

import typer

from kvpass import health
from kvpass.errors import MetricsError
from kvpass.metrics import client
from kvpass.metrics.page import Page
from kvpass.sizes import parse_seconds

SAMPLES = 3
"""Two halves to compare, to see a run that slows down."""


def examine(
    port: int = 9464, host: str = "127.0.0.1", seconds: str = "4s", *, as_json: bool = False
) -> None:
    """Take samples over ``seconds``, judge them and print a row a check.

    Raises:
        ConfigError: port, host or seconds cannot be one.
        MetricsError: nothing answers, or another process does from some sample on.
        Exit: with 1, a check is marked fail.
    """
    findings = health.judge(samples(port, host, parse_seconds(seconds, "--seconds")))
    if as_json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        _print(findings)
    if any(finding.status == "fail" for finding in findings):
        raise typer.Exit(1)


def samples(port: int, host: str, seconds: float) -> list[Page]:
    """Pages of one process, equally far apart, over ``seconds``."""
    pages = [client.fetch_page(port, host)]
    for _ in range(SAMPLES - 1):
        time.sleep(seconds / (SAMPLES - 1))
        pages.append(client.fetch_page(port, host))
    if len({page.process for page in pages}) > 1:
        raise MetricsError(
            f"another process answers on port {port} than {seconds:g} s before: it was restarted; "
            "try again"
        )
    return pages


def _print(findings: list[health.Finding]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table()
    table.add_column("check", no_wrap=True)
    for name in ("value", "healthy", "status", "cause and remedy"):
        table.add_column(name)
    color = {"ok": "green", "warn": "yellow", "fail": "red", "unknown": "dim"}
    for row in findings:
        advice = f"{row.cause}. {row.remedy}" if row.cause else ""
        cells = [Text(cell) for cell in (row.check, row.value, row.range)]
        table.add_row(*cells, Text(row.status, color[row.status]), Text(advice))
    Console().print(table)
