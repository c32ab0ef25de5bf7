# SPDX-License-Identifier: Apache-2.0
"""A thousand steps while blocks of all sequences are forced to move, with freed slots poisoned."""

from __future__ import annotations

import random

import pytest
import torch

from kvpass.runtime.batch import Batch
from kvpass.runtime.manager import Manager
from tests.runtime.harness import BLOCK, Driver

pytestmark = pytest.mark.gpu
STEPS = 1000


def churn(seed: int):
    """Demote and promote about a third of the blocks that may move, without waiting for copies."""
    rng = random.Random(seed)

    def before_step(manager: Manager, _: Batch) -> None:
        columns, mover = manager.columns, manager.mover
        ids = columns.owned()
        for number in ids[columns.movable(ids)].tolist():
            if rng.random() < 1 / 3:
                block = columns.block(number)
                if block.hot is None:
                    mover.promote(block)
                else:
                    mover.demote(block)

    return before_step


@pytest.mark.timeout(300)
def test_poison_shows_no_stale_read_in_a_thousand_steps_of_churn():
    torch.manual_seed(0)
    moving = Driver(device="cuda", size=2, hot="2MiB", cold="64MiB", poison=True, heat_interval=8)
    still = Driver(device="cuda", size=2, hot="64MiB", cold="64MiB")
    other = Driver(manager=moving.manager)
    other.append(20 * BLOCK)
    moving.manager.before_step = churn(1)
    for step in range(STEPS):
        tokens = 40 * BLOCK if not step else 1
        queries = torch.randn(2, 6, tokens, 16, device="cuda")
        state = torch.cuda.get_rng_state()
        found = moving.append(tokens, queries)
        torch.cuda.set_rng_state(state)
        expected = still.append(tokens, queries)
        if step % 50 == 0:  # what is wrong once stays wrong: its keys are read in every step
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)), step
        assert not torch.stack(found).isnan().any(), step
    for driver in (moving, other, still):
        driver.check()
    counters = moving.manager.counters
    assert counters.loaded_blocks > STEPS and counters.demoted_blocks > STEPS
    assert counters.failed_moves == 0
