"""The benchmarks run; what they measure is not asserted."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent


def test_model_benchmark_prints_rates_and_their_ratio() -> None:
    words = ["--preset", "llama-1m", "--batch", "1", "--seq", "16", "--rounds", "2"]
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "model.py"), *words], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"^gramian +[\d,]+ tokens/s +[\d.]+% of the matmul rate$", done.stdout, re.M)
    assert re.search(r"^transformers +[\d,]+ tokens/s +[\d.]+% of the matmul rate$", done.stdout, re.M)
    assert re.search(r"^ratio +\d+\.\d\d \(median of 2 alternating pairs\)$", done.stdout, re.M)
