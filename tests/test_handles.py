# SPDX-License-Identifier: Apache-2.0
"""KV handles: reading gives the numbers, writing is refused, and parts of them continue."""

from __future__ import annotations

import copy
import io
import warnings

import numpy as np
import pytest
import torch

from kvpass import backends
from kvpass.errors import UnsupportedError
from kvpass.graph.report import observed
from kvpass.runtime import handle
from kvpass.runtime.handle import KVHandle
from tests.models import compile_with, generate, prompt, tiered, tiny

TOKENS = 37


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    backends._warned.clear()
    handle._warned = False
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "aten.* reads a KV cache")
        yield
    torch._dynamo.reset()


def caches(size=2):
    """A cache of handles and the dense cache of the same model and tokens."""
    model = tiny("llama")
    ids, _ = prompt(size, TOKENS)
    with torch.no_grad():
        dense = model(ids, use_cache=True).past_key_values
        compile_with(model)
        return model, ids, model(ids, use_cache=True).past_key_values, dense


@pytest.fixture(scope="module")
def pair():
    """A handle of keys, and the dense keys."""
    _, _, held, dense = caches()
    held.keep = held.layers[1].keys
    return held.layers[1].keys, dense.layers[1].keys


def assign(index):
    def write(keys):
        keys[index] = 0

    return write


WRITES = {
    "slice": assign((slice(None), slice(None), slice(0, 4))),
    "later slice": assign((slice(None), slice(None), slice(2, 4))),
    "ellipsis": assign((..., slice(0, 2))),
    "sequence": assign(0),
    "mask": assign(torch.tensor([True, False])),
    "select": lambda keys: keys[:, :, 3].zero_(),
    "transpose": lambda keys: keys.transpose(1, 2).mul_(2),
    "view": lambda keys: keys.view(-1).__setitem__(0, 9),
    "reshape": lambda keys: keys.reshape(2, -1).zero_(),
    "unbind": lambda keys: keys.unbind(0)[0].zero_(),
    "split": lambda keys: keys.split(5, 2)[1].add_(1),
    "chunk": lambda keys: keys.chunk(2, 2)[1].add_(1),
    "view of a view": lambda keys: keys[0][1][2:5].mT.fill_(3),
    "view of a first part": lambda keys: keys[:, :, :9][:, 1].fill_(3),
    "detached": lambda keys: keys.detach()[0].zero_(),
    "data": lambda keys: keys.data.zero_(),
    "out": lambda keys: torch.add(torch.zeros(keys.shape), 1, out=keys),
    "out of a view": lambda keys: torch.add(torch.zeros(5), 1, out=keys[0, 0, 0, :5]),
    "foreach": lambda keys: torch._foreach_mul_([keys], 2.0),
    "foreach of views": lambda keys: torch._foreach_mul_([torch.ones(2), keys[0]], 2.0),
    "in place": lambda keys: keys.add_(1),
    "dtype": lambda keys: keys.view(torch.int32).zero_(),
    "same dtype": lambda keys: keys.to(torch.float32).zero_(),
    "copy": lambda keys: keys[:, :, 5:].copy_(torch.zeros(())),
}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
@pytest.mark.parametrize("name", WRITES)
def test_a_write_is_refused_and_changes_nothing(pair, name, mode):
    keys, expected = pair
    with mode():
        before = keys.clone()
        with pytest.raises(UnsupportedError, match=r"in place .* \.clone\(\)"):
            WRITES[name](keys)
        assert torch.equal(keys.clone(), before)
    assert torch.allclose(before, expected, atol=1e-6)


