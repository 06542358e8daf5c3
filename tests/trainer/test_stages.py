"""Stages of a run: their config, their learning rates, and the very samples that each rank is fed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from common.errors import UserError
from tests.datasets import make_dataset, random_texts
from tests.gang import Gang
from tests.runs import losses_and_norms, read_state, relative_difference, stopped, train_worker
from trainer.config import TrainingConfig, load_config
from trainer.layout import plan_layout
from trainer.loop import learning_rate
from trainer.rundata import batches_of, open_run_data
from trainer.rundir import RunDirectory

# The first stage ends after step 5, the second after step 11, within an epoch of each source.
STEPS, FIRST_STAGE = 11, 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three sources; `staged.yaml`, a run of two stages on them; `alone.yaml`, the first source alone."""
    folder = tmp_path_factory.mktemp("stages")
    for i, name in enumerate(("one", "two", "three")):
        make_dataset(folder / name, random_texts(i, 40 * i + 8), held_out=0.2)
    weights = {"one": 0.5, "two": 0.3, "three": 0.2}
    mixture = [{"path": str(folder / name), "weight": weight} for name, weight in weights.items()]
    base: dict[str, Any] = {
        "run": {"name": "staged", "dir": str(folder)},
        "model": {"n_layers": 1, "d_model": 16, "n_heads": 2, "d_ff": 32, "max_seq_len": 24},
        "data": {"mixture": mixture, "seq_len": 16},
        "optim": {"lr": 1e-2},
        "schedule": {"name": "cosine", "warmup_steps": 2},
        "train": {"global_batch_size": 8, "micro_batch_size": 2},
        "checkpoint": {"every": 1, "keep": 100},
        "eval": {"every": 4, "batches": 1},
        "stages": [
            {"tokens": FIRST_STAGE * 8 * 16 + 100},
            {
                "tokens": (STEPS - FIRST_STAGE) * 12 * 24,
                "data": {
                    "mixture": [{**source, "weight": 1.0} for source in mixture[::-1]],
                    "seq_len": 24,
                    "packing": "best_fit",
                    "document_mask": True,
                },
                "train": {"global_batch_size": 12, "micro_batch_size": 3},
                "schedule": {"name": "linear", "min_lr_ratio": 0.0},
                "optim": {"lr": 5e-3},
            },
        ],
    }
    (folder / "staged.yaml").write_text(yaml.safe_dump(base), encoding="utf-8")
    alone = {**base, "data": {"path": str(folder / "one"), "seq_len": 16}, "stages": []}
    alone["train"] = {**base["train"], "steps": 4}
    (folder / "alone.yaml").write_text(yaml.safe_dump(alone), encoding="utf-8")
    return folder


def config_of(folder: Path, *overrides: str, name: str = "staged.yaml") -> TrainingConfig:
    return load_config(folder / name, overrides)


def with_stages(folder: Path, *stages: dict[str, Any]) -> TrainingConfig:
    return config_of(folder, f"stages={yaml.safe_dump(list(stages), default_flow_style=True, width=10**6).strip()}")


def fed(arguments: list[str]) -> list[dict[str, Any]]:
    """In a rank: run a worker, and return the rows that it was fed, a step each."""
    import trainer.loop as module

    original, seen = module.train_step, []

    def recording(engine: Any, batch: Any, *rest: Any) -> Any:
        seen.append({name: getattr(batch, name) for name in ("tokens", "targets", "mask", "documents")})
        return original(engine, batch, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "train_step", recording)
        assert train_worker(arguments) == 0
    return seen


def streams(by_rank: list[list[dict[str, Any]]]) -> list[list[Any]]:
    """The global batch of every step: the rows of all ranks, one after the other, with all that belongs to them."""
    return [
        [
            None if rank[step][name] is None else np.concatenate([r[step][name] for r in by_rank]).tolist()
            for rank in by_rank[:1]
            for name in ("tokens", "targets", "mask", "documents")
        ]
        for step in range(len(by_rank[0]))
    ]


