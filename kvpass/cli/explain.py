# SPDX-License-Identifier: Apache-2.0
"""``kvpass explain``: what the pass does to each attention of a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer


class Via(StrEnum):
    """Whose code runs the checkpoint."""

    own = "own"
    transformers = "transformers"


def command(
    model: Annotated[str, typer.Option(help="smollm2-135m, or a Hugging Face folder (Llama).")],
    via: Annotated[Via, typer.Option(help="model_zoo's decoder, or transformers.")] = Via.own,
    verify: Annotated[
        int,
        typer.Option(
            help="Compare this many greedy tokens with the uncompiled model; 0: none.", min=0
        ),
    ] = 0,
    inner: Annotated[
        str, typer.Option(help="Inner compiler of --verify: auto, inductor, aot_eager or eager.")
    ] = "eager",
    hot: Annotated[
        str | None,
        typer.Option(help="Hot size of --verify, e.g. 8MiB, or auto; default KVPASS_HOT or auto."),
    ] = None,
    graph: Annotated[
        Path | None, typer.Option(help="Folder that gets each graph before and after, as text.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say of each attention whether it is rewritten, with every cache form the model takes.

    A prompt and two decode steps are traced, without compiling the rest of the model.
    """
    import torch

    import kvpass
    import model_zoo
    from kvpass.cli import running
    from kvpass.explanation import Explanation, check_folder, explaining

    running.check_options(inner=inner, hot=hot)
    if graph is not None:
        check_folder(graph)
    loaded = running.load(model)
    prompt = torch.tensor([loaded.tokenizer.encode(PROMPT)])
    own = via is Via.own
    network: Any = loaded.decoder if own else running.load_transformers(str(loaded.path))
    step_of = running.own_step if own else running.transformers_step
    capacity = prompt.shape[1] + max(verify, 3)
    caches: dict[str, Callable[[], Any]] = {
        "TieredCache": lambda: kvpass.TieredCache(network.config, capacity, hot=hot)
    }
    reference_cache: Callable[[], Any] = model_zoo.DenseCache
    if not own:
        from transformers import DynamicCache

        caches["DynamicCache"] = reference_cache = lambda: DynamicCache(config=network.config)
    reference = None
    if verify:
        running.say(f"decoding {verify} tokens uncompiled")
        reference = running.decode(
            step_of(network, reference_cache()), prompt, verify, keep_logits=True
        )
    results: list[dict[str, Any]] = []
    failed = False
    for name, make in caches.items():
        running.say(f"tracing with {name}")
        with explaining(network, texts=graph is not None) as (module, reports):
            running.decode(step_of(module, make()), prompt, 3)
        explanation = Explanation(tuple(reports))
        if graph is not None:
            explanation.write(graph, name)
        row: dict[str, Any] = {"cache": name, **explanation.as_dict()}
        if reference is not None:
            running.say(f"decoding {verify} tokens with {name}, inner {inner}")
            step = step_of(running.compiled(network, inner), make())
            ours = running.decode(step, prompt, verify, keep_logits=True)
            row["tokens_equal"] = ours.tokens == reference.tokens
            row["max_logit_diff"] = max(
                float((a - b).abs().max())
                for a, b in zip(ours.logits, reference.logits, strict=True)
            )
            failed |= not row["tokens_equal"]
        results.append(row)
        if not as_json:
            typer.echo(f"{type(network).__name__} with {name}: {explanation.text}")
            if reference is not None:
                equal = "equal" if row["tokens_equal"] else "NOT EQUAL"
                typer.echo(
                    f"  {verify} greedy tokens, inner {inner}: {equal} to the uncompiled model, "
                    f"largest logit difference {row['max_logit_diff']:.2e}"
                )
    if as_json:
        typer.echo(json.dumps(results, indent=2))
    if failed:
        raise typer.Exit(1)


PROMPT = (
    "A cache keeps what will be needed again close at hand. When it is full, something has to make "
    "room, and the art lies in choosing what will not be missed."
)
