"""Pictures that commands draw."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.ticker import FuncFormatter, PercentFormatter

_COLOURS = {"train": "#2a6fb0", "eval": "#c8501e"}
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
        axes.grid(axis="y", color="#e3e6e9", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
    both[1].set_xticks(range(first, last + 1))
    both[1].xaxis.set_major_formatter(FuncFormatter(lambda k, _: _short(2 ** round(k))))
    both[1].set_xlabel("tokens in the document, from this number to below the next")
    figure.savefig(picture, dpi=150)
    plt.close(figure)


def _short(n: int) -> str:
    for size, letter in ((1 << 30, "Gi"), (1 << 20, "Mi"), (1 << 10, "Ki")):
        if n >= size:
            return f"{n // size}{letter}"
    return str(n)
