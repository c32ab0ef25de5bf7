# SPDX-License-Identifier: Apache-2.0
"""kvpass.generate against transformers' own, and what it refuses."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.generation import logits_process as theirs

import kvpass
from kvpass.errors import CapacityError, ConfigError, ShapeError, UnsupportedError
from kvpass.generation.sampling import Sampler, Sampling, filtered
from kvpass.generation.text import TextOf
from model_zoo.configs import DecoderConfig
from model_zoo.decoder import Decoder
from tests.models import OPTIONS, compile_with, generate, prompt, tiered, tiny


@pytest.fixture(scope="module")
def models():
    """A plain model, and an equal one that is compiled."""
    torch._dynamo.reset()
    plain, model = tiny("llama"), tiny("llama")
    compile_with(model)
    yield plain, model
    torch._dynamo.reset()


def run(models, ids, mask=None, tokens=12, **kwargs: Any) -> kvpass.Generation:
    model = models[1]
    kwargs.setdefault("cache", tiered(model))
    kwargs["eos_token_id"] = kwargs.pop("eos", None)
    return kvpass.generate(model, ids, attention_mask=mask, max_new_tokens=tokens, **kwargs)


def expected(models, ids, mask, tokens=12, **kwargs: Any) -> list[list[int]]:
    return generate(models[0], ids, mask, tokens, **kwargs).sequences[:, ids.shape[1] :].tolist()


@pytest.mark.parametrize(("size", "padding"), [(1, 0), (2, 0), (2, 7)])
def test_greedy_tokens_are_those_of_transformers(models, size, padding):
    ids, mask = prompt(size, 20, padding)
    got = run(models, ids, mask)
    assert got.tokens == expected(models, ids, mask)
    assert got.reasons == ["length"] * size and got.text == []
    assert got.cache.get_seq_length() == 20 + 12 - 1


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.7},
        {"temperature": 1.3, "top_k": 5},
        {"temperature": 1.0, "top_p": 0.6},
        {"temperature": 2.0, "top_k": 40, "top_p": 0.9, "repetition_penalty": 1.4},
    ],
)
def test_samples_are_those_of_transformers_with_the_same_chance(models, options):
    ids, mask = prompt(2, 20)
    torch.manual_seed(3)
    got = run(models, ids, mask, **options)
    torch.manual_seed(3)
    defaults = {"top_k": 0, "top_p": 1.0}
    assert got.tokens == expected(models, ids, mask, do_sample=True, **defaults | options)


def test_a_penalty_of_repetition_without_chance(models):
    ids, mask = prompt(2, 20)
    got = run(models, ids, repetition_penalty=1.5)
    assert got.tokens == expected(models, ids, mask, repetition_penalty=1.5)


def test_a_generator_of_ones_own_is_used(models):
    ids, _ = prompt(1, 20)
    runs = [
        run(models, ids, temperature=1.5, generator=torch.Generator().manual_seed(seed)).tokens
        for seed in (1, 1, 2)
    ]
    assert runs[0] == runs[1] != runs[2]


def test_a_text_ends_with_a_token_that_ends_it(models):
    ids, mask = prompt(2, 20)
    free = expected(models, ids, mask, 16)
    end = free[0][5]
    want = [row[: row.index(end) + 1] if end in row else row for row in free]
    got = run(models, ids, tokens=16, eos=end)
    assert got.tokens == want
    assert got.reasons == ["eos" if end in row else "length" for row in free]
    assert got.cache.get_seq_length() == 20 + max(map(len, want)) - 1


def test_the_ends_of_the_model_are_the_default(models, monkeypatch):
    ids, mask = prompt(1, 20)
    end = expected(models, ids, mask)[0][3]
    monkeypatch.setattr(models[1].generation_config, "eos_token_id", [end])
    got = kvpass.generate(models[1], ids, tiered(models[1]), max_new_tokens=12)
    assert got.reasons == ["eos"] and got.tokens[0][-1] == end


def test_a_dialogue_goes_on_where_it_ended(models):
    ids, mask = prompt(1, 20)
    more, _ = prompt(1, 9, seed=5)
    first = run(models, ids)
    got = run(models, more, cache=first.cache)
    assert got.cache.get_seq_length() == 20 + 12 + more.shape[1] + 12 - 1
    whole = torch.cat([ids, torch.tensor(first.tokens), more], 1)
    assert got.tokens == expected(models, whole, torch.ones_like(whole))


def test_a_padded_batch_goes_on(models):
    ids, mask = prompt(2, 20, 6)
    more, _ = prompt(2, 5, seed=5)
    first = run(models, ids, mask)
    mask = torch.cat([mask, torch.ones(2, 12 + 5, dtype=torch.int64)], 1)
    got = run(models, more, mask, cache=first.cache)
    whole = torch.cat([ids, torch.tensor(first.tokens), more], 1)
    shown = torch.cat([mask[:, :20], torch.ones(2, 12 + 5, dtype=torch.int64)], 1)
    assert got.tokens == expected(models, whole, shown)


def test_prompts_of_different_lengths_as_lists(models):
    rows = [prompt(1, n, seed=n)[0][0].tolist() for n in (9, 20, 14)]
    got = run(models, rows)
    for row, tokens in zip(rows, got.tokens, strict=True):
        ids = torch.tensor([row])
        assert tokens == expected(models, ids, torch.ones_like(ids))[0]


@pytest.mark.parametrize(("chunk", "padding"), [(7, 0), (8, 11), (64, 0), (1, 0)])
def test_a_prompt_in_pieces_gives_the_same_tokens(models, chunk, padding):
    ids, mask = prompt(2, 23, padding)
    got = run(models, ids, mask, chunk=chunk)
    assert got.tokens == expected(models, ids, mask)
    assert got.cache.get_seq_length() == 23 + 12 - 1


def test_an_unmodified_cache_and_no_cache(models):
    from transformers import DynamicCache

    ids, mask = prompt(1, 20)
    want = expected(models, ids, mask)
    got = run(models, ids, cache=DynamicCache(config=models[1].config))
    assert got.tokens == want and got.cache.get_seq_length() == 31
    got = run(models, ids, cache=None)
    assert got.tokens == want and isinstance(got.cache, kvpass.TieredCache)


def test_a_decoder_of_ones_own_that_nobody_compiled(monkeypatch):
    monkeypatch.setenv("KVPASS_INNER", "eager")
    torch.manual_seed(0)
    config = DecoderConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=128,
        rms_norm_eps=1e-5, rope_theta=1e4,
    )  # fmt: skip
    decoder = Decoder(config).eval()
    ids, tokens = torch.randint(0, 64, (1, 15)), []
    whole = ids
    with torch.no_grad():
        for _ in range(10):
            tokens.append(int(decoder(whole)[0, -1].argmax()))
            whole = torch.cat([whole, torch.tensor([tokens[-1:]])], 1)
    for _ in range(2):
        cache = kvpass.TieredCache(config, 64, **OPTIONS)
        assert kvpass.generate(decoder, ids, cache, max_new_tokens=10).tokens == [tokens]
    rows = [ids[0].tolist(), ids[0, :6].tolist()]
    alone = [
        kvpass.generate(decoder, row, kvpass.TieredCache(config, 64, **OPTIONS), max_new_tokens=8)
        for row in rows
    ]
    cache = kvpass.TieredCache(config, 64, **OPTIONS)
    got = kvpass.generate(decoder, rows, cache, max_new_tokens=8)
    assert got.tokens == [each.tokens[0] for each in alone]


def test_padding_needs_a_model_that_takes_a_mask():
    def model(ids, cache):
        raise AssertionError("it is refused before")

    with pytest.raises(UnsupportedError, match="attention_mask"):
        kvpass.generate(model, [[1, 2], [3]], SimpleNamespace(get_seq_length=lambda: 0))


# ------------------------------------------------------------------------- text

WORDS = SimpleNamespace(
    encode=lambda text: [int(word) for word in text.split()],
    decode=lambda ids: "".join(f" {i}" for i in ids),
)


def test_text_is_given_as_it_comes_and_ends_before_a_stop(models):
    ids, mask = prompt(2, 20)
    free = expected(models, ids, mask, 16)
    whole = WORDS.decode(free[0])
    pairs = [WORDS.decode(free[0][i : i + 2]) for i in range(15)]
    stop = max(pairs, key=whole.find)  # tokens of a random model repeat
    at = pairs.index(stop)
    pieces: dict[int, list[str]] = {0: [], 1: []}
    known: dict[int, list[int]] = {0: [], 1: []}
    got = run(
        models, [" ".join(map(str, row)) for row in ids.tolist()], tokens=16, tokenizer=WORDS,
        stop=[stop, "never"], on_text=lambda i, text: pieces[i].append(text),
        on_tokens=lambda i, tokens: known[i].extend(tokens),
    )  # fmt: skip
    assert at > 2 and got.text[0] == WORDS.decode(free[0][:at])
    assert got.reasons[0] == "stop" and got.tokens[0] == free[0][: at + 2]
    assert ["".join(pieces[i]) for i in range(2)] == got.text
    assert [known[i] for i in range(2)] == got.tokens
    assert len(pieces[1]) > 3, "it comes bit by bit"


@given(
    st.text(alphabet="ab€𝄞 ", max_size=24),
    st.lists(st.text(alphabet="ab€ ", min_size=1, max_size=4), max_size=3),
)
def test_text_of_bytes_is_whole_whatever_the_pieces(text, stops):
    """Tokens are bytes here: half a character is never given away, nor the start of a stop."""
    decode = lambda ids: bytes(ids).decode("utf-8", errors="replace")  # noqa: E731
    reader = TextOf(decode, stops)
    given = ""
    for byte in text.encode():
        given += reader.add(byte)
        assert "�" not in given and not any(stop in given for stop in stops)
        if reader.stopped:
            break
    else:
        given += reader.end()
    found = [text.find(stop) for stop in stops if stop in text]
    assert given == reader.text
    if reader.stopped:
        # The first to be complete ends it; one that began earlier may be longer.
        rest = text.removeprefix(given)
        assert found and text.startswith(given) and any(map(rest.startswith, stops))
    else:
        assert not found and given == text


# --------------------------------------------------------------------- sampling


@given(st.integers(0, 99), st.integers(1, 40), st.floats(0.05, 1))
def test_filters_are_those_of_transformers(seed, top_k, top_p):
    scores = torch.randn(2, 32, generator=torch.Generator().manual_seed(seed)) * 3
    want = theirs.TopPLogitsWarper(top_p)(None, theirs.TopKLogitsWarper(top_k)(None, scores))
    assert torch.equal(filtered(scores, top_k, top_p), want)


def test_padding_is_not_penalised():
    ids = torch.tensor([[7, 7, 1, 2]])
    shown = torch.tensor([[False, False, True, True]])
    logits = torch.tensor([[0.0, 2.0, 1.5, 0, 0, 0, 0, 1.9]])
    assert Sampler(Sampling(repetition_penalty=2.0), ids, shown)(logits).item() == 7
    assert Sampler(Sampling(repetition_penalty=2.0), ids)(logits).item() == 1


# ---------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"max_new_tokens": 0}, ConfigError, "max_new_tokens = 0"),
        ({"max_new_tokens": True}, ConfigError, "max_new_tokens"),
        ({"max_new_tokens": None}, ConfigError, "max_new_tokens = None"),
        ({"chunk": 0}, ConfigError, "chunk = 0"),
        ({"chunk": 2.0}, ConfigError, "chunk = 2.0"),
        ({"temperature": -0.1}, ConfigError, "temperature = -0.1"),
        ({"temperature": float("nan")}, ConfigError, "temperature"),
        ({"temperature": "0.7"}, ConfigError, "temperature = '0.7'"),
        ({"top_k": 0}, ConfigError, "top_k = 0"),
        ({"top_k": 2.5}, ConfigError, "top_k = 2.5"),
        ({"top_p": 0}, ConfigError, "top_p = 0"),
        ({"top_p": 1.1}, ConfigError, "top_p = 1.1"),
        ({"repetition_penalty": 0}, ConfigError, "repetition_penalty = 0"),
        ({"stop": ""}, ConfigError, "stop"),
        ({"stop": "x"}, ConfigError, "tokenizer"),
        ({"on_text": print}, ConfigError, "tokenizer"),
        ({"tokenizer": object(), "stop": "x"}, ConfigError, r"decode\(ids\)"),
        ({"eos_token_id": "x"}, ConfigError, "eos_token_id"),
        ({"eos_token_id": [-1]}, ConfigError, "eos_token_id"),
        ({"prompt": "text"}, ConfigError, "tokenizer"),
        ({"prompt": []}, ShapeError, "no tokens"),
        ({"prompt": [[1], []]}, ShapeError, "no tokens"),
        ({"prompt": torch.zeros(1, 0)}, ShapeError, "prompt"),
        ({"prompt": torch.zeros(1, 3)}, ShapeError, "float"),
        ({"attention_mask": torch.ones(1, 4)}, ShapeError, r"attention_mask \(1, 4\)"),
        ({"attention_mask": torch.tensor([[1, 1, 0]])}, ShapeError, "left"),
        ({"max_new_tokens": 63}, CapacityError, "max_tokens=64"),
    ],
)
def test_mistakes_are_named_before_anything_runs(models, options, error, words):
    model = models[1]
    cache = tiered(model, 64)
    options = {"prompt": torch.tensor([[1, 2, 3]]), "cache": cache} | options
    with pytest.raises(error, match=words):
        kvpass.generate(model, **options)
    assert cache.get_seq_length() == 0


def test_models_that_cannot_be_called_are_refused():
    class Other(torch.nn.Module):
        def forward(self, x):
            return x

    with pytest.raises(UnsupportedError, match=r"Other takes neither past_key_values= nor cache="):
        kvpass.generate(Other(), [1], SimpleNamespace(get_seq_length=lambda: 0))
    with pytest.raises(ConfigError, match="Other has no config"):
        kvpass.generate(Other(), [1])

    def wrong(ids, cache):
        return ids

    with pytest.raises(ShapeError, match="not logits"):
        kvpass.generate(wrong, [1], SimpleNamespace(get_seq_length=lambda: 0))
