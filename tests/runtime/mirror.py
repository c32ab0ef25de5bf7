# SPDX-License-Identifier: Apache-2.0
"""A batch of a manager under test, the same in one that keeps all in the hot tier, and in tensors.

Attention of the three is compared: bits with the twin (placement and timing change none), and
within rounding with a reference in float64.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import kvpass.ops  # noqa: F401  # defines the ops
from kvpass.runtime.batch import Batch
from kvpass.runtime.geometry import BlockGeometry
from kvpass.runtime.manager import Manager

QUERY_HEADS = 4
SCALE = 0.3


class Owner:
    """What a lease is bound to."""


class Mirror:
    """Sequences that are stored three times.

    Args:
        manager: the one under test.
        twin: one with a hot tier for everything.
        batch: of the manager; ``other`` is the twin's.
        dense: keys and values of each layer, ``[B, Hkv, tokens, D]``.
        generator: of what is appended.
    """

    def __init__(
        self,
        manager: Manager,
        twin: Manager,
        batch: Batch,
        other: Batch,
        dense: list[tuple[Tensor, Tensor]],
        generator: torch.Generator,
    ) -> None:
        self.manager, self.twin, self.batch, self.other = manager, twin, batch, other
        self.dense = dense
        self.generator = generator
        self.owner: Owner | None = Owner()
        manager.lease(self.owner, batch)
        self.words = batch.words.copy()
        self.new: list[tuple[Tensor, Tensor]] | None = None
        self.groups: list[list[int]] = []

    @classmethod
    def make(
        cls,
        managers: tuple[Manager, Manager],
        size: int,
        geometries: Sequence[BlockGeometry],
        generator: torch.Generator,
    ) -> Mirror:
        """Empty sequences, a layer for each geometry."""
        batches = [m.new_batch(size, len(geometries), 64) for m in managers]
        for batch in batches:
            for layer, geometry in enumerate(geometries):
                batch.define(layer, geometry)
        dense = [
            (
                torch.zeros(size, g.kv_heads, 0, g.head_dim_k, dtype=g.dtype),
                torch.zeros(size, g.kv_heads, 0, g.head_dim_v, dtype=g.dtype),
            )
            for g in geometries
        ]
        return cls(*managers, *batches, dense, generator)

    @property
    def stored(self) -> int:
        """Tokens of every layer."""
        return self.dense[0][0].shape[2]

    def random(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator)

    # ------------------------------------------------------------------ a step

    def begin(self, tokens: int, nested: bool = False) -> None:
        """Reserve, append, attend; the step stays open. Nothing changes when there is no room."""
        layers = list(range(len(self.dense)))
        self.groups = [layers[::2], layers[1::2]] if nested and len(layers) > 1 else [layers]
        done: list[list[int]] = []
        try:
            for group in self.groups:
                self.manager.begin(self.batch, tokens, group)
                done.append(group)
        except BaseException:
            for _ in done:
                self.manager.abort(self.batch)
            raise
        for group in self.groups:
            self.twin.begin(self.other, tokens, group)
        self.words = self.batch.words.copy()
        self.new = []
        for layer, (k, v) in enumerate(self.dense):
            heads, width, width_v = k.shape[1], k.shape[3], v.shape[3]
            size = self.batch.size
            new_k = self.random(size, heads, tokens, width).to(k.dtype)
            new_v = self.random(size, heads, tokens, width_v).to(v.dtype)
            self.new.append((new_k, new_v))
            token = torch.ops.kvpass.append(new_k, new_v, self.batch.rows, layer, self.block)
            same = torch.ops.kvpass.append(new_k, new_v, self.other.rows, layer, self.block)
            if tokens:
                q = self.random(size, QUERY_HEADS, tokens, width).to(k.dtype)
                self._compare(layer, q, new_k, new_v, token, same)

    def end(self, *, commit: bool = True) -> None:
        """End an open step; what it appended counts, or not."""
        assert self.new is not None
        assert (self.batch.words == self.words).all(), "a block moved under an open step"
        tokens = self.new[0][0].shape[2]
        for manager, batch in ((self.manager, self.batch), (self.twin, self.other)):
            for group in reversed(self.groups):
                if commit:
                    manager.commit(batch, tokens, group)
                else:
                    manager.abort(batch)
        if commit:
            self.dense = [
                (torch.cat([k, new_k], 2), torch.cat([v, new_v], 2))
                for (k, v), (new_k, new_v) in zip(self.dense, self.new, strict=True)
            ]
        self.new = None

    def attend(self, queries: int) -> None:
        """A step without new tokens: cross attention over what is stored."""
        layers = list(range(len(self.dense)))
        with (
            self.manager.step(self.batch, 0, layers),
            self.twin.step(self.other, 0, layers),
        ):
            for layer, (k, _) in enumerate(self.dense):
                q = self.random(self.batch.size, QUERY_HEADS, queries, k.shape[3]).to(k.dtype)
                self._compare(layer, q, None, None, None, None)

    @property
    def block(self) -> int:
        return self.batch.block_size

    def _compare(
        self,
        layer: int,
        q: Tensor,
        new_k: Tensor | None,
        new_v: Tensor | None,
        token: Tensor | None,
        same: Tensor | None,
    ) -> None:
        k, v = self.dense[layer]
        causal = new_k is not None
        heads, width = (0, 0) if causal else (k.shape[1], v.shape[3])
        out, twin = (
            torch.ops.kvpass.attend(
                q, new_k, new_v, token, rows, layer, self.block, SCALE, causal, None, None,
                kv_heads=heads, head_dim_v=width,
            )
            for rows, token in ((self.batch.rows, token), (self.other.rows, same))
        )  # fmt: skip
        assert torch.equal(out, twin), "placement or timing changed a bit"
        if new_k is not None and new_v is not None:
            k, v = torch.cat([k, new_k], 2), torch.cat([v, new_v], 2)
        if k.shape[2]:
            expected = reference(q, k, v, causal=causal)
            error = (out - expected).abs().max().item()
            assert error <= (1e-5 if k.dtype == torch.float32 else 1.6e-2), f"off by {error}"

    # ------------------------------------------------------------- between steps

    def crop(self, length: int) -> None:
        self.manager.crop(self.batch, length)
        self.twin.crop(self.other, length)
        self.dense = [(k[:, :, :length], v[:, :, :length]) for k, v in self.dense]

    def fork(self, sequences: list[int], length: int | None) -> Mirror:
        batch = self.manager.fork(self.batch, sequences, length)
        other = self.twin.fork(self.other, sequences, length)
        end = self.stored if length is None else length
        dense = [(k[sequences, :, :end], v[sequences, :, :end]) for k, v in self.dense]
        return Mirror(self.manager, self.twin, batch, other, dense, self.generator)

    def release(self, *, collected: bool = False) -> None:
        """Give everything up, at once or as when the owner is garbage collected."""
        self.twin.release(self.other)
        if collected:
            self.owner = None
        else:
            self.manager.release(self.batch)

    def check(self) -> None:
        """Every stored token is what was appended, to the bit."""
        for layer, (k, v) in enumerate(self.dense):
            got_k, got_v = self.manager.gather(self.batch, layer, k.shape[2])
            assert torch.equal(got_k, k), f"keys of layer {layer} are not what was appended"
            assert torch.equal(got_v, v), f"values of layer {layer} are not what was appended"


def reference(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
    """Attention in float64, of queries at the last positions where it is causal."""
    group, n, total = q.shape[1] // k.shape[1], q.shape[2], k.shape[2]
    mask = torch.ones(n, total, dtype=torch.bool).tril(total - n) if causal else None
    return scaled_dot_product_attention(
        q.double(),
        k.double().repeat_interleave(group, 1),
        v.double().repeat_interleave(group, 1),
        attn_mask=mask,
        scale=SCALE,
    )
