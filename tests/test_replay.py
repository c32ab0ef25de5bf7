# SPDX-License-Identifier: Apache-2.0
"""Decode steps that are captured once and replayed, with a capture made by hand on the CPU."""

from __future__ import annotations

import threading
import warnings
from contextlib import nullcontext

import pytest
import torch
from torch._subclasses import FakeTensor, FakeTensorMode

import kvpass
from kvpass import backends
from kvpass.graph.prelude import GrowsWithLength, Prelude, cut
from kvpass.graph.report import observed
from kvpass.step.replay import MOST_GRAPHS, SHORTEST_MASK, WARM_UP, WORTH, Replayer
from tests.models import compile_with, generate, prompt, tiered, tiny


class Hand:
    """Replays by running again; as of a real graph, a capture has no effect on blocks.

    Nor does a replay raise version counters: no Python of the step runs there.
    """

    def __init__(self) -> None:
        self.captured = self.replayed = self.open = 0
        self.workspace = 1
        self.capturing = False
        self.fakes = True  # a step without effects may be run, which keeps what aliases what
        self.fails: Exception | None = None

    def available(self) -> bool:
        return True

    def key(self) -> int:
        return self.workspace

    def begin(self) -> None:
        assert self.open == 0, "two use a graph at once"
        self.open += 1

    def end(self) -> None:
        self.open -= 1

    def capture(self, run):
        if self.fails is not None:
            raise self.fails
        self.captured += 1
        self.capturing = True
        with FakeTensorMode(allow_non_fake_inputs=True) if self.fakes else nullcontext():
            shapes = run()
        self.capturing = False
        outputs = tuple(
            torch.empty_strided(out.shape, out.stride(), dtype=out.dtype)
            if isinstance(out, FakeTensor)
            else out
            for out in shapes
        )

        own = [
            value
            for cell in run.__closure__
            if isinstance(cell.cell_contents, list)
            for value in cell.cell_contents
            if isinstance(value, torch.Tensor) and not value.is_inference()
        ]
        assert own

        def replay() -> None:
            self.replayed += 1
            versions = [tensor._version for tensor in own]
            for target, value in zip(outputs, run(), strict=True):
                if isinstance(target, torch.Tensor):
                    target.copy_(value)
            for tensor, version in zip(own, versions, strict=True):
                torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))

        return replay, outputs


@pytest.fixture
def hand(monkeypatch):
    hand = Hand()
    monkeypatch.setattr(backends, "capture_for", lambda device: hand)
    yield hand
    torch._dynamo.reset()


def plain_tokens(name: str, ids, mask, tokens: int, **kwargs):
    return generate(tiny(name), ids, mask, tokens, **kwargs).sequences


@pytest.mark.parametrize("padding", [0, 5])
@pytest.mark.parametrize("name", ["llama", "mistral", "gpt2"])
def test_one_graph_serves_every_length_and_cache(hand, name, padding):
    model = tiny(name)
    compile_with(model, cuda_graphs=True)
    for seed, length in ((1, 20), (2, 41)):
        ids, mask = prompt(2, length, padding, seed=seed)
        got = generate(model, ids, mask, 30, past_key_values=tiered(model)).sequences
        assert torch.equal(got, plain_tokens(name, ids, mask, 30))
    assert hand.captured == 1
    assert hand.replayed == 2 * 29 - WARM_UP


def test_an_unmodified_dynamic_cache_is_served_too(hand):
    model = tiny("llama")
    compile_with(model, cuda_graphs=True)
    ids, mask = prompt(1, 20)
    got = generate(model, ids, mask, 40).sequences
    assert torch.equal(got, plain_tokens("llama", ids, mask, 40))
    assert hand.captured == 1 and hand.replayed >= 30


def test_short_prompts_are_no_steps(hand):
    """Their attention is another kernel's, where nothing is stored, than a replay's would be."""
    model = tiny("llama")
    compile_with(model)
    ids, _ = prompt(1, 10)
    with torch.no_grad():
        for _ in range(5):
            model(ids, past_key_values=tiered(model))
            model(ids)
    assert hand.captured == 0


