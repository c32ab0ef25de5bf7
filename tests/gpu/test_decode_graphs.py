# SPDX-License-Identifier: Apache-2.0
"""Decode steps as CUDA graphs: the same tokens, one graph for all lengths, and no waiting."""

from __future__ import annotations

import gc
import random
import threading

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import kvpass
from kvpass.step import replay
from tests.models import compile_with, generate, prompt, tiered, tiny

pytestmark = pytest.mark.gpu
SYNCHRONISES = (
    "cudaStreamSynchronize",
    "cudaDeviceSynchronize",
    "cudaEventSynchronize",
)


@pytest.fixture(autouse=True)
def made(monkeypatch):
    """Every replayer that is made."""
    torch._dynamo.reset()
    found: list[replay.Replayer] = []
    real = replay.Replayer.__init__

    def init(self, *args) -> None:
        real(self, *args)
        found.append(self)

    monkeypatch.setattr(replay.Replayer, "__init__", init)
    yield found
    torch._dynamo.reset()


@pytest.mark.parametrize("padding", [0, 5])
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_tokens_are_those_of_transformers(made, name, padding):
    plain, model = tiny(name).to("cuda"), tiny(name).to("cuda")
    compile_with(model, cuda_graphs=True)
    for seed, length in ((1, 20), (2, 41)):
        ids, mask = (x.to("cuda") for x in prompt(2, length, padding, seed=seed))
        got = generate(model, ids, mask, 30, past_key_values=tiered(model)).sequences
        assert torch.equal(got, generate(plain, ids, mask, 30).sequences)
    (one,) = made  # with a graph for steps whose blocks are all hot, and one for the others
    assert one.captures == 2
    assert one.replays == 2 * (29 - replay.WARM_UP)


def test_placement_and_timing_change_no_bit(made):
    """Blocks are put anywhere between two replays."""
    model = tiny("llama").to("cuda")
    compile_with(model, cuda_graphs=True, hot="8MiB")
    ids, mask = (x.to("cuda") for x in prompt(2, 100))
    still = generate(model, ids, mask, 60, past_key_values=tiered(model, hot="8MiB"))
    rng = random.Random(3)
    cache = tiered(model, hot="8MiB", poison=True)
    tokens, logits = ids, []
    with torch.no_grad():
        for step in range(60):
            out = model(input_ids=tokens, attention_mask=torch.ones(
                2, 100 + step, dtype=torch.int64, device="cuda"
            ), past_key_values=cache, logits_to_keep=1).logits[:, -1]  # fmt: skip
            cache.manager.place(cache.batch, lambda *_: rng.random() < 0.5)
            logits.append(out)
            tokens = out.argmax(-1, keepdim=True)
    assert all(torch.equal(a, b) for a, b in zip(logits, still.logits, strict=True))
    assert cache.manager.counters.loaded_blocks > 100
    assert sum(each.replays for each in made) > 100


def test_a_capture_that_fails_leaves_nothing_behind():
    capture = replay.CudaCapture(torch.device("cuda", 0))
    x = torch.ones(8, device="cuda")

    def fail() -> None:
        (x + 1).sum().item()  # a synchronisation, which no capture can have

    before = torch.cuda.current_stream()
    for _ in range(2):
        with pytest.raises(RuntimeError):
            capture.capture(fail)
        assert torch.cuda.current_stream() == before
        assert not torch.cuda.is_current_stream_capturing()
    run, out = capture.capture(lambda: x * 3)
    x.fill_(2)
    run()
    torch.cuda.synchronize()
    assert out.eq(6).all() and torch.randn(4, device="cuda").isfinite().all()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")
def test_each_device_is_captured_on_its_own(made):
    """Whatever device was captured first."""
    for index in (0, 1, 0):
        device = torch.device("cuda", index)
        plain, model = tiny("llama").to(device), tiny("llama").to(device)
        compile_with(model)
        ids, mask = (x.to(device) for x in prompt(1, 20))
        cache = tiered(model, device=str(device))
        got = generate(model, ids, mask, 30, past_key_values=cache).sequences
        assert torch.equal(got, generate(plain, ids, mask, 30).sequences)
    assert sum(each.replays for each in made) > 60


