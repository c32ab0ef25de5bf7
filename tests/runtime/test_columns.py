# SPDX-License-Identifier: Apache-2.0
"""The columns hold what the blocks, the tables and the sequences say, whatever was done to them."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpass.config import Config
from kvpass.errors import OutOfMemoryError, ShapeError
from kvpass.runtime import policy
from kvpass.runtime.batch import Batch, Block
from kvpass.runtime.columns import COLUMNS, NO_BLOCK, Columns
from kvpass.runtime.geometry import BlockGeometry
from kvpass.runtime.manager import Manager
from kvpass.runtime.mover import movable
from tests.runtime.harness import BLOCK, Driver

GEOMETRY = BlockGeometry(1, 16, 16, torch.float32, BLOCK)
SIZE = GEOMETRY.block_bytes


@given(
    st.integers(2, 5),
    st.lists(st.tuples(st.sampled_from(["make", "make", "write", "end"]), st.integers(0, 99))),
)
def test_rows_are_as_a_dict_of_blocks(capacity, operations):
    columns = Columns(capacity=capacity)
    model: dict[Block, tuple[int, int, bool]] = {}
    for operation, number in operations:
        blocks = list(model)
        if operation == "make":
            block = Block(columns, GEOMETRY, number)
            assert (block.heat, block.resident, block.full) == (0, False, False)
            assert np.isnan(block.rate)
            assert (columns.ages[block.id] == policy.NEVER).all(), "nothing left of who was there"
            model[block] = (number, 0, False)
        elif blocks and operation == "write":
            block = blocks[number % len(blocks)]
            model[block] = (model[block][0], number % 4, number % 2 > 0)
            block.heat, block.resident = number % 4, number % 2
            columns.ages[block.id] = number
            block.rate = float(number)
        elif blocks:
            block = blocks[number % len(blocks)]
            del model[block]
            block.retire()
            assert block.id == NO_BLOCK
        ids = [block.id for block in model]
        assert len(set(ids)) == len(ids), "no id for two blocks"
        assert NO_BLOCK not in ids
        assert columns.live == len(model)
        for block, known in model.items():
            assert (block.index, block.heat, block.resident) == known
            assert columns.block(block.id) is block
            assert columns.size[block.id] == SIZE
    lengths = {len(getattr(columns, name)) for name in (*COLUMNS, "ages")}
    assert lengths == {columns.capacity}


def test_a_block_costs_less_than_200_bytes():
    columns = Columns()
    blocks = [Block(columns, GEOMETRY, i) for i in range(3000)]
    ids = 4
    assert columns.nbytes / columns.capacity + ids < 100
    assert columns.nbytes / len(blocks) + ids < 200, "whatever is left of the last doubling"


def agree(manager: Manager, batches: list[Batch]) -> None:
    """Columns, blocks, tables and sequences say the same."""
    columns = manager.columns
    blocks: dict[int, Block] = {}
    for batch in batches:
        named = np.zeros_like(batch.ids)
        for layer, sequences in enumerate(batch.blocks):
            for sequence, row in enumerate(sequences):
                for i, block in enumerate(row):
                    named[layer, sequence, i] = block.id
                    assert batch.words[layer, sequence, i] == block.word
                    assert (batch, layer, sequence, i) in block.owners
                    assert block.index == i
                    assert blocks.setdefault(block.id, block) is block, "one id, one block"
        np.testing.assert_array_equal(batch.ids, named)
        assert ((batch.ids == NO_BLOCK) == (batch.words == 0)).all()
    ids = columns.owned()
    assert ids.tolist() == sorted(blocks)
    assert columns.owned(SIZE).tolist() == ids.tolist()
    assert not len(columns.owned(SIZE + 128))
    for number, block in blocks.items():
        assert columns.block(number) is block
        assert len(block.owners) == sum(int((batch.ids == number).sum()) for batch in batches)
        assert columns.has_hot[number] == (block.hot is not None)
        assert columns.has_cold[number] == (block.cold is not None)
        assert columns.moving[number] == (block.move is not None)
        assert block.k.data_ptr() == GEOMETRY.keys(block.slot.raw).data_ptr(), "a stale view"
        assert block.v.data_ptr() == GEOMETRY.values(block.slot.raw).data_ptr()
    assert columns.movable(ids).tolist() == [movable(blocks[i]) for i in ids.tolist()]
    orphans = {id(m.block) for m in manager.mover.in_flight if not m.block.owners}
    assert columns.live == len(blocks) + len(orphans), "a row that nobody gave back"
    tiers = manager.tiers
    held = [(b.hot, b.cold) for b in blocks.values()]
    if not manager.mover.in_flight:
        assert tiers.hot.used == SIZE * sum(hot is not None for hot, _ in held)
        assert tiers.cold.used == SIZE * sum(cold is not None for _, cold in held)


@settings(max_examples=25)
@given(
    st.integers(4, 20),
    st.lists(
        st.tuples(
            st.sampled_from(["new", "append", "step", "fork", "crop", "place", "release"]),
            st.integers(0, 2**16),
        ),
        min_size=1,
        max_size=14,
    ),
)
def test_columns_agree_with_blocks_after_any_operations(hot, operations):
    config = Config(
        block_size=BLOCK, hot=hot * SIZE, cold=40 * SIZE, heat_interval=2, resident_tokens=BLOCK
    )
    manager = Manager(config, "cpu")
    batches: list[Batch] = []
    for operation, number in [("new", hot), ("append", 90), *operations]:
        batch = batches[number % len(batches)] if batches else None
        if operation == "new" or batch is None:
            batches.append(manager.new_batch(1 + number % 2, 2, BLOCK))
            for layer in range(2):
                batches[-1].define(layer, GEOMETRY)
        elif operation in ("append", "step"):
            tokens = 1 if operation == "step" else number % (3 * BLOCK)
            random = np.random.default_rng(number)
            batch.heat += torch.from_numpy(random.integers(0, 4, batch.heat.shape, np.int32))
            try:
                with manager.step(batch, tokens, range(2)):
                    agree(manager, batches)
            except OutOfMemoryError:
                pass
        elif operation == "fork":
            rows = [(number >> i) % batch.size for i in range(1 + number % 3)]
            batches.append(manager.fork(batch, rows, number % (batch.lengths[0] + 1)))
        elif operation == "crop":
            manager.crop(batch, number % (batch.lengths[0] + 1))
        elif operation == "place":
            manager.place(batch, lambda *where, seed=number: hash((seed, *where)) % 2 > 0)
        else:
            manager.release(batch)
            batches.remove(batch)
        agree(manager, batches)
    manager.settle()
    agree(manager, batches)


def test_a_request_that_no_tier_can_hold_leaves_nothing_behind():
    config = Config(block_size=BLOCK, hot=3 * SIZE, cold=2 * SIZE, resident_tokens=0)
    manager = Manager(config, "cpu")
    batch = manager.new_batch(1, 1, BLOCK)
    batch.define(0, GEOMETRY)
    with manager.step(batch, 2 * BLOCK, [0]):
        pass
    with pytest.raises(OutOfMemoryError), manager.step(batch, 9 * BLOCK, [0]):
        pass
    agree(manager, [batch])
    assert manager.columns.live == 2


def test_a_shared_block_is_accessed_by_all_who_share_it():
    driver = Driver(heads=1, layers=2, heat_interval=8, resident_tokens=0)
    driver.append(2 * BLOCK)
    shared = driver.batch.blocks[0][0][0]
    fork = driver.manager.fork(driver.batch, [0, 0, 0])
    with driver.manager.step(fork, 1, range(2)):
        pass
    fork.poll_heat(start=True)
    fork.heat[0, :, 0] += torch.tensor([1, 2, 4], dtype=torch.int32)
    fork.heat[0, :, 2] += torch.tensor([3, 5, 6], dtype=torch.int32)
    fork.steps_in_window = 8
    driver.manager._use_heat(fork, start=True)
    assert shared.frequency == 7
    assert [row[2].frequency for row in fork.blocks[0]] == [3, 5, 6], "copied on write: their own"
    assert fork.blocks[1][0][0].frequency == 0
    assert driver.manager.counters.hot_accesses == 21


def test_blocks_of_a_step_elsewhere_stay_where_they_are():
    """A batch that another thread steps through keeps its blocks, shared ones too."""
    driver = Driver(heads=1, layers=1, hot="1MiB")
    driver.append(3 * BLOCK)
    driver.manager.settle()
    manager, columns = driver.manager, driver.manager.columns
    ids = columns.owned()
    assert columns.movable(ids).all()
    fork = manager.fork(driver.batch, [0], 2 * BLOCK)
    entered, leave = threading.Event(), threading.Event()

    def step() -> None:
        with manager.step(fork, 1, [0]):
            entered.set()
            leave.wait(10)

    thread = threading.Thread(target=step)
    thread.start()
    assert entered.wait(10)
    movable_now = columns.movable(ids).tolist()
    manager.mover.demote_some(SIZE, 9, pressure=True)
    hot = columns.has_hot[ids].tolist()
    leave.set()
    thread.join()
    assert movable_now == [False, False, True]
    assert hot == [True, True, False]


def test_retention_of_a_layer_reaches_old_and_new_blocks():
    driver = Driver(heads=1, layers=2)
    driver.append(BLOCK)
    driver.batch.retain([1.5, -2.0])
    driver.append(BLOCK)
    for layer, retention in enumerate((1.5, -2.0)):
        ids = driver.batch.ids[layer, 0, :2]
        assert driver.manager.columns.retention[ids].tolist() == [retention] * 2
    with pytest.raises(ShapeError, match="1 retentions of 2 layers"):
        driver.batch.retain([1.0])
