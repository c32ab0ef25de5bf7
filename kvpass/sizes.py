# SPDX-License-Identifier: Apache-2.0
"""Sizes and times as people write them: ``"64MiB"``, ``"1.5 GiB"``; ``"1s"``, ``"500ms"``."""

from __future__ import annotations

import operator
import re
from fractions import Fraction

from kvpass.errors import ConfigError
from kvpass.warn import warn_user

_DECIMAL = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_BINARY = {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_UNITS = _DECIMAL | _BINARY
_PATTERN = re.compile(r"([+-]?)(\d+(?:\.\d*)?|\.\d+)\s*([a-z]*)", re.ASCII | re.IGNORECASE)
_MAX = 2**63 - 1  # sizes and offsets are int64 on the device
_BOUNDS = "a size is between 1 byte and 2^63 - 1 bytes"


def parse_size(value: object, name: str = "size") -> int:
    """Return the bytes that a size means.

    Args:
        value: an int (bytes), or text with a unit: B, kB, MB, GB, TB (powers of 1000) or KiB, MiB,
            GiB, TiB (powers of 1024), in any case but ``Gb``, which may mean bits. A fraction of a
            byte is dropped.
        name: what the size is of, for messages.

    Raises:
        ConfigError: no unit, an unknown one, or not a finite number of at least one byte.
    """
    if isinstance(value, str):
        size = _parse_text(value, name)
    elif isinstance(value, bool | float):
        raise _bad(name, value, f"a {type(value).__name__} is not a size")
    else:
        try:
            size = operator.index(value)  # type: ignore[arg-type]
        except TypeError:
            raise _bad(name, value, f"a {type(value).__name__} is not a size") from None
    if not 1 <= size <= _MAX:
        raise _bad(name, value, _BOUNDS)
    return size


def format_size(size: int) -> str:
    """Return ``size`` bytes in the largest fitting binary unit: ``"64 MiB"``, ``"1.5 GiB"``.

    At most two decimals are kept, so the text is exact only where they suffice.
    """
    unit, factor = "B", 1
    for name, number in (("KiB", 2**10), ("MiB", 2**20), ("GiB", 2**30), ("TiB", 2**40)):
        # 1023.995 would print as 1024.00 of the smaller unit.
        if abs(size) * 1000 >= number * 999.995:
            unit, factor = name, number
    text = f"{size / factor:.2f}".rstrip("0").rstrip(".")
    return f"{text} {unit}"


def parse_seconds(text: str, name: str) -> float:
    """Return the seconds that a time means.

    Args:
        text: a number, alone or with ``s``, ``ms`` or ``min``.
        name: what the user set by it, for messages.

    Raises:
        ConfigError: not such a time, or not from 50 milliseconds to a day.
    """
    match = _PATTERN.fullmatch(text.strip().lower())
    sign, number, unit = ("", "0", "") if match is None else match.groups()
    factor = {"": 1.0, "s": 1.0, "ms": 1e-3, "min": 60.0}.get(unit, 0.0)
    seconds = float(number) * factor
    if sign == "-" or not 0.05 <= seconds <= 86400:
        raise ConfigError(
            f"{name} {text}: write a time from 50ms to 1440min, for example '1s' or '500ms'"
        )
    return seconds


def warn_of_small_hot(hot: int, needed: int) -> None:
    """Warn when the hot tier cannot hold the blocks that every decode step writes to.

    Args:
        hot: bytes of the hot tier.
        needed: bytes of one block of each layer and sequence.
    """
    if hot >= needed:
        return
    unit, factor = ("KiB", 2**10) if needed < 2**20 else ("MiB", 2**20)
    warn_user(
        f"hot = {format_size(hot)} holds less than one block of every layer and sequence, so even "
        "the newest tokens are written to the cold tier: right, but slow. Give at least "
        f"hot='{-(-needed // factor)}{unit}', or a smaller block_size"
    )


def _parse_text(text: str, name: str) -> int:
    match = _PATTERN.fullmatch(text.strip())
    if match is None:
        raise _bad(name, text, "not a number with a unit")
    sign, number, written = match.groups()
    if sign == "-":
        raise _bad(name, text, _BOUNDS)
    unit = written.lower()
    if not unit:
        raise _bad(name, text, "the unit is missing")
    if unit.endswith("b") and len(unit) > 1 and written[-2:].endswith("b") and written[0].isupper():
        # 64Gb is 64 gigabits to some, and an eighth of that, or eight times too much, is no guess.
        raise _bad(name, text, f"{written} may mean bits; write {written[:-1]}B for bytes")
    if unit not in _UNITS:
        hint = f", did you mean {unit.upper()}iB?" if f"{unit}ib" in _BINARY else ""
        raise _bad(name, text, f"unknown unit {written!r}{hint}")
    return int(Fraction(number.rstrip(".")) * _UNITS[unit])


def _bad(name: str, value: object, why: str) -> ConfigError:
    return ConfigError(f"{name} {value!r}: {why}; write for example '64MiB' or '10GB'")
