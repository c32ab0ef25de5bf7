# SPDX-License-Identifier: Apache-2.0
"""How products become weights on a CPU: scale, softcap, window and sinks of one attention."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvpass.runtime.readahead import first_seen

UNDERFLOW = 2.0**-100
"""Weights below this, relative to the largest, count as zero: far under the precision of the sum,
and products of denormals would be 25 times slower. A sink only scales the whole sum."""


@dataclass(frozen=True)
class Scoring:
    """What stands between the products of queries with keys and the softmax, but masks and bias.

    Attributes:
        scale: factor of the products.
        causal: query i sees positions up to ``stored + i``.
        softcap: scores become ``softcap * tanh(scores / softcap)``, as in Gemma 2; 0 = none.
        window: a query sees this many positions up to its own; 0 = all.
        sinks: fp32 ``[Hq]``, a logit without a value, as in gpt-oss; or None.
        chunk: a query at position p sees positions from ``p // chunk * chunk`` on, as in Llama 4;
            0 = all. Not with a window.
    """

    scale: float
    causal: bool
    softcap: float
    window: int
    sinks: Tensor | None
    chunk: int = 0

    @property
    def plain(self) -> bool:
        """Whether an ordinary softmax of scaled products is all there is."""
        return not (self.softcap or self.window or self.chunk) and self.sinks is None

    @property
    def factor(self) -> float:
        """Factor of the queries before :meth:`cap_`."""
        return self.scale / self.softcap if self.softcap else self.scale

    def cap_(self, products: Tensor) -> Tensor:
        """Scores from products of keys with queries times ``factor``, in place."""
        return products.tanh_().mul_(self.softcap) if self.softcap else products

    def first_seen(self, position: int) -> int:
        """The first position that the query at ``position`` sees."""
        return first_seen(position, self.window, self.chunk)


def sink_factor(top: Tensor, norm: Tensor, sink: Tensor) -> Tensor:
    """The keys' share of a softmax that a sink joins: ``norm e^top / (norm e^top + e^sink)``.

    Args:
        top: largest score of a query's keys, any finite number or -inf where it sees none.
        norm: sum of exponentials relative to ``top``, 0 where it sees none.
        sink: logit; -inf gives 1.
    """
    peak = torch.maximum(top, sink)
    peak = torch.where(peak == float("-inf"), 0.0, peak)
    keys = norm * (top - peak).exp_()
    total = keys + (sink - peak).exp_()
    return keys / torch.where(total == 0, 1.0, total)
