# SPDX-License-Identifier: Apache-2.0
"""Blocks keep their bytes wherever they lie and whenever they move; slots never leak."""

from __future__ import annotations

import gc
import os
import random
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kvpass
from kvpass.errors import (
    CacheStateError,
    CapacityError,
    KVPassWarning,
    OutOfMemoryError,
    ShapeError,
)
from kvpass.runtime import policy
from kvpass.runtime.batch import Batch
from kvpass.runtime.geometry import BlockGeometry
from kvpass.runtime.manager import Manager
from tests.runtime.harness import BLOCK, Driver

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def _free_rows(manager: Manager) -> int:
    manager.tables.take(0)  # fetches what finalizers have returned
    return len(manager.tables._free)


def scramble(seed: int):
    """Before every step, move about half of the blocks somewhere else."""
    rng = random.Random(seed)

    def before_step(manager: Manager, batch: Batch) -> None:
        manager.place(batch, lambda layer, sequence, index: rng.random() < 0.5)

    return before_step


@pytest.mark.parametrize("dtype", DTYPES)
@given(
    steps=st.lists(st.sampled_from([1, 2, 31, 32, 33, 70]), min_size=1, max_size=8),
    hot_blocks=st.integers(0, 9),
    size=st.integers(1, 3),
    width=st.sampled_from([16, 33, 40]),
    width_v=st.sampled_from([16, 24]),
)
def test_what_is_appended_is_what_is_stored_and_attended(
    dtype, steps, hot_blocks, size, width, width_v
):
    geometry = BlockGeometry(2, width, width_v, dtype, BLOCK)
    hot = max(1, hot_blocks * geometry.block_bytes)
    driver = Driver(size=size, width=width, width_v=width_v, dtype=dtype, hot=hot)
    for step in steps:
        queries = driver.random(step, 6, width)
        out = driver.append(step, queries)
        for layer in driver.layers:
            expected = driver.attention(queries, layer)
            error = (out[layer] - expected).abs().max().item()
            assert error <= TOLERANCE[dtype]
            assert out[layer].dtype == dtype
    driver.check()


@pytest.mark.parametrize("dtype", DTYPES)
def test_placement_and_timing_change_no_bit(dtype):
    """Invariant 1: all hot, all cold, random places, and moves forced at every step."""

    def decode(place=None, before_step=None, hot="1MiB") -> list[bytes]:
        torch.manual_seed(7)
        driver = Driver(size=2, dtype=dtype, hot=hot)
        driver.append(150)
        if place is not None:
            driver.manager.place(driver.batch, place)
        driver.manager.before_step = before_step
        outputs = [x for _ in range(70) for x in driver.append(1)] + driver.append(9)
        driver.check()
        return [x.contiguous().view(torch.uint8).numpy().tobytes() for x in outputs]

    hot = decode()
    assert decode(lambda *_: False) == hot
    assert decode(lambda *_: False, hot=1) == hot
    rng = random.Random(3)
    assert decode(lambda *_: rng.random() < 0.4) == hot
    assert decode(before_step=scramble(1)) == hot
    assert decode(before_step=scramble(2), hot=12 * 8192) == hot


def test_bits_do_change_when_the_arithmetic_does():
    """The comparison above can fail."""
    torch.manual_seed(7)
    one = Driver().append(1)[0]
    torch.manual_seed(8)
    assert not torch.equal(one, Driver().append(1)[0])


def test_write_through_happens_once_beside_the_steps():
    driver = Driver(size=2)
    driver.append(3 * BLOCK)
    driver.manager.settle()
    counters = driver.manager.counters
    assert counters.stored_blocks == 2 * 2 * 3
    assert counters.stored_bytes == 12 * driver.geometry.payload_bytes
    driver.manager.place(driver.batch, lambda *_: False)
    assert counters.demoted_blocks == 12
    driver.manager.place(driver.batch, lambda *_: True)
    driver.manager.place(driver.batch, lambda *_: False)
    assert counters.loaded_blocks == 12
    assert counters.stored_blocks == 12, "a block that was written through is never written again"
    driver.check()


