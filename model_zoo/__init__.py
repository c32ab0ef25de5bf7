# SPDX-License-Identifier: Apache-2.0
"""A small decoder, the checkpoints it can load, and greedy decoding with any KV cache."""

from __future__ import annotations

from model_zoo.checkpoints import LoadedModel, available, load
from model_zoo.configs import DecoderConfig
from model_zoo.decoder import Decoder, DenseCache
from model_zoo.decoding import greedy

__all__ = [
    "Decoder",
    "DecoderConfig",
    "DenseCache",
    "LoadedModel",
    "available",
    "greedy",
    "load",
]
