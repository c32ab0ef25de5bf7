# SPDX-License-Identifier: Apache-2.0
"""Shapes of models for planning: a few by name, others from a Hugging Face config."""

from __future__ import annotations

import difflib
import json
from pathlib import Path
from typing import Any

from kvpass.errors import CheckpointError, ConfigError
from kvpass.plan import LayerKV, ModelShape
from kvpass.tuning import EXPERTS


def llama_parameters(
    *, layers: int, hidden: int, heads: int, kv_heads: int, head_dim: int, inner: int, vocab: int,
    tied: bool,
) -> int:  # fmt: skip
    """Return the parameters of a decoder of the Llama family without biases."""
    attention = hidden * head_dim * (heads + 2 * kv_heads) + heads * head_dim * hidden
    layer = attention + 3 * hidden * inner + 2 * hidden
    return layers * layer + hidden + (1 if tied else 2) * vocab * hidden


def _llama(
    name: str, layers: int, hidden: int, heads: int, kv_heads: int, inner: int, vocab: int,
    *, tied: bool = False,
) -> ModelShape:  # fmt: skip
    head_dim = hidden // heads
    return ModelShape(
        name=name,
        layers=(LayerKV(kv_heads * 2 * head_dim),) * layers,
        parameters=llama_parameters(
            layers=layers, hidden=hidden, heads=heads, kv_heads=kv_heads, head_dim=head_dim,
            inner=inner, vocab=vocab, tied=tied,
        ),
        hidden_size=hidden,
        intermediate_size=inner,
        vocab_size=vocab,
        counted="published shape",
    )  # fmt: skip


# From the config.json of each model's release.
KNOWN: dict[str, ModelShape] = {
    shape.name: shape
    for shape in (
        _llama("smollm2-135m", 30, 576, 9, 3, 1536, 49152, tied=True),
        _llama("llama-2-7b", 32, 4096, 32, 32, 11008, 32000),
        _llama("llama-2-13b", 40, 5120, 40, 40, 13824, 32000),
        _llama("llama-3.1-8b", 32, 4096, 32, 8, 14336, 128256),
    )
}


def read_shape(model: str) -> ModelShape:
    """Return the shape of a model.

    Args:
        model: a name of ``KNOWN`` in any case, a Hugging Face folder, or a ``config.json``.

    Raises:
        ConfigError: it is none of these, or the config has no shape that can be planned.
        CheckpointError: transformers is not installed, and the config is of no plain Llama.
    """
    known = KNOWN.get(model.strip().lower())
    if known is not None:
        return known
    path = Path(model).expanduser()
    path = path / "config.json" if path.is_dir() else path
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        close = difflib.get_close_matches(model.strip().lower(), KNOWN, n=1, cutoff=0.5)
        hint = f" (nearest: {close[0]})" if close else ""
        raise ConfigError(
            f"--model {model!r}: no shape of that name{hint}, and {path} cannot be read "
            f"({error.strerror}); give one of {', '.join(KNOWN)}, a Hugging Face folder, or a "
            "config.json"
        ) from None
    except ValueError as error:
        raise ConfigError(f"--model {model!r}: {path} is not JSON: {error}") from None
    if not isinstance(content, dict) or not isinstance(content.get("model_type"), str):
        raise ConfigError(
            f"--model {model!r}: {path} has no model_type; give a Hugging Face config.json"
        )
    try:
        import transformers
    except ImportError:
        return _plain_shape(model, content)
    return transformers_shape(model, content, transformers)


def _plain_shape(name: str, content: dict[str, Any]) -> ModelShape:
    from model_zoo.configs import DecoderConfig

    try:
        config = DecoderConfig.from_dict(content)
    except CheckpointError as error:
        raise CheckpointError(f'{error}; for other models: pip install "kvpass[hf]"') from None
    biases = config.num_hidden_layers * (
        config.attention_bias * config.head_dim
        * (config.num_attention_heads + 2 * config.num_key_value_heads)
        + config.attention_bias * config.hidden_size
        + config.mlp_bias * (2 * config.intermediate_size + config.hidden_size)
    )  # fmt: skip
    return ModelShape(
        name=name,
        layers=(LayerKV(config.num_key_value_heads * 2 * config.head_dim),)
        * config.num_hidden_layers,
        parameters=biases
        + llama_parameters(
            layers=config.num_hidden_layers,
            hidden=config.hidden_size,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            inner=config.intermediate_size,
            vocab=config.vocab_size,
            tied=config.tie_word_embeddings,
        ),
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        vocab_size=config.vocab_size,
        counted="formula of the Llama family",
    )


