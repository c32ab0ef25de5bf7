# SPDX-License-Identifier: Apache-2.0
"""The decoder computes what transformers' Llama computes, with and without a cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import DynamicCache, LlamaForCausalLM

from kvpass.errors import ShapeError
from model_zoo import Decoder, DecoderConfig, DenseCache, greedy

Pair = tuple[Decoder, LlamaForCausalLM]
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "gqa": {},
    "mha": {"num_key_value_heads": 4},
    "mqa": {"num_key_value_heads": 1},
    "head_dim": {"head_dim": 24},
    "tied": {"tie_word_embeddings": True},
    "bias": {"attention_bias": True, "mlp_bias": True},
    "llama3_rope": {"rope_parameters": LLAMA3},
    "theta_eps": {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}
    | {"rms_norm_eps": 1e-2},
}


def ids_of(*shape: int, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 320, shape, generator=generator)


@pytest.mark.parametrize("variant", VARIANTS)
@torch.no_grad()
def test_logits_equal_transformers(make_pair: Callable[..., Pair], variant: str) -> None:
    decoder, reference = make_pair(**VARIANTS[variant])
    ids = ids_of(2, 150)
    expected = reference(ids).logits
    torch.testing.assert_close(decoder(ids), expected, atol=1e-4, rtol=1e-4)
    cache = DenseCache()
    pieces = [decoder(ids[:, a:b], cache) for a, b in ((0, 64), (64, 65), (65, 150))]
    torch.testing.assert_close(torch.cat(pieces, 1), expected, atol=1e-4, rtol=1e-4)
    assert cache.get_seq_length() == 150


@torch.no_grad()
def test_llama3_rope_scaling_matters(make_pair: Callable[..., Pair]) -> None:
    scaled, _ = make_pair(rope_parameters=LLAMA3)
    plain, _ = make_pair()
    ids = ids_of(1, 150)
    assert (scaled(ids) - plain(ids)).abs().max() > 1e-2


@torch.no_grad()
def test_last_only(make_pair: Callable[..., Pair]) -> None:
    decoder, _ = make_pair()
    ids = ids_of(2, 9)
    last = decoder(ids, last_only=True)
    assert last.shape == (2, 1, 320)
    torch.testing.assert_close(last, decoder(ids)[:, -1:])


@pytest.mark.parametrize("cached", [False, True])
@torch.no_grad()
def test_left_padding_equals_each_row_alone(make_pair: Callable[..., Pair], cached: bool) -> None:
    decoder, reference = make_pair()
    rows = [ids_of(1, 12), ids_of(1, 5, seed=2)]
    ids = torch.zeros(2, 12, dtype=torch.long)
    mask = torch.zeros(2, 12, dtype=torch.long)
    for i, row in enumerate(rows):
        ids[i, -row.shape[1] :] = row
        mask[i, -row.shape[1] :] = 1
    logits = decoder(ids, DenseCache() if cached else None, mask)
    assert logits.isfinite().all()
    for i, row in enumerate(rows):
        n = row.shape[1]
        torch.testing.assert_close(logits[i, -n:], reference(row).logits[0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("chunk", [None, 1, 4, 7])
def test_greedy_equals_generate(make_pair: Callable[..., Pair], chunk: int | None) -> None:
    decoder, reference = make_pair()
    ids = ids_of(2, 11)
    mask = torch.ones_like(ids)
    ids[1, :4], mask[1, :4] = 0, 0
    seen: list[torch.Tensor] = []
    out = greedy(decoder, ids, DenseCache(), 12, mask, seen.append, prefill_chunk=chunk)
    expected = reference.generate(
        ids, attention_mask=mask, max_new_tokens=12, do_sample=False, eos_token_id=None
    )
    assert torch.equal(out, expected[:, 11:])
    assert torch.equal(torch.stack(seen, 1), out)


def test_greedy_stops_at_eos_and_fills_up(make_pair: Callable[..., Pair]) -> None:
    decoder, _ = make_pair()
    ids = ids_of(2, 6)
    free = greedy(decoder, ids, DenseCache(), 10)
    ends = (int(free[0, 2]), int(free[1, 4]))
    assert ends[0] not in free[0, :2] and ends[0] not in free[1] and ends[1] not in free[1, :4]
    out = greedy(decoder, ids, DenseCache(), 10, eos_token_id=ends)
    assert out.tolist() == [
        free[0, :3].tolist() + [ends[0]] * 2,
        free[1, :5].tolist(),
    ]
    cache = DenseCache()
    assert greedy(decoder, ids[:1], cache, 10, eos_token_id=ends[0]).shape == (1, 3)
    assert cache.get_seq_length() == 6 + 2


def test_greedy_goes_on_from_a_filled_cache(make_pair: Callable[..., Pair]) -> None:
    decoder, _ = make_pair()
    ids = ids_of(1, 20)
    cache = DenseCache()
    with torch.no_grad():
        decoder(ids[:, :13], cache)
    out = greedy(decoder, ids[:, 13:], cache, 5, torch.ones(1, 20), prefill_chunk=3)
    assert torch.equal(out, greedy(decoder, ids, DenseCache(), 5))


@torch.no_grad()
def test_a_cache_of_transformers_works(make_pair: Callable[..., Pair]) -> None:
    decoder, _ = make_pair()
    ids = ids_of(1, 20)
    assert torch.equal(
        greedy(decoder, ids, DynamicCache(), 6), greedy(decoder, ids, DenseCache(), 6)
    )


def test_wrong_mask_length_is_named(make_pair: Callable[..., Pair]) -> None:
    decoder, _ = make_pair()
    with pytest.raises(ShapeError, match="covers 5 tokens.*pass a mask of 6"):
        decoder(ids_of(1, 6), attention_mask=torch.ones(1, 5))
    with pytest.raises(ShapeError, match="max_new_tokens is 0"):
        greedy(decoder, ids_of(1, 6), DenseCache(), 0)
    with pytest.raises(ShapeError, match="prompt is empty"):
        greedy(decoder, ids_of(1, 0), DenseCache(), 1)


@pytest.mark.parametrize(("backend", "padded"), [("eager", True), ("aot_eager", False)])
def test_one_graph_for_all_lengths(
    make_pair: Callable[..., Pair], backend: str, padded: bool
) -> None:
    torch._dynamo.reset()
    decoder, _ = make_pair()
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(decoder, backend=counter, fullgraph=True)
    # A cache with a past, so that all steps are of one kind: n > 1, then n == 1.
    prompt = ids_of(2, 70)
    expected, out = DenseCache(), DenseCache()
    with torch.no_grad():
        start = 9
        decoder(prompt[:, :start], expected)
        decoder(prompt[:, :start], out)
        for n in (5, 6, 9, 12):
            chunk = prompt[:, start : start + n]
            start += n
            mask = torch.ones(2, start) if padded else None
            if mask is not None:
                mask[1, :3] = 0
            torch.testing.assert_close(compiled(chunk, out, mask), decoder(chunk, expected, mask))
        chunks = counter.frame_count
        for _ in range(6):
            token = prompt[:, start : start + 1]
            start += 1
            mask = torch.ones(2, start) if padded else None
            torch.testing.assert_close(compiled(token, out, mask), decoder(token, expected, mask))
    assert chunks <= 2  # the first length, then all others
    assert counter.frame_count - chunks <= 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_keeps_rotary_angles(
    make_pair: Callable[..., Pair], dtype: torch.dtype
) -> None:
    decoder, _ = make_pair()
    angles = decoder.rotary.inv_freq.clone()
    decoder.to(dtype)
    assert decoder.rotary.inv_freq.dtype == torch.float32
    assert torch.equal(decoder.rotary.inv_freq, angles)
    with torch.no_grad():
        assert decoder(ids_of(1, 8)).dtype == dtype


def test_config_has_what_a_cache_needs() -> None:
    config = DecoderConfig(320, 64, 96, 2, 4, 2, 24)
    assert (config.num_hidden_layers, config.num_attention_heads) == (2, 4)
    assert (config.num_key_value_heads, config.head_dim) == (2, 24)
    assert (config.hidden_size, config.vocab_size) == (64, 320)
    assert config.max_position_embeddings == 2048