def test_a_copy_that_fails_is_counted_and_tried_again(monkeypatch):
    driver = Driver(layers=1)

    def broken(*arguments):
        raise OSError("bus error")

    with monkeypatch.context() as patch:
        patch.setattr("kvpass.runtime.move.np.copyto", broken)
        driver.append(BLOCK)
        for move in list(driver.manager.mover._moves):
            move.wait()
        driver.manager.mover.collect()
    counters = driver.manager.counters
    assert (counters.failed_moves, counters.stored_blocks) == (1, 0)
    driver.check()
    driver.append(1)
    driver.manager.settle()
    assert (counters.failed_moves, counters.stored_blocks) == (1, 1)
    driver.manager.place(driver.batch, lambda *_: False)
    driver.check()


def test_demotion_starts_above_the_threshold_and_needs_rare_access():
    """Both conditions of the description: use above gpu_threshold, and below min_frequency."""
    size = BlockGeometry(2, 16, 16, torch.float32, BLOCK).block_bytes
    options = {"hot": 20 * size, "gpu_threshold": 0.5, "resident_tokens": 0, "heat_interval": 4}
    driver = Driver(layers=1, min_frequency=100, **options)
    for _ in range(9 * BLOCK):
        driver.append(1)
    driver.manager.settle()
    assert driver.manager.counters.demoted_blocks == 0, "9 of 20 slots are under the threshold"
    for _ in range(6 * BLOCK):
        driver.append(1)
    driver.manager.settle()
    assert driver.manager.counters.demoted_blocks > 0
    assert driver.manager.tiers.hot.used <= 0.5 * 20 * size + size
    often = Driver(layers=1, min_frequency=0, **options)
    for _ in range(15 * BLOCK):
        often.append(1)
    assert often.manager.counters.demoted_blocks == 0, "nothing is accessed less than 0 times"


def test_accessed_blocks_are_promoted():
    """Promotion follows heat: keys that the query meets are brought in."""
    size = BlockGeometry(2, 16, 16, torch.float32, BLOCK).block_bytes
    driver = Driver(layers=1, hot=4 * size, resident_tokens=0, heat_interval=8, min_frequency=2.0)
    g = driver.geometry
    wanted = 2
    for block in range(8):
        with driver.manager.step(driver.batch, BLOCK, [0]) as rows:
            k = torch.full((1, g.kv_heads, BLOCK, 16), 1.0 if block == wanted else -1.0)
            torch.ops.kvpass.append(k, k, rows, 0, BLOCK)
    driver.manager.settle()
    driver.manager.place(driver.batch, lambda *_: False)
    assert driver.batch.blocks[0][0][wanted].hot is None
    for _ in range(20):
        with driver.manager.step(driver.batch, 1, [0]) as rows:
            q = torch.full((1, 2, 1, 16), 5.0)
            k = torch.full((1, g.kv_heads, 1, 16), -1.0)
            token = torch.ops.kvpass.append(k, k, rows, 0, BLOCK)
            torch.ops.kvpass.attend(q, k, k, token, rows, 0, BLOCK, 1.0, True, None, None)
        driver.manager.settle()
    assert driver.batch.blocks[0][0][wanted].hot is not None
    assert driver.batch.blocks[0][0][wanted].heat > 0
    assert driver.batch.blocks[0][0][wanted + 1].hot is None
    assert driver.manager.counters.loaded_blocks >= 1


def test_layers_of_higher_retention_stay_longer():
    """Under pressure the blocks of the layer with less retention give up their slots."""
    size = BlockGeometry(2, 16, 16, torch.float32, BLOCK).block_bytes
    shares = []
    for retention in ([3.0, -3.0], [-3.0, 3.0]):
        torch.manual_seed(0)
        driver = Driver(hot=14 * size, resident_tokens=0, resident_ratio=0, heat_interval=8)
        driver.batch.retain(list(retention))
        driver.append(9 * BLOCK + 3)
        driver.manager.settle()
        for _ in range(40):
            driver.append(1)
            driver.manager.settle()
        shares.append([sum(b.hot is not None for b in row[0]) for row in driver.batch.blocks])
    assert shares[0][0] > shares[0][1] + 2
    assert shares[1][1] > shares[1][0] + 2


