"""Draws runs: `python docs/figures.py runs/quickstart` writes its loss curve to docs/img/loss-curve.png.

With a second run, `python docs/figures.py runs/moe-quickstart runs/quickstart PICTURE.png` draws the losses of both,
by how much they differ, and how even the load of the first one's experts was. The last argument, if it ends in .png,
names the file to write.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the packages of this checkout, whatever is installed

from matplotlib import pyplot as plt  # noqa: E402

from launch.plots import BLUE as TRAIN  # noqa: E402
from launch.plots import MUTED, finish  # noqa: E402
from launch.plots import ORANGE as HELD_OUT  # noqa: E402
from trainer.rundir import RunDirectory  # noqa: E402

PICTURE = Path(__file__).with_name("img") / "loss-curve.png"
Rows = list[dict[str, Any]]


def main(arguments: list[str]) -> int:
    """Command line."""
    *runs, picture = arguments if arguments and arguments[-1].endswith(".png") else [*arguments, str(PICTURE)]
    if len(runs) not in (1, 2):
        print("usage: python docs/figures.py RUN_DIR [RUN_DIR] [PICTURE.png]", file=sys.stderr)
        return 2
    of_runs = []
    for run in runs:
        of_runs.append(RunDirectory(Path(run)).read_metrics())
        if not any("loss" in row for row in of_runs[-1]):
            print(f"{run}: no metrics.jsonl with a logged step", file=sys.stderr)
            return 2
    if len(of_runs) == 1:
        draw(of_runs[0], Path(picture))
    elif any("expert_load_max" in row for row in of_runs[0]):
        draw_experts(*of_runs, Path(picture))
    else:
        print(f"{runs[0]}: no run with experts", file=sys.stderr)
        return 2
    print(picture)
    return 0


def points(rows: Rows, key: str) -> list[tuple[int, float]]:
    """Steps and values of the rows that have a key; a loss that was not finite is none."""
    return [(row["step"], row[key]) for row in rows if row.get(key) is not None]


def draw(rows: Rows, picture: Path) -> None:
    """Draw training and held-out loss over the tokens of training."""
    train, held_out = points(rows, "loss"), points(rows, "eval_loss")
    tokens = {row["step"]: row["tokens"] for row in rows if "tokens" in row}

    figure, axes = plt.subplots(figsize=(7.2, 3.8), layout="constrained")
    axes.plot(*zip(*train, strict=True), color=TRAIN, linewidth=1.6, label="training batches")
    if held_out:
        axes.plot(
            *zip(*held_out, strict=True),
            color=HELD_OUT,
            linestyle="none",
            marker="o",
            markersize=6,
            label="held-out documents",
            zorder=3,
            clip_on=False,
        )
        for step, loss in held_out:
            nearest = min(train, key=lambda point: abs(point[0] - step))[1]
            above = loss > nearest  # on the side away from the line
            axes.annotate(
                f"{loss:.2f}",
                (step, loss),
                (0, 7 if above else -7),
                textcoords="offset points",
                ha="center",
                va="bottom" if above else "top",
                color=HELD_OUT,
                fontsize=9,
                bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1},
            )
    axes.set_ylabel("loss (nats per token)")
    axes.margins(y=0.09)  # room for the labels
    last = train[-1][0]
    axes.set_title(f"{last:,} steps, {tokens[last]:,} tokens", loc="left", fontsize=10, color=MUTED)
    finish_over_steps(figure, [axes], last, picture)


def draw_experts(sparse: Rows, dense: Rows, picture: Path) -> None:
    """Draw the losses of a model with experts and of another one, by how much they differ, and the load of experts."""
    figure, (left, middle, right) = plt.subplots(
        1, 3, figsize=(11.4, 3.6), width_ratios=[4, 3, 3], layout="constrained"
    )
    dots: dict[str, Any] = {"linestyle": "none", "marker": "o", "markersize": 6, "clip_on": False, "zorder": 3}
    for rows, name, color in ((dense, "dense", HELD_OUT), (sparse, "experts", TRAIN)):
        left.plot(*zip(*points(rows, "loss"), strict=True), color=color, linewidth=1.2, label=f"{name}, training")
        if held_out := points(rows, "eval_loss"):
            label = f"{name}, held out: {held_out[-1][1]:.3f} at the end"
            left.plot(*zip(*held_out, strict=True), color=color, label=label, **dots)
    left.set_ylabel("loss (nats per token)")

    for key, label, style in (("loss", "training", {"linewidth": 1.2}), ("eval_loss", "held out", dots)):
        theirs = dict(points(dense, key))
        ahead = [(step, theirs[step] - loss) for step, loss in points(sparse, key) if step in theirs]
        if ahead:
            middle.plot(*zip(*ahead, strict=True), color=MUTED, label=label, **style)
    middle.axhline(0.0, color=MUTED, linewidth=1)
    middle.set_ylabel("loss of dense minus that of experts")

    steps, largest = zip(*points(sparse, "expert_load_max"), strict=True)
    smallest = [load for _, load in points(sparse, "expert_load_min")]
    right.fill_between(steps, smallest, largest, color=TRAIN, alpha=0.25, linewidth=0, label="least to most loaded")
    right.axhline(1.0, color=MUTED, linewidth=1, label="even load")
    right.set_ylabel("load over the mean, worst layers")
    right.set_ylim(bottom=0)
    finish_over_steps(figure, [left, middle, right], steps[-1], picture)


def finish_over_steps(figure: Any, panels: list[Any], last: int, picture: Path) -> None:
    """What all panels have in common; write the file."""
    for axes in panels:
        axes.set_xlabel("step")
        axes.set_xlim(0, last)
        axes.legend(frameon=False, loc="best")
    finish(figure, panels, picture)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
