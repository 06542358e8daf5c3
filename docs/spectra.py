"""Draws the spectra of a run: `python docs/spectra.py RUN_DIR PICTURE.png`, after `log.spectra_every` was set.

Each kind of matrix (wq, wo, w_up, ...) is a line, the mean over blocks; docs/optimizers.md defines the quantities.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the packages of this checkout, whatever is installed

from matplotlib import pyplot as plt  # noqa: E402
from matplotlib.lines import Line2D  # noqa: E402

from launch.plots import MUTED, finish  # noqa: E402
from trainer.rundir import RunDirectory  # noqa: E402

# (title, quantity, what it is of, logarithmic); weights are drawn dashed beside gradients
PANELS = [
    ("effective rank", "effective_rank", ("gradient", "weight"), False),
    ("energy in the top tenth of singular values", "top_energy", ("gradient", "weight"), False),
    ("condition number", "condition", ("gradient", "weight"), True),
    ("RMS of the step, lr · U", "rms", ("update",), True),
    ("orthogonality error of the step", "orthogonality_error", ("update",), False),
]
Points = dict[str, list[tuple[int, float]]]


def main(arguments: list[str]) -> int:
    """Command line."""
    if len(arguments) != 2:
        print("usage: python docs/spectra.py RUN_DIR PICTURE.png", file=sys.stderr)
        return 2
    run, picture = arguments
    rows = [row for row in RunDirectory(Path(run)).read_metrics() if "spectra" in row]
    if not rows:
        print(f"{run}: no spectra in metrics.jsonl; train with log.spectra_every", file=sys.stderr)
        return 2
    draw(rows, Path(picture))
    print(picture)
    return 0


def kind_of(name: str) -> str:
    """A parameter's name without its block: `attention.wq`."""
    return re.sub(r"^blocks\.\d+\.", "", name).removesuffix(".weight")


def by_kind(rows: list[dict[str, Any]], what: str, quantity: str) -> Points:
    """Steps and means over blocks of one quantity, by kind; blocks that have none at a step are left out."""
    points: Points = {}
    for row in rows:
        values: dict[str, list[float]] = {}
        for name, numbers in row["spectra"].items():
            here = values.setdefault(kind_of(name), [])
            if numbers[what][quantity] is not None:
                here.append(numbers[what][quantity])
        for kind, some in values.items():
            if some:
                points.setdefault(kind, []).append((row["step"], sum(some) / len(some)))
    return points


def draw(rows: list[dict[str, Any]], picture: Path) -> None:
    """Draw every quantity in a panel of its own, and the key in the last one."""
    figure, grid = plt.subplots(2, 3, figsize=(11.4, 6.0), layout="constrained")
    *panels, key = grid.flat
    kinds = list(by_kind(rows, "weight", "condition"))
    colors = dict(zip(kinds, plt.get_cmap("tab20" if len(kinds) > 10 else "tab10").colors, strict=False))
    for axes, (title, quantity, of, logarithmic) in zip(panels, PANELS, strict=True):
        for what, style in zip(of, ("-", "--"), strict=False):
            for kind, line in by_kind(rows, what, quantity).items():
                marker = "." if len(line) < 30 else ""
                axes.plot(*zip(*line, strict=True), style, color=colors[kind], linewidth=1.3, marker=marker)
        axes.set_title(title, loc="left", fontsize=10, color=MUTED)
        axes.set_xlabel("step")
        axes.set_yscale("log" if logarithmic else "linear")
        if not logarithmic:
            axes.set_ylim(bottom=0)
    key.axis("off")
    lines = [Line2D([], [], color=colors[kind], label=kind) for kind in kinds]
    styles = [Line2D([], [], color=MUTED, linestyle=s, label=w) for s, w in (("-", "gradient, step"), ("--", "weight"))]
    key.legend(handles=[*lines, *styles], frameon=False, loc="upper left", fontsize=9)
    finish(figure, panels, picture)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
