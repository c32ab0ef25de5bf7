# SPDX-License-Identifier: Apache-2.0
"""``kvpass metrics``: the page of metrics of a running process, checked and printed."""

from __future__ import annotations

from typing import Annotated

import typer


def command(
    port: Annotated[int, typer.Option(help="Port of the running process.")] = 9464,
    host: Annotated[str, typer.Option(help="Its address.")] = "127.0.0.1",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the snapshots of its caches as JSON instead.")
    ] = False,
) -> None:
    """Print the metrics of a process that runs kvpass.serve_metrics, or --metrics-port."""
    from kvpass.metrics import client

    if as_json:
        client.fetch_page(port, host)  # refuses what is no page of snapshots
        typer.echo(client.fetch(port, host, "/snapshot"))
    else:
        typer.echo(client.fetch_metrics(port, host), nl=False)
