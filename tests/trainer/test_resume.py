"""Stopped and resumed equals never stopped."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.gang import Gang
from tests.runs import TINY, losses_and_norms, read_state, stopped, train_worker, worst_difference
from trainer.rundir import RunDirectory

STEPS, HALF = 12, 6
LAYOUTS = {
    "one": (1, []),
    "ddp2": (2, ["parallel.engine=ddp"]),
    "fsdp2": (2, []),
    "fsdp4": (4, []),
    "hsdp2x2": (4, ["parallel.dp_replicate=2"]),
    "hsdp2x2-deterministic": (4, ["parallel.dp_replicate=2", "train.deterministic=true"]),
}


class Tiny:
    """Starts the tiny config in a folder of its own."""

    def __init__(self, gang: Gang, corpus: Path, folder: Path) -> None:
        self._gang, self._corpus, self.folder = gang, corpus, folder

    def __call__(self, name: str, layout: str, *overrides: str) -> RunDirectory:
        world, keys = LAYOUTS[layout]
        arguments = [TINY, f"data.corpus={self._corpus}", f"run.dir={self.folder}", f"run.name={name}"]
        # The learning rate moves at every step, so that one resumed at another would show.
        schedule = ["schedule.name=cosine", "schedule.warmup_steps=4"]
        steps = [f"train.steps={STEPS}", f"checkpoint.every={HALF}", f"eval.every={HALF}", "eval.batches=1"]
        words = [*arguments, *schedule, *steps, *keys, *overrides]
        assert self._gang.run(train_worker, words, world=world) == [0] * world
        return RunDirectory(self.folder / name)


@pytest.fixture(scope="module")
def tiny(gang: Gang, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return Tiny(gang, corpus, tmp_path_factory.mktemp("resume"))


@pytest.fixture(scope="module")
def unbroken(tiny: Tiny) -> Callable[[str], RunDirectory]:
    """All steps at once under a layout, made once."""

    @functools.cache
    def run(layout: str) -> RunDirectory:
        return tiny(f"unbroken-{layout}", layout)

    return run


@pytest.mark.parametrize(
    "layout",
    ["ddp2", "fsdp4", *(pytest.param(f"hsdp2x2{more}", marks=pytest.mark.verify) for more in ("", "-deterministic"))],
)
def test_resume_at_the_same_layout_is_bitwise(tiny: Tiny, unbroken: Callable[[str], RunDirectory], layout: str) -> None:
    stopped(unbroken(layout), f"again-{layout}", HALF)
    resumed = tiny(f"again-{layout}", layout)
    assert losses_and_norms(resumed) == losses_and_norms(unbroken(layout))
    ours, theirs = read_state(resumed.checkpoint(STEPS)), read_state(unbroken(layout).checkpoint(STEPS))
    assert ours.keys() == theirs.keys()
    assert any(key.startswith("optim.") for key in ours)
    for key in ours:
        assert torch.equal(ours[key], theirs[key]), key


@pytest.mark.parametrize(
    ("source", "target"), [("fsdp4", "fsdp2"), ("fsdp4", "ddp2"), ("fsdp4", "one"), ("ddp2", "fsdp4")]
)
def test_resume_at_another_layout(
    tiny: Tiny, unbroken: Callable[[str], RunDirectory], source: str, target: str
) -> None:
    """Losses and norms of all steps agree with the unbroken run to 1e-5; the metrics hold each step once."""
    stopped(unbroken(source), f"{source}-to-{target}", HALF)
    resumed = tiny(f"{source}-to-{target}", target)
    steps = [row["step"] for row in resumed.read_metrics() if "loss" in row]
    assert steps == list(range(1, STEPS + 1))
    assert max(worst_difference(resumed, unbroken(source)).values()) < 1e-5


def test_more_steps_go_on_from_a_finished_run(tiny: Tiny) -> None:
    """12 steps after 6 under a constant schedule are the 12 steps at once."""
    constant = "schedule.name=constant"
    tiny("longer", "one", constant, f"train.steps={HALF}")
    longer = tiny("longer", "one", constant)
    at_once = tiny("at-once", "one", constant)
    assert losses_and_norms(longer) == losses_and_norms(at_once)
    assert len(list((longer.path / "starts").iterdir())) == 2


def test_torn_checkpoint_is_ignored_and_cleaned(tiny: Tiny) -> None:
    run = tiny("torn", "fsdp2")
    expected = losses_and_norms(run)
    (run.checkpoint(STEPS) / "COMMIT").unlink()
    assert run.committed() == [HALF]
    tiny("torn", "fsdp2")
    assert run.committed() == [HALF, STEPS]
    assert losses_and_norms(run) == expected


def test_only_the_newest_are_kept(tiny: Tiny) -> None:
    run = tiny("kept", "one", "checkpoint.every=3", "checkpoint.keep=2", "checkpoint.async=false", "train.steps=8")
    assert sorted(p.name for p in run.checkpoints.iterdir()) == ["step_00000006", "step_00000008"]


def test_asynchronous_and_synchronous_saves_hold_the_same(tiny: Tiny) -> None:
    a = tiny("async", "fsdp2", "train.steps=5")
    b = tiny("sync", "fsdp2", "train.steps=5", "checkpoint.async=false")
    ours, theirs = read_state(a.checkpoint(5)), read_state(b.checkpoint(5))
    assert all(torch.equal(ours[key], theirs[key]) for key in ours.keys() | theirs.keys())


def test_checkpoint_manifest_and_format(tiny: Tiny) -> None:
    """COMMIT holds the hash of the manifest, the manifest that of every file, and no file is a pickle."""
    import hashlib

    folder = tiny("format", "fsdp2", "train.steps=5").checkpoint(5)
    manifest_bytes = (folder / "manifest.json").read_bytes()
    assert (folder / "COMMIT").read_text().strip() == hashlib.blake2b(manifest_bytes, digest_size=32).hexdigest()
    files = json.loads(manifest_bytes)["files"]
    assert sorted([*files, "manifest.json", "COMMIT"]) == sorted(p.name for p in folder.iterdir())
    for name, entry in files.items():
        content = (folder / name).read_bytes()
        assert entry == {"bytes": len(content), "blake2b": hashlib.blake2b(content, digest_size=32).hexdigest()}
        assert not content.startswith(b"\x80")  # a pickle's first byte
    state = json.loads((folder / "trainer.json").read_text())
    assert state["format"] == 1
    assert state["step"] == 5
    assert sum(name.endswith(".safetensors") for name in files) == 2  # one a rank


@pytest.mark.parametrize(
    "optimizer", ["rmsprop", *(pytest.param(name, marks=pytest.mark.verify) for name in ("adam", "sgd", "adagrad"))]
)
def test_every_optimizer_resumes_bitwise(tiny: Tiny, optimizer: str) -> None:
    keys = [f"optim.name={optimizer}", "optim.weight_decay=0.01", "train.steps=6", "checkpoint.every=3"]
    keys.append("eval.batches=0")
    if optimizer == "rmsprop":
        keys.append("optim.momentum=0.9")
    run = tiny(f"optimizer-{optimizer}", "fsdp2", *keys)
    expected, whole = losses_and_norms(run), read_state(run.checkpoint(6))
    shutil.rmtree(run.checkpoint(6))
    tiny(f"optimizer-{optimizer}", "fsdp2", *keys)
    assert losses_and_norms(run) == expected
    again = read_state(run.checkpoint(6))
    assert all(torch.equal(whole[key], again[key]) for key in whole.keys() | again.keys())


def train_on_a_full_disk(arguments: list[str]) -> int:
    """In a rank: the exit code of a worker whose disk is full when the first checkpoint is to be committed."""
    import errno

    import trainer.checkpoint as module

    def refuse(path: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "fingerprint", refuse)
        return train_worker(arguments)


def test_a_full_disk_commits_nothing_and_is_told(gang: Gang, corpus: Path, tmp_path: Path) -> None:
    arguments = [TINY, f"data.corpus={corpus}", f"run.dir={tmp_path}", "checkpoint.every=2", "train.steps=4"]
    run = RunDirectory(tmp_path / "tiny")
    assert gang.run(train_on_a_full_disk, arguments, world=1) == [2]
    assert run.committed() == []
    assert gang.run(train_worker, arguments, world=1) == [0]
    assert run.committed() == [2, 4]
