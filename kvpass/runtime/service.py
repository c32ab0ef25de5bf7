# SPDX-License-Identifier: Apache-2.0
"""What a cache's sequences are promised, and the weight that follows from it."""

from __future__ import annotations

import math

from kvpass.config import FairnessConfig

SMOOTHING = 0.1
"""Weight of the last step in the mean time of a step."""

BOUNDS = (0.5, 2.0)
"""Of the time of a step over its target: one slow moment must not take a sequence's share away."""

QOS_STEP = 0.05
"""By which quality of service moves a window while a latency target is missed or beaten."""

BEATEN = 0.8
"""Time of a step over its target below which quality of service is given back."""

MIN_QOS = 0.05
MIN_WEIGHT = 0.01
"""A weight of nothing would be starvation."""


def weight(
    qos: float, latency: float, tokens: float, latency_weight: float, token_weight: float
) -> float:
    """Weight of a sequence, about 0 to 1.

    Args:
        qos: quality of service, 0 to 1.
        latency: time of its decode step over its target; 1 where it has none.
        tokens: tokens stored over the capacity of its blocks, 0 to 1.
        latency_weight: weight of the first two.
        token_weight: weight of the third.
    """
    low, high = BOUNDS
    first = latency_weight * qos / min(max(latency, low), high)
    return max((first + token_weight * tokens) / (latency_weight + token_weight), MIN_WEIGHT)


def next_qos(qos: float, latency: float) -> float:
    """Quality of service that follows a latency target, a window later: integral control.

    Args:
        qos: now, 0 to 1.
        latency: mean time of a decode step over its target.

    Returns:
        A step more while the target is missed, a step less while it is beaten, within 0.05 and 1.
    """
    if latency > 1:
        qos += QOS_STEP
    elif latency < BEATEN:
        qos -= QOS_STEP
    return min(max(qos, MIN_QOS), 1.0)


class Service:
    """Quality of service of one batch.

    Args:
        options: quality of service or latency target, and the weights.

    Attributes:
        qos: quality of service now, 0 to 1.
        seconds: mean time of a decode step, from its begin to the next one's; None before two.
        begun: when the last step of any kind began.
        weight: of each of its sequences.
    """

    def __init__(self, options: FairnessConfig) -> None:
        self.options = options
        self.qos = options.qos
        self.seconds: float | None = None
        self.weight = weight(options.qos, 1.0, 1.0, options.latency_weight, options.token_weight)
        self.begun = -math.inf
        self._measured_from: float | None = None

    @property
    def latency(self) -> float:
        """Time of a step over its target; 1 where there is none or nothing was measured."""
        target = self.options.latency_target
        return self.seconds / target if target and self.seconds is not None else 1.0

    def step(self, now: float, tokens: int) -> None:
        """A step of ``tokens`` tokens begins at ``now`` seconds."""
        self.begun = now
        if self._measured_from is not None:
            last = now - self._measured_from
            before = last if self.seconds is None else self.seconds
            self.seconds = before + SMOOTHING * (last - before)
        # What follows a prompt is as long as the prompt: only decode steps are measured.
        self._measured_from = now if tokens == 1 else None

    def window(self, tokens: float) -> None:
        """A window has ended with the blocks filled to ``tokens``, 0 to 1."""
        options = self.options
        if options.latency_target and self.seconds is not None:
            self.qos = next_qos(self.qos, self.latency)
        self.weight = weight(
            self.qos, self.latency, tokens, options.latency_weight, options.token_weight
        )
