"""Draws the loss curve of a run: `python docs/figures.py runs/quickstart` writes docs/img/loss-curve.png.

A second argument names another file to write.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the packages of this checkout, whatever is installed

import matplotlib  # noqa: E402

matplotlib.use("Agg")

from matplotlib import pyplot as plt  # noqa: E402

from trainer.rundir import RunDirectory  # noqa: E402

PICTURE = Path(__file__).with_name("img") / "loss-curve.png"
TRAIN, HELD_OUT, MUTED = "#2a6fb0", "#c8501e", "#5c6670"


def main(arguments: list[str]) -> int:
    """Command line."""
    if len(arguments) not in (1, 2):
        print("usage: python docs/figures.py RUN_DIR [PICTURE.png]", file=sys.stderr)
        return 2
    rows = RunDirectory(Path(arguments[0])).read_metrics()
    if not any("loss" in row for row in rows):
        print(f"{arguments[0]}: no metrics.jsonl with a logged step", file=sys.stderr)
        return 2
    picture = Path(arguments[1]) if len(arguments) == 2 else PICTURE
    draw(rows, picture)
    print(picture)
    return 0


def draw(rows: list[dict[str, Any]], picture: Path) -> None:
    """Draw training and held-out loss over the tokens of training."""
    train = [(row["step"], row["loss"]) for row in rows if "loss" in row]
    held_out = [(row["step"], row["eval_loss"]) for row in rows if "eval_loss" in row]
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
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats per token)")
    axes.margins(y=0.09)  # room for the labels
    axes.set_xlim(0, train[-1][0])
    axes.grid(axis="y", color="#e3e6e9", linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(MUTED)
    axes.tick_params(colors=MUTED)
    last = train[-1][0]
    axes.set_title(f"{last:,} steps, {tokens[last]:,} tokens", loc="left", fontsize=10, color=MUTED)
    axes.legend(frameon=False, loc="upper right")
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=150, metadata={"Software": None})
    plt.close(figure)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
