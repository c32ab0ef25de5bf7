# SPDX-License-Identifier: Apache-2.0
"""TieredCache: what its methods accept, and what they refuse before anything changes."""

from __future__ import annotations

import copy
import io
import pickle
import warnings

import numpy as np
import pytest
import torch

from kvpass.errors import CapacityError, KVPassWarning, ShapeError, UnsupportedError
from model_zoo.architectures import ARCHITECTURES
from tests.models import compile_with, generate, prompt, tiered, tiny


@pytest.fixture(autouse=True)
def quiet():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "a TieredCache is used outside")
        yield


def filled(size=3, tokens=40):
    """A cache whose keys and values of sequence s, token t are ``100 s + t`` and the negative."""
    cache = tiered(tiny("llama"))
    keys, values = expected(range(size), tokens)
    for layer in range(2):
        cache.update(keys, values, layer)
    return cache


def expected(sequences, tokens):
    first = torch.tensor([100.0 * s for s in sequences]).view(-1, 1, 1, 1)
    keys = (first + torch.arange(tokens).view(1, 1, -1, 1)).expand(-1, 2, -1, 16)
    return keys, -keys


def stored(cache):
    """Everything of layer 1, read by appending nothing."""
    size = cache.batch.size
    return cache.update(torch.empty(size, 2, 0, 16), torch.empty(size, 2, 0, 16), 1)


def holds(cache, sequences, tokens):
    for got, wanted in zip(stored(cache), expected(sequences, tokens), strict=True):
        assert torch.equal(got, wanted)
    assert cache.get_seq_length() == cache.get_seq_length(1) == tokens


@pytest.mark.parametrize(
    ("given", "left"),
    [
        (-3, 37),
        (0, 40),
        (12, 12),
        (99, 40),
        (-99, 0),
        (torch.tensor(-3), 37),
        (torch.tensor(0), 40),
        (torch.tensor(12, dtype=torch.int32), 12),
        (np.int64(-3), 37),
    ],
)
def test_crop_takes_whole_numbers_of_any_kind(given, left):
    cache = filled()
    cache.crop(given)
    holds(cache, range(3), left)


@pytest.mark.parametrize(
    "given", [1.0, "3", None, True, torch.tensor(1.0), torch.tensor(True), torch.tensor([1, 2])]
)
def test_crop_refuses_what_is_no_whole_number(given):
    cache = filled()
    with pytest.raises(CapacityError, match="whole number"):
        cache.crop(given)
    holds(cache, range(3), 40)


@pytest.mark.parametrize(
    ("indices", "left"),
    [
        (torch.tensor([2, 0]), [2, 0]),
        (torch.tensor([1, 1, 1, 0]), [1, 1, 1, 0]),
        (torch.tensor([-1, 0, -3]), [2, 0, 0]),
        (torch.tensor([True, False, True]), [0, 2]),
        (torch.tensor([False, True, False]), [1]),
        (torch.tensor([1], dtype=torch.int32), [1]),
    ],
)
def test_sequences_are_chosen_as_indexing_does(indices, left):
    cache = filled()
    keys, _ = expected(range(3), 40)
    assert torch.equal(keys[indices], expected(left, 40)[0])
    cache.batch_select_indices(indices)
    holds(cache, left, 40)


@pytest.mark.parametrize("method", ["batch_select_indices", "reorder_cache"])
@pytest.mark.parametrize(
    "indices",
    [
        torch.tensor([0, 3]),
        torch.tensor([-4]),
        torch.tensor([0.0, 1.0]),
        torch.tensor([[0, 1]]),
        torch.tensor(1),
        torch.tensor([True, False]),
    ],
)
def test_sequences_that_are_not_there_are_refused(method, indices):
    cache = filled()
    with pytest.raises(ShapeError):
        getattr(cache, method)(indices)
    holds(cache, range(3), 40)


def test_reorder_takes_indices_only():
    cache = filled()
    cache.reorder_cache(torch.tensor([2, -3, 2]))
    holds(cache, [2, 0, 2], 40)
    with pytest.raises(ShapeError, match="mask"):
        cache.reorder_cache(torch.tensor([True, False, True]))


def tensors(shape=(3, 2, 2, 16), dtype=torch.float32, device="cpu"):
    return torch.ones(shape, dtype=dtype, device=device)


@pytest.mark.parametrize(
    ("k", "v", "match"),
    [
        (tensors(), tensors((3, 2, 3, 16)), r"\(3, 2, 2, 16\).*\(3, 2, 3, 16\)"),
        (tensors(), tensors((3, 1, 2, 16)), "heads"),
        (tensors(), tensors((1, 2, 2, 16)), "batch"),
        (tensors(), tensors(dtype=torch.float16), r"float32.*float16"),
        (tensors((3, 2, 16)), tensors((3, 2, 16)), r"\(3, 2, 16\)"),
        (tensors(), tensors((3, 2, 2, 16, 1)), r"\(3, 2, 2, 16, 1\)"),
    ],
)
@pytest.mark.parametrize("new", [True, False])
def test_keys_and_values_that_do_not_belong_together_are_refused(k, v, match, new):
    cache = tiered(tiny("llama")) if new else filled()
    with pytest.raises(ShapeError, match=match):
        cache.update(k, v, 0)
    assert cache.get_seq_length() == (0 if new else 40)
    if new:
        assert cache.batch is None
    else:
        holds(cache, range(3), 40)


