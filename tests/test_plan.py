# SPDX-License-Identifier: Apache-2.0
"""Plans: bytes as a real cache counts them, speeds by hand, and what does not fit."""

from __future__ import annotations

import json
import math
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st

from kvpass.cli import main, matrix, probes
from kvpass.errors import CheckpointError, ConfigError
from kvpass.model_shape import KNOWN, read_shape, transformers_shape
from kvpass.plan import (
    RUNTIME_BYTES,
    LayerKV,
    Machine,
    ModelShape,
    activation_bytes,
    kv_bytes,
    make_plan,
    read_bytes,
    read_weights,
    slot_bytes,
)
from model_zoo.architectures import ARCHITECTURES

GIB = 1 << 30
DECODERS = [name for name, item in ARCHITECTURES.items() if item.kind == "decoder"]
STEPS = 3
NEED = {"context": 8192, "batch": 2, "itemsize": 2, "block_size": 256, "chunk": 1024}
SMALL = ModelShape(
    name="small",
    layers=(LayerKV(100), LayerKV(100, window=300), LayerKV(0)),
    parameters=10_000_000,
    hidden_size=64,
    intermediate_size=128,
    vocab_size=1000,
    counted="by hand",
)


@pytest.mark.filterwarnings("ignore::kvpass.errors.KVPassWarning")
@pytest.mark.parametrize("name", DECODERS)
def test_kv_bytes_and_parameters_are_those_of_a_real_model_and_cache(name: str) -> None:
    architecture = ARCHITECTURES[name]
    try:
        model: Any = architecture.build("sdpa")
    except ValueError:
        model = architecture.build("eager")
    shape = transformers_shape(name, model.config.to_dict(), transformers)
    assert shape.parameters == sum(weight.numel() for weight in model.parameters())
    cache = matrix.make_cache(architecture, model, "tiered", 40)
    matrix.decode(model, cache, matrix.model_inputs(architecture, model), STEPS)
    snapshot = cache.snapshot()
    tokens = matrix.PROMPT_TOKENS + STEPS
    assert snapshot.kv_bytes == matrix.BATCH * kv_bytes(shape, tokens, 4)
    used = snapshot.hot_used + snapshot.cold_used
    assert used == matrix.BATCH * slot_bytes(shape, tokens, 4, matrix.TIERS["block_size"])


def test_published_shapes_have_the_published_sizes() -> None:
    sizes = {name: shape.parameters for name, shape in KNOWN.items()}
    assert sizes == {
        "smollm2-135m": 134_515_008,
        "llama-2-7b": 6_738_415_616,
        "llama-2-13b": 13_015_864_320,
        "llama-3.1-8b": 8_030_261_248,
    }
    tokens = {name: kv_bytes(shape, 1, 2) for name, shape in KNOWN.items()}
    assert tokens["llama-3.1-8b"] == 128 << 10
    assert tokens["llama-2-13b"] == 800 << 10
    assert tokens["smollm2-135m"] == 30 * 2 * 3 * 64 * 2


def write_llama(folder: Path, **changes: Any) -> Path:
    config = {
        "model_type": "llama", "vocab_size": 300, "hidden_size": 64, "intermediate_size": 96,
        "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
        "attention_bias": True, "mlp_bias": True,
    }  # fmt: skip
    path = folder / "config.json"
    path.write_text(json.dumps(config | changes), encoding="utf-8")
    return path


