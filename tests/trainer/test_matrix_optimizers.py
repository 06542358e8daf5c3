"""Rules for matrices in whole runs: equal to one process at every layout, certified, resumed at any rank count."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.experts import KINDS, SMALL
from tests.gang import Gang
from tests.runs import TINY, losses_and_norms, read_state, started, stopped, train_worker
from tests.trainer.test_certify import certified
from trainer.certify.findings import Finding
from trainer.rundir import RunDirectory

OWN = "tests.optim.own_rule:Whitened"
# With a smaller eps AdamW's embeddings would move by their gradients' rounding, as under AdamW alone.
CALM = ["optim.adamw.eps=1e-5"]
RULES: dict[str, list[str]] = {
    "muon": ["optim.name=muon", "optim.lr=0.004", *CALM],
    "shampoo": [*CALM, "optim.name=shampoo", "optim.lr=0.003", "optim.precondition_every=2"],
    "soap": [*CALM, "optim.name=soap", "optim.lr=0.003", "optim.precondition_every=2"],
    "own": [*CALM, f"optim.name={OWN}", "optim.lr=0.01"],
}
# A token goes to all experts: with a choice, rounding would turn one among thousands, and all that comes after it.
EVERY_EXPERT = ["model.moe={n_experts: 4, top_k: 4, d_ff: 32}"]
LAYOUTS: dict[str, tuple[int, list[str]]] = {
    "one": (1, []),
    "fsdp4": (4, []),
    "hsdp2x2": (4, ["parallel.dp_replicate=2"]),
    "fsdp2-ep2": (4, ["parallel.ep=2"]),
    "fsdp2-tp2": (4, ["parallel.tp=2"]),
    "ddp2": (2, ["parallel.engine=ddp"]),
}


def _weights(overrides: list[str], steps: int) -> tuple[dict[str, torch.Tensor], list[float]]:
    """After some steps: whole weights, and losses."""
    from trainer.certify.looking import weights, whole
    from trainer.loop import step_at

    with started(overrides) as here:
        runtime = here.runtime
        object.__setattr__(runtime, "tp", here.layout.tp)
        losses = []
        for step in range(1, steps + 1):
            losses.append(step_at(step, here.engine, here.batches, here.layout, runtime, here.config).loss)
        return {name: whole(weight).clone() for name, weight in weights(here.engine).items()}, losses


@pytest.fixture(scope="module")
def alone(gang: Gang, paragraphs: Path) -> Any:
    made: dict[str, Any] = {}

    def of(rule: str) -> Any:
        if rule not in made:
            keys = [f"data.corpus={paragraphs}", *SMALL, *EVERY_EXPERT, *RULES[rule]]
            made[rule] = gang.run(_weights, keys, 20, world=1)[0]
        return made[rule]

    return of


@pytest.mark.parametrize(
    ("rule", "layout"),
    [
        ("muon", "fsdp4"),
        ("muon", "fsdp2-tp2"),
        ("muon", "hsdp2x2"),
        ("shampoo", "hsdp2x2"),
        ("soap", "fsdp4"),
        ("own", "fsdp4"),
        ("own", "fsdp2-ep2"),
        ("own", "fsdp2-tp2"),
    ],
)
def test_twenty_steps_end_to_end(gang: Gang, paragraphs: Path, alone: Any, rule: str, layout: str) -> None:
    """Gradients of a layout differ by rounding, 1e-7, of which Muon makes up to a thousand times as much where singular
    values are small: with updates of 0.004 that adds up to 7e-6 of the weights in 20 steps, at 0.01 to 1.7e-5.

    SOAP's Adam divides rounding by rounding in directions that have no gradient, so that only losses can be compared.
    """
    world, keys = LAYOUTS[layout]
    everything = [f"data.corpus={paragraphs}", *SMALL, *EVERY_EXPERT, *RULES[rule], *keys]
    weights, losses = gang.run(_weights, everything, 20, world=world)[0]
    expected, expected_losses = alone(rule)
    assert max(abs(a - b) / b for a, b in zip(losses, expected_losses, strict=True)) < (
        2e-3 if rule == "soap" else 1e-5
    )
    if rule != "soap":
        worst = max(float((weights[name] - w).norm() / w.norm()) for name, w in expected.items())
        assert worst < {"muon": 1e-5, "shampoo": 1e-4, "own": 2e-6}[rule]


@pytest.mark.parametrize(("rule", "layout"), [("muon", "fsdp2-ep2"), ("own", "fsdp2-tp2"), ("soap", "ddp2")])
def test_certified(gang: Gang, paragraphs: Path, rule: str, layout: str) -> None:
    world, keys = LAYOUTS[layout]
    everything = [f"data.corpus={paragraphs}", *SMALL, *KINDS["softmax"], *RULES[rule], *keys]
    findings: list[Finding] = gang.run(certified, everything, world=world)[0]
    assert [f for f in findings if not f.passed] == []
    assert any(f.quantity == "update" and "wq" in f.parameter for f in findings)


def test_what_certify_finds(gang: Gang, paragraphs: Path) -> None:
    """An owner that puts the rows it gets in another order."""
    fault = (
        "optim.exchange",
        "wholes[piece.matrix][piece.at] = values",
        "wholes[piece.matrix][piece.at] = values.flip(0) if self._ranks.size > 1 else values",
    )
    everything = [f"data.corpus={paragraphs}", *SMALL, *RULES["muon"]]
    findings: list[Finding] = gang.run(certified, everything, fault, world=2)[0]
    assert {f.quantity for f in findings if not f.passed} >= {"update"}


def _matrices_updated(overrides: list[str], steps: int) -> list[int]:
    """How many matrices this rank's rule is given in each step."""
    from trainer.loop import step_at

    with started(overrides) as here:
        rule, seen = here.engine.optimizer.rule, []
        update = rule.update

        def counting(gradient: torch.Tensor, *rest: Any) -> torch.Tensor:
            seen[-1] += len(gradient)
            return update(gradient, *rest)

        rule.update = counting
        for step in range(1, steps + 1):
            seen.append(0)
            step_at(step, here.engine, here.batches, here.layout, here.runtime, here.config)
        return seen


