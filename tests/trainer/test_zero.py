"""The engine `deepspeed`; that it gives what others give, layout for layout, is in test_layouts.py."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from common.errors import UserError
from optim.boxes import Box, Parts
from tests.gang import Gang
from tests.runs import TINY, Started, read_state, started, train_worker, worst_difference
from tests.trainer.poison import an_infinite_gradient
from trainer.config import load_config
from trainer.rundir import RunDirectory

ZERO = "parallel.engine=deepspeed"
# Cut by partitions inside rows and matrices, whatever the number of ranks.
ODD = ["model.d_model=60", "model.d_ff=92", "model.n_heads=4", "model.head_dim=14", "train.global_batch_size=12"]
RULES = {
    "muon": ["optim={name: muon, lr: 0.02, weight_decay: 0.1}"],
    "shampoo": ["optim={name: shampoo, lr: 0.02, weight_decay: 0.1, precondition_every: 2}"],
    "soap": ["optim={name: soap, lr: 0.02, weight_decay: 0.1, precondition_every: 2}"],
}
EXPERTS = ["model.moe={n_experts: 4, top_k: 2, d_ff: 32, bias_update_rate: 0.01}"]


def whole(tensor: Tensor) -> Tensor:
    """A copy of the logical tensor, gathered."""
    from trainer.certify.looking import whole as gathered

    return gathered(tensor).detach().clone()


def recorded(name: str, shape: tuple[int, ...], step: int) -> Tensor:
    """A gradient that no rank has computed."""
    generator = torch.Generator().manual_seed(sum(map(ord, name)) * 1000 + step)
    return torch.randn(shape, generator=generator)


def replay(overrides: list[str], steps: int) -> dict[str, Tensor]:
    """In a rank: updates from recorded gradients, put where DeepSpeed leaves those that it has reduced; the weights."""
    with started(overrides) as here:
        engine = here.engine
        for step in range(steps):
            if isinstance(next(iter(engine.state_dict().values())), Parts):
                _give_to_zero(engine, step)
            else:
                for name, parameter in engine.model.named_parameters():
                    parameter.grad = recorded(name, tuple(parameter.shape), step)
            engine.step(0.5)
        return {n: whole(t) for n, t in engine.state_dict().items() if n.startswith("model.")}


def _give_to_zero(engine: Any, step: int) -> None:
    zero = engine._zero
    for i, flat in enumerate(engine._flats):
        run = torch.zeros_like(flat.tensor)
        for name, parts in flat.parts(run).items():
            gradient = recorded(name, tuple(parts.shape), step)
            for box, piece in zip(parts.here, parts.pieces, strict=True):
                piece.copy_(gradient[box.within(Box((0,) * gradient.ndim, tuple(gradient.shape)))])
        zero.averaged_gradients[i] = [run]


@pytest.mark.parametrize(
    ("rule", "stage", "world"),
    [
        ("muon", 2, 3),
        ("muon", 3, 3),
        ("shampoo", 3, 2),
        ("soap", 1, 3),
        *(
            pytest.param(*case, marks=pytest.mark.verify)
            for case in (("muon", 1, 2), ("shampoo", 1, 2), ("shampoo", 2, 3), ("soap", 2, 2), ("soap", 3, 2))
        ),
    ],
)
def test_rules_on_recorded_gradients_to_the_bit(gang: Gang, corpus: Path, rule: str, stage: int, world: int) -> None:
    keys = [f"data.corpus={corpus}", *ODD, *RULES[rule], "train.micro_batch_size=1"]
    (expected,) = gang.run(replay, [*keys, ZERO, "parallel.zero_stage=0"], 4, world=1)
    for weights in gang.run(replay, [*keys, ZERO, f"parallel.zero_stage={stage}"], 4, world=world):
        assert weights.keys() == expected.keys()
        for name, weight in weights.items():
            assert torch.equal(weight, expected[name]), name


def cuts(overrides: list[str]) -> list[int]:
    """In a rank: of how many boxes its part of each matrix is."""
    with started(overrides) as here:
        weights = here.engine.state_dict()
        rules = [
            name
            for group in here.engine.optimizer.param_groups
            for name in group["names"]
            if group["role"] == "hidden_matrix"
        ]
        return [len(weights[f"model.{name}"].here) for name in rules]


def test_partitions_cut_rows(gang: Gang, corpus: Path) -> None:
    """Or the test above would show little."""
    keys = [f"data.corpus={corpus}", *ODD, *RULES["muon"], "train.micro_batch_size=1", ZERO]
    for stage in (2, 3):
        found = gang.run(cuts, [*keys, f"parallel.zero_stage={stage}"], world=3)
        assert any(boxes > 1 for those in found for boxes in those), found


class Runs:
    """Runs of twenty steps of the tiny config with experts, made once each."""

    def __init__(self, gang: Gang, corpus: Path, folder: Path) -> None:
        self._gang, self._corpus, self._folder = gang, corpus, folder

    def __call__(self, name: str, world: int, *keys: str) -> RunDirectory:
        run = RunDirectory(self._folder / name)
        if not run.path.exists():
            words = [TINY, f"data.corpus={self._corpus}", f"run.dir={self._folder}", f"run.name={name}"]
            words += ["train.sample_prompt=null", "eval.batches=0", "checkpoint.every=10", *keys]
            assert self._gang.run(train_worker, words, world=world, timeout=240) == [0] * world
        return run


@pytest.fixture(scope="module")
def runs(gang: Gang, paragraphs: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(gang, paragraphs, tmp_path_factory.mktemp("zero"))


def compare(run: RunDirectory, other: RunDirectory, weights: float = 1e-5) -> None:
    """Losses and norms to 1e-5, and final weights, as the issue of layouts has it (measured 1e-7, and 1e-6)."""
    worst = worst_difference(run, other)
    assert worst["loss"] < 1e-5
    assert worst["grad_norm"] < 1e-5
    ours, theirs = read_state(run.checkpoint(20)), read_state(other.checkpoint(20))
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        if name.startswith("model.") and float(tensor.float().norm()) > 0:
            assert float((ours[name].float() - tensor.float()).norm() / tensor.float().norm()) < weights, name


@pytest.mark.parametrize(("stage", "optimizer"), [(1, "adamw"), (2, "muon")])
def test_experts_are_those_of_fsdp(runs: Runs, stage: int, optimizer: str) -> None:
    """With every token sent to every expert, since rounding turns a choice of top-k here and there."""
    keys = [*EXPERTS, "model.moe.top_k=4", "parallel.ep=2", "data.packing=pad"]
    if optimizer == "muon":
        keys.append("optim={name: muon, lr: 0.004, weight_decay: 0.1, adamw: {eps: 1.0e-5}}")
    expected = runs(f"fsdp-{optimizer}", 4, *keys)
    compare(runs(f"zero-{optimizer}", 4, *keys, ZERO, f"parallel.zero_stage={stage}"), expected)


def test_a_run_goes_on_under_another_engine(runs: Runs, tmp_path: Path) -> None:
    """fsdp on 4 ranks, ZeRO-2 on 2, ZeRO-3 on 4, fsdp on 1: as the unbroken run, in losses, weights and batches."""
    muon = "optim={name: muon, lr: 0.004, weight_decay: 0.1, adamw: {eps: 1.0e-5}}"
    keys = [muon, "data.packing=pad", "checkpoint.every=5"]
    unbroken = runs("unbroken", 4, *keys)
    whole_run = runs("changing", 4, *keys, "train.steps=5")
    engines = ((2, [ZERO]), (4, [ZERO, "parallel.zero_stage=3"]), (1, []))
    for steps, (world, engine) in zip((10, 15, 20), engines, strict=True):
        words = [TINY, f"data.corpus={runs._corpus}", f"run.dir={whole_run.path.parent}", "run.name=changing", *keys]
        words += ["train.sample_prompt=null", "eval.batches=0", f"train.steps={steps}", *engine]
        assert runs._gang.run(train_worker, words, world=world, timeout=240) == [0] * world
    rows, expected = whole_run.read_metrics(), unbroken.read_metrics()
    assert [row["tokens"] for row in rows] == [row["tokens"] for row in expected]
    compare(whole_run, unbroken)


def skip_a_step(overrides: list[str], fp16: bool) -> tuple[list[bool], bool, list[float]]:
    """In a rank: a bad step between two good ones; which were skipped, whether weights rested, and loss scales."""
    with supports_fp16() if fp16 else _nothing(), started(overrides) as here:
        engine = here.engine
        skipped, scales = [here.step(here.batch(0)).skipped], [engine.loss_scale]
        before = {name: whole(tensor) for name, tensor in engine.state_dict().items() if "optim" not in name}
        bad = math.inf if fp16 else math.nan
        if engine._stage == 3:
            # Parameters are gathered for a module's own computation alone, and have no gradient to put it into.
            step = poisoned_loss(here)
        else:
            with an_infinite_gradient(engine.model, here.runtime.rank == 1, bad):
                step = here.step(here.batch(1))
        skipped.append(step.skipped)
        scales.append(engine.loss_scale)
        rested = all(torch.equal(whole(engine.state_dict()[name]), tensor) for name, tensor in before.items())
        skipped.append(here.step(here.batch(2)).skipped)
        scales.append(engine.loss_scale)
        return skipped, rested, scales


def poisoned_loss(here: Started) -> Any:
    """A step whose loss is NaN on one rank."""
    backward = here.engine.micro_backward

    def poisoned(loss: Tensor, last: bool) -> None:
        backward(loss * math.nan if here.runtime.rank == 1 else loss, last)

    with mock.patch.object(here.engine, "micro_backward", poisoned):
        return here.step(here.batch(1))


@contextmanager
def supports_fp16() -> Iterator[None]:
    """DeepSpeed computes in fp16 on no CPU without AMX; torch can, slowly."""
    from deepspeed.accelerator import get_accelerator

    with mock.patch.object(type(get_accelerator()), "is_fp16_supported", return_value=True):
        yield


@contextmanager
def _nothing() -> Iterator[None]:
    yield


@pytest.mark.parametrize(
    "keys",
    [
        ["parallel.zero_stage=0"],
        ["parallel.zero_stage=2"],
        ["parallel.zero_stage=2", "parallel.offload=optimizer"],
        ["parallel.zero_stage=3"],
        pytest.param(["parallel.zero_stage=1"], marks=pytest.mark.verify),
        pytest.param(["parallel.zero_stage=3", "parallel.offload=optimizer"], marks=pytest.mark.verify),
    ],
)
def test_a_bad_step_leaves_everything_alone(gang: Gang, corpus: Path, keys: list[str]) -> None:
    """DeepSpeed by itself lets a NaN through at stage 0."""
    words = [f"data.corpus={corpus}", ZERO, "train.micro_batch_size=4", *keys]
    for skipped, rested, _ in gang.run(skip_a_step, words, False, world=2):
        assert skipped == [False, True, False]
        assert rested


def test_an_overflow_halves_the_loss_scale(gang: Gang, corpus: Path) -> None:
    words = [f"data.corpus={corpus}", ZERO, "train.precision=fp16", "train.loss_scale_init=4096", "model.d_model=32"]
    for skipped, rested, scales in gang.run(skip_a_step, words, True, world=2):
        assert skipped == [False, True, False]
        assert rested
        assert scales == [4096.0, 2048.0, 2048.0]


def steps_of(overrides: list[str], fp16: bool) -> list[tuple[float, float]]:
    """In a rank: losses and norms of three steps."""
    with supports_fp16() if fp16 else _nothing(), started(overrides) as here:
        return [tuple(here.step(here.batch(step)))[:2] for step in range(3)]


@pytest.mark.parametrize(("precision", "stage"), [("bf16", 2), ("bf16", 3), ("fp16", 2)])
def test_half_precision_is_that_of_fsdp(gang: Gang, corpus: Path, precision: str, stage: int) -> None:
    """Both round where they cast weights and activations, and nowhere else: what is left is the order of sums."""
    words = [f"data.corpus={corpus}", f"train.precision={precision}", "model.d_model=32", "train.micro_batch_size=4"]
    expected = gang.run(steps_of, words, False, world=2)
    found = gang.run(steps_of, [*words, ZERO, f"parallel.zero_stage={stage}"], precision == "fp16", world=2)
    for ours, theirs in zip(found, expected, strict=True):
        for mine, other in zip(ours, theirs, strict=True):
            assert mine == pytest.approx(other, rel=1e-6)


@pytest.mark.parametrize(
    ("keys", "parts"),
    [
        (["parallel.zero_stage=2"], ["'zero_stage'", "engine: fsdp", "deepspeed"]),
        (["parallel.offload=optimizer"], ["'offload'", "engine: fsdp"]),
        ([ZERO, "parallel.tp=2"], ["tp", "engine: fsdp"]),
        ([ZERO, "parallel.dp_replicate=2"], ["dp_replicate", "engine: fsdp"]),
        ([ZERO, "parallel.zero_stage=0", "parallel.offload=optimizer"], ["'offload: optimizer'", "zero_stage: 1"]),
        ([ZERO, "parallel.offload=optimizer+params"], ["'offload: optimizer+params'", "zero_stage: 3"]),
        ([ZERO, "parallel.zero_stage=3", "parallel.ep=2", *EXPERTS], ["'ep' (2)", "zero_stage 1 or 2"]),
        ([ZERO, "parallel.zero_stage=3", "train.compile=true"], ["'train.compile'", "parallel.zero_stage=2"]),
        ([ZERO, "parallel.zero_stage=0", "train.precision=bf16"], ["'train.precision'", "parallel.zero_stage=2"]),
        ([ZERO, "parallel.zero_stage=1", "train.precision=bf16"], ["'train.precision'", "parallel.zero_stage=2"]),
        ([ZERO, "log.spectra_every=5"], ["'log.spectra_every'", "parallel.engine=fsdp"]),
        (
            [ZERO, "parallel.zero_stage=3", "train.activation_checkpointing=selective"],
            ["'train.activation_checkpointing'", "full"],
        ),
    ],
)
def test_what_does_not_go_together(keys: list[str], parts: list[str]) -> None:
    with pytest.raises(UserError) as refused:
        load_config(TINY, keys)
    assert all(part in str(refused.value) for part in parts), refused.value


def test_without_deepspeed(gang: Gang, corpus: Path) -> None:
    (message,) = gang.run(refused_without, [f"data.corpus={corpus}", ZERO], world=1)
    assert "pip install 'gramian[deepspeed]'" in message


def refused_without(overrides: list[str]) -> str:
    """In a rank: what is said where DeepSpeed is not installed."""
    gone = mock.patch.dict("sys.modules", {"deepspeed": None})
    with gone, pytest.raises(UserError) as refused, started(overrides):
        pass
    return str(refused.value)


def left_behind(overrides: list[str]) -> list[str]:
    """In a rank: what of torch and of the environment is another after an engine has been built."""
    import torch.nn.functional as F

    before = dict(os.environ), F.linear, torch.get_num_threads(), torch.is_grad_enabled()
    with started(overrides):
        pass
    after = dict(os.environ), F.linear, torch.get_num_threads(), torch.is_grad_enabled()
    changed = {key for key in {*before[0], *after[0]} if before[0].get(key) != after[0].get(key)}
    return [
        *sorted(key for key in changed if key.startswith("ACCELERATE")),
        *(str(a) for a, b in zip(before[1:], after[1:], strict=True) if a is not b),
    ]


def test_torch_stays_as_it_is(gang: Gang, corpus: Path) -> None:
    """By itself DeepSpeed replaces torch's `linear` for the whole process, and Accelerate leaves itself notes."""
    for left in gang.run(left_behind, [f"data.corpus={corpus}", ZERO, "parallel.zero_stage=3"], world=2):
        assert left == []


def test_fp16_where_deepspeed_has_none(gang: Gang, corpus: Path) -> None:
    (message,) = gang.run(refused_in_fp16, [f"data.corpus={corpus}", ZERO, "train.precision=fp16"], world=1)
    assert "'train.precision' is fp16" in message
    assert "train.precision=bf16" in message


def refused_in_fp16(overrides: list[str]) -> str:
    """In a rank: what is said where the device has no fp16 for DeepSpeed."""
    from deepspeed.accelerator import get_accelerator

    none = mock.patch.object(type(get_accelerator()), "is_fp16_supported", return_value=False)
    with none, pytest.raises(UserError) as refused, started(overrides):
        pass
    return str(refused.value)