def test_a_plain_llama_needs_no_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_llama(tmp_path)
    counted = read_shape(str(tmp_path))
    assert counted.counted == "counted on the meta device"
    monkeypatch.setitem(sys.modules, "transformers", None)
    formula = read_shape(str(path))
    assert formula.counted == "formula of the Llama family"
    assert (formula.parameters, formula.layers) == (counted.parameters, counted.layers)
    write_llama(tmp_path, model_type="qwen2")
    with pytest.raises(CheckpointError, match=r"'qwen2' is not supported.*pip install"):
        read_shape(str(path))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "has no model_type"),
        ('{"model_type": "no_such"}', "makes no decoder of model_type 'no_such'"),
        ('{"model_type": "bamba", "num_hidden_layers": 2}', "keep other state|makes no decoder"),
        ('{"model_type": "mamba", "num_hidden_layers": 1}', "mamba has no attention heads"),
    ],
)
def test_configs_that_are_refused(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(ConfigError, match=message):
        read_shape(str(path))


def test_a_name_that_is_nothing() -> None:
    with pytest.raises(ConfigError, match="--model 'lama': no shape of that name.*llama-3.1-8b"):
        read_shape("lama")


@given(st.integers(1, 5000), st.sampled_from([32, 256]))
def test_blocks_hold_the_tokens_and_a_step_reads_no_more(tokens: int, block: int) -> None:
    kept, slots = kv_bytes(SMALL, tokens, 2), slot_bytes(SMALL, tokens, 2, block)
    read = read_bytes(SMALL, tokens, 2, block)
    assert kept == tokens * 200 * 2
    assert kept <= slots < kept + block * 200 * 2
    assert read <= kept
    assert (read == kept) == (tokens <= (math.ceil(300 / block) + 1) * block)


def test_a_step_reads_weights_and_hot_blocks_and_cold_ones_over_the_link() -> None:
    dense = ModelShape("dense", (LayerKV(1000),) * 4, 10**9, 512, 2048, 32000, "by hand")
    need = {"context": 100 * 256, "batch": 4, "itemsize": 2, "block_size": 256, "chunk": 512}
    slots = 4 * 100 * 256 * 4000 * 2
    fixed = 2 * 10**9 + activation_bytes(dense, 4, 512, 2) + RUNTIME_BYTES
    machine = Machine(fixed + slots // 4, 10**12, device_rate=1e12, link_rate=5e10)
    plan = make_plan(dense, machine, **need)
    assert (plan.kv, plan.kv_slots, plan.hot, plan.cold_only) == (
        slots, slots, slots // 4, slots * 3 // 4,
    )  # fmt: skip
    assert plan.cold == slots, "full blocks have a copy in the cold tier"
    seconds = (2e9 + slots / 4) / 1e12 + slots * 0.75 / 5e10
    assert plan.seconds == pytest.approx(seconds)
    assert plan.tokens_a_second == pytest.approx(4 / seconds)
    whole = make_plan(dense, Machine(fixed + slots, 10**12, 1e12), **need)
    assert (whole.cold_only, whole.seconds) == (0, pytest.approx((2e9 + slots) / 1e12))
    assert make_plan(dense, Machine(fixed, 10**12, 1e12), **need).problems
    assert make_plan(dense, Machine(fixed + slots // 4, 10**12, 1e12), **need).seconds is None


def test_experts_are_read_as_far_as_they_are_chosen() -> None:
    shape = ModelShape(
        "moe", (LayerKV(8),), 1000, 8, 8, 8, "by hand", expert_parameters=800, experts=4,
        experts_per_token=1,
    )  # fmt: skip
    assert read_weights(shape, 1, 2) == pytest.approx(2 * (200 + 800 / 4))
    assert read_weights(shape, 2, 2) == pytest.approx(2 * (200 + 800 * (1 - 0.75**2)))
    assert read_weights(SMALL, 5, 2) == 2 * SMALL.parameters


@given(st.integers(1, 64), st.integers(1, 100_000), st.integers(GIB // 2, 4 * GIB))
def test_memory_is_never_given_out_twice(batch: int, context: int, device: int) -> None:
    plan = make_plan(SMALL, Machine(device, GIB), **(NEED | {"batch": batch, "context": context}))
    assert plan.hot + plan.cold_only == plan.kv_slots
    assert 0 <= plan.hot <= max(0, plan.hot_room)
    if not plan.problems:
        assert plan.weights + plan.activations + plan.hot + RUNTIME_BYTES <= device
        assert plan.cold_only <= GIB
        assert bool(plan.notes) == (plan.cold > GIB)


@pytest.mark.parametrize("name", ["context", "batch", "chunk"])
def test_counts_are_positive(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} = 0: write at least 1"):
        make_plan(SMALL, Machine(GIB, GIB), **(NEED | {name: 0}))


def test_shapes_that_no_model_has() -> None:
    for changes in (
        {"parameters": 0}, {"layers": ()}, {"layers": (LayerKV(0),)}, {"experts_per_token": 2},
    ):  # fmt: skip
        with pytest.raises(ConfigError, match="^small: "):
            ModelShape(**(vars(SMALL) | changes))


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as exit_:
        main(["plan", *arguments])
    out = capsys.readouterr()
    return int(exit_.value.code or 0), out.out, out.err


GIVEN = ("--gpu", "24GiB", "--host", "200GiB", "--hbm", "1000GB/s", "--link", "50GB/s")


def test_the_command_with_everything_given(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probes, "read_rate", lambda gpu: pytest.fail("measured what is given"))
    monkeypatch.setenv("COLUMNS", "160")
    arguments = ("--model", "Llama-3.1-8B", "--context", "131072", "--batch", "4", *GIVEN)
    code, out, _ = run(capsys, *arguments)
    assert code == 0
    assert re.search(r"KV of all +│ +64 GiB +│ 4 x 131,072 tokens", out), out
    assert re.search(r"device rate +│ 1,000.0 GB/s +│ given by --hbm", out)
    assert "it fits, with blocks in both tiers" in out
    code, out, _ = run(capsys, *arguments, "--json")
    content = json.loads(out)
    assert (code, content["kv"], content["parameters"]) == (0, 64 * GIB, 8_030_261_248)
    assert content["tokens_a_second"] == pytest.approx(4 / content["seconds"])
    assert content["assumptions"]["host"] == "given by --host"


def test_the_command_says_what_does_not_fit_and_the_remedy(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, out, _ = run(
        capsys, "--model", "llama-2-13b", "--context", "16384", *GIVEN[:2], "--host", "10GiB"
    )
    assert code == 1
    assert re.search(r"does not fit: the device has 24 GiB: .* take a larger GPU", out)
    assert re.search(r"does not fit: 12.5 GiB would lie in the cold tier only, .* shorter", out)
    assert "tokens/s" not in out


def test_the_command_measures_what_is_not_given(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(probes, "LINK_BYTES", 1 << 20)
    monkeypatch.setattr(probes, "DISK_BYTES", 1 << 20)
    small = ("--model", "smollm2-135m", "--context", "512", "--json")
    code, out, _ = run(capsys, *small)
    content = json.loads(out)
    assert code == 0
    assert content["machine"]["unified"]
    assert content["tokens_a_second"] > 0
    assert content["assumptions"]["link rate"].startswith("not needed")
    monkeypatch.setattr("kvpass.runtime.memory.available_memory", lambda: 300 << 20)
    code, out, _ = run(capsys, *small[:2], "--context", "4096", "--json")
    content = json.loads(out)
    assert code == 0
    assert content["cold_only"] > 0
    assert content["assumptions"]["link rate"].startswith("measured: reads of a file in /")
    assert content["tokens_a_second"] > 0
    # The RAM here says nothing about a GPU.
    code, out, _ = run(capsys, *small, "--gpu", "8GiB", "--host", "1GiB")
    content = json.loads(out)
    assert (code, content["tokens_a_second"]) == (0, None)
    assert content["assumptions"]["device rate"].endswith("give --hbm")


@pytest.mark.parametrize(
    ("flag", "value", "advice"),
    [
        ("--link", "50GB", "write a rate as '50GB/s'"),
        ("--hbm", "fast/s", "--hbm = 'fast': size"),
        ("--gpu", "24", "the unit is missing"),
        ("--host", "-1GiB", "between 1 byte"),
    ],
)
def test_flags_that_do_not_fit(
    capsys: pytest.CaptureFixture[str], flag: str, value: str, advice: str
) -> None:
    code, _, err = run(capsys, "--model", "smollm2-135m", "--context", "64", f"{flag}={value}")
    assert code == 2
    assert flag in err
    assert advice in err
