"""The benchmarks run; what they measure is not asserted."""

from __future__ import annotations

import re

from tests.benchmarks.scripts import printed


def test_model_benchmark_prints_rates_and_their_ratio() -> None:
    words = ["--preset", "llama-1m", "--batch", "1", "--seq", "16", "--rounds", "2"]
    output = printed("model.py", *words)
    assert re.search(r"^gramian +[\d,]+ tokens/s +[\d.]+% of the matmul rate$", output, re.M)
    assert re.search(r"^transformers +[\d,]+ tokens/s +[\d.]+% of the matmul rate$", output, re.M)
    assert re.search(r"^ratio +\d+\.\d\d \(median of 2 alternating pairs\)$", output, re.M)
