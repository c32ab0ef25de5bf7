# SPDX-License-Identifier: Apache-2.0
"""Order of copies on a link that several caches share.

Self-clocked fair queueing (S. J. Golestani, "A self-clocked fair queueing scheme for broadband
applications", INFOCOM 1994): a weighted fair queueing whose virtual time is the finish tag of the
item in service. Shares follow the weights, whoever idles gains no credit, and nobody starves.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

Item = TypeVar("Item", bound=Hashable)


class FairQueue(Generic[Item]):
    """Items of several flows, each in its own order. Belongs to one thread."""

    def __init__(self) -> None:
        # Of each flow: items and their (finish tag, arrival), in order of both.
        self._flows: dict[Hashable, dict[Item, tuple[float, int]]] = {}
        self._last: dict[Hashable, float] = {}
        self._arrivals = itertools.count()
        self._virtual = 0.0

    def __len__(self) -> int:
        """Items waiting."""
        return sum(map(len, self._flows.values()))

    def push(self, item: Item, flow: Hashable, cost: float, weight: float) -> None:
        """Add an item at the end of its flow.

        Args:
            item: what is queued.
            flow: whose it is.
            cost: of serving it, e.g. bytes; not negative.
            weight: share of the flow relative to the others; positive.
        """
        finish = max(self._virtual, self._last.get(flow, 0.0)) + cost / weight
        self._last[flow] = finish
        self._flows.setdefault(flow, {})[item] = finish, next(self._arrivals)

    def heads(self) -> list[Item]:
        """The first item of every flow, in the order in which they are due."""
        firsts = (next(iter(items.items())) for items in self._flows.values())
        return [item for item, _ in sorted(firsts, key=lambda pair: pair[1])]

    def flow(self, flow: Hashable) -> Iterator[Item]:
        """Items of a flow, in order."""
        return iter(self._flows.get(flow, ()))

    def clear(self) -> list[Item]:
        """Remove and return all items."""
        items = [item for flow in self._flows.values() for item in flow]
        self._flows.clear()
        self._last.clear()
        self._virtual = 0.0
        return items

    def take(self, flow: Hashable, items: list[Item]) -> None:
        """Remove items of a flow: they are served now, together."""
        waiting = self._flows[flow]
        for item in items:
            self._virtual = max(self._virtual, waiting.pop(item)[0])
        if not waiting:
            del self._flows[flow]
        if not self._flows:
            # Idle: tags of the past mean nothing any more, and the numbers stay small.
            self._virtual = 0.0
            self._last.clear()
