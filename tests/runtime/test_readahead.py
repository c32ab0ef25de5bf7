# SPDX-License-Identifier: Apache-2.0
"""Which cold blocks are asked for before they are read, and that nothing else changes."""

from __future__ import annotations

import itertools
import mmap
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvpass.runtime import readahead
from kvpass.runtime.batch import Batch
from tests.runtime import invariants
from tests.runtime.harness import BLOCK, Driver

ROWS = st.lists(st.integers(0, 60), unique=True, max_size=40).map(sorted)


@given(ROWS, st.integers(1, 9))
def test_every_cold_block_is_asked_for_once_and_in_time(cold: list[int], distance: int) -> None:
    first = 0
    found = readahead.schedule(cold, distance, first)
    asked: list[int] = []
    for index in range(61):
        asked += found.get(index, ())
        if index in cold:
            position = cold.index(index)
            ahead = asked[position:]
            assert ahead[:1] == [index], "before it is read"
            left = len(cold) - position
            assert len(ahead) - 1 >= min(distance, left - 1), "so many are ahead"
            assert len(ahead) <= 2 * distance, "and not twice as many"
    assert asked == cold


def test_nothing_is_asked_for_without_cold_blocks_or_distance() -> None:
    assert readahead.schedule([], 4, 0) == {}
    assert readahead.schedule([1, 2], 0, 0) == {}


@given(st.integers(0, 39), st.integers(1, 40), st.integers(0, 64))
def test_the_later_layer(layer: int, layers: int, lookahead: int) -> None:
    layer %= layers
    later = readahead.later_layer(layer, layers, lookahead)
    if lookahead == 0 or lookahead >= layers:
        assert later is None
    else:
        assert later is not None
        assert (later - layer) % layers == lookahead


PIECES = st.lists(st.tuples(st.integers(0, 3000), st.integers(1, 300)), max_size=12)


