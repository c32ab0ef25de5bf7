# SPDX-License-Identifier: Apache-2.0
"""The command ``kvpass``. A subcommand's module is imported only when that subcommand runs."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from kvpass._version import __version__
from kvpass.errors import ConfigError, KVPassError

# name -> line of `kvpass --help`; the function is `command` in kvpass/cli/<name>.py.
COMMANDS = {
    "demo": "Run SmolLM2 on a long document with most of its KV cache in the cold tier.",
    "generate": "Generate text from a model with a tiered KV cache.",
    "simulate": "Replay recorded traces with kvpass's policy, classic ones and the optimum.",
    "explain": "Say of each attention of a model whether it is rewritten, or why not.",
    "models": "Say which attentions of transformers' models are rewritten, on tiny random ones.",
    "metrics": "Print the metrics of a running process.",
    "top": "Watch the tiers of a running process.",
    "config": "Check the options, and say what each is and where it was written.",
    "plan": "Say before a model is loaded what fits where, and how fast it would decode.",
    "doctor": "Say what this machine can do, and how to mend what it cannot.",
}


class LazyCommand(TyperCommand):
    """A subcommand by name and help line; its module is imported when it is to run."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any
    ) -> Any:
        """Return the context of the real command, so the real one is what gets invoked."""
        assert self.name is not None
        module = importlib.import_module(f"kvpass.cli.{self.name}")
        # A Typer with a single command and no callback builds that command, not a group.
        holder = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        holder.command(self.name)(module.command)
        return typer.main.get_command(holder).make_context(info_name, args, parent=parent, **extra)


class LazyGroup(TyperGroup):
    """The group of the commands in ``COMMANDS``, none of them imported yet."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names in the order of the table."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> TyperCommand | None:
        """Return the lazy command of that name, or None."""
        if cmd_name not in COMMANDS:
            return None
        return LazyCommand(name=cmd_name, help=COMMANDS[cmd_name], callback=None)


app = typer.Typer(cls=LazyGroup, add_completion=False, pretty_exceptions_enable=False)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kvpass {__version__}")
        raise typer.Exit


@app.callback(
    no_args_is_help=True,
    epilog="Exit status: 0 success, 1 failure (tokens differ, a download fails), 2 wrong usage.",
)
def _options(
    ctx: typer.Context,
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors.")] = False,
) -> None:
    """Run decoders with a KV cache in memory tiers."""
    ctx.obj["debug"] = debug


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line and exit: 0 on success, 1 on a failure, 2 on wrong usage.

    Args:
        argv: arguments after the program's name; None takes those of the process.
    """
    state = {"debug": False}
    args = None if argv is None else list(argv)
    try:
        typer.main.get_command(app).main(args=args, prog_name="kvpass", obj=state)
    except KVPassError as error:
        if state["debug"]:
            raise
        print(f"error: {error}", file=sys.stderr)
        # Options are checked before anything runs, in the commands and by typer alike.
        sys.exit(2 if isinstance(error, ConfigError) else 1)
