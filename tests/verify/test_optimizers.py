"""AdamW, Muon, Shampoo and SOAP on the quickstart, each at its best learning rate, over paired seeds."""

from __future__ import annotations

import math
import os
import statistics
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from common.config import read_tree
from tests.verify.evidence import ROOT, write_evidence
from tests.verify.test_quickstart import GRAMIAN
from trainer.rundir import RunDirectory

pytestmark = [pytest.mark.verify, pytest.mark.timeout(8 * 3600)]
CONFIGS = ROOT / "configs" / "optim"
# Each twice the one before; the best must lie inside.
GRIDS: dict[str, list[float]] = {
    "adamw": [1e-3, 2e-3, 4e-3, 8e-3, 16e-3],
    "muon": [5e-3, 1e-2, 2e-2, 4e-2, 8e-2],
    "shampoo": [1e-3, 2e-3, 4e-3, 8e-3, 16e-3],
    "soap": [1e-3, 2e-3, 4e-3, 8e-3, 16e-3],
}
QUARTER = ["train.steps=100", "train.sample_prompt=null", "eval.every=100"]
SEEDS = range(5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the runs. A folder that `GRAMIAN_RUNS` names keeps them, so that what was interrupted goes on."""
    return Path(os.environ.get("GRAMIAN_RUNS") or tmp_path_factory.mktemp("optimizers"))


def run_all(folder: Path, runs: dict[str, tuple[str, list[str]]]) -> dict[str, list[dict[str, Any]]]:
    """Train configs with keys, two at once on a core each; metrics by run name. A finished run is not made again."""

    def run(name: str) -> list[dict[str, Any]]:
        config, keys = runs[name]
        words = [GRAMIAN, "train", str(CONFIGS / f"{config}.yaml"), f"run.dir={folder}", f"run.name={name}", *keys]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        subprocess.run(words, check=True, env=environment, stdout=subprocess.DEVNULL, timeout=3600)
        return RunDirectory(folder / name).read_metrics()

    with ThreadPoolExecutor(2) as pool:
        return dict(zip(runs, pool.map(run, runs), strict=True))


def held_out(rows: list[dict[str, Any]]) -> float:
    """Loss on the held-out documents at the end; infinite for a run that has none."""
    return float(next((row["eval_loss"] for row in reversed(rows) if "eval_loss" in row), math.inf))


def test_learning_rates(folder: Path) -> None:
    """A quarter of the steps each, one seed. What configs/optim/ has is the best of the grid, and lies inside it."""
    runs = {f"{name}-{lr:g}": (name, [f"optim.lr={lr}", *QUARTER]) for name, grid in GRIDS.items() for lr in grid}
    losses = {name: held_out(rows) for name, rows in run_all(folder, runs).items()}
    figures: dict[str, Any] = {
        name: {"lr": grid, "eval_loss": [losses[f"{name}-{lr:g}"] for lr in grid]} for name, grid in GRIDS.items()
    }
    for name, of in figures.items():
        of["best"] = of["lr"][of["eval_loss"].index(min(of["eval_loss"]))]
        of["config"] = read_tree(CONFIGS / f"{name}.yaml")["optim"]["lr"]
    write_evidence("optimizers-lr", f"gramian train configs/optim/NAME.yaml optim.lr=LR {' '.join(QUARTER)}", figures)
    for name, of in figures.items():
        assert of["lr"][0] < of["best"] < of["lr"][-1], (name, of)
        assert of["best"] == float(of["config"]), (name, of)


def test_matrix_optimizers_beat_adamw(folder: Path) -> None:
    """Equal tokens, order and initial weights for equal seeds. The mean difference against three standard errors."""
    runs = {f"{name}-seed{seed}": (name, [f"run.seed={seed}"]) for seed in SEEDS for name in ("adamw", "muon", "soap")}
    runs["shampoo-seed0"] = ("shampoo", ["run.seed=0"])
    rows = run_all(folder, runs)
    losses = {
        name: [held_out(rows[run]) for run in runs if run.startswith(f"{name}-")]
        for name in ("adamw", "muon", "soap", "shampoo")
    }
    figures: dict[str, Any] = {}
    for name, of in losses.items():
        figures[name] = {"seeds": list(range(len(of))), "eval_loss": of}
        logged = [row for row in rows[f"{name}-seed0"] if "loss" in row]
        evaluated = [row for row in rows[f"{name}-seed0"] if "eval_loss" in row]
        figures[name] |= {
            "tokens": [row["tokens"] for row in logged],
            "loss": [row["loss"] for row in logged],
            # Of the fastest seed, as others may have had company on the machine.
            "tokens_per_second": max(
                statistics.median(row["tokens_per_second"] for row in rows[run] if "loss" in row)
                for run in runs
                if run.startswith(f"{name}-")
            ),
            "held_out": {str(row["step"]): row["eval_loss"] for row in evaluated},
        }
        if name in ("muon", "soap"):
            below = [a - b for a, b in zip(losses["adamw"], of, strict=True)]
            figures[name]["below_adamw"] = statistics.mean(below)
            figures[name]["standard_error"] = statistics.stdev(below) / len(below) ** 0.5
    write_evidence("optimizers", "gramian train configs/optim/NAME.yaml run.seed=SEED", figures)
    for name in ("muon", "soap"):
        assert figures[name]["below_adamw"] > 3 * figures[name]["standard_error"], figures[name]
