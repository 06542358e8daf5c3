"""Pictures that commands draw."""

from __future__ import annotations

import io
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.ticker import FuncFormatter, PercentFormatter

from common.files import atomic_write

BLUE, ORANGE, MUTED = "#2a6fb0", "#c8501e", "#5c6670"
_COLOURS = {"train": BLUE, "eval": ORANGE}
_NAMES = {"train": "to train on", "eval": "held out"}


def plot_lengths(lengths: dict[str, list[dict[str, Any]]], picture: Path) -> None:
    """Draw, for each split, the share of documents and the share of tokens by the length of the document.

    `lengths` has for each split the bins as `data.statistics.summary` gives them.
    """
    first = min(row["from"] for rows in lengths.values() for row in rows).bit_length() - 1
    last = max(row["from"] for rows in lengths.values() for row in rows).bit_length() - 1
    figure, both = plt.subplots(2, 1, figsize=(7.2, 4.8), sharex=True, layout="constrained")
    width = 0.8 / len(lengths)
    for axes, what in zip(both, ("documents", "tokens"), strict=True):
        for i, (split, rows) in enumerate(lengths.items()):
            total = sum(row[what] for row in rows)
            places = [row["from"].bit_length() - 1 + (i - (len(lengths) - 1) / 2) * width for row in rows]
            heights = [row[what] / total for row in rows]
            axes.bar(places, heights, width, color=_COLOURS[split], label=f"{_NAMES[split]} ({total:,} {what})")
        axes.set_ylabel(f"share of {what}")
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        axes.legend(frameon=False)
    both[1].set_xticks(range(first, last + 1))
    both[1].xaxis.set_major_formatter(FuncFormatter(lambda k, _: _short(2 ** round(k))))
    both[1].set_xlabel("tokens in the document, from this number to below the next")
    finish(figure, both, picture)


def finish(figure: Any, panels: Iterable[Any], picture: Path, grid: bool = True) -> None:
    """Give panels what all pictures have in common, and write the file, the same bytes for the same picture."""
    for axes in panels:
        if grid:
            axes.grid(axis="y", color="#e3e6e9", linewidth=0.8)
            axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color(MUTED)
        axes.tick_params(which="both", colors=MUTED)
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=150, metadata={"Software": None})
    plt.close(figure)
    atomic_write(picture, content.getvalue())


def _short(n: int) -> str:
    for size, letter in ((1 << 30, "Gi"), (1 << 20, "Mi"), (1 << 10, "Ki")):
        if n >= size:
            return f"{n // size}{letter}"
    return str(n)