@pytest.mark.parametrize("micro", [1, 4])
@pytest.mark.parametrize("layout", ["one", "fsdp4"])
def test_each_matrix_is_updated_once_a_step(gang: Gang, corpus: Path, layout: str, micro: int) -> None:
    """Whatever the accumulation and the number of ranks."""
    world, keys = LAYOUTS[layout]
    everything = [f"data.corpus={corpus}", *SMALL, *RULES["muon"], *keys, f"train.micro_batch_size={micro}"]
    counts = gang.run(_matrices_updated, everything, 3, world=world)
    assert [sum(of_step) for of_step in zip(*counts, strict=True)] == [2 * 7] * 3


# ------------------------------------------------------------------------------------------------------------- resume

RUN = [*SMALL, "train.global_batch_size=12", "train.micro_batch_size=1", "train.steps=7", "checkpoint.every=4"]


def _train(gang: Gang, keys: list[str], folder: Path, name: str, world: int) -> RunDirectory:
    arguments = [TINY, *keys, f"run.dir={folder}", f"run.name={name}"]
    assert gang.run(train_worker, arguments, world=world) == [0] * world
    return RunDirectory(folder / name)


@pytest.mark.parametrize("rule", ["muon", "shampoo", "soap"])
def test_saved_on_two_ranks_and_resumed_on_any(gang: Gang, paragraphs: Path, tmp_path: Path, rule: str) -> None:
    """The next three steps are those of the unbroken run; what was loaded is what was saved, to the bit."""
    keys = [f"data.corpus={paragraphs}", *RUN, *RULES[rule], "schedule.warmup_steps=2"]
    unbroken = _train(gang, keys, tmp_path, "unbroken", 2)
    saved = read_state(unbroken.checkpoint(4))
    assert f"optim.blocks.0.attention.wq.weight.{'momentum' if rule == 'muon' else 'step'}" in saved
    for world in (1, 2, 3, 4):
        name = f"on-{world}"
        stopped(unbroken, name, 4)
        resumed = _train(gang, keys, tmp_path, name, world)
        ours, theirs = losses_and_norms(resumed)[-3:], losses_and_norms(unbroken)[-3:]
        if world == 2:
            assert ours == theirs
            state, expected = read_state(resumed.checkpoint(7)), read_state(unbroken.checkpoint(7))
            assert state.keys() == expected.keys()
            assert all(torch.equal(state[key], value) for key, value in expected.items())
        for a, b in zip(ours, theirs, strict=True):
            assert abs(a[0] - b[0]) / b[0] < 1e-5
            assert abs(a[1] - b[1]) / b[1] < 1e-3 if rule == "soap" else abs(a[1] - b[1]) / b[1] < 1e-5


def test_another_optimizer_takes_over(gang: Gang, paragraphs: Path, tmp_path: Path) -> None:
    """With `checkpoint.load_optimizer=false` weights, step and data position are kept; own checkpoints are whole."""
    keys = [f"data.corpus={paragraphs}", *RUN]
    first = _train(gang, [*keys, "train.steps=4"], tmp_path, "adamw", 1)
    over = [*keys, *RULES["muon"], f"checkpoint.resume={first.path}"]
    arguments = [TINY, *over, f"run.dir={tmp_path}", "run.name=muon"]
    assert gang.run(train_worker, arguments, world=1) == [2]
    second = _train(gang, [*over, "checkpoint.load_optimizer=false"], tmp_path, "muon", 2)
    assert [row["step"] for row in second.read_metrics() if "loss" in row] == [5, 6, 7]
    assert losses_and_norms(second)[0][0] < losses_and_norms(first)[0][0]
    state = read_state(second.checkpoint(7))
    assert int(state["optim.blocks.0.attention.wq.weight.step"]) == 3
    longer = _train(gang, [*over, "checkpoint.load_optimizer=false", "train.steps=8"], tmp_path, "muon", 2)
    assert int(read_state(longer.checkpoint(8))["optim.blocks.0.attention.wq.weight.step"]) == 4
