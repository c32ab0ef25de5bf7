# SPDX-License-Identifier: Apache-2.0
"""What the policy knows of blocks: one array a property."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

K = 2
"""Accesses that LRU-K looks back to."""

NEVER = 1 << 15
"""Age, in windows, of what has not happened; ages stop growing there."""


_DEFAULTS: dict[str, Callable[[int], Any]] = {
    "ages": lambda count: np.full((count, K), NEVER, dtype=np.int64),
    "protected": lambda count: np.zeros(count, dtype=bool),
    "retention": np.zeros,
    "over_share": np.zeros,
    "demoted": lambda count: np.full(count, NEVER, dtype=np.int64),
}


@dataclass(frozen=True)
class BlockArrays:
    """Metadata of N blocks, one array a property, each ``[N]`` unless said otherwise.

    Those with a default may be left out: a block of which nothing is known.

    Attributes:
        frequency: accesses in the last full window, summed over KV heads; NaN before one passed.
        heat: 2-bit saturating counter.
        index: position of the block in its sequence.
        resident: belongs to the part of its sequence that stays hot.
        movable: full, written through, and its sequence not in a step: may be demoted.
        rate: accesses a window, smoothed over past windows; NaN before one passed.
        ages: ``[N, K]``, windows since the K last windows with an access, newest first.
        protected: in the protected zone of the hot arena.
        retention: how much longer to keep it, by the depth of its layer; 1 counts as twice the
            accesses. Higher is kept longer.
        over_share: how far its sequence is above its fair share; higher gives up first.
        demoted: windows since it was last demoted.
    """

    frequency: NDArray[np.float64]
    heat: NDArray[np.uint8]
    index: NDArray[np.signedinteger[Any]]
    resident: NDArray[np.bool_]
    movable: NDArray[np.bool_]
    rate: NDArray[np.float64] = None  # type: ignore[assignment]  # set below, as the others
    ages: NDArray[np.signedinteger[Any]] = None  # type: ignore[assignment]
    protected: NDArray[np.bool_] = None  # type: ignore[assignment]
    retention: NDArray[np.float64] = None  # type: ignore[assignment]
    over_share: NDArray[np.float64] = None  # type: ignore[assignment]
    demoted: NDArray[np.signedinteger[Any]] = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        """Fill in what was left out."""
        for name, default in _DEFAULTS.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, default(len(self.frequency)))
        if self.rate is None:
            object.__setattr__(self, "rate", self.frequency.copy())

    def __len__(self) -> int:
        """Blocks."""
        return len(self.frequency)

    def take(self, chosen: NDArray[Any]) -> BlockArrays:
        """The blocks at these positions, or where a mask is set."""
        return replace(self, **{f.name: getattr(self, f.name)[chosen] for f in fields(self)})
