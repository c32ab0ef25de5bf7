# SPDX-License-Identifier: Apache-2.0
"""Weights, shares of the hot arena, and the blocks beyond them: pure functions."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpass.config import FairnessConfig
from kvpass.runtime.policy import BlockArrays, demand, fair_shares, over_share
from kvpass.runtime.service import BEATEN, MIN_QOS, MIN_WEIGHT, Service, next_qos, weight

sequences = st.lists(st.tuples(st.floats(0.01, 1), st.integers(0, 50)), min_size=1, max_size=8)


@given(sequences, st.integers(0, 120))
def test_shares_are_max_min_fair(given_sequences, slots):
    weights, demand = (np.array(x, dtype=float) for x in zip(*given_sequences, strict=True))
    shares = fair_shares(weights, demand, slots)
    assert (shares <= demand + 1e-9).all() and (shares >= 0).all()
    assert shares.sum() == pytest.approx(min(slots, demand.sum()))
    # Whoever wants more than it got has as many slots a weight as anybody has, or more.
    level = shares / weights
    for i in np.flatnonzero(shares < demand - 1e-6):
        assert level[i] >= level.max() - 1e-6 * max(level.max(), 1)


def test_shares_by_hand():
    weights, demand = np.array([0.9, 0.1, 0.5]), np.array([100.0, 100.0, 10.0])
    assert fair_shares(weights, demand, 110).tolist() == pytest.approx([90, 10, 10])
    assert fair_shares(weights, demand, 15).tolist() == pytest.approx([9, 1, 5])
    assert fair_shares(weights, np.array([1.0, 2.0, 3.0]), 100).tolist() == [1, 2, 3]


def blocks_of(rate, resident=None) -> BlockArrays:
    count = len(rate)
    return BlockArrays(
        frequency=np.array(rate, dtype=float),
        heat=np.zeros(count, np.uint8),
        index=np.arange(count),
        resident=np.zeros(count, bool) if resident is None else np.array(resident, dtype=bool),
        movable=np.ones(count, bool),
    )


def test_demand_counts_what_there_is_a_use_for():
    blocks = blocks_of([np.nan, 5, 1, 0, 2, 0], [0, 0, 0, 1, 0, 0])
    assert demand(blocks, np.array([0, 0, 0, 0, 2, 2]), 3, 2.0).tolist() == [3, 0, 1]


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.booleans(), st.integers(0, 9), st.booleans()),
        min_size=1,
        max_size=40,
    ),
    st.lists(st.floats(0, 20), min_size=4, max_size=4),
)
def test_blocks_beyond_a_share(given_blocks, shares):
    sequence, hot, rate, resident = (np.array(x) for x in zip(*given_blocks, strict=True))
    over = over_share(blocks_of(rate, resident), sequence, hot, np.array(shares))
    for s in range(4):
        mine = np.flatnonzero(sequence == s)
        ranked = sorted(mine, key=lambda i: (not hot[i], not resident[i], -rate[i], i))
        within = [i for i in ranked if over[i] == 0]
        assert ranked[: len(within)] == within, "the warmest hot ones are within the share"
        assert len(within) == min(len(ranked), int(shares[s]))
        assert (np.diff(over[ranked]) >= 0).all()


def test_giving_up_what_is_furthest_beyond_leaves_shares():
    """30 and 30 hot blocks, shares 30 and 10 of 40: all 20 to go are of the second sequence."""
    sequence = np.repeat([0, 1], 30)
    shares = fair_shares(np.array([0.9, 0.3]), np.array([30.0, 30.0]), 40)
    over = over_share(blocks_of([5.0] * 60), sequence, np.ones(60, bool), shares)
    gone = np.argsort(-over, kind="stable")[:20]
    assert (sequence[gone] == 1).all()


def test_the_weight_of_the_description():
    assert weight(0.9, 1.0, 0.5, 0.7, 0.3) == pytest.approx(0.7 * 0.9 + 0.3 * 0.5)
    assert weight(0.9, 2.0, 1.0, 0.7, 0.3) == pytest.approx(0.7 * 0.45 + 0.3)
    assert weight(0.9, 99.0, 1.0, 0.7, 0.3) == weight(0.9, 2.0, 1.0, 0.7, 0.3)
    assert weight(0.0, 1.0, 0.0, 0.7, 0.3) == MIN_WEIGHT
    assert weight(0.4, 1.0, 0.1, 1.0, 0.0) == pytest.approx(0.4)
    assert weight(0.4, 1.0, 0.1, 0.0, 0.5) == pytest.approx(0.1)


@given(st.floats(0, 1), st.floats(0.01, 100))
def test_quality_of_service_follows_the_target(qos, latency):
    after = next_qos(qos, latency)
    assert MIN_QOS <= after <= 1
    if latency > 1:
        assert after >= max(qos, MIN_QOS)
    elif latency < BEATEN:
        assert after <= max(qos, MIN_QOS)


def test_a_missed_target_raises_the_weight_until_it_is_met():
    service = Service(FairnessConfig(latency_target="10ms"))
    now, step = 0.0, 0.018
    before = service.weight
    for _ in range(60):
        for _ in range(64):
            service.step(now, 1)
            now += step
        service.window(1.0)
        if service.weight > before + 0.02:  # more of the arena makes it faster
            step, before = max(step - 0.002, 0.009), service.weight
    assert service.qos > 0.55
    assert service.seconds == pytest.approx(0.009, rel=0.01)
    qos = service.qos
    service.step(now, 1)
    service.window(1.0)
    assert service.qos == qos, "between beaten and missed nothing changes"


def test_prompts_are_not_measured():
    service = Service(FairnessConfig(latency_target="10ms"))
    service.step(0.0, 1)
    service.step(0.01, 512)
    service.step(5.0, 1)
    service.step(5.01, 1)
    assert service.seconds == pytest.approx(0.01)
