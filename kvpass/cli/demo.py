# SPDX-License-Identifier: Apache-2.0
"""``kvpass demo``: a real model on a long document, a quarter of its KV cache in the hot tier."""

from __future__ import annotations

from importlib import resources
from typing import Annotated, Any

import typer


def command(
    ctx: typer.Context,
    tokens: Annotated[
        int, typer.Option(help="Tokens of the document to read, at least 512.", min=512)
    ] = 4100,
    new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", help="Tokens to generate.", min=2)
    ] = 96,
    share: Annotated[
        float, typer.Option(help="Share of the KV cache in the hot tier.", min=0.02, max=1.0)
    ] = 0.25,
    inner: Annotated[
        str, typer.Option(help="Inner compiler: auto, inductor, aot_eager or eager.")
    ] = "eager",
    metrics_port: Annotated[
        int | None,
        typer.Option(help="Serve metrics on this port of this machine meanwhile; 0 picks one."),
    ] = None,
) -> None:
    """Run SmolLM2 on a document, most of its KV cache in the cold tier, and compare.

    The same greedy decoding is done twice, by kvpass and by the plain decoder with a dense cache;
    the table says whether the tokens are the same, where the bytes were, what moved, and how fast
    both were.
    """
    import torch
    from rich.console import Console

    import kvpass
    import model_zoo
    from kvpass.cli import running
    from kvpass.errors import ConfigError
    from kvpass.sizes import format_size

    console = Console()
    running.check_options(inner=inner)  # a wrong name should not wait for the model
    ctx.with_resource(running.metrics(metrics_port))
    console.print("loading SmolLM2-135M-Instruct (fetched and converted on first use) ...")
    loaded = model_zoo.load("smollm2-135m")
    config = loaded.config
    document = resources.files("kvpass").joinpath("data/document.txt").read_text(encoding="utf-8")
    ids = loaded.tokenizer.encode(document)
    if tokens > len(ids):
        raise ConfigError(f"--tokens {tokens}: the document has {len(ids)} tokens")
    prompt = torch.tensor([ids[:tokens]])
    token_bytes = config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 2 * 4
    total = (tokens + new_tokens) * token_bytes
    hot = int(total * share)
    capacity = tokens + new_tokens

    def cache() -> kvpass.TieredCache:
        # Short windows: a short run should show blocks move by heat.
        return kvpass.TieredCache(config, capacity, hot=hot, heat_interval=16)

    decoder: Any = running.compiled(loaded.decoder, inner)
    console.print("compiling on a few hundred tokens ...")
    running.decode(running.own_step(decoder, cache()), prompt[:, :300], 4)
    console.print(
        "reading the document, with kvpass and then without: each takes a quarter of a minute on "
        "two idle cores ..."
    )
    with running.progress("kvpass", new_tokens) as advance:
        tiered = cache()
        ours = running.decode(
            running.own_step(decoder, tiered), prompt, new_tokens, on_token=advance
        )
    snapshot = tiered.snapshot()
    assert snapshot is not None
    del tiered
    with running.progress("plain decoder, dense cache", new_tokens) as advance:
        step = running.own_step(loaded.decoder, model_zoo.DenseCache())
        reference = running.decode(step, prompt, new_tokens, on_token=advance)
    same = ours.tokens == reference.tokens
    console.print(f"\n[bold]continuation:[/] {loaded.tokenizer.decode(ours.tokens)!r}\n")
    counters = snapshot.counters
    growth = max(0, ours.memory[1] - ours.memory[0])
    _table(
        console,
        {
            "tokens identical": "yes" if same else "no",
            "prompt + new tokens": f"{tokens} + {new_tokens}",
            "KV cache": format_size(snapshot.kv_bytes),
            "hot tier": f"{format_size(hot)} ({share:.0%} of it)",
            "only copy outside the hot tier": f"{format_size(snapshot.cold_only_bytes)} "
            f"({snapshot.cold_only_bytes / snapshot.kv_bytes:.0%})",
            "placed directly in the cold tier": f"blocks: {counters.placed_cold_blocks}",
            "moved hot to cold": f"blocks copied: {counters.stored_blocks}, "
            f"hot copies given up: {counters.demoted_blocks}",
            "moved cold to hot": f"blocks copied: {counters.loaded_blocks}",
            "memory growth while decoding": f"{format_size(growth)} (anonymous; limit "
            f"{format_size(hot + (64 << 20))})",
            "prompt, kvpass / plain": f"{ours.seconds[0]:.1f} s / {reference.seconds[0]:.1f} s",
            "tokens a second (median), kvpass / plain": f"{ours.tokens_a_second:.1f} / "
            f"{reference.tokens_a_second:.1f}",
        },
    )
    if not same:
        raise typer.Exit(1)


def _table(console: Any, rows: dict[str, str]) -> None:
    from rich.table import Table

    table = Table(show_header=False)
    for name, value in rows.items():
        table.add_row(name, value)
    console.print(table)
    # A line that scripts can look for, whatever the width of the terminal.
    console.print(f"tokens identical: {rows['tokens identical']}")
