# SPDX-License-Identifier: Apache-2.0
"""Tile sizes, warps, stages and splits of the kernels: constants by shape class, no autotuner."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from triton_ops._checks import next_power_of_2

# Shared memory a program may use for K and V stages; two programs then fit an SM of 227 KiB.
_STAGE_BYTES = 104 * 1024
_HOST_SPLITS = 4
_MAX_SPLITS = 128
# Places left on the GPU for the merge, which starts early, where several programs share an SM:
# (1, 32, 8, 32768) takes 37.9 us with 32 splits, 39.1 with 33 on 132 SMs.
_PLACES_FOR_MERGE = 4
# Pairs of row and KV head from which one program with long tiles an SM beats two with short ones.
_MANY_PAIRS = 64

Tile = Sequence[int]
"""Rows and keys that a program is asked to take at once, powers of two from 16 and from 32."""


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """How a decode launch is cut.

    Attributes:
        block_n: tokens in a tile, a power of two from 32; halved until it divides the block.
        num_warps: warps in a program.
        num_stages: tiles in flight in shared memory.
        splits: programs a (row, KV head), 0 = `splits_for`.
        use_dot: matrix units; False sums products in fp32 instead (one query head a KV head).
        programs_per_sm: programs that fit an SM at once, for the number of splits.
    """

    block_n: int = 64
    num_warps: int = 4
    num_stages: int = 3
    splits: int = 0
    use_dot: bool = True
    programs_per_sm: int = 2

    def tile(self, block_size: int) -> int:
        """Tokens in a tile: the largest power of two up to `block_n` that divides the block."""
        return fit_tile(self.block_n, block_size)


@dataclass(frozen=True, slots=True)
class ExtendConfig:
    """How an extend launch is cut.

    Attributes:
        block_m: rows (query token, query head of one KV head) in a program, a power of two.
        block_n: tokens in a key tile, a power of two from 32.
        num_warps: warps in a program.
        num_stages: key tiles in flight in shared memory.
        splits: programs that share the keys of a row tile, 0 = from the grid's size.
    """

    block_m: int = 64
    block_n: int = 64
    num_warps: int = 4
    num_stages: int = 2
    splits: int = 0


@dataclass(frozen=True, slots=True)
class LatentConfig:
    """How a launch over latents is cut.

    Attributes:
        block_m: rows (query token, query head) in a program, a power of two.
        block_n: tokens in a tile, a power of two from 32; halved until it divides the block.
        num_warps: warps in a program.
        num_stages: tiles in flight in shared memory.
        programs_per_sm: programs that fit an SM at once, for the number of splits.
        splits: programs that share the keys of a row tile, 0 = `latent_splits`.
    """

    block_m: int = 16
    block_n: int = 32
    num_warps: int = 4
    num_stages: int = 2
    programs_per_sm: int = 1
    splits: int = 0


def fit_tile(block_n: int, block_size: int) -> int:
    """The largest power of two from 32 to `block_n` that divides `block_size`."""
    if block_n < 32 or block_n & (block_n - 1):
        raise ValueError(f"block_n must be a power of two from 32, got {block_n}")
    return min(block_n, block_size & -block_size)


def window_tiles(tokens: int, block_n: int) -> int:
    """The most tiles that `tokens` tokens in a row can touch, wherever they begin."""
    return (tokens + block_n - 2) // block_n + 1


def _tile_bytes(block_n: int, dk: int, dv: int, itemsize: int) -> int:
    return block_n * (next_power_of_2(dk) + next_power_of_2(dv)) * itemsize


def _fitting(block_n: int, dk: int, dv: int, itemsize: int) -> int:
    """The largest power of two from 32 to `block_n` of which two stages fit."""
    while block_n > 32 and 2 * _tile_bytes(block_n, dk, dv, itemsize) > _STAGE_BYTES:
        block_n //= 2
    return block_n


def decode_config(
    q_dtype: torch.dtype,
    kv_dtype: torch.dtype,
    dk: int,
    dv: int,
    group: int,
    tile: Tile | None = None,
    pairs: int = 1,
    block_size: int = 256,
) -> DecodeConfig:
    """Tile of a decode launch: what fits the shared memory of two programs an SM.

    Fewer or more share an SM where that was measured to be faster: for `pairs` of row and KV head,
    in blocks of `block_size` tokens. With `tile` its keys, or as many of them as fit; only 32 where
    products are fp32.
    """
    if tile is not None:
        measured = decode_config(q_dtype, kv_dtype, dk, dv, group)
        if q_dtype != kv_dtype or q_dtype == torch.float32:
            return measured
        block_n = _fitting(tile[1], dk, dv, kv_dtype.itemsize)
        three = 3 * _tile_bytes(block_n, dk, dv, kv_dtype.itemsize) <= _STAGE_BYTES
        warps = max(measured.num_warps, block_n // 32)
        return DecodeConfig(block_n, warps, 3 if three else 2)
    if q_dtype != kv_dtype or q_dtype == torch.float32:
        # fp32 products run on the plain units: 8 warps hold the operands with far fewer spills
        return DecodeConfig(block_n=32, num_warps=8, num_stages=2)
    long = _tile_bytes(128, dk, dv, kv_dtype.itemsize)
    if group == 1 and 32 * 1024 < long <= 64 * 1024:
        # H200, of the best SDPA: (1, 40, 40, 16384) 0.99 against 0.97 with two stages of 128,
        # (8, 32, 32, 4096) 0.98 and 0.95, (1, 32, 32, 8192) 0.97 and 0.89
        return DecodeConfig(block_n=32, num_warps=1, num_stages=4, programs_per_sm=3)
    if group == 1 and long <= 64 * 1024:
        # H200, (4, 40, 40, 8192): 3,930 GB/s against 3,476 with tiles of 64; cuDNN 3,907
        return DecodeConfig(block_n=128, num_stages=2)
    if pairs >= _MANY_PAIRS and 32 * 1024 < long <= 64 * 1024 and block_size % 128 == 0:
        # H200, of the best SDPA: (64, 32, 8, 8192) 0.98 against 0.88 with three stages of 64,
        # (8, 32, 8, 32768) 1.00 and 0.98, (16, 32, 8, 32768) 0.98 and 0.97, (8, 32, 8, 8192) alike
        return DecodeConfig(block_n=128, num_warps=4, num_stages=3, programs_per_sm=1)
    # H200, head size 128: two warps are as fast as four or up to 1 % faster at four shapes
    warps = 2 if max(dk, dv) <= 128 else 4
    for block_n in (64, 32):
        for stages in (3, 2):
            if stages * _tile_bytes(block_n, dk, dv, kv_dtype.itemsize) <= _STAGE_BYTES:
                return DecodeConfig(block_n=block_n, num_warps=warps, num_stages=stages)
    return DecodeConfig(block_n=32, num_stages=2)


def extend_config(
    q_dtype: torch.dtype,
    kv_dtype: torch.dtype,
    dk: int,
    dv: int,
    rows: int,
    operands: bool,
    tile: Tile | None = None,
) -> ExtendConfig:
    """Tile of an extend launch for `rows` rows a KV head; `operands`: it has a mask or bias.

    With `tile` as many of its rows and keys as the kernel runs without spilling.
    """
    wide = max(dk, dv) > 128
    asked = tile[0] if tile is not None else 128
    if q_dtype != kv_dtype or q_dtype == torch.float32:
        top = min(16 if wide else 32, asked)
        return ExtendConfig(min(max(next_power_of_2(rows), 16), top), 32, 8, 1)
    # a 128-row tile with a mask and bias spills about 1 KiB a thread on sm_90
    top = 64 if wide or operands else 128
    block_m = min(max(next_power_of_2(rows), 16), top, asked)
    warps = 8 if block_m >= 64 else 4
    block_n = 32 if wide else 64
    if tile is not None:
        # 128 keys with a mask and bias spill 556 bytes a thread on sm_90 at head size 64
        most = min(tile[1], 64) if operands else tile[1]
        block_n = _fitting(most, dk, dv, kv_dtype.itemsize)
    return ExtendConfig(block_m, block_n, warps, 2)


def latent_config(
    q_dtype: torch.dtype,
    kv_dtype: torch.dtype,
    latent_dim: int,
    rope_dim: int,
    rows: int,
    operands: bool,
    tile: Tile | None = None,
) -> LatentConfig:
    """Tile of a launch over latents for `rows` rows; `operands`: it has a mask or bias.

    With `tile` its rows and keys, at most those of the measured tile, which fills shared memory.
    """
    if tile is not None:
        measured = latent_config(q_dtype, kv_dtype, latent_dim, rope_dim, rows, operands)
        return replace(
            measured,
            block_m=min(measured.block_m, tile[0]),
            block_n=min(measured.block_n, tile[1]),
        )
    if q_dtype != kv_dtype or q_dtype == torch.float32:
        # 512 channels in 8 warps spill three times as much as in 16 (ptxas, sm_90)
        return LatentConfig(16, 32, 16 if latent_dim > 256 else 8, 1)
    if rows <= 16:
        return LatentConfig(16, 64, 8, 3) if rope_dim <= 64 else LatentConfig(16, 32, 8, 3)
    # 64 rows and two tiles of 64 x (512 + 64) are 216 of 227 KiB: no room for a bias tile
    wide = operands or rope_dim > 64
    return LatentConfig(64, 32 if wide else 64, 8, 2)


@functools.cache
def _sm_count(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


def balanced_splits(pairs: int, slots: int, limit: int = _MAX_SPLITS) -> int:
    """The fewest splits whose last wave is nearly full, for `pairs` on `slots` at once."""
    best, best_score = 1, 0.0
    for splits in range(1, limit + 1):
        programs = pairs * splits
        waves = -(-programs // slots)
        # Each further wave costs a prologue and each split a partial, so more must pay.
        score = programs / (waves * slots) - 0.02 * (waves - 1)
        if score > best_score + 1e-9:
            best, best_score = splits, score
        if waves > 4:
            break
    return best


def splits_for(batch: int, kv_heads: int, device: torch.device, programs_per_sm: int = 2) -> int:
    """Programs that share the keys of one (row, KV head); from shapes and the SM count only.

    Args:
        batch: rows in the launch.
        kv_heads: KV heads.
        device: where the kernel runs; a fixed small count off the GPU.
        programs_per_sm: those that fit an SM at once.
    """
    if device.type != "cuda":
        return _HOST_SPLITS
    index = torch.cuda.current_device() if device.index is None else device.index
    slots = _sm_count(index) * programs_per_sm
    if programs_per_sm > 1:
        slots -= _PLACES_FOR_MERGE
    pairs = max(batch * kv_heads, 1)
    if programs_per_sm > 2 and pairs <= slots:
        # H200: small programs keep the memory busy where one wave is not full; of 160 pairs three
        # splits, a wave and a fifth, reach 0.98 of cuDNN, two reach 0.95
        one_wave = slots // pairs
        return min(one_wave + (1 < one_wave < 0.9 * slots / pairs), _MAX_SPLITS)
    return balanced_splits(pairs, slots)


def extend_splits(programs: int, device: torch.device) -> int:
    """Programs that share the keys of a row tile: 1 once the row tiles fill the GPU."""
    if device.type != "cuda":
        return 1 if programs >= _HOST_SPLITS else 2
    index = torch.cuda.current_device() if device.index is None else device.index
    return max(1, min(_MAX_SPLITS // 4, _sm_count(index) // max(programs, 1)))


def latent_splits(programs: int, per_sm: int, device: torch.device) -> int:
    """Programs that share the keys of a row tile, `per_sm` of which run on an SM at once."""
    if device.type != "cuda":
        return 1 if programs >= _HOST_SPLITS else 2
    index = torch.cuda.current_device() if device.index is None else device.index
    return balanced_splits(max(programs, 1), _sm_count(index) * per_sm)
