# SPDX-License-Identifier: Apache-2.0
"""The shape of a block in memory: pages of one KV head, K beside V."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from kvpass.errors import ShapeError

PAGE_SIZE = 32
"""Tokens of one KV head in a page."""

SLOT_ALIGNMENT = 128
"""Bytes; leaves the low bits of a block address free for the encoding of a table word."""

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class BlockGeometry:
    """Layout of a block: ``[kv_heads, pages, (K: 32 x head_dim_k, V: 32 x head_dim_v)]``.

    Attributes:
        kv_heads: KV heads of the layer.
        head_dim_k: channels of a key.
        head_dim_v: channels of a value.
        dtype: float32, float16 or bfloat16.
        block_size: tokens in a block, a multiple of 32.
    """

    kv_heads: int
    head_dim_k: int
    head_dim_v: int
    dtype: torch.dtype
    block_size: int

    def __post_init__(self) -> None:
        """Refuse a layout that no kernel reads.

        Raises:
            ShapeError: a size is not positive, the block size not a multiple of 32, or the dtype
                not one of float32, float16, bfloat16.
        """
        for name in ("kv_heads", "head_dim_k", "head_dim_v", "block_size"):
            if getattr(self, name) < 1:
                raise ShapeError(f"{name}={getattr(self, name)} must be at least 1")
        if self.block_size % PAGE_SIZE:
            raise ShapeError(
                f"block_size={self.block_size} must be a multiple of the page size, {PAGE_SIZE}"
            )
        if self.dtype not in DTYPES:
            raise ShapeError(f"dtype {self.dtype} is not supported; use one of {DTYPES}")

    @cached_property
    def pages(self) -> int:
        """Pages of one KV head in a block."""
        return self.block_size // PAGE_SIZE

    @cached_property
    def page_elements(self) -> int:
        """Elements of a page."""
        return PAGE_SIZE * (self.head_dim_k + self.head_dim_v)

    @cached_property
    def token_bytes(self) -> int:
        """Bytes of K and V of one token in one layer."""
        return self.kv_heads * (self.head_dim_k + self.head_dim_v) * self.dtype.itemsize

    @cached_property
    def payload_bytes(self) -> int:
        """Bytes of a block that hold K and V."""
        return self.block_size * self.token_bytes

    @cached_property
    def block_bytes(self) -> int:
        """Bytes of a slot: the payload rounded up to the alignment."""
        return -(-self.payload_bytes // SLOT_ALIGNMENT) * SLOT_ALIGNMENT

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold ``tokens`` tokens."""
        return -(-tokens // self.block_size)

    def keys(self, raw: torch.Tensor) -> torch.Tensor:
        """View of the keys in a slot.

        Args:
            raw: uint8 ``[block_bytes]``.

        Returns:
            ``[kv_heads * pages, 32, head_dim_k]`` of ``dtype``, sharing the memory of ``raw``.
        """
        return self._view(raw, 0, self.head_dim_k)

    def values(self, raw: torch.Tensor) -> torch.Tensor:
        """View of the values in a slot, ``[kv_heads * pages, 32, head_dim_v]``."""
        return self._view(raw, PAGE_SIZE * self.head_dim_k, self.head_dim_v)

    def _view(self, raw: torch.Tensor, offset: int, width: int) -> torch.Tensor:
        flat = raw[: self.payload_bytes].view(self.dtype)
        size = (self.kv_heads * self.pages, PAGE_SIZE, width)
        stride = (self.page_elements, width, 1)
        return flat.as_strided(size, stride, flat.storage_offset() + offset)