def test_casts_are_part_of_a_capture(hand, monkeypatch):
    """Those of a block of autocast are freed behind it, and a replay would read them there."""
    model = tiny("gpt2")
    compile_with(model)
    seen = []
    real = hand.capture
    monkeypatch.setattr(
        hand,
        "capture",
        lambda run: [seen.append(torch.is_autocast_cache_enabled()), real(run)][1],
    )
    ids, mask = prompt(1, 20)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        generate(model, ids, mask, 6, past_key_values=tiered(model))
        assert torch.is_autocast_cache_enabled()
    assert seen == [False]


def test_the_option_switches_graphs_off(hand, monkeypatch):
    model = tiny("llama")
    monkeypatch.setenv("KVPASS_INNER", "eager")
    for mode in (None, "reduce-overhead"):
        hand.captured = 0
        model.compile(backend=kvpass.backend, mode=mode)
        ids, mask = prompt(1, 20)
        generate(model, ids, mask, 10, past_key_values=tiered(model))
        assert hand.captured == 1
        torch._dynamo.reset()
    hand.captured = 0
    compile_with(model, cuda_graphs=False)
    ids, mask = prompt(1, 20)
    generate(model, ids, mask, 10, past_key_values=tiered(model))
    assert hand.captured == 0
    for maker in (lambda **o: kvpass.TieredCache(model.config, 10, **o), kvpass.Manager):
        with pytest.raises(kvpass.errors.ConfigError, match=r"cuda_graphs.*give it to the backend"):
            maker(cuda_graphs=False)


def test_what_cannot_be_captured_runs_as_it_is_and_says_so_once(hand):
    hand.fails = RuntimeError("operation not permitted when stream is capturing\nmore")
    model = tiny("llama")
    compile_with(model, cuda_graphs=True)
    ids, mask = prompt(1, 20)
    with pytest.warns(kvpass.errors.KVPassWarning, match="not permitted when stream") as seen:
        got = generate(model, ids, mask, 20, past_key_values=tiered(model)).sequences
    assert torch.equal(got, plain_tokens("llama", ids, mask, 20))
    assert sum("captured" in str(each.message) for each in seen) == 1


def test_a_capture_that_another_thread_broke_is_tried_again(hand, monkeypatch):
    model = tiny("llama")
    compile_with(model)
    real, calls = hand.capture, []

    def capture(run):
        calls.append(run)
        if len(calls) == 1:
            raise RuntimeError("operation failed due to a previous error during capture")
        return real(run)

    monkeypatch.setattr(hand, "capture", capture)
    ids, mask = prompt(1, 20)
    with warnings.catch_warnings():
        warnings.simplefilter("error", kvpass.errors.KVPassWarning)
        got = generate(model, ids, mask, 20, past_key_values=tiered(model)).sequences
    assert torch.equal(got, plain_tokens("llama", ids, mask, 20))
    assert hand.captured == 1 and hand.replayed > 10


def test_parameters_that_move_are_captured_anew(hand):
    model, plain = tiny("llama"), tiny("llama")
    compile_with(model, cuda_graphs=True)
    ids, mask = prompt(1, 20)
    generate(model, ids, mask, 12, past_key_values=tiered(model))
    assert hand.captured == 1
    for each in (model, plain):
        each.lm_head.weight.data = each.lm_head.weight.data.flip(0).clone()
    got = generate(model, ids, mask, 12, past_key_values=tiered(model)).sequences
    assert torch.equal(got, generate(plain, ids, mask, 12).sequences)
    assert hand.captured == 2


