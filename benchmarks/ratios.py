# SPDX-License-Identifier: Apache-2.0
"""Speeds of a run divided by those of their rivals: the numbers that outlive a machine.

A pytest plugin, loaded by the benchmark files, and the table and the comparison of `run.py`. A
benchmark notes its speed with `note`; when the run ends, each is divided by the reference that it
names, from the same group and the same run. The JSON of pytest-benchmark gets them twice: as
`extra_info["ratio"]` of each benchmark, and as the list `ratios`. (PYTEST_DONT_REWRITE: imported
before it is registered.)
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import pytest

# How several runs of one reference make one number: drift is averaged, of rivals the best counts.
REFERENCES: dict[str, Callable[[Iterable[float]], float]] = {
    "transformers uncompiled": statistics.median,
    "best SDPA": max,
    "blocks of 256 tokens": max,
    "memcpy": statistics.median,
    "undisturbed": statistics.median,
    "transformers static": max,
    "transformers dynamic": max,
    "hand-made graph": max,
    "SDPA prompt": max,
    "transformers under the limit": max,
}
ALLOWED_DROP = 0.10


@dataclass
class Line:
    """One speed.

    Attributes:
        group: what is compared with each other: a shape, a context length.
        name: unique in the group.
        speed: more is better, in `unit`.
        unit: of `speed`.
        against: key of REFERENCES whose speed this one is divided by.
        is_reference: it is itself one of the runs that make `against`.
        ours: kvpass, whose ratio must not drop; otherwise a rival.
        target: ratio that is asked for, if any.
        facts: more columns of the table.
        ratio: `speed` over that of `against`; None where no run of it succeeded.
    """

    group: str
    name: str
    speed: float
    unit: str
    against: str
    is_reference: bool = False
    ours: bool = False
    target: float | None = None
    facts: dict[str, str] = field(default_factory=dict)
    ratio: float | None = None


NOTED = pytest.StashKey[list[tuple[str, Line]]]()


def note(config: pytest.Config, fullname: str, line: Line) -> None:
    """Keep the speed of a benchmark for the end of the run.

    Args:
        config: of the run.
        fullname: of the benchmark, as pytest-benchmark writes it.
        line: its speed.
    """
    if line.against not in REFERENCES:
        raise ValueError(f"{line.against!r} is no reference; the references are {[*REFERENCES]}")
    config.stash.setdefault(NOTED, []).append((fullname, line))
    # a run that is stopped early has still shown something
    facts = "".join(f"  {key} {value}" for key, value in line.facts.items())
    with config.pluginmanager.get_plugin("capturemanager").global_and_fixture_disabled():
        print(f"\n{line.group}, {line.name}: {line.speed:.2f} {line.unit}{facts}", flush=True)


def divide(lines: Sequence[Line]) -> None:
    """Set the ratio of every line. A group without the reference uses one of another group."""
    for line in lines:
        runs = [other for other in lines if other.is_reference and other.against == line.against]
        speeds = [other.speed for other in runs if other.group == line.group]
        if not speeds and len({other.group for other in runs}) == 1:
            speeds = [other.speed for other in runs]
        line.ratio = line.speed / REFERENCES[line.against](speeds) if speeds else None


def table(lines: Sequence[Line]) -> str:
    """The lines as text, a block for each group."""
    width = max((len(line.name) for line in lines), default=0)
    out: list[str] = []
    for group in dict.fromkeys(line.group for line in lines):
        out.append(group)
        for line in (line for line in lines if line.group == group):
            speed = f"{line.speed:10.2f} {line.unit}"
            ratio = "-" if line.ratio is None else f"{line.ratio:.3f}x {line.against}"
            target = "" if line.target is None else f" (asked for: {line.target:.2f}x)"
            facts = "".join(f"  {key} {value}" for key, value in line.facts.items())
            out.append(f"  {line.name:{width}} {speed}  {ratio}{target}{facts}")
    return "\n".join(out)


def from_json(result: dict[str, Any]) -> list[Line]:
    """The lines of a result file."""
    return [Line(**line) for line in result["ratios"]]


def drops(old: Sequence[Line], new: Sequence[Line]) -> list[str]:
    """What is worse than in an earlier result, one sentence each; empty when nothing is.

    Only ratios of kvpass count. One that was measured before and is missing now is a drop; a group
    that the new run did not ask for at all is not: its settings differ.
    """
    now = {(line.group, line.name): line for line in new}
    groups = {line.group for line in new}
    found = []
    compared = 0
    for line in old:
        if not line.ours or line.ratio is None or line.group not in groups:
            continue
        compared += 1
        where = f"{line.group}, {line.name}"
        other = now.get((line.group, line.name))
        if other is None or other.ratio is None:
            found.append(f"{where}: was {line.ratio:.3f}x, now not measured")
        elif not other.ratio >= line.ratio * (1 - ALLOWED_DROP):
            found.append(
                f"{where}: {other.ratio:.3f}x {other.against}, was {line.ratio:.3f}x "
                f"({other.ratio / line.ratio - 1:+.1%}; allowed {-ALLOWED_DROP:.0%})"
            )
    if not compared:
        found.append("the results have no group in common: run both with the same settings")
    return found


def pytest_benchmark_update_json(config: pytest.Config, output_json: dict[str, Any]) -> None:
    """Put the ratios into the result."""
    noted = config.stash.get(NOTED, [])
    divide([line for _, line in noted])
    output_json["ratios"] = [asdict(line) for _, line in noted]
    found = dict(noted)
    for entry in output_json["benchmarks"]:
        line = found.get(entry["fullname"])
        if line is not None and line.ratio is not None and math.isfinite(line.ratio):
            entry["extra_info"] |= {"ratio": line.ratio, "ratio_to": line.against}


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Print the ratios."""
    lines = [line for _, line in config.stash.get(NOTED, [])]
    if lines:
        divide(lines)
        terminalreporter.section("ratios")
        terminalreporter.write_line(table(lines))