@pytest.mark.parametrize("layer", [7, 2, -1])
def test_a_layer_that_is_not_there_is_refused(layer):
    cache = tiered(tiny("llama"))
    with pytest.raises(ShapeError, match=f"layer {layer} of a cache made for 2"):
        cache.update(tensors(), tensors(), layer)
    with pytest.raises(ShapeError, match=f"layer {layer} of a cache made for 2"):
        cache._state.update_dense(tensors(), tensors(), layer, 0)
    assert cache.batch is None


def test_the_meta_device_is_refused_before_anything_counts():
    cache = tiered(tiny("llama"))
    with pytest.raises(UnsupportedError, match="meta"):
        cache.update(tensors(device="meta"), tensors(device="meta"), 0)
    assert cache.get_seq_length() == 0
    cache.update(tensors(), tensors(), 0)
    assert cache.get_seq_length() == 2


def test_update_traces_without_a_graph_break():
    cache = filled()

    @torch.compile(backend="eager", fullgraph=True)
    def step(k, v):
        return cache.update(k, v, 0)[0].sum()

    keys, _ = expected(range(3), 40)
    assert torch.isclose(step(tensors(), tensors()), keys.sum() + tensors().sum())


def test_a_cache_is_not_pickled_but_copied():
    cache = filled()
    with pytest.raises(UnsupportedError, match="deepcopy"):
        pickle.dumps(cache)
    with pytest.raises(UnsupportedError, match="token ids"):
        torch.save({"cache": cache}, io.BytesIO())
    twin, alias = copy.deepcopy(cache), copy.copy(cache)
    cache.crop(-5)
    holds(twin, range(3), 40)
    holds(alias, range(3), 35)
    twin.update(*[x[:, :, :1] for x in expected(range(3), 1)], 1)
    holds(cache, range(3), 35)


def test_a_model_crops_with_a_tensor():
    model = tiny("llama")
    ids, _ = prompt(1, 20)
    cache = tiered(model)
    with torch.no_grad():
        expected_logits = model(ids).logits[:, -4:]
        model(ids, past_key_values=cache)
        cache.crop(torch.tensor(-4))
        got = model(ids[:, -4:], past_key_values=cache).logits
    assert (got - expected_logits).abs().max() < 1e-5


@pytest.mark.parametrize(
    ("size", "block_size", "hot", "enough"),
    [(1, 32, "15KiB", "16KiB"), (3, 32, 1, "48KiB"), (1, 4096, "1MiB", "2MiB")],
)
def test_a_hot_tier_below_one_block_of_all_layers_warns(size, block_size, hot, enough):
    """2 layers; a token is 2 heads x (16 + 16) channels x 4 bytes = 256 bytes of each."""
    model = tiny("llama")
    compile_with(model)
    ids, _ = prompt(size, 12)

    def warned(hot):
        cache = tiered(model, hot=hot, block_size=block_size)
        with torch.no_grad(), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model(ids, past_key_values=cache)
            model(ids[:, :1], past_key_values=cache)
        return [str(w.message) for w in caught if issubclass(w.category, KVPassWarning)]

    assert warned(enough) == []
    (message,) = warned(hot)
    assert "less than one block of every layer and sequence" in message
    assert f"hot='{enough}'" in message


def test_truncate_leaves_layers_that_hold_nothing():
    """Layers that share keys and values with others store none."""
    cache = tiered(tiny("llama"))
    keys, values = expected(range(2), 8)
    cache.update(keys, values, 0)
    cache.truncate(6)
    assert (cache.get_seq_length(0), cache.get_seq_length(1)) == (6, 0)
    cache.crop(-2)
    assert (cache.get_seq_length(0), cache.get_seq_length(1)) == (4, 0)
    got = cache.update(torch.empty(2, 2, 0, 16), torch.empty(2, 2, 0, 16), 0)
    for part, wanted in zip(got, expected(range(2), 4), strict=True):
        assert torch.equal(part, wanted)


def test_assisted_decoding_of_layers_that_share_keys():
    model = ARCHITECTURES["gemma3n"].build("sdpa")
    ids = torch.randint(3, 90, (1, 12), generator=torch.Generator().manual_seed(0))
    ids = torch.cat([ids, ids], 1)
    wanted = generate(model, ids, torch.ones_like(ids), 16, prompt_lookup_num_tokens=3)
    compile_with(model)
    cache = tiered(model)
    got = generate(
        model, ids, torch.ones_like(ids), 16, prompt_lookup_num_tokens=3, past_key_values=cache
    )
    assert torch.equal(got.sequences, wanted.sequences)
