# SPDX-License-Identifier: Apache-2.0
"""Failures that other caches have had and that only show on a GPU, or on two."""

from __future__ import annotations

import gc
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

import kvpass
from kvpass.errors import CacheStateError, KVPassError
from kvpass.graph.report import observed
from tests.models import compile_with, generate, prompt, tiered, tiny
from tests.runtime.harness import BLOCK, Driver

pytestmark = pytest.mark.gpu
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")
MIB = 1 << 20


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def test_b58_forty_prompt_lengths_take_no_more_memory_than_ten():
    plain, model = tiny("llama").to("cuda"), tiny("llama").to("cuda")
    model.compile(backend=kvpass.backend, mode="reduce-overhead")
    reserved, graphs = [], []
    with observed(graphs.append):
        for length in range(17, 57):
            ids, mask = (x.to("cuda") for x in prompt(1, length, seed=length))
            got = generate(model, ids, mask, 6, past_key_values=tiered(model)).sequences
            if length % 13 == 4:  # 17, 30, 43, 56
                assert torch.equal(got, generate(plain, ids, mask, 6).sequences)
            gc.collect()
            reserved.append(torch.cuda.memory_reserved())
    assert 0 < len(graphs) <= 4
    assert all(graph.rewritten == 2 for graph in graphs)
    assert reserved[-1] <= 1.05 * reserved[9] + 8 * MIB


class Shuffler:
    """A thread that puts the blocks of some batches anywhere, every millisecond."""

    def __init__(self, *drivers: Driver) -> None:
        self.drivers = drivers
        self.rounds = 0
        self.error: BaseException | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        rng = random.Random(5)
        try:
            while not self._stop.wait(0.001):
                for driver in self.drivers:
                    try:
                        driver.manager.place(driver.batch, lambda *_: rng.random() < 0.5)
                    except CacheStateError:  # in a step: its blocks stay where they are
                        continue
                self.rounds += 1
        except BaseException as error:
            self.error = error

    def let_work(self) -> None:
        """Wait for a few rounds; there may be none if moves pause during a capture."""
        wanted, end = self.rounds + 3, time.monotonic() + 0.5
        while self.rounds < wanted and self.error is None and time.monotonic() < end:
            time.sleep(0.001)

    def __enter__(self) -> Shuffler:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(10)
        assert not self._thread.is_alive()
        if self.error is not None:
            raise self.error


def captured(
    run: Callable[[], Tensor], mode: str, device: str
) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """A graph of what ``run`` launches, and its static result."""
    graph, begin = torch.cuda.CUDAGraph(), time.monotonic()
    with torch.cuda.graph(graph, stream=torch.cuda.Stream(device), capture_error_mode=mode):
        result = run()
    assert time.monotonic() - begin < 10
    return graph, result


@pytest.mark.timeout(120)
@pytest.mark.parametrize("mode", ["global", "thread_local"])
def test_b60_capture_of_other_code_while_another_thread_moves_blocks(mode):
    driver = Driver(size=2, hot="256KiB", device="cuda:0")
    driver.append(400)
    left, right = torch.zeros(64, 64, device="cuda:0"), 2 * torch.eye(64, device="cuda:0")
    assert not (left @ right).any()  # makes the handle of cuBLAS before the capture
    with Shuffler(driver) as shuffler:

        def run() -> Tensor:
            half = left @ right
            shuffler.let_work()
            return half @ right

        for value in range(1, 6):
            graph, result = captured(run, mode, "cuda:0")
            for factor in (1, 3):
                left.fill_(factor * value)
                graph.replay()
                assert (result == 4 * factor * value).all()
        shuffler.let_work()
    assert shuffler.rounds > 0
    driver.check()


def attention(
    driver: Driver, rows: Tensor, step: list[Tensor], between: Callable[[], None] = lambda: None
) -> Tensor:
    """The ops of one pass over q, k and v, ``[layers, B, heads, tokens, channels]``."""
    out = []
    for layer in driver.layers:
        q, k, v = (x[layer] for x in step)
        token = torch.ops.kvpass.append(k, v, rows, layer, BLOCK)
        mask = (True, None, None)
        out.append(torch.ops.kvpass.attend(q, k, v, token, rows, layer, BLOCK, 0.3, *mask))
        between()
    return torch.stack(out)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("mode", ["global", "thread_local"])
@pytest.mark.parametrize("device", ["cuda:0", pytest.param("cuda:1", marks=two_gpus)])
def test_b60_hand_captured_step_while_another_thread_moves_blocks(device, mode):
    torch.manual_seed(0)
    # The last steps pass a block, and the length of the first table.
    steps = [
        [torch.randn(2, 2, heads, tokens, 16).to(device) for heads in (6, 2, 2)]
        for tokens in (150, *(1,) * 14)
    ]

    def eager(driver: Driver, step: list[Tensor]) -> Tensor:
        with driver.manager.step(driver.batch, step[0].shape[3], driver.layers) as rows:
            return attention(driver, rows, step)

    still = Driver(size=2, hot="4MiB", device=device)
    expected = [eager(still, step) for step in steps]
    moving = Driver(size=2, hot="256KiB", device=device)
    other = Driver(size=2, manager=moving.manager)
    other.append(400)
    with Shuffler(moving, other) as shuffler:
        got = [eager(moving, step) for step in steps[:3]]
        static = [x.clone() for x in steps[3]]
        with moving.manager.step(moving.batch, 1, moving.layers) as rows:
            graph, result = captured(
                lambda: attention(moving, rows, static, shuffler.let_work), mode, device
            )
            graph.replay()
        got.append(result.clone())
        for step in steps[4:]:
            shuffler.let_work()
            for target, source in zip(static, step, strict=True):
                target.copy_(source)
            with moving.manager.step(moving.batch, 1, moving.layers):
                graph.replay()
            got.append(result.clone())
    assert torch.cuda.current_device() == 0
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    for layer in still.layers:
        pair = (d.manager.gather(d.batch, layer, 164) for d in (moving, still))
        assert all(torch.equal(a, b) for a, b in zip(*pair, strict=True))
    other.check()
    assert moving.manager.counters.loaded_blocks > 0


