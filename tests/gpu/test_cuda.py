"""Short checks for a machine with a CUDA GPU: `pytest tests/gpu`. Elsewhere they skip."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.gang import Gang
from tests.runs import TINY, losses_and_norms, relative_difference, train_worker
from trainer.rundir import RunDirectory

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


@pytest.fixture
def train(gang: Gang, gpu_gang: Gang, paragraphs: Path, tmp_path: Path):
    """Train the tiny config on the GPUs, or on the CPU."""

    def start(name: str, *overrides: str, world: int = 1, cpu: bool = False) -> RunDirectory:
        arguments = [TINY, f"data.corpus={paragraphs}", f"run.dir={tmp_path}", f"run.name={name}", *overrides]
        ranks = gang if cpu else gpu_gang
        assert ranks.run(train_worker, arguments, world=world, timeout=280) == [0] * world
        return RunDirectory(tmp_path / name)

    return start


def test_fp32_equals_the_cpu(train) -> None:
    """20 steps: losses to 1e-4 and norms to 1e-3, since a GPU's kernels round differently and Adam amplifies it."""
    pairs = zip(losses_and_norms(train("gpu")), losses_and_norms(train("cpu", cpu=True)), strict=True)
    for (loss, norm), (expected_loss, expected_norm) in pairs:
        assert relative_difference(loss, expected_loss) < 1e-4
        assert relative_difference(norm, expected_norm) < 1e-3


def test_bf16_and_compile_stay_close_to_fp32(train) -> None:
    reference = losses_and_norms(train("plain"))
    for name, overrides in {
        "bf16": ["train.precision=bf16"],
        "fp16": ["train.precision=fp16"],
        "compile": ["train.compile=true"],
        "bf16-compile-checkpointing": [
            "train.precision=bf16",
            "train.compile=true",
            "train.activation_checkpointing=full",
        ],
    }.items():
        for (loss, _), (expected, _) in zip(losses_and_norms(train(name, *overrides)), reference, strict=True):
            assert relative_difference(loss, expected) < 0.01, name


def test_accumulation_and_resume(train) -> None:
    """Accumulation changes rounding only; a resumed run is close to the unbroken one."""
    reference = losses_and_norms(train("whole"))
    for run in (train("accumulated", "train.micro_batch_size=4"), train("stopped", "train.steps=10")):
        for (loss, _), (expected, _) in zip(losses_and_norms(run), reference, strict=False):
            assert relative_difference(loss, expected) < 1e-4
    resumed = losses_and_norms(train("stopped"))
    assert len(resumed) == len(reference)
    assert relative_difference(resumed[-1][0], reference[-1][0]) < 1e-4


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("overrides", [[], ["parallel.engine=ddp"]])
def test_two_gpus_equal_one(train, overrides: list[str]) -> None:
    reference = losses_and_norms(train("one"))
    for (loss, norm), (expected_loss, expected_norm) in zip(
        losses_and_norms(train("two", *overrides, world=2)), reference, strict=True
    ):
        assert relative_difference(loss, expected_loss) < 1e-4
        assert relative_difference(norm, expected_norm) < 1e-3
