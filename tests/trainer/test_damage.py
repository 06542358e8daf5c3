"""A checkpoint that is not as it was written is named, put aside, and never loaded."""

from __future__ import annotations

import contextlib
import io
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from common.errors import UserError
from models.config import ModelConfig
from models.transformer import Transformer
from tests.gang import Gang
from tests.runs import TINY, losses_and_norms, train_worker
from trainer.config import load_config
from trainer.load import load_weights
from trainer.manifest import damage, read_trainer_state, sizes_agree
from trainer.rundata import open_run_data
from trainer.rundir import RunDirectory
from trainer.start import check_start

FLIPS = 200


@pytest.fixture(scope="module")
def words(corpus: Path) -> list[str]:
    model = ["model.d_model=32", "model.d_ff=32", "model.n_layers=1"]
    return [TINY, f"data.corpus={corpus}", *model, "eval.batches=0", "checkpoint.every=1", "checkpoint.keep=4"]


@pytest.fixture(scope="module")
def whole(gang: Gang, words: list[str], tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """A run of two ranks with three checkpoints."""
    folder = tmp_path_factory.mktemp("whole")
    assert gang.run(train_worker, [*words, f"run.dir={folder}", "train.steps=3"], world=2) == [0, 0]
    return RunDirectory(folder / "tiny")


@pytest.fixture
def run(whole: RunDirectory, tmp_path: Path) -> RunDirectory:
    """A copy of it."""
    shutil.copytree(whole.path, tmp_path / "runs" / "tiny")
    return RunDirectory(tmp_path / "runs" / "tiny")


def flip(path: Path, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


def model_of(checkpoint: Path) -> Transformer:
    return Transformer(ModelConfig.model_validate(read_trainer_state(checkpoint)["model"]))


def test_flipped_bits_are_found_and_named(whole: RunDirectory, tmp_path: Path) -> None:
    """Each of 200, over all files, and over the first and last bytes of each."""
    folder = tmp_path / "checkpoint"
    shutil.copytree(whole.checkpoint(3), folder)
    model, generator = model_of(folder), random.Random(0)
    load_weights(folder, model)
    before = [p.clone() for p in model.parameters()]
    files = sorted(folder.iterdir())
    assert [path.name for path in files] == [
        "COMMIT",
        "manifest.json",
        *(f"shard-0000{rank}-model-00001-of-00001.safetensors" for rank in (1, 2)),
        "tokenizer.model",
        "trainer.json",
    ]
    sizes = {path: 8 * path.stat().st_size for path in files}
    edges = [(path, bit) for path in files for bit in (0, 1, 7, sizes[path] - 1, sizes[path] - 8)]
    anywhere = [(path, generator.randrange(sizes[path])) for path in generator.choices(files, k=FLIPS - len(edges))]
    for path, bit in edges + anywhere:
        flip(path, bit)
        assert list(damage(folder)) == [path.name], (path.name, bit)
        with pytest.raises(UserError, match=f"damaged: {path.name}; "):
            load_weights(folder, model)
        flip(path, bit)
    assert damage(folder) == {}
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_what_is_cut_off_missing_or_added_is_found_and_named(whole: RunDirectory, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    shutil.copytree(whole.checkpoint(3), folder)
    assert sizes_agree(folder)
    for path in sorted(folder.iterdir()):
        content = path.read_bytes()
        for rest in (content[:-1], content[: len(content) // 2], b"", content + b"\n"):
            path.write_bytes(rest)
            assert list(damage(folder)) == [path.name], (path.name, len(rest))
            assert not sizes_agree(folder)
        path.unlink()
        assert damage(folder) == {path.name: "missing"}
        assert not sizes_agree(folder)
        path.write_bytes(content)
    shutil.copy(folder / "shard-00001-model-00001-of-00001.safetensors", folder / "shard-00003.safetensors")
    assert damage(folder) == {"shard-00003.safetensors": "not in the manifest"}


def told(arguments: list[str]) -> tuple[int, str, str]:
    """In a rank: exit code, output and errors of a worker."""
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as errors:
        code = train_worker(arguments)
    return code, out.getvalue(), errors.getvalue()


SHARD = "shard-00002-model-00001-of-00001.safetensors"
DAMAGES: dict[str, Callable[[Path], object]] = {
    SHARD: lambda path: flip(path, 8 * path.stat().st_size - 77),
    "trainer.json": lambda path: path.unlink(),
    "manifest.json": lambda path: path.write_bytes(path.read_bytes()[:-5]),
    "COMMIT": lambda path: flip(path, 5),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_the_one_before_is_taken(
    gang: Gang, whole: RunDirectory, run: RunDirectory, words: list[str], name: str
) -> None:
    """Told on the terminal and in the log of events; what the run does then is what it did."""
    DAMAGES[name](run.checkpoint(3) / name)
    bad = {path.name: path.read_bytes() for path in run.checkpoint(3).iterdir()}
    (code, out, warnings), other = gang.run(told, [*words, f"run.dir={run.path.parent}", "train.steps=4"], world=2)
    assert (code, other[0], other[2]) == (0, 0, "")
    (line,) = warnings.splitlines()
    assert line.startswith(f"{run.checkpoint(3)} is DAMAGED: {name} ")
    assert f"resumed from {run.checkpoint(2)}" in out
    (event,) = (event for event in run.events.read() if event["event"] == "damaged")
    assert (event["step"], list(event["files"])) == (3, [name])
    (aside,) = run.damaged()
    assert event["renamed"] == str(aside)
    assert {path.name: path.read_bytes() for path in aside.iterdir()} == bad
    assert run.committed() == [1, 2, 3, 4]
    assert losses_and_norms(run)[:3] == losses_and_norms(whole)


def test_before_processes_start_damage_is_left_to_them(run: RunDirectory, words: list[str]) -> None:
    """What can be read is checked: here that no step is left to make."""
    config = load_config(words[0], [*words[1:], f"run.dir={run.path.parent}", "train.steps=1"])
    data = open_run_data(config)
    (run.checkpoint(3) / "trainer.json").write_text("{")
    with pytest.raises(UserError, match=f"{run.checkpoint(2)} has 2 steps already"):
        check_start(config, run, data)
    for step in (1, 2):
        (run.checkpoint(step) / "manifest.json").unlink()
    check_start(config, run, data)


def test_without_a_whole_one_no_run_starts_from_scratch(gang: Gang, run: RunDirectory, words: list[str]) -> None:
    """Nor does the start after it, until the damaged ones are taken away or one is brought back."""
    for step in (1, 2, 3):
        flip(run.checkpoint(step) / SHARD, 8 * 5000)
    metrics = run.metrics_file.read_bytes()
    for _ in range(2):
        for code, _, error in gang.run(told, [*words, f"run.dir={run.path.parent}", "train.steps=4"], world=2):
            assert code == 2
            assert f"{run.path} has no whole checkpoint left" in error.splitlines()[-1]
            assert "step_00000001.damaged, step_00000002.damaged, step_00000003.damaged" in error.splitlines()[-1]
    assert run.metrics_file.read_bytes() == metrics
    assert [event["step"] for event in run.events.read() if event["event"] == "damaged"] == [3, 2, 1]
    back = run.damaged()[1].rename(run.checkpoint(2))
    flip(back / SHARD, 8 * 5000)
    (code, out, _), _ = gang.run(told, [*words, f"run.dir={run.path.parent}", "train.steps=4"], world=2)
    assert code == 0
    assert f"resumed from {run.checkpoint(2)}" in out


def test_a_damaged_one_that_is_asked_for_is_refused(
    gang: Gang, run: RunDirectory, words: list[str], tmp_path: Path
) -> None:
    flip(run.checkpoint(2) / SHARD, 8 * 5000)
    keys = [f"run.dir={tmp_path / 'new'}", f"checkpoint.resume={run.checkpoint(2)}"]
    for code, _, error in gang.run(told, [*words, *keys], world=2):
        assert code == 2
        assert f"{run.checkpoint(2)}: damaged: {SHARD}; " in error
    assert run.committed() == [1, 2, 3]  # another run's are not renamed
    assert RunDirectory(tmp_path / "new" / "tiny").committed() == []


def test_torn_ones_and_changed_keys_are_told(gang: Gang, run: RunDirectory, words: list[str], tmp_path: Path) -> None:
    (run.checkpoint(3) / "COMMIT").unlink()
    (_, out, warnings), _ = gang.run(told, [*words, f"run.dir={run.path.parent}", "train.steps=4"], world=2)
    assert warnings.splitlines() == [f"{run.checkpoint(3)} was never committed and is ignored; a later save removes it"]
    assert "not as in that checkpoint" not in out
    keys = [f"run.dir={tmp_path / 'new'}", f"checkpoint.resume={run.checkpoint(2)}", "optim.lr=0.5", "train.steps=4"]
    (code, out, _), _ = gang.run(told, [*words, *keys], world=2)
    assert code == 0
    changed = "optim.lr is 0.5, was 0.001"
    assert [line for line in out.splitlines() if "not as in" in line] == [f"  not as in that checkpoint: {changed}"]
    new = RunDirectory(tmp_path / "new" / "tiny")
    (event,) = (event for event in new.events.read() if event["event"] == "resume")
    assert (event["step"], event["changed"], event["fresh_optimizer"]) == (2, [changed], False)
    for folder in new.saved().values():
        (folder / "COMMIT").unlink()
    (_, out, warnings), _ = gang.run(
        told, [*words, f"run.dir={tmp_path / 'new'}", "optim.lr=0.5", "train.steps=1"], world=2
    )
    assert "resumed from" not in out  # no save was ever whole, so that the beginning is where it goes on
    assert [line.split()[0] for line in warnings.splitlines()] == [str(new.checkpoint(step)) for step in (3, 4)]


class Malicious:
    """Unpickled, it leaves a file."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.place,)


def test_no_code_runs_from_a_checkpoint(gang: Gang, run: RunDirectory, words: list[str], tmp_path: Path) -> None:
    """Files of a checkpoint are JSON and safetensors, and pickles under any name that torch knows are left alone."""
    trap = tmp_path / "ran"
    folder = run.checkpoint(2)
    shutil.rmtree(run.checkpoint(3))
    for path in folder.glob("*.json"):
        json.loads(path.read_bytes())
    for path in folder.glob("shard-*"):
        json.loads(path.read_bytes()[8 : 8 + int.from_bytes(path.read_bytes()[:8], "little")])
    for name in (".metadata", "__0_0.distcp", "shard-00001.distcp", "optimizer.pt", "pytorch_model.bin", "x.pkl"):
        with open(folder / name, "wb") as file:
            torch.save(Malicious(trap), file)
    torch.load(folder / "x.pkl", weights_only=False)
    trap.unlink()  # so the trap works
    (code, out, _), _ = gang.run(told, [*words, f"run.dir={run.path.parent}", "train.steps=4"], world=2)
    assert code == 0
    assert f"resumed from {folder}" in out
    load_weights(folder, model_of(folder))
    assert not trap.exists()
    # In the place of a file of ours, it is damage.
    torch.save(Malicious(trap), run.checkpoint(3) / SHARD)
    with pytest.raises(UserError, match=f"damaged: {SHARD}"):
        load_weights(run.checkpoint(3), model_of(run.checkpoint(3)))
    assert not trap.exists()
