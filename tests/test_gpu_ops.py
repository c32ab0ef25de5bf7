# SPDX-License-Identifier: Apache-2.0
"""Long steps as on a GPU, under the Triton interpreter: what is brought, and what leaves."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")
import triton_ops
from kvpass import gpu_ops, ops
from kvpass.runtime import directory, prompt
from tests.long_steps import chunk, worst
from tests.runtime.harness import BLOCK, Driver
from tests.test_ops import plain_attention

SMALL = {"hot": "16KiB", "resident_tokens": 0}
"""Four blocks of 4 KiB: nearly all of what follows is cold."""


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """Steps are long from 8 tokens on."""
    monkeypatch.setattr(prompt, "LONG", 8)


@pytest.fixture
def extends(monkeypatch):
    """The base tables that extend kernels were given."""
    seen: list[torch.Tensor] = []
    real = triton_ops.attend_extend

    def note(q, k, v, rows, base, length, **options):
        seen.append(base)
        return real(q, k, v, rows, base, length, **options)

    monkeypatch.setattr(triton_ops, "attend_extend", note)
    return seen


@pytest.fixture
def appends(monkeypatch):
    """The programs that appends were given."""
    seen: list[int] = []
    real = triton_ops.append

    def note(*args):
        seen.append(args[7])
        return real(*args)

    monkeypatch.setattr(triton_ops, "append", note)
    return seen


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("size", [1, 3])
def test_chunks_over_cold_blocks(extends, appends, dtype, size):
    driver = Driver(size=size, layers=3, dtype=dtype, **SMALL)
    for tokens in (70, 33, 8, 96):
        outs = chunk(driver, tokens)
        assert worst(outs) < (1e-5 if dtype == torch.float32 else 4e-3)
    driver.check()
    tables = driver.batch.tables
    brought = [base is not tables.base for base in extends]
    # the first chunk has no past; fp16 leaves it to FlashAttention
    first = 3 if dtype == torch.float32 else 0
    assert brought == [False] * first + [True] * 9
    assert prompt.PROGRAMS in appends
    assert driver.batch.long is None


def test_steps_over_hot_blocks_are_plain(extends, appends):
    driver = Driver(hot="1MiB")
    for tokens in (40, 20):
        assert worst(chunk(driver, tokens)) < 1e-5
    assert all(base is driver.batch.tables.base for base in extends)
    assert set(appends) == {0}


def test_short_steps_read_in_place(extends, appends):
    driver = Driver(**SMALL)
    chunk(driver, 100)
    extends.clear()
    appends.clear()
    assert worst(chunk(driver, 5)) < 1e-5
    assert all(base is driver.batch.tables.base for base in extends)
    assert set(appends) == {0}


def test_windows_bring_what_they_see(monkeypatch):
    driver = Driver(layers=3, **SMALL)
    spans = {1: {"window": 40}, 2: {"chunk": 64}}
    brought: list[tuple[int, int]] = []
    real = prompt.Past.__init__

    def note(self, batch, layer, cold, stream=None):
        brought.append((layer, min(i for _, i, _ in cold)))
        real(self, batch, layer, cold, stream)

    monkeypatch.setattr(prompt.Past, "__init__", note)
    for tokens in (100, 100, 30):
        assert worst(chunk(driver, tokens, spans)) < 1e-5
    # stored: 100, then 200; blocks of 32
    first = {(0, 0): 0, (1, 0): (100 + 1 - 40) // 32, (2, 0): 2, (0, 1): 0, (1, 1): 5, (2, 1): 6}
    count: dict[int, int] = {}
    for layer, index in brought:
        at = count.setdefault(layer, 0)
        assert index >= first[layer, at]  # an earlier block may be hot
        count[layer] += 1
    assert set(count) == {0, 1, 2}


def test_a_layer_is_brought_while_the_one_before_is_attended(monkeypatch):
    driver = Driver(layers=3, **SMALL)
    chunk(driver, 100)
    order: list[str] = []
    real_past, real_extend = prompt.Past.__init__, triton_ops.attend_extend

    def note(self, batch, layer, *rest):
        order.append(f"bring {layer}")
        real_past(self, batch, layer, *rest)

    def extend(*args, **options):
        order.append("attend")
        return real_extend(*args, **options)

    monkeypatch.setattr(prompt.Past, "__init__", note)
    monkeypatch.setattr(triton_ops, "attend_extend", extend)
    chunk(driver, 50)
    assert order == ["bring 0", "bring 1", "attend", "bring 2", "attend", "attend"]


def test_without_memory_for_copies_blocks_are_read_in_place(monkeypatch, extends):
    driver = Driver(**SMALL)
    chunk(driver, 100)
    extends.clear()

    def full(*args):
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(prompt.Past, "__init__", full)
    assert worst(chunk(driver, 50)) < 1e-5
    assert all(base is driver.batch.tables.base for base in extends)
    driver.check()


def test_a_step_that_fails_leaves_nothing_behind():
    driver = Driver(**SMALL)
    chunk(driver, 100)
    with (
        pytest.raises(ZeroDivisionError),
        driver.manager.step(driver.batch, 50, driver.layers) as rows,
    ):
        k = driver.random(50, 2, 16)
        gpu_ops.append(k, k, rows, 0, BLOCK)
        assert driver.batch.long is not None
        1 / 0  # noqa: B018
    assert driver.batch.long is None
    assert worst(chunk(driver, 50)) < 1e-5
    driver.check()


@pytest.mark.parametrize(
    ("options", "flash"),
    [
        ({}, True),
        ({"window": 40}, True),
        ({"window": 39}, False),
        ({"chunk": 64}, True),
        ({"chunk": 16}, False),
        ({"softcap": 5.0}, False),
        ({"sinks": torch.zeros(4)}, False),
    ],
)
def test_the_first_chunk_is_left_to_flash_attention_where_it_is_plain(monkeypatch, options, flash):
    driver = Driver(layers=1, dtype=torch.bfloat16, **SMALL)
    calls = []
    real = F.scaled_dot_product_attention
    monkeypatch.setattr(
        F, "scaled_dot_product_attention", lambda *a, **k: calls.append(1) or real(*a, **k)
    )
    assert worst(chunk(driver, 40, {0: options})) < 4e-2
    assert bool(calls) == flash
    calls.clear()
    assert worst(chunk(driver, 40, {0: options})) < 4e-2
    assert not calls, "the second chunk has a past"


def test_a_batch_is_found_by_its_own_rows():
    one, other = Driver(size=2), Driver(size=2)
    assert directory.batch_at(one.batch.rows) is one.batch
    assert directory.batch_at(other.batch.rows) is other.batch
    assert directory.batch_at(one.batch.rows.clone()) is None
    assert directory.batch_at(one.batch.rows[:3]) is None
    rows = one.batch.rows
    one.manager.release(one.batch)
    assert directory.batch_at(rows) is None


def test_neighbours_are_copied_together():
    driver = Driver(layers=1, hot="4KiB", resident_tokens=0)
    chunk(driver, 320)
    cold = [block.cold for block in driver.batch.blocks[0][0] if block.hot is None]
    runs = list(prompt._neighbours(cold))
    assert sum(map(len, runs)) == len(cold) > len(runs)
    for run in runs:
        assert all(b.address - a.address == a.arena.slot_bytes for a, b in itertools.pairwise(run))


@pytest.mark.parametrize("stored", [0, 100])
def test_what_was_appended_has_left_when_its_memory_may_be_used_again(monkeypatch, stored):
    """A compiled graph reuses the memory of keys and values behind their attention."""
    driver = Driver(layers=2, **SMALL)
    if stored:
        chunk(driver, stored)
    order: list[str] = []
    real_join, real_append = prompt.LongStep.join, prompt.LongStep.append
    monkeypatch.setattr(
        prompt.LongStep, "join", lambda self: order.append("join") or real_join(self)
    )
    monkeypatch.setattr(
        prompt.LongStep, "append", lambda self, *a: order.append("append") or real_append(self, *a)
    )
    real_attend = gpu_ops._attend_many
    monkeypatch.setattr(
        gpu_ops, "_attend_many", lambda *a: order.append("attend") or real_attend(*a)
    )
    assert worst(chunk(driver, 50)) < 1e-5
    assert order == ["append", "attend", "join"] * 2 + ["join"]


@pytest.mark.parametrize("queries", [1, 5])
def test_few_queries_wait_for_many_new_keys(monkeypatch, queries):
    """As the first step of a decoder over its encoder's keys."""
    driver = Driver(layers=1, **SMALL)
    order: list[str] = []
    real_join = prompt.LongStep.join
    monkeypatch.setattr(
        prompt.LongStep, "join", lambda self: order.append("join") or real_join(self)
    )
    for name in ("attend_decode", "attend_extend"):
        real = getattr(triton_ops, name)
        monkeypatch.setattr(
            triton_ops, name, lambda *a, real=real, **k: order.append("attend") or real(*a, **k)
        )
    with driver.manager.step(driver.batch, 300, driver.layers) as rows:
        k, v = driver.random(300, 2, 16), driver.random(300, 2, 16)
        q = driver.random(queries, 4, 16)
        token = ops._append_cuda(k, v, rows, 0, BLOCK)
        out = ops._attend_cuda(q, k, v, token, rows, 0, BLOCK, 0.3, False, None, None)
        wanted = plain_attention(q, k, v, causal=False)
        assert (out.double() - wanted).abs().max() < 1e-5
        assert order == ["join", "attend", "join"] if queries == 1 else ["attend", "join"]


