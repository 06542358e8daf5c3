"""Draws the comparison of optimizers in docs/evidence/optimizers.json: `python docs/compare.py [PICTURE.png]`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))  # the packages of this checkout, whatever is installed

from matplotlib import pyplot as plt  # noqa: E402

from launch.plots import BLUE, MUTED, ORANGE, finish  # noqa: E402

COLORS = {"adamw": MUTED, "muon": BLUE, "soap": ORANGE, "shampoo": "#3f8f4f"}
NAMES = {"adamw": "AdamW", "muon": "Muon", "soap": "SOAP", "shampoo": "Shampoo"}


def draw(figures: dict[str, Any], picture: Path) -> None:
    """Training loss of the first seed over tokens and over seconds of training, and held-out losses as points."""
    figure, panels = plt.subplots(1, 2, figsize=(9.6, 3.8), sharey=True, layout="constrained")
    for name, color in COLORS.items():
        of = figures[name]
        per_step = of["tokens"][-1] / int(list(of["held_out"])[-1])
        for axes, scale in zip(panels, (1e-6, 1.0 / of["tokens_per_second"]), strict=True):
            axes.plot([n * scale for n in of["tokens"]], of["loss"], color=color, linewidth=1.0, alpha=0.7)
            steps, losses = [int(step) for step in of["held_out"]], list(of["held_out"].values())
            label = f"{NAMES[name]}: {losses[-1]:.2f} held out at the end"
            axes.plot(
                [step * per_step * scale for step in steps],
                losses,
                "o",
                color=color,
                label=label,
                clip_on=False,
                zorder=3,
            )
    for axes, label in zip(panels, ("million tokens", "seconds of training"), strict=True):
        axes.set_xlabel(label)
        axes.set_xlim(left=0)
    panels[0].set_ylabel("loss (nats per token)")
    panels[0].legend(frameon=False, loc="upper right", fontsize=9)
    finish(figure, panels, picture)


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE / "img" / "optimizers.png"
    draw(json.loads((HERE / "evidence" / "optimizers.json").read_text(encoding="utf-8"))["figures"], target)
    print(target)
