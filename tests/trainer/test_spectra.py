"""Rows of spectra in whole runs: the same at every layout, none where none is due or made, and in nobody's way."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.experts import SMALL
from tests.gang import Gang
from tests.runs import TINY, losses_and_norms, train_worker
from trainer.metrics import Reporter
from trainer.rundir import RunDirectory

# A token goes to all experts, see test_matrix_optimizers.py; one block without them, one with.
MODEL = ["model.moe={n_experts: 4, top_k: 4, d_ff: 32, n_dense_layers: 1}", "optim.eps=1e-5"]
LAYOUTS = {"fsdp4": [], "fsdp2-ep2": ["parallel.ep=2"], "fsdp2-tp2": ["parallel.tp=2"]}


def train(gang: Gang, keys: list[str], folder: Path, name: str, world: int = 1) -> RunDirectory:
    arguments = [TINY, *SMALL, *keys, f"run.dir={folder}", f"run.name={name}"]
    assert gang.run(train_worker, arguments, world=world) == [0] * world
    return RunDirectory(folder / name)


def spectra(run: RunDirectory) -> dict[int, dict[str, Any]]:
    return {row["step"]: row["spectra"] for row in run.read_metrics() if "spectra" in row}


@pytest.fixture(scope="module")
def alone(gang: Gang, paragraphs: Path, tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    keys = [f"data.corpus={paragraphs}", *MODEL, "train.steps=4", "log.spectra_every=2", "checkpoint.every=3"]
    return train(gang, keys, tmp_path_factory.mktemp("alone"), "alone")


def test_rows_of_steps_that_are_due(alone: RunDirectory) -> None:
    """Every matrix inside blocks, the router not: it is none of the rules'. Other rows are as ever."""
    found = spectra(alone)
    assert list(found) == [2, 4]
    attention = [f"attention.{w}.weight" for w in ("wq", "wk", "wv", "wo")]
    mlp = ("w_gate", "w_up", "w_down")
    dense = {f"blocks.0.{part}" for part in (*attention, *(f"mlp.{w}.weight" for w in mlp))}
    assert set(found[2]) == dense | {f"blocks.1.{part}" for part in (*attention, *(f"moe.experts.{w}" for w in mlp))}
    assert [row["step"] for row in alone.read_metrics() if "loss" in row] == [1, 2, 3, 4]
    for numbers in found[4].values():
        assert set(numbers) == {"gradient", "weight", "update"}
        assert 1 < numbers["weight"]["stable_rank"] < numbers["weight"]["effective_rank"] < 64
        assert numbers["update"]["rms"] == pytest.approx(1e-3, rel=0.7)  # AdamW's, near its learning rate


def test_looking_changes_nothing_and_off_is_off(
    gang: Gang, alone: RunDirectory, paragraphs: Path, tmp_path: Path
) -> None:
    """The same losses and norms to the bit without it, and not one row. Resumed, a step's row is there once."""
    keys = [f"data.corpus={paragraphs}", *MODEL, "train.steps=4", "checkpoint.every=3"]
    quiet = train(gang, keys, tmp_path, "quiet")
    assert spectra(quiet) == {}
    assert losses_and_norms(quiet) == losses_and_norms(alone)
    later = train(gang, [*keys, "train.steps=5", "log.spectra_every=1"], tmp_path, "quiet")
    assert list(spectra(later)) == [5]
    later.truncate_metrics(4)
    assert spectra(later) == {}
    assert losses_and_norms(later) == losses_and_norms(alone)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_has_the_numbers_of_one_process(
    gang: Gang, alone: RunDirectory, paragraphs: Path, tmp_path: Path, layout: str
) -> None:
    """To 1e-4; a condition at large to what it makes of the rounding of gradients, 1e-7, which layouts differ by."""
    keys = [f"data.corpus={paragraphs}", *MODEL, "train.steps=2", "log.spectra_every=2", *LAYOUTS[layout]]
    ours, theirs = spectra(train(gang, keys, tmp_path, layout, 4))[2], spectra(alone)[2]
    assert list(ours) == list(theirs)
    for name, kinds in theirs.items():
        for kind, numbers in kinds.items():
            for quantity, value in numbers.items():
                allowed = 1e-4 + (1e-7 * value if quantity == "condition" else 0)
                assert allowed < 0.1
                assert ours[name][kind][quantity] == pytest.approx(value, rel=allowed), (name, kind, quantity)


def test_a_skipped_update_has_none(gang: Gang, paragraphs: Path, tmp_path: Path) -> None:
    keys = [f"data.corpus={paragraphs}", "train.precision=fp16", "train.loss_scale_init=1e30", "model.n_layers=1"]
    keys += ["train.steps=2", "log.spectra_every=1", "data.seq_len=8", "train.global_batch_size=2"]
    assert spectra(train(gang, [*keys, "train.micro_batch_size=2"], tmp_path, "overflows")) == {}


def test_a_row_of_spectra_is_written_and_not_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = {"step": 1, "spectra": {"w": {"update": {"rms": 1.0}}}}
    with Reporter(RunDirectory(tmp_path), True, 0, 2) as reporter:
        reporter.row(row)
    assert capsys.readouterr().out == ""
    assert json.loads((tmp_path / "metrics.jsonl").read_text(encoding="utf-8")) == row