def run_fed(gang: Gang, folder: Path, world: int, name: str, *overrides: str) -> list[list[Any]]:
    arguments = [str(folder / "staged.yaml"), f"run.name={name}", *overrides]
    return streams(gang.run(fed, arguments, world=world))


@pytest.fixture(scope="module")
def whole(gang: Gang, folder: Path) -> list[list[Any]]:
    """What one rank is fed from the start to the end."""
    return run_fed(gang, folder, 1, "one-rank")


@pytest.fixture(scope="module")
def by_ranks(gang: Gang, folder: Path) -> dict[int, list[list[Any]]]:
    """What two and four ranks are fed; their runs are `ranks-2` and `ranks-4`."""
    return {world: run_fed(gang, folder, world, f"ranks-{world}") for world in (2, 4)}


@pytest.mark.parametrize("world", [2, 4])
def test_any_number_of_ranks_is_fed_the_same_samples(
    folder: Path, whole: list[list[Any]], by_ranks: dict[int, list[list[Any]]], world: int
) -> None:
    assert by_ranks[world] == whole
    ours, theirs = (losses_and_norms(RunDirectory(folder / n)) for n in (f"ranks-{world}", "one-rank"))
    assert len(ours) == STEPS
    assert max(relative_difference(a[0], b[0]) for a, b in zip(ours, theirs, strict=True)) < 1e-5


def test_the_stream_is_that_of_the_two_stages(whole: list[list[Any]]) -> None:
    assert len(whole) == STEPS
    shapes = [np.shape(tokens) for tokens, *_ in whole]
    assert shapes == [(8, 16)] * FIRST_STAGE + [(12, 24)] * (STEPS - FIRST_STAGE)
    assert [documents is None for *_, documents in whole] == [True] * FIRST_STAGE + [False] * (STEPS - FIRST_STAGE)
    rows = [tuple(row) for tokens, *_ in whole for row in tokens]
    assert len(set(rows)) < len(rows)  # the smallest source is in a second epoch
    assert len(set(rows)) > 0.6 * len(rows)


@pytest.mark.usefixtures("whole")
def test_each_stage_is_evaluated_on_what_it_reads(folder: Path) -> None:
    config = config_of(folder)
    stages = batches_of(config, open_run_data(config)).stages
    first, second = (int(next(stage.eval_batches(1, 0, 1)).mask.sum()) for stage in stages)
    assert first != second
    rows = [row for row in RunDirectory(folder / "one-rank").read_metrics() if "eval_loss" in row]
    assert [(row["step"], row["eval_tokens"]) for row in rows] == [(4, first), (8, second), (11, second)]


@pytest.mark.usefixtures("by_ranks")
@pytest.mark.parametrize("stop", [3, *(pytest.param(stop, marks=pytest.mark.verify) for stop in (FIRST_STAGE, 8))])
def test_resumed_on_two_ranks_after_four_is_fed_the_rest(
    gang: Gang, folder: Path, whole: list[list[Any]], stop: int
) -> None:
    """Within the first stage, exactly at its end, and within the second."""
    run = stopped(RunDirectory(folder / "ranks-4"), f"ranks-4-stopped-{stop}", stop)
    expected = losses_and_norms(run)
    assert len(expected) == STEPS
    assert run_fed(gang, folder, 2, run.path.name) == whole[stop:]
    rows = [row for row in run.read_metrics() if "loss" in row]
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert [row["stage"] for row in rows] == [0] * FIRST_STAGE + [1] * (STEPS - FIRST_STAGE)
    for (loss, norm), theirs in zip(losses_and_norms(run), expected, strict=True):
        assert loss == pytest.approx(theirs[0], rel=1e-5)
        assert norm == pytest.approx(theirs[1], rel=1e-4)


