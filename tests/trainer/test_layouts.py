"""The same config gives the same numbers on any layout."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gang import Gang
from tests.runs import TINY, read_state, train_worker, worst_difference
from trainer.rundir import RunDirectory

# name -> (ranks, the only keys that differ from the reference)
LAYOUTS: dict[str, tuple[int, list[str]]] = {
    "ddp2": (2, ["parallel.engine=ddp"]),
    "ddp4": (4, ["parallel.engine=ddp"]),
    "fsdp2": (2, []),
    "fsdp4": (4, []),
    "hsdp2x2": (4, ["parallel.dp_replicate=2"]),
    "accumulate1": (1, ["train.micro_batch_size=8"]),
    "fsdp2-accumulate4": (2, ["train.micro_batch_size=1"]),
    "hsdp2x2-accumulate2": (4, ["parallel.dp_replicate=2", "train.micro_batch_size=1"]),
    "checkpointing": (1, ["train.activation_checkpointing=full"]),
    "fsdp4-checkpointing": (4, ["train.activation_checkpointing=full", "train.micro_batch_size=1"]),
}


class Runs:
    """Runs of the tiny config, made once each."""

    def __init__(self, gang: Gang, corpus: Path, folder: Path) -> None:
        self._gang, self._corpus, self._folder = gang, corpus, folder

    def __call__(self, name: str, world: int, overrides: list[str]) -> RunDirectory:
        run = RunDirectory(self._folder / name)
        if not run.path.exists():
            arguments = [TINY, f"data.corpus={self._corpus}", f"run.dir={self._folder}", f"run.name={name}", *overrides]
            assert self._gang.run(train_worker, arguments, world=world) == [0] * world
        return run


@pytest.fixture(scope="module")
def runs(gang: Gang, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(gang, corpus, tmp_path_factory.mktemp("layouts"))


@pytest.mark.parametrize("packing", ["concat", "pad"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_loss_and_norm_do_not_depend_on_the_layout(runs: Runs, name: str, packing: str) -> None:
    """20 fp32 AdamW steps agree to 1e-6; `pad` makes the loss masks of ranks and micro-batches very uneven.

    The tolerance is the rounding of fp32 sums in another order: measured up to 4e-7.
    """
    reference = runs(f"one-{packing}", 1, [f"data.packing={packing}"])
    world, overrides = LAYOUTS[name]
    run = runs(f"{name}-{packing}", world, [f"data.packing={packing}", *overrides])
    worst = worst_difference(run, reference)
    assert worst["loss"] < 1e-6
    assert worst["grad_norm"] < 1e-6


def test_reference_learns(runs: Runs) -> None:
    """The comparison would be empty if nothing moved."""
    rows = [row["loss"] for row in runs("one-concat", 1, []).read_metrics() if "loss" in row]
    assert len(rows) == 20
    assert rows[-1] < rows[0] - 0.3


def test_evaluation_does_not_depend_on_the_layout(runs: Runs) -> None:
    reference = [row for row in runs("one-pad", 1, ["data.packing=pad"]).read_metrics() if "eval_loss" in row]
    assert [row["step"] for row in reference] == [10, 20]
    for name in ("fsdp4", "ddp2"):
        world, overrides = LAYOUTS[name]
        rows = runs(f"{name}-pad", world, ["data.packing=pad", *overrides]).read_metrics()
        for row, expected in zip([row for row in rows if "eval_loss" in row], reference, strict=True):
            assert row["eval_tokens"] == expected["eval_tokens"]
            assert row["eval_loss"] == pytest.approx(expected["eval_loss"], rel=1e-6)
            assert row["eval_bits_per_byte"] == pytest.approx(expected["eval_bits_per_byte"], rel=1e-6)


def test_final_weights_agree(runs: Runs) -> None:
    """Weights after 20 steps agree to 1e-5 in relative Frobenius norm (measured 1e-6)."""
    reference = read_state(runs("one-concat", 1, []).checkpoint(20))
    for name in ("ddp4", "fsdp4", "hsdp2x2"):
        world, overrides = LAYOUTS[name]
        state = read_state(runs(f"{name}-concat", world, overrides).checkpoint(20))
        assert state.keys() == reference.keys()
        for key, tensor in state.items():
            if key.startswith("model."):
                assert float((tensor - reference[key]).norm() / reference[key].norm()) < 1e-5, key
