# SPDX-License-Identifier: Apache-2.0
"""Draw a result of run.py: one row of bars for each group, kvpass beside its rivals.

    python benchmarks/plot.py benchmarks/results/attend-gpu-2026-01-31.json

The picture lies beside the result, with the ending .png, unless `--out` says otherwise. A tick on a
bar is the speed that was asked for, where there is one.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
OURS, RIVAL = "#1f77b4", "#b0b0b0"


def draw(result: dict[str, Any], path: Path) -> None:
    """Write the picture of a result.

    Args:
        result: as run.py writes it.
        path: of the picture; its ending says of what kind.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    from benchmarks import ratios

    lines = ratios.from_json(result)
    groups = list(dict.fromkeys(line.group for line in lines))
    bars = {group: [line for line in lines if line.group == group] for group in groups}
    heights = [0.32 * len(bars[group]) + 0.7 for group in groups]
    figure, axes = plt.subplots(
        len(groups), 1, figsize=(9, sum(heights)), height_ratios=heights, squeeze=False,
        layout="constrained",
    )  # fmt: skip
    for axis, group in zip(axes[:, 0], groups, strict=True):
        for at, line in enumerate(bars[group]):
            axis.barh(at, line.speed, color=OURS if line.ours else RIVAL)
            ratio = "" if line.ratio is None else f"  {line.ratio:.2f}x"
            speed = f"{line.speed:,.0f}" if line.speed >= 100 else f"{line.speed:.3g}"
            axis.text(line.speed, at, f" {speed}{ratio}", va="center", fontsize=8)
            if line.target is not None and line.ratio:
                axis.plot(line.speed / line.ratio * line.target, at, "|k", markersize=14)
        axis.set_yticks(range(len(bars[group])), [line.name for line in bars[group]], fontsize=8)
        axis.invert_yaxis()
        axis.margins(x=0.18)
        axis.set_title(f"{group} ({bars[group][0].unit})", fontsize=9, loc="left")
        axis.spines[["top", "right"]].set_visible(False)
    gpus = [gpu["name"] for gpu in result.get("machine_info", {}).get("gpus", [])]
    figure.suptitle(", ".join(gpus) or result.get("machine_info", {}).get("cpu", ""), fontsize=9)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("result", type=Path, help="of run.py")
    parser.add_argument("--out", type=Path, help="the picture")
    args = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    path = args.out or args.result.with_suffix(".png")
    try:
        result = json.loads(args.result.read_text(encoding="utf-8"))
        if not isinstance(result, dict) or not result.get("ratios"):
            raise ValueError("it has no ratios: results of run.py can be drawn")
    except (OSError, ValueError) as error:
        raise SystemExit(f"error: {args.result}: {error}") from None
    try:
        draw(result, path)
    except ImportError as error:
        raise SystemExit(f'error: {error}: pip install -c constraints.txt -e ".[bench]"') from None
    except (OSError, ValueError) as error:
        raise SystemExit(f"error: the picture {path}: {error}") from None
    print(path)


if __name__ == "__main__":
    main()