def test_blocks_that_bounce_lower_the_threshold_and_calm_raises_it():
    size = BlockGeometry(2, 16, 16, torch.float32, BLOCK).block_bytes
    driver = Driver(layers=1, hot=8 * size, heat_interval=4, resident_tokens=0)
    driver.append(8 * BLOCK)
    driver.manager.settle()
    assert driver.manager.snapshot().threshold == 0.8
    rng = random.Random(0)
    for _ in range(12):
        driver.manager.place(driver.batch, lambda *_: rng.random() < 0.3)
        for _ in range(4):
            driver.append(1)
            driver.manager.settle()
    snapshot = driver.manager.snapshot()
    assert snapshot.counters.thrash_events > 0
    assert snapshot.threshold < 0.8
    for _ in range(4 * 16):  # every block is met alike, so none is worth a move
        driver.append(1, torch.zeros(1, 6, 1, 16))
        driver.manager.settle()
    assert driver.manager.snapshot().threshold == 0.8
    driver.check()


def test_both_tiers_full_is_a_typed_error_and_the_cache_goes_on():
    size = BlockGeometry(2, 16, 16, torch.float32, BLOCK).block_bytes
    driver = Driver(layers=1, hot=2 * size, cold=3 * size)
    driver.append(3 * BLOCK)
    with pytest.raises(OutOfMemoryError, match="raise hot or cold"):
        driver.append(10 * BLOCK)
    driver.check()
    assert driver.batch.lengths == [3 * BLOCK]
    driver.append(1)
    driver.check()


def test_a_slot_that_a_copy_holds_is_waited_for():
    """Both tiers full, and the only block that may leave is still on its way in."""

    class LateCopies:
        def submit(self, move):
            self.timer = threading.Timer(0.05, move.run)
            self.timer.start()
            return True

        def depth(self):
            return 0

    size = BlockGeometry(2, 16, 16, torch.float32, BLOCK).block_bytes
    driver = Driver(layers=1, hot=2 * size, cold=size, resident_tokens=0, min_frequency=10**6)
    driver.append(BLOCK)
    driver.manager.settle()
    driver.manager.place(driver.batch, lambda *_: False)
    driver.append(1)
    driver.manager.settle()
    first = driver.batch.blocks[0][0][0]
    driver.manager.mover.copier = LateCopies()
    assert driver.manager.mover.promote(first)
    assert first.hot is None
    driver.append(BLOCK)
    driver.check()
    assert first.hot is None
    with pytest.raises(OutOfMemoryError):
        driver.append(BLOCK)


def test_a_failed_step_appends_nothing():
    driver = Driver()
    driver.append(40)
    with (
        pytest.raises(RuntimeError, match="kernel"),
        driver.manager.step(driver.batch, 20, driver.layers) as rows,
    ):
        k = torch.zeros(1, 2, 20, 16)
        torch.ops.kvpass.append(k, k, rows, 0, BLOCK)
        raise RuntimeError("kernel")
    driver.check()
    driver.append(30)
    driver.check()


def test_truncate_then_append_never_shows_the_old_tokens():
    driver = Driver(size=2)
    driver.append(100)
    driver.manager.settle()
    for keep in (70, 64, 33, 0):
        driver.manager.crop(driver.batch, keep)
        driver.dense = [(k[:, :, :keep], v[:, :, :keep]) for k, v in driver.dense]
        driver.check()
        driver.append(50)
        driver.manager.place(driver.batch, lambda *_: False)
        driver.check()
    with pytest.raises(CapacityError, match="crop to 99"):
        driver.manager.crop(driver.batch, 99)


def test_forks_share_full_blocks_and_copy_on_write():
    """B31: a prefix that two requests share stays as it is."""
    parent = Driver(layers=1, size=1)
    parent.append(2 * BLOCK + 6)
    used = parent.manager.tiers.hot.used
    children = []
    for extra in (13, 5):
        child = Driver(layers=1, size=1, manager=parent.manager)
        parent.manager.release(child.batch)
        child.batch = parent.manager.fork(parent.batch, [0])
        child.dense = list(parent.dense)
        child.append(extra)
        children.append(child)
    assert parent.manager.tiers.hot.used == used + 2 * parent.geometry.block_bytes
    for driver in (parent, *children):
        driver.check()
    tails = {id(d.batch.blocks[0][0][2]) for d in (parent, *children)}
    assert len(tails) == 3
    parent.manager.crop(parent.batch, 10)
    parent.dense = [(k[:, :, :10], v[:, :, :10]) for k, v in parent.dense]
    parent.append(40)
    for driver in (parent, *children):
        driver.check()


