# SPDX-License-Identifier: Apache-2.0
"""Rules that hold for all inputs of the pure policy functions."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpass.runtime import policy


@st.composite
def block_arrays(draw, most: int = 30) -> policy.BlockArrays:
    count = draw(st.integers(0, most))
    lists = st.lists
    often = st.one_of(st.just(float("nan")), st.integers(0, 8).map(float), st.floats(0, 64))
    frequency = draw(lists(often, min_size=count, max_size=count))
    plain = draw(st.booleans())  # as without shares and retention
    flags = lists(st.booleans(), min_size=count, max_size=count)
    return policy.BlockArrays(
        frequency=np.array(frequency, dtype=np.float64),
        heat=np.array(draw(lists(st.integers(0, 3), min_size=count, max_size=count)), np.uint8),
        index=np.arange(count, dtype=np.int64),
        resident=np.array(draw(flags), dtype=bool),
        movable=np.array(draw(flags), dtype=bool),
        ages=np.array(
            draw(
                lists(
                    lists(st.integers(0, policy.NEVER), min_size=policy.K, max_size=policy.K),
                    min_size=count,
                    max_size=count,
                )
            ),
            dtype=np.int64,
        ).reshape(count, policy.K),
        protected=np.array(draw(flags), dtype=bool),
        retention=np.zeros(count)
        if plain
        else np.array(draw(lists(st.floats(-2, 2), min_size=count, max_size=count))),
        over_share=np.zeros(count)
        if plain
        else np.array(draw(lists(st.sampled_from([0.0, 0.5]), min_size=count, max_size=count))),
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
        over = blocks.over_share[chosen]
        assert (np.diff(over) <= 0).all(), "those above their share go first"
        residents = blocks.resident[chosen].astype(int)
        assert (np.diff(residents)[np.diff(over) == 0] >= 0).all(), "residents go last"


@given(block_arrays(), st.integers(0, 20), st.integers(0, 20), st.floats(0.5, 64), st.randoms())
def test_promotions_are_worth_their_victims(blocks, room, limit, min_frequency, random):
    hot = np.array([random.random() < 0.5 for _ in range(len(blocks))], dtype=bool)
    pairs = policy.promotions(blocks, hot, room=room, limit=limit, min_frequency=min_frequency)
    assert len(pairs) <= limit
    assert len({c for c, _ in pairs}) == len(pairs)
    taken = [v for _, v in pairs if v >= 0]
    assert len(set(taken)) == len(taken)
    wanted = ~hot & blocks.movable & (blocks.frequency >= min_frequency)
    assert sum(v < 0 for _, v in pairs) == min(room, limit, wanted.sum()), "free slots first"
    worth = policy.worth(blocks)
    for candidate, victim in pairs:
        assert wanted[candidate]
        if victim >= 0:
            assert hot[victim]
            assert blocks.movable[victim]
            assert not blocks.resident[victim]
            due, within = blocks.over_share[[candidate, victim]] == 0
            if due and not within:
                continue  # its own sequence's share, whatever the two are worth
            assert due or not within, "never from within a share to beyond one"
            assert worth[candidate] >= policy.HYSTERESIS * worth[victim]
    if (blocks.over_share == 0).all():
        came = worth[[c for c, _ in pairs]]
        assert (np.diff(came) <= 0).all(), "those worth most first"
        wanted[[c for c, _ in pairs]] = False
        assert not len(came) or not (worth[wanted] > came[-1]).any(), "none worth more is left"
        givable = hot & blocks.movable & ~blocks.resident & ~np.isnan(blocks.rate)
        givable[taken] = False
        if len(pairs) < limit and wanted.any() and givable.any():
            next_victim = policy.coldest(blocks, np.flatnonzero(givable), 1)
            best = worth[wanted].max()
            assert best < policy.HYSTERESIS * worth[next_victim], "as many as are worth it"


@given(block_arrays(), st.integers(-1, 40), st.randoms())
def test_the_coldest_are_the_first_of_all_in_order(blocks, count, random):
    everything = policy.coldest_first(blocks)
    rank = list(
        zip(
            -blocks.over_share,
            blocks.resident,
            blocks.protected,
            policy.worth(blocks),
            blocks.retention,
            blocks.heat,
            -blocks.ages[:, -1],
            -blocks.ages[:, 0],
            blocks.index,
            strict=True,
        )
    )
    assert everything.tolist() == sorted(range(len(blocks)), key=rank.__getitem__)
    among = np.array([random.random() < 0.7 for _ in range(len(blocks))], dtype=bool)
    np.testing.assert_array_equal(
        policy.coldest(blocks, np.flatnonzero(among), count),
        everything[among[everything]][: max(count, 0)],
    )


def many_blocks(rng: np.random.Generator, hot: np.ndarray) -> policy.BlockArrays:
    """Blocks with many equal values, as in a run that repeats itself; half the time no shares."""
    count = len(hot)
    frequency = rng.integers(0, 12, count) + hot * rng.integers(0, 9).astype(np.float64)
    frequency[rng.random(count) < 0.1] = np.nan
    return policy.BlockArrays(
        frequency=frequency,
        heat=rng.integers(0, 4, count).astype(np.uint8),
        index=rng.permutation(count),
        resident=rng.random(count) < 0.2,
        movable=rng.random(count) < 0.8,
        ages=np.sort(rng.integers(0, 4, (count, policy.K)), axis=1),
        protected=rng.random(count) < 0.5,
        over_share=rng.integers(0, 2, count) * 0.5 * rng.integers(0, 2),
    )


@given(st.integers(0, 2**32 - 1), st.integers(0, 8), st.integers(1, 30))
def test_partial_sorting_chooses_as_full_sorting_does(seed, room, limit):
    """Beside the plain way: sort everything, walk until a pair is not worth it."""
    rng = np.random.default_rng(seed)
    hot = rng.random(60) < 0.5
    blocks = many_blocks(rng, hot)
    worth = policy.worth(blocks)
    order = policy.coldest_first(blocks).tolist()
    for count in (1, limit, 59, 60, 99):
        among = np.flatnonzero(hot)
        expected = [i for i in order if hot[i]][:count]
        assert policy.coldest(blocks, among, count).tolist() == expected
        assert set(policy.coldest(blocks, among, count, ordered=False)) == set(expected)
    wanted = [i for i in range(60) if not hot[i] and blocks.movable[i] and blocks.rate[i] >= 2]
    wanted.sort(key=lambda i: (blocks.over_share[i], -worth[i], blocks.index[i]))
    givable = [
        i
        for i in order
        if hot[i] and blocks.movable[i] and not blocks.resident[i] and blocks.rate[i] >= 0
    ]
    expected = [(i, -1) for i in wanted[:room][:limit]]
    for block, victim in zip(wanted[room:limit], givable, strict=False):
        due, within = blocks.over_share[block] == 0, blocks.over_share[victim] == 0
        worthy = worth[block] >= policy.HYSTERESIS * worth[victim]
        if not (due and not within) and (not worthy or (within and not due)):
            break
        expected.append((block, victim))
    pairs = policy.promotions(blocks, hot, room=room, limit=limit, min_frequency=2.0)
    assert pairs == expected


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


@given(
    st.lists(st.lists(st.floats(0, 64), min_size=8, max_size=8), max_size=12),
    st.lists(st.integers(1, 8), min_size=12, max_size=12),
)
def test_counters_and_ages_stay_in_range_whatever_the_windows(windows, steps):
    nothing = np.full(8, np.nan)
    blocks = policy.BlockArrays(
        frequency=nothing,
        heat=np.zeros(8, np.uint8),
        index=np.arange(8),
        resident=np.zeros(8, bool),
        movable=np.ones(8, bool),
    )
    for counts, length in zip(windows, steps, strict=False):
        before = blocks
        blocks = policy.fold(blocks, np.array(counts), steps=length, interval=8, min_frequency=2.0)
        assert blocks.heat.max() <= policy.MAX_HEAT
        assert (np.diff(blocks.ages, axis=1) >= 0).all(), "newest first"
        assert (blocks.ages[:, 0] == 0).tolist() == [count > 0 for count in counts]
        seen = np.array(counts) * 8 / length
        low, high = np.fmin(before.rate, seen), np.fmax(before.rate, seen)
        assert ((blocks.rate >= low - 1e-9) & (blocks.rate <= high + 1e-9)).all()
        if length < 8:
            np.testing.assert_array_equal(blocks.frequency, before.frequency)


@given(block_arrays(), st.integers(0, 40), st.floats(0.01, 0.99), st.randoms())
def test_the_protected_zone_keeps_its_share_and_its_warmest(blocks, slots, ratio, random):
    hot = np.array([random.random() < 0.7 for _ in range(len(blocks))], dtype=bool)
    chosen = policy.next_protected(blocks, hot, slots, ratio)
    assert chosen.sum() <= slots * ratio
    assert not (chosen & ~hot).any()
    twice = (blocks.ages[:, 0] == 0) & (blocks.ages[:, -1] < policy.NEVER)
    may = twice | (blocks.protected & (blocks.heat > 0))
    assert not (chosen & ~may).any(), "one access is probation"
    left = hot & may & ~chosen
    if left.any():
        assert chosen.sum() == int(slots * ratio), "none falls back while there is room"
        even = blocks.over_share == 0
        if (chosen & even).any() and (left & even).any():
            worth = policy.worth(blocks)
            assert worth[chosen & even].min() >= worth[left & even].max()


@given(
    block_arrays(),
    st.integers(1, 40),
    st.integers(0, 10),
    st.integers(-5, 10),
    st.integers(0, 3),
    st.randoms(),
)
def test_a_plan_moves_no_block_twice_and_none_that_may_not(
    blocks, slots, room, over, level, random
):
    hot = np.array([random.random() < 0.5 for _ in range(len(blocks))], dtype=bool)
    plan = policy.plan(
        blocks,
        hot,
        slots=slots,
        room=room,
        over=over,
        level=level,
        min_frequency=2.0,
        hot_zone_ratio=0.6,
    )
    left = [*plan.demoted.tolist(), *(v for _, v in plan.promoted if v >= 0)]
    came = [block for block, _ in plan.promoted]
    assert len(set(left)) == len(left)
    assert len(set(came)) == len(came)
    assert hot[left].all()
    assert not hot[came].any()
    assert (blocks.over_share[left][blocks.resident[left]] > 0).all(), (
        "residents within a share stay"
    )
    assert blocks.movable[left + came].all()
    assert len(plan.demoted) <= max(over, 0)
    assert (blocks.frequency[plan.demoted] < 2.0).all()
    assert len(came) <= len(left) + room


def test_retention_and_shares_order_blocks_of_equal_heat():
    blocks = policy.BlockArrays(
        frequency=np.array([4.0, 4.0, 4.0, 9.0]),
        heat=np.full(4, 2, np.uint8),
        index=np.arange(4),
        resident=np.zeros(4, bool),
        movable=np.ones(4, bool),
        retention=np.array([1.0, 0.0, 0.0, 0.0]),
        over_share=np.array([0.0, 0.0, 0.5, 0.0]),
    )
    order = policy.victims(blocks, 4, min_frequency=0, pressure=True).tolist()
    assert order == [2, 1, 0, 3], "above its share; then 4 accesses before 8 by retention, and 9"
    deep = replace(blocks, retention=np.array([2.0, 0.0, 0.0, 0.0]))
    assert policy.victims(deep, 4, min_frequency=0, pressure=True).tolist() == [2, 1, 3, 0]


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=6),
    st.integers(0, 6),
    st.floats(0, 1),
    st.integers(0, 6),
    st.integers(0, 2**32 - 1),
)
def test_residents_are_the_first_the_last_and_the_hottest(sizes, first, ratio, cap, seed):
    random = np.random.default_rng(seed)
    row = np.repeat(np.arange(len(sizes)), sizes)
    index = np.concatenate([np.arange(n) for n in sizes])
    worth = random.integers(0, 3, len(row)).astype(np.float64)
    shuffled = random.permutation(len(row))
    chosen = np.empty(len(row), dtype=bool)
    chosen[shuffled] = policy.residents(
        row[shuffled], index[shuffled], worth[shuffled], first=first, ratio=ratio, cap=cap
    )
    for which, size in enumerate(sizes):
        mine = chosen[row == which]
        wanted = min(size, cap, max(first, int(np.ceil(ratio * size))))
        assert mine.sum() == wanted
        assert mine[: min(first, wanted)].all()
        rest = np.flatnonzero(mine[first:]) + first
        others = [i for i in range(first, size - 2) if not mine[i]]
        middle = [i for i in rest if i < size - 2]
        here = worth[row == which]
        if middle and others:
            assert here[middle].min() >= here[others].max()
            equal = [i for i in middle if here[i] == here[others].max()]
            best = [i for i in others if here[i] == here[others].max()]
            assert not equal or max(equal) < min(best), "the earlier of equal ones"
            assert mine[max(size - 2, first) :].all(), "the end comes before the hottest"


@given(st.floats(0.05, 1), st.lists(st.integers(0, 64), max_size=60))
def test_the_threshold_stays_in_range_and_does_not_swing(base, bounces):
    state = policy.Threshold(base)
    rose = None
    for window, count in enumerate(bounces):
        after = state.after(count, 64)
        assert 0 < after.value <= base
        assert abs(after.level - state.level) <= 1
        assert after.events - state.events == (after.level > state.level or count >= 4)
        if after.level < state.level:
            assert count <= 1, "up only when it was calm"
            assert rose is None or window - rose >= 4, "and only after several calm windows"
        if after.level != state.level or count > 1:
            rose = window
        state = after


@pytest.mark.parametrize("count", [0, 1, 2, 3, 4, 64])
def test_a_steady_number_of_bounces_settles_the_threshold(count):
    state, levels = policy.Threshold(0.8), []
    for _ in range(40):
        state = state.after(count, 64)
        levels.append(state.level)
    assert len(set(levels[-20:])) == 1, "no oscillation under a constant load"
    assert levels[-1] == (3 if count >= 4 else 0)
    assert state.value == pytest.approx(0.5 if count >= 4 else 0.8)


@given(st.integers(0, 64), st.floats(0, 1), st.integers(1, 64), st.integers(0, 10**5))
def test_windows_never_exceed_the_interval_nor_stop(steps, missed, interval, blocks):
    steps = min(steps, interval)
    window = policy.next_window(steps, missed, interval, blocks)
    assert 1 <= window <= interval
    assert window <= max(2 * steps, 1)
    if not missed and steps:
        assert window == min(2 * steps, interval)


@pytest.mark.parametrize(("blocks", "shortest"), [(1, 4), (900, 4), (4096, 8), (32768, 40)])
def test_windows_of_many_blocks_are_longer_because_deciding_takes_time(blocks, shortest):
    window = 64
    for _ in range(6):
        window = policy.next_window(window, 1.0, 64, blocks)
    assert window == shortest
    assert policy.next_window(1, 1.0, 64, blocks) == 2, "they grow to it after a prompt"


def test_a_decision_on_more_blocks_than_a_window_pays_for_waits_for_other_sequences():
    assert policy.pays(0, 54_900, 64), "64 steps pay for it: each window has one"
    many = 262_144  # 64 sequences of 32k tokens and 32 layers
    assert not policy.pays(294, many, 64) and policy.pays(295, many, 64)


def test_residents_yield_to_blocks_that_are_accessed():
    assert policy.resident_cap(1000, 10) == 50, "half of the arena"
    assert policy.resident_cap(1000, 10, used=800) == 20, "what the others leave"
    assert policy.resident_cap(1000, 10, used=5000) == 1, "the first block of each row"
    assert policy.resident_cap(6, 10, used=5000) == 0


def test_residents_leave_half_of_the_hot_arena():
    assert policy.resident_blocks(1024, 256, 1000, 1, 100) == 4
    assert policy.resident_blocks(1024, 256, 120, 30, 100) == 2
    assert policy.resident_blocks(1024, 256, 10, 30, 100) == 0
    assert policy.resident_blocks(1024, 256, 1000, 1, 3) == 3


@pytest.mark.parametrize("retention", [5000.0, 1e308, -5000.0])
def test_any_retention_gives_a_finite_worth_in_order(retention):
    blocks = many_blocks(np.random.default_rng(0), np.zeros(3, dtype=bool))
    blocks = replace(
        blocks, rate=np.array([0.0, 1.0, 2.0]), retention=np.array([retention, retention, 0.0])
    )
    with np.errstate(all="raise"):
        value = policy.worth(blocks)
    assert np.isfinite(value).all() and value[0] == 0
    assert (value[1] > value[2]) == (retention > 0)