READS = {
    "slice": lambda x: x[:, :, 3:7],
    "negative": lambda x: x[..., -5:-2, :],
    "steps": lambda x: x[:, :, ::3],
    "first": lambda x: x[:, :, :11],
    "all but three": lambda x: x[..., :-3, :],
    "first of first": lambda x: x[:, :, :11][:, :, :4],
    "too far": lambda x: x[:, :, :99],
    "none": lambda x: x[:, :, :-99],
    "heads": lambda x: x[:, 1:],
    "sequence": lambda x: x[1],
    "transpose": lambda x: x.transpose(1, 2),
    "transposed first": lambda x: x.transpose(1, 2)[:, :5],
    "flat transpose": lambda x: x.transpose(1, 2).reshape(-1),
    "contiguous": lambda x: x.mT.contiguous(),
    "view": lambda x: x.view(4, -1),
    "expand": lambda x: x[:, :, None].expand(-1, -1, 3, -1, -1),
    "repeat": lambda x: x[:, :, None].expand(-1, -1, 3, -1, -1).reshape(2, 6, TOKENS, 16),
    "last of split": lambda x: x.split(10, 2)[-1],
    "strided": lambda x: x.mT.as_strided((3, 2), (16, 1), 0),
    "bytes": lambda x: x.view(torch.int32).view(torch.float32),
    "half": lambda x: x.to(torch.float16).to(torch.float32),
    "sum": lambda x: x[0].sum((0, 2)),
    "index": lambda x: x[torch.tensor([1, 0]), ...],
    "repeat_interleave": lambda x: x.repeat_interleave(2, 0),
    "cat": lambda x: torch.cat([x[:, :, :3], x[:, :, 3:]], 2),
    "product": lambda x: x @ x.mT,
}


@pytest.mark.parametrize("name", READS)
def test_a_read_gives_the_numbers_of_a_dense_tensor(pair, name):
    keys, dense = pair
    got, expected = READS[name](keys), READS[name](dense)
    assert got.shape == expected.shape and got.dtype == expected.dtype
    assert got._base is None or type(got._base) is torch.Tensor
    assert type(got + 0) is torch.Tensor
    assert torch.allclose(got + 0, expected, atol=1e-5)
    assert torch.allclose(copy.deepcopy(got), expected, atol=1e-5)
    writable = got.clone()
    assert type(writable) is torch.Tensor
    writable.zero_()
    assert torch.allclose(READS[name](keys).clone(), expected, atol=1e-5)


def test_the_first_tokens_are_a_shorter_handle(pair):
    keys, _ = pair
    short = keys[..., :-3, :]
    assert type(short) is KVHandle and short._base is None
    assert short.content.lease is keys.content.lease
    assert short.content.length == short.shape[2] == TOKENS - 3
    assert keys[:, :, :99].content.length == TOKENS
    assert keys.to(torch.float32).content is keys.content
    assert keys[:, :, 1:].content is None


def test_numbers_for_other_libraries(pair):
    keys, dense = pair
    for got, expected in ((keys, dense), (keys[0, :, :5], dense[0, :, :5]), (keys.mT, dense.mT)):
        assert np.allclose(got.numpy(), expected.numpy(), atol=1e-6)
        assert np.allclose(np.asarray(got), expected.numpy(), atol=1e-6)
        assert np.allclose(np.array(got.tolist()), expected.numpy(), atol=1e-6)
        assert np.allclose(np.from_dlpack(got), expected.numpy(), atol=1e-6)
        assert torch.allclose(torch.from_dlpack(got), expected, atol=1e-6)
    array = keys.numpy()
    array[...] = 0
    assert torch.allclose(keys.clone(), dense, atol=1e-6)
    assert abs(keys[0, 0, 0, 0].item() - dense[0, 0, 0, 0].item()) < 1e-6
    file = io.BytesIO()
    torch.save(keys, file)
    file.seek(0)
    assert torch.allclose(torch.load(file), dense, atol=1e-6)


@pytest.mark.parametrize("what", ["share_memory_", "data_ptr"])
def test_what_needs_memory_is_refused(pair, what):
    keys, _ = pair
    for tensor in (keys, keys[0], keys[:, :, :5]):
        with pytest.raises(UnsupportedError, match=what):
            getattr(tensor, what)()
    assert getattr(keys.clone(), what)() is not None


def test_crop_and_continue_again_and_again():
    """What assisted decoding does with the default cache."""
    model, ids, held, dense = caches()
    reports = []
    with torch.no_grad(), observed(reports.append):
        for step in range(12):
            cut = 1 + step % 4
            held.crop(-cut)
            dense.crop(-cut)
            assert type(held.layers[0].keys) is KVHandle
            new = ids[:, step : step + 1 + step % 3]
            out = model(new, past_key_values=held)
            compiled, model._compiled_call_impl = model._compiled_call_impl, None
            expected = model(new, past_key_values=dense)
            model._compiled_call_impl = compiled
            held, dense = out.past_key_values, expected.past_key_values
            assert held.get_seq_length() == dense.get_seq_length()
            assert (out.logits - expected.logits).abs().max() < 1e-5
    assert all(report.rewritten == 2 for report in reports)
    assert len(reports) <= 4


