# SPDX-License-Identifier: Apache-2.0
"""What the pass did to a graph, site by site, and who wants to know."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch import fx

from kvpass.graph.site import FindResult


@dataclass(frozen=True)
class SiteReport:
    """One attention of a graph.

    Attributes:
        module: path of the module it is in.
        form: cache form, or None when it was not found out.
        mask: the mask in words; empty when not rewritten.
        rewritten: whether it was.
        reason: why not; empty when it was.
        gone: tensors that are no longer made, ``"name [shape]"``.
    """

    module: str
    form: str | None
    mask: str
    rewritten: bool
    reason: str
    gone: tuple[str, ...] = ()


@dataclass(frozen=True)
class GraphReport:
    """All attentions of one graph, in program order.

    Attributes:
        sites: one report an attention.
        before: the graph as Dynamo made it, as text; empty unless it was asked for.
        after: the same graph, rewritten; likewise.
        grows: what of a decode step differs from step to step, so that no CUDA graph can serve it;
            empty where nothing does, None of other graphs.
    """

    sites: tuple[SiteReport, ...]
    before: str = ""
    after: str = ""
    grows: str | None = None

    @property
    def rewritten(self) -> int:
        """Number of rewritten sites."""
        return sum(site.rewritten for site in self.sites)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON, without the texts."""
        return {"sites": [asdict(site) for site in self.sites], "grows": self.grows}


_observers: ContextVar[tuple[Callable[[GraphReport], None], ...]] = ContextVar(
    "kvpass_observers", default=()
)


_texts: ContextVar[bool] = ContextVar("kvpass_texts", default=False)


@contextmanager
def observed(callback: Callable[[GraphReport], None], texts: bool = False) -> Iterator[None]:
    """Call ``callback`` with the report of every graph compiled inside.

    Args:
        callback: gets the reports.
        texts: write the graphs out as text too.
    """
    token = _observers.set((*_observers.get(), callback))
    wanted = _texts.set(texts or _texts.get())
    try:
        yield
    finally:
        _texts.reset(wanted)
        _observers.reset(token)


def text_of(gm: fx.GraphModule) -> str:
    """A graph as text with shapes, if somebody asked for it."""
    return str(gm.print_readable(print_output=False)) if _texts.get() else ""


def observe(report: GraphReport) -> None:
    """Hand a report to whoever observes."""
    for callback in _observers.get():
        callback(report)


def report_graph(graph: fx.Graph, result: FindResult, refusal: str | None) -> GraphReport:
    """The report of one graph; ``refusal`` is a reason that concerns all of it."""
    order = {node: i for i, node in enumerate(graph.nodes)}
    found: list[tuple[int, SiteReport]] = []
    for site in result.sites:
        words = site.mask.describe()
        report = SiteReport(site.module, site.form, words, refusal is None, refusal or "")
        found.append((order[site.anchor], report))
    for refused in result.refusals:
        report = SiteReport(refused.module, refused.form, "", False, refused.reason)
        found.append((order[refused.anchor], report))
    found.sort(key=lambda pair: pair[0])
    return GraphReport(tuple(report for _, report in found))


def is_observed() -> bool:
    """Whether anybody asked for reports."""
    return bool(_observers.get())


def completed(
    report: GraphReport,
    gone: Sequence[tuple[str, ...]],
    before: str,
    after: str,
    grows: str | None = None,
) -> GraphReport:
    """The report with what is known after rewriting.

    Args:
        report: of the graph before.
        gone: for each rewritten site, in program order, the tensors that are no longer made.
        before: text of the graph, or empty.
        after: likewise.
        grows: see :class:`GraphReport`.
    """
    left = iter(gone)
    sites = (replace(s, gone=next(left)) if s.rewritten else s for s in report.sites)
    return GraphReport(tuple(sites), before, after, grows)
