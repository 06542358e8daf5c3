"""The quickstart as a user runs it: in time, learning, and with the same numbers on every layout."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.runs import worst_difference
from tests.verify.evidence import ROOT, write_evidence
from trainer.rundir import RunDirectory

pytestmark = [pytest.mark.verify, pytest.mark.timeout(3600)]

GRAMIAN = str(Path(sys.executable).with_name("gramian"))
QUICKSTART = str(ROOT / "configs" / "quickstart.yaml")
UNDER_ADAMW = str(ROOT / "configs" / "optim" / "adamw.yaml")

LAYOUTS: dict[str, tuple[int, list[str]]] = {
    "ddp 2": (2, ["parallel.engine=ddp"]),
    "ddp 4": (4, ["parallel.engine=ddp"]),
    "fsdp 2": (2, []),
    "fsdp 4": (4, []),
    "HSDP 2x2": (4, ["parallel.dp_replicate=2"]),
    "accumulation 1": (1, ["train.micro_batch_size=16"]),
    "fsdp 2, accumulation 4": (2, ["train.micro_batch_size=2"]),
    "activation checkpointing": (1, ["train.activation_checkpointing=full"]),
    "fsdp 4, activation checkpointing": (4, ["train.activation_checkpointing=full"]),
}


def gramian(*arguments: str) -> None:
    subprocess.run([GRAMIAN, *arguments], check=True, timeout=1800, stdout=subprocess.DEVNULL)


@pytest.mark.parametrize("packing", ["concat", "pad"])
def test_same_numbers_on_every_layout(packing: str, tmp_path: Path) -> None:
    """20 fp32 steps of the quickstart under AdamW at lr 1e-3: loss and gradient norm agree to 1e-6 with one process.

    The quickstart's warm-up stays on. Adam's very first updates are plus or minus lr for every element, also where the
    gradient is as small as its rounding: at the full lr that noise reaches 4e-6 in the norm when micro-batches change.
    """
    common = [
        UNDER_ADAMW,
        "train.steps=20",
        "optim.lr=1e-3",
        "log.every=1",
        "eval.batches=0",
        "train.sample_prompt=null",
        f"data.packing={packing}",
        f"run.dir={tmp_path}",
    ]
    gramian("train", *common, "run.name=one", "--nproc", "1")
    reference = RunDirectory(tmp_path / "one")
    worst = {}
    for number, (name, (world, overrides)) in enumerate(LAYOUTS.items()):
        gramian("train", *common, f"run.name=run{number}", "--nproc", str(world), *overrides)
        worst[name] = worst_difference(RunDirectory(tmp_path / f"run{number}"), reference)
    write_evidence(
        f"layouts-{packing}",
        f"gramian train configs/optim/adamw.yaml {' '.join(common[1:-1])}, and each layout's keys",
        worst,
    )
    assert max(figure for figures in worst.values() for figure in figures.values()) < 1e-6, worst


def test_quickstart_in_six_minutes(tmp_path: Path) -> None:
    """The whole quickstart, corpus already prepared as `make train` leaves it, on all cores."""
    gramian("train", QUICKSTART, f"run.dir={tmp_path / 'warm'}", "train.steps=1", "eval.batches=0")
    begin = time.perf_counter()
    gramian("train", QUICKSTART, f"run.dir={tmp_path}")
    seconds = time.perf_counter() - begin
    rows = RunDirectory(tmp_path / "quickstart").read_metrics()
    losses = [row["loss"] for row in rows if "loss" in row]
    evaluations = [row for row in rows if "eval_loss" in row]
    figures = {
        "seconds": round(seconds, 1),
        "first_loss": losses[0],
        "last_loss": losses[-1],
        "eval_loss": [row["eval_loss"] for row in evaluations],
        "eval_bits_per_byte": [row["eval_bits_per_byte"] for row in evaluations],
        "median_tokens_per_second": statistics.median(row["tokens_per_second"] for row in rows if "loss" in row),
        "median_mfu": statistics.median(row["mfu"] for row in rows if "loss" in row),
    }
    write_evidence("quickstart", "gramian train configs/quickstart.yaml", figures)
    assert (RunDirectory(tmp_path / "quickstart").sample_file).exists()
    assert evaluations[-1]["eval_loss"] < evaluations[0]["eval_loss"] < losses[0]
    assert seconds < 360


def test_help_answers_in_a_second() -> None:
    """Median of nine calls of `gramian --help`."""
    times = []
    for _ in range(9):
        begin = time.perf_counter()
        subprocess.run([GRAMIAN, "--help"], check=True, stdout=subprocess.DEVNULL, env={**os.environ, "COLUMNS": "100"})
        times.append(time.perf_counter() - begin)
    write_evidence("help", "gramian --help", {"median_seconds": round(statistics.median(times), 3)})
    assert statistics.median(times) < 1.0
