# SPDX-License-Identifier: Apache-2.0
"""Random operations on many sequences in tiny tiers, beside a dense model of them.

Copies between the tiers run, arrive, fail or stay in flight as the machine says, on one thread, so
that a failure repeats and shrinks. Steps stay open while other sequences go on. The invariants
are in ``invariants``, the model is in ``mirror``.
"""

from __future__ import annotations

import random
from contextlib import ExitStack
from typing import ClassVar

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvpass.config import Config
from kvpass.errors import CacheStateError, OutOfMemoryError
from kvpass.runtime.geometry import BlockGeometry
from kvpass.runtime.manager import Manager
from tests.runtime import invariants
from tests.runtime.mirror import Mirror
from tests.runtime.scheduler import ManualCopier, scheduled

BLOCK = 32
SMALL = BlockGeometry(1, 16, 16, torch.float32, BLOCK)
LARGE = BlockGeometry(2, 16, 24, torch.float16, BLOCK)
UNIT = SMALL.block_bytes

MAX_TOKENS = 6 * BLOCK
MAX_BATCHES = 6

PICK = st.integers(0, 63)
TOKENS = st.sampled_from([1, 7, 31, 32, 33, 64, 70])
SIZE = st.sampled_from([1, 1, 2, 3])
LAYERS = st.sampled_from([1, 2, 2, 3])
CUT = st.sampled_from([0, 1, 5, 31, 33, 64, MAX_TOKENS])