def test_released_batches_give_everything_back():
    driver = Driver(size=3)
    manager = driver.manager
    gc.collect()  # caches of earlier tests hold rows of the same tables
    rows_before = _free_rows(manager)
    other = Driver(size=2, manager=manager)
    other.append(100)

    class Owner:
        pass

    owner = Owner()
    manager.lease(owner, other.batch)
    del owner
    gc.collect()
    manager.settle()
    manager.snapshot()
    assert other.batch.released
    assert manager.tiers.hot.used == 0
    assert manager.tiers.cold.used == 0
    assert _free_rows(manager) == rows_before
    with pytest.raises(CacheStateError, match="released"):
        manager.begin(other.batch, 1, [0])


def test_a_batch_serves_one_thread_at_a_time():
    driver = Driver()
    errors: list[BaseException] = []

    def second() -> None:
        try:
            driver.manager.begin(driver.batch, 1, driver.layers)
        except CacheStateError as error:
            errors.append(error)

    with driver.manager.step(driver.batch, 1, driver.layers):
        thread = threading.Thread(target=second)
        thread.start()
        thread.join()
    assert len(errors) == 1
    assert "one thread at a time" in str(errors[0])


def test_poison_shows_no_stale_read():
    torch.manual_seed(0)
    driver = Driver(size=2, poison=True, hot=20 * 8192)
    driver.append(200)
    driver.manager.before_step = scramble(5)
    for _ in range(80):
        queries = driver.random(1, 6, 16)
        out = driver.append(1, queries)
        assert torch.isfinite(out[0]).all()
        assert (out[0] - driver.attention(queries, 0)).abs().max() < 1e-5
    driver.check()


def test_stale_tail_is_never_seen():
    """B14: what lies behind the last token may be NaN, infinite or large."""
    for stale in (float("nan"), float("inf"), 1e4):
        driver = Driver(layers=1)
        driver.append(13)
        block = driver.batch.blocks[0][0][0]
        for view in (block.k, block.v):
            view[:, 14:] = stale
        queries = driver.random(1, 6, 16)
        out = driver.append(1, queries)[0]
        assert (out - driver.attention(queries, 0)).abs().max() < 1e-5


def test_layout_and_size_mistakes_are_named():
    driver = Driver()
    with pytest.raises(ShapeError, match="layer 0"):
        driver.batch.define(0, BlockGeometry(2, 16, 16, torch.float16, BLOCK))
    with pytest.raises(ShapeError, match="multiple of the page size"):
        BlockGeometry(2, 16, 16, torch.float32, 40)
    with pytest.raises(ShapeError, match="float64"):
        BlockGeometry(2, 16, 16, torch.float64, BLOCK)
    with pytest.raises(ShapeError, match="sequence 5"):
        driver.manager.fork(driver.batch, [5])


