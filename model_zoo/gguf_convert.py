# SPDX-License-Identifier: Apache-2.0
"""Convert a GGUF file of a Llama-family model to a Hugging Face folder in float32."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvpass.errors import CheckpointError
from model_zoo.optional import require

_TOP_LEVEL = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_CONTROL_TOKEN, _USER_DEFINED_TOKEN = 3, 4  # gguf.TokenType


def convert(gguf_path: Path, folder: Path) -> None:
    """Write config, weights, tokenizer and generation config of `gguf_path` into `folder`.

    Quantised tensors are dequantised to float32, so the folder computes what the GGUF file does.

    Raises:
        CheckpointError: the file is damaged or of a family, tokenizer or tensor set that is not
            known, or `gguf`, `tokenizers` or `safetensors` is not installed.
        OSError: the folder cannot be written.
    """
    gguf = require("gguf", "a GGUF checkpoint")
    require("safetensors.numpy", "a GGUF checkpoint")
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    try:
        reader = gguf.GGUFReader(str(gguf_path))
    except (ValueError, KeyError, IndexError) as error:
        raise CheckpointError(f"{gguf_path} is not a readable GGUF file: {error}") from error
    fields = {name: field.contents() for name, field in reader.fields.items()}
    names = {tensor.name for tensor in reader.tensors}
    config = hf_config(fields, tied="output.weight" not in names)
    tokenizer, tokenizer_config = hf_tokenizer(fields)

    weights: dict[str, NDArray[np.float32]] = {}
    for tensor in reader.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        weights[hf_name(tensor.name)] = _half_split(tensor.name, values, config)
    try:
        save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})
    except SafetensorError as error:  # how the library reports that the disk is full
        raise OSError(str(error)) from error
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    for file, content in (
        ("config.json", config),
        ("tokenizer_config.json", tokenizer_config),
        ("generation_config.json", special),
    ):
        text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
        (folder / file).write_text(text, encoding="utf-8")
    # safetensors makes files private to the user; the others follow the umask, so follow them.
    (folder / "model.safetensors").chmod((folder / "config.json").stat().st_mode)


def hf_name(name: str) -> str:
    """The Hugging Face name of a GGUF tensor; CheckpointError when it has none."""
    if name in _TOP_LEVEL:
        return _TOP_LEVEL[name]
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if match is None or match[2] not in _IN_LAYER:
        raise CheckpointError(f"GGUF tensor {name!r} is not part of a Llama decoder")
    return f"model.layers.{match[1]}.{_IN_LAYER[match[2]]}.{match[3]}"


def _half_split(
    name: str, values: NDArray[np.float32], config: dict[str, Any]
) -> NDArray[np.float32]:
    """Undo llama.cpp's row order of q and k, which puts the rows of a rotary pair together."""
    if ".attn_q." in name:
        heads = config["num_attention_heads"]
    elif ".attn_k." in name:
        heads = config["num_key_value_heads"]
    else:
        return values
    pairs = values.reshape(heads, -1, 2, *values.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(values.shape)


def hf_config(fields: dict[str, Any], *, tied: bool) -> dict[str, Any]:
    """The `config.json` of GGUF metadata.

    Raises:
        CheckpointError: the architecture is not llama, a size is missing, or the metadata asks for
            rope scaling, a partial rotary dimension or experts.
    """
    architecture = fields.get("general.architecture")
    if architecture != "llama":
        raise CheckpointError(f"GGUF architecture {architecture!r} is not supported; 'llama' is")

    def size(key: str) -> int:
        try:
            return int(fields[f"llama.{key}"])
        except KeyError as error:
            raise CheckpointError(f"GGUF metadata lacks {error.args[0]}") from error

    heads, hidden = size("attention.head_count"), size("embedding_length")
    head_dim = int(fields.get("llama.attention.key_length", hidden // heads))
    for key, neutral in (
        ("llama.rope.scaling.type", "none"),
        ("llama.rope.dimension_count", head_dim),
        ("llama.attention.value_length", head_dim),
        ("llama.expert_count", 0),
    ):
        if fields.get(key, neutral) != neutral:
            raise CheckpointError(f"GGUF metadata {key}={fields[key]!r} is not supported")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "hidden_size": hidden,
        "intermediate_size": size("feed_forward_length"),
        "num_hidden_layers": size("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": int(fields.get("llama.attention.head_count_kv", heads)),
        "head_dim": head_dim,
        "max_position_embeddings": size("context_length"),
        "hidden_act": "silu",
        # Stored as float32: six digits give back the number that was meant.
        "rms_norm_eps": float(f"{fields['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        "rope_theta": float(fields.get("llama.rope.freq_base", 10000.0)),
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        "bos_token_id": fields.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": fields.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": fields.get("tokenizer.ggml.padding_token_id"),
        "torch_dtype": "float32",
    }


def _smollm_split() -> Any:
    """SmolLM's pre-tokenizer: every digit alone, then GPT-2's byte-level words."""
    pre = require("tokenizers.pre_tokenizers", "a GGUF tokenizer")
    return pre.Sequence(
        [pre.Digits(individual_digits=True), pre.ByteLevel(add_prefix_space=False, use_regex=True)]
    )


# Pre-tokenizers by their GGUF name; the file has the vocabulary and merges but not these rules.
_PRE_TOKENIZERS: dict[str, Callable[[], Any]] = {"smollm": _smollm_split}


def hf_tokenizer(fields: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """A `tokenizers.Tokenizer` and the `tokenizer_config.json` of GGUF metadata.

    Raises:
        CheckpointError: the tokenizer is not byte-level BPE, or its pre-tokenizer is not known.
    """
    tokenizers = require("tokenizers", "a GGUF tokenizer")
    kind, pre = fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre")
    if kind != "gpt2" or pre not in _PRE_TOKENIZERS:
        raise CheckpointError(
            f"GGUF tokenizer {kind!r} with pre-tokenizer {pre!r} is not supported; "
            f"'gpt2' with one of {list(_PRE_TOKENIZERS)} is"
        )
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    unknown = fields.get("tokenizer.ggml.unknown_token_id")
    # A few byte values never occur in the vocabulary: an unknown token is better than silence.
    model = tokenizers.models.BPE(
        vocab=vocabulary,
        merges=merges,
        unk_token=None if unknown is None else tokens[unknown],
        fuse_unk=True,
    )
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = _PRE_TOKENIZERS[pre]()
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    for token, token_type in zip(tokens, fields["tokenizer.ggml.token_type"], strict=True):
        special = token_type == _CONTROL_TOKEN
        added = tokenizers.AddedToken(token, normalized=False, special=special)
        if special:
            tokenizer.add_special_tokens([added])
        elif token_type == _USER_DEFINED_TOKEN:
            tokenizer.add_tokens([added])

    def token_at(key: str) -> str | None:
        token_id = fields.get(f"tokenizer.ggml.{key}_token_id")
        return None if token_id is None else tokens[token_id]

    settings = {
        # Not GPT2Tokenizer: transformers would rebuild that one without the digit rule.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": bool(fields.get("tokenizer.ggml.add_bos_token", False)),
        "bos_token": token_at("bos"),
        "eos_token": token_at("eos"),
        "unk_token": token_at("unknown"),
        "pad_token": token_at("padding"),
        "chat_template": fields.get("tokenizer.chat_template"),
        "clean_up_tokenization_spaces": False,
        "model_max_length": int(fields["llama.context_length"]),
    }
    return tokenizer, {key: value for key, value in settings.items() if value is not None}
