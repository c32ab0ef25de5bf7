# SPDX-License-Identifier: Apache-2.0
"""The tile of a family, from the options to the attention of a compiled model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

import kvpass
from kvpass import cpu_extend, ops
from kvpass.errors import ConfigError, KVPassWarning
from tests.models import OPTIONS, compile_with, prompt, tiny
from tests.runtime.harness import BLOCK, Driver

PAST = 3 * BLOCK + 5


@pytest.fixture
def visits(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Queries and keys of every tile that is scored from here on."""
    seen: list[tuple[int, int]] = []
    visit = cpu_extend._Tile.visit

    def note(self: Any, k: torch.Tensor, *rest: Any) -> None:
        seen.append((self.queries, k.shape[1]))
        visit(self, k, *rest)

    monkeypatch.setattr(cpu_extend._Tile, "visit", note)
    return seen


def chunk(driver: Driver, tile: tuple[int, int] | None, **options: Any) -> torch.Tensor:
    """Attention of 40 new tokens."""
    torch.manual_seed(1)
    q, k, v = driver.random(40, 6, 16), driver.random(40, 2, 16), driver.random(40, 2, 16)
    with driver.manager.step(driver.batch, 40, [0]) as rows:
        token = torch.ops.kvpass.append(k, v, rows, 0, BLOCK)
        out = torch.ops.kvpass.attend(
            q, k, v, token, rows, 0, BLOCK, 0.3, True, None, None, tile=tile, **options
        )
    old = driver.dense[0]
    driver.dense[0] = (torch.cat([old[0], k], 2), torch.cat([old[1], v], 2))
    assert (out - driver.attention(q, 0)).abs().max() <= 1e-5
    return out


def filled(**options: Any) -> Driver:
    torch.manual_seed(0)
    driver = Driver(layers=1, **options)
    driver.append(PAST)
    return driver


@pytest.mark.parametrize("tile", [(16, 32), (32, 64), None])
def test_a_tile_bounds_what_is_scored_at_once(
    tile: tuple[int, int] | None, visits: list[tuple[int, int]]
) -> None:
    driver = filled()
    visits.clear()
    chunk(driver, tile)
    rows, columns = tile or (256, BLOCK)
    assert max(queries for queries, _ in visits) == min(rows, 40)
    assert max(keys for _, keys in visits) == min(columns, BLOCK)


def test_keys_of_a_block_are_scored_in_parts(visits: list[tuple[int, int]]) -> None:
    cache = kvpass.TieredCache(tiny("llama").config, 300, block_size=128)
    k = torch.randn(1, 2, 200, 16)
    with pytest.warns(KVPassWarning, match="outside a graph"):
        cache.update(k, k, 0)
    row, scoring = cache.batch.blocks[0][0], kvpass.cpu_ops.Scoring(0.3, False, 0.0, 0, None)
    q = torch.randn(4, 5, 16)
    outs = []
    for tile in (None, (64, 32), (2, 128)):
        out = torch.empty(5, 4, 16)
        visits.clear()
        cpu_extend.extend(cache.batch, 0, row, q, None, None, scoring, None, None, out, tile=tile)
        outs.append(out)
        sizes = [keys for _, keys in visits]
        assert (
            sizes
            == {
                None: [128, 72],
                (64, 32): [32, 32, 32, 32, 32, 32, 8],
                (2, 128): [128, 72] * 3,
            }[tile]
        )
    assert all((out - outs[0]).abs().max() <= 1e-5 for out in outs)


@pytest.mark.parametrize("tile", [(16, 32), None])
def test_places_change_no_bit_of_a_tile(tile: tuple[int, int] | None) -> None:
    outs = []
    for hot in (lambda *_: True, lambda *_: False, lambda _layer, _sequence, i: i % 2 == 0):
        driver = filled()
        driver.manager.place(driver.batch, hot)
        outs.append(chunk(driver, tile))
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])


def test_the_op_for_a_gpu_passes_the_tile_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under the interpreter the same function runs on the tables of the CPU."""
    pytest.importorskip("triton")
    import triton_ops
    from triton_ops import config

    seen = []
    for name in ("attend_extend", "attend_decode"):
        real = getattr(triton_ops, name)

        def note(*args: Any, real: Any = real, tile: Any, **options: Any) -> Any:
            seen.append(tile)
            return real(*args, tile=tile, **options)

        monkeypatch.setattr(triton_ops, name, note)
    driver = filled(dtype=torch.float16)
    for tokens in (5, 1):
        q, k = driver.random(tokens, 6, 16), driver.random(tokens, 2, 16)
        with driver.manager.step(driver.batch, tokens, [0]) as rows:
            token = ops._append_cpu(k, k, rows, 0, BLOCK)
            arguments = (q, k, k, token, rows, 0, BLOCK, 0.3, True, None, None)
            expected = ops._attend_cpu(*arguments)
            out = ops._attend_cuda(*arguments, tile=[32, 64])
        assert (out - expected).abs().max() <= 2e-3
    assert seen == [[32, 64], [32, 64]]
    assert config.decode_config(q.dtype, q.dtype, 16, 16, 3, (32, 64)).block_n == 64


FAMILIES = {
    "optimizations": {"llama": {"block_size": [16, 32]}, "default": {"block_size": "32,64"}}
}


def tiles_of(model: Any, *caches: Any, **options: Any) -> list[tuple[int, ...] | None]:
    """Tiles that the ops are given while a compiled model reads two chunks into each cache."""
    ids, _ = prompt(1, 40)
    seen: list[tuple[int, ...] | None] = []
    real = kvpass.cpu_ops.attend

    def note(*args: Any) -> torch.Tensor:
        seen.append(None if args[13] is None else tuple(args[13]))
        return real(*args)

    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(kvpass.cpu_ops, "attend", note)
        compile_with(model, **options)
        for cache in caches:
            for part in (ids[:, :30], ids[:, 30:]):
                model(part, past_key_values=cache)
    torch._dynamo.reset()
    return list(dict.fromkeys(seen))


def test_a_family_is_known_by_the_config_of_a_cache() -> None:
    """Each cache has its own tile, also where one compiled model serves several."""
    for name, tile in (("llama", (16, 32)), ("gpt2", (32, 64))):
        model = tiny(name)
        caches = [
            kvpass.TieredCache(model.config, 64, **OPTIONS, **options)
            for options in (FAMILIES, {"optimizations.default.block_size": "64, 128"}, {})
        ]
        assert tiles_of(model, *caches) == [tile, (64, 128), None], name


def test_a_family_is_known_by_the_modules_of_a_graph() -> None:
    for name, tile in (("llama", (16, 32)), ("gpt2", (32, 64))):
        model = tiny(name)
        cache = transformers.DynamicCache(config=model.config)
        assert tiles_of(model, cache, **FAMILIES) == [tile], name


def test_auto_follows_the_width_of_the_model() -> None:
    auto = {"optimizations": {"default": {"block_size": "auto"}}}
    config = tiny("llama").config
    assert kvpass.TieredCache(config, 64, **auto).tile == (64, 64)
    config.hidden_size = 2048
    assert kvpass.TieredCache(config, 64, **auto).tile == (128, 128)
    config.num_local_experts = 8
    assert kvpass.TieredCache(config, 64, **auto).tile == (32, 32)
    with pytest.raises(Exception, match="a compiled graph does not: write the tile") as caught:
        tiles_of(tiny("llama"), transformers.DynamicCache(), **auto)
    error: BaseException | None = caught.value
    while error is not None and not isinstance(error, ConfigError):
        error = error.__cause__ or error.__context__
    assert error is not None