def test_two_threads_and_streams_do_not_mix(made):
    plain, model = tiny("llama").to("cuda"), tiny("llama").to("cuda")
    compile_with(model, cuda_graphs=True)
    jobs = [tuple(x.to("cuda") for x in prompt(1, 20, seed=seed)) for seed in range(3)]
    want = [generate(plain, *job, 60).sequences for job in jobs]
    generate(model, *jobs[0], 8, past_key_values=tiered(model))
    got: dict[int, torch.Tensor] = {}

    def run(number: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            got[number] = generate(
                model, *jobs[number], 60, past_key_values=tiered(model)
            ).sequences
            torch.cuda.current_stream().synchronize()

    threads = [threading.Thread(target=run, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(got[number], want[number]) for number in range(3))


def test_steps_wait_for_nobody_and_take_no_memory(made):
    """Two thousand steps: right, one graph, flat memory, no synchronisation inside a step."""
    plain, model = (tiny("llama", max_position_embeddings=4096).to("cuda") for _ in range(2))
    cache = tiered(model, max_tokens=2100, hot="8MiB")
    ids, _ = prompt(1, 20)
    compile_with(model, cuda_graphs=True)
    out = kvpass.generate(model, ids, cache, max_new_tokens=50, eos_token_id=None)
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_reserved()
    allocated = torch.cuda.memory_allocated()
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    first = [*ids[0].tolist(), *out.tokens[0]]
    out = kvpass.generate(model, None, cache, max_new_tokens=1950, eos_token_id=None)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs, "compiled again"
    assert torch.cuda.memory_reserved() <= before + (2 << 20)
    assert torch.cuda.memory_allocated() <= allocated + (8 << 20)  # the hot tier grows
    assert [each.captures for each in made] == [1]
    assert len(out.tokens[0]) == 1950
    whole = torch.tensor([first + out.tokens[0]], device="cuda")
    with torch.no_grad():
        want = plain(whole[:, :-1]).logits[0, 19:]
    chosen = want.gather(1, whole[0, 20:, None])[:, 0]
    assert float((want.amax(1) - chosen).max()) < 1e-4, "not the likeliest token"
    tokens = torch.tensor([[5]], device="cuda")
    positions = torch.tensor([[cache.get_seq_length()]], device="cuda")
    with torch.no_grad(), profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        for _ in range(8):
            logits = model(input_ids=tokens, position_ids=positions, past_key_values=cache).logits
            tokens = logits[:, -1].argmax(-1, keepdim=True)
            positions = positions + 1
    names = [event.key for event in seen.key_averages()]
    assert any("cudaGraphLaunch" in name for name in names)
    # The profiler itself synchronises the device once, at its end.
    counts = {event.key: event.count for event in seen.key_averages()}
    waits = {name: counts[name] for name in names if name in SYNCHRONISES}
    assert waits.pop("cudaDeviceSynchronize", 0) <= 2 and not waits, waits


def test_generate_samples_pads_and_stops_on_the_device(made):
    plain, model = tiny("llama").to("cuda"), tiny("llama").to("cuda")
    rows = [prompt(1, n, seed=n)[0][0].tolist() for n in (9, 20, 14)]
    cache = tiered(model)
    compile_with(model, cuda_graphs=True)
    got = kvpass.generate(model, rows, cache, max_new_tokens=30, eos_token_id=None)
    for row, tokens in zip(rows, got.tokens, strict=True):
        ids = torch.tensor([row], device="cuda")
        want = generate(plain, ids, torch.ones_like(ids), 30).sequences[0, len(row) :].tolist()
        assert tokens == want
    end = got.tokens[1][11]
    cut = kvpass.generate(model, rows, tiered(model), max_new_tokens=30, eos_token_id=end)
    want = [row[: row.index(end) + 1] if end in row else row for row in got.tokens]
    assert cut.tokens == want
    assert cut.cache.get_seq_length() == 20 + max(map(len, want)) - 1
    samples = [
        kvpass.generate(
            model, rows[0], tiered(model), max_new_tokens=20, temperature=1.0, top_k=30, top_p=0.9,
            eos_token_id=None, generator=torch.Generator("cuda").manual_seed(seed),
        ).tokens
        for seed in (1, 1, 2)
    ]  # fmt: skip
    assert samples[0] == samples[1] != samples[2]