class TierMachine(RuleBasedStateMachine):
    """Rules are what callers, the copy engine and time may do."""

    operations: ClassVar[int] = 0
    refused: ClassVar[int] = 0

    def __init__(self) -> None:
        super().__init__()
        self.stack = ExitStack()
        self.batches: list[Mirror] = []
        self.open: list[Mirror] = []
        self.generator = torch.Generator().manual_seed(0)
        self.turn = 0

    @initialize(
        hot=st.integers(0, 60),
        cold=st.sampled_from([30, 100, 400]),
        limit=st.sampled_from([1, 4, 512]),
        resident=st.sampled_from([0, BLOCK]),
        threshold=st.sampled_from([0.5, 1.0]),
        poison=st.sampled_from([True, True, False]),
    )
    def start(self, hot, cold, limit, resident, threshold, poison):
        shared = {"block_size": BLOCK, "resident_tokens": resident, "heat_interval": 3}
        config = Config(
            hot=max(1, hot * UNIT), cold=cold * UNIT, page_size=4 * UNIT, poison=poison,
            gpu_threshold=threshold, min_frequency=1.0, **shared,
        )  # fmt: skip
        self.manager = Manager(config, "cpu")
        self.copier = ManualCopier(limit)
        self.stack.enter_context(scheduled(self.manager, self.copier))
        self.twin = Manager(Config(hot="64MiB", cold=1, page_size="64KiB", **shared), "cpu")
        for _ in range(2):
            self._create(1, 2, 0)
            self._append(self.batches[-1], 3 * BLOCK + 5)

    def _count(self) -> None:
        TierMachine.operations += 1

    def _idle(self, pick: int) -> Mirror | None:
        idle = [mirror for mirror in self.batches if mirror not in self.open]
        return idle[pick % len(idle)] if idle else None

    # ------------------------------------------------------------- sequences

    @precondition(lambda self: len(self.batches) < MAX_BATCHES)
    @rule(size=SIZE, layers=LAYERS, kinds=st.integers(0, 2), tokens=TOKENS)
    def create(self, size, layers, kinds, tokens):
        self._count()
        self._create(size, layers, kinds)
        self._append(self.batches[-1], tokens)

    def _create(self, size: int, layers: int, kinds: int) -> None:
        kind = (SMALL, SMALL, SMALL), (LARGE, SMALL, LARGE), (SMALL, LARGE, LARGE)
        geometries = kind[kinds][:layers]
        managers = (self.manager, self.twin)
        self.batches.append(Mirror.make(managers, size, geometries, self.generator))

    def _append(self, mirror: Mirror, tokens: int, nested: bool = False) -> None:
        if self._begin(mirror, tokens, nested):
            mirror.end()

    def _begin(self, mirror: Mirror, tokens: int, nested: bool = False) -> bool:
        if mirror.stored + tokens > MAX_TOKENS:
            mirror.crop(mirror.stored // 2)
        before = list(mirror.batch.lengths)
        try:
            mirror.begin(tokens, nested)
        except OutOfMemoryError:
            TierMachine.refused += 1
            assert mirror.batch.lengths == before
            assert mirror.batch.active is None
            return False
        return True

    @rule(pick=PICK, tokens=TOKENS, nested=st.booleans())
    def append(self, pick, tokens, nested):
        self._count()
        if mirror := self._idle(pick):
            self._append(mirror, tokens, nested)

    @rule(pick=PICK, steps=st.integers(1, 4))
    def decode(self, pick, steps):
        """Windows of access counts end here: blocks are demoted and promoted by heat."""
        for _ in range(steps):
            self._count()
            if mirror := self._idle(pick):
                self._append(mirror, 1)

    @rule(pick=PICK, tokens=TOKENS, nested=st.booleans())
    def open_step(self, pick, tokens, nested):
        self._count()
        mirror = self._idle(pick)
        if mirror and len(self.open) < 2 and self._begin(mirror, tokens, nested):
            self.open.append(mirror)
            with pytest.raises(CacheStateError, match="in a step"):
                self.manager.crop(mirror.batch, 0)

    @precondition(lambda self: self.open)
    @rule(pick=PICK, commit=st.booleans())
    def close_step(self, pick, commit):
        self._count()
        self.open.pop(pick % len(self.open)).end(commit=commit)

    @rule(pick=PICK, queries=st.sampled_from([1, 3]))
    def attend(self, pick, queries):
        self._count()
        if mirror := self._idle(pick):
            mirror.attend(queries)

    @rule(pick=PICK, cut=CUT)
    def crop(self, pick, cut):
        self._count()
        if mirror := self._idle(pick):
            mirror.crop(max(0, mirror.stored - cut))

    @precondition(lambda self: len(self.batches) < MAX_BATCHES)
    @rule(pick=PICK, chosen=st.lists(PICK, min_size=1, max_size=3), cut=st.none() | CUT)
    def fork(self, pick, chosen, cut):
        self._count()
        if mirror := self._idle(pick):
            length = None if cut is None else max(0, mirror.stored - cut)
            self.batches.append(mirror.fork([i % mirror.batch.size for i in chosen], length))

    @rule(pick=PICK, chosen=st.lists(PICK, min_size=1, max_size=3))
    def reorder(self, pick, chosen):
        """As beam search does: the new batch takes the place of the old one."""
        self._count()
        if mirror := self._idle(pick):
            self.batches.append(mirror.fork([i % mirror.batch.size for i in chosen], None))
            mirror.release()
            self.batches.remove(mirror)

    @precondition(lambda self: len(self.batches) > 2)
    @rule(pick=PICK, collected=st.booleans())
    def free(self, pick, collected):
        self._count()
        if mirror := self._idle(pick):
            mirror.release(collected=collected)
            self.batches.remove(mirror)

    # -------------------------------------------------------- tiers and copies

    @rule(pick=PICK, seed=st.integers(0, 1 << 16))
    def migrate(self, pick, seed):
        self._count()
        if mirror := self._idle(pick):
            rng = random.Random(seed)
            self.manager.place(mirror.batch, lambda *_: rng.random() < 0.5)

    @rule(hot=st.none() | st.integers(1, 80), cold=st.none() | st.integers(1, 400), takes=PICK)
    def resize(self, hot, cold, takes):
        """The hot tier may also have to give memory to other code."""
        self._count()
        if takes % 8 == 0:
            self.manager.relieve((1 + takes // 8) * UNIT)
        sizes = {"hot": hot, "cold": cold}
        before = {tier: self.manager.tiers.budget(tier).capacity for tier in invariants.TIERS}
        wanted = {tier: n * UNIT for tier, n in sizes.items() if n is not None}
        if not wanted:
            return
        try:
            self.manager.resize(**wanted)
        except OutOfMemoryError:
            for tier, size in before.items():
                assert self.manager.tiers.budget(tier).capacity in (size, wanted.get(tier, size))
        else:
            for tier, size in wanted.items():
                assert self.manager.tiers.budget(tier).capacity == size

    @rule(actions=st.lists(st.tuples(st.booleans(), PICK), min_size=3, max_size=9), fails=PICK)
    def copies(self, actions, fails):
        self.copier.failures = max(self.copier.failures, fails % 8 - 5)
        for arrives, number in actions:
            self._count()
            if arrives:
                self.copier.complete(number)
            else:
                self.copier.copy(number)

    @rule()
    def settle(self):
        self._count()
        self.manager.settle()

    # ----------------------------------------------------------------- always

    @invariant()
    def nothing_is_lost_or_leaked(self):
        if not hasattr(self, "manager"):
            return
        invariants.check(self.manager, [mirror.batch for mirror in self.batches])
        self.turn += 1
        if self.turn % 4 == 0:
            for mirror in self.batches:
                mirror.check()

    def teardown(self) -> None:
        """Everything that was stored is there at the end, and goes when it is given up."""
        with self.stack:
            if not hasattr(self, "manager"):
                return
            for mirror in self.open:
                mirror.end()
            for number, mirror in enumerate(self.batches):
                mirror.check()
                mirror.release(collected=number % 2 == 0)
            self.copier.failures = 0
            self.copier.close()
            invariants.check_empty(self.manager)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*ran out of memory:kvpass.errors.KVPassWarning")
def test_random_operations_lose_nothing(record_property):
    TierMachine.operations = TierMachine.refused = 0
    run_state_machine_as_test(
        TierMachine,
        settings=settings(
            max_examples=165,
            stateful_step_count=60,
            phases=(Phase.generate, Phase.shrink),
            suppress_health_check=list(HealthCheck),
        ),
    )
    assert TierMachine.operations >= 10_000
    assert TierMachine.refused < TierMachine.operations // 10, "the tiers are too small"
    record_property(
        "summary",
        f"{TierMachine.operations} operations on tiers, {TierMachine.refused} found no room",
    )