def test_parameters_changed_in_place_count_at_once(hand):
    model, plain = tiny("llama"), tiny("llama")
    compile_with(model, cuda_graphs=True)
    ids, mask = prompt(1, 20)
    generate(model, ids, mask, 12, past_key_values=tiered(model))
    with torch.no_grad():
        for each in (model, plain):
            each.lm_head.weight.mul_(-1)
            each.model.rotary_emb.inv_freq.mul_(0.5)  # a small buffer, which graphs copy
    got = generate(model, ids, mask, 12, past_key_values=tiered(model)).sequences
    assert torch.equal(got, generate(plain, ids, mask, 12).sequences)
    assert hand.captured == 1


def test_a_longer_workspace_is_captured_anew(hand):
    model = tiny("llama")
    compile_with(model, cuda_graphs=True)
    ids, mask = prompt(1, 20)
    generate(model, ids, mask, 10, past_key_values=tiered(model))
    hand.workspace = 2
    got = generate(model, ids, mask, 10, past_key_values=tiered(model)).sequences
    assert torch.equal(got, plain_tokens("llama", ids, mask, 10))
    assert hand.captured == 2


def test_beams_and_samples_are_as_without_graphs(hand):
    model, plain = tiny("llama"), tiny("llama")
    compile_with(model, cuda_graphs=True)
    ids, mask = prompt(2, 20, 3)
    for kwargs in ({"num_beams": 3}, {"do_sample": True, "top_k": 20, "temperature": 0.8}):
        torch.manual_seed(7)
        got = generate(model, ids, mask, 16, past_key_values=tiered(model), **kwargs).sequences
        torch.manual_seed(7)
        assert torch.equal(got, generate(plain, ids, mask, 16, **kwargs).sequences)
    assert hand.captured == 2  # 6 sequences, and 2


def test_two_threads_do_not_mix(hand):
    model = tiny("llama")
    compile_with(model, cuda_graphs=True)
    jobs = [prompt(1, 20, seed=seed) for seed in range(2)]
    generate(model, *jobs[0], 8, past_key_values=tiered(model))
    want = [plain_tokens("llama", *job, 40) for job in jobs]
    got: dict[int, torch.Tensor] = {}

    def run(number: int) -> None:
        got[number] = generate(model, *jobs[number], 40, past_key_values=tiered(model)).sequences

    threads = [threading.Thread(target=run, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(got[number], want[number]) for number in range(2))


# ------------------------------------------------------------- the replayer alone


def replayer(hand, run, **changes) -> Replayer:
    cut = {"graph": None, "kept": [0, 1], "values": 0, "masks": 0, "numbers": [], "written": []}
    return Replayer(Prelude(**cut | changes), None, run, hand)


def warm(step: Replayer, *args) -> None:
    for _ in range(WARM_UP):
        step(*args)


def test_outputs_stay_when_the_next_replay_comes(hand):
    step = replayer(hand, lambda x, w: (x * w,))
    w = torch.nn.Parameter(torch.tensor([2.0, 3.0]), requires_grad=False)
    outputs = [step(torch.full((2,), float(i)), w)[0] for i in range(6)]
    assert [out.tolist() for out in outputs] == [[2.0 * i, 3.0 * i] for i in range(6)]
    assert step.replays == 4


def test_an_input_at_the_address_of_one_that_is_gone_is_read(hand):
    """By the address and the version alone, it would pass for the one before."""
    step = replayer(hand, lambda x, w: (x + w,))
    w, memory = torch.ones(4), torch.zeros(4)
    warm(step, memory, w)
    for i in range(20):
        x = memory.view(4) if i % 2 else memory.detach()
        memory.numpy()[...] = i  # no version counts this
        assert step(x, w)[0].tolist() == [i + 1.0] * 4
        del x


def test_inference_tensors_are_read_each_time(hand):
    step = replayer(hand, lambda x, w: (x + w,))
    with torch.inference_mode():
        x, w = torch.zeros(3), torch.ones(3)
        for i in range(6):
            x.fill_(i)
            assert step(x, w)[0].tolist() == [i + 1.0] * 3


def test_what_a_step_writes_to_is_written(hand):
    counter = torch.zeros(1)

    def run(x, count):
        if not hand.capturing:
            count.add_(1)
        return (x + count,)

    step = replayer(hand, run, written=[1])
    for i in range(6):
        assert step(torch.zeros(1), counter)[0].item() == i + 1
    assert counter.item() == 6
    other = torch.zeros(1)
    assert step(torch.zeros(1), other)[0].item() == 1 == other.item()


def test_what_one_graph_writes_another_reads(hand):
    """A replay raises no version counter, so the writer has to."""
    counter = torch.zeros(1)

    def write(x, count):
        if not hand.capturing:
            count.add_(1)
        return (x + count,)

    writes = replayer(hand, write, written=[1])
    reads = replayer(hand, lambda x, count: (x * count,))
    for i in range(8):
        version = counter._version
        writes(torch.zeros(1), counter)
        assert counter._version > version
        assert reads(torch.ones(1), counter)[0].item() == i + 1
    assert writes.replays == reads.replays == 8 - WARM_UP


@pytest.mark.parametrize("how", ["data", "numpy", "new data", "dlpack"])
def test_small_inputs_are_read_each_time_however_they_were_changed(hand, how):
    step = replayer(hand, lambda x, scale: (x * scale,))
    scale = torch.ones(3)
    for i in range(8):
        if how == "data":
            scale.data.fill_(i)
        elif how == "numpy":
            scale.numpy()[...] = i
        elif how == "new data":
            scale.data = torch.full((3,), float(i))
        else:
            torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(scale)).fill_(i)
        assert step(torch.ones(3), scale)[0].tolist() == [i] * 3
    assert step.replays == 8 - WARM_UP


