# SPDX-License-Identifier: Apache-2.0
"""Steps begun by hand, on the CPU: what joins them, what they refuse, and what stays afterwards.

How replays of captured graphs are checked on the device: ``tests/triton_ops/test_tickets.py``, and
``tests/gpu/test_begin_step.py`` with real graphs.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import threading

import pytest
import torch

import kvpass
import triton_ops
from kvpass.errors import CacheStateError, CapacityError, OutOfMemoryError, UnsupportedError
from kvpass.runtime import manager as manager_module
from kvpass.runtime.geometry import BlockGeometry
from kvpass.runtime.guard import StepGuard
from kvpass.runtime.manager import Manager
from kvpass.runtime.table import tables_for
from tests.models import OPTIONS, compile_with, prompt, tiered, tiny
from triton_ops.tickets import UNCHECKED


@pytest.fixture(scope="module")
def model():
    made = tiny("llama")
    compile_with(made, inner="aot_eager")
    yield made
    torch._dynamo.reset()


@pytest.fixture(scope="module")
def plain():
    return tiny("llama")


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


def steps(model, cache, ids, *, by_hand: bool, first: int = 20):
    """Logits of the prompt, then of each token alone."""
    outs = [model(ids[:, :first], past_key_values=cache).logits[:, -1:]]
    for i in range(first, ids.shape[1]):
        if by_hand:
            with cache.begin_step(1):
                outs.append(model(ids[:, i : i + 1], past_key_values=cache).logits)
        else:
            outs.append(model(ids[:, i : i + 1], past_key_values=cache).logits)
        assert cache.get_seq_length() == i + 1
    return torch.cat(outs, 1)


def test_calls_inside_steps_give_what_they_give_outside(model, plain):
    ids, _ = prompt(2, 90)
    got = steps(model, tiered(model), ids, by_hand=True)
    assert torch.equal(got, steps(model, tiered(model), ids, by_hand=False))
    torch.testing.assert_close(got, plain(ids).logits[:, 19:], rtol=1e-4, atol=1e-4)


def test_steps_of_several_tokens_and_steps_of_both_kinds(model, plain):
    ids, _ = prompt(1, 60)
    cache = tiered(model)
    outs = [model(ids[:, :20], past_key_values=cache).logits]
    with cache.begin_step(7) as step:
        assert not step.done
        outs.append(model(ids[:, 20:27], past_key_values=cache).logits)
    assert step.done
    outs.append(model(ids[:, 27:28], past_key_values=cache).logits)
    step = cache.begin_step(32)
    outs.append(model(ids[:, 28:], past_key_values=cache).logits)
    step.end()
    step.end()
    step.cancel()
    assert cache.get_seq_length() == 60
    torch.testing.assert_close(torch.cat(outs, 1), plain(ids).logits, rtol=1e-4, atol=1e-4)


def test_uncompiled_models_join_too(plain):
    ids, _ = prompt(1, 30)
    cache = tiered(plain)
    with pytest.warns(UserWarning, match="outside a graph"):
        got = steps(plain, cache, ids, by_hand=True)
    torch.testing.assert_close(got, plain(ids).logits[:, 19:], rtol=1e-4, atol=1e-4)


@pytest.fixture
def started(model):
    """A cache of 20 tokens, and the ids of the next ones."""
    ids, _ = prompt(1, 60)
    cache = tiered(model)
    model(ids[:, :20], past_key_values=cache)
    return cache, ids


def test_a_step_that_appends_nothing_is_refused(model, plain, started):
    cache, ids = started
    with (
        pytest.raises(CacheStateError, match=r"got no new keys and values in layer 0"),
        cache.begin_step(1),
    ):
        pass
    assert cache.get_seq_length() == 20
    got = model(ids[:, 20:], past_key_values=cache).logits  # nothing was lost
    torch.testing.assert_close(got, plain(ids).logits[:, 20:], rtol=1e-4, atol=1e-4)


def test_a_step_is_cancelled_by_an_error_and_by_hand(model, plain, started):
    cache, ids = started
    held = cache.snapshot()
    with pytest.raises(ZeroDivisionError), cache.begin_step(40):
        1 / 0  # noqa: B018
    with cache.begin_step(40) as step:
        model(ids[:, 20:], past_key_values=cache)
        step.cancel()
    assert cache.get_seq_length() == 20
    now = cache.snapshot()
    assert (now.kv_bytes, now.hot_used, now.cold_used) == (
        held.kv_bytes,
        held.hot_used,
        held.cold_used,
    )
    got = model(ids[:, 20:], past_key_values=cache).logits
    torch.testing.assert_close(got, plain(ids).logits[:, 20:], rtol=1e-4, atol=1e-4)


def test_other_tokens_than_were_begun(model, started):
    cache, ids = started
    with (
        pytest.raises(CacheStateError, match=r"begun for 1 tokens, the model appends 2: begin_st"),
        cache.begin_step(1),
    ):
        model(ids[:, 20:22], past_key_values=cache)
    assert cache.get_seq_length() == 20


def test_two_calls_in_one_step(model, started):
    cache, ids = started
    with (
        pytest.raises(CacheStateError, match="layer 0 got its tokens of this step already"),
        cache.begin_step(1),
    ):
        model(ids[:, 20:21], past_key_values=cache)
        model(ids[:, 21:22], past_key_values=cache)
    assert cache.get_seq_length() == 20


def test_an_error_that_is_caught_still_ends_the_step(model, started):
    cache, ids = started
    with (
        pytest.raises(CacheStateError, match="got no new keys and values"),
        cache.begin_step(1),
        contextlib.suppress(CacheStateError),
    ):
        model(ids[:, 20:22], past_key_values=cache)
    model(ids[:, 20:21], past_key_values=cache)
    assert cache.get_seq_length() == 21


def test_steps_do_not_nest_and_changes_wait(started):
    cache, _ = started
    step = cache.begin_step(1)
    with pytest.raises(CacheStateError, match=r"the last step has not ended: write `with cache.be"):
        cache.begin_step(1)
    with pytest.raises(CacheStateError, match="in a step"):
        cache.truncate(3)
    with pytest.raises(CacheStateError, match="in a step"):
        copy.deepcopy(cache)
    step.cancel()
    cache.truncate(3)
    assert cache.get_seq_length() == 3


def test_a_step_belongs_to_its_thread(model, started):
    cache, ids = started
    caught = []

    def other():
        try:
            with torch.no_grad():
                model(ids[:, 20:21], past_key_values=cache)
        except BaseException as error:
            caught.append(error)

    with cache.begin_step(1) as step:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        step.cancel()
    assert isinstance(caught[0], CacheStateError) and "one thread" in str(caught[0])
    assert cache.get_seq_length() == 20


def test_a_step_that_nobody_holds_is_cancelled(model, plain, started):
    cache, ids = started
    cache.begin_step(40)  # not kept
    with cache.begin_step(1):
        model(ids[:, 20:21], past_key_values=cache)
    step = cache.begin_step(1)
    del step
    got = model(ids[:, 21:], past_key_values=cache).logits
    torch.testing.assert_close(got, plain(ids).logits[:, 21:], rtol=1e-4, atol=1e-4)
    assert cache.get_seq_length() == 60


@pytest.mark.parametrize("kept", [False, True])
def test_a_cache_with_an_open_step_is_freed(model, kept):
    ids, _ = prompt(1, 20)
    manager = Manager(device="cpu", **OPTIONS)
    steps_ = []
    for _ in range(3):
        cache = kvpass.TieredCache(model.config, 100, manager=manager)
        model(ids, past_key_values=cache)
        step = cache.begin_step(1)
        if kept:
            steps_.append(step)
        del cache, step
    steps_.clear()
    gc.collect()
    last = kvpass.TieredCache(model.config, 100, manager=manager)
    model(ids, past_key_values=last)
    assert manager.snapshot().sequences == 1
    assert manager.snapshot().kv_bytes == last.snapshot().kv_bytes > 0


def test_reset_in_a_step_leaves_an_empty_cache(model, started):
    cache, ids = started
    with cache.begin_step(1):
        model(ids[:, 20:21], past_key_values=cache)
        cache.reset()
    assert cache.get_seq_length() == 0
    with pytest.raises(CacheStateError, match="run the prompt"):
        cache.begin_step(1)
    model(ids[:, :20], past_key_values=cache)
    assert cache.get_seq_length() == 20


def test_before_the_prompt(model):
    with pytest.raises(CacheStateError, match="before anything was stored: run the prompt"):
        tiered(model).begin_step(1)
    tiered(model).check_steps()


@pytest.mark.parametrize("tokens", [0, -1, True, 1.0, "1", None])
def test_tokens_are_a_positive_integer(started, tokens):
    with pytest.raises(CapacityError, match="give the number of new tokens, 1 or more"):
        started[0].begin_step(tokens)


def test_no_room_for_the_tokens(model, started):
    cache, _ = started
    with pytest.raises(CapacityError, match=r"20 tokens stored \+ 381 new > max_tokens=400"):
        cache.begin_step(381)
    small = tiered(model, hot="48KiB", cold="48KiB")
    ids, _ = prompt(1, 20)
    model(ids, past_key_values=small)
    with pytest.raises(OutOfMemoryError):
        small.begin_step(300)
    model(ids[:, :5], past_key_values=small)
    assert small.get_seq_length() == 25


def test_a_capture_by_hand_must_not_repeat_a_length(model, started, monkeypatch):
    cache, ids = started
    from kvpass.step import graph

    monkeypatch.setattr(graph, "is_capturing", lambda device: True)
    with (
        pytest.raises(UnsupportedError, match=r"repeat this one's length .*position_ids="),
        cache.begin_step(1),
    ):
        model(ids[:, 20:21], past_key_values=cache)
    at = torch.tensor([[20]])
    with cache.begin_step(1):
        model(ids[:, 20:21], past_key_values=cache, position_ids=at)
    assert cache.get_seq_length() == 21
    with cache.begin_step(3):
        at = torch.tensor([[21, 22, 23]])
        model(ids[:, 21:24], past_key_values=cache, position_ids=at)
    assert cache.get_seq_length() == 24


def test_steps_of_several_tokens_are_captured_where_their_number_is_a_constant(monkeypatch):
    from kvpass.step import graph

    ids, _ = prompt(1, 30)
    model = tiny("llama")
    compile_with(model)
    cache = tiered(model)
    model(ids[:, :20], past_key_values=cache)
    monkeypatch.setattr(graph, "is_capturing", lambda device: True)
    for at in (20, 23):  # only the past differs, so the graph holds the number 3
        with cache.begin_step(3):
            places = torch.arange(at, at + 3)[None]
            got = model(ids[:, at : at + 3], past_key_values=cache, position_ids=places).logits
        want = tiny("llama")(ids[:, : at + 3]).logits[:, at:]
        torch.testing.assert_close(got, want, rtol=2e-3, atol=2e-3)


def test_a_length_that_is_a_constant_of_the_graph_is_not_captured(monkeypatch):
    from kvpass.step import graph

    ids, _ = prompt(1, 30)
    model = tiny("llama")
    compile_with(model)
    cache = tiered(model)
    model(ids[:, :3], past_key_values=cache)
    cache.truncate(0)
    monkeypatch.setattr(graph, "is_capturing", lambda device: True)
    at = torch.tensor([[0]])
    with (
        pytest.raises(UnsupportedError, match="compiled for one length of the sequence alone"),
        cache.begin_step(1),
    ):
        model(ids[:, :1], past_key_values=cache, position_ids=at)


def test_a_cache_that_the_graph_returns_cannot_be_captured_by_hand(monkeypatch):
    from kvpass.step import graph

    model = tiny("llama")
    compile_with(model)
    ids, _ = prompt(1, 30)
    past = model(ids[:, :20]).past_key_values
    past = model(ids[:, 20:21], past_key_values=past).past_key_values
    monkeypatch.setattr(graph, "is_capturing", lambda device: True)
    with pytest.raises(UnsupportedError, match="pass a kvpass.TieredCache, and capture inside"):
        model(ids[:, 21:22], past_key_values=past)


# ------------------------------------------------------- the guard, with kernels interpreted


@pytest.fixture
def guarded():
    """A manager, and a batch of one layer whose rows are checked."""
    manager = Manager(device="cpu", **OPTIONS)
    batch = manager.new_batch(2, 1, 100)
    batch.define(0, BlockGeometry(2, 16, 16, torch.float32, 32))
    with manager.step(batch, 5, [0]):
        pass
    batch.guard = StepGuard(batch)
    yield manager, batch
    manager.release(batch)


def append(batch, tokens: int = 1) -> None:
    tables = tables_for(batch.device)
    new = torch.randn(2, 2, tokens, 16)
    # The words that kernels read are on the device; here they are those of the host.
    triton_ops.append(new, new, batch.rows[0], tables.base, tables.length, 32, tables.tickets)


def test_every_step_gives_tickets(guarded):
    manager, batch = guarded
    for tokens in (1, 3, 1):
        with manager.step(batch, tokens, [0]):
            append(batch, tokens)
        batch.guard.check(wait=True)
    assert batch.lengths == [10]
    assert batch.tables.tickets.due[batch.rows[0]].tolist() == [0, 0]


def test_a_replay_outside_a_step_is_noticed_by_the_next_ones(guarded):
    manager, batch = guarded
    with manager.step(batch, 1, [0]):
        append(batch)
    before = batch.blocks[0][0][0].k.view(torch.int32).clone()  # NaN equals nothing
    append(batch)
    assert torch.equal(batch.blocks[0][0][0].k.view(torch.int32), before)
    with manager.step(batch, 1, [0]):  # is begun before what happened is known
        append(batch)
    for _ in range(2):
        with (
            pytest.raises(CacheStateError, match=r"reserved for it, and wrote nothing.*reset\(\)"),
            manager.step(batch, 1, [0]),
        ):
            pass
    assert batch.lengths == [7] and batch.active is None


def test_a_step_without_a_replay_is_noticed(guarded):
    manager, batch = guarded
    with manager.step(batch, 1, [0]):
        pass
    with pytest.raises(CacheStateError, match="a step that was begun appended nothing"):
        batch.guard.check(wait=True)
    with pytest.raises(CacheStateError, match="appended nothing"):
        manager.begin(batch, 1, [0])


def test_a_step_that_failed_leaves_no_ticket(guarded):
    manager, batch = guarded
    with pytest.raises(ZeroDivisionError), manager.step(batch, 1, [0]):
        1 / 0  # noqa: B018
    batch.guard.check(wait=True)
    before = batch.blocks[0][0][0].k.view(torch.int32).clone()  # NaN equals nothing
    append(batch)
    assert torch.equal(batch.blocks[0][0][0].k.view(torch.int32), before)
    with pytest.raises(CacheStateError, match="reserved for it"):
        batch.guard.check(wait=True)


def test_rows_of_a_released_batch_are_nobodys(guarded):
    manager, batch = guarded
    rows, ids = batch.rows, batch.rows_of([0])
    with manager.step(batch, 1, [0]):
        pass
    tickets = tables_for(batch.device).tickets
    manager.release(batch)
    assert tickets.due[ids].tolist() == [0, 0], "a replay finds no ticket"
    others = [manager.new_batch(2, 1, 100)]
    assert rows.eq(-1).all(), "nobody has its rows before"
    while not set(ids) & set(others[-1].rows_of([0])):
        others.append(manager.new_batch(1, 1, 100))
    assert tickets.due[ids[0]] == UNCHECKED and tickets.fault[ids].tolist() == [0, 0]
    new = torch.randn(2, 2, 1, 16)
    tables = tables_for(batch.device)
    triton_ops.append(new, new, rows[0], tables.base, tables.length, 32, tickets)
    assert tickets.due[ids[0]] == UNCHECKED
    for other in others:
        assert other.guard is None
        manager.release(other)


def test_rows_of_a_manager_that_is_gone_are_handed_on_the_same_way(guarded):
    manager, batch = guarded
    rows = batch.rows[0]
    manager_module._close([batch])
    assert not rows.eq(-1).any(), "a finalizer does nothing on the device"
    manager.release(manager.new_batch(1, 1, 100))
    assert rows.eq(-1).all()


def test_a_fork_is_not_checked_until_it_is_asked_for(guarded):
    manager, batch = guarded
    with manager.step(batch, 1, [0]):
        append(batch)
    fork = manager.fork(batch, [1, 0])
    with manager.step(fork, 1, [0]):
        append(fork)
    assert fork.lengths == [7]
    assert fork.guard is None
    manager.release(fork)
