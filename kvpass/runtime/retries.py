# SPDX-License-Identifier: Apache-2.0
"""When a copy to the cold tier that failed is tried again."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvpass.warn import warn_user

if TYPE_CHECKING:
    from kvpass.runtime.batch import Block

WARN_AFTER = 3
"""Failures of one block after which the user is told: one or two may be a passing fault."""

LONGEST_WAIT = 1024
"""Steps between two tries at most."""


class Retries:
    """Failures of blocks, and the steps until their next try: 1, 2, 4, ... after each failure.

    A block is never given up: until it is stored it stays hot, and readable.
    """

    def __init__(self) -> None:
        self._now = 0
        self._failures: dict[int, tuple[int, int]] = {}

    def tick(self) -> None:
        """A step has ended."""
        self._now += 1

    def due(self, block: Block) -> bool:
        """Whether the block may be tried now."""
        return self._failures.get(id(block), (0, 0))[1] <= self._now

    def failed(self, block: Block, error: BaseException | None) -> None:
        """Note a failure; tells the user about the third one of a block."""
        failures = self._failures.get(id(block), (0, 0))[0] + 1
        wait = min(1 << (failures - 1), LONGEST_WAIT)
        self._failures[id(block)] = failures, self._now + wait
        if failures == WARN_AFTER:
            warn_user(
                f"a KV block could not be copied to the cold tier {failures} times and stays in "
                f"the hot one ({type(error).__name__}: {error}): it is tried again, less and less "
                "often; look at the disk or host memory that holds the cold tier"
            )

    def forget(self, block: Block) -> None:
        """The block is stored, or gone."""
        self._failures.pop(id(block), None)
