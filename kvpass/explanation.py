# SPDX-License-Identifier: Apache-2.0
"""``kvpass.explain``: which attentions of a model are rewritten, and why the others are not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from kvpass.backends import backend
from kvpass.graph.report import GraphReport, SiteReport, observed


@dataclass(frozen=True, repr=False)
class Explanation:
    """What the pass does to a model.

    Attributes:
        graphs: one report a compiled graph, in the order they were compiled.
    """

    graphs: tuple[GraphReport, ...]

    @property
    def sites(self) -> tuple[SiteReport, ...]:
        """One report an attention; one that is left alone in any graph counts as left alone."""
        merged: dict[tuple[str, int], SiteReport] = {}
        for graph in self.graphs:
            seen: dict[str, int] = {}
            for site in graph.sites:
                key = (site.module, seen.get(site.module, 0))
                seen[site.module] = key[1] + 1
                known = merged.get(key)
                if known is None or (known.rewritten and not site.rewritten):
                    merged[key] = site
        return tuple(merged.values())

    @property
    def rewritten(self) -> int:
        """Attentions that are rewritten in every graph they appear in."""
        return sum(site.rewritten for site in self.sites)

    @property
    def headline(self) -> str:
        """The result in a line."""
        count = len(self.sites)
        if not count:
            return "no attention was found in what was compiled"
        return f"{self.rewritten} of {count} attention sites rewritten"

    def __str__(self) -> str:
        """The headline and a line a site."""
        lines = [self.headline]
        for site in self.sites:
            what = f"rewritten ({site.form}, mask: {site.mask})"
            if not site.rewritten:
                what = f"left as it was: {site.reason}"
            lines.append(f"  {site.module}: {what}")
        return "\n".join(lines)

    def __repr__(self) -> str:
        """The headline: `explain` has printed the rest."""
        return f"<Explanation: {self.headline}>"

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "sites": len(self.sites),
            "rewritten": self.rewritten,
            "graphs": [graph.as_dict() for graph in self.graphs],
        }


@contextmanager
def explaining(model: Callable[..., Any]) -> Iterator[tuple[Callable[..., Any], list[GraphReport]]]:
    """A compiled form of ``model``, and the list that its graphs' reports go to.

    For an explanation of more than one call: run the compiled form inside the ``with`` block.
    """
    reports: list[GraphReport] = []

    def uncompiled(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        return backend(gm, example_inputs, options={"inner": "eager"})

    # A backend function of its own, so that Dynamo does not reuse an earlier compilation.
    with observed(reports.append), torch._dynamo.config.patch(recompile_limit=64):
        yield torch.compile(model, backend=uncompiled), reports


def explain(
    model: Callable[..., Any], *inputs: Any, verbose: bool = True, **kwargs: Any
) -> Explanation:
    """Run a model once under the pass, and say what happened to each attention.

    The call is made as it stands: in the caller's gradient mode, with the model's training flag,
    and with the cache that is passed (which then holds the tokens). The rest of the graph runs
    uncompiled, so this is quick.

    Args:
        model: module or function to compile.
        *inputs: what it is called with.
        verbose: print the explanation.
        **kwargs: likewise, e.g. ``past_key_values=kvpass.TieredCache(...)``.

    Returns:
        The explanation.
    """
    with explaining(model) as (compiled, reports):
        compiled(*inputs, **kwargs)
    explanation = Explanation(tuple(reports))
    if verbose:
        print(explanation)
    return explanation
