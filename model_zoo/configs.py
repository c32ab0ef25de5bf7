# SPDX-License-Identifier: Apache-2.0
"""The shape of a Llama-family decoder, read from a Hugging Face `config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvpass.errors import CheckpointError

MODEL_TYPES = ("llama", "mistral")
_ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM")

# Fields that change what a model computes, each with the only values that leave it a plain Llama.
_NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "attention_multiplier": (None,),
    "attn_logit_softcapping": (None,),
    "embedding_multiplier": (None, 1),
    "final_logit_softcapping": (None,),
    "logits_scaling": (None, 1),
    "no_rope_layers": (None,),
    "num_local_experts": (None,),
    "partial_rotary_factor": (None, 1),
    "quantization_config": (None,),
    "residual_multiplier": (None, 1),
    "rope_interleaved": (None, False),
    "sliding_window": (None,),
    "use_qk_norm": (None, False),
}


@dataclass(frozen=True)
class Llama3Rope:
    """Frequency scaling of Llama 3.1 (`rope_type: llama3`); lengths are in tokens."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True)
class DecoderConfig:
    """Sizes and options of a decoder, under the names Hugging Face configs use.

    Any cache that is made from a Hugging Face config can be made from this one.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: Llama3Rope | None = None
    attention_bias: bool = False
    mlp_bias: bool = False
    tie_word_embeddings: bool = False
    bos_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] | None = None
    model_type: str = "llama"

    def __post_init__(self) -> None:
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "max_position_embeddings",
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise CheckpointError(f"{name} is {value!r}; it must be a positive integer")
        if self.num_attention_heads % self.num_key_value_heads:
            raise CheckpointError(
                f"num_attention_heads={self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads={self.num_key_value_heads}"
            )
        if self.head_dim % 2:
            raise CheckpointError(f"head_dim={self.head_dim} is odd; rotary embedding needs pairs")

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> DecoderConfig:
        """Read the parsed content of a Hugging Face `config.json`.

        Raises:
            CheckpointError: a size is missing or wrong, or a field asks for something that the
                decoder does not compute; the message names the field and its value.
        """
        _refuse_unsupported(config)
        rope_theta, rope_scaling = _rope(config)
        hidden_size = _required(config, "hidden_size")
        heads = _required(config, "num_attention_heads")
        head_dim = config.get("head_dim")
        if head_dim is None:
            if hidden_size % heads:
                raise CheckpointError(
                    f"hidden_size={hidden_size} is not a multiple of num_attention_heads={heads}, "
                    "and config.json has no head_dim"
                )
            head_dim = hidden_size // heads
        kv_heads = config.get("num_key_value_heads")
        eos = config.get("eos_token_id")
        return cls(
            vocab_size=_required(config, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=_required(config, "intermediate_size"),
            num_hidden_layers=_required(config, "num_hidden_layers"),
            num_attention_heads=heads,
            num_key_value_heads=heads if kv_heads is None else kv_heads,
            head_dim=head_dim,
            max_position_embeddings=config.get("max_position_embeddings", 2048),
            rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            rope_theta=rope_theta,
            rope_scaling=rope_scaling,
            attention_bias=bool(config.get("attention_bias", False)),
            mlp_bias=bool(config.get("mlp_bias", False)),
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            bos_token_id=config.get("bos_token_id"),
            eos_token_id=tuple(eos) if isinstance(eos, list) else eos,
            model_type=config["model_type"],
        )


def _required(config: Mapping[str, Any], name: str) -> int:
    value = config.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise CheckpointError(f"config.json has {name}={value!r}; it must be a positive integer")
    return value


def _refuse_unsupported(config: Mapping[str, Any]) -> None:
    model_type = config.get("model_type")
    if model_type not in MODEL_TYPES:
        raise CheckpointError(
            f"model_type {model_type!r} is not supported; this decoder loads {list(MODEL_TYPES)}"
        )
    # An absent sliding_window means 4096 in a Mistral config, so only an explicit null is safe.
    if model_type == "mistral" and "sliding_window" not in config:
        raise CheckpointError(
            "a mistral config.json without sliding_window means a window of 4096 tokens, which "
            "this decoder does not apply; only `sliding_window: null` can be loaded"
        )
    architectures = config.get("architectures") or []
    if architectures and not set(architectures) & set(_ARCHITECTURES):
        raise CheckpointError(
            f"architectures {architectures!r} is not supported; use one of {list(_ARCHITECTURES)}"
        )
    activation = config.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise CheckpointError(f"hidden_act {activation!r} is not supported; only 'silu' is")
    for name, allowed in _NEUTRAL_VALUES.items():
        value = config.get(name)
        if value not in allowed:
            raise CheckpointError(
                f"config.json has {name}={value!r}, which this decoder does not compute; "
                f"it can load {name} of {' or '.join(repr(v) for v in allowed)} only"
            )
    layer_types = config.get("layer_types") or []
    if other := sorted(set(layer_types) - {"full_attention"}):
        raise CheckpointError(f"layer_types has {other}; only 'full_attention' is supported")


def _rope(config: Mapping[str, Any]) -> tuple[float, Llama3Rope | None]:
    """Read both spellings: `rope_theta` + `rope_scaling`, and the newer `rope_parameters`."""
    rope = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    theta = rope.get("rope_theta", config.get("rope_theta"))
    theta = 10000.0 if theta is None else float(theta)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if rope.get("partial_rotary_factor", 1) != 1:
        raise CheckpointError(
            f"partial_rotary_factor {rope['partial_rotary_factor']!r} is not supported; only 1 is"
        )
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise CheckpointError(
            f"rope scaling type {kind!r} is not supported; use 'default' or 'llama3'"
        )
    try:
        scaling = Llama3Rope(
            factor=float(rope["factor"]),
            low_freq_factor=float(rope["low_freq_factor"]),
            high_freq_factor=float(rope["high_freq_factor"]),
            original_max_position_embeddings=int(
                rope.get("original_max_position_embeddings") or config["max_position_embeddings"]
            ),
        )
    except KeyError as error:
        raise CheckpointError(f"llama3 rope scaling lacks {error.args[0]!r}") from error
    if scaling.high_freq_factor <= scaling.low_freq_factor:
        raise CheckpointError(
            f"llama3 rope scaling needs high_freq_factor > low_freq_factor, not "
            f"{scaling.high_freq_factor} <= {scaling.low_freq_factor}"
        )
    return theta, scaling
