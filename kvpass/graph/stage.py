# SPDX-License-Identifier: Apache-2.0
"""Have each attention of a decode step stage the cold blocks of the next one.

``stage(L + 1)`` stands between ``append(L)``, whose token it takes, and ``attend(L)``, which takes
what it returns and has no use for it: so no compiler moves it to where it would come too late.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import fx

from kvpass.graph.emit import call, example
from kvpass.graph.rewrite import ancestors

_QUERY, _KEYS, _VALUES, _TOKEN, _ROWS, _LAYER, _BLOCK = range(7)
"""Positions among the arguments of ``attend``."""


def stage_ahead(graph: fx.Graph) -> int:
    """Stage the cold blocks of attentions over new keys of one token, in place.

    Args:
        graph: a rewritten one.

    Returns:
        Attentions whose blocks are staged.
    """
    lines: dict[fx.Node, list[tuple[fx.Node, tuple[Any, ...]]]] = {}
    output = next(node for node in reversed(graph.nodes) if node.op == "output")
    live = ancestors([output])
    for node in graph.nodes:
        arguments: tuple[Any, ...] = node.args
        if node.target is not torch.ops.kvpass.attend.default or node not in live:
            continue  # what nobody joins must not be begun
        if _is_step(arguments):
            lines.setdefault(arguments[_ROWS], []).append((node, arguments))
    count = 0
    for attends in lines.values():
        for (node, now), (following, then) in pairwise(attends):
            if now[_LAYER] == then[_LAYER]:
                continue
            keys, values = example(then[_KEYS]), example(then[_VALUES])
            width = int(keys.shape[1]) * (int(keys.shape[3]) + int(values.shape[3]))
            with graph.inserting_before(node):
                staged = call(
                    graph,
                    torch.ops.kvpass.stage.default,
                    now[_TOKEN],
                    now[_ROWS],
                    then[_LAYER],
                    then[_BLOCK],
                    width * then[_BLOCK] * keys.dtype.itemsize,
                    following.kwargs.get("window", 0),
                    following.kwargs.get("chunk", 0),
                )
            node.kwargs = {**node.kwargs, "following": staged}
            following.kwargs = {**following.kwargs, "staged": staged}
            count += 1
    graph.lint()
    return count


def _is_step(arguments: tuple[Any, ...]) -> bool:
    """Whether an attention is of one query behind the append of one token."""
    if arguments[_TOKEN] is None:
        return False
    queries, keys = (example(arguments[at]).shape[2] for at in (_QUERY, _KEYS))
    return all(isinstance(tokens, int) and tokens == 1 for tokens in (queries, keys))
