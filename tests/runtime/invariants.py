# SPDX-License-Identifier: Apache-2.0
"""What holds of a manager at any time between two calls: accounting, ownership, tables, bytes.

Everything is counted again from the blocks that the live batches name and from the copies in
flight, and compared with what the arenas, budgets and snapshots say.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import torch

from kvpass.runtime.batch import Batch, Block
from kvpass.runtime.manager import Manager
from kvpass.runtime.pool import Slot
from kvpass.runtime.tiers import Tier

TIERS: tuple[Tier, ...] = ("hot", "cold")


def live_blocks(batches: Iterable[Batch]) -> list[Block]:
    """Every block that a row of the batches holds, once."""
    rows = [blocks for batch in batches for layer in batch.blocks for blocks in layer]
    return list({id(block): block for blocks in rows for block in blocks}.values())


def check(manager: Manager, batches: Iterable[Batch]) -> None:
    """All invariants of a manager whose live batches these are; nothing else may use it now.

    Raises:
        AssertionError: the first one that does not hold.
    """
    batches = list(batches)
    snapshot = manager.snapshot()  # buries caches that were collected, and publishes
    blocks = live_blocks(batches)
    _check_owners(batches, blocks)
    _check_words(batches)
    _check_slots(manager, blocks)
    _check_arenas(manager)
    _check_copies(blocks)
    for tier in TIERS:
        use = snapshot.tiers[tier]
        assert use.held == use.used, f"{tier}: {use.used - use.held} bytes belong to no block"


def check_empty(manager: Manager) -> None:
    """Nothing is left of batches that were all given up, but one empty slab an arena at most."""
    manager.settle()
    check(manager, [])
    snapshot = manager.snapshot()
    assert snapshot.sequences == 0
    assert snapshot.queue == 0, "copies or blocks that wait for one outlive their sequences"
    for tier in TIERS:
        assert snapshot.tiers[tier].used == 0
        for arena in manager.tiers.arenas(tier):
            assert len(arena.slabs) <= 1, f"{tier} keeps {len(arena.slabs)} empty slabs"


def _check_owners(batches: list[Batch], blocks: list[Block]) -> None:
    named: Counter[tuple[int, int, int, int, int]] = Counter()
    for batch in batches:
        assert not batch.released
        for layer, rows in enumerate(batch.blocks):
            for sequence, row in enumerate(rows):
                for index, block in enumerate(row):
                    named[id(block), id(batch), layer, sequence, index] += 1
    counted = Counter((id(b), id(owner[0]), *owner[1:]) for b in blocks for owner in b.owners)
    assert counted == named, "owners of blocks are not the table words that name them"


def _check_words(batches: list[Batch]) -> None:
    for batch in batches:
        for layer, rows in enumerate(batch.blocks):
            stored = batch.lengths[layer]
            for sequence, row in enumerate(rows):
                assert len(row) * batch.block_size >= stored, "a stored token has no block"
                addresses = [block.word for block in row]
                words = batch.words[layer, sequence].tolist()
                assert words[: len(row)] == addresses, "a table word names another place"
                assert not any(words[len(row) :]), "a table word names a block that is gone"
                for index, block in enumerate(row):
                    assert block.k.data_ptr() == block.slot.address
                    if (index + 1) * batch.block_size <= stored:
                        assert block.full, "a block with all its tokens is not known to be full"


def _check_slots(manager: Manager, blocks: list[Block]) -> None:
    moves = manager.mover.in_flight
    everyone = {id(b): b for b in [*blocks, *(move.block for move in moves)]}.values()
    for block in everyone:
        flying = [move for move in moves if move.block is block]
        assert len(flying) <= 1 and block.move is (flying[0] if flying else None)
    for move in moves:
        source = move.block.hot if move.kind == "store" else move.block.cold
        assert move.source is source, "a slot was given up while a copy reads it"
    for tier in TIERS:
        held = [slot for b in everyone if (slot := b.hot if tier == "hot" else b.cold) is not None]
        held += [move.target for move in moves if (move.kind == "store") == (tier == "cold")]
        assert len(set(map(id, held))) == len(held), f"two blocks have one {tier} slot"
        arenas = manager.tiers.arenas(tier)
        used: set[int] = set()
        for arena in arenas:
            for slab in arena.slabs:
                used |= set(map(id, slab.in_use))
        lost = used - set(map(id, held))
        assert not lost, f"{len(lost)} {tier} slots leaked"
        assert set(map(id, held)) <= used, f"a {tier} slot in use counts as free"
        assert manager.tiers.budget(tier).used == sum(slot.arena.slot_bytes for slot in held)


def _check_arenas(manager: Manager) -> None:
    for tier in TIERS:
        budget, arenas = manager.tiers.budget(tier), manager.tiers.arenas(tier)
        slabs = [slab for arena in arenas for slab in arena.slabs]
        assert budget.taken == sum(slab.size for slab in slabs)
        assert budget.used <= budget.taken
        assert set(budget.emptied) <= set(slabs)
        for arena in arenas:
            assert arena.free_slots == sum(len(s.free) for s in arena.slabs if not s.closed)
            for slab in arena.slabs:
                assert len(set(slab.free)) == len(slab.free), "a slot is free twice"
                assert len(slab.free) <= len(slab.slots)


def _check_copies(blocks: list[Block]) -> None:
    for block in blocks:
        assert block.hot is not None or block.cold is not None, "a block is lost"
        if block.hot is not None and block.cold is not None:
            assert block.full, "a block that is written still has two copies"
            payload = block.geometry.payload_bytes
            same = torch.equal(_bytes(block.hot, payload), _bytes(block.cold, payload))
            assert same, "the two copies of a block differ"


def _bytes(slot: Slot, size: int) -> torch.Tensor:
    return slot.raw[:size].cpu()
