# SPDX-License-Identifier: Apache-2.0
"""Specification of a random attention module; tests/test_grammar.py says what its words mean."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch

FOLDED = ("bmm", "3-d matmul", "baddbmm")
"""Products over batch and heads as one axis."""


class _Short:
    """Prints the fields that differ from their default."""

    def __repr__(self) -> str:
        values = [
            f"{field.name}={getattr(self, field.name)!r}"
            for field in dataclasses.fields(self)  # type: ignore[arg-type]
            if getattr(self, field.name) != field.default
        ]
        return f"{type(self).__name__}({', '.join(values)})"


@dataclass(frozen=True, repr=False)
class Site(_Short):
    """One attention; words as in the grammar of tests/test_grammar.py."""

    kv_heads: int = 1
    group: int = 1
    head_dim_k: int = 16
    head_dim_v: int = 16
    anchor: str = "sdpa"
    product: str = "@"
    transpose: str = "mT"
    repeat: str = "expand"
    scale: str = "times"
    factor: float = 0.25
    mask_first: bool = False
    softcap: float = 0.0
    softcap_form: str = "steps"
    sinks: str = ""
    softmax: str = "F"
    precision: str = ""
    dropout: bool = False
    visible: str = "none"
    spelling: str = "le"
    window: int = 0
    padding: str = ""
    apply: str = "bool"
    hidden: str = "-inf"
    bias: str = ""
    bias_first: bool = True
    start: str = "tensor"
    stored: int = 0
    keep: bool = False
    join: str = "list"
    foreign: str = ""

    @property
    def heads(self) -> int:
        """Query heads."""
        return self.kv_heads * self.group

    @property
    def widths(self) -> list[int]:
        """Columns of queries, keys and values in the input of the model."""
        return [
            self.heads * self.head_dim_k,
            self.kv_heads * self.head_dim_k,
            self.kv_heads * self.head_dim_v,
        ]


@dataclass(frozen=True, repr=False)
class Spec(_Short):
    """A model of a few attentions side by side, and the calls that are made of it."""

    batch: int = 1
    dtype: str = "float32"
    steps: tuple[int, ...] = (1, 1)
    cache: str = "functional"
    dynamic: bool | None = None
    seed: int = 0
    sites: tuple[Site, ...] = (Site(),)

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of all inputs."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    @property
    def foreign(self) -> str:
        """The piece outside of the grammar that is mixed in, if any."""
        return next((site.foreign for site in self.sites if site.foreign), "")
