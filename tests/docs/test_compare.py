"""The picture of optimizers is drawn from their evidence."""

from __future__ import annotations

import math
import runpy
from pathlib import Path

SCRIPT = Path(__file__).resolve().parent.parent.parent / "docs" / "compare.py"


def test_draws_all_optimizers(tmp_path: Path) -> None:
    tokens = [4096 * step for step in range(5, 401, 5)]
    figures = {
        name: {
            "tokens": tokens,
            "loss": [3 + 5 * math.exp(-rate * n / 4096 / 60) for n in tokens],
            "tokens_per_second": 9000 / rate,
            "held_out": {str(step): 3.1 + 5 * math.exp(-rate * step / 60) for step in (100, 200, 300, 400)},
        }
        for name, rate in {"adamw": 1.0, "muon": 1.3, "soap": 1.4, "shampoo": 1.2}.items()
    }
    picture = tmp_path / "img" / "optimizers.png"
    runpy.run_path(str(SCRIPT))["draw"](figures, picture)
    assert picture.read_bytes().startswith(b"\x89PNG")
    runpy.run_path(str(SCRIPT))["draw"]({**figures, "muon": figures["adamw"]}, tmp_path / "other.png")
    assert (tmp_path / "other.png").read_bytes() != picture.read_bytes()
