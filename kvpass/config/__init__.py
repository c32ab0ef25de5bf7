# SPDX-License-Identifier: Apache-2.0
"""All options of kvpass in one frozen model, checked when it is made.

An option has one name, ``memory.hot``, and is also accepted as ``hot`` and inside a nested dict
``{"memory": {"hot": ...}}``, so keyword arguments, ``options=`` of ``torch.compile``, environment
variables and YAML files all say the same. ``optimizations.<family>.<option>`` holds for the models
of one family. A config remembers where each option was written.
"""

from __future__ import annotations

from kvpass.config.expressions import Expression
from kvpass.config.families import FamilyConfig, ResolvedFamily
from kvpass.config.model import (
    GROUPS,
    OPTIONS,
    AttentionConfig,
    Config,
    FairnessConfig,
    MemoryConfig,
    option_names,
    refuse_options_of_backend,
)
from kvpass.config.sources import ENV_OTHER, ENV_PREFIX, Written
from kvpass.config.values import Duration

__all__ = [
    "ENV_OTHER",
    "ENV_PREFIX",
    "GROUPS",
    "OPTIONS",
    "AttentionConfig",
    "Config",
    "Duration",
    "Expression",
    "FairnessConfig",
    "FamilyConfig",
    "MemoryConfig",
    "ResolvedFamily",
    "Written",
    "option_names",
    "refuse_options_of_backend",
]
