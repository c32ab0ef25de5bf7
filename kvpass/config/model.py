# SPDX-License-Identifier: Apache-2.0
"""The options in one frozen model, checked when it is made."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError

from kvpass.config.families import (
    DEFAULT,
    FamilyConfig,
    ResolvedFamily,
    combined,
    family_name,
    resolve,
)
from kvpass.config.sources import FAMILIES, Names, Written, named, read_file_variable
from kvpass.config.values import (
    BlockSize,
    Boolean,
    BooleanOrAuto,
    Directory,
    DurationOrNone,
    Inner,
    Integer,
    Number,
    PageSize,
    SizeOrAuto,
)
from kvpass.errors import ConfigError

MOST = 1 << 40
"""Of tokens and steps: what no sequence reaches, and every computation with them holds."""


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
        1024, ge=0, le=MOST, description="First tokens of a sequence that stay in the hot arena."
    )
    heat_interval: Integer = Field(
        64,
        ge=1,
        le=MOST,
        description="Decode steps between two readings of the heat counters, a window.",
    )
    page_size: PageSize = Field(
        2 << 20,
        description="Slab by which the hot arena grows and shrinks, at least; 4 KiB or more.",
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
    poison: Boolean = Field(
        False, description="Fill freed slots with a pattern, so that a stale read shows."
    )


class AttentionConfig(BaseModel):
    """Options of reading ahead what later layers will read."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    prefetch: BooleanOrAuto = Field(
        "auto",
        description="Whether cold blocks of later layers are read ahead; auto does. On a GPU an "
        "option of the backend: decode steps copy those of the next layer.",
    )
    lookahead: Integer = Field(
        4, ge=1, le=64, description="Layers ahead whose cold blocks are read ahead."
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
    ``Config(memory={"hot": "64MiB"})`` are the same. Two configs are equal when their options are,
    wherever these were written.

    Raises:
        ConfigError: an option is unknown (the nearest name is given), given twice, contradicts
            another, or its value does not fit; the message names the option as it was written, the
            value and what to write instead.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    memory: MemoryConfig = Field(default_factory=MemoryConfig)
    attention: AttentionConfig = Field(default_factory=AttentionConfig)
    fairness: FairnessConfig = Field(default_factory=FairnessConfig)
    optimizations: tuple[tuple[str, FamilyConfig], ...] = Field(
        (), description="Options by model family, sorted by its name."
    )
    inner: Inner = Field(
        "auto",
        description="Compiler of the rest of the graph: inductor, aot_eager, eager, or auto "
        "(inductor where a C++ compiler or GPU is there).",
    )
    cuda_graphs: BooleanOrAuto = Field(
        "auto",
        description="Capture decode steps into CUDA graphs, on a GPU; 'auto' does where that is "
        "possible, true says what is not.",
    )
    _written: dict[str, Written] = PrivateAttr(default_factory=dict)

    def __init__(self, **options: Any) -> None:
        nested: dict[str, Any] = {group: {} for group in GROUPS}
        families: dict[str, dict[str, Any]] = {}
        given = named(NAMES.flatten(options))
        for key, written in given.items():
            group, _, name = key.rpartition(".")
            if group.startswith(FAMILIES):
                families.setdefault(group.partition(".")[2], {})[name] = written.value
            else:
                (nested[group] if group else nested)[name] = written.value
        names = sorted(families)
        nested[FAMILIES] = tuple((name, families[name]) for name in names)
        try:
            super().__init__(**nested)
        except ValidationError as error:
            raise ConfigError("; ".join(_explain(error, given, names))) from None
        self._written.update(given)
        _check_relations(self, given)

    @classmethod
    def load(
        cls,
        file: str | os.PathLike[str] | None = None,
        env: Mapping[str, str] | None = None,
        origin: str = "",
        **overrides: Any,
    ) -> Self:
        """Combine keyword arguments, environment, a YAML file and the defaults, in that order.

        Args:
            file: a YAML file of options, flat or by group; None reads the one that the variable
                ``KVPASS_CONFIG`` names, if it is set.
            env: environment with ``KVPASS_MEMORY_HOT`` or ``KVPASS_HOT``; None is ``os.environ``.
            origin: where ``overrides`` were written, for reports; empty is keyword arguments.
            overrides: options; one that is None counts as not given.

        Raises:
            ConfigError: as the class, and for an unreadable file or a misspelt variable.
        """
        env = os.environ if env is None else env
        path = Path(file) if file is not None else read_file_variable(env)
        options = NAMES.from_file(path) if path is not None else {}
        options |= NAMES.from_env(env)
        return cls(**(options | _given(overrides, origin)))

    def merge(self, **overrides: Any) -> Self:
        """Return a copy with these options changed; one that is None counts as not given."""
        return type(self)(**(self._written | _given(overrides, "")))

    def flat(self) -> dict[str, Any]:
        """Return ``{"memory.hot": value, ...}`` of every option, and of families those set."""
        groups = {
            f"{group}.{name}": value for group in GROUPS for name, value in getattr(self, group)
        }
        families = {
            f"{FAMILIES}.{family}.{name}": value
            for family, section in self.optimizations
            for name, value in section
            if value is not None
        }
        return groups | {name: getattr(self, name) for name in OF_BACKEND} | families

    def written(self, option: str) -> Written | None:
        """Return how an option was set, by its full name; None where the default holds."""
        return self._written.get(option)

    def family(
        self, model_type: str, *, hidden_size: int | None = None, experts: int | None = None
    ) -> ResolvedFamily:
        """Return what holds for models of a family.

        Args:
            model_type: as in the model's config: ``llama``, ``qwen2``, ``mixtral``. Options that
                its own section does not set are those of the section ``default``.
            hidden_size: width of the model; decides the tile where that is ``auto``.
            experts: experts of a mixture; None, 0 or 1 is a dense model.

        Raises:
            ConfigError: no such name is possible, or ``auto`` lacks the hidden size.
        """
        own, shared = self._sections(model_type)
        family = family_name(model_type)
        return resolve(family, own, shared, hidden_size=hidden_size, experts=experts)

    def section(self, model_type: str) -> FamilyConfig:
        """Return the options of a family as they were given; unset ones are those of ``default``.

        Raises:
            ConfigError: no such name is possible.
        """
        return combined(*self._sections(model_type))

    def _sections(self, model_type: str) -> tuple[FamilyConfig | None, FamilyConfig | None]:
        sections = dict(self.optimizations)
        return sections.get(family_name(model_type)), sections.get(DEFAULT)

    def __eq__(self, other: object) -> bool:
        """Whether all options are equal, wherever they were written."""
        return type(self) is type(other) and self.__dict__ == other.__dict__

    def __hash__(self) -> int:
        """Of the options alone."""
        return hash(tuple(self.__dict__.items()))


OF_BACKEND = ("inner", "cuda_graphs")
"""Options of the compiler, without a group."""

GROUPS: dict[str, type[BaseModel]] = {
    "memory": MemoryConfig,
    "attention": AttentionConfig,
    "fairness": FairnessConfig,
}
OPTIONS: tuple[str, ...] = (
    *(f"{group}.{name}" for group, model in GROUPS.items() for name in model.model_fields),
    *OF_BACKEND,
)
NAMES = Names(GROUPS, OPTIONS)


def option_names(options: Mapping[str, Any]) -> set[str]:
    """Full names, ``{"memory.hot"}``, of options that are given, whichever way they are written.

    Raises:
        ConfigError: one is unknown or given twice.
    """
    return set(_given(options, ""))


def refuse_options_of_backend(options: Mapping[str, Any], whose: str) -> None:
    """Refuse options that only the compiler uses.

    Args:
        options: as they were given.
        whose: what they were given to, in words.

    Raises:
        ConfigError: one is among them.
    """
    for name in OF_BACKEND:
        if name in options:
            raise ConfigError(
                f"{name} = {options[name]!r}: a {whose} compiles nothing; give it to the backend, "
                f'options={{"{name}": ...}}'
            )


def _given(overrides: Mapping[str, Any], origin: str) -> dict[str, Written]:
    flat = NAMES.flatten(overrides, origin)
    return {option: written for option, written in flat.items() if written.value is not None}


def _check_relations(config: Config, given: Mapping[str, Written]) -> None:
    """Refuse options that contradict each other.

    Raises:
        ConfigError: they do; both are named as they were written.
    """

    def shown(option: str) -> str:
        written = given.get(option)
        return str(written) if written else f"{option} = {config.flat()[option]!r} (the default)"

    fairness = config.fairness
    if fairness.latency_weight + fairness.token_weight == 0:
        raise ConfigError(
            f"{shown('fairness.latency_weight')} and {shown('fairness.token_weight')}: with both "
            "weights 0 no sequence has a share; make one of them positive"
        )


def _explain(
    error: ValidationError, given: Mapping[str, Written], families: list[str]
) -> Iterator[str]:
    """Say of each fault which option it is, as it was given, and what to write."""
    for fault in error.errors(include_url=False):
        loc = fault["loc"]
        if loc[0] == FAMILIES:  # optimizations, index of the pair, 1 of the pair, option
            option = f"{FAMILIES}.{families[int(loc[1])]}.{loc[3]}"
        else:
            # A location may end in the name of a union's branch, which is no part of the option.
            option = next(
                name
                for end in range(len(loc), 0, -1)
                if (name := ".".join(map(str, loc[:end]))) in OPTIONS
            )
        context = fault.get("ctx", {})
        cause = context.get("error") or _in_words(fault["type"], context) or fault["msg"]
        written = given[option]
        # Of a file, its name and line; a variable or flag names itself.
        place = f"{written.source}: " if ":" in written.source else ""
        yield f"{place}{written}: {cause}"


def _in_words(kind: str, context: Mapping[str, Any]) -> str | None:
    """What to write instead, of the faults that pydantic itself finds."""
    words = _WORDS.get(kind)
    return None if words is None else words.format(**context)


_WORDS = {
    "literal_error": "write one of {expected}",
    "greater_than_equal": "write at least {ge}",
    "greater_than": "write more than {gt}",
    "less_than": "write less than {lt}",
    "less_than_equal": "write at most {le}",
}
