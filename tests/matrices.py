# SPDX-License-Identifier: Apache-2.0
"""Matrices of test cases that are too large to run whole."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any


def chessboard(*axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Every second cell of a matrix, like the white squares of a chessboard.

    Each value of an axis still meets half of the values of every other one.
    """
    indices = itertools.product(*(range(len(axis)) for axis in axes))
    return [
        tuple(axis[i] for axis, i in zip(axes, index, strict=True))
        for index in indices
        if sum(index) % 2 == 0
    ]
