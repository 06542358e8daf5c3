"""Draws natural and plain gradient descent on a small problem: `python docs/natural_gradient.py [PICTURE.png]`.

The problem is least squares, f(w) = |A w|^2 / 2 with A = [[2, 1/2], [1/2, 0]], whose only minimum is w = 0. With errors
of unit variance its Fisher matrix is A^T A, which is also its Hessian. The example is of arXiv 2610.04631, section 5.1.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the packages of this checkout, whatever is installed

from matplotlib import pyplot as plt

from launch.plots import BLUE, MUTED, ORANGE, finish

PICTURE = Path(__file__).with_name("img") / "natural-gradient.png"
A = np.array([[2.0, 0.5], [0.5, 0.0]])
FISHER = A.T @ A
START = np.array([0.5, 0.5])
CLOSE = 1e-12  # a descent has arrived when |w| is below
NATURAL, PLAIN, BEST = ORANGE, BLUE, "#7a9f35"


def best_rate() -> float:
    """The fastest rate of plain descent, from the worst of starts: 2 / (largest + smallest eigenvalue of A^T A)."""
    smallest, largest = np.linalg.eigvalsh(FISHER)
    return float(2 / (largest + smallest))


def descend(rate: float, natural: bool, limit: int = 100_000) -> np.ndarray:
    """The points of w <- w - rate F^-1 g, or w <- w - rate g, with g = A^T A w, until |w| < CLOSE or `limit` steps."""
    points = [START]
    while np.linalg.norm(points[-1]) >= CLOSE and len(points) <= limit:
        gradient = A.T @ (A @ points[-1])
        points.append(points[-1] - rate * (np.linalg.solve(FISHER, gradient) if natural else gradient))
    return np.array(points)


def draw(picture: Path) -> None:
    """Paths on the contours of f, and how far they are from the minimum."""
    descents = [
        ("natural, η = 1", NATURAL, "s", descend(1.0, True)),
        ("natural, η = 0.25", NATURAL, "o", descend(0.25, True)),
        (f"plain, η = {best_rate():.3f}, its best", BEST, ".", descend(best_rate(), False)),
        ("plain, η = 0.1", PLAIN, "o", descend(0.1, False)),
    ]
    figure, (left, right) = plt.subplots(1, 2, figsize=(10.2, 4.0), width_ratios=[1, 1], layout="constrained")
    x, y = np.meshgrid(np.linspace(-0.75, 0.62, 240), np.linspace(-0.1, 0.6, 240))
    f = 0.5 * np.square(np.einsum("ij,jyx->iyx", A, np.stack([x, y]))).sum(axis=0)
    left.contour(x, y, np.sqrt(f), levels=14, colors="#d5d9dd", linewidths=0.8)
    for (label, color, marker, points), style in zip(descents, ("--", "-", "-", "-"), strict=True):
        shown = points[:13]
        left.plot(*shown.T, style, color=color, marker=marker, markersize=3.5, linewidth=0.8)
        far = np.linalg.norm(points, axis=1)
        count = len(points) - 1
        text = f"{label}: {count:,} step{'s' * (count > 1)}"
        right.plot(far, style, color=color, label=text)
    left.plot(0, 0, marker="+", color="black", markersize=9, zorder=4)
    left.annotate("start", START, (6, 4), textcoords="offset points", color=MUTED)
    left.set_xlabel("w₁")
    left.set_ylabel("w₂", rotation=0)
    left.set_title("the first 12 steps, on contours of the loss", loc="left", fontsize=10, color=MUTED)
    right.axhline(CLOSE, color=MUTED, linewidth=0.8, linestyle=":")
    right.set_xscale("symlog", linthresh=1)
    right.set_xlim(left=0)
    right.set_yscale("log")
    right.set_ylim(1e-14, 2)
    right.set_xlabel("step")
    right.set_ylabel("‖w‖")
    right.set_title("steps until ‖w‖ < 10⁻¹²", loc="left", fontsize=10, color=MUTED)
    right.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.48, -0.16), ncols=2, fontsize=8)
    finish(figure, [left, right], picture, grid=False)


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if len(sys.argv) > 1 else PICTURE)