@pytest.mark.usefixtures("by_ranks")
def test_resumed_at_the_same_layout_is_bitwise(gang: Gang, folder: Path) -> None:
    unbroken = RunDirectory(folder / "ranks-2")
    expected, state = losses_and_norms(unbroken), read_state(unbroken.checkpoint(STEPS))
    run = stopped(RunDirectory(folder / "ranks-2"), f"ranks-2-stopped-{FIRST_STAGE}", FIRST_STAGE)
    assert len(run_fed(gang, folder, 2, run.path.name)) == STEPS - FIRST_STAGE
    assert losses_and_norms(run) == expected
    again = read_state(run.checkpoint(STEPS))
    assert all(np.array_equal(state[key], again[key]) for key in state.keys() | again.keys())


def test_annealing_from_an_older_checkpoint(gang: Gang, folder: Path) -> None:
    """A run of one source, and then one that names it as its first stage and goes on with a mixture."""
    first = [str(folder / "alone.yaml"), "run.name=alone", "schedule.name=constant"]
    history = streams(gang.run(fed, first, world=2))
    assert len(history) == 4
    config = yaml.safe_load((folder / "alone.yaml").read_text(encoding="utf-8"))
    mixture = yaml.safe_load((folder / "staged.yaml").read_text(encoding="utf-8"))["data"]["mixture"]
    del config["train"]["steps"]
    config["schedule"]["name"] = "constant"
    annealing = {"tokens": 4 * 8 * 16, "data": {"mixture": mixture}, "schedule": {"name": "linear"}}
    config["stages"] = [{"tokens": 4 * 8 * 16}, annealing]
    config["run"]["name"] = "annealed"
    (folder / "annealed.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    second = [str(folder / "annealed.yaml"), f"checkpoint.resume={folder / 'alone'}"]
    rest = streams(gang.run(fed, second, world=1))
    assert len(rest) == 4
    rows = [row["lr"] for row in RunDirectory(folder / "annealed").read_metrics() if "loss" in row]
    assert rows == pytest.approx([1e-2 * (1 - 0.9 * i / 4) for i in range(1, 5)])
    # The whole history at once, of the same config.
    assert history + rest == streams(gang.run(fed, [str(folder / "annealed.yaml"), "run.name=at-once"], world=1))
    # Its first stage is the run that it goes on from: other data there are refused.
    config["data"] = {"path": str(folder / "two"), "seq_len": 16}
    config["run"]["name"] = "wrong"
    (folder / "wrong.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    assert gang.run(train_worker, [str(folder / "wrong.yaml"), second[1]], world=1) == [2]


def test_what_holds_in_each_stage(folder: Path) -> None:
    config = config_of(folder)
    assert config.train.steps == STEPS
    assert [(stage.first, stage.steps, stage.own_schedule) for stage in config.plan] == [
        (0, FIRST_STAGE, False),
        (FIRST_STAGE, STEPS - FIRST_STAGE, True),
    ]
    numbers = [config.stage_at(step).number for step in (1, FIRST_STAGE, FIRST_STAGE + 1, STEPS, STEPS + 100)]
    assert numbers == [0, 0, 1, 1, 1]
    first, second = (stage.config for stage in config.plan)
    assert first.data == config.data
    assert (second.data.seq_len, second.data.packing, second.train.global_batch_size) == (24, "best_fit", 12)
    assert second.model == config.model
    assert second.data.mixture[0].path.endswith("three")
    assert (second.optim.lr, second.optim.name) == (5e-3, "adamw")


def test_without_stages_the_run_is_one(folder: Path) -> None:
    config = config_of(folder, name="alone.yaml")
    (stage,) = config.plan
    assert (stage.first, stage.steps, stage.config) == (0, 4, config)
    assert config.stage_at(1) == config.stage_at(100) == stage


def test_a_resolved_config_of_stages_is_read_again(folder: Path) -> None:
    config = config_of(folder)
    again = TrainingConfig.model_validate(config.tree())
    assert again.tree() == config.tree()
    assert again.plan == config.plan


def test_learning_rates(folder: Path) -> None:
    """The base schedule runs over the whole run; a stage's own over its own steps, to its own peak."""
    config = config_of(folder)
    rates = [learning_rate(step, config) for step in range(1, STEPS + 1)]
    cosine = [0.1 + 0.9 * (1 + np.cos(np.pi * (step - 2) / (STEPS - 2))) / 2 for step in range(2, FIRST_STAGE + 1)]
    assert rates[:FIRST_STAGE] == pytest.approx([5e-3, *(1e-2 * factor for factor in cosine)])
    n = STEPS - FIRST_STAGE
    assert rates[FIRST_STAGE:] == pytest.approx([5e-3 * (1 - i / n) for i in range(1, n + 1)])


def test_a_stage_without_a_schedule_follows_that_of_the_run(folder: Path) -> None:
    steps = {"tokens": 4 * 8 * 16}
    config = with_stages(folder, steps, {**steps, "optim": {"lr": 0.5}})
    at_once = config_of(folder, "stages=[]", "train.steps=8")
    for step in range(1, 9):
        factor = 50 if step > 4 else 1
        assert learning_rate(step, config) == pytest.approx(factor * learning_rate(step, at_once))


@pytest.mark.parametrize(("tokens", "steps"), [(1, 1), (127, 1), (128, 1), (255, 1), (256, 2), (12_800, 100)])
def test_steps_follow_from_tokens(folder: Path, tokens: int, steps: int) -> None:
    assert with_stages(folder, {"tokens": tokens}).train.steps == steps


def test_layouts_of_all_stages(folder: Path) -> None:
    layout = plan_layout(config_of(folder), 2)
    assert [(layout.at(i).global_batch_size, layout.at(i).accumulation, layout.at(i).seq_len) for i in (0, 1)] == [
        (8, 2, 16),
        (12, 2, 24),
    ]
    assert layout.describe().splitlines()[1:] == [
        "batch  8 sequences = 2 ranks x 2 per micro-batch x 2 accumulated; x 16 positions = 128 positions a step",
        "batch  12 sequences = 2 ranks x 3 per micro-batch x 2 accumulated; x 24 positions = 288 positions a step",
    ]


@pytest.mark.parametrize(
    ("stage", "message"),
    [
        ({"data": {"seq_len": 25}}, r"stages\.1: 'data\.seq_len' \(25\) is longer than 'model\.max_seq_len' \(24\)"),
        ({"data": {"seqlen": 8}}, r"unknown key 'stages\.1\.data\.seqlen'; did you mean 'stages\.1\.data\.seq_len'"),
        ({"data": {"mixture": [{"path": "a", "weight": 0}]}}, "weight of a must be above 0"),
        ({"schedule": {"name": "constant", "min_lr_ratio": 0.1}}, "'min_lr_ratio' does nothing under name: constant"),
        ({"tokens": 0}, r"'stages\.1\.tokens': must be greater than or equal to 1, got 0"),
        ({"model": {}}, r"unknown key 'stages\.1\.model'"),
        ({"data": {"path": "a", "mixture": [{"path": "b", "weight": 1}]}}, "'path' does nothing beside 'mixture'"),
    ],
)
def test_wrong_stages_are_named(folder: Path, stage: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        with_stages(folder, {"tokens": 100}, {"tokens": 100, **stage})


def test_steps_beside_stages_are_refused(folder: Path) -> None:
    with pytest.raises(UserError, match=rf"'train\.steps' is 12, but the stages have {STEPS} steps; remove train"):
        config_of(folder, "train.steps=12")


@pytest.mark.parametrize(
    ("processes", "message"),
    [
        (3, r"stages\.0: 'train\.global_batch_size' \(8\) is not divisible by the 3 processes"),
        (8, r"stages\.0: 'train\.micro_batch_size' \(2\) does not divide the 1 sequences of a rank"),
    ],
)
def test_a_layout_that_does_not_fit_a_stage_is_refused(folder: Path, processes: int, message: str) -> None:
    with pytest.raises(UserError, match=message):
        plan_layout(config_of(folder), processes)
    with pytest.raises(UserError, match=r"stages\.1: 'train\.micro_batch_size' \(5\) does not divide the 8"):
        plan_layout(with_stages(folder, {"tokens": 9}, {"tokens": 9, "train": {"micro_batch_size": 5}}), 1)
