"""Draws what becomes of a SLURM job: `python docs/job_states.py` writes docs/img/job-states.png."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the packages of this checkout, whatever is installed

from matplotlib import pyplot as plt  # noqa: E402

PICTURE = Path(__file__).with_name("img") / "job-states.png"
BOX, END = "#dbe7f5", "#e9e4d4"

# Name: place of its middle, text, colour.
STATES = {
    "pending": (0.0, 2.4, "waiting\n(PENDING)", BOX),
    "running": (3.2, 2.4, "training\n(RUNNING)", BOX),
    "saved": (7.4, 3.6, "all ranks save\nat the same step,\nexit 75 (requeue)", BOX),
    "killed": (7.4, 2.4, "steps since the\nnewest checkpoint\nare lost", BOX),
    "requeue": (2.4, 4.6, "requeued under the same\njob id, without nodes\nthat failed twice", BOX),
    "done": (3.2, 0.3, "done\nexit 0", END),
    "bad_input": (0.2, 0.3, "bad input\nexit 2", END),
    "fault": (7.4, 0.3, "not started again:\nexit 1, 70 or more", END),
    "cancelled": (10.9, 3.6, "cancelled\nby you", END),
}
# From, to, what makes it so, and how far the arrow bends.
ARROWS = (
    ("pending", "running", "SLURM\nstarts it", 0.0),
    ("running", "saved", "preempted, time limit,\nscontrol requeue", 0.0),
    ("running", "killed", "a process or node\ndied, ranks hang", 0.0),
    ("running", "done", "all steps\nare made", 0.0),
    ("running", "bad_input", "found at\nthe start", 0.0),
    ("running", "fault", "a fault that would\ncome again", 0.0),
    ("saved", "requeue", "", 0.1),
    ("killed", "requeue", "", 0.3),
    ("killed", "fault", "three times without a new\ncheckpoint, or max_requeues", 0.0),
    ("saved", "cancelled", "gramian\nslurm cancel", 0.0),
    ("requeue", "pending", "", 0.2),
)


def main() -> None:
    """Write the picture."""
    draw(PICTURE)
    print(PICTURE)


def draw(picture: Path) -> None:
    """Draw states and arrows."""
    figure, axes = plt.subplots(figsize=(11, 5.2))
    boxes = {}
    for name, (x, y, text, colour) in STATES.items():
        style = {"boxstyle": "round,pad=0.5", "facecolor": colour, "edgecolor": "#555555"}
        boxes[name] = axes.text(x, y, text, ha="center", va="center", fontsize=9, bbox=style, zorder=3)
    for source, target, text, bend in ARROWS:
        (x0, y0, *_), (x1, y1, *_) = STATES[source], STATES[target]
        style = {
            "arrowstyle": "->",
            "color": "#333333",
            "shrinkA": 4,
            "shrinkB": 4,
            "patchA": boxes[source].get_bbox_patch(),
            "patchB": boxes[target].get_bbox_patch(),
            "connectionstyle": f"arc3,rad={bend}",
        }
        axes.annotate("", xy=(x1, y1), xytext=(x0, y0), arrowprops=style, zorder=1)
        paper = {"boxstyle": "square,pad=0.1", "facecolor": "white", "edgecolor": "none"}
        if text:
            axes.text((x0 + x1) / 2, (y0 + y1) / 2, text, ha="center", va="center", fontsize=7.5, bbox=paper, zorder=2)
    axes.set_xlim(-1.0, 11.8)
    axes.set_ylim(-0.3, 5.2)
    axes.axis("off")
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=110, bbox_inches="tight")
    plt.close(figure)


if __name__ == "__main__":
    main()
