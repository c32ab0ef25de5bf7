# SPDX-License-Identifier: Apache-2.0
"""What is proven about sizes, which may be symbols."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.utils._sympy.functions import Max, Min

Size = int | torch.SymInt


def proven(condition: Any) -> bool:
    """True if the condition holds for every input the graph's guards admit. Adds no guard."""
    return bool(statically_known_true(condition))


def same(a: Size, b: Size) -> bool:
    """Whether two sizes are proven equal."""
    return proven(a == b) or fixed(a - b) == 0


def fixed(size: Size) -> int | None:
    """The value of a size that is proven to have only one, else None."""
    if isinstance(size, int):
        return size
    env = size.node.shape_env
    expr = env.replace(size.node.expr)
    for extremum in expr.atoms(Max, Min):
        # Of max(0, tokens - window), which is the larger follows from the guards on tokens.
        sign = 1 if isinstance(extremum, Max) else -1
        for item in extremum.args:
            others = [other for other in extremum.args if other is not item]
            if all(env.bound_sympy(sign * (item - other)).lower >= 0 for other in others):
                expr = expr.xreplace({extremum: item})
                break
    return int(expr) if expr.is_number else None


def settled(size: Size) -> int | None:
    """A size that does not change while a model is used, such as a number of heads.

    With ``dynamic=True`` even those are symbols; from here on the graph is guarded for this one.

    Returns:
        The size; None if what the inputs hold decides it.
    """
    known = fixed(size)
    if known is not None or not isinstance(size, torch.SymInt) or size.node.hint is None:
        return known
    env = size.node.shape_env
    before = {guard.expr: env.replace(guard.expr) for guard in env.guards}
    value = int(size)
    for guard, meant in before.items():
        if (means := env.replace(guard)) != meant:
            env.evaluate_expr(means)  # what follows for other symbols
    return value


def same_shape(a: Iterable[Size], b: Iterable[Size]) -> bool:
    """Whether two shapes are proven equal."""
    first, second = tuple(a), tuple(b)
    return len(first) == len(second) and all(map(same, first, second))
