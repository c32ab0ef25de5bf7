# SPDX-License-Identifier: Apache-2.0
"""Integer tensors that a graph gets: what they hold when it begins, as symbols.

A static cache keeps its length in a tensor, and a model may get the positions of its tokens in one.
Their values are not known while the graph is read, but sums and differences of them can be proven
equal, and the runtime reads the values before it runs the graph.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import fx

from kvpass.graph.sizes import Size
from kvpass.graph.walk import is_cast, op_name, tensor_of, writes_to

Kind = Literal["value", "positions"]
_INTEGERS = (torch.int64, torch.int32)


class EntryValues:
    """Symbols for the integer tensors among the inputs of one graph.

    Attributes:
        symbols: of each input that was asked for: its symbol and what it stands for: ``value``, the
            number in a tensor of one element; ``positions``, the first of consecutive numbers.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self.symbols: dict[fx.Node, tuple[torch.SymInt, Kind]] = {}
        self._order = {node: i for i, node in enumerate(graph.nodes)}
        self._first_write: dict[fx.Node, int] = {}

    def of(self, node: object, at: fx.Node) -> torch.SymInt | None:
        """What a tensor holds when ``at`` reads it, or None if that is not proven.

        A 1-D tensor of several elements gives the first; that the others follow is for the runtime
        to check.
        """
        current = node
        while isinstance(current, fx.Node) and self._unwritten(current, at):
            if current.op == "placeholder":
                return self._symbol(current)
            passes = is_cast(current) or op_name(current) in ("clone", "detach", "contiguous")
            tensor, source = tensor_of(current), tensor_of(current.args[0] if current.args else 0)
            if not passes or tensor is None or source is None or source.dtype not in _INTEGERS:
                return None
            current = current.args[0]
        return None

    def knows(self, size: Size) -> bool:
        """Whether a size depends on what an integer input holds."""
        known = {symbol.node.expr for symbol, _ in self.symbols.values()}
        return isinstance(size, torch.SymInt) and bool(size.node.expr.free_symbols & known)

    def _unwritten(self, node: fx.Node, at: fx.Node) -> bool:
        if node not in self._first_write:
            orders = (self._order[write] for write in writes_to(node))
            self._first_write[node] = min(orders, default=len(self._order))
        return self._order[at] < self._first_write[node]

    def _symbol(self, node: fx.Node) -> torch.SymInt | None:
        if node in self.symbols:
            return self.symbols[node][0]
        tensor: Any = tensor_of(node)
        if tensor is None or tensor.dtype not in _INTEGERS or tensor.dim() > 1:
            return None
        env = getattr(getattr(tensor, "fake_mode", None), "shape_env", None)
        if env is None:
            return None
        with env.ignore_fresh_unbacked_symbols():
            symbol: torch.SymInt = env.create_unbacked_symint()
        self.symbols[node] = symbol, "value" if tensor.dim() == 0 else "positions"
        return symbol
