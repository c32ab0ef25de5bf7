# SPDX-License-Identifier: Apache-2.0
"""Run the benchmarks of a device, keep the result, and say whether a ratio dropped.

    python benchmarks/run.py cpu
    python benchmarks/run.py gpu --out here.json       # or another of FILES
    python benchmarks/run.py cpu --compare benchmarks/results/decode-step-cpu-2026-01-31.json

Arguments after `--` go to pytest, for example `-- -k "own or first"`.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"

BUSY = 0.25  # load average over cores
STOPPED = (2, -signal.SIGINT)  # pytest's exit code after Ctrl-C, and of Python's end
# device -> (file, start of the result's name)
FILES = {
    "cpu": ("benchmarks/test_decode_step.py", "decode-step-cpu"),
    "gpu": ("benchmarks/test_attend_gpu.py", "attend-gpu"),
    "blocks": ("benchmarks/test_blocks_gpu.py", "blocks-gpu"),
    "latent": ("benchmarks/test_latent_gpu.py", "latent-gpu"),
    "migration": ("benchmarks/test_migration_gpu.py", "migration-gpu"),
    "prefill": ("benchmarks/test_prefill_gpu.py", "prefill-gpu"),
    "generate": ("benchmarks/test_generate_gpu.py", "generate-gpu"),
}


def need_pytest() -> None:
    """End with one line where pytest or its plugin is missing.

    Raises:
        SystemExit: one of them is.
    """
    names = {"pytest": "pytest", "pytest_benchmark": "pytest-benchmark"}
    missing = [names[module] for module in names if importlib.util.find_spec(module) is None]
    if missing:
        raise SystemExit(
            f"error: the benchmarks need {' and '.join(missing)}: "
            'pip install -c constraints.txt -e ".[bench]"'
        )


def run(device: str, extra: list[str]) -> dict[str, Any]:
    """Run the file of a device in a process of its own; returns pytest-benchmark's JSON.

    Raises:
        SystemExit: a benchmark failed, or none ran.
    """
    load = os.getloadavg()[0]
    if load > BUSY * len(os.sched_getaffinity(0)):
        print(f"warning: the machine is busy (load average {load:.1f}): the ratios will be noisy")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        command = [sys.executable, "-m", "pytest", "-q", "-rs", FILES[device][0]]
        # The tests' own options would spread the benchmarks over workers.
        command += ["-o", "addopts=--import-mode=importlib"]
        command += ["-W", "ignore::pytest.PytestConfigWarning"]  # of plugins that only tests need
        command += [f"--benchmark-json={out}", "--benchmark-columns=median,iqr,max,rounds", *extra]
        with subprocess.Popen(command, cwd=ROOT) as process:
            code = wait(process)
        if code in STOPPED and out.exists():
            print("warning: the run was stopped: the result holds what was measured before")
        elif code:
            raise SystemExit(f"error: pytest ended with {code}, so no result is kept")
        if not out.exists():
            raise SystemExit(
                f"error: no benchmark ran, so there is no result; pytest says above what the "
                f"{device} benchmarks need"
            )
        result: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
        return result | {"load_average_before": load}


def wait(process: subprocess.Popen[bytes]) -> int:
    """Exit code of pytest, which ends by itself, with a result, where the user stops the run."""
    while True:
        try:
            return process.wait()
        except KeyboardInterrupt:
            continue


def new_path(device: str) -> Path:
    """A name in the results folder that is not taken."""
    stem = f"{FILES[device][1]}-{datetime.date.today().isoformat()}"
    path, count = RESULTS / f"{stem}.json", 1
    while path.exists():
        count += 1
        path = RESULTS / f"{stem}-{count}.json"
    return path


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("device", choices=FILES, help="which benchmarks")
    parser.add_argument("--out", type=Path, help="result file instead of one in the results folder")
    parser.add_argument("--compare", type=Path, help="earlier result: fail when a ratio dropped")
    own, extra = sys.argv[1:], []
    if "--" in own:
        at = own.index("--")
        own, extra = own[:at], own[at + 1 :]
    args = parser.parse_args(own)
    need_pytest()
    # The script's own folder is on the path, the checkout is not; ratios imports pytest.
    sys.path.insert(0, str(ROOT))
    from benchmarks import ratios

    old = None
    if args.compare is not None:  # a wrong path should not wait for the run
        try:
            old = ratios.from_json(json.loads(args.compare.read_text(encoding="utf-8")))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise SystemExit(f"error: {args.compare} is no result of run.py: {error!r}") from None
    result = run(args.device, extra)
    path = args.out or new_path(args.device)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    lines = ratios.from_json(result)
    print(f"\n{ratios.table(lines)}\nresult: {path}")
    if old is not None:
        found = ratios.drops(old, lines)
        print("\n".join(found) or f"no ratio dropped by more than {ratios.ALLOWED_DROP:.0%}")
        if found:
            raise SystemExit(1)


if __name__ == "__main__":
    main()
