"""Pictures are drawn from the metrics of runs; those of experts in test_moe_page.py."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parent.parent.parent / "docs" / "figures.py"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, timeout=60)


def write_run(folder: Path) -> None:
    rows: list[dict[str, float]] = []
    for step in range(5, 301, 5):
        rows.append({"step": step, "tokens": 8192 * step, "loss": 4 + 4 * math.exp(-step / 60)})
        if step % 100 == 0:
            rows.append({"step": step, "eval_loss": rows[-1]["loss"] + 0.1, "eval_bits_per_byte": 2.0})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def test_draws_a_small_picture(tmp_path: Path) -> None:
    write_run(tmp_path)
    picture = tmp_path / "img" / "curve.png"
    done = run(str(tmp_path), str(picture))
    assert done.returncode == 0, done.stderr
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert 5_000 < picture.stat().st_size < 100 * 1024


def test_a_folder_without_metrics_is_named(tmp_path: Path) -> None:
    done = run(str(tmp_path))
    assert done.returncode == 2
    assert done.stderr.strip() == f"{tmp_path}: no metrics.jsonl with a logged step"


def test_a_run_without_experts_has_no_load_to_draw(tmp_path: Path) -> None:
    write_run(tmp_path)
    done = run(str(tmp_path), str(tmp_path), str(tmp_path / "load.png"))
    assert done.returncode == 2
    assert done.stderr.strip() == f"{tmp_path}: no run with experts"
    assert not (tmp_path / "load.png").exists()
