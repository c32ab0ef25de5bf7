# SPDX-License-Identifier: Apache-2.0
"""The compiler half: find attentions in a Dynamo graph and say what they compute."""

from __future__ import annotations

from kvpass.graph.find import find_sites
from kvpass.graph.legality import graph_refusal, site_refusal
from kvpass.graph.site import (
    AttentionSite,
    CacheSource,
    FindResult,
    MaskSpec,
    Refusal,
)

__all__ = [
    "AttentionSite",
    "CacheSource",
    "FindResult",
    "MaskSpec",
    "Refusal",
    "find_sites",
    "graph_refusal",
    "site_refusal",
]
