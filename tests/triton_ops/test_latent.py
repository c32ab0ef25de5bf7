# SPDX-License-Identifier: Apache-2.0
"""attend_latent against the reference: decode and chunks over latents, their heat, refusals."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import triton_ops
from tests.matrices import chessboard
from tests.triton_ops.paged import close, lse_close, poisoned, ragged, row_ids, visits
from triton_ops.config import latent_config, latent_splits
from triton_ops.reference import (
    Tables,
    aligned_empty,
    heat_reference,
    hot_blocks,
    latent_reference,
    place_rows,
)

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
Rows = list[torch.Tensor]


def cache(
    lengths: list[int], dim: int, rope: int, dtype: torch.dtype = torch.float32
) -> tuple[Rows, Rows]:
    """Random latents `[1, T, L]` and rotary keys `[1, T, R]`."""
    return ragged(lengths, 1, dim, dtype), ragged(lengths, 1, rope, dtype)


def chunk(
    batch: int, heads: int, n: int, dim: int, rope: int, dtype: torch.dtype = torch.float32,
    m: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Random q, c_new and r_new; m new tokens, default n."""
    m = n if m is None else m
    shapes = ((heads, n, dim + rope), (1, m, dim), (1, m, rope))
    q, c, r = (torch.randn(batch, *shape).to(dtype) for shape in shapes)
    return q, c, r


def attend(
    q: torch.Tensor, c_new: torch.Tensor | None, r_new: torch.Tensor | None, tables: Tables,
    block_size: int = 32, scale: float = 0.25, causal: bool = True, **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """`attend_latent` into a poisoned output."""
    rows = kwargs.pop("rows", torch.arange(q.shape[0], dtype=torch.int32))
    dim = kwargs["latent_dim"] if c_new is None else c_new.shape[3]
    out = poisoned(*q.shape[:3], dim, dtype=q.dtype)
    result = triton_ops.attend_latent(
        q, c_new, r_new, rows, tables.row_base, tables.row_len, block_size=block_size, scale=scale,
        causal=causal, return_lse=True, out=out, **kwargs,
    )  # fmt: skip
    assert result[0] is out
    return result


def expect(
    q: torch.Tensor, c: Rows, r: Rows, scale: float = 0.25, causal: bool = True,
    kv_mask: torch.Tensor | None = None, bias: torch.Tensor | None = None, **scoring: Any,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """The reference, row by row because lengths differ; queries are the last tokens."""
    parts = [
        latent_reference(
            q[b : b + 1], c[b][None], r[b][None], scale=scale, causal=causal,
            q_offset=c[b].shape[1] - q.shape[2],
            kv_mask=None if kv_mask is None else kv_mask[b : b + 1],
            bias=None if bias is None else bias[min(b, bias.shape[0] - 1)][None], **scoring,
        )
        for b in range(q.shape[0])
    ]  # fmt: skip
    return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])


def joined(old: Rows, new: torch.Tensor) -> Rows:
    """Each row's cached tokens with the new ones behind them."""
    return [torch.cat([have, more], 1) for have, more in zip(old, new, strict=True)]


