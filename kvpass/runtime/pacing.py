# SPDX-License-Identifier: Apache-2.0
"""How copies keep out of the way of whoever computes: on the link, and on the interpreter.

Kernels that read the cold tier in place use the same direction of the link as copies to the device,
and a copy engine would take what it can get of it. So copies keep to a weighted max-min fair share
(Bertsekas and Gallager, Data Networks, 1992, section 6.5.2): their part by weight, and whatever the
readers have no use for.
"""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from kvpass.runtime.metrics import LinkRate

if TYPE_CHECKING:
    from kvpass.runtime.batch import Batch
    from kvpass.runtime.columns import Columns
    from kvpass.runtime.critical import Section

BACKGROUND = 0.25
"""Weight of a copy beside that of a reader of the same sequence: one saves time later, the other
waits now."""

ASSUMED_RATE = 12e9
"""Bytes a second of the link before a copy was measured: PCIe 3 x16."""

QUIET = 2.0
"""A sequence reads no more once this many mean steps have passed since its last one began."""

UNKNOWN_STEP = 0.05
"""Seconds that a step may take of a sequence whose steps were not measured yet."""


LONGEST_WAIT = 3e-3
"""Seconds for which the engine keeps off the interpreter at most; what it launched lasts longer."""

LOOK_AGAIN = 1e-4
"""Seconds between two looks at whether the manager still works."""


class Pacer:
    """Tells the copy engine when it may go on. Used by one thread.

    Reads numbers of batches without a lock: one that is a step old does no harm.

    Args:
        batches: gives all live ones, whether they read the cold tier or not.
        link: measured rates of copies.
        busy: whether the manager works now, so that a GPU may be about to wait for it.
        clock: seconds.
    """

    def __init__(
        self,
        batches: Callable[[], Sequence[Batch]],
        link: LinkRate,
        busy: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._batches = batches
        self._link = link
        self._busy = busy
        self._clock = clock
        self._owed = 0.0  # bytes launched that their share has not paid for yet
        self._paid_at = clock()

    def rate(self, weight: float) -> float:
        """Bytes a second that copies may take now; infinite while nobody reads in place.

        Args:
            weight: of all sequences whose blocks wait to be copied.
        """
        now = self._clock()
        link = self._link.load or ASSUMED_RATE
        readers = demand = 0.0
        for batch in tuple(self._batches()):
            seconds = batch.service.seconds
            quiet = QUIET * (UNKNOWN_STEP if seconds is None else seconds)
            if batch.cold_bytes and now - batch.service.begun <= quiet:
                readers += batch.service.weight * batch.size
                demand += batch.cold_bytes / seconds if seconds else link
        if not readers:
            return math.inf
        copies = BACKGROUND * weight
        return max(link * copies / (copies + readers), link - demand)

    def delay(self, weight: float) -> float:
        """Seconds until the next copies may be launched.

        Args:
            weight: of all sequences whose blocks wait to be copied.
        """
        rate = self.rate(weight)
        now = self._clock()
        passed, self._paid_at = now - self._paid_at, now
        if rate == math.inf:
            self._owed = 0.0
            return 0.0
        self._owed = max(self._owed - rate * passed, 0.0)
        return self._owed / rate

    def give_way(self, urgent: Callable[[], bool]) -> None:
        """Leave the interpreter to the manager while it works.

        Two threads that both need the lock of the interpreter hand it over at every call that
        gives it up, and each time wait for what the other does in between: beside a busy engine, a
        decision of 4 ms took 13.

        Args:
            urgent: whether somebody waits for copies.
        """
        end = self._clock() + LONGEST_WAIT
        while self._busy() and not urgent() and self._clock() < end:
            time.sleep(LOOK_AGAIN)

    def charge(self, size: int) -> None:
        """``size`` bytes are launched."""
        self._owed += size


def pacer_for(columns: Columns, link: LinkRate, section: Section) -> Pacer:
    """What paces the copies of a manager; the engine's thread must not keep its blocks alive."""
    known = weakref.ref(columns)

    def batches() -> Sequence[Batch]:
        found = known()
        return () if found is None else found.batches

    return Pacer(batches, link, busy=lambda: section.held)
