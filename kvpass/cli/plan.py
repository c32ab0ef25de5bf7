# SPDX-License-Identifier: Apache-2.0
"""``kvpass plan``: what fits where, and the decoding speed to expect, before a model is loaded."""

from __future__ import annotations

import json
import shutil
import tempfile
from dataclasses import asdict, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from pathlib import Path

    from kvpass.config import Config
    from kvpass.plan import Machine, ModelShape, Plan

Row = tuple[str, str, str]  # figure, value, what it rests on


class DType(StrEnum):
    """Dtypes of weights and cache."""

    float32 = "float32"
    float16 = "float16"
    bfloat16 = "bfloat16"

    @property
    def itemsize(self) -> int:
        """Bytes of a number."""
        return 4 if self is DType.float32 else 2


def command(
    model: Annotated[
        str,
        typer.Option(
            help="smollm2-135m, llama-2-7b, llama-2-13b, llama-3.1-8b, a Hugging Face folder, or "
            "a config.json."
        ),
    ],
    context: Annotated[int, typer.Option(help="Tokens of a sequence, new ones included.", min=1)],
    batch: Annotated[int, typer.Option(help="Sequences at once.", min=1)] = 1,
    dtype: Annotated[DType, typer.Option(help="Of weights and cache.")] = DType.bfloat16,
    chunk: Annotated[
        int, typer.Option(help="Tokens of each prompt that one forward pass reads.", min=1)
    ] = 2048,
    gpu: Annotated[
        str | None, typer.Option(help="Memory of the GPU, as 24GiB; default what is free here.")
    ] = None,
    host: Annotated[
        str | None,
        typer.Option(help="Size of the cold tier, as 64GiB; default what cold= takes here."),
    ] = None,
    hbm: Annotated[
        str | None, typer.Option(help="Rate of device memory, as 4000GB/s; default measured here.")
    ] = None,
    link: Annotated[
        str | None, typer.Option(help="Rate of reading the cold tier, as 50GB/s; default measured.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say before a model is loaded what fits where, and how fast it would decode.

    Exits with 1 where it does not fit.
    """
    from kvpass.config import Config
    from kvpass.model_shape import read_shape
    from kvpass.plan import make_plan

    options = Config.load()
    block_size = options.memory.block_size
    sizes = {"--gpu": gpu, "--host": host}
    given = {flag: _size(flag, text) for flag, text in sizes.items()}
    rates = {"--hbm": _rate("--hbm", hbm), "--link": _rate("--link", link)}
    shape = read_shape(model)

    machine, why = describe_machine(options, given["--gpu"], given["--host"])
    machine = replace(machine, device_rate=rates["--hbm"], link_rate=rates["--link"])
    need = {
        "context": context, "batch": batch, "itemsize": dtype.itemsize, "block_size": block_size,
        "chunk": chunk,
    }  # fmt: skip
    result = make_plan(shape, machine, **need)
    # Rates are measured last, and only those that count: a disk is slow to measure.
    if not result.problems:
        machine, measured = measure(
            machine, cold_folder(options) if result.cold_only else None, gpu is not None
        )
        why |= measured
        result = make_plan(shape, machine, **need)
    for flag, name in (("--hbm", "device rate"), ("--link", "link rate")):
        if rates[flag] is not None:
            why[name] = f"given by {flag}"
    rows = explain(shape, machine, result, why, need)
    if as_json:
        content = asdict(result) | {"machine": asdict(machine), "assumptions": why}
        print(json.dumps(content | {"model": shape.name, "parameters": shape.parameters}, indent=2))
    else:
        _print_rows(rows, result)
    if result.problems:
        raise typer.Exit(1)


def describe_machine(
    options: Config, gpu: int | None, host: int | None
) -> tuple[Machine, dict[str, str]]:
    """Return the memory of this machine, or as given, and where each figure is from.

    Args:
        options: of the cold tier.
        gpu: bytes of a GPU to plan for; None is what is free here, of RAM where there is no GPU.
        host: bytes of the cold tier; None is what ``cold`` takes here.
    """
    import torch

    from kvpass.plan import Machine
    from kvpass.runtime.memory import available_memory

    on_gpu = torch.cuda.is_available()
    why = {}
    if gpu is not None:
        device, why["device"] = gpu, "given by --gpu"
    elif on_gpu:
        device, why["device"] = torch.cuda.mem_get_info()[0], "free on this GPU now"
    else:
        device, why["device"] = available_memory(), "no GPU: RAM that is available now"
    cold = options.memory.cold
    if host is not None:
        room, why["host"] = host, "given by --host"
    elif cold != "auto":
        room, why["host"] = cold, "the option cold"
    elif gpu is not None or on_gpu:
        room, why["host"] = available_memory() // 2, "cold=auto: half of the free host memory here"
    else:
        folder = cold_folder(options)
        room = shutil.disk_usage(folder).free // 2
        why["host"] = f"cold=auto: half of the free disk of {folder}"
    return Machine(device, room, unified=gpu is None and not on_gpu), why


def cold_folder(options: Config) -> Path:
    """Return the directory of the cold tier's file on a CPU."""
    from pathlib import Path

    return options.memory.cold_dir or Path(tempfile.gettempdir())


def measure(machine: Machine, cold: Path | None, other: bool) -> tuple[Machine, dict[str, str]]:
    """Fill in the rates that were not given and can be measured here; says how.

    Args:
        machine: its rates may be None.
        cold: directory of the cold tier's file; None where no step reads the cold tier.
        other: whether the GPU is given by its size; its rates are then those of the GPU here.
    """
    import torch

    from kvpass.cli import probes

    why = {}
    on_gpu = torch.cuda.is_available()
    rate, link = machine.device_rate, machine.link_rate
    like = ", taken for the given one" if other else ""
    if rate is None and (on_gpu or machine.unified):
        rate = probes.read_rate(on_gpu) * 1e9
        why["device rate"] = f"measured: sums over {'this GPU' if on_gpu else 'RAM'}{like}"
    elif rate is None:
        why["device rate"] = "not known: there is no GPU here; give --hbm"
    if cold is None and link is None:
        why["link rate"] = "not needed: all fits into the hot arena"
    elif link is None and on_gpu:
        link = probes.link_rates()[0] * 1e9
        why["link rate"] = f"measured: copies of pinned memory{like}"
    elif link is None and cold is not None and machine.unified:
        # What RAM cannot hold as hot blocks, it cannot hold as pages of the file either.
        link = probes.disk_rates(cold)[1] * 1e9
        why["link rate"] = f"measured: reads of a file in {cold}"
    elif link is None:
        why["link rate"] = "not known: there is no GPU here; give --link"
    return replace(machine, device_rate=rate, link_rate=link), why


def explain(
    shape: ModelShape, machine: Machine, plan: Plan, why: dict[str, str], need: dict[str, int]
) -> list[Row]:
    """Return each figure with what it rests on.

    Args:
        shape: the model.
        machine: memory and rates.
        plan: of the model on the machine.
        why: where the machine's figures are from.
        need: arguments of :func:`kvpass.plan.make_plan`.
    """
    from kvpass.sizes import format_size

    batch, context, itemsize = need["batch"], need["context"], need["itemsize"]
    sequences = f"{batch} x {context:,} tokens"
    sliding = sum(layer.window is not None for layer in shape.layers)
    rows: list[Row] = [
        ("weights", format_size(plan.weights),
         f"{shape.parameters:,} parameters of {itemsize} bytes ({shape.counted})"),
        ("KV of a token", format_size(plan.kv_token),
         f"K and V of {sum(layer.elements > 0 for layer in shape.layers)} layers"),
        ("KV of all", format_size(plan.kv), f"{sequences}; {format_size(plan.kv_slots)} in whole "
         f"blocks of {need['block_size']} tokens"),
    ]  # fmt: skip
    if sliding:
        rows.append(
            ("KV read a step", format_size(plan.kv_read),
             f"{sliding} layers see a window only; the rest of theirs is kept, and not read")
        )  # fmt: skip
    rows += [
        ("activations", format_size(plan.activations),
         f"{batch} x {min(need['chunk'], context):,} tokens at once x (4 hidden + 3 intermediate) "
         f"x {itemsize} bytes, and float32 logits of the last"),
        ("device memory", format_size(machine.device), why["device"]),
        ("hot arena", format_size(plan.hot),
         "device memory less weights, activations"
         + ("" if machine.unified else " and 512 MiB of CUDA context")
         + ", at most all blocks; set hot= to it"),
        ("cold tier only", format_size(plan.cold_only), "blocks that the hot arena cannot hold"),
        ("cold tier in full", format_size(plan.cold),
         f"with copies of all full blocks; of {format_size(machine.host)}, {why['host']}"),
    ]  # fmt: skip
    for name, rate in (("device rate", machine.device_rate), ("link rate", machine.link_rate)):
        if name in why:
            rows.append((name, "-" if rate is None else f"{rate / 1e9:,.1f} GB/s", why[name]))
    if plan.tokens_a_second is not None and plan.seconds is not None:
        rows.append(
            ("decode", f"{plan.tokens_a_second:,.1f} tokens/s",
             f"{plan.seconds * 1e3:,.2f} ms a step of {batch}: weights and hot blocks at the "
             "device rate + cold blocks at the link rate, one after another; an estimate")
        )  # fmt: skip
    return rows


def _print_rows(rows: list[Row], plan: Plan) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table("figure", "value", "rests on")
    table.columns[1].justify = "right"
    for row in rows:
        table.add_row(*map(escape, row))
    console = Console()
    console.print(table)
    for note in plan.notes:
        console.print(escape(f"note: {note}"), soft_wrap=True)
    for problem in plan.problems:
        console.print(escape(f"does not fit: {problem}"), soft_wrap=True)
    if not plan.problems:
        console.print("it fits" if plan.cold_only == 0 else "it fits, with blocks in both tiers")


def _size(flag: str, text: str | None) -> int | None:
    from kvpass.errors import ConfigError
    from kvpass.sizes import parse_size

    if text is None:
        return None
    try:
        return parse_size(text)
    except ConfigError as error:
        raise ConfigError(f"{flag} = {text!r}: {error}") from None


def _rate(flag: str, text: str | None) -> float | None:
    from kvpass.errors import ConfigError

    if text is None:
        return None
    size, slash, unit = text.strip().rpartition("/")
    if slash != "/" or unit.strip().lower() != "s":
        raise ConfigError(f"{flag} = {text!r}: write a rate as '50GB/s'")
    rate = _size(flag, size)
    assert rate is not None
    return float(rate)