@pytest.mark.parametrize(
    ("inner", "form"), [("eager", "tiered"), ("inductor", "tiered"), ("inductor", "dynamic")]
)
def test_b62_a_decode_step_copies_no_pool(inner, form):
    # 32 KiB a token: 4 layers, 8 heads, K and V, 128 channels, 4 bytes.
    sizes = {"hidden_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 8}
    model = tiny("llama", num_hidden_layers=4, max_position_embeddings=9000, **sizes).to("cuda")
    tiers = {"hot": "2GiB", "cold": "2GiB", "block_size": 256}
    compile_with(model, inner, **tiers)
    cache: Any = tiered(model, 9000, **tiers) if form == "tiered" else DynamicCache()
    ids = torch.ones(4, 8448, dtype=torch.int64, device="cuda")
    gc.collect()  # what earlier tests left would be freed meanwhile
    empty = torch.cuda.memory_allocated()
    reports: list[Any] = []
    with torch.no_grad(), observed(reports.append):
        # The first steps of one token compile, and take the last blocks.
        for part in (*ids.split(1024, 1), *(ids[:, :1],) * 3):
            model(input_ids=part, past_key_values=cache, logits_to_keep=1)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        base = torch.cuda.memory_allocated()
        model(input_ids=ids[:, :1], past_key_values=cache, logits_to_keep=1)
        torch.cuda.synchronize()
    assert cache.get_seq_length() == 8452
    assert all(report.rewritten == 4 for report in reports)
    assert base - empty >= 1024 * MIB
    assert torch.cuda.max_memory_allocated() < base + 64 * MIB


def split_model() -> Any:
    """Four layers, the last two on the second GPU, with hooks like those of a device map."""
    model = tiny("llama", num_hidden_layers=4).to("cuda:0")

    def moved(value: Any, device: str) -> Any:
        if isinstance(value, tuple):
            return tuple(moved(item, device) for item in value)
        return value.to(device) if isinstance(value, Tensor) else value

    def hook(device: str) -> Callable[..., Any]:
        return lambda module, args, kwargs: (
            moved(args, device),
            {name: moved(value, device) for name, value in kwargs.items()},
        )

    for layer in model.model.layers[2:]:
        layer.to("cuda:1").register_forward_pre_hook(hook("cuda:1"), with_kwargs=True)
    model.model.norm.register_forward_pre_hook(hook("cuda:0"), with_kwargs=True)
    return model


@two_gpus
@pytest.mark.parametrize("padding", [0, 5])
@pytest.mark.parametrize("hot", ["4MiB", 1])
def test_b66_a_layer_of_a_dynamic_cache_lies_where_the_layer_is(hot, padding):
    ids, mask = (x.to("cuda:0") for x in prompt(2, 80, padding))

    def logits(model: Any, cache: Any) -> Tensor:
        compile_with(model, hot=hot)
        ends = [0, *range(70, 81)]
        parts = [
            model(
                input_ids=ids[:, begin:end], attention_mask=mask[:, :end], past_key_values=cache
            ).logits
            for begin, end in zip(ends, ends[1:], strict=False)
        ]
        return torch.cat(parts, 1)[:, padding:]

    reports: list[Any] = []
    cache = DynamicCache()
    with torch.no_grad():
        expected = logits(tiny("llama", num_hidden_layers=4).to("cuda:0"), DynamicCache())
        with observed(reports.append):
            got = logits(split_model(), cache)
    assert torch.cuda.current_device() == 0
    assert sum(report.rewritten for report in reports) > 0
    assert all(site.rewritten for report in reports for site in report.sites)
    assert (got - expected).abs().max() < 1e-5
    for number, layer in enumerate(cache.layers):
        device, content = torch.device("cuda", number // 2), layer.keys.content
        assert layer.keys.device == content.lease.batch.device == device
        first = content.lease.batch.blocks[content.layer][0][0]
        assert first.slot.raw.device == (torch.device("cpu") if hot == 1 else device)


@two_gpus
@pytest.mark.parametrize("compiled", [True, False])
def test_b66_a_tiered_cache_on_two_devices_is_refused_in_words(compiled):
    model, ids = split_model(), prompt(1, 40)[0].to("cuda:0")
    if compiled:
        compile_with(model)
    words = r"cuda:0.*cuda:1.*one device.*DynamicCache"
    with torch.no_grad(), pytest.raises(KVPassError, match=words):
        model(input_ids=ids, past_key_values=tiered(model))
    torch.cuda.synchronize("cuda:1")  # no error was left behind on the device
    assert torch.cuda.current_device() == 0
