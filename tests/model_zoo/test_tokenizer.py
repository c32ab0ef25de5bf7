# SPDX-License-Identifier: Apache-2.0
"""Both tokenizer formats, opening tokens and chat templates."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import sentencepiece

import model_zoo
from kvpass.errors import CheckpointError
from model_zoo.tokenizer import load_tokenizer


@pytest.fixture
def sentencepiece_folder(hf_folder: Path) -> Path:
    """The tiny model with a tokenizer.model trained on text made here."""
    text = hf_folder / "text.txt"
    words = ["block", "page", "table", "cache", "token", "layer"]
    text.write_text("\n".join(f"{a} {b} {i}" for i, a in enumerate(words) for b in words))
    sentencepiece.SentencePieceTrainer.train(
        input=str(text),
        model_prefix=str(hf_folder / "tokenizer"),
        vocab_size=300,
        model_type="bpe",
        byte_fallback=True,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (hf_folder / name).unlink()
    return hf_folder


def test_json_tokenizer(hf_folder: Path) -> None:
    tokenizer = model_zoo.load(hf_folder).tokenizer
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.vocab_size) == (1, 2, 300)
    text = "The fox: naïve 12\n\t日本 </s>"
    plain = tokenizer.encode(text, add_bos=False)
    assert plain[-1] == 2 and 1 not in plain
    assert tokenizer.decode(plain) == text
    assert tokenizer.encode(text) == tokenizer.encode(text, add_bos=True) == [1, *plain]


def test_json_tokenizer_follows_its_own_template(hf_folder: Path) -> None:
    path = hf_folder / "tokenizer.json"
    content = json.loads(path.read_text())
    content["truncation"] = {
        "direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0
    }  # fmt: skip
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": "<s>", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
    }
    path.write_text(json.dumps(content))
    (hf_folder / "tokenizer_config.json").write_text('{"bos_token": "<s>"}')
    tokenizer = load_tokenizer(hf_folder)
    plain = tokenizer.encode("the lazy dog jumps over", add_bos=False)
    assert len(plain) > 4  # the stored truncation does not cut prompts
    assert tokenizer.encode("the lazy dog jumps over") == [1, *plain]
    assert tokenizer.eos_token_id is None


def test_sentencepiece_tokenizer(sentencepiece_folder: Path) -> None:
    tokenizer = model_zoo.load(sentencepiece_folder).tokenizer
    raw = sentencepiece.SentencePieceProcessor(
        model_file=str(sentencepiece_folder / "tokenizer.model")
    )
    text = "page table 7 naïve 日"
    assert tokenizer.encode(text, add_bos=False) == raw.encode(text)
    assert tokenizer.encode(text) == [tokenizer.bos_token_id, *raw.encode(text)]
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (raw.bos_id(), raw.eos_id())
    assert tokenizer.vocab_size == raw.vocab_size()
    (sentencepiece_folder / "tokenizer_config.json").write_text('{"add_bos_token": false}')
    assert load_tokenizer(sentencepiece_folder).encode(text) == raw.encode(text)


def test_damaged_sentencepiece_model(sentencepiece_folder: Path) -> None:
    (sentencepiece_folder / "tokenizer.model").write_bytes(b"not a model")
    with pytest.raises(CheckpointError, match=r"tokenizer\.model cannot be read"):
        load_tokenizer(sentencepiece_folder)


def test_chat_template(hf_folder: Path) -> None:
    with pytest.raises(CheckpointError, match="no chat template"):
        load_tokenizer(hf_folder).apply_chat("hi")
    template = "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    (hf_folder / "chat_template.jinja").write_text(template + "{{ eos_token }}")
    assert load_tokenizer(hf_folder).apply_chat("hi {{x}}") == "<s>[user]hi {{x}}</s>"
    (hf_folder / "chat_template.jinja").write_text("{{ raise_exception('no system turn') }}")
    with pytest.raises(CheckpointError, match="refuses the prompt: no system turn"):
        load_tokenizer(hf_folder).apply_chat("hi")
    (hf_folder / "chat_template.jinja").write_text("{{ ''.__class__.__mro__ }}")
    with pytest.raises(CheckpointError, match="cannot be rendered"):
        load_tokenizer(hf_folder).apply_chat("hi")


@pytest.mark.parametrize("library", ["tokenizers", "sentencepiece"])
def test_missing_library_says_how_to_get_it(
    sentencepiece_folder: Path,
    write_tokenizer: Callable[[Path], None],
    monkeypatch: pytest.MonkeyPatch,
    library: str,
) -> None:
    if library == "tokenizers":
        write_tokenizer(sentencepiece_folder)
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(CheckpointError, match=rf"'{library}' library.*kvpass\[demo\]"):
        load_tokenizer(sentencepiece_folder)
