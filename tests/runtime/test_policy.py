# SPDX-License-Identifier: Apache-2.0
"""Rules that hold for all inputs of the pure policy functions."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvpass.runtime import policy


@st.composite
def block_arrays(draw, most: int = 30) -> policy.BlockArrays:
    count = draw(st.integers(0, most))
    lists = st.lists
    frequency = draw(
        lists(st.one_of(st.just(float("nan")), st.floats(0, 64)), min_size=count, max_size=count)
    )
    flags = lists(st.booleans(), min_size=count, max_size=count)
    return policy.BlockArrays(
        frequency=np.array(frequency, dtype=np.float64),
        heat=np.array(draw(lists(st.integers(0, 3), min_size=count, max_size=count)), np.uint8),
        index=np.arange(count, dtype=np.int64),
        resident=np.array(draw(flags), dtype=bool),
        movable=np.array(draw(flags), dtype=bool),
    )


@given(block_arrays(), st.integers(-1, 40), st.floats(0, 64), st.booleans())
def test_victims_are_allowed_distinct_and_coldest_first(blocks, count, min_frequency, pressure):
    chosen = policy.victims(blocks, count, min_frequency=min_frequency, pressure=pressure)
    assert len(set(chosen.tolist())) == len(chosen) <= max(count, 0)
    assert blocks.movable[chosen].all()
    if not pressure:
        assert not blocks.resident[chosen].any()
        assert (blocks.frequency[chosen] < min_frequency).all()
    allowed = blocks.movable.sum() if pressure else None
    if allowed is not None:
        assert len(chosen) == min(allowed, max(count, 0))
        residents = blocks.resident[chosen]
        assert (np.diff(residents.astype(int)) >= 0).all(), "residents go last"


@given(block_arrays(), block_arrays(), st.integers(0, 20), st.integers(0, 20), st.floats(0.5, 64))
def test_promotions_are_worth_their_victims(hot, cold, room, limit, min_frequency):
    pairs = policy.promotions(hot, cold, room=room, limit=limit, min_frequency=min_frequency)
    assert len(pairs) <= limit
    assert len({c for c, _ in pairs}) == len(pairs)
    taken = [v for _, v in pairs if v >= 0]
    assert len(set(taken)) == len(taken)
    assert sum(v < 0 for _, v in pairs) <= room
    for candidate, victim in pairs:
        assert cold.movable[candidate]
        assert cold.frequency[candidate] >= min_frequency
        if victim >= 0:
            assert hot.movable[victim]
            assert not hot.resident[victim]
            assert cold.frequency[candidate] >= policy.HYSTERESIS * hot.frequency[victim]


@given(st.integers(1, 40), st.integers(0, 40), st.integers(0, 10))
def test_new_blocks_fill_the_room_unfinished_first(count, room, resident):
    last = np.zeros(count, dtype=bool)
    last[-1] = True
    hot = policy.place(np.arange(count), last, resident, room)
    assert hot.sum() == min(room, count)
    if room:
        assert hot[-1]
    first = hot[: min(resident, count - 1)]
    if room > len(first):
        assert first.all()


def test_heat_saturates_in_two_bits():
    heat = np.array([0, 3, 2, 0], dtype=np.uint8)
    frequency = np.array([5.0, 5.0, 0.0, 0.0])
    assert policy.next_heat(heat, frequency, 2.0).tolist() == [1, 3, 1, 0]


def test_residents_leave_half_of_the_hot_arena():
    assert policy.resident_blocks(1024, 256, 1000, 1, 100) == 4
    assert policy.resident_blocks(1024, 256, 120, 30, 100) == 2
    assert policy.resident_blocks(1024, 256, 10, 30, 100) == 0
    assert policy.resident_blocks(1024, 256, 1000, 1, 3) == 3