LONGEST = 240
"""Characters of a message of transformers that are shown."""


def _shortened(text: str) -> str:
    """A message without the end of a long list."""
    return text if len(text) <= LONGEST else f"{text[:LONGEST]} ..."


def transformers_shape(name: str, content: dict[str, Any], transformers: Any) -> ModelShape:
    """Return the shape of a config that transformers knows; weights are counted, not made.

    Raises:
        ConfigError: transformers does not know the model, or it keeps no keys and values.
    """
    import torch

    try:
        whole = transformers.AutoConfig.for_model(**content)
        config = whole.get_text_config(decoder=True)
        with torch.device("meta"):
            network = transformers.AutoModelForCausalLM.from_config(config)
    # Configs of any origin fail in any way; each means that there is no such model.
    except Exception as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigError(
            f"--model {name!r}: transformers makes no decoder of model_type "
            f"{content['model_type']!r}: {_shortened(first)}"
        ) from None
    sizes = {key: weight.numel() for key, weight in network.named_parameters()}
    experts = int(_first(config, *EXPERTS) or 1)
    width = int(config.hidden_size)
    inner = _first(config, "intermediate_size", "ffn_dim", "n_inner")  # Gemma 3n: by layer
    return ModelShape(
        name=name,
        layers=_layers(config),
        parameters=sum(sizes.values()),
        expert_parameters=sum(size for key, size in sizes.items() if ".experts." in key),
        experts=experts,
        experts_per_token=int(_first(config, "num_experts_per_tok", "top_k_experts") or 1)
        if experts > 1
        else 1,
        hidden_size=width,
        intermediate_size=max(inner) if isinstance(inner, list) else int(inner or 4 * width),
        vocab_size=int(config.vocab_size),
        counted="counted on the meta device",
    )


def _first(config: Any, *names: str) -> Any:
    return next((value for name in names if (value := getattr(config, name, None))), None)


def _layers(config: Any) -> tuple[LayerKV, ...]:
    """What each layer keeps of a token, as the rewritten graph stores it."""
    count = int(config.num_hidden_layers)
    if not _first(config, "num_attention_heads"):
        raise ConfigError(
            f"{config.model_type} has no attention heads: plan needs a decoder that keeps keys and "
            "values"
        )
    heads = int(config.num_attention_heads)
    if rank := getattr(config, "kv_lora_rank", None):
        elements = rank + config.qk_rope_head_dim  # multi-head latent attention
    else:
        kv_heads = _first(config, "num_key_value_heads", "num_kv_heads") or heads
        if getattr(config, "multi_query", False) and not config.new_decoder_architecture:
            kv_heads = 1  # Falcon
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        elements = kv_heads * 2 * head_dim
    kinds = getattr(config, "layer_types", None)
    sliding = getattr(config, "sliding_window", None)
    if kinds is None:
        kinds = ["sliding_attention" if sliding else "full_attention"] * count
    windows = {
        "sliding_attention": sliding,
        "chunked_attention": getattr(config, "attention_chunk_size", None),
        "full_attention": None,
    }
    if unknown := sorted(set(kinds) - set(windows)):
        raise ConfigError(
            f"layers of type {unknown[0]!r} keep other state than keys and values, which kvpass "
            "does not hold"
        )
    # The last layers of Gemma 3n read what earlier ones have stored.
    own = count - int(getattr(config, "num_kv_shared_layers", 0) or 0)
    return tuple(LayerKV(elements if i < own else 0, windows[kind]) for i, kind in enumerate(kinds))
