# SPDX-License-Identifier: Apache-2.0
"""A backend that keeps every graph Dynamo hands it, finds its sites, and runs it as it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from kvpass.graph import find_sites
from kvpass.graph.site import FindResult


class Recorder:
    """A ``torch.compile`` backend: ``graphs`` and ``found`` hold what each compilation saw.

    With ``run=False`` the compiled function returns a placeholder instead of running the graph.

    Sites are found at compile time, since the shape environment is only sure to be alive then.
    """

    def __init__(self, run: bool = True) -> None:
        self.run = run
        self.graphs: list[fx.GraphModule] = []
        self.found: list[FindResult] = []
        self.mutated: list[str] = []

    def __call__(
        self, gm: fx.GraphModule, example_inputs: list[Any], **_: Any
    ) -> Callable[..., Any]:
        before = gm.print_readable(print_output=False) + str(gm.graph)
        meta = {node.name: set(node.meta) for node in gm.graph.nodes}
        self.graphs.append(gm)
        self.found.append(find_sites(gm))
        after = gm.print_readable(print_output=False) + str(gm.graph)
        if before != after or meta != {node.name: set(node.meta) for node in gm.graph.nodes}:
            self.mutated.append(after)
        if not self.run:
            outputs = len(next(iter(reversed(gm.graph.nodes))).args[0])
            return lambda *_: tuple(torch.empty(0) for _ in range(outputs))
        return gm.forward

    @property
    def summary(self) -> list[tuple[int, int]]:
        """(sites, refusals) of each graph in the order of compilation."""
        return [(len(found.sites), len(found.refusals)) for found in self.found]


def find(
    fn: Callable[..., Any], *args: Any, dynamic: bool | None = None, grad: bool = False
) -> FindResult:
    """Compile ``fn`` in one graph on ``args`` and return what was found in it."""
    torch._dynamo.reset()
    rec = Recorder()
    compiled = torch.compile(fn, backend=rec, fullgraph=True, dynamic=dynamic)
    with torch.set_grad_enabled(grad):
        compiled(*args)
    assert len(rec.found) == 1, f"expected one graph, got {len(rec.found)}"
    assert not rec.mutated, "find_sites changed the graph"
    return rec.found[0]
