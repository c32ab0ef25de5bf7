# SPDX-License-Identifier: Apache-2.0
"""Every architecture that README says is rewritten: all attentions, and the same greedy tokens."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")
from kvpass.cli.matrix import run_cell
from model_zoo.architectures import ARCHITECTURES, Cache, Cell

# Left as they are in one form or another, with a reason that the matrix shows.
PARTLY = ("deepseek_v3", "mllama", "gemma3n")
STEPS = 14  # past the window of 8 and past a block
# Each family once, in its most explicit form; `kvpass models` runs every cell.
CELLS = [
    next(cell for cell in reversed(architecture.cells) if cell.cache == "dynamic" and
         cell.attention != "flex")
    for name, architecture in ARCHITECTURES.items()
    if name not in PARTLY
]  # fmt: skip
CELLS += [
    Cell(name, "tiered", attention)
    for name, attention in (
        *(("llama", "sdpa"), ("mistral", "sdpa"), ("gemma2", "eager"), ("gpt_oss", "eager")),
        *(("bloom", "eager"), ("mpt", "eager"), ("t5", "sdpa"), ("whisper", "sdpa")),
    )
]
CELLS += [Cell(name, "static", "sdpa") for name in ("llama", "mistral", "gemma2")]
CELLS += [Cell("gemma3n", cache, "sdpa") for cache in ("dynamic", "tiered")]
CELLS += [Cell("llama4", "tiered", "sdpa")]
REFUSED = {
    Cell("llama", "dynamic", "flex"): "flex_attention",
    Cell("deepseek_v3", "tiered", "sdpa"): "latent attention",
    Cell("mllama", "dynamic", "sdpa"): "slice of the cache",
}


@pytest.mark.parametrize("cell", CELLS, ids=lambda c: f"{c.architecture}-{c.cache}-{c.attention}")
def test_all_attentions_are_rewritten(cell: Cell) -> None:
    result = run_cell(cell, STEPS)
    assert result.refused == ()
    assert result.rewritten == result.sites > 0
    assert result.unseen == ()
    assert result.tokens_equal
    assert result.max_logit_diff is not None
    assert result.max_logit_diff < 5e-5


@pytest.mark.parametrize("cell", REFUSED, ids=lambda c: f"{c.architecture}-{c.cache}-{c.attention}")
def test_what_is_left_alone_has_its_reason_and_is_right(cell: Cell) -> None:
    result = run_cell(cell, STEPS)
    assert result.rewritten < result.sites
    assert any(REFUSED[cell] in refused.reason for refused in result.refused)
    assert result.tokens_equal


# `kvpass models --inner inductor` runs them all; these cover every option of the ops.
@pytest.mark.parametrize(
    ("name", "attention", "inner", "cache"),
    [
        ("gemma2", "eager", "aot_eager", "dynamic"),
        ("gpt_oss", "eager", "aot_eager", "tiered"),
        ("bloom", "eager", "aot_eager", "dynamic"),
        ("t5", "sdpa", "aot_eager", "tiered"),
        ("gpt_oss", "eager", "inductor", "dynamic"),
        ("t5", "sdpa", "inductor", "dynamic"),
    ],
)
def test_other_inner_compilers_agree(name: str, attention: str, inner: str, cache: Cache) -> None:
    result = run_cell(Cell(name, cache, attention), 12, inner)
    assert result.refused == ()
    assert result.rewritten == result.sites > 0
    assert result.tokens_equal