INPUTS = {
    "a column": lambda i: torch.full((2, 110), float(i))[:, 3:4],
    "expanded": lambda i: torch.full((1, 3), float(i)).expand(2, 3),
    "a number": lambda i: torch.tensor(float(i)),
    "overlapping": lambda i: torch.full((4,), float(i)).as_strided((3, 2), (1, 1)),
    "transposed": lambda i: torch.full((3, 2), float(i)).mT,
}


@pytest.mark.parametrize("name", INPUTS)
def test_inputs_keep_their_strides(hand, name):
    """Compiled code asserts them."""
    seen = set()
    step = replayer(hand, lambda x, w: (seen.add((x.shape, x.stride())) or x + w,))
    w = torch.zeros(())
    for i in range(8):
        x = INPUTS[name](i)
        assert step(x, w)[0].eq(i).all()
    assert step.replays == 8 - WARM_UP and seen == {(x.shape, x.stride())}


@pytest.mark.parametrize("part", [slice(0, 2), slice(1, 3)])
def test_a_view_of_an_input_is_not_captured(hand, part):
    hand.fakes = False
    step = replayer(hand, lambda x, w: (x[part], x + w))
    w = torch.ones(3)
    for i in range(6):
        x = torch.full((3,), float(i))
        view = step(x, w)[0]
        view.zero_()
        assert x[part].eq(0).all()
    assert step.replays == 0


def test_an_input_that_is_returned_is_not_captured(hand):
    step = replayer(hand, lambda x, w: (x, x + w))
    w = torch.ones(2)
    for i in range(6):
        x = torch.full((2,), float(i))
        out = step(x, w)
        assert out[0] is x and out[1].tolist() == [i + 1.0] * 2
    assert step.replays == 0


def test_shapes_that_keep_changing_are_not_captured_for_ever(hand):
    step = replayer(hand, lambda x, w: (x.sum() + w,))
    w = torch.zeros(1)
    for size in range(1, 3 * MOST_GRAPHS):
        for _ in range(4):
            assert step(torch.ones(size), w)[0].item() == size
    assert hand.captured == step.captures == MOST_GRAPHS


def test_graphs_that_are_used_a_lot_make_room_for_others(hand):
    """A long life with many shapes: the oldest go, and come back when they are needed."""
    step = replayer(hand, lambda x, w: (x.sum() + w,))
    w = torch.zeros(1)
    for size in range(1, 3 * MOST_GRAPHS):
        for _ in range(WARM_UP + WORTH + 1):
            assert step(torch.ones(size), w)[0].item() == size
    assert hand.captured == 3 * MOST_GRAPHS - 1
    assert len(step._graphs) == MOST_GRAPHS
    assert step(torch.ones(1), w)[0].item() == 1
    assert hand.captured == 3 * MOST_GRAPHS


