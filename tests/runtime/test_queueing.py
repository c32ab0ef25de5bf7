# SPDX-License-Identifier: Apache-2.0
"""Fair order of copies: shares follow weights, order within a flow stays, idling earns nothing."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from kvpass.runtime.queueing import FairQueue

Item = tuple[str, int]


def serve(waiting: FairQueue[Item]) -> Item:
    head = waiting.heads()[0]
    waiting.take(head[0], [head])
    return head


@given(st.dictionaries(st.sampled_from("abcde"), st.integers(1, 9), min_size=2), st.integers(1, 64))
def test_shares_of_busy_flows_follow_their_weights(weights, size):
    """No flow is ever more than one item a flow ahead of its share (Golestani 1994)."""
    waiting: FairQueue[Item] = FairQueue()
    for flow, weight in weights.items():
        for number in range(300):
            waiting.push((flow, number), flow, size, weight)
    served: Counter[str] = Counter()
    for turn in range(1, 201):
        flow, number = serve(waiting)
        assert number == served[flow], "in order within a flow"
        served[flow] += 1
        for each, weight in weights.items():
            due = turn * weight / sum(weights.values())
            assert abs(served[each] - due) <= len(weights) + 1


def test_idling_earns_no_credit():
    waiting: FairQueue[Item] = FairQueue()
    for number in range(100):
        waiting.push(("busy", number), "busy", 1, 1)
    assert {serve(waiting)[0] for _ in range(50)} == {"busy"}
    for number in range(50):
        waiting.push(("late", number), "late", 1, 1)
    assert 19 <= [serve(waiting)[0] for _ in range(40)].count("late") <= 21


def test_a_flood_does_not_starve_one_of_little_weight():
    waiting: FairQueue[Item] = FairQueue()
    waiting.push(("small", 0), "small", 1, 0.01)
    for number in range(1000):
        waiting.push(("flood", number), "flood", 1, 1)
    order = [serve(waiting)[0] for _ in range(1001)]
    assert 90 <= order.index("small") <= 110  # a hundred times the weight: after a hundred


@given(st.lists(st.tuples(st.sampled_from("ab"), st.booleans()), max_size=60))
def test_each_item_is_served_once(actions):
    waiting: FairQueue[Item] = FairQueue()
    pushed: list[Item] = []
    served: list[Item] = []
    for number, (flow, push) in enumerate(actions):
        if push:
            pushed.append((flow, number))
            waiting.push(pushed[-1], flow, 1, 1)
        elif len(waiting):
            served.append(serve(waiting))
        assert len(waiting) == len(pushed) - len(served)
    served += [serve(waiting) for _ in range(len(waiting))]
    assert sorted(served) == sorted(pushed)


def test_an_idle_queue_forgets_its_flows():
    waiting: FairQueue[Item] = FairQueue()
    for number in range(5):
        waiting.push(("a", number), "a", 1e9, 0.01)
    for _ in range(5):
        serve(waiting)
    assert (waiting._last, waiting._virtual) == ({}, 0.0)
