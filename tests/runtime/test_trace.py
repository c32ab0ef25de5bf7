# SPDX-License-Identifier: Apache-2.0
"""Traces: what is recorded is what happened, and a bad file is a typed error."""

from __future__ import annotations

import contextlib
import json

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import kvpass
from kvpass.errors import CacheStateError, ConfigError, KVPassError, TraceError
from kvpass.runtime.trace import Recorder, Trace, load_trace
from tests.runtime.harness import BLOCK


class Model:
    num_hidden_layers = 1


def decode(cache: kvpass.TieredCache, tokens: int) -> None:
    from kvpass.runtime.geometry import BlockGeometry

    geometry = BlockGeometry(2, 16, 16, torch.float32, BLOCK)
    manager, batch = cache._state.bind(1, torch.device("cpu"), {0: geometry}, tokens)
    x = torch.randn(1, 2, tokens, 16)
    with manager.step(batch, tokens, [0]) as rows:
        token = torch.ops.kvpass.append(x, x, rows, 0, BLOCK)
        torch.ops.kvpass.attend(x, x, x, token, rows, 0, BLOCK, 1.0, True, None, None)


def record(interval: int = 1, steps: int = 40, before: int = 0) -> tuple[Trace, np.ndarray]:
    cache = kvpass.TieredCache(Model(), 400, block_size=BLOCK, hot="1MiB")
    for _ in range(before):
        decode(cache, 1)
    old = cache.batch.heat.numpy().copy() if before else 0
    with Recorder(cache, model="tiny", interval=interval) as recorder:
        decode(cache, 100)
        for _ in range(steps):
            decode(cache, 1)
    last = cache.batch.heat.numpy() - old
    decode(cache, 1)  # no longer listened to
    return recorder.trace(), last


@pytest.mark.parametrize("before", [0, 3])
def test_a_trace_adds_up_to_the_counters(before, tmp_path):
    trace, counters = record(before=before)
    assert trace.counts.shape[0] == 40
    total = trace.counts.sum(0)
    np.testing.assert_array_equal(total, counters[:, :, : total.shape[2]])
    assert total.sum() > 0
    assert (trace.prompt_tokens, trace.tokens) == (100 + before, 140 + before)
    assert trace.blocks[:, 0, 0].tolist() == [-(-(101 + before + i) // BLOCK) for i in range(40)]
    trace.save(tmp_path / "t.npz")
    again = load_trace(tmp_path / "t.npz")
    for name in ("model", "block_size", "kv_heads", "block_bytes", "prompt_tokens", "interval"):
        assert getattr(again, name) == getattr(trace, name)
    np.testing.assert_array_equal(again.counts, trace.counts)
    np.testing.assert_array_equal(again.blocks, trace.blocks)
    np.testing.assert_array_equal(again.start, trace.start)


def test_ticks_of_several_steps_hold_their_sum():
    torch.manual_seed(1)
    fine, _ = record()
    torch.manual_seed(1)
    coarse, _ = record(interval=8)
    assert len(coarse.counts) == 5
    summed = fine.counts.reshape(5, 8, *fine.counts.shape[1:]).sum(1)
    np.testing.assert_array_equal(coarse.counts, summed)


def test_a_recorder_with_nothing_to_tell_says_so():
    cache = kvpass.TieredCache(Model(), 400, block_size=BLOCK, hot="1MiB")
    for wrong in (0, -1, True, 1.5, "2"):
        with pytest.raises(ConfigError, match="interval"):
            Recorder(cache, interval=wrong)
    with Recorder(cache) as recorder:
        pass
    with pytest.raises(TraceError, match="nothing was recorded"):
        recorder.trace()
    with Recorder(cache) as recorder:
        decode(cache, 70)
        decode(cache, 1)
        cache.truncate(10)
        decode(cache, 1)
    with pytest.raises(CacheStateError, match="cropped"):
        recorder.trace()


def _saved(tmp_path):
    trace, _ = record(steps=5)
    trace.save(tmp_path / "good.npz")
    with np.load(tmp_path / "good.npz") as file:
        return dict(file)


def test_damaged_and_foreign_files_are_typed_errors(tmp_path):
    parts = _saved(tmp_path)
    path = tmp_path / "bad.npz"
    header = json.loads(bytes(parts["header"]))

    def refuse(match: str, **changed: object) -> None:
        with open(path, "wb") as file:
            np.savez(file, **{k: v for k, v in (parts | changed).items() if v is not None})
        with pytest.raises(TraceError, match=match):
            load_trace(path)

    def as_header(**changed: object) -> np.ndarray:
        return np.frombuffer(json.dumps(header | changed).encode(), dtype=np.uint8)

    refuse("no trace", header=None)
    refuse("no trace", counts=None)
    refuse("not a trace of kvpass", header=as_header(format="other"))
    refuse("version 2", header=as_header(version=2))
    refuse("version True", header=as_header(version=True))
    refuse("block_size is 0", header=as_header(block_size=0))
    refuse("interval is '1'", header=as_header(interval="1"))
    refuse("kv_heads", header=as_header(kv_heads=[]))
    refuse("shapes", counts=parts["counts"][:, 0])
    refuse("no integers", counts=parts["counts"].astype(float))
    refuse("numbers of blocks", blocks=parts["blocks"][::-1] * np.arange(1, 6)[::-1, None, None])
    refuse("not there", counts=parts["counts"] + 1, blocks=parts["blocks"] * 0,
           start=parts["start"] * 0)  # fmt: skip
    refuse("no step", counts=parts["counts"][:0], blocks=parts["blocks"][:0])
    refuse("no trace", header=np.array([object()], dtype=object))
    for content in (b"", b"PK\x03\x04", b"text"):
        path.write_bytes(content)
        with pytest.raises(TraceError):
            load_trace(path)
    with pytest.raises(TraceError, match="cannot be read"):
        load_trace(tmp_path / "none.npz")
    with pytest.raises(TraceError, match="cannot be read"):
        load_trace(tmp_path)
    with pytest.raises(TraceError, match="cannot be written"):
        load_trace(tmp_path / "good.npz").save(tmp_path / "missing" / "t.npz")


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_flipped_byte_or_a_cut_never_raises_anything_else(tmp_path, data):
    good = tmp_path / "good.npz"
    if not good.exists():
        _saved(tmp_path)
    raw = bytearray(good.read_bytes())
    position = data.draw(st.integers(0, len(raw) - 1))
    if data.draw(st.booleans()):
        raw = raw[:position]
    else:
        raw[position] ^= data.draw(st.integers(1, 255))
    bad = tmp_path / "bad.npz"
    bad.write_bytes(raw)
    with contextlib.suppress(KVPassError):
        load_trace(bad)