def check(
    q: torch.Tensor, c_new: torch.Tensor, r_new: torch.Tensor, c: Rows, r: Rows,
    block_size: int = 32, scale: float = 0.25, causal: bool = True, fill: float = math.nan,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Store the cached tokens, attend and compare with the reference."""
    tables = place_rows(c, r, block_size, "cpu", fill=fill)
    out, lse = attend(q, c_new, r_new, tables, block_size, scale, causal, **kwargs)
    names = ("kv_mask", "bias", "softcap", "window")
    scoring = {name: kwargs[name] for name in names if name in kwargs}
    want, want_lse = expect(q, joined(c, c_new), joined(r, r_new), scale, causal, **scoring)
    close(out, want, q.dtype)
    lse_close(lse, want_lse)
    return out, lse


def cut(block_m: int = 16, splits: int = 0, block_n: int = 32) -> triton_ops.LatentConfig:
    """A config of small tiles."""
    return triton_ops.LatentConfig(block_m=block_m, block_n=block_n, splits=splits)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "heads"), [(1, 16), (1, 3), (37, 2), (5, 16)])
def test_equals_reference(dtype: torch.dtype, n: int, heads: int) -> None:
    c, r = cache([70, 0, 64], 64, 16, dtype)
    check(*chunk(3, heads, n, 64, 16, dtype), c, r, 64)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("dim", "rope"), [(512, 64), (96, 32), (16, 16), (130, 128), (33, 24)])
def test_widths(dtype: torch.dtype, dim: int, rope: int) -> None:
    c, r = cache([45], dim, rope, dtype)
    check(*chunk(1, 3, 4, dim, rope, dtype), c, r, scale=(dim + rope) ** -0.5)


@pytest.mark.parametrize(("heads", "block_m"), [(1, 16), (7, 16), (20, 16), (20, 32), (128, 64)])
def test_head_counts_share_the_latents(heads: int, block_m: int) -> None:
    c, r = cache([33], 16, 16)
    q, c_new, r_new = chunk(1, heads, 2, 16, 16)
    # query head 0 is zero, so it sees all alike; no other head does
    q[:, 0] = 0
    out, _ = check(q, c_new, r_new, c, r, config=cut(block_m, splits=2))
    mean = joined(c, c_new)[0][0, :34].mean(0)
    close(out[0, 0, 0], mean, torch.float32)
    assert heads == 1 or (out[0, 1:, 0] - mean).abs().amax(1).min() > 1e-3


# one token before, at and after the ends of tiles and blocks, fewer tiles than splits among them
LENGTHS = [0, 31, 32, 63, 65, 130]


@pytest.mark.parametrize(("n", "splits"), [(1, 1), (1, 3), (1, 7), (5, 2), (33, 1), (33, 3)])
def test_splits_share_cached_and_new_tokens(n: int, splits: int) -> None:
    lengths = LENGTHS if n == 1 else [1, 64]
    c, r = cache(lengths, 16, 16)
    check(*chunk(len(lengths), 3, n, 16, 16), c, r, 64, config=cut(splits=splits))


@pytest.mark.parametrize("block_n", [32, 64, 128])
@pytest.mark.parametrize("block_size", [32, 96, 128])
def test_every_tile_gives_the_answer(block_n: int, block_size: int) -> None:
    c, r = cache([129, 128, 5], 24, 16)
    check(*chunk(3, 5, 7, 24, 16), c, r, block_size, config=cut(32, 2, block_n))


@pytest.mark.parametrize(("n", "m", "splits"), chessboard([1, 6], [0, 1, 40], [1, 3]))
def test_all_tokens_seen(n: int, m: int, splits: int) -> None:
    c, r = cache([70, 33, 64], 16, 24)
    q, c_new, r_new = chunk(3, 4, n, 16, 24, m=m)
    check(q, c_new, r_new, c, r, causal=False, config=cut(splits=splits))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_new_tokens(dtype: torch.dtype) -> None:
    c, r = cache([70, 0, 32], 16, 24, dtype)
    tables = place_rows(c, r, 32, "cpu")
    q = torch.randn(3, 4, 2, 40)
    out, lse = attend(
        q, None, None, tables, causal=False, latent_dim=16, rope_dim=24, kv_dtype=dtype
    )  # fmt: skip
    want, want_lse = expect(q, c, r, causal=False)
    close(out, want, torch.float32)
    lse_close(lse, want_lse)
    assert (out[1] == 0).all() and (lse[1] == -math.inf).all()


def test_absorbed_equals_expanded() -> None:
    """The layer as it is defined: keys and values come out of the up-projections."""
    heads, nope, rope, dim, dv, past, n = 3, 24, 16, 48, 20, 41, 4
    up_k, up_v = torch.randn(heads, nope, dim) / 7, torch.randn(heads, dv, dim) / 7
    (c,), (r,) = cache([past + n], dim, rope)
    q_nope, q_rope = torch.randn(1, heads, n, nope), torch.randn(1, heads, n, rope)
    k = torch.cat([torch.einsum("tl,hdl->htd", c[0], up_k), r.expand(heads, -1, -1)], -1)
    v = torch.einsum("tl,hdl->htd", c[0], up_v)
    mask = torch.ones(n, past + n, dtype=torch.bool).tril(past)
    want = torch.nn.functional.scaled_dot_product_attention(
        torch.cat([q_nope, q_rope], -1).double(), k[None].double(), v[None].double(),
        attn_mask=mask, scale=0.2,
    )  # fmt: skip
    q = torch.cat([torch.einsum("bhnd,hdl->bhnl", q_nope, up_k), q_rope], -1)
    tables = place_rows([c[:, :past]], [r[:, :past]], 32, "cpu")
    out, _ = attend(q, c[None, :, past:], r[None, :, past:], tables, scale=0.2)
    close(torch.einsum("bhnl,hdl->bhnd", out, up_v), want, torch.float32)


@pytest.mark.parametrize("size", [1, 7])
def test_chunks_equal_one_prefill(size: int) -> None:
    empty = cache([0], 32, 16)
    q, c, r = chunk(1, 4, 40, 32, 16)
    tables = place_rows(*empty, 32, "cpu", spare_blocks=3)
    whole, _ = attend(q, c, r, tables, scale=0.3)
    close(whole, expect(q, list(c), list(r), 0.3)[0], torch.float32)
    for start in range(0, 40, size):
        part = slice(start, min(start + size, 40))
        new = c[:, :, part], r[:, :, part]
        # appended before, as a step does it
        triton_ops.append(*new, row_ids(0), tables.row_base, tables.row_len, 32)
        out, _ = attend(q[:, :, part], *new, tables, scale=0.3)
        close(out, whole[:, :, part], torch.float32)
        tables.row_len += new[0].shape[2]


def test_new_tokens_are_not_read_from_the_cache() -> None:
    tables = place_rows(*cache([10], 16, 16), 32, "cpu")
    q, c, r = chunk(1, 2, 9, 16, 16)
    before, _ = attend(q, c, r, tables)
    triton_ops.append(c * 3, r * 3, row_ids(0), tables.row_base, tables.row_len, 32)
    assert torch.equal(before, attend(q, c, r, tables)[0])


def test_blocks_of_another_dtype_than_the_query() -> None:
    c, r = cache([50], 16, 16, torch.float16)
    q, c_new, r_new = chunk(1, 4, 6, 16, 16)
    check(q, c_new.half(), r_new.half(), c, r)


@pytest.mark.parametrize("fill", [math.nan, math.inf, 1e4])
def test_stale_slots(fill: float) -> None:
    for length in (13, 31, 32, 33):
        c, r = cache([length], 24, 16)
        for n in (1, 3):
            check(*chunk(1, 2, n, 24, 16), c, r, fill=fill)


@pytest.mark.parametrize("splits", [1, 3])
def test_empty_batches_empty_chunks_and_skipped_rows(splits: int) -> None:
    c, r = cache([0, 5, 70], 16, 24)
    tables = place_rows(c, r, 32, "cpu")
    config = cut(splits=splits)
    out, lse = attend(*chunk(0, 2, 4, 16, 24), tables, config=config)
    assert out.shape == (0, 2, 4, 16) and lse.shape == (0, 2, 4)
    out, lse = attend(*chunk(3, 2, 0, 16, 24), tables, config=config)
    assert out.shape == (3, 2, 0, 16) and lse.shape == (3, 2, 0)
    for n in (1, 4):
        q, c_new, r_new = chunk(3, 2, n, 16, 24)
        rows = row_ids(-1, 2, -1)
        heat = {"row_heat": tables.row_heat, "max_blocks": tables.max_blocks} if n == 1 else {}
        out, lse = attend(q, c_new, r_new, tables, rows=rows, config=config, **heat)
        want, _ = expect(q[1:2], joined(c[2:], c_new[1:2]), joined(r[2:], r_new[1:2]))
        close(out[1:2], want, torch.float32)
        for row in (0, 2):
            assert (out[row] == 0).all() and (lse[row] == -math.inf).all()
    assert (tables.heat[:2] == 0).all() and tables.heat[2].sum() > 0


@pytest.mark.parametrize("kind", ["padding", "float", "bool", "shared"])
@pytest.mark.parametrize("n", [1, 6])
def test_masks_and_biases(kind: str, n: int) -> None:
    c, r = cache([130, 70], 16, 16)
    q, c_new, r_new = chunk(2, 4, n, 16, 16)
    operands: dict[str, torch.Tensor] = {"kv_mask": torch.rand(150, 2).t() > 0.4}
    operands["kv_mask"][1, :64] = False
    if kind != "padding":
        operands["bias"] = torch.randn(2, 4, 140, n).transpose(2, 3) * 3
    if kind == "bool":
        operands["bias"] = operands["bias"] > -2
    elif kind == "shared":
        operands["bias"] = operands["bias"][:1, :1, :1].half()
    for splits in (1, 3):
        check(q, c_new, r_new, c, r, config=cut(splits=splits), **operands)
        check(q, c_new, r_new, c, r, causal=False, config=cut(splits=splits), **operands)


def test_left_padding_and_a_query_that_sees_nothing() -> None:
    c, r = cache([0, 40], 16, 16)
    q, c_new, r_new = chunk(2, 2, 5, 16, 16)
    mask = torch.ones(2, 45, dtype=torch.uint8)
    mask[0, :3] = 0
    for splits in (1, 3):
        out, lse = check(q, c_new, r_new, c, r, kv_mask=mask, config=cut(splits=splits))
        assert (out[0, :, :3] == 0).all() and (lse[0, :, :3] == -math.inf).all()
        low = torch.full((1, 1, 1, 45), torch.finfo(torch.float32).min)
        out, _ = check(q, c_new, r_new, c, r, bias=low, causal=False, config=cut(splits=splits))
    close(out[0, :, 0], c_new[0, 0].mean(0).expand(2, 16), torch.float32)


@pytest.mark.parametrize("softcap", [0.5, 30.0])
@pytest.mark.parametrize("n", [1, 6])
def test_softcap(softcap: float, n: int) -> None:
    c, r = cache([70, 3], 16, 16)
    mask = torch.rand(2, 80) > 0.4
    check(*chunk(2, 3, n, 16, 16), c, r, scale=4.0, softcap=softcap, kv_mask=mask)


@pytest.mark.parametrize(
    ("window", "cut_into"),
    chessboard([1, 31, 32, 33, 100, 1 << 40], [(1, 1), (1, 3), (9, 2), (70, 1)]),
)
def test_window(window: int, cut_into: tuple[int, int]) -> None:
    n, splits = cut_into
    lengths = [31, 130] if n > 1 else LENGTHS
    c, r = cache(lengths, 16, 16)
    config = cut(16 if n < 70 else 64, splits)
    check(*chunk(len(lengths), 2, n, 16, 16), c, r, 64, window=window, config=config)


def test_a_window_skips_tiles() -> None:
    c, r = cache([256], 16, 16)
    tables = place_rows(c, r, 32, "cpu")
    # the blocks before the window hold NaN: zero times that would show
    bad = aligned_empty(tables.keep[0].numel(), torch.float32).fill_(math.nan)
    tables.words[0, :6] = bad.data_ptr()
    q, c_new, r_new = chunk(1, 2, 1, 16, 16)
    out, _ = attend(q, c_new, r_new, tables, window=60)
    want, _ = expect(q, joined(c, c_new), joined(r, r_new), window=60)
    close(out, want, torch.float32)


@pytest.mark.parametrize(
    ("splits", "block_size", "window"), chessboard([1, 3], [32, 128], [0, 100])
)
def test_heat_counts_the_blocks_the_reference_names(
    splits: int, block_size: int, window: int
) -> None:
    lengths = [290, 32, 255, 0, 127]
    c, r = cache(lengths, 16, 16)
    tables = place_rows(c, r, block_size, "cpu")
    # more query heads than a program has rows
    q, c_new, r_new = chunk(5, 20, 1, 16, 16)
    q = q * 2
    config = cut(splits=splits)
    want, unsure = torch.zeros_like(tables.heat), torch.zeros_like(tables.heat)
    for b, (ck, rk) in enumerate(zip(joined(c, c_new), joined(r, r_new), strict=True)):
        shares = heat_reference(
            q[b, :, 0], torch.cat([ck, rk], -1), scale=0.25, block_size=block_size, window=window
        )  # fmt: skip
        hot = hot_blocks(shares, lengths[b] + 1, block_size, window)[0]
        want[b, : len(hot)] = hot >= 1 - 1e-9
        # the only block of a row has all of the softmax: that is sure
        if len(hot) > 1:
            unsure[b, : len(hot)] = (hot - 1).abs() < 1e-3
    if block_size == 32:
        assert 0 < want.sum() < sum(n // 32 + 1 for n in lengths)
    plain = attend(q, c_new, r_new, tables, block_size, window=window, config=config)
    assert (tables.heat == 0).all()
    for step in (1, 2):
        got = attend(
            q, c_new, r_new, tables, block_size, window=window, config=config,
            row_heat=tables.row_heat, max_blocks=tables.max_blocks,
        )  # fmt: skip
        assert ((tables.heat - step * want).abs() <= step * unsure).all()
    close(got[0], plain[0], torch.float32)
    lse_close(got[1], plain[1])


@pytest.mark.parametrize("at", [95, 96])
def test_heat_of_the_new_token_is_that_of_its_block(at: int) -> None:
    """The new token alone is seen, in a tile that it shares with cached tokens and in its own."""
    c, r = cache([at], 16, 16)
    tables = place_rows(c, r, 32, "cpu")
    mask = torch.zeros(1, at + 1, dtype=torch.bool)
    mask[0, at] = True
    attend(
        *chunk(1, 3, 1, 16, 16), tables, kv_mask=mask, row_heat=tables.row_heat,
        max_blocks=tables.max_blocks,
    )  # fmt: skip
    want = [0] * 4
    want[at // 32] = 1
    assert tables.heat[0, :4].tolist() == want


def test_heat_stays_inside_max_blocks_and_an_address_of_zero_counts_none() -> None:
    zeros = [torch.zeros(1, 95, 16)] * 2
    tables = place_rows(zeros, zeros, 32, "cpu")
    q, c, r = (torch.zeros_like(x) for x in chunk(2, 3, 1, 16, 16))
    attend(q, c, r, tables, row_heat=tables.row_heat, max_blocks=2)
    assert tables.heat[:, :4].tolist() == [[1, 1, 0, 0], [1, 1, 0, 0]]
    tables.row_heat[1] = 0
    out, _ = attend(q, c, r, tables, row_heat=tables.row_heat, max_blocks=tables.max_blocks)
    assert tables.heat[:, :4].tolist() == [[2, 2, 1, 0], [1, 1, 0, 0]]
    close(out, torch.zeros(2, 3, 1, 16), torch.float32)


def test_every_partial_is_written_once(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = visits(monkeypatch)
    c, r = cache([70, 33], 16, 16)
    tables = place_rows(c, r, 32, "cpu")
    attend(
        *chunk(2, 20, 1, 16, 16), tables, config=cut(splits=2), row_heat=tables.row_heat,
        max_blocks=tables.max_blocks,
    )  # fmt: skip
    acc, sums, tiles = seen
    assert acc.shape == (2, 20, 1, 2, 16) and acc.isfinite().all() and sums.isfinite().all()
    assert tiles.shape == (2, 1, tables.max_blocks, 20)
    assert tiles[0, 0, :3].isfinite().all() and tiles[0, 0, 3:].isnan().all()
    assert tiles[1, 0, :2].isfinite().all() and tiles[1, 0, 2:].isnan().all()


@pytest.mark.parametrize("kind", ["transpose", "expand", "stride2", "split"])
def test_strided_operands(kind: str) -> None:
    c, r = cache([40, 0], 32, 16)
    if kind == "transpose":
        q = torch.randn(2, 6, 4, 48).transpose(1, 2)
        c_new, r_new = (torch.randn(2, 6, 1, d).transpose(1, 2) for d in (32, 16))
    elif kind == "expand":
        q = torch.randn(2, 4, 1, 48).expand(2, 4, 6, 48)
        c_new, r_new = torch.randn(1, 1, 6, 32).expand(2, 1, 6, 32), torch.randn(2, 1, 6, 16)
    elif kind == "stride2":
        q = torch.randn(2, 4, 6, 96)[..., ::2]
        c_new, r_new = (torch.randn(2, 1, 6, 2 * d)[..., ::2] for d in (32, 16))
    else:
        # as the down-projection gives them: one tensor [B, n, L + R]
        q = torch.randn(2, 4, 6, 48)
        c_new, r_new = torch.randn(2, 6, 48)[:, None].split([32, 16], -1)
    out, _ = check(q, c_new, r_new, c, r)
    dense = [x.contiguous() for x in (q, c_new, r_new)]
    assert torch.equal(out, check(*dense, c, r)[0])


@pytest.mark.parametrize(
    ("dim", "part", "where"), chessboard([512, 500, 96, 17], ["latent", "rope"], ["cached", "new"])
)
def test_signal_in_the_last_channel(dim: int, part: str, where: str) -> None:
    c, r = [torch.zeros(1, 40, dim)], [torch.zeros(1, 40, 24)]
    q, c_new, r_new = (torch.zeros_like(x) for x in chunk(1, 2, 1, dim, 24))
    channel = dim - 1 if part == "latent" else 23
    q[..., dim - 1 if part == "latent" else -1] = 1.0
    keys = {"latent": (c[0], c_new[0]), "rope": (r[0], r_new[0])}[part]
    at, key = (17, keys[0]) if where == "cached" else (0, keys[1])
    key[0, at, channel] = 1.0
    # the value says which token was found
    value = c[0] if where == "cached" else c_new[0]
    value[0, at, : dim - 1] = torch.randn(dim - 1)
    guarded = torch.full((3, 2, 1, dim), math.nan)
    guarded[1:] = 77.0
    tables = place_rows(c, r, 32, "cpu")
    triton_ops.attend_latent(
        q, c_new, r_new, row_ids(0), tables.row_base, tables.row_len, block_size=32, scale=100.0,
        causal=True, out=guarded[:1],
    )  # fmt: skip
    close(guarded[0, :, 0], value[0, at].expand(2, dim), torch.float32)
    assert (guarded[1:] == 77.0).all()


def test_fp32_is_not_tf32() -> None:
    c, r = ([x * 0.2 + 0.4 for x in rows] for rows in cache([1024], 128, 64))
    q, c_new, r_new = (x * 0.2 + 0.4 for x in chunk(1, 1, 2, 128, 64))
    tables = place_rows(c, r, 256, "cpu")
    out, _ = attend(q, c_new, r_new, tables, 256, 192**-0.5)
    want, _ = expect(q, joined(c, c_new), joined(r, r_new), 192**-0.5)
    assert (out - want).abs().max() < 1e-5


@pytest.mark.parametrize("n", [1, 5])
def test_placement_does_not_change_a_bit(n: int) -> None:
    c, r = cache([150, 77], 40, 16, torch.float16)
    q, c_new, r_new = chunk(2, 6, n, 40, 16, torch.float16)
    size = 32 * 56
    pool = aligned_empty(40 * size, torch.float16).view(40, size)
    there = torch.randperm(40).tolist()
    results = []
    for allocate in (None, lambda n, d, i: pool[there[i]]):
        tables = place_rows(c, r, 32, "cpu", allocate=allocate)
        heat = {"row_heat": tables.row_heat, "max_blocks": tables.max_blocks} if n == 1 else {}
        results.append((*attend(q, c_new, r_new, tables, scale=0.2, **heat), tables.heat))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert n > 1 or results[0][2].sum() > 0


@pytest.mark.parametrize(
    ("kwargs", "error", "match"),
    [
        ({"block_size": 48}, ValueError, "multiple of 32, got 48"),
        ({"softcap": -1.0}, ValueError, "softcap"),
        ({"window": -1}, ValueError, "window"),
        ({"window": 4, "causal": False}, ValueError, "needs causal"),
        ({"row_heat": True}, ValueError, "needs 1 query token a row, got 4"),
        ({"c_new": None}, ValueError, "both"),
        ({"c_new": None, "r_new": None}, ValueError, "latent_dim and rope_dim must be given"),
        (
            {"c_new": None, "r_new": None, "latent_dim": 16, "rope_dim": 16},
            ValueError,
            "as many new tokens as queries, got 0 and 4",
        ),
        ({"c_new": torch.zeros(1, 1, 4, 8)}, ValueError, "latent_dim must be 16..512, got 8"),
        ({"c_new": torch.zeros(1, 1, 4, 513)}, ValueError, "latent_dim must be 16..512, got 513"),
        ({"r_new": torch.zeros(1, 1, 4, 129)}, ValueError, "rope_dim must be 16..128, got 129"),
        ({"r_new": torch.zeros(1, 1, 4, 32)}, ValueError, "16 \\+ 32 channels.*got 32"),
        ({"c_new": torch.zeros(1, 2, 4, 16)}, ValueError, "c_new must be \\[1, 1, tokens"),
        ({"r_new": torch.zeros(2, 1, 4, 16)}, ValueError, "r_new must be \\[1, 1, tokens"),
        ({"r_new": torch.zeros(1, 1, 3, 16)}, ValueError, "differ"),
        ({"r_new": torch.zeros(1, 4, 16)}, ValueError, "got 3 dims"),
        ({"r_new": torch.zeros(1, 1, 4, 16).half()}, TypeError, "one dtype"),
        ({"c_new": torch.zeros(1, 1, 4, 16).double()}, TypeError, "float64"),
        ({"q": torch.zeros(1, 2, 4, 32).double()}, TypeError, "float64"),
        ({"q": torch.zeros(1, 0, 4, 32)}, ValueError, "must have query heads"),
        ({"q": torch.zeros(1, 2, 3, 32)}, ValueError, "got 4 and 3"),
        ({"out": torch.zeros(1, 2, 4, 32)}, ValueError, "out must be"),
        ({"rows": row_ids(0, 1)}, ValueError, "rows must be"),
        ({"bias": torch.zeros(1, 3, 4, 4)}, ValueError, "does not broadcast"),
    ],
)
def test_refusals(kwargs: dict[str, Any], error: type[Exception], match: str) -> None:
    tables = place_rows(*cache([0], 16, 16), 32, "cpu")
    q, c_new, r_new = chunk(1, 2, 4, 16, 16)
    args = {"q": q, "c_new": c_new, "r_new": r_new, "rows": row_ids(0), "block_size": 32}
    args |= {"row_base": tables.row_base, "row_len": tables.row_len, "scale": 1.0, "causal": True}
    if "row_heat" in kwargs:
        kwargs = {"row_heat": tables.row_heat, "max_blocks": 1}
    with pytest.raises(error, match=match):
        triton_ops.attend_latent(**(args | kwargs))


def test_heat_needs_max_blocks() -> None:
    tables = place_rows(*cache([0], 16, 16), 32, "cpu")
    with pytest.raises(ValueError, match="row_heat needs max_blocks"):
        attend(*chunk(1, 2, 1, 16, 16), tables, row_heat=tables.row_heat)


@pytest.mark.parametrize("operands", [False, True])
@pytest.mark.parametrize(("dim", "rope"), [(512, 64), (512, 128), (256, 64), (96, 16)])
def test_queries_and_tiles_fit_an_sm(dim: int, rope: int, operands: bool) -> None:
    for dtype in DTYPES:
        for rows in (1, 16, 17, 128, 4096):
            config = latent_config(dtype, dtype, dim, rope, rows, operands)
            # wgmma reads the tile at hand in shared memory, mma.sync in registers
            tiles = max(1, config.num_stages - (config.block_m < 64))
            tokens = config.block_m + tiles * config.block_n
            held = tokens * ((1 << (dim - 1).bit_length()) + rope) * dtype.itemsize
            if operands:
                held += tiles * config.block_m * config.block_n * 4
            # of 227 KiB; the rest is for sums over warps
            assert held * config.programs_per_sm <= 218 * 1024


def test_splits_fill_what_row_tiles_do_not() -> None:
    cpu = torch.device("cpu")
    assert latent_splits(1, 1, cpu) > 1 and latent_splits(100, 1, cpu) == 1
