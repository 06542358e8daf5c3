"""A picture is drawn from the spectra of a run; that of natural gradient descent is drawn from nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.optim.test_natural_gradient import load

DOCS = Path(__file__).resolve().parent.parent.parent / "docs"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, str(DOCS / "spectra.py"), *arguments]
    return subprocess.run(words, capture_output=True, text=True, timeout=60)


def rows() -> list[dict[str, Any]]:
    """Of two blocks, of which the second has a gradient of zeros, among rows of other kinds."""
    found: list[dict[str, Any]] = []
    for step in range(1, 9):
        found.append({"step": step, "loss": 3.0})
        some = {"condition": 10.0 * step, "effective_rank": 8.0, "stable_rank": 4.0, "top_energy": 0.5}
        update = {"rms": 1e-3, "orthogonality_error": 0.1}
        numbers = {"gradient": some, "weight": some, "update": update}
        nothing = {**numbers, "gradient": dict.fromkeys(some), "update": {"rms": 0.0, "orthogonality_error": None}}
        names = {"blocks.0.attention.wq.weight": numbers, "blocks.1.attention.wq.weight": nothing}
        found.append({"step": step, "spectra": {**names, "blocks.1.moe.experts.w_up": nothing}})
    return found


def test_draws_a_run(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows()), encoding="utf-8")
    picture = tmp_path / "img" / "spectra.png"
    done = run(str(tmp_path), str(picture))
    assert done.returncode == 0, done.stderr
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert 20_000 < picture.stat().st_size < 400_000


def test_lines_are_means_over_blocks_that_have_the_number() -> None:
    script = load(DOCS / "spectra.py")
    some = [row for row in rows() if "spectra" in row]
    assert script.by_kind(some, "gradient", "condition") == {
        "attention.wq": [(step, 10.0 * step) for step in range(1, 9)]
    }
    assert script.by_kind(some, "update", "rms")["attention.wq"][0] == (1, 5e-4)
    assert script.by_kind(some, "update", "rms")["moe.experts.w_up"][0] == (1, 0.0)


def test_a_run_without_spectra_is_named(tmp_path: Path) -> None:
    done = run(str(tmp_path), str(tmp_path / "spectra.png"))
    assert done.returncode == 2
    assert done.stderr.strip() == f"{tmp_path}: no spectra in metrics.jsonl; train with log.spectra_every"


def test_draws_natural_gradient_descent(tmp_path: Path) -> None:
    load(DOCS / "natural_gradient.py").draw(tmp_path / "picture.png")
    assert 20_000 < (tmp_path / "picture.png").stat().st_size < 400_000
