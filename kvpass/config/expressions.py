# SPDX-License-Identifier: Apache-2.0
"""Arithmetic over the depth of a layer, as ``retention_priority`` is written; nothing is run.

Python's own parser reads the text; only numbers, three names, five operators and four functions
are taken over into the tree that is evaluated.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from kvpass.errors import ConfigError

NAMES = ("layer_depth", "layer", "layers")
LAYERS_CHECKED = 256
"""An expression must have a value at each of this many layers when it is parsed."""
MAX_TEXT = 400
MAX_NODES = 64
MAX_EXPONENT = 64.0

_ALLOWED = (
    f"write numbers, {', '.join(NAMES)}, + - * / ** and min, max, abs, clamp(x, low, high), as "
    "'layer_depth * 0.8'"
)


def _power(base: float, exponent: float) -> float:
    if abs(exponent) > MAX_EXPONENT:
        raise ArithmeticError(f"the exponent {exponent:g} is beyond +-{MAX_EXPONENT:g}")
    return math.pow(base, exponent)


def _clamp(value: float, low: float, high: float) -> float:
    if low > high:
        raise ArithmeticError(f"clamp has a low end {low:g} above its high end {high:g}")
    return min(max(value, low), high)


# sign -> function, strength of binding, of the operand on the left and on the right.
_BINARY: dict[type[ast.operator], tuple[str, Callable[[float, float], float], int, int, int]] = {
    ast.Add: ("+", operator.add, 1, 1, 2),
    ast.Sub: ("-", operator.sub, 1, 1, 2),
    ast.Mult: ("*", operator.mul, 2, 2, 3),
    ast.Div: ("/", operator.truediv, 2, 2, 3),
    ast.Pow: ("**", _power, 4, 5, 3),
}
# name -> function, fewest and most arguments.
_FUNCTIONS: dict[str, tuple[Callable[..., float], int, int]] = {
    "min": (min, 2, 16),
    "max": (max, 2, 16),
    "abs": (abs, 1, 1),
    "clamp": (_clamp, 3, 3),
}


@dataclass(frozen=True)
class _Node:
    """A piece of an expression: its text, how strongly that binds, and its value."""

    text: str
    strength: int
    value: Callable[[Mapping[str, float]], float]
    size: int

    def within(self, strength: int) -> str:
        """The text as an operand of something that binds with ``strength``."""
        return self.text if self.strength >= strength else f"({self.text})"


@dataclass(frozen=True)
class Expression:
    """A parsed expression; equal to another whose text is equal.

    Attributes:
        text: the expression in one spelling, which :meth:`parse` reads as the same expression.
    """

    text: str
    _root: _Node = field(repr=False, compare=False)

    @classmethod
    def parse(cls, text: str) -> Expression:
        """Read an expression.

        Args:
            text: at most 400 characters and 64 operands and operators. ``layer_depth`` is layer
                index / number of layers, ``layer`` the index, ``layers`` the number.

        Raises:
            ConfigError: the text has another piece than those allowed, is too long, or has no
                finite value at one of the layers 0 to 255 of a model with 256, or of one with
                a single layer.
        """
        if not isinstance(text, str):
            raise ConfigError(f"expression {text!r} is no text: {_ALLOWED}")
        if len(text) > MAX_TEXT:
            raise ConfigError(
                f"expression {text[:20]!r}... has {len(text)} characters: write at most {MAX_TEXT}"
            )
        try:
            tree = ast.parse(text.strip(), mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            raise ConfigError(f"expression {text!r} is not arithmetic: {_ALLOWED}") from None
        root = _convert(tree, text)
        if root.size > MAX_NODES:
            raise ConfigError(
                f"expression {text!r} has {root.size} operands and operators: write at most "
                f"{MAX_NODES}"
            )
        found = cls(root.text, root)
        for layer, layers in [(0, 1), *((layer, LAYERS_CHECKED) for layer in range(256))]:
            found.evaluate(layer=layer, layers=layers)
        return found

    def evaluate(self, *, layer: int, layers: int) -> float:
        """Return the value for a layer.

        Args:
            layer: index of the layer, 0 to ``layers - 1``.
            layers: number of layers, at least 1.

        Raises:
            ConfigError: no such layer, a division by zero, an overflow, or no real number.
        """
        if not 0 <= layer < layers:
            raise ConfigError(f"layer {layer} of {layers}: give a layer from 0 to {layers - 1}")
        names = {
            "layer_depth": layer / layers,
            "layer": float(layer),
            "layers": float(layers),
        }
        try:
            value = self._root.value(names)
            if math.isfinite(value):
                return value
            reason = "is not a finite number"
        except ZeroDivisionError:
            reason = "divides by zero"
        except (ArithmeticError, ValueError) as error:
            reason = f"has no value ({error})"
        raise ConfigError(
            f"expression {self.text!r} {reason} at layer {layer} of {layers}: change it so that "
            "every layer has a finite value, for example by max(x, 0.001) or clamp(x, 0, 1)"
        )

    def __str__(self) -> str:
        """The text."""
        return self.text


def _convert(node: ast.expr, text: str) -> _Node:
    """Take over one piece and those below it, or refuse it."""
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return _constant(node, text)
    if isinstance(node, ast.Name) and node.id in NAMES:
        name = node.id
        return _Node(name, 9, lambda names: names[name], 1)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        inner = _convert(node.operand, text)
        # A power binds more strongly on its left: -x ** 2 is -(x ** 2).
        return _Node(f"-{inner.within(3)}", 3, lambda names: -inner.value(names), inner.size + 1)
    if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        sign, apply, strength, on_left, on_right = _BINARY[type(node.op)]
        left, right = _convert(node.left, text), _convert(node.right, text)
        return _Node(
            f"{left.within(on_left)} {sign} {right.within(on_right)}",
            strength,
            lambda names: apply(left.value(names), right.value(names)),
            left.size + right.size + 1,
        )
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords:
        return _call(node, node.func.id, text)
    raise _refused(node, text, _ALLOWED)


def _constant(node: ast.Constant, text: str) -> _Node:
    assert isinstance(node.value, int | float)
    try:
        number = float(node.value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise _refused(node, text, "the number is too large")
    return _Node(repr(number), 9, lambda names: number, 1)


def _call(node: ast.Call, name: str, text: str) -> _Node:
    if name not in _FUNCTIONS:
        raise _refused(node, text, _ALLOWED)
    apply, least, most = _FUNCTIONS[name]
    if not least <= len(node.args) <= most:
        count = str(least) if least == most else f"{least} to {most}"
        raise _refused(node, text, f"{name} takes {count} arguments, not {len(node.args)}")
    inner = [_convert(argument, text) for argument in node.args]
    return _Node(
        f"{name}({', '.join(piece.text for piece in inner)})",
        9,
        lambda names: apply(*(piece.value(names) for piece in inner)),
        sum(piece.size for piece in inner) + 1,
    )


def _refused(node: ast.expr, text: str, advice: str) -> ConfigError:
    piece = ast.get_source_segment(text.strip(), node) or ast.unparse(node)
    return ConfigError(f"expression {text!r}: {piece!r} is not allowed; {advice}")