@given(PIECES, st.sampled_from([1, 16, 64]))
def test_spans_cover_the_pieces_in_whole_pages(pieces: list[tuple[int, int]], page: int) -> None:
    found = readahead.spans(pieces, page)
    covered = {byte for start, size in found for byte in range(start, start + size)}
    wanted = {byte // page for start, size in pieces for byte in range(start, start + size)}
    assert {byte // page for byte in covered} == wanted
    assert len(covered) == len(wanted) * page
    assert all(start % page == 0 and size % page == 0 for start, size in found)
    ends = [start + size for start, size in found]
    assert all(end < start for end, (start, _) in zip(ends, found[1:], strict=False))


Ask = list[tuple[int, int]]


def run(
    monkeypatch: pytest.MonkeyPatch, hot: Callable[[int, int, int], bool], **options: Any
) -> tuple[list[Ask], list[torch.Tensor], Driver]:
    """Spans asked for in one decode step over 8 full blocks, its outputs, and the driver."""
    torch.manual_seed(0)
    driver = Driver(**options)
    driver.append(8 * BLOCK + 3)
    driver.manager.place(driver.batch, hot)
    asked: list[Ask] = []
    real = readahead._madvise()

    def advise(address: int, size: int, advice: int) -> None:
        assert advice == mmap.MADV_WILLNEED
        assert real(address, size, advice) == 0, "the system knows these pages"
        asked.append([(address, size)])

    with monkeypatch.context() as patch:
        patch.setattr(readahead, "_madvise", lambda: advise)
        outputs = driver.append(1)
    return asked, outputs, driver


def pages(driver: Driver, layer: int, indices: list[int]) -> Ask:
    row = driver.batch.blocks[layer][0]
    slots = [row[i].cold for i in indices]
    return readahead.spans((s.address, s.arena.slot_bytes) for s in slots)


def test_nothing_is_asked_for_while_all_is_hot(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(monkeypatch, lambda *_: True)[0] == []


def test_prefetch_distance_and_lookahead_say_what_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    distance = {"optimizations.default.prefetch_distance": 2}
    layers = {"layers": 3}

    def some(_layer: int, _sequence: int, index: int) -> bool:
        return index % 2 == 0

    asked, _, driver = run(monkeypatch, some, prefetch=False, **distance, **layers)
    groups = [[1, 3, 5, 7]]  # two groups of two as the row begins, and no third
    expected = [[span] for layer in range(3) for g in groups for span in pages(driver, layer, g)]
    assert asked == expected

    asked, _, driver = run(monkeypatch, lambda *_: False, prefetch=False, **distance, **layers)
    groups = [[0, 1, 2, 3], [4, 5], [6, 7]]
    expected = [[span] for layer in range(3) for g in groups for span in pages(driver, layer, g)]
    assert asked == expected

    off = {"optimizations.default.prefetch_distance": 0}
    asked, _, driver = run(monkeypatch, lambda *_: False, lookahead=2, **off, **layers)
    whole = list(range(8))
    assert asked == [[span] for layer in (2, 0, 1) for span in pages(driver, layer, whole)]
    assert run(monkeypatch, lambda *_: False, lookahead=3, **off, **layers)[0] == []
    assert run(monkeypatch, lambda *_: False, prefetch=False, **off, **layers)[0] == []


def test_what_a_window_has_left_behind_is_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(layers=2, lookahead=1)
    driver.append(8 * BLOCK)
    driver.manager.place(driver.batch, lambda *_: False)
    asked: Ask = []
    monkeypatch.setattr(
        readahead, "_madvise", lambda: lambda address, size, _: asked.append((address, size))
    )
    for _ in range(2):
        asked.clear()
        with driver.manager.step(driver.batch, 1, driver.layers) as rows:
            for layer in driver.layers:
                q, k = driver.random(1, 6, 16), driver.random(1, 2, 16)
                token = torch.ops.kvpass.append(k, k, rows, layer, BLOCK)
                torch.ops.kvpass.attend(
                    q, k, k, token, rows, layer, BLOCK, 0.3, True, None, None, 0.0, 50
                )
    seen = [pages(driver, layer, [6, 7]) for layer in (1, 0, 0, 1)]
    assert asked == [span for spans in seen for span in spans]


def test_reading_ahead_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    outs = [
        run(monkeypatch, hot, **options)[1]
        for hot in (lambda *_: True, lambda *_: False, lambda _layer, _sequence, i: i < 4)
        for options in (
            {},
            {"prefetch": False, "optimizations.default.prefetch_distance": 0},
            {"lookahead": 1, "optimizations.default.prefetch_distance": 1},
        )
    ]
    for other in outs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(outs[0], other, strict=True))


FAULTS: dict[str, tuple[Any, str]] = {
    "find what is cold": (Batch, "_find_cold"),
    "ask for a later layer": (readahead, "ask_for_later_layer"),
    "choose the layer": (readahead, "later_layer"),
    "plan a row": (readahead, "row_schedule"),
    "schedule": (readahead, "schedule"),
    "ask": (readahead, "ask_for"),
    "begin to read": (readahead, "will_need"),
    "join the pages": (readahead, "spans"),
    "look the call up": (readahead, "_madvise"),
}
"""Each step of reading ahead: where it is, and its name."""


def ready(more: int) -> Driver:
    """Three layers of 8 full blocks, a third of them cold, and ``more`` tokens."""
    torch.manual_seed(0)
    driver = Driver(
        layers=3, lookahead=1, heat_interval=64, **{"optimizations.default.prefetch_distance": 1},
    )  # fmt: skip
    driver.append(8 * BLOCK + more)
    driver.manager.place(driver.batch, lambda _layer, _sequence, index: index % 3 > 0)
    return driver


def counts(driver: Driver) -> tuple[int, ...]:
    manager = driver.manager
    tiers = manager.tiers
    return (
        tiers.hot.used, tiers.cold.used, len(manager.mover.in_flight), manager.mover.backlog,
        manager.columns.live, *driver.batch.lengths,
    )  # fmt: skip


def next_steps(driver: Driver) -> list[torch.Tensor]:
    torch.manual_seed(2)
    return driver.append(1) + driver.append(1)


# A step looks for cold blocks once, so its other calls cannot fail.
@pytest.mark.parametrize(
    ("fault", "call"),
    [("find what is cold", 1), *itertools.product([*list(FAULTS)[1:], "the call"], [1, 3])],
)
@pytest.mark.parametrize("more", [0, 3])  # the token begins a block, or not
def test_a_fault_in_reading_ahead_leaves_all_counts_and_the_next_result(
    more, fault, call, monkeypatch
):
    clean = next_steps(ready(more))
    driver = ready(more)
    before, dense, calls = counts(driver), list(driver.dense), []

    def failing(real: Callable[..., Any]) -> Callable[..., Any]:
        def step(*args: Any, **options: Any) -> Any:
            calls.append(args)
            if len(calls) == call:
                raise RuntimeError("no reading ahead")
            return real(*args, **options)

        return step

    with monkeypatch.context() as patch:
        if fault == "the call":
            advise = failing(readahead._madvise())
            patch.setattr(readahead, "_madvise", lambda: advise)
        else:
            place, name = FAULTS[fault]
            patch.setattr(place, name, failing(getattr(place, name)))
        with pytest.raises(RuntimeError, match="no reading ahead"):
            driver.append(1)
    driver.dense = dense  # a plain list, which has appended the layers before the fault
    assert len(calls) == call
    assert driver.batch.active is None and not driver.batch.steps
    assert counts(driver) == before
    invariants.check(driver.manager, [driver.batch])
    assert all(map(torch.equal, next_steps(driver), clean))
    driver.check()
    invariants.check(driver.manager, [driver.batch])
    driver.manager.release(driver.batch)
    invariants.check_empty(driver.manager)