def test_four_threads_with_their_own_batches():
    """B50: nobody reads another's blocks while everything moves."""
    size = BlockGeometry(2, 16, 16, torch.float32, BLOCK).block_bytes
    first = Driver(hot=24 * size)
    drivers = [first] + [Driver(manager=first.manager) for _ in range(3)]
    errors: list[BaseException] = []

    def work(driver: Driver, seed: int) -> None:
        rng = random.Random(seed)
        try:
            for _ in range(60):
                queries = driver.random(1, 6, 16)
                out = driver.append(1, queries)
                assert (out[1] - driver.attention(queries, 1)).abs().max() < 1e-5
                if rng.random() < 0.3:
                    driver.manager.place(driver.batch, lambda *_: rng.random() < 0.5)
        except BaseException as error:
            errors.append(error)

    for driver in drivers:
        driver.append(90)
    threads = [threading.Thread(target=work, args=(d, i)) for i, d in enumerate(drivers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    for driver in drivers:
        driver.check()


def test_dead_caches_give_their_rows_back():
    """The manager of a TieredCache dies with it; its table rows must not."""

    class Config:
        num_hidden_layers = 200

    x = torch.zeros(64, 1, 1, 16)
    for _ in range(12):  # 12 x 12,800 rows, of 65,536
        cache = kvpass.TieredCache(Config(), 32, block_size=32)
        cache._state.bind(64, x.device, {0: BlockGeometry(1, 16, 16, x.dtype, 32)}, 1)
        del cache  # no cycle: nothing waits for a collection


def test_reordering_leaves_no_batches_behind():
    class Config:
        num_hidden_layers = 1

    cache = kvpass.TieredCache(Config(), 64, block_size=32)
    x = torch.randn(2, 1, 3, 16)
    with pytest.warns(KVPassWarning):
        cache.update(x, x, 0)
    for _ in range(50):
        cache.select([1, 0])
    gc.collect()
    assert len(cache.manager._batches) == 1
    assert sum(isinstance(o, Batch) and not o.released for o in gc.get_objects()) >= 1
    assert len([o for o in gc.get_objects() if isinstance(o, Batch) and o.layers == 1]) < 10


def test_a_forked_child_cannot_write_into_its_parents_blocks():
    driver = Driver(hot=1)
    driver.append(100)
    child = os.fork()
    if child == 0:
        try:
            driver.manager.begin(driver.batch, 1, driver.layers)
        except CacheStateError as error:
            os._exit(17 if "fork" in str(error) else 1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 17
    driver.check()


def test_decisions_wait_while_there_are_too_many_blocks_for_the_steps_since_the_last(monkeypatch):
    monkeypatch.setattr(policy.heat, "BLOCKS_A_STEP", 0.1)  # 10 steps a block
    driver = Driver(layers=1, hot="1MiB", heat_interval=4, min_frequency=0.0)
    driver.append(8 * BLOCK)
    driver.manager.settle()
    driver.manager.place(driver.batch, lambda *_: False)
    before, price = driver.manager.counters.steps, int(policy.price(8))
    while not driver.manager.counters.loaded_blocks and driver.manager.counters.steps < 2 * price:
        driver.append(1)
        driver.manager.settle()
    waited = driver.manager.counters.steps - before
    blocks = len(driver.batch.blocks[0][0])
    assert abs(waited - policy.price(blocks)) <= 4, "a window is 4 steps"


def test_a_step_reserves_nothing_where_the_last_blocks_take_its_tokens(monkeypatch):
    driver = Driver(layers=3, size=2)
    looked: list[int] = []
    real = driver.manager._reserver._make_ready

    def note(batch, tokens, layers, made):
        looked.append(batch.lengths[0])
        real(batch, tokens, layers, made)

    monkeypatch.setattr(driver.manager._reserver, "_make_ready", note)
    driver.append(5)
    for _ in range(BLOCK + 3):
        driver.append(1)
    # the first step, and the one that needs new blocks
    assert looked == [0, BLOCK]
    driver.check()


@pytest.mark.parametrize("how", ["crop", "fork", "move", "layers"])
def test_what_changes_the_last_blocks_is_looked_at(how):
    driver = Driver(layers=2, hot="1MiB")
    manager, batch = driver.manager, driver.batch
    driver.append(BLOCK - 2)
    driver.append(1)
    assert batch.ready == ((0, 1), BLOCK)
    if how == "crop":
        driver.append(1)
        manager.settle()  # the block that is full now has a copy in the cold tier
        assert batch.blocks[0][0][0].cold is not None
        manager.crop(batch, BLOCK - 1)
        driver.dense = [(k[:, :, : BLOCK - 1], v[:, :, : BLOCK - 1]) for k, v in driver.dense]
        assert batch.ready is None
        driver.append(1)
        assert batch.blocks[0][0][0].cold is None, "a stale copy is left"
    elif how == "fork":
        fork = manager.fork(batch, [0])
        assert batch.ready is None
        driver.append(1)
        assert batch.blocks[0][0][0] is not fork.blocks[0][0][0]
        manager.release(fork)
    elif how == "move":
        block = batch.blocks[0][0][0]
        block.move = None
        assert batch.ready is None
    else:
        with manager.step(batch, 1, [0]):
            pass
        assert batch.ready == ((0,), BLOCK)
        manager.crop(batch, BLOCK - 1)
    driver.append(1)
    driver.check()
