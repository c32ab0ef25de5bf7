# SPDX-License-Identifier: Apache-2.0
"""The backend on a GPU: transformers' models with caches partly in host memory."""

from __future__ import annotations

import pytest
import torch

import kvpass
from kvpass.graph.report import observed

pytestmark = pytest.mark.gpu
transformers = pytest.importorskip("transformers")


def tiny_llama(dtype: torch.dtype):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=512,
        max_position_embeddings=1024,
    )
    return transformers.LlamaForCausalLM(config).to("cuda", dtype).eval()


def tiny_deepseek(dtype: torch.dtype):
    """Latents are cached; with the sizes of DeepSeek-V3's attention, but four heads."""
    torch.manual_seed(0)
    config = transformers.DeepseekV3Config(
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        first_k_dense_replace=3,
        q_lora_rank=64,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        qk_nope_head_dim=128,
        v_head_dim=128,
        vocab_size=512,
        max_position_embeddings=1024,
    )
    return transformers.DeepseekV3ForCausalLM(config).to("cuda", dtype).eval()


@pytest.mark.parametrize("make", [tiny_llama, tiny_deepseek])
@pytest.mark.parametrize("inner", ["eager", "inductor"])
@pytest.mark.parametrize("form", ["tiered", "dynamic"])
def test_generate_equals_uncompiled(inner, form, make):
    model = make(torch.float32)
    ids = torch.randint(0, 512, (2, 300), device="cuda")
    mask = torch.ones_like(ids)
    mask[0, :7] = 0
    kwargs = {
        "attention_mask": mask,
        "do_sample": False,
        "max_new_tokens": 40,
        "pad_token_id": 0,
        "eos_token_id": None,
        "output_logits": True,
        "return_dict_in_generate": True,
    }
    reference = model.generate(ids, **kwargs)
    torch._dynamo.reset()
    options = {"inner": inner, "hot": "256KiB", "block_size": 32, "resident_tokens": 32}
    model.compile(backend=kvpass.backend, options=options)
    if form == "tiered":
        kwargs["past_key_values"] = kvpass.TieredCache(
            model.config, 400, hot="256KiB", block_size=32, resident_tokens=32
        )
    reports = []
    with observed(reports.append):
        out = model.generate(ids, **kwargs)
    assert reports
    assert all(report.rewritten == 3 for report in reports)
    assert torch.equal(out.sequences, reference.sequences)
    for a, b in zip(out.logits, reference.logits, strict=True):
        assert (a - b).abs().max() < 1e-4
    if form == "tiered":
        snapshot = kwargs["past_key_values"].snapshot()
        assert snapshot.cold_only_bytes > snapshot.kv_bytes / 2


@pytest.mark.parametrize("make", [tiny_llama, tiny_deepseek])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_decodes_close_to_sdpa(dtype, make):
    model = make(dtype)
    ids = torch.randint(0, 512, (1, 200), device="cuda")
    with torch.no_grad():
        expected = model(ids).logits.float()
        torch._dynamo.reset()
        model.compile(backend=kvpass.backend, options={"inner": "eager"})
        cache = kvpass.TieredCache(model.config, 256, hot=1, block_size=32)
        out = [model(ids[:, :150], past_key_values=cache).logits]
        for i in range(150, 200):
            out.append(model(ids[:, i : i + 1], past_key_values=cache).logits)
    difference = (torch.cat(out, 1).float() - expected).abs().max()
    assert difference < 0.05 * expected.abs().max()
