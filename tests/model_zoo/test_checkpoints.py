# SPDX-License-Identifier: Apache-2.0
"""Local Hugging Face folders: single and sharded weights, tokenizers, and damage of every kind."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

import model_zoo
from kvpass.errors import CheckpointError

EMBEDDING = "model.embed_tokens.weight"


def edit_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def edit_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    weights = load_file(folder / "model.safetensors")
    weights = {name: value.clone() for name, value in weights.items()}
    change(weights)
    save_file(weights, folder / "model.safetensors")


@pytest.fixture
def sharded(hf_folder: Path, make_hf: Callable[..., LlamaForCausalLM]) -> Path:
    (hf_folder / "model.safetensors").unlink()
    make_hf().save_pretrained(hf_folder, max_shard_size="100KB")
    assert len(list(hf_folder.glob("model-*.safetensors"))) > 2
    return hf_folder


@torch.no_grad()
def assert_same_logits(folder: Path) -> None:
    loaded = model_zoo.load(folder)
    reference = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.arange(3, 43)[None]
    torch.testing.assert_close(loaded.decoder(ids), reference(ids).logits, atol=1e-4, rtol=1e-4)


def test_single_file(hf_folder: Path) -> None:
    assert_same_logits(hf_folder)
    loaded = model_zoo.load(str(hf_folder))
    assert loaded.path == hf_folder and loaded.config is loaded.decoder.config
    assert not loaded.decoder.training
    assert not any(tensor.is_meta for tensor in loaded.decoder.state_dict().values())
    assert not loaded.decoder.rotary.inv_freq.is_meta


def test_shards(sharded: Path) -> None:
    assert_same_logits(sharded)


def test_tied_folder(
    tmp_path: Path,
    make_hf: Callable[..., LlamaForCausalLM],
    write_tokenizer: Callable[[Path], None],
) -> None:
    make_hf(tie_word_embeddings=True).save_pretrained(tmp_path)
    write_tokenizer(tmp_path)
    assert_same_logits(tmp_path)
    # Some exports store the tied head a second time.
    edit_weights(tmp_path, lambda w: w.update({"lm_head.weight": w[EMBEDDING].clone()}))
    assert_same_logits(tmp_path)
    edit_weights(tmp_path, lambda w: w.update({"lm_head.weight": w[EMBEDDING] + 1}))
    with pytest.raises(CheckpointError, match=r"lm_head\.weight.*differs from the embedding"):
        model_zoo.load(tmp_path)


def test_dtype_is_converted(hf_folder: Path) -> None:
    loaded = model_zoo.load(hf_folder, dtype=torch.bfloat16)
    assert {p.dtype for p in loaded.decoder.parameters()} == {torch.bfloat16}
    wide = load_file(hf_folder / "model.safetensors")["model.norm.weight"]
    assert torch.equal(loaded.decoder.norm.weight, wide.bfloat16())
    with pytest.raises(CheckpointError, match=r"torch.int8 is not a floating dtype"):
        model_zoo.load(hf_folder, dtype=torch.int8)


def test_weights_do_not_depend_on_the_file(hf_folder: Path) -> None:
    loaded = model_zoo.load(hf_folder)
    before = loaded.decoder.embed_tokens.weight.clone()
    file = hf_folder / "model.safetensors"
    with file.open("r+b") as stream:
        stream.seek(0)
        stream.write(b"\xff" * file.stat().st_size)
    assert torch.equal(loaded.decoder.embed_tokens.weight, before)


def test_missing_shard(sharded: Path) -> None:
    shard = sorted(sharded.glob("model-*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(CheckpointError, match=f"lacks the shard {shard.name}"):
        model_zoo.load(sharded)


def test_index_names_a_tensor_that_its_shard_lacks(sharded: Path) -> None:
    index = sharded / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    files = sorted(set(weight_map.values()))
    moved = next(name for name, file in weight_map.items() if file == files[0])
    edit_json(index, weight_map={**weight_map, moved: files[1]})
    with pytest.raises(CheckpointError, match=f"{files[1]} lacks tensor {moved}"):
        model_zoo.load(sharded)


def test_index_that_leaves_the_folder(sharded: Path) -> None:
    index = sharded / "model.safetensors.index.json"
    edit_json(index, weight_map={"model.norm.weight": "../other.safetensors"})
    with pytest.raises(CheckpointError, match="outside the folder"):
        model_zoo.load(sharded)


def test_missing_tensor(hf_folder: Path) -> None:
    edit_weights(hf_folder, lambda w: w.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(CheckpointError, match=r"lacks tensor model\.layers\.1\.mlp\.up_proj"):
        model_zoo.load(hf_folder)


def test_unexpected_tensor(hf_folder: Path) -> None:
    name = "model.layers.0.self_attn.q_norm.weight"
    edit_weights(hf_folder, lambda w: w.update({name: torch.ones(16)}))
    with pytest.raises(CheckpointError, match=f"has tensor {name}"):
        model_zoo.load(hf_folder)


def test_wrong_shape(hf_folder: Path) -> None:
    edit_weights(hf_folder, lambda w: w.update({"model.norm.weight": torch.ones(63)}))
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight.*\[63\].*\[64\]"):
        model_zoo.load(hf_folder)


def test_integer_weights(hf_folder: Path) -> None:
    ints = torch.ones(64, dtype=torch.int8)
    edit_weights(hf_folder, lambda w: w.update({"model.norm.weight": ints}))
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight.*stored as I8"):
        model_zoo.load(hf_folder)


def test_truncated_weights(hf_folder: Path) -> None:
    file = hf_folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read"):
        model_zoo.load(hf_folder)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("config.json", None, r"config\.json cannot be read: No such file"),
        ("config.json", "{", r"config\.json is not valid JSON"),
        ("config.json", "[]", r"config\.json holds a list"),
        ("config.json", '{"model_type": "mamba"}', "model_type 'mamba'"),
        ("model.safetensors", None, "neither model.safetensors nor"),
        ("tokenizer.json", None, "neither tokenizer.json nor tokenizer.model"),
        ("tokenizer.json", "{}", r"tokenizer\.json cannot be read"),
        ("tokenizer_config.json", "no", r"tokenizer_config\.json is not valid JSON"),
        ("tokenizer_config.json", '{"bos_token": "<x>"}', "special token '<x>' is not in"),
    ],
)
def test_bad_files(hf_folder: Path, file: str, content: str | None, message: str) -> None:
    (hf_folder / file).unlink()
    if content is not None:
        (hf_folder / file).write_text(content)
    with pytest.raises(CheckpointError, match=message):
        model_zoo.load(hf_folder)


def test_tokenizer_of_another_model(hf_folder: Path, write_tokenizer: Any) -> None:
    edit_json(hf_folder / "config.json", vocab_size=200)
    with pytest.raises(CheckpointError, match="has 300 tokens, but vocab_size is 200"):
        model_zoo.load(hf_folder)


def test_unknown_name() -> None:
    with pytest.raises(CheckpointError, match="'gpt-5' is neither.*smollm2-135m"):
        model_zoo.load("gpt-5")
    assert model_zoo.available() == ("smollm2-135m",)


def test_import_is_light() -> None:
    heavy = ["gguf", "tokenizers", "sentencepiece", "safetensors", "transformers"]
    code = f"import sys, model_zoo; print([m for m in {heavy} if m in sys.modules])"
    root = Path(model_zoo.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=root, check=True
    )
    assert done.stdout.strip() == "[]"
