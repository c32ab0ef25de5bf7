# SPDX-License-Identifier: Apache-2.0
"""All options of kvpass in one frozen model, checked when it is made.

An option has one name, ``memory.hot``, and is also accepted as ``hot`` and inside a nested dict
``{"memory": {"hot": ...}}``, so keyword arguments, ``options=`` of ``torch.compile``, environment
variables and YAML files all say the same.
"""

from __future__ import annotations

import difflib
import math
import operator
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, ValidationError

from kvpass.errors import ConfigError
from kvpass.sizes import parse_size

ENV_PREFIX = "KVPASS_"
# Variables of other parts of the project, which are not options.
ENV_OTHER = frozenset({"KVPASS_CACHE", "KVPASS_SMOLLM2_WHEEL"})


@dataclass(frozen=True)
class Written:
    """The value of an option and what the user set it by; may stand for a value of ``Config``.

    Attributes:
        name: key, variable or flag as the user typed it, for messages: ``KVPASS_HOT``, ``--hot``.
        value: what was given.
    """

    name: str
    value: Any


_TRUE = frozenset({"true", "1", "yes", "on"})
_FALSE = frozenset({"false", "0", "no", "off", ""})


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


def _size(value: object) -> int:
    try:
        return parse_size(value)
    except ConfigError as error:
        raise ValueError(str(error)) from None


def _size_or_auto(value: object) -> int | str:
    if isinstance(value, str) and value.strip().lower() == "auto":
        return "auto"
    try:
        return parse_size(value)
    except ConfigError as error:
        raise ValueError(f"{error}, or 'auto'") from None


_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


def _duration(value: object) -> float | None:
    if value is None or isinstance(value, float):
        return value
    match = re.fullmatch(r"([\d.]+)\s*([a-z]*)", value.strip()) if isinstance(value, str) else None
    if match is None or match[2] not in _SECONDS:
        raise ValueError("write a duration as '20ms', '0.1s' or '150us'")
    return float(match[1]) * _SECONDS[match[2]]


def _writable_directory(value: object) -> Path | None:
    if value is None:
        return None
    if not isinstance(value, str | os.PathLike) or not str(value).strip():
        raise ValueError("write the path of an existing directory")
    path = Path(value).expanduser().absolute()
    if not path.exists():
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
        raise ValueError("write a multiple of 32 (tokens of a page) between 32 and 4096")
    return value


def _word(value: object) -> object:
    return value.strip().lower() if isinstance(value, str) else value


Boolean = Annotated[bool, BeforeValidator(_boolean)]
Integer = Annotated[int, BeforeValidator(_integer)]
Number = Annotated[float, BeforeValidator(_number)]
BlockSize = Annotated[int, BeforeValidator(lambda value: _multiple_of_32(_integer(value)))]
Size = Annotated[int, BeforeValidator(_size)]
SizeOrAuto = Annotated[int | Literal["auto"], BeforeValidator(_size_or_auto)]
Directory = Annotated[Path | None, BeforeValidator(_writable_directory)]
DurationOrNone = Annotated[float | None, PlainValidator(_duration)]
Inner = Annotated[Literal["auto", "inductor", "aot_eager", "eager"], BeforeValidator(_word)]


