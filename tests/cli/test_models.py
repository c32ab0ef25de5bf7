# SPDX-License-Identifier: Apache-2.0
"""kvpass models: what runs, how graphs become one count, and that a difference is found."""

from __future__ import annotations

import dataclasses
import json
import sys

import pytest
import torch

import kvpass
from kvpass.cli import main, matrix, models
from kvpass.errors import CheckpointError, ConfigError, UnsupportedError
from kvpass.graph.report import GraphReport, SiteReport
from model_zoo import architectures
from model_zoo.architectures import ARCHITECTURES, VOCABULARY, Cell

KEYS = {
    "architecture",
    "cache",
    "attention",
    "sites",
    "rewritten",
    "refused",
    "tokens_equal",
    "max_logit_diff",
}
LLAMA = Cell("llama", "dynamic", "sdpa")


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as exit_:
        main(["models", *arguments])
    out = capsys.readouterr()
    return int(exit_.value.code or 0), out.out, out.err


def report(*sites: tuple[str, str], form: str = "functional") -> GraphReport:
    """A graph's report of (module, reason of a refusal or "")."""
    return GraphReport(
        tuple(SiteReport(module, form, "", not reason, reason) for module, reason in sites)
    )


def test_llama_is_rewritten_and_equal_with_both_caches(capsys):
    arguments = ("--only", "llama", "--cache", "dynamic,tiered", "--attention", "sdpa", "--json")
    code, out, err = run(capsys, *arguments, "--steps", "6")
    assert code == 0, err
    results = json.loads(out)
    assert [result["cache"] for result in results] == ["dynamic", "tiered"]
    for result in results:
        assert set(result) == KEYS
        assert (result["architecture"], result["attention"]) == ("llama", "sdpa")
        assert (result["sites"], result["rewritten"], result["refused"]) == (2, 2, [])
        assert result["tokens_equal"] is True
        assert 0 <= result["max_logit_diff"] < 1e-4
    assert "[2/2] llama tiered sdpa: 2 of 2 rewritten, tokens equal" in err


def test_counts_and_reasons_agree_and_the_table_shows_them(capsys):
    cells = [Cell("gpt2", "static", "sdpa"), Cell("t5", "dynamic", "sdpa")]
    results = [matrix.run_cell(cell, 4) for cell in cells]
    for result, sites in zip(results, (2, 4), strict=True):
        assert result.tokens_equal
        assert result.sites == sites
        assert result.rewritten + len(result.refused) == sites
        assert all(refused.site and refused.reason for refused in result.refused)
        assert result.unseen == ()
    assert all("decoder" in refused.site for refused in results[1].refused)
    models._print_table(results)
    out = capsys.readouterr().out
    for result in results:
        assert result.architecture in out
        assert f"{result.rewritten} of {result.sites}" in out
    first = [result.refused[0].reason for result in results if result.refused]
    for number, reason in enumerate(dict.fromkeys(first), 1):
        assert f"[{number}] {reason}" in " ".join(out.split())


def test_flex_attention_is_the_same_model():
    """Softcap and window included; uncompiled, so that no compiler is needed for the reference."""
    runs = []
    for attention in ("eager", "flex"):
        architecture = ARCHITECTURES["gemma2"]
        model = architecture.build(attention)
        cache = matrix.make_cache(architecture, model, "dynamic", 20)
        with torch.compiler.set_stance("force_eager"):
            inputs = matrix.model_inputs(architecture, model)
            runs.append(matrix.decode(model, cache, inputs, 8))
    equal, difference = matrix.compare(*runs)
    assert equal
    assert difference is not None and difference < 1e-5


def test_a_wrong_result_is_found_and_the_exit_status_is_1(capsys, monkeypatch):
    """The compiled model's logits are negated."""
    right = kvpass.backend

    def wrong(gm, example_inputs, **kwargs):
        assert kwargs["options"]["inner"] == "aot_eager"
        compiled = right(gm, example_inputs, **kwargs)

        def negated(*args):
            outputs = compiled(*args)
            return type(outputs)(
                -x if isinstance(x, torch.Tensor) and x.shape[-1:] == (VOCABULARY,) else x
                for x in outputs
            )

        return negated

    monkeypatch.setattr(kvpass, "backend", wrong)
    arguments = ("--only", "llama", "--cache", "tiered", "--attention", "sdpa", "--steps", "2")
    code, out, err = run(capsys, *arguments, "--json", "--inner", "aot_eager")
    assert code == 1
    (result,) = json.loads(out)
    assert result["tokens_equal"] is False
    assert result["max_logit_diff"] > 1
    assert "tokens NOT EQUAL" in err


