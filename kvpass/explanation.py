# SPDX-License-Identifier: Apache-2.0
"""``kvpass.explain``: which attentions of a model are rewritten, and why the others are not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kvpass.backends import backend
from kvpass.errors import ConfigError
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

    @property
    def steps(self) -> str:
        """Whether one CUDA graph can serve the decode steps seen; empty if there were none."""
        found = [graph.grows for graph in self.graphs if graph.grows is not None]
        if not found:
            return ""
        reasons = dict.fromkeys(filter(None, found))
        if reasons:
            return f"decode steps cannot be CUDA graphs: {'; '.join(reasons)}"
        return "decode steps have fixed shapes: a CUDA graph serves them on a GPU"

    @property
    def text(self) -> str:
        """The report that `explain` prints: the headline, a line of steps, and a line a site."""
        lines = [self.headline, *filter(None, [self.steps])]
        for site in self.sites:
            what = f"rewritten ({site.form}, mask: {site.mask})"
            if site.gone:
                what += f"; no longer made: {', '.join(site.gone[:3])}"
                what += f" and {len(site.gone) - 3} more" if len(site.gone) > 3 else ""
            if not site.rewritten:
                what = f"left as it was: {site.reason}"
            lines.append(f"  {site.module}: {what}")
        return "\n".join(lines)

    def __str__(self) -> str:
        """The headline: `explain` has printed the rest."""
        return self.headline

    def __repr__(self) -> str:
        """Likewise."""
        return f"<Explanation: {self.headline}>"

    def write(self, folder: str | Path, prefix: str = "graph") -> list[Path]:
        """Write each graph to ``<prefix>-<i>-before.txt`` and ``<prefix>-<i>-after.txt``.

        Raises:
            ConfigError: the folder cannot be written to.
        """
        check_folder(folder)
        written = []
        for i, graph in enumerate(self.graphs):
            for when, text in (("before", graph.before), ("after", graph.after)):
                path = Path(folder) / f"{prefix}-{i}-{when}.txt"
                try:
                    path.write_text(text, encoding="utf-8")
                except OSError as error:
                    raise ConfigError(f"{path} cannot be written: {error.strerror}") from error
                written.append(path)
        return written

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "sites": len(self.sites),
            "rewritten": self.rewritten,
            "graphs": [graph.as_dict() for graph in self.graphs],
        }


def check_folder(folder: str | Path) -> None:
    """Make a folder for graphs, before any work is done.

    Raises:
        ConfigError: it cannot be made.
    """
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"the folder {folder} cannot be made: {error.strerror}") from error


@contextmanager
def explaining(
    model: Callable[..., Any], texts: bool = False
) -> Iterator[tuple[Callable[..., Any], list[GraphReport]]]:
    """A compiled form of ``model``, and the list that its graphs' reports go to.

    For an explanation of more than one call: run the compiled form inside the ``with`` block.

    Args:
        model: module or function.
        texts: keep the text of each graph, before and after.
    """
    reports: list[GraphReport] = []

    def uncompiled(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        return backend(gm, example_inputs, options={"inner": "eager"})

    # A backend function of its own, so that Dynamo does not reuse an earlier compilation.
    with observed(reports.append, texts), torch._dynamo.config.patch(recompile_limit=64):
        yield torch.compile(model, backend=uncompiled), reports


def explain(
    model: Callable[..., Any],
    *inputs: Any,
    verbose: bool = True,
    graph_dir: str | Path | None = None,
    **kwargs: Any,
) -> Explanation:
    """Run a model once under the pass, and say what happened to each attention.

    The call is made as it stands: in the caller's gradient mode, with the model's training flag,
    and with the cache that is passed (which then holds the tokens). The rest of the graph runs
    uncompiled, so this is quick.

    Args:
        model: module or function to compile.
        *inputs: what it is called with.
        verbose: print the report.
        graph_dir: folder, made if need be, that gets each graph before and after as text.
        **kwargs: likewise, e.g. ``past_key_values=kvpass.TieredCache(...)``.

    Returns:
        The explanation: a line when printed; ``text`` is the report.
    """
    if graph_dir is not None:
        check_folder(graph_dir)
    with explaining(model, texts=graph_dir is not None) as (compiled, reports):
        compiled(*inputs, **kwargs)
    explanation = Explanation(tuple(reports))
    if graph_dir is not None:
        explanation.write(graph_dir)
    if verbose:
        print(explanation.text)
    return explanation
