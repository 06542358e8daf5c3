"""Memory of whole processes: an export of a gigabyte, and the plan for one of 405 billion parameters."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from data.tokenizers.training import train_sentencepiece
from models.config import ModelConfig
from tests.trainer.exchange.checkpoints import random_checkpoint, sparse_checkpoint
from tests.verify.evidence import ROOT, write_evidence

pytestmark = [pytest.mark.verify, pytest.mark.timeout(3600)]
# The command in a process of its own, which tells its peak at the end.
CODE = """
import sys
from launch.cli import app
app(sys.argv[1:], standalone_mode=False)
with open("/proc/self/status") as file:
    print(next(1024 * int(line.split()[1]) for line in file if line.startswith("VmHWM")), file=sys.stderr)
"""


def measured(words: list[str], report: Path) -> dict[str, Any]:
    """Peak memory and seconds of `gramian checkpoint ...`, and what it reports."""
    start = time.monotonic()
    words = [sys.executable, "-c", CODE, "checkpoint", *words, "--json", str(report)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=3000)
    assert done.returncode == 0, done.stderr
    told = json.loads(report.read_text())
    return {
        "seconds": round(time.monotonic() - start, 1),
        "peak_bytes": int(done.stderr.splitlines()[-1]),
        "parameters": told["parameters"],
        "files": len(told.get("files", [])),
        "bytes": told.get("bytes"),
    }


def test_exchange(tmp_path: Path, corpus: Path) -> None:
    texts = [path.read_text(encoding="utf-8") for path in sorted(corpus.iterdir())]
    tokenizer = tmp_path / "tokenizer.model"
    tokenizer.write_bytes(train_sentencepiece(texts, 4096))
    keys = {"preset": "llama-125m", "vocab_size": 50_257, "n_layers": 27, "tie_embeddings": False}
    checkpoint = random_checkpoint(tmp_path / "checkpoint", tokenizer, **keys)
    figures: dict[str, Any] = {"largest_tensor_bytes": 4 * 50_257 * 768}
    for dtype in ("fp32", "bf16"):
        words = ["export", str(checkpoint), "--to", "hf", "--out", str(tmp_path / dtype), "--dtype", dtype]
        figures[f"export in {dtype}"] = measured(words, tmp_path / "report.json")
    words = ["import", str(tmp_path / "bf16"), "--out", str(tmp_path / "back")]
    figures["import from bf16"] = measured(words, tmp_path / "report.json")
    exports = [f"export in {dtype}" for dtype in ("fp32", "bf16")]

    for ranks in (64, 512):
        sparse = sparse_checkpoint(tmp_path / f"{ranks}-ranks", ranks, ModelConfig(preset="llama3-405b"))
        words = ["export", str(sparse), "--to", "hf", "--out", str(tmp_path / "405b"), "--dry-run"]
        figures[f"dry run of 405B from {ranks} ranks"] = measured(words, tmp_path / "report.json")

    write_evidence("exchange", "pytest -m verify tests/verify/test_exchange.py", figures)
    assert figures[exports[0]]["bytes"] > 1e9
    for name in (*exports, "import from bf16"):
        assert figures[name]["peak_bytes"] < 2 * figures["largest_tensor_bytes"] + 400e6, name
    for ranks in (64, 512):
        assert figures[f"dry run of 405B from {ranks} ranks"]["peak_bytes"] < 2e9
        assert figures[f"dry run of 405B from {ranks} ranks"]["parameters"] == 405_853_388_800
