# SPDX-License-Identifier: Apache-2.0
"""Metrics of all live caches of the process, for Prometheus and as JSON.

``kvpass.serve_metrics()`` serves them. A program that has a page of its own registers
``kvpass.metrics.Collector()`` with its registry instead, once.
"""

from __future__ import annotations

from kvpass.metrics.collector import Collector
from kvpass.metrics.page import Page, read_page
from kvpass.metrics.server import MetricsServer, serve_metrics

__all__ = ["Collector", "MetricsServer", "Page", "read_page", "serve_metrics"]
