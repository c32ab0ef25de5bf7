# SPDX-License-Identifier: Apache-2.0
"""Types of option values: how each is written, and what it is turned into."""

from __future__ import annotations

import math
import operator
import os
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, PlainValidator

from kvpass.config.expressions import Expression
from kvpass.sizes import format_size, parse_size

MIN_PAGE = 4 << 10

_TRUE = frozenset({"true", "1", "yes", "on"})
_FALSE = frozenset({"false", "0", "no", "off", ""})
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_DURATION = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*([a-z]*)", re.ASCII)
_TILE = re.compile(r"\[?\s*(\d+)\s*,\s*(\d+)\s*\]?", re.ASCII)


class Duration(float):
    """Seconds; prints as it would be written, ``20ms``."""

    def __str__(self) -> str:
        """The duration in the largest unit that leaves at least one of it."""
        unit = next((unit for unit in ("s", "ms") if self >= _SECONDS[unit]), "us")
        return f"{float(self) / _SECONDS[unit]:.6g}{unit}"

    def __repr__(self) -> str:
        """As it is written in a configuration."""
        return repr(str(self))


def _boolean(value: object) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, int) and value in (0, 1):
        return bool(value)
    if isinstance(value, str):
        word = value.strip().lower()
        if word in _TRUE or word in _FALSE:
            return word in _TRUE
    raise ValueError("write true or false (also 1/0, yes/no, on/off)")


def _integer(value: object) -> int:
    message = "write a whole number"
    if isinstance(value, bool):
        raise ValueError(message)
    try:
        return int(value) if isinstance(value, str) else operator.index(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise ValueError(message) from None


def _number(value: object) -> float:
    message = "write a finite number"
    if isinstance(value, bool):
        raise ValueError(message)
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        raise ValueError(message) from None
    if not math.isfinite(number):
        raise ValueError(message)
    return number


def _or_auto(check: Callable[[object], object]) -> Callable[[object], object]:
    """``auto`` in any case, or what ``check`` takes."""

    def checked(value: object) -> object:
        if isinstance(value, str) and value.strip().lower() == "auto":
            return "auto"
        try:
            return check(value)
        except ValueError as error:
            raise ValueError(f"{error}, or 'auto'") from None

    return checked


def _page(value: object) -> int:
    size = parse_size(value)
    if size < MIN_PAGE:
        raise ValueError(f"write at least {format_size(MIN_PAGE)}, for example '2MiB'")
    return size


def _writable_directory(value: object) -> Path | None:
    if value is None:
        return None
    if not isinstance(value, str | os.PathLike) or not str(value).strip():
        raise ValueError("write the path of an existing directory")
    try:
        path = Path(value).expanduser().absolute()
        there = path.exists()
    except (OSError, RuntimeError, ValueError) as error:  # too long, ~nobody, a NUL in it
        raise ValueError(f"no such path is possible ({error}); name a directory"[:300]) from None
    if not there:
        raise ValueError(f"the directory {path} does not exist; create it (mkdir -p {path})")
    if not path.is_dir():
        raise ValueError(f"{path} is not a directory; name the directory for cold-tier files")
    try:
        # Permission bits say nothing on read-only mounts or for root, so a file is really made.
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise ValueError(
            f"no file can be made in {path} ({error.strerror}); make it writable or name another"
        ) from None
    return path


def _multiple_of_32(value: int) -> int:
    if not 32 <= value <= 4096 or value % 32:
        raise ValueError("write tokens, a multiple of 32 between 32 and 4096")
    return value


def _word(value: object) -> object:
    return value.strip().lower() if isinstance(value, str) else value


def _duration(value: object) -> Duration | None:
    if value is None or isinstance(value, Duration):
        return value
    match = _DURATION.fullmatch(value.strip().lower()) if isinstance(value, str) else None
    if match is None or match[2] not in _SECONDS:
        why = "the unit is missing; " if _is_number(value) else ""
        raise ValueError(f"{why}write a duration as '20ms', '0.1s' or '150us'")
    seconds = float(match[1]) * _SECONDS[match[2]]
    if not 1e-6 <= seconds <= 3600:
        raise ValueError("write a duration between 1us and 3600s")
    return Duration(seconds)


def _is_number(value: object) -> bool:
    try:
        _number(value)
    except ValueError:
        return False
    return True


def _tile(value: object) -> tuple[int, int] | str | None:
    message = "write two whole numbers, at least 16 queries and 32 keys, as [64, 64], or auto"
    if value is None:
        return None
    if isinstance(value, str):
        if value.strip().lower() == "auto":
            return "auto"
        match = _TILE.fullmatch(value.strip())
        if match is None:
            raise ValueError(message)
        value = match.groups()
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise ValueError(message)
    rows, columns = map(_integer, value)
    if rows < 16 or columns < 32:
        raise ValueError(message)
    return rows, columns


def _distance(value: object) -> int | None:
    if value is None:
        return None
    distance = _integer(value)
    if distance < 0:
        raise ValueError("write at least 0")
    return distance


def _expression(value: object) -> Expression | None:
    if value is None or isinstance(value, Expression):
        return value
    # YAML reads `retention_priority: 0.5` as a number.
    if isinstance(value, int | float) and not isinstance(value, bool):
        value = repr(value)
    return Expression.parse(value)  # type: ignore[arg-type]


Boolean = Annotated[bool, BeforeValidator(_boolean)]
BooleanOrAuto = Annotated[bool | Literal["auto"], BeforeValidator(_or_auto(_boolean))]
Integer = Annotated[int, BeforeValidator(_integer)]
Number = Annotated[float, BeforeValidator(_number)]
BlockSize = Annotated[int, BeforeValidator(lambda value: _multiple_of_32(_integer(value)))]
SizeOrAuto = Annotated[int | Literal["auto"], BeforeValidator(_or_auto(parse_size))]
PageSize = Annotated[int, BeforeValidator(_page)]
Directory = Annotated[Path | None, BeforeValidator(_writable_directory)]
Inner = Annotated[Literal["auto", "inductor", "aot_eager", "eager"], BeforeValidator(_word)]
DurationOrNone = Annotated[Duration | None, PlainValidator(_duration)]
Tile = Annotated[tuple[int, int] | Literal["auto"] | None, PlainValidator(_tile)]
Distance = Annotated[int | None, PlainValidator(_distance)]
ExpressionOrNone = Annotated[Expression | None, PlainValidator(_expression)]
