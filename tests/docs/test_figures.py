"""The loss curve is drawn from a run's metrics."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parent.parent.parent / "docs" / "figures.py"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, timeout=60)


def test_draws_a_small_picture(tmp_path: Path) -> None:
    rows: list[dict[str, float]] = []
    for step in range(5, 301, 5):
        rows.append({"step": step, "tokens": 8192 * step, "loss": 4 + 4 * math.exp(-step / 60)})
        if step % 100 == 0:
            rows.append({"step": step, "eval_loss": rows[-1]["loss"] + 0.1, "eval_bits_per_byte": 2.0})
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    picture = tmp_path / "img" / "curve.png"
    done = run(str(tmp_path), str(picture))
    assert done.returncode == 0, done.stderr
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert 5_000 < picture.stat().st_size < 100 * 1024


def test_a_folder_without_metrics_is_named(tmp_path: Path) -> None:
    done = run(str(tmp_path))
    assert done.returncode == 2
    assert done.stderr.strip() == f"{tmp_path}: no metrics.jsonl with a logged step"
