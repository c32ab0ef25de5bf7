# SPDX-License-Identifier: Apache-2.0
"""From logits to the next token, on the device, without a synchronisation."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from kvpass.errors import ConfigError

LEAST_TEMPERATURE = 1e-4


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen. Steps in this order, as in transformers.

    Attributes:
        temperature: divides the logits; 0 takes the likeliest token.
        top_k: only this many of the likeliest tokens (Fan et al., ACL 2018).
        top_p: only the fewest tokens whose probabilities reach this sum (nucleus sampling,
            Holtzman et al., ICLR 2020).
        repetition_penalty: divides positive and multiplies negative logits of tokens that are
            there already (Keskar et al., CTRL, 2019).
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        """Check.

        Raises:
            ConfigError: a value is out of range.
        """
        heat = _number(self.temperature)
        # Below, logits over it are beyond the range of float32, and chances no numbers.
        fits = heat == 0 or LEAST_TEMPERATURE <= heat < math.inf
        _check("temperature", self.temperature, fits, f"0 or a number from {LEAST_TEMPERATURE:g}")
        k, p = self.top_k, self.top_p
        whole = isinstance(k, int) and not isinstance(k, bool)
        _check("top_k", k, k is None or (whole and k >= 1), "an integer from 1, or None")
        _check("top_p", p, p is None or 0 < _number(p) <= 1, "a number above 0, up to 1, or None")
        penalty = self.repetition_penalty
        _check("repetition_penalty", penalty, 0 < _number(penalty) < math.inf, "a number above 0")

    @property
    def greedy(self) -> bool:
        """Whether chance has no part."""
        return self.temperature == 0 or self.top_k == 1


def _number(value: object) -> float:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else -1.0


def _check(name: str, value: object, fits: bool, range_: str) -> None:
    if not fits:
        raise ConfigError(f"{name} = {value!r}: give {range_}")


class Sampler:
    """Chooses tokens, and remembers which there were.

    Attributes:
        valid: bool ``[B, 1]``, whether the logits of the last call were numbers to choose by.

    Args:
        options: how to choose.
        ids: ``[B, n]`` all tokens there are.
        shown: bool ``[B, n]``, False where it is padding; None: nowhere.
        generator: source of chance; None: torch's own of the device.
    """

    def __init__(
        self,
        options: Sampling,
        ids: Tensor,
        shown: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        self.options = options
        self._generator = generator
        self._ids, self._shown = ids, shown
        self._seen: Tensor | None = None
        self.valid = torch.ones(len(ids), 1, dtype=torch.bool, device=ids.device)

    def __call__(self, logits: Tensor) -> Tensor:
        """The next tokens, int64 ``[B, 1]``, of logits ``[B, V]``."""
        options = self.options
        # In float32, whatever the model computes in: sums of many small probabilities.
        scores = logits.float()
        highest = scores.amax(-1, keepdim=True)
        self.valid = ~highest.isnan() if options.greedy else highest.isfinite()
        if options.repetition_penalty != 1.0:
            seen = self._of_prompt(scores)
            penalty = options.repetition_penalty
            scores = torch.where(
                seen, torch.where(scores < 0, scores * penalty, scores / penalty), scores
            )
        if options.greedy:
            tokens = scores.argmax(-1, keepdim=True)
        else:
            scores = filtered(scores / options.temperature, options.top_k, options.top_p)
            # As torch.multinomial does, which asks the device whether they are probabilities.
            chance = torch.empty_like(scores).exponential_(generator=self._generator)
            tokens = (scores.softmax(-1) / chance).argmax(-1, keepdim=True)
        if self._seen is not None:
            self._seen.scatter_(1, tokens, True)
        return tokens

    def _of_prompt(self, scores: Tensor) -> Tensor:
        if self._seen is None:
            self._seen = torch.zeros_like(scores, dtype=torch.bool)
            ids = self._ids
            if self._shown is not None:  # padding is no token of the sequence
                first = ids.gather(1, self._shown.int().argmax(1, keepdim=True))
                ids = torch.where(self._shown, ids, first)
            self._seen.scatter_(1, ids, True)
        return self._seen


def filtered(scores: Tensor, top_k: int | None, top_p: float | None) -> Tensor:
    """Scores ``[B, V]`` with -inf where a token is not to be chosen."""
    if top_k is not None and top_k < scores.shape[-1]:
        least = scores.topk(top_k, -1).values[..., -1:]
        scores = scores.masked_fill(scores < least, -math.inf)
    if top_p is not None and top_p < 1:
        ordered, order = scores.sort(-1)
        # Ascending, so that the rest of a sum close to 1 is not lost to rounding.
        away = ordered.softmax(-1).cumsum(-1) <= 1 - top_p
        away[..., -1] = False
        scores = scores.masked_fill(away.scatter(-1, order, away), -math.inf)
    return scores
