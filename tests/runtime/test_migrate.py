# SPDX-License-Identifier: Apache-2.0
"""Slabs, what one copy is, and that the directions take turns."""

from __future__ import annotations

import queue

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvpass.runtime import migrate
from kvpass.runtime.memory import DeviceMemory
from kvpass.runtime.migrate import Consumer
from kvpass.runtime.move import Move
from kvpass.runtime.pool import MAX_WASTE, Arena, Budget, slab_bytes

CPU = torch.device("cpu")


def arena(slots: int, size: int = 1024) -> Arena:
    return Arena(DeviceMemory(CPU), Budget(slots * size), size, slots * size)


def run(moves: list[Move]) -> None:
    inbox: queue.SimpleQueue[Move | None] = queue.SimpleQueue()
    for move in (*moves, None):
        inbox.put(move)
    consumer = Consumer(inbox, None)
    consumer.work()
    assert consumer.finished == len(moves)
    assert all(move.done() for move in moves)


@given(st.integers(1, 1 << 24), st.integers(7, 1 << 20))
def test_a_slab_is_whole_pages_filled_with_slots(page, slot):
    size = slab_bytes(page, slot)
    assert size % page == 0 and size >= slot
    least = -(-slot // page)
    fits = [n * page for n in range(least, max(least, 16) + 1)]
    wastes = [total % slot / total for total in fits]
    assert size % slot / size <= max(MAX_WASTE, min(wastes))


@given(st.lists(st.sampled_from(["take", "free"]), max_size=60), st.integers(1, 40))
def test_an_arena_hands_out_what_it_has_once(actions, capacity):
    budget = Budget(capacity * 256)
    pool = Arena(DeviceMemory(CPU), budget, 256, 1024)
    held = []
    for action in actions:
        if action == "take":
            room = pool.room()
            slot = pool.allocate()
            assert (slot is not None) == (room > 0)
            held += [slot] if slot is not None else []
        elif held:
            pool.free(held.pop(len(held) // 2))
        assert len({slot.address for slot in held}) == len(held)
        assert budget.used == len(held) * 256 <= budget.taken <= budget.capacity
        assert budget.taken == sum(slab.size for slab in pool.slabs)
        assert pool.free_slots == sum(len(slab.free) for slab in pool.slabs)


def test_a_budget_made_smaller_takes_slabs_back_as_they_empty():
    pool = arena(64)
    pool.slab_bytes = 4096
    slots = [pool.allocate() for _ in range(64)]
    pool.budget.capacity = 16 * 1024
    assert pool.allocate() is None and pool.budget.excess == 48 * 1024
    for slot in slots[:48]:
        pool.free(slot)
    assert pool.budget.excess == 0
    assert pool.budget.taken == 16 * 1024


class Pending:
    """An event of a stream that has not come so far."""

    passed = False

    def query(self) -> bool:
        return self.passed


def test_a_slab_in_use_by_a_stream_is_given_back_when_it_no_longer_is():
    """Also for another arena of the tier, whose blocks have another size."""
    budget = Budget(8 * 1024)
    small = Arena(DeviceMemory(CPU), budget, 1024, 1024)
    large = Arena(DeviceMemory(CPU), budget, 4096, 4096)
    slots = [small.allocate() for _ in range(8)]
    event = Pending()
    for slot in slots:
        slot.fences = [event]
        small.free(slot)
    assert budget.taken == 8 * 1024 and large.allocate() is None
    again = small.allocate()  # its slab is in use: it must not go with the others
    event.passed = True
    assert large.allocate() is not None
    assert budget.taken == 1024 + 1024 + 4096  # the slab in use, one in reserve, the large one
    assert again.raw.numel() == 1024


def test_neighbours_are_copied_as_one_piece(monkeypatch):
    """B56: 64 adjacent blocks of 32 layers take few copies; scattered ones arrive all the same."""
    calls = []
    copy = np.copyto
    monkeypatch.setattr(np, "copyto", lambda t, s: (calls.append(t.nbytes), copy(t, s)))
    source, target = arena(2048), arena(2048)
    for pool in (source, target):
        pool.budget.capacity *= 16  # slabs are at most a sixteenth
        pool.slab_bytes = 64 << 20
    pairs = [(source.allocate(), target.allocate()) for _ in range(2048)]
    for number, (one, other) in enumerate(pairs):
        one.raw.view(torch.int32).fill_(number)
        other.raw.fill_(0xEE)
    moves = [Move("store", None, one, other, []) for one, other in pairs]
    run(moves[::2] + moves[1::2])
    assert len(calls) <= 64
    assert sum(calls) == 2048 * 1024
    for number, (_, other) in enumerate(pairs):
        assert (other.raw.view(torch.int32) == number).all()


@given(st.permutations(range(12)), st.permutations(range(12)))
def test_scattered_blocks_arrive_where_they_belong(sources, targets):
    one, other = arena(12 * 16, 256), arena(12 * 16, 256)
    a = [one.allocate() for _ in range(12)]
    b = [other.allocate() for _ in range(12)]
    for number, slot in enumerate(a):
        slot.raw.fill_(number)
    run([Move("load", None, a[i], b[j], []) for i, j in zip(sources, targets, strict=True)])
    for i, j in zip(sources, targets, strict=True):
        assert (b[j].raw == i).all()


def test_a_cancelled_copy_writes_nothing_and_its_neighbours_arrive():
    one, other = arena(16), arena(16)
    pairs = [(one.allocate(), other.allocate()) for _ in range(5)]
    for source, target in pairs:
        source.raw.fill_(1)
        target.raw.fill_(7)
    moves = [Move("store", None, source, target, []) for source, target in pairs]
    moves[2].cancel()
    run(moves)
    assert [int(target.raw[0]) for _, target in pairs] == [1, 1, 7, 1, 1]
    assert [move.cancelled for move in moves] == [False, False, True, False, False]


def test_a_piece_holds_no_other_flows_copies():
    one, other = arena(16), arena(16)
    moves = [Move("store", None, one.allocate(), other.allocate(), [], i % 2) for i in range(6)]
    inbox: queue.SimpleQueue[Move | None] = queue.SimpleQueue()
    for move in (*moves, None):
        inbox.put(move)
    consumer = Consumer(inbox, None)
    consumer._receive()
    assert consumer._next_piece() == moves[::2]
    assert consumer._next_piece() == moves[1::2]


def test_copies_of_two_caches_share_the_link_by_weight(monkeypatch):
    monkeypatch.setattr(migrate, "PIECE_BYTES", 1024)
    one, other = arena(128), arena(128)
    order: list[str] = []
    inbox: queue.SimpleQueue[Move | None] = queue.SimpleQueue()
    for name, weight in (("low", 0.1), ("high", 0.9)):
        for _ in range(20):
            one.allocate()  # no neighbours: one copy a piece
            source, target = one.allocate(), other.allocate()
            inbox.put(Move("load", None, source, target, [], name, weight))
    consumer = Consumer(inbox, None)
    consumer._receive()
    while piece := consumer._next_piece():
        order += [move.flow for move in piece]
    assert len(order) == 40 and order[:20].count("high") in (17, 18, 19)


@pytest.mark.parametrize("kind", ["store", "load"])
def test_both_directions_take_turns(kind):
    one, other = arena(64), arena(64)
    flood = [Move(kind, None, one.allocate(), other.allocate(), []) for _ in range(9)]
    reverse = "load" if kind == "store" else "store"
    single = Move(reverse, None, other.allocate(), one.allocate(), [])
    inbox: queue.SimpleQueue[Move | None] = queue.SimpleQueue()
    for move in (*flood, single):
        inbox.put(move)
    consumer = Consumer(inbox, None)
    consumer._receive()
    first = [consumer._next_piece()[0] for _ in range(2)]
    assert single in first
