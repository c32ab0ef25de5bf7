# SPDX-License-Identifier: Apache-2.0
"""A GGUF file becomes the Hugging Face folder it was made from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from tokenizers import pre_tokenizers
from transformers import AutoTokenizer, LlamaForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

import model_zoo
from kvpass.errors import CheckpointError
from model_zoo.gguf_convert import convert, hf_name

Q4_1, Q8_0 = gguf.GGMLQuantizationType.Q4_1, gguf.GGMLQuantizationType.Q8_0
LIKE_SMOLLM2 = {
    **dict.fromkeys(["q_proj", "k_proj", "v_proj", "o_proj"], Q4_1),
    **dict.fromkeys(["gate_proj", "up_proj", "down_proj"], Q4_1),
    "embed_tokens": Q8_0,
}
PLAIN_TEXTS = [
    "The quick brown fox, and the lazy dog's 7 lives: we'll see.",
    "def add(a, b):\n    return a + b  # 12 + 34\n\n\tpass",
    "in 1999, 3.14159 and 1,000,000",
    "naïve café, déjà vu",
    "<|im_start|>user\nhi there<|im_end|>\n",
    "a   b \n\n  \t c   ",
    "",
    "   ",
]
# The digit rule changes how a run of spaces before a digit is cut.
DIGIT_TEXTS = ["a  1", "for i in x:\n    10 + 2", "x²+½ ٣٤"]


@torch.no_grad()
def test_float_file_gives_back_the_model(
    tmp_path: Path, write_gguf: Callable[..., LlamaForCausalLM]
) -> None:
    model = write_gguf(tmp_path / "m.gguf")
    convert(tmp_path / "m.gguf", tmp_path)
    loaded = model_zoo.load(tmp_path)
    ids = torch.arange(3, 60)[None]
    torch.testing.assert_close(loaded.decoder(ids), model(ids).logits, atol=1e-4, rtol=1e-4)
    for name, value in loaded.decoder.named_parameters():
        assert torch.equal(value, model.get_parameter(f"model.{name}")), name
    assert loaded.config.rms_norm_eps == model.config.rms_norm_eps
    assert loaded.config.tie_word_embeddings


@torch.no_grad()
def test_quantised_file_equals_the_reader_of_transformers(
    tmp_path: Path, write_gguf: Callable[..., LlamaForCausalLM]
) -> None:
    path = tmp_path / "m.gguf"
    model = write_gguf(path, LIKE_SMOLLM2)
    convert(path, tmp_path)
    loaded = model_zoo.load(tmp_path)
    expected = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)
    assert expected["tensors"]
    for name, value in expected["tensors"].items():
        ours = loaded.decoder.get_parameter(name.removeprefix("model."))
        torch.testing.assert_close(ours, value.float(), atol=0, rtol=0, msg=name)
    reference = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    ids = torch.arange(3, 60)[None]
    torch.testing.assert_close(loaded.decoder(ids), reference(ids).logits, atol=1e-4, rtol=1e-4)
    assert (reference(ids).logits - model(ids).logits).abs().max() > 1e-3  # it was quantised


def test_tokenizer_equals_transformers(
    tmp_path: Path, write_gguf: Callable[..., LlamaForCausalLM]
) -> None:
    write_gguf(tmp_path / "m.gguf")
    convert(tmp_path / "m.gguf", tmp_path)
    ours = model_zoo.load(tmp_path).tokenizer
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file="m.gguf")
    folder = AutoTokenizer.from_pretrained(tmp_path)
    for text in PLAIN_TEXTS:
        assert ours.encode(text) == theirs.encode(text, add_special_tokens=False), text
    # transformers leaves out the digit rule of SmolLM when it reads a GGUF file.
    theirs.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    for text in PLAIN_TEXTS + DIGIT_TEXTS:
        assert ours.encode(text) == theirs.encode(text, add_special_tokens=False), text
        assert ours.encode(text) == folder.encode(text), text
    for text in PLAIN_TEXTS[:3]:
        assert ours.decode(ours.encode(text)) == text
    assert (ours.bos_token_id, ours.eos_token_id) == (1, 2)
    assert (folder.bos_token_id, folder.eos_token_id) == (1, 2)
    turn = [{"role": "user", "content": "hi"}]
    assert ours.apply_chat("hi") == folder.apply_chat_template(
        turn, tokenize=False, add_generation_prompt=True
    )


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"llama__rope__scaling__type": "yarn"}, "llama.rope.scaling.type='yarn'"),
        ({"pre": "qwen2"}, "pre-tokenizer 'qwen2'"),
    ],
)
def test_unsupported_metadata(
    tmp_path: Path, write_gguf: Callable[..., Any], metadata: dict[str, str], message: str
) -> None:
    write_gguf(tmp_path / "m.gguf", **metadata)
    with pytest.raises(CheckpointError, match=message):
        convert(tmp_path / "m.gguf", tmp_path)


def test_other_architecture(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(str(tmp_path / "m.gguf"), "qwen2")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match="architecture 'qwen2'"):
        convert(tmp_path / "m.gguf", tmp_path)


@pytest.mark.parametrize("name", ["rope_freqs.weight", "blk.0.ffn_gate_exps.weight"])
def test_unknown_tensor(name: str) -> None:
    with pytest.raises(CheckpointError, match=name):
        hf_name(name)


@pytest.mark.parametrize("keep", [0, 3, 100, 5000, -100])
def test_truncated_file(
    tmp_path: Path, write_gguf: Callable[..., LlamaForCausalLM], keep: int
) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match="not a readable GGUF file"):
        convert(path, tmp_path)