def test_masks_of_all_lengths_share_a_graph(hand):
    step = replayer(hand, lambda x, mask: (x + mask.sum(),), masks=1, kept=[0], graph=None)
    step._early = lambda x, mask: (mask,)
    for size in (3, 4, 5, 900, 17, SHORTEST_MASK):
        out = step(torch.zeros(1), torch.ones(1, size, dtype=torch.int64))[0]
        # What a shorter mask leaves behind is past the end of the sequence, where nothing looks.
        assert out.item() >= size
    assert hand.captured == 1
    step(torch.zeros(1), torch.ones(1, SHORTEST_MASK + 1, dtype=torch.int64))
    assert hand.captured == 1, "a longer one begins again"


@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_a_step_that_was_cut_is_compiled_whole(hand, monkeypatch, inner):
    """Whoever captures must not matter to the compiler: masks of any length, one compilation."""
    monkeypatch.setattr(hand, "available", lambda: False)
    compiled = []
    real = backends.compile_inner
    monkeypatch.setattr(
        backends, "compile_inner", lambda gm, *rest: compiled.append(gm) or real(gm, *rest)
    )
    model = tiny("llama")
    compile_with(model, inner, cuda_graphs=True)
    for length, padding in ((20, 3), (61, 0)):
        ids, mask = prompt(2, length, padding)
        got = generate(model, ids, mask, 12, past_key_values=tiered(model)).sequences
        assert torch.equal(got, plain_tokens("llama", ids, mask, 12))
    step = compiled[1].graph
    names = [node.name for node in step.nodes if node.op == "placeholder"]
    assert "kvpass_mask_0" in names
    assert not any("lengths" in name or "attention_mask" in name for name in names)


def test_explain_says_what_steps_are():
    model = tiny("llama")
    with torch.no_grad():
        cache = tiered(model)
        model(prompt(1, 20)[0], past_key_values=cache)
        explanation = kvpass.explain(model, prompt(1, 1)[0], past_key_values=cache, verbose=False)
    assert "decode steps have fixed shapes" in explanation.text
    assert explanation.as_dict()["graphs"][0]["grows"] == ""


def test_a_step_that_grows_is_named(hand):
    """A bias with a column a token is an operand of the attention."""

    class Model(torch.nn.Module):
        def forward(self, x, cache):
            k, v = cache.update(x, x, 0)
            bias = torch.arange(k.shape[2], dtype=x.dtype)[None, None, None] * 0.1
            return torch.nn.functional.scaled_dot_product_attention(x, k, v, attn_mask=bias)

    model, cache = Model(), tiered(tiny("llama"))
    compiled = torch.compile(model, backend=kvpass.backend, options={"cuda_graphs": True})
    x = torch.randn(1, 2, 1, 16)
    reports = []
    with (
        torch.no_grad(),
        observed(reports.append),
        pytest.warns(kvpass.errors.KVPassWarning, match="without a CUDA graph"),
    ):
        for _ in range(4):
            compiled(x, cache)
    assert reports[-1].grows and "operand" in reports[-1].grows
    assert hand.captured == 0


def test_a_number_on_another_device_is_not_captured():
    """It goes to kernels by value, which a replay would not read again."""
    graph = torch.fx.Graph()
    x, scale = graph.placeholder("x"), graph.placeholder("scale")
    x.meta["example_value"] = torch.empty(2, device="meta")
    scale.meta["example_value"] = torch.tensor(2.0)
    graph.output((graph.call_function(torch.mul, (x, scale)),))
    with pytest.raises(GrowsWithLength, match="scale is on cpu, not on meta"):
        cut(graph, frozenset(), torch.device("meta"))
