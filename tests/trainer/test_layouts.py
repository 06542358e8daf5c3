"""The same config gives the same numbers on any layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from data.packing import Batch
from tests.gang import Gang
from tests.runs import TINY, read_state, started, train_worker, worst_difference
from trainer.rundir import RunDirectory

# name -> (ranks, the only keys that differ from the reference)
LAYOUTS: dict[str, tuple[int, list[str]]] = {
    "ddp2": (2, ["parallel.engine=ddp"]),
    "ddp4": (4, ["parallel.engine=ddp"]),
    "fsdp2": (2, []),
    "fsdp4": (4, []),
    "hsdp2x2": (4, ["parallel.dp_replicate=2"]),
    "accumulate1": (1, ["train.micro_batch_size=32"]),
    "fsdp2-accumulate4": (2, ["train.micro_batch_size=4"]),
    "hsdp2x2-accumulate2": (4, ["parallel.dp_replicate=2", "train.micro_batch_size=4"]),
    "fsdp4-selective": (4, ["train.activation_checkpointing=selective", "train.micro_batch_size=4"]),
    "hsdp2x2-every2": (
        4,
        [
            "parallel.dp_replicate=2",
            "train.activation_checkpointing=full",
            "train.activation_checkpointing_every=2",
        ],
    ),
    "zero0-2": (2, ["parallel.engine=deepspeed", "parallel.zero_stage=0"]),
    "zero1-2-accumulate4": (2, ["parallel.engine=deepspeed", "parallel.zero_stage=1", "train.micro_batch_size=4"]),
    "zero2-4": (4, ["parallel.engine=deepspeed"]),
    "zero3-4": (4, ["parallel.engine=deepspeed", "parallel.zero_stage=3", "train.activation_checkpointing=full"]),
    "zero2-2-offload": (2, ["parallel.engine=deepspeed", "parallel.offload=optimizer"]),
    "zero3-2-offload": (
        2,
        ["parallel.engine=deepspeed", "parallel.zero_stage=3", "parallel.offload=optimizer+params"],
    ),
}
# Each layout in CI under one of the packings; `make verify` has both, and tests/verify/test_quickstart.py on the
# quickstart's model. None: others have all of it, two ranks that accumulate and four that do not.
IN_CI = {
    "ddp2": "pad",
    "ddp4": "concat",
    "fsdp2": None,
    "fsdp4": "pad",
    "hsdp2x2": "concat",
    "accumulate1": "concat",
    "fsdp2-accumulate4": "pad",
    "hsdp2x2-accumulate2": "pad",
    "fsdp4-selective": "concat",
    "hsdp2x2-every2": "pad",
    "zero0-2": "concat",
    "zero1-2-accumulate4": "pad",
    "zero2-4": "pad",
    "zero3-4": "pad",
    "zero2-2-offload": None,
    "zero3-2-offload": "concat",
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
def runs(gang: Gang, paragraphs: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(gang, paragraphs, tmp_path_factory.mktemp("layouts"))


@pytest.mark.parametrize(
    ("name", "packing"),
    [
        pytest.param(name, packing, marks=[] if IN_CI[name] == packing else pytest.mark.verify)
        for name in LAYOUTS
        for packing in ("concat", "pad")
    ],
)
def test_loss_and_norm_do_not_depend_on_the_layout(runs: Runs, name: str, packing: str) -> None:
    """20 fp32 AdamW steps agree to 1e-6; `pad` makes the loss masks of ranks and micro-batches very uneven: a row is
    one paragraph, of 1 to 64 tokens.

    The tolerance is the rounding of fp32 sums in another order: measured up to 2e-7 for the loss and 5e-8 for the norm
    over eight seeds. Without the config's warm-up it would be 9e-7 for the norm, and 7e-5 at 435 tokens a step: where a
    gradient is as small as its own rounding, Adam's first updates divide noise by noise (docs/how-we-know.md).
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
    for name in ("ddp4", "fsdp4", "hsdp2x2", *(name for name in LAYOUTS if name.startswith("zero") and IN_CI[name])):
        world, overrides = LAYOUTS[name]
        packing = [f"data.packing={IN_CI[name]}"]
        reference = read_state(runs(f"one-{IN_CI[name]}", 1, packing).checkpoint(20))
        state = read_state(runs(f"{name}-{IN_CI[name]}", world, [*packing, *overrides]).checkpoint(20))
        assert state.keys() == reference.keys()
        for key, tensor in state.items():
            if key.startswith("model."):
                assert float((tensor - reference[key]).norm() / reference[key].norm()) < 1e-5, key


def uneven_step(arguments: list[str]) -> Any:
    """In a rank: one step on a batch of 32 rows of which only the first has valid targets, so one rank has all."""
    with started(arguments) as here:
        batch = here.batch(0)
        mask = batch.mask & (here.runtime.rank == 0)
        mask[1:] = False
        return here.step(Batch(batch.tokens, batch.targets, mask))


@pytest.mark.parametrize("name", ["ddp4", "fsdp4", "fsdp2-accumulate4"])
def test_ranks_without_a_valid_target(gang: Gang, paragraphs: Path, name: str) -> None:
    """A local denominator would divide by zero, or weigh a rank's tokens by its own count."""
    arguments = [f"data.corpus={paragraphs}"]
    (expected,) = gang.run(uneven_step, arguments, world=1)
    world, overrides = LAYOUTS[name]
    for result in gang.run(uneven_step, [*arguments, *overrides], world=world):
        assert result.tokens == expected.tokens > 0
        assert result.loss == pytest.approx(expected.loss, rel=1e-6)
        assert result.grad_norm == pytest.approx(expected.grad_norm, rel=1e-6)


# In CI tests/optim/test_build.py has each of them.
@pytest.mark.parametrize(
    "optimizer", ["sgd", *(pytest.param(name, marks=pytest.mark.verify) for name in ("adam", "adagrad", "rmsprop"))]
)
def test_every_optimizer_end_to_end(runs: Runs, optimizer: str) -> None:
    """Ten steps on two sharded ranks and on one process: loss, norm and weights agree to 1e-5 (AdamW: see above)."""
    # RMSprop has no bias correction, so that its first updates are ten times lr: at 1e-3 that is chaos.
    lr = {"adam": 1e-3, "sgd": 0.1, "adagrad": 1e-3, "rmsprop": 1e-4}[optimizer]
    keys = [f"optim.name={optimizer}", f"optim.lr={lr}", "optim.weight_decay=0.01", "train.steps=10", "eval.batches=0"]
    reference = runs(f"one-{optimizer}", 1, keys)
    run = runs(f"fsdp2-{optimizer}", 2, keys)
    assert max(worst_difference(run, reference).values()) < 1e-5
    ours, expected = read_state(run.checkpoint(10)), read_state(reference.checkpoint(10))
    for key, tensor in ours.items():
        if key.startswith("model."):
            assert float((tensor - expected[key]).norm() / expected[key].norm()) < 1e-5, key
