# SPDX-License-Identifier: Apache-2.0
"""Where options are written: keyword arguments, dicts, YAML files and the environment.

Each source becomes ``{"memory.hot": Written(...)}``, by full names, whichever way it was written.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel

from kvpass.config.families import FamilyConfig, family_name
from kvpass.errors import ConfigError

ENV_PREFIX = "KVPASS_"
ENV_FILE = "KVPASS_CONFIG"
"""Variable that names a YAML file of options."""
# Variables of other parts of the project, which are not options.
ENV_OTHER = frozenset({"KVPASS_CACHE", "KVPASS_SMOLLM2_WHEEL", ENV_FILE})
FAMILIES = "optimizations"
# Other names of an option, as other descriptions of the field have them.
ALIASES = {"migration_threshold": "memory.gpu_threshold"}
MAX_DEPTH = 3


@dataclass(frozen=True)
class Written:
    """The value of an option and what the user set it by; may stand for a value of ``Config``.

    Attributes:
        name: key, variable or flag as the user typed it, for messages: ``KVPASS_HOT``, ``--hot``.
        value: what was given.
        source: where it was written, for reports: ``kvpass.yaml:3``, ``variable KVPASS_HOT``.
            Empty is a flag where the name begins with ``--``, else a keyword argument.
    """

    name: str
    value: Any
    source: str = ""

    @property
    def origin(self) -> str:
        """Where the value came from, in words."""
        if self.source:
            return self.source
        return f"flag {self.name}" if self.name.startswith("--") else "keyword argument"

    def __str__(self) -> str:
        """The assignment as it was written."""
        return f"{self.name} = {self.value!r}"


def _unknown(written: Written, advice: str) -> str:
    """The message for a name that no option has."""
    value, source = written.value, written.source
    if isinstance(value, Mapping):  # of a group of that name
        inner = [each for each in value.values() if isinstance(each, Written)]
        source = source or (inner[0].source if inner else "")
        value = {
            key: each.value if isinstance(each, Written) else each for key, each in value.items()
        }
    where = f" of {source}" if source else ""
    return f"unknown option {written.name!r}{where} (value {value!r}): {advice}"


@dataclass(frozen=True)
class Names:
    """The names that options have.

    Attributes:
        groups: model of each group, by name.
        options: full names.
    """

    groups: Mapping[str, type[BaseModel]]
    options: tuple[str, ...]

    @property
    def short(self) -> dict[str, str]:
        """``hot -> memory.hot``; the short names are unique."""
        return {option.rpartition(".")[2]: option for option in self.options}

    @property
    def known(self) -> dict[str, str]:
        """Every name that an option may be written by, but for those of families."""
        aliases = ALIASES | {
            f"{option.rpartition('.')[0]}.{alias}": option for alias, option in ALIASES.items()
        }
        return aliases | self.short | {option: option for option in self.options}

    def flatten(self, options: Mapping[str, Any], source: str = "") -> dict[str, Written]:
        """Return ``options`` by their full names.

        Args:
            options: nested or flat; values may be :class:`Written`.
            source: where those that are not ``Written`` come from.

        Raises:
            ConfigError: an option is unknown (the nearest name is given) or given twice.
        """
        flat: dict[str, Written] = {}
        known = self.known
        for name, value in self._walk(options):
            written = value if isinstance(value, Written) else Written(name, value, source)
            option = known.get(name) or self._family_option(name, written)
            if option is None:
                raise ConfigError(_unknown(written, self._nearest(name)))
            if option not in flat:
                flat[option] = written
            elif not (option in ALIASES.values() and _same(flat[option].value, written.value)):
                raise ConfigError(
                    f"{option} is given twice, {flat[option]} and {written}; keep one of them"
                )
        return flat

    def from_file(self, path: Path) -> dict[str, Written]:
        """Read a YAML file of options, by group or flat.

        Raises:
            ConfigError: it cannot be read, is no YAML mapping, or has an unknown or doubled option.
        """
        try:
            loader = yaml.SafeLoader(path.read_text(encoding="utf-8"))
            try:
                root = loader.get_single_node()
                content = {} if root is None else _mapping(loader, root, path, 1)
            finally:
                loader.dispose()
        except OSError as error:
            raise ConfigError(
                f"options file {path} cannot be read ({error.strerror}); check the path"
            ) from None
        except RecursionError:
            raise ConfigError(f"options file {path}: too deeply nested; write it flat") from None
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise ConfigError(f"options file {path} is not YAML: {error}; mend that line") from None
        try:
            return self.flatten(content)
        except ConfigError as error:
            raise ConfigError(f"options file {path}: {error}") from None

    def from_env(self, env: Mapping[str, str]) -> dict[str, Written]:
        """Read ``KVPASS_HOT``, ``KVPASS_MEMORY_HOT``, ``KVPASS_OPTIMIZATIONS_LLAMA_BLOCK_SIZE``.

        Raises:
            ConfigError: a misspelt variable, or two that contradict each other.
        """
        known = {name.upper().replace(".", "_"): option for name, option in self.known.items()}
        found: dict[str, Written] = {}
        for variable, value in env.items():
            if not variable.startswith(ENV_PREFIX) or variable in ENV_OTHER:
                continue
            name = variable.removeprefix(ENV_PREFIX)
            written = Written(variable, value, f"variable {variable}")
            option = known.get(name) or _family_variable(name)
            if option is None:
                self._refuse_typo(written, name, known)
            elif option in found and found[option].value != value:
                raise ConfigError(f"{written} contradicts {found[option]}; unset one of them")
            else:
                found[option] = written
        return found

    def _walk(self, options: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        for name, value in options.items():
            inner = value.value if isinstance(value, Written) else value
            if name == FAMILIES:
                yield from _walk_families(inner)
            elif str(name).startswith(f"{FAMILIES}.") and name.count(".") == 1:
                yield from _walk_families({name.partition(".")[2]: value})
            elif name not in self.groups:
                yield str(name), value
            elif isinstance(inner, self.groups[name]):
                yield from ((f"{name}.{key}", item) for key, item in inner)
            elif isinstance(inner, Mapping):
                yield from ((f"{name}.{key}", item) for key, item in inner.items())
            else:
                example = next(iter(self.groups[name].model_fields))
                raise ConfigError(
                    f"{name} = {inner!r}: write options below it, as {{{example!r}: ...}}"
                )

    def _family_option(self, name: str, written: Written) -> str | None:
        """The full name of ``optimizations.<family>.<option>``; None for another name."""
        group, _, rest = name.partition(".")
        if group != FAMILIES or not rest:
            return None
        family, _, option = rest.rpartition(".")
        family = family_name(family)
        if option not in FamilyConfig.model_fields:
            close = difflib.get_close_matches(option, FamilyConfig.model_fields, n=1)
            advice = f"did you mean {close[0]!r}?" if close else ""
            fields = ", ".join(FamilyConfig.model_fields)
            raise ConfigError(
                _unknown(replace(written, name=name), advice or f"a family has {fields}")
            )
        return f"{FAMILIES}.{family}.{option}"

    def _nearest(self, name: str) -> str:
        last = name.lower().rpartition(".")[2]
        if last in self.short:  # in the wrong group
            return f"did you mean {self.short[last]!r}?"
        names = [*self.known, *self.groups, FAMILIES]
        close = difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.6)
        if close:
            return f"did you mean {close[0]!r}?"
        return f"the options are {', '.join(self.short)}, and {FAMILIES}.<family>.<option>"

    def _refuse_typo(self, written: Written, name: str, known: Mapping[str, str]) -> None:
        """Raise when an unknown variable was meant for kvpass; others may share the prefix."""
        close = difflib.get_close_matches(
            name, [*known, ENV_FILE.removeprefix(ENV_PREFIX)], n=1, cutoff=0.75
        )
        if close:
            raise ConfigError(f"unknown variable {written}: did you mean {ENV_PREFIX}{close[0]}?")
        groups = (*self.groups, FAMILIES)
        if name.startswith(tuple(f"{group.upper()}_" for group in groups)):
            raise ConfigError(
                f"unknown variable {written}: the variables are "
                f"{', '.join(ENV_PREFIX + short.upper() for short in self.short)}, and "
                f"{ENV_PREFIX}OPTIMIZATIONS_<FAMILY>_<OPTION>"
            )


def _walk_families(families: object) -> Iterator[tuple[str, Any]]:
    example = "write families below it, as {'llama': {'block_size': [64, 64]}}"
    if not isinstance(families, Mapping):
        raise ConfigError(f"{FAMILIES} = {families!r}: {example}")
    for family, section in families.items():
        if isinstance(section, Written) and isinstance(section.value, Mapping):
            section = section.value
        if isinstance(section, FamilyConfig):
            section = {key: item for key, item in section if item is not None}
        if not isinstance(section, Mapping):
            raise ConfigError(f"{FAMILIES}.{family} = {_plain(section)!r}: {example}")
        yield from ((f"{FAMILIES}.{family}.{key}", item) for key, item in section.items())


def _plain(value: object) -> object:
    return value.value if isinstance(value, Written) else value


def _same(first: object, second: object) -> bool:
    try:
        return float(first) == float(second)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return first == second


def _family_variable(name: str) -> str | None:
    options = "|".join(option.upper() for option in FamilyConfig.model_fields)
    match = re.fullmatch(rf"OPTIMIZATIONS_(\w+?)_({options})", name)
    if match is None:
        return None
    return f"{FAMILIES}.{family_name(match[1])}.{match[2].lower()}"


def _mapping(loader: yaml.SafeLoader, node: yaml.Node, path: Path, depth: int) -> dict[str, Any]:
    """The content of a YAML mapping; values know their line, and no key may stand twice."""
    if not isinstance(node, yaml.MappingNode):
        kind = node.tag.rpartition(":")[2]
        article = {"seq": "list"}.get(kind, kind)
        raise ConfigError(f"options file {path} holds {article}; write 'name: value' lines")
    content: dict[str, Any] = {}
    for key_node, value_node in node.value:
        line = f"{path}:{key_node.start_mark.line + 1}"
        key = loader.construct_object(key_node, deep=True)
        if not isinstance(key, str):
            raise ConfigError(f"{line}: {key!r} is no name of an option; write 'name: value' lines")
        if key in content:
            raise ConfigError(f"{line}: {key} is given twice in one place; keep one of them")
        if isinstance(value_node, yaml.MappingNode) and depth < MAX_DEPTH:
            content[key] = _mapping(loader, value_node, path, depth + 1)
        else:
            value = loader.construct_object(value_node, deep=True)
            if isinstance(value, int | float) and ":" in value_node.value:
                value = value_node.value  # 12:30 is 750 in YAML 1.1, and to nobody else
            content[key] = Written(key, value, line)
    return content


def named(flat: Mapping[str, Written]) -> dict[str, Written]:
    """Give options of families the name they are known by in messages, which a key alone lacks."""
    return {
        option: replace(written, name=option)
        if written.name in FamilyConfig.model_fields and option.startswith(FAMILIES)
        else written
        for option, written in flat.items()
    }


def read_file_variable(env: Mapping[str, str]) -> Path | None:
    """Return the file that ``KVPASS_CONFIG`` names, or None where it is unset.

    Raises:
        ConfigError: the variable is empty.
    """
    name = env.get(ENV_FILE)
    if name is None:
        return None
    if not name.strip():
        raise ConfigError(f"{ENV_FILE} = {name!r}: name a YAML file of options, or unset it")
    return Path(os.path.expanduser(name))
