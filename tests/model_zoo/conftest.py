# SPDX-License-Identifier: Apache-2.0
"""Tiny Llamas that transformers and model_zoo both build, and folders that hold them."""

from __future__ import annotations

import json
import string
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM

from model_zoo import Decoder, DecoderConfig

TEXT = [
    "The quick brown fox jumps over the lazy dog, twice.",
    "def add(a, b):\n    return a + b  # 12 + 34",
    "naive cafe, in 1999 and 2024",
]


@pytest.fixture
def make_hf() -> Callable[..., LlamaForCausalLM]:
    """Return a builder of tiny random Llamas of transformers."""

    def build(**overrides: Any) -> LlamaForCausalLM:
        torch.manual_seed(0)
        settings: dict[str, Any] = {
            "vocab_size": 320,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 512,
            "initializer_range": 0.3,  # large, so that the argmax is not a near tie
            "bos_token_id": 1,
            "eos_token_id": 2,
        }
        model = LlamaForCausalLM(LlamaConfig(**{**settings, **overrides})).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("bias") or "norm" in name:  # else zeros and ones hide mistakes
                    parameter.add_(torch.randn_like(parameter) * 0.2)
        return model

    return build


@pytest.fixture
def make_pair(
    make_hf: Callable[..., LlamaForCausalLM],
) -> Callable[..., tuple[Decoder, LlamaForCausalLM]]:
    """Return a builder of a Decoder and the Llama whose weights it shares."""

    def build(**overrides: Any) -> tuple[Decoder, LlamaForCausalLM]:
        reference = make_hf(**overrides)
        decoder = Decoder(DecoderConfig.from_dict(reference.config.to_dict())).eval()
        weights = {k.removeprefix("model."): v for k, v in reference.state_dict().items()}
        if decoder.lm_head is None:
            del weights["lm_head.weight"]
        decoder.load_state_dict(weights)
        return decoder, reference

    return build


@pytest.fixture
def write_tokenizer() -> Callable[[Path], None]:
    """Return a function that puts a tokenizer.json trained on TEXT into a folder."""

    def write(folder: Path) -> None:
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=300,
            special_tokens=["<unk>", "<s>", "</s>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        )
        tokenizer.train_from_iterator(TEXT, trainer)
        tokenizer.save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text(
            '{"bos_token": "<s>", "eos_token": {"content": "</s>"}, "add_bos_token": true}'
        )

    return write


@pytest.fixture
def hf_folder(
    tmp_path: Path,
    make_hf: Callable[..., LlamaForCausalLM],
    write_tokenizer: Callable[[Path], None],
) -> Path:
    """A folder with a tiny model in one safetensors file, and its tokenizer."""
    folder = tmp_path / "tiny"
    make_hf().save_pretrained(folder)
    write_tokenizer(folder)
    return folder


CONTROL, NORMAL = 3, 1  # gguf.TokenType
CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] "
    "+ '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def _write_gguf(
    path: Path, model: LlamaForCausalLM, types: dict[str, Any], pre: str, **extra: Any
) -> None:
    """Write what llama.cpp's converter writes for a Llama with SmolLM's tokenizer."""
    config = model.config
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    for key, value in extra.items():
        writer.add_string(key.replace("__", "."), value)

    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    # Bytes that this text does not have stay out, as some do in SmolLM2's vocabulary.
    trainer = trainers.BpeTrainer(vocab_size=config.vocab_size, special_tokens=special)
    tokenizer.train_from_iterator(
        [string.printable, "a  b\n\n    c\td, é " * 5, *TEXT * 6], trainer
    )
    bpe = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(bpe["vocab"], key=bpe["vocab"].__getitem__)
    tokens += [f"<unused{i}>" for i in range(config.vocab_size - len(tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([CONTROL if token in special else NORMAL for token in tokens])
    writer.add_token_merges([" ".join(merge) for merge in bpe["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHATML)

    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = weight.numpy()
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
        if count := heads.get(name.split(".")[-2]):
            values = values.reshape(count, 2, -1, values.shape[-1]).swapaxes(1, 2)
            values = values.reshape(weight.shape)
        quantised = types.get(name.split(".")[-2], gguf.GGMLQuantizationType.F32)
        data = gguf.quantize(np.ascontiguousarray(values), quantised)
        target = names.get_name(name, try_suffixes=(".weight",))
        assert target is not None
        writer.add_tensor(target, data, raw_dtype=quantised)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def write_gguf(make_hf: Callable[..., LlamaForCausalLM]) -> Callable[..., LlamaForCausalLM]:
    """Return a function that writes a tiny GGUF file and returns the Llama it was made from."""

    def write(
        path: Path,
        types: dict[str, Any] | None = None,
        pre: str = "smollm",
        **metadata: Any,
    ) -> LlamaForCausalLM:
        llama = make_hf(tie_word_embeddings=True)
        _write_gguf(path, llama, types or {}, pre, **metadata)
        return llama

    return write
