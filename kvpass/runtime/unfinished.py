# SPDX-License-Identifier: Apache-2.0
"""Passes that ended between two layers: a model that runs uncompiled, or in several graphs, has one
step a layer. Where one of them fails, the layers before it hold tokens that it does not, and to
begin the pass again would append them twice.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvpass.errors import CacheStateError
from kvpass.runtime.batch import Batch


def note(batch: Batch, layers: Sequence[int]) -> None:
    """A step of these layers failed, and appended nothing."""
    least = min((batch.lengths[layer] for layer in layers), default=0)
    if any(stored > least for stored in batch.lengths):
        batch.unfinished = least, tuple(layers)


def check(batch: Batch, layers: Sequence[int]) -> None:
    """Before a step of these layers begins.

    Raises:
        CacheStateError: one of them holds tokens of a pass that another did not end.
    """
    if batch.unfinished is None:
        return
    least, failed = batch.unfinished
    if max(batch.lengths) <= least or min(batch.lengths[layer] for layer in failed) > least:
        batch.unfinished = None
        return
    ahead = [layer for layer in layers if batch.lengths[layer] > least]
    if ahead:
        raise CacheStateError(
            f"the last call ended in an error between two layers: layer {ahead[0]} holds "
            f"{batch.lengths[ahead[0]]} tokens and layer {failed[0]} {least}. "
            f"cache.truncate({least}), then call again"
        )