def test_an_exception_is_a_result_with_its_text(capsys, monkeypatch):
    def broken(*args, **kwargs):
        raise RuntimeError("no such thing\nas a cache\n\nAdvice.")

    monkeypatch.setattr(kvpass, "TieredCache", broken)
    code, out, _ = run(capsys, "--only", "llama", "--attention", "sdpa", "--cache", "tiered",
                       "--json", "--steps", "1")  # fmt: skip
    assert code == 1
    (result,) = json.loads(out)
    assert set(result) == KEYS
    assert result["refused"] == [{"site": "", "reason": "RuntimeError: no such thing as a cache"}]
    assert (result["sites"], result["rewritten"]) == (0, 0)
    assert (result["tokens_equal"], result["max_logit_diff"]) == (False, None)


def test_a_model_that_transformers_cannot_run_is_left_out_with_its_error(capsys, monkeypatch):
    # Three heads do not divide 64 channels, so the reshape of the queries fails in transformers.
    options = {**ARCHITECTURES["gpt2"].options, "n_head": 3}
    broken = dataclasses.replace(ARCHITECTURES["gpt2"], options=options)
    monkeypatch.setitem(ARCHITECTURES, "gpt2", broken)
    code, out, err = run(capsys, "--only", "gpt2", "--cache", "dynamic", "--json", "--steps", "1")
    assert code == 0
    assert json.loads(out) == []
    assert err.count("left out") == 2
    assert "ValueError" in err
    with pytest.raises(UnsupportedError, match="in transformers itself: ValueError"):
        matrix.run_cell(Cell("gpt2", "dynamic", "sdpa"), 1)


def test_without_transformers_the_fix_is_named(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    code, _, err = run(capsys, "--only", "llama", "--steps", "1")
    assert code == 1
    assert "error: these models need transformers" in err
    assert 'pip install "kvpass[hf]"' in err
    with pytest.raises(CheckpointError):
        ARCHITECTURES["llama"].build("sdpa")
    code, out, _ = run(capsys, "--list")
    assert code == 0
    assert "llama: sdpa dynamic, sdpa tiered" in out


def test_list_names_every_cell(capsys):
    code, out, _ = run(capsys, "--list", "--json")
    assert code == 0
    listed = {tuple(row.values()) for row in json.loads(out)}
    for cache in ("dynamic", "tiered"):
        for name in ("llama", "qwen3", "mistral", "gemma", "gemma2", "gpt2", "gpt_neox"):
            assert {(name, cache, "sdpa"), (name, cache, "eager")} <= listed
        for name in ("gptj", "bloom", "mpt", "gpt_oss"):
            assert (name, cache, "eager") in listed
            assert (name, cache, "sdpa") not in listed
        for name in ("t5", "bart", "whisper", "deepseek_v3", "mllama", "falcon_alibi"):
            assert (name, cache, "sdpa") in listed
        assert {("llama", cache, "flex"), ("gemma2", cache, "flex")} <= listed
    static = {name for name, cache, _ in listed if cache == "static"}
    assert static == {"deepseek_v3", "llama", "qwen3", "mistral", "gemma2", "gpt2"}
    code, out, _ = run(capsys, "--list", "--only", "GPT-NeoX,t5", "--cache", "tiered")
    assert out.splitlines() == ["gpt_neox: sdpa tiered, eager tiered", "t5: sdpa tiered"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--only", "llama,gema2"], "--only 'gema2' is unknown: did you mean 'gemma2'?"),
        (["--only", "zzzzz"], "there are llama, qwen2,"),
        (["--only", ","], "name some of llama"),
        (["--cache", "tierd"], "did you mean 'tiered'?"),
        (["--attention", "flux"], "did you mean 'flex'?"),
        (["--inner", "indictor"], "did you mean 'inductor'?"),
        (["--inner", "eager,inductor"], "name one of eager, aot_eager, inductor"),
        (["--only", "t5", "--cache", "static"], "no such combination; there are t5 dynamic sdpa"),
    ],
)
def test_mistakes_name_the_nearest(capsys, arguments, words):
    code, out, err = run(capsys, *arguments)
    assert code == 2
    assert err.startswith("error:")
    assert words in err
    assert not out


def test_unknown_names_are_config_errors():
    with pytest.raises(ConfigError):
        models.choose("x", ("eager",), "--inner")


