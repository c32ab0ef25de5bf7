# SPDX-License-Identifier: Apache-2.0
"""Unmodified transformers models with a DynamicCache, through ``model.compile`` and ``generate``.

Tiny models with random weights. Every graph of a run is checked: prefill, the first decode step
(static lengths) and the later ones (symbols).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

from kvpass.graph.site import AttentionSite
from tests.graph.recorder import Recorder

COMMON = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
}
WINDOW = {**COMMON, "sliding_window": 8, "num_hidden_layers": 2}
GPT2 = {"vocab_size": 64, "n_embd": 64, "n_layer": 1, "n_head": 4, "n_positions": 64}
OPT = {
    **{"vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4},
    **{"ffn_dim": 48, "word_embed_proj_dim": 64, "max_position_embeddings": 64},
}
FALCON = {
    **{"vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4},
    **{"multi_query": True, "alibi": False},
}
T5 = {
    **{"vocab_size": 64, "d_model": 64, "d_kv": 16, "d_ff": 48, "num_heads": 4},
    **{"num_layers": 1, "num_decoder_layers": 1, "decoder_start_token_id": 0},
}


def record(
    family: str,
    config: dict[str, Any],
    attention: str,
    padded: bool = False,
    dynamic: bool | None = None,
    tokens: int = 3,
) -> Recorder:
    """Generate ``tokens`` tokens with a compiled model and return what the backend saw."""
    torch.manual_seed(0)
    settings = getattr(transformers, f"{family}Config")(**config)
    kind = AutoModelForSeq2SeqLM if family == "T5" else AutoModelForCausalLM
    model = kind.from_config(settings, attn_implementation=attention).eval()
    recorder = Recorder()
    model.compile(backend=recorder, dynamic=dynamic)
    ids = torch.randint(3, 64, (2, 6))
    mask = torch.ones_like(ids)
    if padded:
        mask[0, :2] = 0
    model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=tokens,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=None,
    )
    assert not recorder.mutated, "find_sites changed a graph"
    assert len(recorder.found) >= 2, "prefill and decode must both have been compiled"
    return recorder


def sites(recorder: Recorder, per_graph: int, refusals: int = 0) -> list[AttentionSite]:
    """All sites, after checking their number and that of the refusals in every graph."""
    reasons = [refusal.reason for found in recorder.found for refusal in found.refusals]
    assert set(recorder.summary) == {(per_graph, refusals)}, reasons
    return [site for found in recorder.found for site in found.sites]


def check_past(recorder: Recorder) -> None:
    """The first prefill starts from an empty cache, each later graph from inputs."""
    for number, found in enumerate(recorder.found):
        for site in found.sites:
            source = site.source
            assert source.form == "functional"
            assert (source.past_k is None) == (source.past_v is None) == (number == 0)
            if source.past_k is not None and source.past_v is not None:
                assert "keys" in source.past_k.name and "values" in source.past_v.name


SDPA = {
    "Llama": ({**COMMON, "num_hidden_layers": 2}, 2, "model.layers.{}.self_attn", 0.25),
    "Qwen2": ({**COMMON, "num_hidden_layers": 1}, 1, "model.layers.{}.self_attn", 0.25),
    "Qwen3": ({**COMMON, "num_hidden_layers": 1}, 1, "model.layers.{}.self_attn", 0.25),
    "GPT2": (GPT2, 1, "transformer.h.{}.attn", 0.25),
    "GPTNeoX": ({**COMMON, "num_hidden_layers": 1}, 1, "gpt_neox.layers.{}.attention", 0.25),
    "Phi": ({**COMMON, "num_hidden_layers": 1}, 1, "model.layers.{}.self_attn", 0.25),
    "OPT": (OPT, 1, "model.decoder.layers.{}.self_attn", 1.0),
    "Falcon": (FALCON, 1, "transformer.h.{}.self_attention", 0.25),
}


@pytest.mark.parametrize("family", SDPA)
def test_sdpa_sites(family: str) -> None:
    config, layers, path, scale = SDPA[family]
    recorder = record(family, config, "sdpa", padded=family in ("Llama", "OPT"))
    check_past(recorder)
    found = sites(recorder, layers)
    assert [site.module for site in found[:layers]] == [path.format(i) for i in range(layers)]
    for site in found:
        assert site.scale == pytest.approx(scale, rel=1e-6)
        assert site.mask.describe() == "causal and padding"
        padding = site.mask.kv_mask
        assert padding is not None
        value = padding.meta["example_value"]
        assert value.dtype == torch.bool and value.dim() == 2 and value.shape[0] == 2


def test_sdpa_sites_of_dynamic_graphs() -> None:
    recorder = record("Llama", {**COMMON, "num_hidden_layers": 2}, "sdpa", dynamic=True)
    check_past(recorder)
    found = sites(recorder, 2)
    assert {site.scale for site in found} == {0.25}
    assert {site.mask.describe() for site in found} == {"causal and padding"}
    lengths = [site.source.keys.meta["example_value"].shape[2] for site in found]
    assert all(isinstance(length, torch.SymInt) for length in lengths)


@pytest.mark.parametrize("family", ["Llama", "GPT2"])
def test_eager_sites_with_padding_keep_the_float_mask(family: str) -> None:
    config = SDPA[family][0]
    recorder = record(family, config, "eager", padded=True)
    check_past(recorder)
    for site in sites(recorder, SDPA[family][1]):
        assert site.anchor is not site.output and site.anchor in site.interior
        assert site.mask.operand is not None and not site.mask.causal
        assert site.mask.operand.meta["example_value"].dtype == torch.float32


def test_eager_prefill_without_padding_mask_is_causal() -> None:
    settings = transformers.GPT2Config(**GPT2)
    model = AutoModelForCausalLM.from_config(settings, attn_implementation="eager").eval()
    recorder = Recorder()
    with torch.no_grad():
        torch.compile(model, backend=recorder)(torch.randint(3, 64, (2, 6)), use_cache=True)
    assert recorder.summary == [(1, 0)]
    assert {site.mask.describe() for site in recorder.found[0].sites} == {"causal"}


def test_output_attentions_are_refused() -> None:
    settings = transformers.LlamaConfig(**COMMON, num_hidden_layers=1)
    model = AutoModelForCausalLM.from_config(settings, attn_implementation="eager").eval()
    recorder = Recorder()
    with torch.no_grad():
        torch.compile(model, backend=recorder)(
            torch.randint(3, 64, (2, 6)), use_cache=True, output_attentions=True
        )
    reasons = [refusal.reason for found in recorder.found for refusal in found.refusals]
    assert len(reasons) == 1 and "output_attentions=False" in reasons[0]
    assert not any(found.sites for found in recorder.found)


def record_steps(family: str, config: dict[str, Any], attention: str, tokens: int) -> Recorder:
    """A prompt longer than the window and ``tokens`` steps, without any padding mask."""
    torch.manual_seed(0)
    settings = getattr(transformers, f"{family}Config")(**config)
    model = AutoModelForCausalLM.from_config(settings, attn_implementation=attention).eval()
    recorder = Recorder()
    compiled = torch.compile(model, backend=recorder)
    with torch.no_grad():
        out = compiled(torch.randint(3, 64, (2, 12)), use_cache=True)
        for _ in range(tokens):
            ids = torch.randint(3, 64, (2, 1))
            out = compiled(ids, past_key_values=out.past_key_values, use_cache=True)
    assert not recorder.mutated and len(recorder.found) >= 3
    return recorder


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_sliding_layers_keep_their_window(attention: str) -> None:
    """A DynamicCache of window 8 passes on the last 7 tokens, from the first prompt on."""
    recorder = record_steps("Mistral", WINDOW, attention, tokens=4)
    check_past(recorder)
    for site in sites(recorder, 2):
        assert (site.mask.causal, site.mask.window, site.mask.terms) == (True, 8, ())
        assert site.mask.kv_mask is None and site.source.keep == 7
        assert site.source.stored_k is not site.source.keys
        assert site.source.stored_v is not site.source.values


def test_padding_over_a_cut_cache_counts_from_the_first_token_kept() -> None:
    """Transformers looks the mask of the whole sequence up from the first kept token on."""
    recorder = record("Mistral", WINDOW, "sdpa", tokens=4)
    assert set(recorder.summary) == {(2, 0)}
    for found in recorder.found:
        assert {site.mask.describe() for site in found.sites} == {
            "causal in a window of 8 and padding"
        }
    cut = [site.mask.kv_offset for found in recorder.found for site in found.sites]
    assert any(isinstance(offset, torch.SymInt) for offset in cut)


def test_gemma2_sdpa_knows_its_windows() -> None:
    recorder = record("Gemma2", {**WINDOW, "query_pre_attn_scalar": 64}, "sdpa", tokens=2)
    for site in sites(recorder, 2):
        sliding = site.module == "model.layers.0.self_attn"
        assert site.scale == 0.125 and site.mask.kv_mask is not None
        assert (site.mask.window, site.source.keep) == ((8, 7) if sliding else (0, 0))


def test_gemma2_eager_knows_its_softcap() -> None:
    config = {**WINDOW, "attn_logit_softcapping": 20.0, "query_pre_attn_scalar": 64}
    for site in sites(record_steps("Gemma2", config, "eager", tokens=3), 2):
        sliding = site.module == "model.layers.0.self_attn"
        assert site.softcap == 20.0 and site.scale == pytest.approx(0.125, rel=1e-12)
        assert (site.mask.causal, site.mask.window) == (True, 8 if sliding else 0)


def test_gemma2_eager_with_padding_takes_its_full_layer_only() -> None:
    """A float mask of padding and window is an operand: the window in it is not known."""
    recorder = record("Gemma2", WINDOW, "eager", tokens=2)
    for site in sites(recorder, 1, refusals=1):
        assert site.module == "model.layers.1.self_attn" and site.softcap == 50.0
        assert site.mask.operand is not None
    for found in recorder.found:
        assert "the cache keeps 7 tokens" in found.refusals[0].reason


def test_gpt_oss_knows_its_sinks_and_its_router_is_ignored() -> None:
    config = {**WINDOW, "num_local_experts": 2, "num_experts_per_tok": 1}
    for site in sites(record_steps("GptOss", config, "eager", tokens=3), 2):
        assert site.sinks is not None and "sinks" in site.sinks.name
        assert tuple(site.sinks.meta["example_value"].shape) == (4,)
        layer = int(site.module.split(".")[2])
        assert f"layers_modules_{layer}_" in site.sinks.name
        assert (site.mask.causal, site.mask.window) == (True, 0 if layer else 8)


@pytest.mark.parametrize("family", ["DeepseekV2", "DeepseekV3", "MiniCPM3"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_latents(family: str, attention: str) -> None:
    """Latents and rotary keys are cached, keys and values of all heads are made no more."""
    config = {
        **{"vocab_size": 64, "hidden_size": 64, "intermediate_size": 48},
        **{"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 4},
        **{"first_k_dense_replace": 1, "kv_lora_rank": 32, "q_lora_rank": 32},
        **{"qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16},
        **{"n_routed_experts": 2, "num_experts_per_tok": 1, "n_group": 1, "topk_group": 1},
    }
    for site in sites(record(family, config, attention, tokens=3), 1):
        assert site.latent is not None
        assert (site.latent.heads, site.latent.nope) == (4, 16)
        assert "kv_b_proj" in site.latent.weight.name


def test_t5_reads_cross_attention_from_handles_only() -> None:
    """The first step makes the keys of cross attention; later ones read dense tensors here."""
    recorder = record("T5", T5, "sdpa", tokens=3)
    assert recorder.summary[0] == (2, 0) and set(recorder.summary[1:]) == {(1, 1)}
    for found in recorder.found:
        own = found.sites[0]
        assert "SelfAttention" in own.module and own.scale == 1.0
        assert own.mask.operand is not None and not own.mask.causal
    cross = recorder.found[0].sites[1]
    assert "EncDecAttention" in cross.module and cross.source.past_k is None
    assert cross.source.k_new is not None
    lengths = [node.meta["example_value"].shape[2] for node in (cross.query, cross.source.k_new)]
    assert lengths == [1, 6] and not cross.mask.causal
    for found in recorder.found[1:]:
        assert "EncDecAttention" in found.refusals[0].module
        assert "read-only input" in found.refusals[0].reason


def test_static_cache_is_rewritten() -> None:
    settings = transformers.LlamaConfig(**COMMON, num_hidden_layers=1)
    model = AutoModelForCausalLM.from_config(settings, attn_implementation="sdpa").eval()
    recorder = Recorder()
    model.compile(backend=recorder)
    ids = torch.randint(3, 64, (2, 6))
    model.generate(ids, max_new_tokens=3, cache_implementation="static", do_sample=False)
    sites = [site for found in recorder.found for site in found.sites]
    assert len(sites) == 2 and not any(found.refusals for found in recorder.found)
    prompt, step = sites
    assert all(site.source.form == "static" and site.source.write == "at" for site in sites)
    # The prompt makes the buffers, under a mask that is read; the step's mask comes from outside.
    assert prompt.source.stored_k is not None and step.source.stored_k is None
    assert prompt.mask.causal and step.mask.operand is not None and step.source.probe is not None
