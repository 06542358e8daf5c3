"""Experts in checkpoints: saved at one layout, resumed at another, as if never stopped."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.experts import KINDS, LAYOUTS, SMALL
from tests.gang import Gang
from tests.runs import TINY, losses_and_norms, read_state, relative_difference, started, stopped, train_worker
from trainer.rundir import RunDirectory

STEPS, HALF = 6, 3
# The learning rate moves at every step, so that one resumed at another would show.
RUN = [*SMALL, *KINDS["sigmoid"], "schedule.name=cosine", f"train.steps={STEPS}", f"checkpoint.every={HALF}"]


class Runs:
    """Starts runs in a folder of its own; unbroken ones are made once."""

    def __init__(self, gang: Gang, corpus: Path, folder: Path) -> None:
        self.gang, self.folder = gang, folder
        self.arguments = [f"data.corpus={corpus}", *RUN, f"run.dir={folder}"]
        self.unbroken: Callable[[str], RunDirectory] = functools.cache(lambda layout: self.train(layout, layout))

    def train(self, name: str, layout: str) -> RunDirectory:
        world, keys = LAYOUTS[layout]
        arguments = [TINY, *self.arguments, *keys, f"run.name={name}"]
        assert self.gang.run(train_worker, arguments, world=world) == [0] * world
        return RunDirectory(self.folder / name)

    def resumed(self, source: str, target: str) -> RunDirectory:
        """The run that was stopped after the checkpoint in its middle, and went on at another layout."""
        name = f"{source}-to-{target}"
        stopped(self.unbroken(source), name, HALF)
        return self.train(name, target)


@pytest.fixture(scope="module")
def runs(gang: Gang, paragraphs: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(gang, paragraphs, tmp_path_factory.mktemp("experts"))


def test_at_the_same_layout_to_the_bit(runs: Runs) -> None:
    unbroken, resumed = runs.unbroken("fsdp4-ep4"), runs.resumed("fsdp4-ep4", "fsdp4-ep4")
    assert losses_and_norms(resumed) == losses_and_norms(unbroken)
    ours, theirs = read_state(resumed.checkpoint(STEPS)), read_state(unbroken.checkpoint(STEPS))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)


@pytest.mark.parametrize(
    ("source", "target"),
    [("fsdp4-ep4", "fsdp4"), ("fsdp4-ep4", "hsdp2x2-ep2"), ("fsdp4-ep4", "ddp4"), ("ddp4", "fsdp4-ep4")],
)
def test_at_another_layout(runs: Runs, source: str, target: str) -> None:
    """Losses, norms, weights and optimizer state as those of the unbroken run to 1e-5; measured up to 2e-7."""
    unbroken, resumed = runs.unbroken(source), runs.resumed(source, target)
    ours, theirs = losses_and_norms(resumed), losses_and_norms(unbroken)
    assert len(ours) == len(theirs) == STEPS
    for a, b in zip(ours, theirs, strict=True):
        assert max(map(relative_difference, a, b)) < 1e-5
    state, expected = read_state(resumed.checkpoint(STEPS)), read_state(unbroken.checkpoint(STEPS))
    far = {key: float((state[key] - value).norm() / value.norm()) for key, value in expected.items() if value.any()}
    assert {key: difference for key, difference in far.items() if difference >= 1e-5} == {}
    assert [difference for key, difference in far.items() if key.endswith("selection_bias")] == [0.0, 0.0]


def loaded(arguments: list[str], checkpoint: str) -> dict[str, Any]:
    """In a rank: the whole state of an engine that a checkpoint was loaded into."""
    from trainer.certify.looking import whole
    from trainer.load import load_engine

    with started(arguments) as here:
        load_engine(Path(checkpoint), here.engine, here.runtime)
        state = {name: whole(tensor).clone() for name, tensor in here.engine.state_dict().items()}
        return state if here.runtime.is_main else {}


@pytest.mark.parametrize("target", ["one", "fsdp4", "hsdp2x2-ep2", "ddp4"])
def test_all_of_it_comes_back_to_the_bit(runs: Runs, target: str) -> None:
    """Weights, selection biases and the optimizer's state, of experts and of all else."""
    world, keys = LAYOUTS[target]
    checkpoint = runs.unbroken("fsdp4-ep4").checkpoint(HALF)
    state = runs.gang.run(loaded, [*runs.arguments, *keys], str(checkpoint), world=world)[0]
    saved = read_state(checkpoint)
    assert state.keys() == saved.keys()
    assert all(torch.equal(state[key], saved[key]) for key in state)
    assert saved["model.blocks.0.moe.selection_bias"].any()
    assert saved["optim.blocks.1.moe.experts.w_down.exp_avg_sq"].flatten(1).any(1).all()


def test_its_tensors_are_those_that_one_process_writes(runs: Runs) -> None:
    """Names and shapes tell nothing of ranks, and numbers are the same to 1e-5."""
    ours, theirs = (read_state(runs.unbroken(layout).checkpoint(HALF)) for layout in ("fsdp4-ep4", "one"))
    assert {key: tuple(t.shape) for key, t in ours.items()} == {key: tuple(t.shape) for key, t in theirs.items()}
    assert ours["model.blocks.0.moe.experts.w_up"].shape == (8, 32, 64)
    for key, value in theirs.items():
        if key.startswith("model."):
            assert float((ours[key] - value).norm()) <= 1e-5 * float(value.norm()), key
