# SPDX-License-Identifier: Apache-2.0
"""Where an attention may be: the nodes a match starts from, also in graphs that nodes call."""

from __future__ import annotations

import torch
from torch import fx

from kvpass.graph.flex import is_flex
from kvpass.graph.score import is_softmax, looks_like_attention
from kvpass.graph.walk import live_nodes, op_name


def is_anchor(node: fx.Node, live: set[fx.Node]) -> bool:
    """Whether a node is the middle of an attention: SDPA, flex_attention, or its softmax."""
    if op_name(node) == "scaled_dot_product_attention" or is_flex(node):
        return True
    return is_softmax(node) and looks_like_attention(node, live)


def called_attentions(node: fx.Node, owner: torch.nn.Module | None) -> int:
    """Attentions in the graphs that a higher-order operator runs."""
    if owner is None or not isinstance(node.target, torch._ops.HigherOrderOperator):
        return 0
    count = 0
    for argument in node.all_input_nodes:
        called = getattr(owner, str(argument.target), None) if argument.op == "get_attr" else None
        if isinstance(called, fx.GraphModule):
            live = live_nodes(called.graph)
            for inner in called.graph.nodes:
                if inner in live:
                    count += is_anchor(inner, live) or called_attentions(inner, called)
    return count
