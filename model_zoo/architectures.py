# SPDX-License-Identifier: Apache-2.0
"""Tiny random models of transformers, one an attention form, built offline from config objects.

Each has 2 layers (a few need 4), fp32 weights from a fixed seed, and a sliding window of 8 tokens
where its family has windows, so that a window fills within a short run.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from kvpass.errors import CheckpointError

Cache = Literal["dynamic", "tiered", "static"]
Attention = Literal["sdpa", "eager", "flex"]
Kind = Literal["decoder", "encoder-decoder", "cross"]

CACHES: tuple[Cache, ...] = ("dynamic", "tiered", "static")
ATTENTIONS: tuple[Attention, ...] = ("sdpa", "eager", "flex")

VOCABULARY = 96
POSITIONS = 512
WINDOW = 8
SOURCE_TOKENS = 13  # what a cross attention sees; no length of the prompt, so that none is mistaken
_SEED = 8  # one whose greedy tokens vary in every model, with no near ties

# Ids of special tokens lie within the tiny vocabulary; nothing stops at them.
_IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
# Untied: a tied random model repeats its input token.
_ANY = _IDS | {"vocab_size": VOCABULARY, "tie_word_embeddings": False}
_SMALL = _ANY | {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": POSITIONS,
}
_MLP = _SMALL | {"intermediate_size": 96}
_GQA = _MLP | {"num_key_value_heads": 2}
_HEAD = _GQA | {"head_dim": 16}
_WINDOW = {"sliding_window": WINDOW}
_MIXED = _WINDOW | {"layer_types": ["sliding_attention", "full_attention"]}
_GPT = _ANY | {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": POSITIONS}
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}


@dataclass(frozen=True)
class Cell:
    """One run: an architecture, a cache form and an attention implementation."""

    architecture: str
    cache: Cache
    attention: Attention


@dataclass(frozen=True)
class Architecture:
    """A model family.

    Attributes:
        name: its name in transformers (``model_type``), with a suffix for a variant.
        config: name of its config class in transformers.
        options: what the config class is called with.
        kind: ``cross`` is a decoder with layers that attend to ``cross_attention_states``.
        model: name of its model class, where no AutoModel knows the config.
        attentions: implementations to run a DynamicCache and a TieredCache with.
        static: whether to run a StaticCache under sdpa too.
    """

    name: str
    config: str
    options: Mapping[str, Any] = field(repr=False)
    kind: Kind = "decoder"
    model: str | None = None
    attentions: tuple[Attention, ...] = ("sdpa",)
    static: bool = False

    @property
    def cells(self) -> tuple[Cell, ...]:
        """Its runs, DynamicCache first."""
        caches: tuple[Cache, ...] = ("dynamic", "tiered")
        found = [Cell(self.name, cache, kind) for kind in self.attentions for cache in caches]
        if self.static:
            found.append(Cell(self.name, "static", "sdpa"))
        return tuple(found)

    def build(self, attention: Attention) -> Any:
        """The model in eval mode, fp32, always with the same weights.

        Raises:
            CheckpointError: transformers is not installed.
            Exception: whatever transformers raises for a combination it does not support.
        """
        import torch

        transformers = load_transformers()
        config = getattr(transformers, self.config)(**self.options)
        implementation = "flex_attention" if attention == "flex" else attention
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(_SEED)
            if self.model is not None:
                model = getattr(transformers, self.model)(config)
                model.set_attn_implementation(implementation)
            else:
                model = self._auto(transformers).from_config(
                    config, attn_implementation=implementation, dtype=torch.float32
                )
        _spread(model)
        return model.eval()

    def _auto(self, transformers: Any) -> Any:
        if self.kind != "encoder-decoder":
            return transformers.AutoModelForCausalLM
        if self.config == "WhisperConfig":
            return transformers.AutoModelForSpeechSeq2Seq
        return transformers.AutoModelForSeq2SeqLM


def load_transformers() -> Any:
    """The module ``transformers``.

    Raises:
        CheckpointError: it is not installed.
    """
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise CheckpointError(
            f'these models need transformers ({error}); run: pip install "kvpass[hf]"'
        ) from error


def _spread(model: Any) -> None:
    """Weights under which tokens and logits vary, and attention matters.

    The families' own initialisation (std 0.02) gives nearly equal logits, and gates of zero.
    """
    import torch

    head = model.get_output_embeddings()
    if head.weight is model.get_input_embeddings().weight:  # T5 takes no other choice
        head.weight = torch.nn.Parameter(head.weight.detach().clone())
    generator = torch.Generator().manual_seed(_SEED)
    embeddings = {
        id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)
    }
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("gate"):  # tanh gates of cross attention layers
                parameter.fill_(1.0)
                continue
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim == 1:
                parameter.add_(noise, alpha=0.1)
            elif id(parameter) in embeddings:
                parameter.copy_(noise * 0.5)
            else:
                parameter.copy_(noise * (1.2 / math.sqrt(parameter.shape[-1])))
            if name.endswith(".q.weight"):  # of T5, which does not scale its scores
                parameter.mul_(0.25)


_EVERY: tuple[Attention, ...] = ("sdpa", "eager")
_EAGER: tuple[Attention, ...] = ("eager",)
_FLEX: tuple[Attention, ...] = ("sdpa", "eager", "flex")

_ALL = (
    Architecture("llama", "LlamaConfig", _GQA, attentions=_FLEX, static=True),
    Architecture("qwen2", "Qwen2Config", _GQA),
    Architecture("qwen3", "Qwen3Config", _HEAD, attentions=_EVERY, static=True),
    Architecture("mistral", "MistralConfig", _HEAD | _WINDOW, attentions=_EVERY, static=True),
    Architecture(
        "mixtral",
        "MixtralConfig",
        _HEAD | {"num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    Architecture("gemma", "GemmaConfig", _HEAD, attentions=_EVERY),
    Architecture(
        "gemma2",
        "Gemma2Config",
        # A softcap of 50 would change nothing here.
        _HEAD | _MIXED | {"query_pre_attn_scalar": 16, "attn_logit_softcapping": 2.0},
        attentions=_FLEX,
        static=True,
    ),
    Architecture("gemma3", "Gemma3TextConfig", _HEAD | _MIXED | {"query_pre_attn_scalar": 16}),
    Architecture("phi", "PhiConfig", _MLP),
    Architecture("phi3", "Phi3Config", _GQA),
    Architecture("gpt2", "GPT2Config", _GPT, attentions=_EVERY, static=True),
    Architecture("gpt_neox", "GPTNeoXConfig", _MLP, attentions=_EVERY),
    Architecture("gptj", "GPTJConfig", _GPT | {"rotary_dim": 8}, attentions=_EAGER),
    Architecture("opt", "OPTConfig", _SMALL | {"ffn_dim": 96, "word_embed_proj_dim": 64}),
    Architecture("falcon", "FalconConfig", _SMALL),
    Architecture(
        "falcon_alibi",
        "FalconConfig",
        _SMALL | {"alibi": True, "multi_query": False, "parallel_attn": False, "bias": True},
        attentions=_EVERY,
    ),
    Architecture(
        "bloom",
        "BloomConfig",
        _ANY | {"hidden_size": 64, "n_layer": 2, "n_head": 4},
        attentions=_EAGER,
    ),
    Architecture(
        "mpt",
        "MptConfig",
        _ANY | {"d_model": 64, "n_heads": 4, "n_layers": 2, "max_seq_len": POSITIONS},
        attentions=_EAGER,
    ),
    Architecture("stablelm", "StableLmConfig", _GQA),
    Architecture("cohere", "CohereConfig", _GQA | {"logit_scale": 1.0}),
    Architecture(
        "granite", "GraniteConfig", _GQA | {"attention_multiplier": 0.3, "residual_multiplier": 0.8}
    ),
    Architecture("olmo2", "Olmo2Config", _GQA),
    Architecture("starcoder2", "Starcoder2Config", _GQA),
    Architecture("qwen3_moe", "Qwen3MoeConfig", _HEAD | _MOE),
    Architecture("smollm3", "SmolLM3Config", _GQA | {"no_rope_layers": [1, 0]}),
    Architecture(
        "gpt_oss",
        "GptOssConfig",
        _HEAD
        | _MIXED
        | {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
        attentions=_EAGER,
    ),
    Architecture(
        "t5",
        "T5Config",
        _ANY | {"d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4},
        kind="encoder-decoder",
    ),
    Architecture(
        "bart",
        "BartConfig",
        _ANY
        | {
            "d_model": 64,
            "encoder_layers": 1,
            "decoder_layers": 2,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 96,
            "decoder_ffn_dim": 96,
            "max_position_embeddings": POSITIONS,
            "decoder_start_token_id": 2,
            "forced_eos_token_id": None,
        },
        kind="encoder-decoder",
    ),
    Architecture(
        "whisper",
        "WhisperConfig",
        _ANY
        | {
            "d_model": 64,
            "encoder_layers": 1,
            "decoder_layers": 2,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 96,
            "decoder_ffn_dim": 96,
            "num_mel_bins": 8,
            "max_source_positions": SOURCE_TOKENS,
            "max_target_positions": POSITIONS,
            "decoder_start_token_id": 2,
            "begin_suppress_tokens": None,
        },
        kind="encoder-decoder",
    ),
    Architecture(
        "deepseek_v3",
        "DeepseekV3Config",
        _MLP
        | {
            "num_key_value_heads": 4,
            "q_lora_rank": 32,
            "kv_lora_rank": 32,
            "qk_rope_head_dim": 16,
            "qk_nope_head_dim": 16,
            "v_head_dim": 16,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "moe_intermediate_size": 48,
            "first_k_dense_replace": 1,
            "num_mtp_layers": 0,
        },
        attentions=("sdpa", "eager"),
        static=True,
    ),
    Architecture(
        "minicpm3",
        "MiniCPM3Config",
        _MLP
        | {
            "num_key_value_heads": 4,
            "q_lora_rank": 32,
            "kv_lora_rank": 32,
            "qk_rope_head_dim": 16,
            "qk_nope_head_dim": 16,
            "v_head_dim": 16,
        },
    ),
    Architecture(
        "mllama",
        "MllamaTextConfig",
        _GQA | {"num_hidden_layers": 3, "cross_attention_layers": [1]},
        kind="cross",
        model="MllamaForCausalLM",
    ),
    Architecture("olmo", "OlmoConfig", _GQA),
    Architecture("nemotron", "NemotronConfig", _HEAD),
    Architecture(
        "phimoe",
        "PhimoeConfig",
        _GQA | {"num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    Architecture(
        "qwen2_moe", "Qwen2MoeConfig", _GQA | _MOE | {"shared_expert_intermediate_size": 48}
    ),
    Architecture("cohere2", "Cohere2Config", _HEAD | _MIXED | {"logit_scale": 1.0}),
    Architecture("exaone4", "Exaone4Config", _GQA | _MIXED),
    Architecture("glm4", "Glm4Config", _HEAD),
    Architecture(
        "llama4",
        "Llama4TextConfig",
        _HEAD
        | {
            "intermediate_size_mlp": 96,
            "num_local_experts": 4,
            "attention_chunk_size": WINDOW,
            "layer_types": ["chunked_attention", "full_attention"],
            "no_rope_layers": [1, 0],
        },
    ),
    Architecture(
        "gemma3n",
        "Gemma3nTextConfig",
        _HEAD
        | _WINDOW
        | {
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 16,
            "vocab_size_per_layer_input": VOCABULARY,
            "laurel_rank": 16,
            "activation_sparsity_pattern": [0.0] * 4,
        },
    ),
)

ARCHITECTURES: dict[str, Architecture] = {item.name: item for item in _ALL}
