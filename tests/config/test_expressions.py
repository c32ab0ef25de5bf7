# SPDX-License-Identifier: Apache-2.0
"""Expressions over the depth of a layer, against Python's own arithmetic; attacks are refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpass.config import Config, Expression
from kvpass.errors import ConfigError


def reference(text: str, layer: int, layers: int) -> float:
    """Python's own value of a text that this file has written."""
    names: dict[str, Any] = {
        "layer_depth": layer / layers, "layer": float(layer), "layers": float(layers),
        "min": min, "max": max, "abs": abs,
        "clamp": lambda x, low, high: min(max(x, low), high),
    }  # fmt: skip
    return eval(text, {"__builtins__": {}}, names)


ATOMS = st.one_of(
    st.sampled_from(["layer_depth", "layer", "layers"]),
    st.integers(0, 9).map(lambda number: f"{number}.0"),
    st.floats(0.01, 9.0).map(repr),
)


FORMS = [
    *("{0} + {1}", "{0} - {1}", "{0} * {1}", "{0} / {1}", "({0})", "-{0}", "-({0})", "abs({0})"),
    *("{0} - ({1})", "{0} / ({1})", "{0} * -({1})"),
    *("({0}) ** 2", "({0}) ** 3", "({0}) ** 0", "({0}) ** -1", "{0} - 2 ** layer_depth ** 2"),
    *("-2 ** 3 / {0}", "min({0}, {1})", "max({0}, {1})", "clamp({0}, 0.25, 4.0)"),
]