def test_a_site_counts_as_rewritten_only_when_it_is_in_every_graph():
    modules = ["m.0", "m.1", "m.2", "m.3"]
    reports = [
        report(("m.0", ""), ("m.1", ""), ("m.2", "late")),
        report(("m.0", ""), ("m.1", "first"), ("m.2", "")),
        report(("m.1", "second")),
    ]
    result = matrix.summary(LLAMA, reports, modules, "", True, 0.5)
    assert (result.sites, result.rewritten) == (3, 1)
    assert [(item.site, item.reason) for item in result.refused] == [("m.1", "first"),
                                                                     ("m.2", "late")]  # fmt: skip
    assert result.unseen == ("m.3",)
    assert set(result.as_dict()) == KEYS
    assert json.loads(json.dumps(result.as_dict()))["refused"][0] == {
        "site": "m.1",
        "reason": "first",
    }


def test_a_failed_run_has_rewritten_nothing():
    reports = [report(("m.0", ""), ("m.1", "why"))]
    result = matrix.summary(LLAMA, reports, ["m.0", "m.1"], "Error: text", False, None)
    assert (result.sites, result.rewritten) == (2, 0)
    assert [item.site for item in result.refused] == ["", "m.1"]


def test_paths_after_a_graph_break_are_those_of_the_model():
    modules = ["model.layers.0.self_attn", "model.layers.1.self_attn"]
    reports = [
        report(*((name, "") for name in modules)),
        report(("layers.1.self_attn", "why")),
        report(("self_attn", "")),
        report(("attention[0]", "elsewhere")),
    ]
    result = matrix.summary(LLAMA, reports, modules, "", True, 0.0)
    assert (result.sites, result.rewritten) == (3, 1)
    assert [item.site for item in result.refused] == [modules[1], "attention[0]"]
    # An inner path that may be any layer's counts for all of them.
    result = matrix.summary(LLAMA, [report(("self_attn", "why"))], modules, "", True, 0.0)
    assert [item.site for item in result.refused] == modules


def test_encoders_are_not_counted_and_decoders_are():
    reports = [
        report(("encoder.block.0.layer.0.SelfAttention", "no KV cache"), form="none"),
        report(("model.encoder.layers.0.self_attn", "no KV cache"), form="none"),
        report(("model.decoder.layers.0.encoder_attn", "no KV cache"), form="none"),
    ]
    result = matrix.summary(LLAMA, reports, [], "", True, 0.0)
    assert [item.site for item in result.refused] == ["model.decoder.layers.0.encoder_attn"]
    modules = matrix.attention_modules(ARCHITECTURES["bart"].build("sdpa"))
    assert modules == [
        f"model.decoder.layers.{layer}.{name}"
        for layer in (0, 1)
        for name in ("self_attn", "encoder_attn")
    ]


def test_logits_after_the_first_different_token_do_not_count():
    def decoded(*rows: list[float]) -> matrix.Decoded:
        logits = [torch.tensor([row]) for row in rows]
        return matrix.Decoded([row.argmax(-1) for row in logits], logits)

    expected = decoded([0.0, 1.0], [1.0, 0.0], [0.0, 1.0])
    assert matrix.compare(expected, expected) == (True, 0.0)
    got = decoded([0.0, 1.5], [1.0, 0.25], [0.0, 1.0])
    assert matrix.compare(got, expected) == (True, 0.5)
    got = decoded([0.0, 1.0], [1.0, 3.0], [0.0, 99.0])
    assert matrix.compare(got, expected) == (False, 3.0)
    got = decoded([0.0, 1.0], [float("nan"), 0.0], [0.0, 1.0])
    assert matrix.compare(got, expected) == (False, None)


@pytest.mark.parametrize("name", list(ARCHITECTURES))
def test_tokens_of_a_run_vary_and_have_no_ties(name):
    """A run of one token over and over, or of near ties, would compare nothing."""
    architecture = ARCHITECTURES[name]
    attention = architecture.attentions[0]
    model = architecture.build(attention)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    inputs = matrix.model_inputs(architecture, model)
    cache = matrix.make_cache(architecture, model, "dynamic", 42)
    run = matrix.decode(model, cache, inputs, 32)
    tokens = torch.stack(run.tokens, 1)
    assert tokens.shape == (2, 33)
    assert all(len(set(row.tolist())) > 2 for row in tokens)
    best = torch.stack(run.logits).topk(2, -1).values
    assert (best[..., 0] - best[..., 1]).min() > 2e-4
    again = architecture.build(attention)
    for one, other in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other)


def test_windows_are_short_enough_to_fill():
    for name in ("mistral", "gemma2", "gemma3", "gpt_oss", "cohere2", "exaone4", "gemma3n"):
        config = ARCHITECTURES[name].build(ARCHITECTURES[name].attentions[0]).config
        assert config.sliding_window == architectures.WINDOW < matrix.PROMPT_TOKENS
