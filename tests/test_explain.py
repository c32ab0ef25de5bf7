# SPDX-License-Identifier: Apache-2.0
"""kvpass.explain: form, mask in words, tensors that are gone, and the graphs as text."""

from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint
from transformers import DynamicCache

import kvpass
from kvpass.errors import ConfigError
from tests.models import prompt, tiered, tiny


def explained(model, cache, tokens=50, **options):
    torch._dynamo.reset()
    with torch.no_grad():
        return kvpass.explain(
            model, prompt(1, tokens)[0], past_key_values=cache, verbose=False, **options
        )


def test_a_site_in_words():
    model = tiny("mistral")
    explanation = explained(model, tiered(model))
    first = explanation.sites[0]
    assert first.module == "model.layers.0.self_attn"
    assert (first.form, first.mask) == ("tiered", "causal in a window of 40")
    assert "2 of 2 attention sites rewritten" in explanation.text
    assert "causal in a window of 40" in explanation.text


def test_printing_what_explain_returns_does_not_repeat_the_report(capsys):
    model = tiny("llama")
    torch._dynamo.reset()
    with torch.no_grad():
        explanation = kvpass.explain(model, prompt(1, 20)[0], past_key_values=tiered(model))
    assert capsys.readouterr().out == explanation.text + "\n"
    assert explanation.text.count("model.layers.1.self_attn: rewritten") == 1
    print(explanation)
    assert capsys.readouterr().out == "2 of 2 attention sites rewritten\n"
    assert repr(explanation) == "<Explanation: 2 of 2 attention sites rewritten>"


def test_tensors_that_are_no_longer_made_have_names_and_shapes():
    model = tiny("llama", "eager")
    explanation = explained(model, DynamicCache(config=model.config))
    for site in explanation.sites:
        assert site.form == "functional"
        # keys, their repeats for the query heads, and the scores
        for shape in ("[1, 2, 50, 16]", "[1, 4, 50, 16]", "[1, 4, 50, 50]"):
            assert any(item.endswith(shape) for item in site.gone), (shape, site.gone)
    assert "no longer made" in explanation.text
    rows = json.loads(json.dumps(explanation.as_dict()))["graphs"][0]["sites"]
    assert rows[0]["gone"] == list(explanation.sites[0].gone)


def test_a_refused_site_has_nothing_gone():
    model = tiny("llama")
    explanation = explained(model, None, use_cache=False)
    assert explanation.rewritten == 0
    assert all(site.gone == () and site.reason for site in explanation.sites)


def test_graphs_are_written_before_and_after(tmp_path):
    model = tiny("llama")
    folder = tmp_path / "new" / "graphs"
    explained(model, tiered(model), graph_dir=folder)
    before = (folder / "graph-0-before.txt").read_text("utf-8")
    after = (folder / "graph-0-after.txt").read_text("utf-8")
    assert "_nn.scaled_dot_product_attention(" in before
    assert "kvpass.attend" not in before
    assert "kvpass.attend" in after
    assert "_nn.scaled_dot_product_attention(" not in after


def test_a_folder_that_cannot_be_made_is_named_before_any_work(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="file/graphs"):
        explained(None, None, graph_dir=tmp_path / "file" / "graphs")


def _branches(q, k, v, past):
    k, v = torch.cat([past, k], 2), torch.cat([past, v], 2)

    def fused(q, k, v):
        return F.scaled_dot_product_attention(q, k, v)

    def spelled(q, k, v):
        return torch.softmax(q @ k.transpose(-1, -2) / 4, -1) @ v

    return torch.cond(q.sum() > 0, fused, spelled, (q, k, v)), k, v


def _checkpointed(q, k, v, past):
    k, v = torch.cat([past, k], 2), torch.cat([past, v], 2)
    out = checkpoint(F.scaled_dot_product_attention, q, k, v, use_reentrant=False)
    return out, k, v


@pytest.mark.parametrize(
    ("function", "name", "count"),
    [(_branches, "cond", 2), (_checkpointed, "tag_activation_checkpoint", 1)],
)
def test_an_attention_in_a_graph_of_its_own_is_named(function, name, count):
    torch._dynamo.reset()
    new = [torch.randn(1, 2, 1, 16) for _ in range(3)]
    with torch.no_grad():
        explanation = kvpass.explain(function, *new, torch.randn(1, 2, 5, 16), verbose=False)
    assert len(explanation.sites) == count
    for site in explanation.sites:
        assert not site.rewritten
        assert f"a graph of its own that {name} runs" in site.reason
