# SPDX-License-Identifier: Apache-2.0
"""What the options of a model's family become for one cache."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Sequence
from functools import cache
from typing import Any

from kvpass.config import Config
from kvpass.config.families import DEFAULT, family_name
from kvpass.errors import ConfigError
from kvpass.runtime.batch import Batch
from kvpass.runtime.readahead import ReadAhead
from kvpass.warn import warn_user

PREFETCH_DISTANCE = 4
"""Cold blocks ahead where no family says otherwise."""
ORIGIN = "options= of torch.compile"
"""Where the backend's own options are written."""
EXPERTS = ("num_local_experts", "n_routed_experts", "num_experts")
"""Attributes of a model's config that hold the experts of a mixture."""


def family_of(model: Any) -> str:
    """The family of a model's config: its ``model_type``, or ``default`` where that is no name."""
    try:
        return family_name(getattr(model, "model_type", None) or DEFAULT)
    except (AttributeError, ConfigError):
        return DEFAULT


def tile_of(config: Config, model: Any, family: str) -> tuple[int, int] | None:
    """Queries and keys of a kernel's tile; None leaves it to the measured tables.

    Args:
        config: the options.
        model: config of the decoder, with ``hidden_size`` and perhaps experts.
        family: of the model.

    Raises:
        ConfigError: the tile is ``auto`` and the model has no hidden size.
    """
    experts = next((n for name in EXPERTS if (n := getattr(model, name, None))), None)
    width = getattr(model, "hidden_size", None)
    return config.family(family, hidden_size=width, experts=experts).tile


def retention(config: Config, model_type: str, layers: int) -> list[float]:
    """How much longer than others the blocks of each layer stay hot: 1 is twice the accesses.

    Args:
        config: the options; ``retention_priority`` of the family counts.
        model_type: family of the model.
        layers: layers that keep keys and values.

    Raises:
        ConfigError: the expression has no finite value at one of the layers.
    """
    expression = config.section(model_type).retention_priority
    if expression is None:
        return [0.0] * layers
    return [expression.evaluate(layer=layer, layers=layers) for layer in range(layers)]


def read_ahead(config: Config, model_type: str) -> ReadAhead:
    """How far ahead cold blocks are asked for."""
    distance = config.section(model_type).prefetch_distance
    attention = config.attention
    return ReadAhead(
        distance=PREFETCH_DISTANCE if distance is None else distance,
        lookahead=attention.lookahead if attention.prefetch is not False else 0,
    )


def stages(config: Config) -> bool:
    """Whether decode steps on a GPU copy the next layer's cold blocks, as they are compiled."""
    return config.attention.prefetch is not False


def tune(batch: Batch, config: Config, model_type: str) -> None:
    """Make the options of a family hold for a batch.

    Raises:
        ConfigError: the family's expression has no finite value at one of the layers.
    """
    batch.retain(retention(config, model_type, batch.layers))
    _warn_of_misspelt(family_name(model_type), tuple(name for name, _ in config.optimizations))
    if batch.device.type == "cpu":
        batch.ahead = read_ahead(config, model_type)
    else:
        _warn_of_prefetch(tuple(prefetch_options(config, model_type)))
        written = config.written("attention.prefetch")
        off = config.attention.prefetch is False
        if off and written is not None and written.origin == "keyword argument":
            _warn_of_backend(str(written))


@cache
def _warn_of_misspelt(family: str, sections: tuple[str, ...]) -> None:
    """Options of a family that nobody has heard of, and that is nearly this one."""
    if family == DEFAULT or family in sections:
        return
    models = sys.modules.get("transformers.models.auto.configuration_auto")
    known = getattr(models, "CONFIG_MAPPING_NAMES", {})
    for name in difflib.get_close_matches(family, sections, cutoff=0.75):
        if name not in known:
            warn_user(
                f"optimizations.{name} does not hold for this model, whose family is {family}: "
                f"if that was meant, write optimizations.{family}"
            )


def prefetch_options(config: Config, model_type: str) -> Sequence[str]:
    """The options of reading ahead that were set, for this family, as they were written."""
    families = (family_name(model_type), DEFAULT)
    options = (
        "attention.lookahead",
        *(f"optimizations.{family}.prefetch_distance" for family in dict.fromkeys(families)),
    )
    return [str(written) for option in options if (written := config.written(option))]


@cache
def _warn_of_prefetch(given: tuple[str, ...]) -> None:
    """Once for the same options."""
    if given:
        warn_user(
            f"{', '.join(given)}: without effect on a GPU, where cold blocks are copied one layer "
            "ahead or read in place; on a CPU they are read ahead from disk"
        )


@cache
def _warn_of_backend(given: str) -> None:
    """Once for the same option."""
    warn_user(
        f"{given}: without effect on a GPU as an option of a cache: there compiled steps read "
        "ahead unless the backend was told otherwise, options={'prefetch': False}"
    )
