# SPDX-License-Identifier: Apache-2.0
"""Every architecture that README says is rewritten: all attentions, and the same greedy tokens."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")
import torch

from kvpass.cli.matrix import BATCH, SOURCE_TOKENS, make_cache, model_inputs, run_cell
from kvpass.graph.report import observed
from model_zoo.architectures import ARCHITECTURES, Cache, Cell
from tests.models import compile_with, tiered

# Left as they are in one form or another, with a reason that the matrix shows.
PARTLY = ("mllama", "gemma3n")
STEPS = 14  # past the window of 8 and past a block
TIERED = ("qwen2", "mixtral", "gemma", "phi3", "gptj", "falcon", "bloom", "mpt", "cohere", "olmo2",
          "smollm3", "whisper", "minicpm3", "olmo", "phimoe", "exaone4")  # fmt: skip
# Each family once, in its most explicit form; `kvpass models` runs every cell.
CELLS = [
    next(cell for cell in reversed(architecture.cells) if cell.attention != "flex" and
         cell.cache == ("tiered" if name in TIERED else "dynamic"))
    for name, architecture in ARCHITECTURES.items()
    if name not in PARTLY
]  # fmt: skip
CELLS += [
    Cell(name, "tiered", attention)
    for name, attention in (
        *(("mistral", "sdpa"), ("gemma2", "eager"), ("gpt_oss", "eager"), ("t5", "sdpa")),
        ("deepseek_v3", "sdpa"),
    )
]
CELLS += [Cell("deepseek_v3", "static", "sdpa")]
CELLS += [Cell("gemma3n", cache, "sdpa") for cache in ("dynamic", "tiered")]
CELLS += [Cell("gemma2", "tiered", "flex"), Cell("mistral", "dynamic", "flex")]
CELLS += [Cell("llama4", "tiered", "sdpa")]
REFUSED = {
    Cell("llama", "static", "flex"): "is written in the graph",
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


@pytest.mark.parametrize("form", ["dynamic", "tiered"])
def test_cross_attention_of_mllama_under_its_mask(form: str) -> None:
    architecture = ARCHITECTURES["mllama"]
    model = architecture.build("sdpa")
    results, reports = [], []
    for compiled in (False, True):
        cache = make_cache(architecture, model, "dynamic", 0)
        if compiled:
            compile_with(model)
            cache = tiered(model) if form == "tiered" else cache
        given = model_inputs(architecture, model)
        generator = torch.Generator().manual_seed(1)
        logits = []
        with torch.no_grad(), observed(reports.append):
            for _ in range(4):
                n = given["input_ids"].shape[1]
                hidden = torch.rand(BATCH, 1, n, SOURCE_TOKENS, generator=generator) > 0.6
                hidden[..., 0] = False
                mask = torch.zeros(hidden.shape).masked_fill(hidden, torch.finfo().min)
                rows = torch.ones(BATCH, 1, n, 1)
                logits.append(
                    model(
                        **given,
                        past_key_values=cache,
                        cross_attention_mask=mask,
                        full_text_row_masked_out_mask=rows,
                    ).logits[:, -1]
                )
                given = {"input_ids": logits[-1].argmax(-1)[:, None]}
        results.append(logits)
    assert reports and all(report.rewritten == 3 for report in reports)
    assert all((a - b).abs().max() < 5e-5 for a, b in zip(*results, strict=True))


# `kvpass models --inner inductor` runs them all; these cover every option of the ops.
@pytest.mark.parametrize(
    ("name", "attention", "inner", "cache"),
    [
        ("gemma2", "eager", "aot_eager", "dynamic"),
        ("gpt_oss", "eager", "aot_eager", "tiered"),
        ("bloom", "eager", "aot_eager", "dynamic"),
        ("llama", "flex", "aot_eager", "tiered"),
        ("gpt_oss", "eager", "inductor", "dynamic"),
        ("t5", "sdpa", "inductor", "tiered"),
    ],
)
def test_other_inner_compilers_agree(name: str, attention: str, inner: str, cache: Cache) -> None:
    result = run_cell(Cell(name, cache, attention), 12, inner)
    assert result.refused == ()
    assert result.rewritten == result.sites > 0
    assert result.tokens_equal
