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
MAX_LATENT_DIM, MAX_ROPE_DIM = 512, 128
# within these, neither the cap nor a score divided by it leaves the range of fp32
MIN_SOFTCAP, MAX_SOFTCAP = 1e-30, 1e30
MAX_WINDOW = 1 << 30
FLOAT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)

NO_SPAN, WINDOW_SPAN, CHUNK_SPAN = 0, 1, 2
NO_BIAS, FLOAT_BIAS, BOOL_BIAS = 0, 1, 2


class Bias(NamedTuple):
    """A bias as a kernel takes it: strides of a `[B, Hq, n, T]` view, `T` and its kind."""

    tensor: torch.Tensor | None
    strides: tuple[int, int, int, int]
    length: int
    kind: int


class Cap(NamedTuple):
    """A softcap as a kernel takes it: the factor of the products, and the cap (0 = none)."""

    scale: float
    softcap: float


class Span(NamedTuple):
    """Which earlier keys a query sees: those of a window or of its chunk, `size` tokens long."""

    size: int
    kind: int


ALL_KEYS = Span(0, NO_SPAN)


class NewKeys(NamedTuple):
    """Keys and values that come with the queries, as a kernel takes them, and what they tell."""

    k: torch.Tensor
    v: torch.Tensor
    tokens: int
    kv_heads: int
    head_dim_v: int
    dtype: torch.dtype


class NewLatents(NamedTuple):
    """Latents and rotary keys that come with the queries, and the widths that they tell."""

    c: torch.Tensor
    r: torch.Tensor
    tokens: int
    latent_dim: int
    rope_dim: int
    dtype: torch.dtype


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


def check_head_dim(name: str, dim: int, most: int = MAX_HEAD_DIM) -> None:
    """Raise ValueError unless `dim` is in 16..`most`."""
    if not MIN_HEAD_DIM <= dim <= most:
        raise ValueError(f"{name} must be {MIN_HEAD_DIM}..{most}, got {dim}")


def check_latent_dims(latent_dim: int, rope_dim: int) -> None:
    """Raise ValueError unless a latent has 16..512 channels and a rotary key 16..128."""
    for name, dim, most in (
        ("latent_dim", latent_dim, MAX_LATENT_DIM),
        ("rope_dim", rope_dim, MAX_ROPE_DIM),
    ):
        if not MIN_HEAD_DIM <= dim <= most:
            raise ValueError(f"{name} must be {MIN_HEAD_DIM}..{most}, got {dim}")


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


def check_words(words: torch.Tensor, batch: int, device: torch.device) -> None:
    """Check tables of block words, int64 `[B, W]`: dtype, shape, contiguity and device."""
    if words.dtype != torch.int64 or words.device != device:
        raise TypeError(f"tables of words must be int64 on {device}, got {words.dtype} on "
                        f"{words.device}")  # fmt: skip
    if words.dim() != 2 or words.shape[0] != batch or not words.is_contiguous():
        raise ValueError(
            f"tables of words must be [{batch}, W] contiguous, got {list(words.shape)}"
        )


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


def new_keys_operand(
    k_new: torch.Tensor | None,
    v_new: torch.Tensor | None,
    q: torch.Tensor,
    kv_heads: int | None,
    head_dim_v: int | None,
    kv_dtype: torch.dtype | None,
) -> NewKeys:
    """Check `[B, Hkv, m, Dk]` keys and `[B, Hkv, m, Dv]` values; None for both: m = 0."""
    if k_new is None or v_new is None:
        if k_new is not v_new:
            raise ValueError("k_new and v_new must both be given, or both be None")
        if kv_heads is None or head_dim_v is None:
            raise ValueError("without k_new and v_new, kv_heads and head_dim_v must be given")
        kv_dtype = q.dtype if kv_dtype is None else kv_dtype
        check_dtype("kv_dtype", kv_dtype)
        # of 0 new keys nothing is read: any pointer will do
        return NewKeys(q, q, 0, kv_heads, head_dim_v, kv_dtype)
    for name, tensor in (("k_new", k_new), ("v_new", v_new)):
        check_rank4(name, tensor)
        check_dtype(name, tensor.dtype)
        if tensor.device != q.device:
            raise ValueError(f"{name} is on {tensor.device}, q on {q.device}")
    batch, heads, _, dk = q.shape
    group_size(heads, k_new.shape[1])
    if (k_new.shape[0], k_new.shape[3]) != (batch, dk):
        raise ValueError(
            f"k_new must be [{batch}, kv_heads, tokens, {dk}] for q {list(q.shape)}, "
            f"got {list(k_new.shape)}"
        )
    if v_new.shape[:3] != k_new.shape[:3]:
        raise ValueError(f"k_new and v_new differ: {list(k_new.shape)} and {list(v_new.shape)}")
    if v_new.dtype != k_new.dtype:
        raise TypeError(f"k_new and v_new must have one dtype: {k_new.dtype} and {v_new.dtype}")
    return NewKeys(k_new, v_new, k_new.shape[2], k_new.shape[1], v_new.shape[3], k_new.dtype)