class MemoryConfig(BaseModel):
    """Options of the tiers and of migration; sizes are bytes."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    block_size: BlockSize = Field(
        256, description="Tokens in a block, the unit of migration: a multiple of 32, 32 to 4096."
    )
    hot: SizeOrAuto = Field(
        "auto", description="Size of the hot arena; 'auto' takes what the device has left."
    )
    cold: SizeOrAuto = Field(
        "auto",
        description="Size of the cold arena; 'auto' is half of the free host memory, or disk.",
    )
    cold_dir: Directory = Field(
        None,
        description="Directory of the cold tier's file on a CPU; unset is the temporary directory.",
    )
    gpu_threshold: Number = Field(
        0.8, gt=0, le=1, description="Share of the hot arena in use at which demotion starts."
    )
    min_frequency: Number = Field(
        2.0,
        ge=0,
        description="Accesses in a window below which a block may be demoted, and from which one "
        "is promoted.",
    )
    resident_tokens: Integer = Field(
        1024,
        ge=0,
        description="First tokens of a sequence that stay in the hot arena, as far as they fit.",
    )
    heat_interval: Integer = Field(
        64,
        ge=1,
        description="Decode steps in a window, after which the heat counters are read; windows are "
        "shorter after a prompt and while accesses go to cold blocks.",
    )
    resident_ratio: Number = Field(
        0.2, ge=0, le=1, description="Share of a sequence that stays in the hot arena."
    )
    hot_zone_ratio: Number = Field(
        0.6,
        gt=0,
        lt=1,
        description="Protected share of the hot arena; the rest is probation for new blocks.",
    )
    page_size: Size = Field(2 << 20, description="Slab by which the hot arena grows and shrinks.")
    poison: Boolean = Field(
        False, description="Fill freed slots with a pattern, so that a stale read shows."
    )


class FairnessConfig(BaseModel):
    """Options of the shares that sequences have of hot blocks and of the link."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    qos: Number = Field(
        0.5, ge=0, le=1, description="Service quality of a cache's sequences, 0 to 1."
    )
    latency_weight: Number = Field(
        0.7, ge=0, le=1, description="Weight of service quality over latency in a share."
    )
    token_weight: Number = Field(
        0.3, ge=0, le=1, description="Weight of tokens over the blocks held in a share."
    )
    latency_target: DurationOrNone = Field(
        None,
        description="Time of a decode step that a cache's sequences are to reach, as '20ms'; unset "
        "leaves their service quality at qos.",
    )


