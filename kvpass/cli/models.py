# SPDX-License-Identifier: Apache-2.0
"""``kvpass models``: the matrix of model families, cache forms and attention implementations."""

from __future__ import annotations

import difflib
import json
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from kvpass.errors import ConfigError, UnsupportedError
from model_zoo.architectures import ARCHITECTURES, ATTENTIONS, CACHES, Cell

if TYPE_CHECKING:
    from kvpass.cli.matrix import Result

INNER = ("eager", "aot_eager", "inductor")


def command(
    only: Annotated[
        str | None, typer.Option(help="These architectures, e.g. llama,gemma2; --list names all.")
    ] = None,
    cache: Annotated[
        str | None, typer.Option(help="These caches: dynamic, tiered, static.")
    ] = None,
    attention: Annotated[
        str | None, typer.Option(help="These implementations: sdpa, eager, flex.")
    ] = None,
    inner: Annotated[str, typer.Option(help="Inner compiler: eager, aot_eager, inductor.")] = (
        "eager"
    ),
    steps: Annotated[
        int, typer.Option(help="Greedy decode steps after the prompt.", min=1, max=400)
    ] = 32,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list of objects.")] = False,
    list_: Annotated[bool, typer.Option("--list", help="Print what would run, and stop.")] = False,
) -> None:
    """Decode with tiny random models of transformers, compiled by kvpass and uncompiled.

    Says of each architecture, cache and attention implementation how many attentions are rewritten
    in all graphs, why the others are not, and whether the greedy tokens and logits are those of the
    uncompiled model with its own cache. Nothing is downloaded. Exit status 1 if tokens differ.
    """
    chosen = select(only, cache, attention)
    (inner,) = choose(inner, INNER, "--inner", single=True)
    if list_:
        _print_list(chosen, as_json)
        return
    results = list(_run(chosen, steps, inner))
    if as_json:
        typer.echo(json.dumps([result.as_dict() for result in results], indent=2))
    else:
        _print_table(results)
    if not all(result.tokens_equal for result in results):
        raise typer.Exit(1)


def select(only: str | None, cache: str | None, attention: str | None) -> list[Cell]:
    """The cells that the options leave, in the order of the registry.

    Raises:
        ConfigError: a name is unknown, or no cell is left.
    """
    names = set(choose(only, ARCHITECTURES, "--only"))
    caches = set(choose(cache, CACHES, "--cache"))
    attentions = set(choose(attention, ATTENTIONS, "--attention"))
    of_names = [
        cell for item in ARCHITECTURES.values() if item.name in names for cell in item.cells
    ]
    cells = [cell for cell in of_names if cell.cache in caches and cell.attention in attentions]
    if not cells:
        raise ConfigError(
            f"--only {only}, --cache {cache}, --attention {attention}: no such combination; there "
            f"are {', '.join(f'{c.architecture} {c.cache} {c.attention}' for c in of_names)}"
        )
    return cells


def choose(given: str | None, known: Iterable[str], option: str, single: bool = False) -> list[str]:
    """Known names out of a comma-separated list; ``-`` and ``_`` are the same, so is case.

    Args:
        given: what the user wrote; None takes all.
        known: the names there are.
        option: the option it was written for.
        single: refuse more than one.

    Raises:
        ConfigError: a name is unknown (the nearest is given), or there is none, or too many.
    """
    names = list(known)
    if given is None:
        return names
    found: list[str] = []
    for word in filter(None, (part.strip() for part in given.split(","))):
        name = word.lower().replace("-", "_")
        if name not in names:
            close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
            hint = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(names)}"
            raise ConfigError(f"{option} {word!r} is unknown: {hint}")
        found.append(name)
    if not found or (single and len(found) > 1):
        what = "one" if single else "some"
        raise ConfigError(f"{option} {given!r}: name {what} of {', '.join(names)}")
    return found


def _run(cells: Sequence[Cell], steps: int, inner: str) -> Iterable[Result]:
    """Results in order; progress, and cells that transformers cannot run, go to stderr."""
    from kvpass.cli import matrix

    for number, cell in enumerate(cells, 1):
        name = f"[{number}/{len(cells)}] {cell.architecture} {cell.cache} {cell.attention}"
        begin = time.perf_counter()
        try:
            result = matrix.run_cell(cell, steps, inner)
        except UnsupportedError as error:
            typer.echo(f"{name}: left out: {error}", err=True)
            continue
        words = f"{result.rewritten} of {result.sites} rewritten, tokens "
        words += "equal" if result.tokens_equal else "NOT EQUAL"
        if result.unseen:
            words += f", no attention seen in {', '.join(result.unseen)}"
        typer.echo(f"{name}: {words} ({time.perf_counter() - begin:.1f} s)", err=True)
        yield result


def _print_list(cells: Sequence[Cell], as_json: bool) -> None:
    if as_json:
        rows = [
            {"architecture": c.architecture, "cache": c.cache, "attention": c.attention}
            for c in cells
        ]
        typer.echo(json.dumps(rows, indent=2))
        return
    for name in dict.fromkeys(cell.architecture for cell in cells):
        own = [f"{c.attention} {c.cache}" for c in cells if c.architecture == name]
        typer.echo(f"{name}: {', '.join(own)}")


def _print_table(results: Sequence[Result]) -> None:
    """A row a result; the first reason of each is a number that is explained below the table."""
    from rich.console import Console
    from rich.table import Table

    table = Table("model", "cache", "attention", "rewritten", "tokens", "logits", "why not")
    numbers: dict[str, int] = {}
    for result in results:
        first = result.refused[0] if result.refused else None
        if first is not None:
            numbers.setdefault(first.reason, len(numbers) + 1)
        table.add_row(
            result.architecture,
            result.cache,
            result.attention,
            f"{result.rewritten} of {result.sites}",
            "equal" if result.tokens_equal else "NOT EQUAL",
            "-" if result.max_logit_diff is None else f"{result.max_logit_diff:.1e}",
            "" if first is None else f"[{numbers[first.reason]}]",
        )
    console = Console(markup=False, highlight=False)
    console.print(table)
    for reason, number in numbers.items():
        console.print(f"[{number}] {reason}", soft_wrap=True)