def grow(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.tuples(st.sampled_from(FORMS), inner, inner).map(
        lambda form: form[0].format(*form[1:])
    )


EXPRESSIONS = st.recursive(ATOMS, grow, max_leaves=8)


@given(EXPRESSIONS, st.integers(0, 47))
def test_values_are_those_of_python(text: str, layer: int) -> None:
    try:
        expression = Expression.parse(text)
        value = expression.evaluate(layer=layer, layers=48)
    except ConfigError:
        return  # which ones are refused is tested below
    assert math.isclose(value, reference(text, layer, 48), rel_tol=1e-9, abs_tol=1e-12)


@given(EXPRESSIONS)
def test_an_expression_survives_its_own_text(text: str) -> None:
    try:
        expression = Expression.parse(text)
    except ConfigError:
        return
    again = Expression.parse(str(expression))
    assert again == expression
    assert str(again) == str(expression)
    for layer in (0, 3, 31):
        values = [item.evaluate(layer=layer, layers=32) for item in (expression, again)]
        assert values[0] == values[1]


def defined(text: str) -> bool:
    try:
        values = [reference(text, layer, 256) for layer in range(256)] + [reference(text, 0, 1)]
    except (ArithmeticError, ValueError):
        return False
    return all(isinstance(value, float) and math.isfinite(value) for value in values)


@given(EXPRESSIONS)
def test_what_has_a_value_at_every_layer_is_accepted_and_nothing_else(text: str) -> None:
    """Texts here are short and their exponents small, so that no other bound applies."""
    if len(text) > 200:
        return
    try:
        Expression.parse(text)
    except ConfigError:
        assert not defined(text), text
    else:
        assert defined(text), text


@pytest.mark.parametrize(
    ("text", "layer", "value"),
    [
        ("layer_depth * 0.8", 8, 0.2),
        ("2 ** 3 ** 2", 0, 512.0),
        ("(2 ** 3) ** 2", 0, 64.0),
        ("-2 ** 2", 0, -4.0),
        ("(-2) ** 2", 0, 4.0),
        ("2 ** -1", 0, 0.5),
        ("8 - 4 - 2", 0, 2.0),
        ("8 - (4 - 2)", 0, 6.0),
        ("8 / 4 / 2", 0, 1.0),
        ("- -3", 0, 3.0),
        ("clamp(layer, 2, 5)", 9, 5.0),
        ("min(layer, layers, 3)", 9, 3.0),
        (" abs(layer - 20) ", 9, 11.0),
    ],
)
def test_meaning(text: str, layer: int, value: float) -> None:
    expression = Expression.parse(text)
    assert math.isclose(expression.evaluate(layer=layer, layers=32), value)
    again = Expression.parse(expression.text)
    assert again == expression
    assert math.isclose(again.evaluate(layer=layer, layers=32), value)


@pytest.mark.parametrize(
    ("text", "piece"),
    [
        ("__import__('os').system('id')", "__import__"),
        ("layer.__class__", "layer.__class__"),
        ("().__class__", "().__class__"),
        ("open('x')", "open('x')"),
        ("[layer for layer in layers]", "[layer for layer in layers]"),
        ("lambda: 1", "lambda: 1"),
        ("layer if layer else 1", "layer if layer else 1"),
        ("layer < 3", "layer < 3"),
        ("depth * 2", "'depth'"),
        ("layer % 2", "layer % 2"),
        ("1 << 9", "1 << 9"),
        ("layer @ 2", "layer @ 2"),
        ("'a' * 3", "'a'"),
        ("True", "True"),
        ("1j", "1j"),
        ("None", "None"),
        ("+layer", "+layer"),
        ("(x := 3)", "x := 3"),
        ("min(layer, default=1)", "default=1"),
        ("min(*layer)", "*layer"),
        ("max(layer)", "2 to 16 arguments, not 1"),
        ("clamp(layer, 1)", "3 arguments, not 2"),
        ("f'{layer}'", "f'{layer}'"),
    ],
)
def test_pieces_that_are_refused_are_named(text: str, piece: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Expression.parse(text)
    assert piece in str(caught.value)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("1 / layer", "divides by zero at layer 0 of 1"),
        ("1 / (layer - 200)", "divides by zero at layer 200 of 256"),
        ("layer ** -1", "has no value"),
        ("9 ** 9 ** 9", "the exponent"),
        ("2 ** 65", "the exponent 65 is beyond"),
        ("layers ** 64 ** 1 * layers ** 64 * layers ** 64", "at layer 0 of 256"),
        ("1e308 * 10", "not a finite number"),
        ("1e999", "too large"),
        ("9" * 380, "too large"),
        ("(0 - 1 - layer) ** 0.5", "has no value"),
        ("clamp(layer, 3, 1)", "low end 3 above"),
        ("", "is not arithmetic"),
        ("layer *", "is not arithmetic"),
        ("layer; layer", "is not arithmetic"),
        ("layer\x00", "is not arithmetic"),
        ("(" * 150 + "1" + ")" * 150, ""),
        ("-" * 399 + "1", "at most 64"),
        ("(" * 9999, "at most 400"),
        ("+".join(["1"] * 40), "79 operands and operators"),
        (None, "is no text"),
        (b"1", "is no text"),
    ],
)
def test_expressions_without_a_value_or_bound_are_refused(text: Any, reason: str) -> None:
    if not reason:  # parentheses alone are no operators
        assert Expression.parse(text).evaluate(layer=0, layers=1) == 1.0
        return
    with pytest.raises(ConfigError) as caught:
        Expression.parse(text)
    assert reason in str(caught.value)


@pytest.mark.parametrize(("layer", "layers"), [(-1, 4), (4, 4), (0, 0)])
def test_layers_that_are_not_there(layer: int, layers: int) -> None:
    with pytest.raises(ConfigError, match=f"layer {layer} of {layers}"):
        Expression.parse("layer").evaluate(layer=layer, layers=layers)


def test_a_config_takes_text_and_numbers() -> None:
    for value, text in (("layer_depth*0.8", "layer_depth * 0.8"), (0.5, "0.5"), (1, "1.0")):
        config = Config(optimizations={"llama": {"retention_priority": value}})
        assert str(config.family("llama").retention_priority) == text
    for bad in (True, [1], "import os"):
        with pytest.raises(ConfigError, match="optimizations.llama.retention_priority = "):
            Config(optimizations={"llama": {"retention_priority": bad}})
