# SPDX-License-Identifier: Apache-2.0
"""Which family a graph's model belongs to, by the modules that its attentions were traced from."""

from __future__ import annotations

import re
from collections.abc import Iterable

from kvpass.graph.site import AttentionSite

_FOLDER = re.compile(r"transformers\.models\.(\w+)\.")


def family_of(sites: Iterable[AttentionSite]) -> str:
    """The folder of transformers' models that the first attention is from, or ``default``.

    Args:
        sites: of one graph; Dynamo notes the classes of modules around each node.
    """
    for site in sites:
        for _, kind in site.output.meta.get("nn_module_stack", {}).values():
            name = f"{kind.__module__}." if isinstance(kind, type) else str(kind)
            if found := _FOLDER.search(name):
                return found[1]
    return "default"
