"""The quickstart with experts beside the one without, over seeds; and the layer's speed beside peers."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.verify.evidence import ROOT, write_evidence
from trainer.rundir import RunDirectory

pytestmark = [pytest.mark.verify, pytest.mark.timeout(7200)]
GRAMIAN = str(Path(sys.executable).with_name("gramian"))
CONFIG, DENSE = "configs/moe-quickstart.yaml", "model.moe=null"
SEEDS = (0, 1)


def train(folder: Path, name: str, seed: int, words: list[str]) -> subprocess.Popen[bytes]:
    """Start a run in the background, on one core."""
    keys = [f"run.dir={folder}", f"run.name={name}{seed}", f"run.seed={seed}", "train.sample_prompt=null"]
    command = [GRAMIAN, "train", CONFIG, *keys, *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL)


def test_experts_beat_the_dense_model_of_the_same_active_size(tmp_path: Path) -> None:
    """Same tokens, tokenizer, steps and optimizer. A seed changes initial weights and the order of rows of both."""
    kinds = {"experts": [], "dense": [DENSE]}
    for seed in SEEDS:  # both side by side, so that they have the machine's mood in common
        for running in [train(tmp_path, name, seed, words) for name, words in kinds.items()]:
            assert running.wait(timeout=3000) == 0
    figures: dict[str, Any] = {}
    for name in kinds:
        runs = [RunDirectory(tmp_path / f"{name}{seed}").read_metrics() for seed in SEEDS]
        logged = [[row for row in rows if "loss" in row] for rows in runs]
        figures[name] = {
            "seeds": list(SEEDS),
            "eval_loss": [rows[-1]["eval_loss"] for rows in runs],
            "median_tokens_per_second": [statistics.median(r["tokens_per_second"] for r in rows) for rows in logged],
        }
        if name == "experts":
            late = [row for rows in logged for row in rows if 2 * row["step"] > rows[-1]["step"]]
            figures[name] |= {
                "largest_load": max(row["expert_load_max"] for row in late),
                "smallest_load": min(row["expert_load_min"] for row in late),
            }
    told = f"gramian train {CONFIG} run.seed={{{','.join(map(str, SEEDS))}}}, and again with {DENSE}"
    write_evidence("moe-quickstart", told, figures)
    experts, dense = figures["experts"], figures["dense"]
    assert all(b - a > 0.02 for a, b in zip(experts["eval_loss"], dense["eval_loss"], strict=True)), figures
    assert 0.2 < experts["smallest_load"] < experts["largest_load"] < 2.0


def test_the_layer_beside_peers(tmp_path: Path) -> None:
    """At least 1.05 times as fast as the best of them, forward and backward, at every shape."""
    report = tmp_path / "report.json"
    subprocess.run([sys.executable, "benchmarks/moe.py", "--json", str(report)], cwd=ROOT, check=True, timeout=3000)
    figures = json.loads(report.read_text())
    write_evidence("moe-speed", "python benchmarks/moe.py", figures)
    assert min(shape["ratio"] for shape in figures["shapes"]) > 1.05, figures
