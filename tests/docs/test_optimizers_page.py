"""The figures of docs/optimizers.md are those of the evidence."""

from __future__ import annotations

import json
import re

from tests.docs.test_docs import ROOT

PAGE = ROOT / "docs" / "optimizers.md"


def test_learning_rates_of_the_page() -> None:
    """And the evidence's best are those of configs/optim/, inside their grids."""
    text = PAGE.read_text(encoding="utf-8")
    (table,) = re.findall(r"<!-- learning rates -->\n(.*?)<!-- end -->", text, re.DOTALL)
    figures = json.loads((ROOT / "docs" / "evidence" / "optimizers-lr.json").read_text())["figures"]
    rows = re.findall(r"^\| `(\w+)`, lr ([\d.]+) \| (.*) \|$", table, re.MULTILINE)
    assert {name for name, _, _ in rows} == set(figures)
    for name, lr, losses in rows:
        of = figures[name]
        assert [f"{loss:.2f}" for loss in of["eval_loss"]] == losses.split(" | ")
        assert float(lr) == of["best"] == of["config"] == of["lr"][2]
