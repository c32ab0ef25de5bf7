# SPDX-License-Identifier: Apache-2.0
"""What kvpass.generate takes as a prompt, and how it calls models of one's own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import kvpass
from kvpass.errors import ConfigError, ShapeError, UnsupportedError
from kvpass.generation.prompts import read_prompt
from kvpass.generation.text import TextOf, special_ids
from tests.models import tiered, tiny

CPU = torch.device("cpu")
LETTERS = SimpleNamespace(
    encode=lambda text: [ord(c) - 96 for c in text],
    decode=lambda ids: "".join(chr(i + 96) for i in ids),
)
ENCODING = SimpleNamespace(encode=lambda text: SimpleNamespace(ids=LETTERS.encode(text)))


def read(prompt: Any, tokenizer: Any = None, vocabulary: int | None = 128) -> Any:
    ids, shown = read_prompt(prompt, tokenizer, CPU, vocabulary)
    assert ids.dtype == torch.int64
    return ids.tolist(), None if shown is None else shown.long().tolist()


@pytest.mark.parametrize(
    ("prompt", "tokenizer", "ids", "shown"),
    [
        ("ab", LETTERS, [[1, 2]], None),
        ("ab", ENCODING, [[1, 2]], None),
        (["abc", "d"], LETTERS, [[1, 2, 3], [4, 4, 4]], [[1, 1, 1], [0, 0, 1]]),
        (["abc", [7, 8]], LETTERS, [[1, 2, 3], [7, 7, 8]], [[1, 1, 1], [0, 1, 1]]),
        ([1, 2], None, [[1, 2]], None),
        ([[1, 2], [3, 4]], None, [[1, 2], [3, 4]], None),
        ((np.int32(1), np.int64(2)), None, [[1, 2]], None),
        (np.array([1, 2]), None, [[1, 2]], None),
        (np.array([[1, 2]], dtype=np.uint8), None, [[1, 2]], None),
        ([np.array([1, 2]), torch.tensor([3])], None, [[1, 2], [3, 3]], [[1, 1], [0, 1]]),
        (torch.tensor([1, 2], dtype=torch.int32), None, [[1, 2]], None),
        (torch.arange(6).view(2, 3).mT, None, [[0, 3], [1, 4], [2, 5]], None),
        ({"input_ids": [[1, 2]]}, None, [[1, 2]], None),
        ({"input_ids": torch.tensor([[1, 2]]), "attention_mask": torch.ones(1, 2)}, None, [[1, 2]],
         None),
        ({"input_ids": [[9, 2]], "attention_mask": [[0, 1]]}, None, [[9, 2]], [[0, 1]]),
        ({"input_ids": [5], "token_type_ids": [0]}, None, [[5]], None),
    ],
)  # fmt: skip
def test_prompts(prompt, tokenizer, ids, shown):
    assert read(prompt, tokenizer) == (ids, shown)


@pytest.mark.parametrize(
    ("prompt", "tokenizer", "error", "words"),
    [
        ("ab", None, ConfigError, "needs tokenizer="),
        (["ab"], SimpleNamespace(), ConfigError, "needs tokenizer="),
        ("", LETTERS, ShapeError, "no tokens"),
        ([], None, ShapeError, "no tokens"),
        ([[1], []], None, ShapeError, "no tokens"),
        (None, None, ShapeError, "None: give text or token ids"),
        (7, None, ShapeError, "7: give text or token ids"),
        ([1.5, 2.0], None, ShapeError, "1.5 in a prompt: give token ids"),
        ([[5.7, 6.2]], None, ShapeError, "5.7 in a prompt"),
        ([[True, False]], None, ShapeError, "True in a prompt"),
        ([True], None, ShapeError, "True in a prompt"),
        ([[[1, 2]]], None, ShapeError, r"\[1, 2\] in a prompt"),
        ([[1], 2], None, ShapeError, "2 in a prompt"),
        ([np.array([1.5])], None, ShapeError, "1.5 in a prompt"),
        (torch.tensor([1.0]), None, ShapeError, "torch.float32: give ids"),
        (torch.tensor([True]), None, ShapeError, "torch.bool: give ids"),
        (torch.tensor([1j]), None, ShapeError, "torch.complex64: give ids"),
        (torch.zeros(2, 2, 2, dtype=torch.long), None, ShapeError, r"\(2, 2, 2\): give \[B, n\]"),
        (torch.zeros(0, 3, dtype=torch.long), None, ShapeError, r"\(0, 3\)"),
        (np.array(["a"]), None, ShapeError, "no table of numbers"),
        ([128], None, ShapeError, "token id 128 in a prompt: the model has 128 tokens"),
        ([-1], None, ShapeError, "token id -1"),
        (torch.tensor([5, 999]), None, ShapeError, "token id 999"),
        ([2**70], None, ShapeError, f"token id {2**70} in a prompt"),
        ([{"role": "user", "content": "a"}], LETTERS, ConfigError, "apply_chat_template"),
        ({"ids": [1]}, None, ShapeError, r"keys \['ids'\]: give one with input_ids"),
        ({"input_ids": [[1, 2]], "attention_mask": [[1]]}, None, ShapeError, r"\(1, 1\) of a prom"),
    ],
)
def test_what_is_no_prompt(prompt, tokenizer, error, words):
    with pytest.raises(error, match=words):
        read(prompt, tokenizer)


@given(st.lists(st.lists(st.integers(0, 127), min_size=1, max_size=9), min_size=1, max_size=5))
def test_rows_are_padded_on_the_left(rows):
    ids, shown = read(rows)
    masks = shown or [[1] * len(rows[0])] * len(rows)
    assert [
        [i for i, m in zip(*pair, strict=True) if m] for pair in zip(ids, masks, strict=True)
    ] == (rows)
    assert all(sorted(mask) == mask for mask in masks)


class Counter(nn.Module):
    """The next token is one more; its cache counts what it was given."""

    def answer(self, ids, cache):
        cache.update(
            torch.zeros(len(ids), 1, ids.shape[1], 16),
            torch.zeros(len(ids), 1, ids.shape[1], 16),
            0,
        )
        return torch.nn.functional.one_hot((ids + 1) % 50, 50).float()


class PositionalOnly(Counter):
    def forward(self, tokens, /, cache):
        return self.answer(tokens, cache)


class CacheFirst(Counter):
    def forward(self, cache, tokens):
        return self.answer(tokens, cache)


class Variable(Counter):
    def forward(self, *args, cache=None, **kw):
        assert not kw
        return self.answer(args[0], cache)


class KeywordOnly(Counter):
    def forward(self, *, cache, words):
        return self.answer(words, cache)


class NoPlace(Counter):
    def forward(self, cache, **kw):
        raise AssertionError("called")


class Cache:
    def __init__(self) -> None:
        self.length = 0

    def update(self, k, v, layer):
        self.length += k.shape[2]
        return k, v

    def get_seq_length(self):
        return self.length


@pytest.mark.parametrize("kind", [PositionalOnly, CacheFirst, Variable, KeywordOnly])
def test_tokens_go_where_a_forward_takes_them(kind):
    torch._dynamo.reset()
    model = torch.compile(kind(), backend="eager")
    cache = Cache()
    out = kvpass.generate(model, [[3, 4]], cache, max_new_tokens=3, eos_token_id=None)
    assert out.tokens == [[5, 6, 7]] and cache.length == 4


def test_what_cannot_be_called():
    with pytest.raises(UnsupportedError, match="no place for tokens: name them input_ids"):
        kvpass.generate(NoPlace(), [[3]], Cache(), max_new_tokens=1, eos_token_id=None)
    for cache in ((), 5, object()):
        with pytest.raises(UnsupportedError, match="give a kvpass.TieredCache, a cache of transf"):
            kvpass.generate(PositionalOnly(), [[3]], cache, max_new_tokens=1, eos_token_id=None)
    import transformers

    sizes = {
        "d_model": 16,
        "num_layers": 1,
        "num_heads": 2,
        "vocab_size": 32,
        "d_kv": 8,
        "d_ff": 16,
    }
    t5 = transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes))
    with pytest.raises(UnsupportedError, match="is an encoder-decoder model: call its own"):
        kvpass.generate(t5, [[3]], Cache(), max_new_tokens=1)
    llama = tiny("llama")
    bare = SimpleNamespace(num_hidden_layers=2)
    with pytest.raises(UnsupportedError, match="made without the config of LlamaForCausalLM"):
        kvpass.generate(llama, [[3]], kvpass.TieredCache(bare, 20), max_new_tokens=1)
    with pytest.raises(ShapeError, match="token id 500 in a prompt: the model has 128"):
        kvpass.generate(llama, [[500]], tiered(llama), max_new_tokens=1)


@pytest.mark.parametrize("value", [2**70, -1, [1, -2], ["a"], 1.5, True, [True]])
def test_ends_are_token_ids(value):
    with pytest.raises(ConfigError, match="eos_token_id = .*give token ids"):
        kvpass.generate(PositionalOnly(), [[3]], Cache(), max_new_tokens=1, eos_token_id=value)


def test_ends_of_numpy():
    torch._dynamo.reset()
    model = torch.compile(PositionalOnly(), backend="eager")
    for end in (np.int64(6), np.array([6, 9]), torch.tensor(6)):
        out = kvpass.generate(model, [[3, 4]], Cache(), max_new_tokens=9, eos_token_id=end)
        assert (out.tokens, out.reasons) == ([[5, 6]], ["eos"])


def test_special_tokens_stop_too():
    tokenizer = SimpleNamespace(
        decode=lambda ids, skip_special_tokens: "".join(chr(i + 96) for i in ids if i != 7),
        all_special_tokens=["<|end|>"], all_special_ids=[7],
    )  # fmt: skip
    assert special_ids(tokenizer, ["<|end|>", "x"]) == {7}
    assert special_ids(LETTERS, ["<|end|>"]) == special_ids(None, []) == set()
    torch._dynamo.reset()
    model = torch.compile(PositionalOnly(), backend="eager")
    out = kvpass.generate(
        model, [[3, 4]], Cache(), max_new_tokens=9, eos_token_id=None, tokenizer=tokenizer,
        stop=["<|end|>"],
    )  # fmt: skip
    assert (out.tokens, out.reasons, out.text) == ([[5, 6, 7]], ["stop"], ["ef"])


def test_stops_are_searched_in_what_comes_at_the_end():
    text = TextOf(lambda ids: bytes(ids).decode(errors="replace"), ["�"])
    assert [text.add(byte) for byte in b"ab\xf0"] == ["a", "b", ""]
    assert (text.end(), text.text, text.stopped) == ("", "ab", True)


def test_a_mask_grows_as_tokens_come():
    """Nobody may live to need all of a large max_new_tokens."""

    class Masked(Counter):
        widths: list[int] = []

        def forward(self, input_ids, cache, attention_mask=None):
            self.widths.append(attention_mask.shape[1])
            return self.answer(input_ids, cache)

    torch._dynamo.reset()
    model = torch.compile(Masked(), backend="eager")
    out = kvpass.generate(
        model, [[3, 4], [5]], Cache(), max_new_tokens=2 * 10**9, eos_token_id=[8, 9]
    )
    assert out.tokens == [[5, 6, 7, 8], [6, 7, 8]]
    assert Masked.widths == [2, 3, 4, 5]
