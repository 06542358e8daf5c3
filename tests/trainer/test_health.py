"""Steps with a loss or a gradient that is not finite, and losses that jump (rule 10)."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from common.errors import UserError
from tests.gang import Gang
from tests.runs import TINY, read_state, stopped, train_worker
from tests.trainer.poison import an_infinite_gradient
from trainer.config import load_config
from trainer.health import Health
from trainer.rundir import RunDirectory

Harm = Callable[[int, Any, ExitStack], None]


def train_harmed(arguments: list[str], harm: str, steps: list[int]) -> int:
    """In a rank: train, with harm done before the named steps; the exit code.

    `gradient`: one element of this rank's gradient is NaN, on rank 1 only. `weight`: all weights of a tensor are NaN,
    for good. `loss`: the loss is told as a hundred times what it is.
    """
    import trainer.loop as module

    original = module.step_at

    def step_at(step: int, engine: Any, batches: Any, layout: Any, runtime: Any, config: Any) -> Any:
        with ExitStack() as stack:
            if step in steps and harm == "gradient":
                stack.enter_context(an_infinite_gradient(engine.model, runtime.rank == 1, math.nan))
            if step in steps and harm == "weight":
                next(iter(engine.parameters.values())).to_local().detach().fill_(math.nan)
            result = original(step, engine, batches, layout, runtime, config)
        return result._replace(loss=100 * result.loss) if step in steps and harm == "loss" else result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "step_at", step_at)
        return train_worker(arguments)


@pytest.fixture
def train(gang: Gang, corpus: Path, tmp_path: Path) -> Callable[..., RunDirectory]:
    """Trains the tiny config on two ranks."""

    def run(name: str, harm: str, steps: list[int], *keys: str, code: int = 0) -> RunDirectory:
        words = [TINY, f"data.corpus={corpus}", f"run.dir={tmp_path}", f"run.name={name}", "eval.batches=0", *keys]
        words.append("train.sample_prompt=null")
        assert gang.run(train_harmed, words, harm, steps, world=2, timeout=240) == [code, code]
        return RunDirectory(tmp_path / name)

    return run


def same(a: Path, b: Path) -> bool:
    ours, theirs = read_state(a), read_state(b)
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def rows(run: RunDirectory) -> list[dict[str, Any]]:
    return [row for row in run.read_metrics() if "loss" in row]


def test_a_bad_gradient_on_one_rank_skips_one_step_on_all(train: Callable[..., RunDirectory]) -> None:
    """The state is untouched by the step, is saved so, and goes on from there as if unbroken."""
    keys = ["train.steps=8", "checkpoint.every=1", "checkpoint.keep=8"]
    run = train("unbroken", "gradient", [4], *keys)
    assert same(run.checkpoint(4), run.checkpoint(3))
    assert not same(run.checkpoint(5), run.checkpoint(4))
    assert [row["grad_norm"] is None for row in rows(run)] == [step == 4 for step in range(1, 9)]
    assert [row.get("skipped_steps", 0) for row in rows(run)] == [0, 0, 0, 1, 1, 1, 1, 1]
    assert [(e["step"], e["grad_norm"]) for e in run.events.read() if e["event"] == "skip"] == [(4, None)]

    again = stopped(run, "again", 5)
    train("again", "none", [], *keys)
    assert same(again.checkpoint(8), run.checkpoint(8))
    assert [row.get("skipped_steps", 0) for row in rows(again)] == [0, 0, 0, 1, 1, 1, 1, 1]


def test_bad_steps_in_a_row_end_the_run_with_a_saved_state(
    train: Callable[..., RunDirectory], capfd: pytest.CaptureFixture[str]
) -> None:
    """The count goes into the checkpoint: a start that meets another bad step ends at once."""
    keys = ["train.steps=20", "checkpoint.every=100", "train.max_skipped_steps=3"]
    run = train("ended", "gradient", [2, 4, 5, 6, 7], *keys, code=1)
    assert run.committed() == [6]
    health = json.loads((run.checkpoint(6) / "trainer.json").read_text())["health"]
    assert (health["skipped"], health["in_a_row"]) == (4, 3)
    train("ended", "gradient", [7], *keys, code=1)
    assert run.committed() == [6, 7]
    train("ended", "gradient", [], *keys)
    assert run.committed()[-1] == 20


def test_weights_that_are_not_finite_are_not_saved(train: Callable[..., RunDirectory]) -> None:
    keys = ["train.steps=9", "checkpoint.every=2", "train.max_skipped_steps=3"]
    run = train("poisoned", "weight", [4], *keys, code=1)
    assert run.committed() == [2]
    assert [row["loss"] for row in rows(run)][3:] == [None] * 3
    train("poisoned", "none", [], *keys)
    assert [row["step"] for row in rows(run)] == list(range(1, 10))

    run = train("late", "weight", [9], *keys, code=1)  # too late for three in a row
    assert run.committed()[-1] == 8


def test_a_spike_is_reported_or_rolled_back(train: Callable[..., RunDirectory]) -> None:
    """Back to the newest checkpoint, and on with the batches after the spike: as if all since then had been skipped."""
    keys = ["train.steps=44", "checkpoint.every=36", "log.every=10"]
    told = train("told", "loss", [39], *keys)
    plain = train("plain", "none", [], *keys)
    assert same(told.checkpoint(44), plain.checkpoint(44))
    assert [e["step"] for e in told.events.read() if e["event"] == "spike"] == [39]
    assert not [e for e in plain.events.read() if e["event"] == "spike"]

    rolled = train("rolled", "loss", [39, 42], *keys, "train.on_spike=roll_back", "train.max_roll_backs=1")
    events = [
        (e["event"], e["step"], e.get("to")) for e in rolled.events.read() if e["event"] in ("spike", "roll_back")
    ]
    assert events == [("spike", 39, None), ("roll_back", 39, 36), ("spike", 42, None)]
    skipped = train("skipped", "gradient", [37, 38, 39], *keys)
    assert same(rolled.checkpoint(44), skipped.checkpoint(44))
    health = json.loads((rolled.checkpoint(44) / "trainer.json").read_text())["health"]
    assert (health["roll_backs"], health["undone"], health["skipped"]) == (1, [[37, 39]], 0)


def test_score_is_the_modified_z_score() -> None:
    """Of the last 64 losses at least 32; a spike does not count among them; steps in a row begin anew."""
    health = Health(in_a_row=2)
    losses = [3.0 + 0.1 * math.sin(7.0 * i) - 0.002 * i for i in range(100)]
    for i, loss in enumerate(losses):
        assert (health.good(loss) == 0.0) == (i < 32)
        health.keep(loss)
    assert health.in_a_row == 0
    last = losses[-64:]
    median = statistics.median(last)
    expected = (4.0 - median) / (1.4826 * statistics.median(abs(loss - median) for loss in last))
    assert health.good(4.0) == pytest.approx(expected, rel=1e-4)
    assert health.losses == last
    still = Health(losses=[2.0] * 40)
    assert still.good(2.001) < 5 < 10 < still.good(2.1)
    assert Health.of(json.loads(json.dumps(health.state()))) == health


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["train.on_spike=roll_back", "train.spike_score=null"],
            "'on_spike: roll_back' needs spikes .*; set spike_score",
        ),
        (["train.max_roll_backs=2"], "'max_roll_backs' does nothing under on_spike: report .*; remove it"),
        (["train.max_skipped_steps=0"], "train.max_skipped_steps"),
    ],
)
def test_wrong_keys_are_refused(words: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_config(TINY, words)
