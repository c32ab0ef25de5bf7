# SPDX-License-Identifier: Apache-2.0
"""Every way to compile and call a model of transformers gives the text of the uncompiled one."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import kvpass
from kvpass.errors import UnsupportedError
from kvpass.graph.report import GraphReport, observed
from model_zoo.architectures import ARCHITECTURES

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning")

OPTIONS = {"inner": "eager", "hot": "64KiB"}
IDS = torch.randint(3, 90, (2, 9), generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> None:
    torch._dynamo.reset()


def build(attention: Any = "sdpa") -> Any:
    return ARCHITECTURES["llama"].build(attention)


def compiled(**options: Any) -> Any:
    model = build()
    model.compile(backend=kvpass.backend, options=OPTIONS, **options)
    return model


def tiered(model: Any) -> Any:
    return kvpass.TieredCache(model.config, 128, hot="64KiB")


def dynamic(model: Any) -> Any:
    return transformers.DynamicCache(config=model.config)


def static(model: Any) -> Any:
    return transformers.StaticCache(config=model.config, max_cache_len=64)


CACHES = pytest.mark.parametrize("make", [dynamic, tiered, static])


def generate(model: Any, ids: Tensor = IDS, cache: Any = None, **options: Any) -> Tensor:
    with torch.no_grad():
        return model.generate(
            input_ids=ids, past_key_values=cache, max_new_tokens=12, do_sample=False, **options
        )


def same_text(model: Any, ids: Tensor = IDS, **options: Any) -> None:
    """With a DynamicCache of generate's own, and with a TieredCache."""
    expected = generate(build(), ids, **options)
    assert torch.equal(generate(model, ids, **options), expected)
    assert torch.equal(generate(model, ids, tiered(model), **options), expected)


@pytest.mark.parametrize("options", [{"fullgraph": True}, {"dynamic": True}, {"dynamic": False}])
def test_options_of_compile(options: dict[str, Any]) -> None:
    same_text(compiled(**options))


def test_a_compiled_forward() -> None:
    model = build()
    model.forward = torch.compile(model.forward, backend="kvpass", options=OPTIONS)
    same_text(model)


def test_a_compile_config_compiles_the_decode_step_of_a_static_cache() -> None:
    config = transformers.CompileConfig(backend=kvpass.backend, options=OPTIONS, mode=None)
    config._compile_all_devices = True  # transformers compiles on a GPU only
    seen: list[GraphReport] = []
    with observed(seen.append):
        out = generate(build(), cache_implementation="static", compile_config=config)
    assert torch.equal(out, generate(build()))
    assert seen and all(report.rewritten == len(report.sites) == 2 for report in seen)


@pytest.mark.parametrize(
    "options",
    [
        {"prefill_chunk_size": 4},
        {"num_beams": 3},
        {"repetition_penalty": 1.3},
        {"no_repeat_ngram_size": 2},
    ],
    ids=str,
)
def test_options_of_generate(options: dict[str, Any]) -> None:
    model = compiled()
    same_text(model, **options)
    out = generate(model, cache_implementation="static", **options)
    assert torch.equal(out, generate(build(), **options))


def test_without_a_cache() -> None:
    assert torch.equal(generate(compiled(), use_cache=False), generate(build(), use_cache=False))


@pytest.mark.parametrize("helper", ["assistant", "lookup"])
def test_assisted_decoding(helper: str) -> None:
    options: dict[str, Any] = {"prompt_lookup_num_tokens": 3}
    if helper == "assistant":
        options = {"assistant_model": build()}
    expected = generate(build(), IDS[:1])
    model = compiled()
    assert torch.equal(generate(model, IDS[:1], **options), expected)
    assert torch.equal(generate(model, IDS[:1], tiered(model), **options), expected)


@pytest.mark.parametrize("make", [dynamic, tiered])
def test_several_turns_of_a_dialogue(make: Callable[[Any], Any]) -> None:
    model, plain = compiled(), build()
    ours, theirs, ids = make(model), dynamic(plain), IDS
    for _ in range(3):
        out = generate(model, ids, ours)
        assert torch.equal(out, generate(plain, ids, theirs))
        ids = torch.cat([out, IDS[:, :4]], 1)


def test_batches_that_grow_and_shrink() -> None:
    model = compiled()
    for batch in (1, 3, 2, 5, 1):
        same_text(model, torch.randint(3, 90, (batch, 7)))


