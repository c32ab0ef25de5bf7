# SPDX-License-Identifier: Apache-2.0
"""Tiny random models of transformers, and decoding with and without kvpass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import kvpass
from kvpass.graph.report import GraphReport, observed

SMALL = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 128,
    "max_position_embeddings": 512,
}
OPTIONS = {"block_size": 32, "hot": "48KiB", "resident_tokens": 32, "heat_interval": 8}


def tiny(name: str, attention: str = "sdpa", **changes: Any) -> Any:
    """A random model in eval mode, fp32."""
    import transformers as t

    gqa = {"num_key_value_heads": 2, "intermediate_size": 96}
    gpt2 = {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 128, "n_positions": 512}
    makers: dict[str, Any] = {
        "llama": lambda: t.LlamaConfig(**SMALL | gqa | changes),
        "qwen3": lambda: t.Qwen3Config(**SMALL | gqa | {"head_dim": 16} | changes),
        "mistral": lambda: t.MistralConfig(**SMALL | gqa | {"sliding_window": 40} | changes),
        "gpt2": lambda: t.GPT2Config(**gpt2 | changes),
        "neox": lambda: t.GPTNeoXConfig(**SMALL | {"intermediate_size": 96} | changes),
        "phi": lambda: t.PhiConfig(**SMALL | {"intermediate_size": 96} | changes),
        "gemma2": lambda: t.Gemma2Config(
            **SMALL | gqa | {"head_dim": 16, "sliding_window": 40} | changes
        ),
    }
    torch.manual_seed(0)
    config = makers[name]()
    config._attn_implementation = attention
    return t.AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()


def prompt(size: int, tokens: int, padding: int = 0, seed: int = 1) -> tuple[Tensor, Tensor]:
    """Random ids and a mask whose first row has ``padding`` pads on the left."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, 120, (size, tokens), generator=generator)
    mask = torch.ones_like(ids)
    mask[0, :padding] = 0
    return ids, mask


def compile_with(model: Any, inner: str = "eager", **options: Any) -> None:
    """``model.compile`` with kvpass and tiny tiers."""
    torch._dynamo.reset()
    model.compile(backend=kvpass.backend, options={"inner": inner} | OPTIONS | options)


def tiered(model: Any, max_tokens: int = 400, **options: Any) -> kvpass.TieredCache:
    """A TieredCache with tiny tiers."""
    return kvpass.TieredCache(model.config, max_tokens, **OPTIONS | options)


def generate(model: Any, ids: Tensor, mask: Tensor, tokens: int = 24, **kwargs: Any) -> Any:
    """Stock ``generate``, greedy, with logits."""
    return model.generate(
        ids,
        attention_mask=mask,
        do_sample=kwargs.pop("do_sample", False),
        max_new_tokens=tokens,
        pad_token_id=0,
        eos_token_id=None,
        return_dict_in_generate=True,
        output_logits=True,
        **kwargs,
    )


def compare(model: Any, ids: Tensor, mask: Tensor, cache: Any, tokens: int = 24, **kwargs: Any):
    """Generate uncompiled and compiled; returns (reports, compiled output, largest difference)."""
    compiled, model._compiled_call_impl = model._compiled_call_impl, None
    expected = generate(model, ids, mask, tokens, **kwargs)
    model._compiled_call_impl = compiled
    reports: list[GraphReport] = []
    if cache is not None:
        kwargs["past_key_values"] = cache
    with observed(reports.append):
        got = generate(model, ids, mask, tokens, **kwargs)
    assert torch.equal(got.sequences, expected.sequences)
    difference = max(
        float((a - b).abs().max()) for a, b in zip(got.logits, expected.logits, strict=True)
    )
    return reports, got, difference
