# SPDX-License-Identifier: Apache-2.0
"""Order of copies on a link that several sequences share.

Self-clocked fair queueing (S. J. Golestani, "A self-clocked fair queueing scheme for broadband
applications", INFOCOM 1994), a weighted fair queueing whose virtual time is the finish tag of the
item in service: shares follow the weights, whoever idles gains no credit, and nobody starves.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

Item = TypeVar("Item")


class FairQueue(Generic[Item]):
    """Items of several flows. Not thread-safe: it belongs to one consumer."""

    def __init__(self) -> None:
        self._flows: dict[Hashable, deque[tuple[float, int, Item]]] = {}
        self._last: dict[Hashable, float] = {}
        self._order = itertools.count()
        self._virtual = 0.0

    def __len__(self) -> int:
        """Items waiting."""
        return sum(len(items) for items in self._flows.values())

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
        self._flows.setdefault(flow, deque()).append((finish, next(self._order), item))

    def heads(self) -> Iterator[Item]:
        """The first item of every flow, in the order in which they are due."""
        return (items[0][2] for items in sorted(self._flows.values(), key=lambda q: q[0][:2]))

    def flow(self, flow: Hashable) -> Iterator[Item]:
        """Items of a flow, in order."""
        return (item for *_, item in self._flows.get(flow, ()))

    def take(self, flow: Hashable, items: list[Item]) -> None:
        """Remove items of a flow: they are served now, together."""
        queue = self._flows[flow]
        served = {id(item) for item in items}
        self._virtual = max(
            self._virtual, *(finish for finish, _, item in queue if id(item) in served)
        )
        left = deque(entry for entry in queue if id(entry[2]) not in served)
        if left:
            self._flows[flow] = left
        else:
            del self._flows[flow]
        if not self._flows:
            # Idle: tags of the past mean nothing any more, and the numbers stay small.
            self._virtual = 0.0
            self._last.clear()
