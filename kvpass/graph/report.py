# SPDX-License-Identifier: Apache-2.0
"""What the pass did to a graph, site by site, and who wants to know."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass
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
    """

    module: str
    form: str | None
    mask: str
    rewritten: bool
    reason: str


@dataclass(frozen=True)
class GraphReport:
    """All attentions of one graph, in program order."""

    sites: tuple[SiteReport, ...]

    @property
    def rewritten(self) -> int:
        """Number of rewritten sites."""
        return sum(site.rewritten for site in self.sites)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


_observers: ContextVar[tuple[Callable[[GraphReport], None], ...]] = ContextVar(
    "kvpass_observers", default=()
)


@contextmanager
def observed(callback: Callable[[GraphReport], None]) -> Iterator[None]:
    """Call ``callback`` with the report of every graph compiled inside."""
    token = _observers.set((*_observers.get(), callback))
    try:
        yield
    finally:
        _observers.reset(token)


def observe(report: GraphReport) -> None:
    """Hand a report to whoever observes."""
    for callback in _observers.get():
        callback(report)


def report_graph(gm: fx.GraphModule, result: FindResult, refusal: str | None) -> GraphReport:
    """The report of one graph; ``refusal`` is a reason that concerns all of it."""
    order = {node: i for i, node in enumerate(gm.graph.nodes)}
    found: list[tuple[int, SiteReport]] = []
    for site in result.sites:
        words = site.mask.describe()
        report = SiteReport(site.module, site.source.form, words, refusal is None, refusal or "")
        found.append((order[site.anchor], report))
    for refused in result.refusals:
        report = SiteReport(refused.module, refused.form, "", False, refused.reason)
        found.append((order[refused.anchor], report))
    found.sort(key=lambda pair: pair[0])
    return GraphReport(tuple(report for _, report in found))