def new_latents_operand(
    c_new: torch.Tensor | None,
    r_new: torch.Tensor | None,
    q: torch.Tensor,
    latent_dim: int | None,
    rope_dim: int | None,
    kv_dtype: torch.dtype | None,
) -> NewLatents:
    """Check `[B, 1, m, L]` latents and `[B, 1, m, R]` rotary keys; None for both: m = 0."""
    if c_new is None or r_new is None:
        if c_new is not r_new:
            raise ValueError("c_new and r_new must both be given, or both be None")
        if latent_dim is None or rope_dim is None:
            raise ValueError("without c_new and r_new, latent_dim and rope_dim must be given")
        kv_dtype = q.dtype if kv_dtype is None else kv_dtype
        check_dtype("kv_dtype", kv_dtype)
        # of 0 new tokens nothing is read: any pointer will do
        new = NewLatents(q, q, 0, latent_dim, rope_dim, kv_dtype)
    else:
        for name, tensor in (("c_new", c_new), ("r_new", r_new)):
            check_rank4(name, tensor)
            check_dtype(name, tensor.dtype)
            if tensor.device != q.device:
                raise ValueError(f"{name} is on {tensor.device}, q on {q.device}")
            if tensor.shape[:2] != (q.shape[0], 1):
                raise ValueError(
                    f"{name} must be [{q.shape[0]}, 1, tokens, channels] for q {list(q.shape)}, "
                    f"got {list(tensor.shape)}"
                )
        if r_new.shape[2] != c_new.shape[2]:
            raise ValueError(f"c_new and r_new differ: {list(c_new.shape)}, {list(r_new.shape)}")
        if r_new.dtype != c_new.dtype:
            raise TypeError(f"c_new and r_new must have one dtype: {c_new.dtype}, {r_new.dtype}")
        tokens, latent_dim = c_new.shape[2:]
        new = NewLatents(c_new, r_new, tokens, latent_dim, r_new.shape[3], c_new.dtype)
    check_latent_dims(new.latent_dim, new.rope_dim)
    if q.shape[3] != new.latent_dim + new.rope_dim:
        raise ValueError(
            f"q must have {new.latent_dim} + {new.rope_dim} channels, latents first, "
            f"got {q.shape[3]}"
        )
    return new


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


def softcap_operand(softcap: float, scale: float) -> Cap:
    """Check a softcap (0 = none); with one, the products are divided by it on the way."""
    softcap, scale = float(softcap), float(scale)
    if softcap == 0:
        return Cap(scale, 0.0)
    if not MIN_SOFTCAP <= softcap <= MAX_SOFTCAP:
        raise ValueError(f"softcap must be 0 (none) or {MIN_SOFTCAP}..{MAX_SOFTCAP}, got {softcap}")
    return Cap(scale / softcap, softcap)


def window_operand(window: int, name: str = "window") -> int:
    """Check a window or chunk (0 = none), cut to what 32-bit positions can tell apart."""
    if not isinstance(window, int) or isinstance(window, bool):
        raise TypeError(f"{name} must be an int, got {type(window).__name__}")
    if window < 0:
        raise ValueError(f"{name} must be 0 (none) or a number of tokens, got {window}")
    return min(window, MAX_WINDOW)


def span_operand(window: int, chunk: int, causal: bool = True) -> Span:
    """Check a window and a chunk, of which at most one is given, and only under `causal`."""
    window, size = window_operand(window), window_operand(chunk, "chunk")
    if window and size:
        raise ValueError(f"a window ({window}) and chunks ({size}) at once are not supported")
    if (window or size) and not causal:
        what = f"a window ({window})" if window else f"a chunk ({size})"
        raise ValueError(f"{what} needs causal=True")
    return Span(window, WINDOW_SPAN) if window else Span(size, CHUNK_SPAN if size else NO_SPAN)


def sinks_operand(
    sinks: torch.Tensor | None, heads: int, device: torch.device
) -> torch.Tensor | None:
    """Check the sinks `[Hq]`, one logit a query head; contiguous."""
    if sinks is None:
        return None
    check_dtype("sinks", sinks.dtype)
    if sinks.shape != (heads,):
        raise ValueError(f"sinks must be [heads] = [{heads}], got {list(sinks.shape)}")
    if sinks.device != device:
        raise ValueError(f"sinks are on {sinks.device}, the query on {device}")
    return sinks.contiguous()


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