def test_a_capture_of_a_first_chunk_is_not_left_to_flash_attention(monkeypatch):
    """Replays come when something is stored."""
    driver = Driver(layers=1, dtype=torch.float16)
    monkeypatch.setattr(gpu_ops, "is_capturing", lambda device: True)
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *a, **k: pytest.fail("SDPA"))
    assert worst(chunk(driver, 40)) < 4e-3


def test_stored_tokens_are_attended_behind_what_this_step_appended(monkeypatch):
    """A layer that shares another's keys and values has none of its own."""
    driver = Driver(layers=1, **SMALL)
    order: list[str] = []
    real_join = prompt.LongStep.join
    monkeypatch.setattr(
        prompt.LongStep, "join", lambda self: order.append("join") or real_join(self)
    )
    real_attend = gpu_ops._attend_many
    monkeypatch.setattr(
        gpu_ops, "_attend_many", lambda *a: order.append("attend") or real_attend(*a)
    )
    chunk(driver, 100)
    order.clear()
    with driver.manager.step(driver.batch, 50, driver.layers) as rows:
        k = driver.random(50, 2, 16)
        gpu_ops.append(k, k, rows, 0, BLOCK)
        q = driver.random(50, 4, 16)
        options = {
            "block_size": BLOCK, "scale": 0.3, "kv_mask": None, "bias": None, "softcap": 0.0,
            "window": 0, "chunk": 0, "sinks": None, "kv_heads": 2, "head_dim_v": 16,
            "kv_dtype": torch.float32, "tile": None,
        }  # fmt: skip
        gpu_ops.attend(q, None, None, rows, 0, False, 0, options)
        assert order == ["join", "attend", "join"]
