# SPDX-License-Identifier: Apache-2.0
"""Shape, dtype and device checks shared by the wrappers: both values in every message."""

from __future__ import annotations

import contextlib
import functools
from typing import NamedTuple

import torch

PAGE_TOKENS = 32
MIN_HEAD_DIM = 16
MAX_HEAD_DIM = 256
FLOAT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)

NO_BIAS, FLOAT_BIAS, BOOL_BIAS = 0, 1, 2


class Bias(NamedTuple):
    """A bias as a kernel takes it: strides of a `[B, Hq, n, T]` view, `T` and its kind."""

    tensor: torch.Tensor | None
    strides: tuple[int, int, int, int]
    length: int
    kind: int


class KvMask(NamedTuple):
    """A padding mask as a kernel takes it: uint8 `[B, T]`, its strides and `T`."""

    tensor: torch.Tensor | None
    strides: tuple[int, int]
    length: int


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least `n`."""
    return 1 << max(n - 1, 0).bit_length()


def check_dtype(name: str, dtype: torch.dtype) -> None:
    """Raise TypeError unless `dtype` is fp32, fp16 or bf16."""
    if dtype not in FLOAT_DTYPES:
        raise TypeError(f"{name} must be float32, float16 or bfloat16, got {dtype}")


def check_rank4(name: str, tensor: torch.Tensor) -> None:
    """Raise ValueError unless `tensor` has the four dimensions `[B, H, n, D]`."""
    if tensor.dim() != 4:
        raise ValueError(
            f"{name} must be [batch, heads, tokens, head_dim], got {tensor.dim()} dims"
        )


def check_head_dim(name: str, dim: int) -> None:
    """Raise ValueError unless `dim` is in 16..256."""
    if not MIN_HEAD_DIM <= dim <= MAX_HEAD_DIM:
        raise ValueError(f"{name} must be {MIN_HEAD_DIM}..{MAX_HEAD_DIM}, got {dim}")


def check_block_size(block_size: int) -> None:
    """Raise ValueError unless `block_size` is a positive multiple of the page of 32 tokens."""
    if block_size <= 0 or block_size % PAGE_TOKENS:
        raise ValueError(
            f"block_size must be a positive multiple of {PAGE_TOKENS}, got {block_size}"
        )


def group_size(q_heads: int, kv_heads: int) -> int:
    """Query heads for each KV head; ValueError when they do not divide."""
    if kv_heads <= 0 or q_heads <= 0 or q_heads % kv_heads:
        raise ValueError(
            f"query heads must be a positive multiple of kv heads, got {q_heads} and {kv_heads}"
        )
    return q_heads // kv_heads


def check_rows(
    batch: int,
    device: torch.device,
    rows: torch.Tensor,
    row_base: torch.Tensor,
    row_len: torch.Tensor,
) -> None:
    """Check the row vector and the tables: dtypes, sizes, contiguity and device."""
    if rows.shape != (batch,):
        raise ValueError(f"rows must be [batch] = [{batch}], got {list(rows.shape)}")
    for name, tensor, dtype in (
        ("rows", rows, torch.int32),
        ("row_base", row_base, torch.int64),
        ("row_len", row_len, torch.int32),
    ):
        check_table(name, tensor, dtype, device)


def check_table(name: str, table: torch.Tensor, dtype: torch.dtype, device: torch.device) -> None:
    """Check one table vector: dtype, rank, contiguity and device."""
    if table.dtype != dtype:
        raise TypeError(f"{name} must be {dtype}, got {table.dtype}")
    if table.dim() != 1 or not table.is_contiguous():
        raise ValueError(f"{name} must be a contiguous vector, got shape {list(table.shape)}")
    if table.device != device:
        raise ValueError(f"{name} is on {table.device}, the query or key on {device}")


def check_out(
    out: torch.Tensor | None, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """`out` when it fits (contiguous, same shape, dtype and device), or a new tensor."""
    if out is None:
        return torch.empty(shape, dtype=dtype, device=device)
    if tuple(out.shape) != shape or out.dtype != dtype or out.device != device:
        raise ValueError(
            f"out must be {list(shape)} {dtype} on {device}, "
            f"got {list(out.shape)} {out.dtype} on {out.device}"
        )
    if not out.is_contiguous():
        raise ValueError(f"out must be contiguous, got strides {out.stride()}")
    return out


def bias_operand(
    bias: torch.Tensor | None, batch: int, heads: int, tokens: int, device: torch.device
) -> Bias:
    """Check a `[B|1, Hq|1, n, T]` bias (float adds, bool True = visible) and broadcast it."""
    if bias is None:
        return Bias(None, (0, 0, 0, 0), 0, NO_BIAS)
    if bias.dim() != 4:
        raise ValueError(f"bias must be [batch|1, heads|1, tokens, keys], got {list(bias.shape)}")
    want = (batch, heads, tokens)
    if any(have not in (1, size) for have, size in zip(bias.shape, want, strict=False)):
        raise ValueError(f"bias of shape {list(bias.shape)} does not broadcast to {list(want)}")
    if bias.device != device:
        raise ValueError(f"bias is on {bias.device}, the query on {device}")
    kind = FLOAT_BIAS
    if bias.dtype == torch.bool:
        bias, kind = bias.view(torch.uint8), BOOL_BIAS
    else:
        check_dtype("bias", bias.dtype)
    s = [0 if size == 1 else step for size, step in zip(bias.shape, bias.stride(), strict=True)]
    return Bias(bias, (s[0], s[1], s[2], bias.stride(3)), bias.shape[3], kind)


def kv_mask_operand(kv_mask: torch.Tensor | None, batch: int, device: torch.device) -> KvMask:
    """Check a bool or uint8 `[B, T]` padding mask (True = may be seen)."""
    if kv_mask is None:
        return KvMask(None, (0, 0), 0)
    if kv_mask.dtype not in (torch.bool, torch.uint8):
        raise TypeError(f"kv_mask must be bool or uint8, got {kv_mask.dtype}")
    if kv_mask.dim() != 2 or kv_mask.shape[0] != batch:
        raise ValueError(f"kv_mask must be [batch={batch}, keys], got {list(kv_mask.shape)}")
    if kv_mask.device != device:
        raise ValueError(f"kv_mask is on {kv_mask.device}, the query on {device}")
    if kv_mask.dtype == torch.bool:
        kv_mask = kv_mask.view(torch.uint8)
    return KvMask(kv_mask, (kv_mask.stride(0), kv_mask.stride(1)), kv_mask.shape[1])


def workspace(device: torch.device, *shape: int) -> torch.Tensor:
    """An uninitialised fp32 tensor for partial results."""
    return torch.empty(shape, dtype=torch.float32, device=device)


def device_guard(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Make `device` current for a launch when it is another GPU than the current one."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(device)


@functools.cache
def _capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


def dependent_launch(device: torch.device) -> bool:
    """Whether a kernel may be launched before the one it depends on ends (Hopper and later)."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    index = torch.cuda.current_device() if device.index is None else device.index
    return _capability(index) >= (9, 0)
