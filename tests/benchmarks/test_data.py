"""The benchmark of the data pipeline runs, and finds the same ids; what it measures is not asserted."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent


def test_data_benchmark_prints_rates_and_their_ratios() -> None:
    words = ["--megabytes", "0.3", "--vocab", "400", "--rounds", "1", "--workers", "2"]
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "data.py"), *words], capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 0, done.stderr
    number = r"[\d,.]+"
    for kind in ("sentencepiece", "huggingface"):
        assert re.search(rf"^{kind}: {number} tokens, the same ids from all; 2 processes$", done.stdout, re.M)
    rates = rf"{number} s +{number} tokens/s +{number} MB/s"
    assert len(re.findall(rf"^  gramian +{rates}$", done.stdout, re.M)) == 2
    assert len(re.findall(rf"^  datasets +{rates}   gramian is {number}x as fast$", done.stdout, re.M)) == 2
    assert re.search(rf"^  concat +{number} tokens/s = {number} times that$", done.stdout, re.M)