class Config(BaseModel):
    """Every option of kvpass.

    ``Config(hot="64MiB")``, ``Config(**{"memory.hot": "64MiB"})`` and
    ``Config(memory={"hot": "64MiB"})`` are the same.

    Raises:
        ConfigError: an option is unknown (the nearest name is given), given twice, or its value
            does not fit; the message names the option as it was written, the value and what to
            write instead.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    memory: MemoryConfig = Field(default_factory=MemoryConfig)
    fairness: FairnessConfig = Field(default_factory=FairnessConfig)
    inner: Inner = Field(
        "auto",
        description="Compiler of the rest of the graph: inductor, aot_eager, eager, or auto "
        "(inductor where a C++ compiler or GPU is there).",
    )

    def __init__(self, **options: Any) -> None:
        nested: dict[str, Any] = {group: {} for group in GROUPS}
        given = _flatten(options)
        for key, written in given.items():
            group, _, name = key.rpartition(".")
            (nested[group] if group else nested)[name] = written.value
        try:
            super().__init__(**nested)
        except ValidationError as error:
            raise ConfigError("; ".join(_explain(error, given))) from None

    @classmethod
    def load(
        cls,
        file: str | os.PathLike[str] | None = None,
        env: Mapping[str, str] | None = None,
        **overrides: Any,
    ) -> Self:
        """Combine keyword arguments, environment, a YAML file and the defaults, in that order.

        Args:
            file: a YAML file of options, flat or by group; None reads no file.
            env: environment with ``KVPASS_MEMORY_HOT`` or ``KVPASS_HOT``; None is ``os.environ``.
            overrides: options; one that is None counts as not given.

        Raises:
            ConfigError: as the class, and for an unreadable file or a misspelt variable.
        """
        options = _from_file(Path(file)) if file is not None else {}
        options |= _from_env(os.environ if env is None else env)
        return cls(**(options | _given(overrides)))

    def merge(self, **overrides: Any) -> Self:
        """Return a copy with these options changed; one that is None counts as not given."""
        return type(self)(**(self.flat() | _given(overrides)))

    def flat(self) -> dict[str, Any]:
        """Return ``{"memory.hot": value, ...}`` of every option."""
        return {
            f"{group}.{name}": value
            for group in GROUPS
            for name, value in getattr(self, group).model_dump().items()
        } | {"inner": self.inner}


GROUPS: dict[str, type[BaseModel]] = {"memory": MemoryConfig, "fairness": FairnessConfig}
OPTIONS: tuple[str, ...] = (
    *(f"{group}.{name}" for group, model in GROUPS.items() for name in model.model_fields),
    "inner",
)
# hot -> memory.hot, memory.hot -> memory.hot; the short names are unique.
_SHORT = {option.rpartition(".")[2]: option for option in OPTIONS}
_NAMES = _SHORT | {option: option for option in OPTIONS}


def _flatten(options: Mapping[str, Any]) -> dict[str, Written]:
    """Return ``options`` by their full names, whichever way they were written."""
    flat: dict[str, Written] = {}
    for name, value in _walk(options):
        written = value if isinstance(value, Written) else Written(name, value)
        option = _NAMES.get(name)
        if option is None:
            raise ConfigError(
                f"unknown option {written.name!r} (value {written.value!r}): {_nearest(name)}"
            )
        if option in flat:
            raise ConfigError(
                f"{option} is given twice, {_assignment(flat[option])} and "
                f"{_assignment(written)}; keep one of them"
            )
        flat[option] = written
    return flat


def option_names(options: Mapping[str, Any]) -> set[str]:
    """Full names, ``{"memory.hot"}``, of options that are given, whichever way they are written.

    Raises:
        ConfigError: one is unknown or given twice.
    """
    return set(_given(options))


def _assignment(written: Written) -> str:
    return f"{written.name} = {written.value!r}"


def _walk(options: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in options.items():
        if name not in GROUPS:
            yield str(name), value
        elif isinstance(value, GROUPS[name]):
            yield from ((f"{name}.{key}", item) for key, item in value.model_dump().items())
        elif isinstance(value, Mapping):
            yield from ((f"{name}.{key}", item) for key, item in value.items())
        else:
            example = next(iter(GROUPS[name].model_fields))
            raise ConfigError(
                f"{name} = {value!r}: write options below it, as {{{example!r}: ...}}"
            )


def _given(overrides: Mapping[str, Any]) -> dict[str, Written]:
    flat = _flatten(overrides)
    return {option: written for option, written in flat.items() if written.value is not None}


def _nearest(name: str) -> str:
    close = difflib.get_close_matches(name.lower(), _NAMES, n=1, cutoff=0.6)
    if close:
        return f"did you mean {close[0]!r}?"
    return f"the options are {', '.join(_SHORT)}"


def _explain(error: ValidationError, given: Mapping[str, Written]) -> Iterator[str]:
    """Say of each fault which option it is, as it was given, and what to write."""
    for fault in error.errors(include_url=False):
        # A location may end in the name of a union's branch, which is no part of the option.
        option = next(
            name
            for end in range(len(fault["loc"]), 0, -1)
            if (name := ".".join(map(str, fault["loc"][:end]))) in OPTIONS
        )
        context = fault.get("ctx", {})
        cause = context.get("error") or _in_words(fault["type"], context) or fault["msg"]
        yield f"{_assignment(given[option])}: {cause}"


def _in_words(kind: str, context: Mapping[str, Any]) -> str | None:
    """What to write instead, of the faults that pydantic itself finds."""
    words = _WORDS.get(kind)
    return None if words is None else words.format(**context)


_WORDS = {
    "literal_error": "write one of {expected}",
    "greater_than_equal": "write at least {ge}",
    "greater_than": "write more than {gt}",
    "less_than_equal": "write at most {le}",
}


def _from_file(path: Path) -> dict[str, Written]:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"options file {path} cannot be read ({error.strerror}); check the path"
        ) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"options file {path} is not YAML: {error}; mend that line") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(
            f"options file {path} holds {type(content).__name__}; write 'name: value' lines"
        )
    try:
        return _flatten(content)
    except ConfigError as error:
        raise ConfigError(f"options file {path}: {error}") from None


def _from_env(env: Mapping[str, str]) -> dict[str, Written]:
    known = {name.upper().replace(".", "_"): option for name, option in _NAMES.items()}
    found: dict[str, Written] = {}
    for variable, value in env.items():
        if not variable.startswith(ENV_PREFIX) or variable in ENV_OTHER:
            continue
        name = variable.removeprefix(ENV_PREFIX)
        option = known.get(name)
        if option is None:
            _refuse_typo(variable, name, value, known)
        elif option in found and found[option].value != value:
            raise ConfigError(
                f"{variable} = {value!r} contradicts {_assignment(found[option])}; unset one of "
                "them"
            )
        else:
            found[option] = Written(variable, value)
    return found


def _refuse_typo(variable: str, name: str, value: str, known: Mapping[str, str]) -> None:
    """Raise when an unknown variable was meant for kvpass; others may share the prefix."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.75)
    if close:
        raise ConfigError(
            f"unknown variable {variable} = {value!r}: did you mean {ENV_PREFIX}{close[0]}?"
        )
    if name.startswith("MEMORY_"):
        raise ConfigError(
            f"unknown variable {variable} = {value!r}: the variables are "
            f"{', '.join(ENV_PREFIX + short.upper() for short in _SHORT)}"
        )
