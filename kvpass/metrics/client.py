# SPDX-License-Identifier: Apache-2.0
"""Read the page of a running process."""

from __future__ import annotations

import http.client
import urllib.request

from prometheus_client.parser import text_string_to_metric_families

from kvpass.errors import MetricsError
from kvpass.metrics.page import Page, read_page
from kvpass.metrics.server import check_address

TIMEOUT = 10.0
"""Seconds to wait for an answer."""


def fetch(port: int, host: str = "127.0.0.1", path: str = "/metrics") -> str:
    """The text at ``path`` of the server on ``host`` and ``port``; proxies are not used.

    Raises:
        ConfigError: the port or the host cannot be one.
        MetricsError: nothing listens there, or the answer is no text.
    """
    check_address(port, host)
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    # A proxy of the environment would be asked for 127.0.0.1 and look on its own machine.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"http://{address}{path}", timeout=TIMEOUT) as answer:
            content: bytes = answer.read()
        return content.decode("utf-8")
    except (OSError, http.client.HTTPException, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        raise MetricsError(
            f"no metrics at http://{address}{path}: {reason}; start the program with "
            f"kvpass.serve_metrics({port}), or kvpass generate --metrics-port {port}"
        ) from error


def fetch_metrics(port: int, host: str = "127.0.0.1") -> str:
    """The page for Prometheus, checked.

    Raises:
        ConfigError: as :func:`fetch`.
        MetricsError: as :func:`fetch`; or the page does not parse, or is another program's.
    """
    text = fetch(port, host)
    try:
        names = {family.name for family in text_string_to_metric_families(text)}
    except ValueError as error:
        raise MetricsError(
            f"the page of {host}, port {port} is no page of metrics ({error}): give the port of a "
            "program that runs kvpass"
        ) from error
    if "kvpass_managers" not in names:
        raise MetricsError(
            f"the page of {host}, port {port} has no series of kvpass: it is another program's "
            "port; give that of kvpass.serve_metrics"
        )
    return text


def fetch_page(port: int, host: str = "127.0.0.1") -> Page:
    """The snapshots.

    Raises:
        ConfigError: as :func:`fetch`.
        MetricsError: as :func:`fetch`, or it is not a page of snapshots.
    """
    return read_page(fetch(port, host, "/snapshot"))
