"""The figures of docs/optimizers.md are those of the evidence."""

from __future__ import annotations

import json
import re
from typing import Any

from tests.docs.test_docs import ROOT

PAGE = ROOT / "docs" / "optimizers.md"


def rows_and_figures(marker: str, pattern: str, evidence: str) -> tuple[list[tuple[str, ...]], dict[str, Any]]:
    """The rows of the page's table behind a marker, and the figures by optimizer that they must be of."""
    (table,) = re.findall(rf"<!-- {marker} -->\n(.*?)<!-- end -->", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    figures = json.loads((ROOT / "docs" / "evidence" / f"{evidence}.json").read_text())["figures"]
    rows = re.findall(pattern, table, re.MULTILINE)
    assert {row[0] for row in rows} == set(figures)
    return rows, figures


def test_learning_rates_of_the_page() -> None:
    """And the evidence's best are those of configs/optim/, inside their grids."""
    pattern = r"^\| `(\w+)`, lr ([\d.]+) \| (.*) \|$"
    rows, figures = rows_and_figures("learning rates", pattern, "optimizers-lr")
    for name, lr, losses in rows:
        of = figures[name]
        assert [f"{loss:.2f}" for loss in of["eval_loss"]] == losses.split(" | ")
        assert float(lr) == of["best"] == of["config"] == of["lr"][2]


def test_paired_seeds_of_the_page() -> None:
    """And what it says of who is below AdamW by more than three standard errors."""
    rows, figures = rows_and_figures("seeds", r"^\| `(\w+)` \| (.*?) \| (.*?) ?\|$", "optimizers")
    for name, losses, below in rows:
        of = figures[name]
        assert [f"{loss:.3f}" for loss in of["eval_loss"]] == losses.split(", ")
        if name in ("muon", "soap"):
            assert f"{of['below_adamw']:.3f} ± {of['standard_error']:.3f}" == below
            assert of["below_adamw"] > 3 * of["standard_error"]
