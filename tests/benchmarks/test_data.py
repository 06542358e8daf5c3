"""The benchmark of the data pipeline runs, and finds the same ids; what it measures is not asserted."""

from __future__ import annotations

import re

from tests.benchmarks.scripts import printed


def test_data_benchmark_prints_rates_and_their_ratios() -> None:
    words = ["--megabytes", "0.3", "--vocab", "400", "--rounds", "1", "--workers", "2"]
    output = printed("data.py", *words, timeout=250)
    number = r"[\d,.]+"
    for kind in ("sentencepiece", "huggingface"):
        assert re.search(rf"^{kind}: {number} tokens, the same ids from all; 2 processes$", output, re.M)
    rates = rf"{number} s +{number} tokens/s +{number} MB/s"
    assert len(re.findall(rf"^  gramian +{rates}$", output, re.M)) == 2
    assert len(re.findall(rf"^  datasets +{rates}   gramian is {number}x as fast$", output, re.M)) == 2
    assert re.search(rf"^  concat +{number} tokens/s = {number} times that$", output, re.M)