@pytest.mark.parametrize(
    "cut",
    [
        lambda x: x[:1],
        lambda x: x[:, :, 5:],
        lambda x: x[:, :, :0],
        lambda x: x.transpose(1, 2)[:, 2:-1].transpose(1, 2),
        lambda x: x.mT[..., :9].mT,
    ],
)
def test_any_view_is_an_input_of_a_graph(cut):
    model, ids, held, dense = caches()
    with torch.no_grad():
        for _ in range(3):
            for cache in (held, dense):
                for layer in cache.layers:
                    layer.keys, layer.values = cut(layer.keys), cut(layer.values)
            new = ids[: held.layers[0].keys.shape[0], :4]
            out = model(new, past_key_values=held)
            compiled, model._compiled_call_impl = model._compiled_call_impl, None
            expected = model(new, past_key_values=dense)
            model._compiled_call_impl = compiled
            held, dense = out.past_key_values, expected.past_key_values
            assert (out.logits - expected.logits).abs().max() < 1e-5


def test_a_cropped_cache_leaves_the_longer_one_as_it_was():
    model, ids, held, _ = caches(1)
    kept = copy.copy(held)
    kept.layers = [copy.copy(layer) for layer in held.layers]
    before = kept.layers[1].values.clone()
    held.crop(-7)
    with torch.no_grad():
        for step in range(30):
            model(ids[:, step : step + 1], past_key_values=held)
    assert held.get_seq_length() == TOKENS - 7 + 30
    assert torch.equal(kept.layers[1].values.clone(), before)


def speculating(how):
    if how == "prompt_lookup":
        return {"prompt_lookup_num_tokens": 3}
    torch.manual_seed(7)
    return {"assistant_model": tiny("llama", num_hidden_layers=1)}


@pytest.mark.parametrize("how", ["prompt_lookup", "assistant"])
@pytest.mark.parametrize("form", ["tiered", "dynamic"])
def test_speculative_generation_equals_the_uncompiled(form, how):
    model = tiny("llama")
    ids, _ = prompt(1, 12)
    ids = ids.repeat(1, 3)  # n-grams of the prompt recur, so that lookup has what to propose
    mask = torch.ones_like(ids)
    expected = generate(model, ids, mask, 40, **speculating(how))
    assert torch.equal(expected.sequences, generate(model, ids, mask, 40).sequences)
    compile_with(model)
    cache = {"past_key_values": tiered(model)} if form == "tiered" else {}
    reports = []
    with observed(reports.append):
        got = generate(model, ids, mask, 40, **cache, **speculating(how))
    assert torch.equal(got.sequences, expected.sequences)
    assert reports and all(report.rewritten == 2 for report in reports)


def test_a_compiled_assistant_of_a_compiled_model():
    model, helper = tiny("llama"), tiny("llama", num_hidden_layers=1)
    ids, mask = prompt(1, 30)
    expected = generate(model, ids, mask, 30).sequences
    compile_with(model)
    compile_with(helper)
    got = generate(model, ids, mask, 30, assistant_model=helper)
    assert torch.equal(got.sequences, expected)


def test_a_prefix_read_without_gradients_serves_a_step_with_them():
    model, ids, held, dense = caches()
    loss = model(ids[:, :5], past_key_values=held).logits.square().mean()
    loss.backward()
    got = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    model._compiled_call_impl = None
    model(ids[:, :5], past_key_values=dense).logits.square().mean().backward()
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            assert (parameter.grad - got[name]).abs().max() < 1e-4


def _read_behind_a_break(past):
    with torch.no_grad():
        try:
            torch._dynamo.graph_break()
            return past[0][0].sum(-1) + past[1][1][:, :, -1:].mean(-1)
        finally:
            pass


def _read_under_vmap(past):
    return torch.func.vmap(lambda keys: keys[:, 2:] * 2)(past[0][0])


@pytest.mark.parametrize("read", [_read_behind_a_break, _read_under_vmap])
def test_read_where_dynamo_has_given_up(read):
    """Dynamo would go on to compile the handle's own code, called below the broken frame."""
    _, _, held, dense = caches()
    past, plain = (
        [(layer.keys, layer.values) for layer in cache.layers] for cache in (held, dense)
    )
    compiled = torch.compile(read, backend=backends.backend, options={"inner": "eager"})
    with torch.no_grad():
        assert torch.allclose(compiled(past), read(plain), atol=1e-5)
