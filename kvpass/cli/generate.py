# SPDX-License-Identifier: Apache-2.0
"""``kvpass generate``: text from a checkpoint with a tiered KV cache."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer


def command(
    ctx: typer.Context,
    model: Annotated[str, typer.Option(help="smollm2-135m, or a Hugging Face folder (Llama).")],
    prompt: Annotated[str | None, typer.Option(help="The prompt.")] = None,
    prompt_file: Annotated[
        Path | None, typer.Option(help="A UTF-8 text file that holds the prompt.")
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Put the prompt into the model's chat template.")
    ] = False,
    hot: Annotated[
        str | None,
        typer.Option(help="Size of the hot tier, e.g. 64MiB, or auto; default KVPASS_HOT or auto."),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to generate at most.", min=1)] = 128,
    temperature: Annotated[
        float, typer.Option(help="0 takes the likeliest token; more is more varied.")
    ] = 0.0,
    top_k: Annotated[int | None, typer.Option(help="Only so many of the likeliest tokens.")] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Only the likeliest tokens, up to this probability.")
    ] = None,
    repetition_penalty: Annotated[
        float, typer.Option(help="Above 1, tokens that are there already become less likely.")
    ] = 1.0,
    seed: Annotated[
        int | None,
        typer.Option(help="Of the chance that --temperature brings in.", min=0, max=2**63 - 1),
    ] = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="A string that ends the text; may be repeated.")
    ] = None,
    inner: Annotated[
        str | None,
        typer.Option(
            help="Inner compiler: auto, inductor, aot_eager or eager; default KVPASS_INNER or auto."
        ),
    ] = None,
    record_trace: Annotated[
        Path | None,
        typer.Option(help="File (.npz) that gets the accesses of each block, for kvpass simulate."),
    ] = None,
    trace_interval: Annotated[
        int | None, typer.Option(help="Decode steps of a tick of the trace; default 1.", min=1)
    ] = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Generate again without kvpass and compare.")
    ] = False,
    metrics_port: Annotated[
        int | None,
        typer.Option(help="Serve metrics on this port of this machine meanwhile; 0 picks one."),
    ] = None,
) -> None:
    """Generate and print the text as it comes, greedily unless there is a temperature."""
    import sys
    import time
    from contextlib import ExitStack
    from itertools import pairwise

    import torch

    import kvpass
    import model_zoo
    from kvpass.cli import running
    from kvpass.errors import ConfigError
    from kvpass.generation.sampling import Sampling
    from kvpass.runtime.trace import Recorder, check_target

    if (prompt is None) == (prompt_file is None):
        raise ConfigError("give one of --prompt and --prompt-file")
    running.check_options(inner=inner, hot=hot)
    try:
        sampling = Sampling(temperature, top_k, top_p, repetition_penalty)
    except ConfigError as error:
        raise ConfigError(f"--{str(error).replace('_', '-', 1)}") from None
    if verify and not sampling.greedy:
        raise ConfigError("--verify compares greedy tokens: leave --temperature out")
    if verify and (stop or repetition_penalty != 1.0):
        raise ConfigError("--verify knows neither --stop nor --repetition-penalty")
    if stop and not all(stop):
        raise ConfigError("--stop '' would end every text: give some text")
    if record_trace is not None:
        check_target(record_trace)
        needed = 1 + (trace_interval or 1)  # the first token comes of the prompt
        if max_new_tokens < needed:
            raise ConfigError(
                f"--max-new-tokens {max_new_tokens} leaves no tick to record: give at least "
                f"{needed}"
            )
    elif trace_interval is not None:
        raise ConfigError(f"--trace-interval {trace_interval} needs --record-trace FILE")
    ctx.with_resource(running.metrics(metrics_port))
    if prompt is not None and not prompt:
        raise ConfigError("--prompt has no tokens: give some text")
    try:
        (prompt or "").encode()
    except UnicodeEncodeError as error:  # bytes that are no UTF-8 come as halves of characters
        raise ConfigError(f"--prompt is no UTF-8 text: {error}; use --prompt-file") from None
    if prompt_file is not None:
        try:
            prompt = prompt_file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--prompt-file {prompt_file}: {error}") from error
    assert prompt is not None
    device = "cuda" if torch.cuda.is_available() else "cpu"
    loaded = running.load(model, device)
    tokenizer = loaded.tokenizer
    ids = (
        tokenizer.encode(tokenizer.apply_chat(prompt), add_bos=False)
        if chat
        else tokenizer.encode(prompt)
    )
    if not ids:
        raise ConfigError("the prompt has no tokens: give some text")
    limit = loaded.config.max_position_embeddings
    if len(ids) + max_new_tokens > limit:
        raise ConfigError(
            f"{len(ids)} prompt tokens + {max_new_tokens} new > {limit} positions of the model: "
            "shorten the prompt or lower --max-new-tokens"
        )
    tokens = torch.tensor([ids], device=device)
    ends = frozenset(() if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,))
    cache = kvpass.TieredCache(loaded.config, len(ids) + max_new_tokens, hot=hot)
    decoder: Any = running.compiled(loaded.decoder, inner)
    running.say("compiling; the first tokens take half a minute or more")
    generator = None if seed is None else torch.Generator(device).manual_seed(seed)
    times = [time.perf_counter()]
    with ExitStack() as stack:
        recorder = None
        if record_trace is not None:
            recorder = stack.enter_context(
                Recorder(cache, model=Path(model).name, interval=trace_interval or 1)
            )
        out = kvpass.generate(
            decoder, tokens, cache, max_new_tokens=max_new_tokens, temperature=temperature,
            top_k=top_k, top_p=top_p, repetition_penalty=repetition_penalty, stop=stop or (),
            eos_token_id=sorted(ends), tokenizer=tokenizer, generator=generator,
            on_tokens=lambda *_: times.append(time.perf_counter()),
            on_text=lambda _, text: print(text, end="", flush=True),
        )  # fmt: skip
    print(flush=True)
    if recorder is not None and record_trace is not None:
        recorder.trace().save(record_trace)
    run = running.Run(out.tokens[0], [], [b - a for a, b in pairwise(times)])
    snapshot = cache.snapshot()
    assert snapshot is not None
    share = snapshot.cold_only_bytes / max(snapshot.kv_bytes, 1)
    typer.echo(
        f"[{len(run.tokens)} tokens, {run.tokens_a_second:.1f} tokens/s, {share:.0%} of the KV "
        "cache outside the hot tier]",
        file=sys.stderr,
    )
    if verify:
        with running.progress("verify", max_new_tokens) as advance:
            reference = running.decode(
                running.own_step(loaded.decoder, model_zoo.DenseCache()),
                tokens,
                max_new_tokens,
                stop=ends,
                on_token=advance,
            )
        same = run.tokens == reference.tokens
        typer.echo(f"tokens identical: {'yes' if same else 'no'}", file=sys.stderr)
        if not same:
            raise typer.Exit(1)
