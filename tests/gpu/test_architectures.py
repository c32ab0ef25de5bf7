# SPDX-License-Identifier: Apache-2.0
"""Softcap, sinks, windows, biases and cross attention of real architectures on a GPU."""

from __future__ import annotations

import pytest
import torch
from torch.utils._pytree import tree_map_only

import kvpass
from kvpass.cli import matrix
from kvpass.graph.report import observed
from model_zoo.architectures import ARCHITECTURES

pytest.importorskip("transformers")
pytestmark = pytest.mark.gpu

STEPS = 40  # past the window, and past a block


@pytest.mark.parametrize("cache", ["dynamic", "tiered"])
@pytest.mark.parametrize(
    ("name", "attention"),
    [
        *(("gemma2", "eager"), ("gpt_oss", "eager"), ("mistral", "sdpa"), ("bloom", "eager")),
        *(("mpt", "eager"), ("falcon_alibi", "sdpa"), ("t5", "sdpa"), ("whisper", "sdpa")),
    ],
)
def test_same_tokens_as_uncompiled(name, attention, cache):
    architecture = ARCHITECTURES[name]
    model = architecture.build(attention)
    inputs = matrix.model_inputs(architecture, model)
    model = model.to("cuda")
    inputs = tree_map_only(torch.Tensor, lambda x: x.cuda(), inputs)
    limit = matrix.PROMPT_TOKENS + STEPS + 8
    plain = matrix.make_cache(architecture, model, "dynamic", limit)
    expected = matrix.decode(model, plain, inputs, STEPS)
    torch._dynamo.reset()
    options = {"inner": "eager", **matrix.TIERS}
    compiled = torch.compile(model, backend=kvpass.backend, options=options)
    reports = []
    with observed(reports.append):
        got = matrix.decode(
            compiled, matrix.make_cache(architecture, model, cache, limit), inputs, STEPS
        )
    sites = [site for report in reports for site in report.sites if "encoder." not in site.module]
    assert sites
    assert all(site.rewritten for site in sites), [site.reason for site in sites]
    equal, difference = matrix.compare(got, expected)
    assert equal
    assert difference < 1e-3