def follow(
    model: Any, cache: Any, plain: Any, tolerance: float, context: Callable[[], Any]
) -> None:
    """A prompt and four steps by direct calls, against the uncompiled model."""
    theirs, ids = dynamic(plain), IDS
    with context():
        for _ in range(5):
            ours = model(input_ids=ids, past_key_values=cache).logits
            expected = plain(input_ids=ids, past_key_values=theirs).logits
            assert (ours - expected).abs().max() <= tolerance * expected.abs().max()
            ids = expected[:, -1:].argmax(-1)


@CACHES
def test_inference_mode(make: Callable[[Any], Any]) -> None:
    model = compiled()
    follow(model, make(model), build(), 1e-5, torch.inference_mode)


@CACHES
def test_a_prompt_in_inference_mode_and_steps_without(make: Callable[[Any], Any]) -> None:
    model, plain = compiled(), build()
    ours, theirs = make(model), dynamic(plain)
    with torch.inference_mode():
        model(input_ids=IDS, past_key_values=ours)
    with torch.no_grad():
        plain(input_ids=IDS, past_key_values=theirs)
        for token in IDS[:, :4].split(1, 1):
            got = model(input_ids=token, past_key_values=ours).logits
            expected = plain(input_ids=token, past_key_values=theirs).logits
            assert (got - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize("make", [dynamic, tiered])
def test_autocast(make: Callable[[Any], Any]) -> None:
    """Rotary positions leave keys in float32, next to values in bfloat16."""

    class Context:
        def __enter__(self) -> None:
            self.inner = torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16)
            for item in self.inner:
                item.__enter__()

        def __exit__(self, *error: Any) -> None:
            for item in reversed(self.inner):
                item.__exit__(*error)

    model = compiled()
    follow(model, make(model), build(), 6e-2, Context)


@CACHES
def test_another_dtype_after_compiling(make: Callable[[Any], Any]) -> None:
    model, plain = compiled(), build().to(torch.bfloat16)
    generate(model, cache=tiered(model))
    model.to(torch.bfloat16)
    follow(model, make(model), plain, 6e-2, torch.no_grad)


def test_two_models_in_four_threads() -> None:
    models = [compiled(), compiled()]
    expected = generate(build())
    for model in models:
        generate(model, cache=tiered(model))  # compiling is not for many threads
    found: dict[int, Tensor] = {}

    def run(number: int) -> None:
        model = models[number % 2]
        found[number] = generate(model, cache=tiered(model))

    threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert all(torch.equal(out, expected) for out in found.values())


def test_attention_weights_are_still_returned() -> None:
    model, plain = build("eager"), build("eager")
    model.compile(backend=kvpass.backend, options=OPTIONS)
    with torch.no_grad():
        expected = plain(input_ids=IDS, output_attentions=True).attentions
        for cache in (None, tiered(model)):
            got = model(input_ids=IDS, past_key_values=cache, output_attentions=True).attentions
            for a, b in zip(got, expected, strict=True):
                torch.testing.assert_close(a, b)


OPERATIONS: dict[str, tuple[Callable[[Any], Any], int]] = {
    "crop": (lambda cache: cache.crop(-4), 2),
    "repeat": (lambda cache: cache.batch_repeat_interleave(2), 4),
    "select": (lambda cache: cache.batch_select_indices(torch.tensor([1])), 1),
    "reorder": (lambda cache: cache.reorder_cache(torch.tensor([1, 0])), 2),
}


@pytest.mark.parametrize("make", [dynamic, tiered])
@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_between_steps(name: str, make: Callable[[Any], Any]) -> None:
    operation, batch = OPERATIONS[name]
    model, plain = compiled(), build()
    ours, theirs = make(model), dynamic(plain)
    tokens = torch.randint(3, 90, (batch, 2))
    with torch.no_grad():
        model(input_ids=IDS, past_key_values=ours)
        plain(input_ids=IDS, past_key_values=theirs)
        operation(ours)
        operation(theirs)
        copied = copy.deepcopy(ours)
        expected = plain(input_ids=tokens, past_key_values=theirs).logits
        for cache in (ours, copied):
            got = model(input_ids=tokens, past_key_values=cache).logits
            torch.testing.assert_close(got, expected)


def test_reset() -> None:
    model = compiled()
    expected = generate(build())
    for make in (tiered, static):
        cache = make(model)
        assert torch.equal(generate(model, cache=cache), expected)
        cache.reset()
        assert torch.equal(generate(model, cache=cache), expected)
    cache = dynamic(model)
    generate(model, cache=cache)
    with pytest.raises(UnsupportedError, match="in place"):
        cache.reset()
