"""Corpora, run directories, checkpoints and environments that are refused, and nothing lost."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.launch.commands import assert_refused, command, tiny
from tests.launch.conftest import Trained
from tests.runs import TINY


def _tree(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


@pytest.mark.parametrize(
    ("content", "words", "parts"),
    [
        (None, [], ["data.corpus", "does not exist", "python-stdlib"]),
        ({}, [], ["data.corpus", "holds no .txt, .jsonl"]),
        ({"a.txt": ""}, [], ["data.corpus", "no document with any text"]),
        ({"a.txt": "hi"}, [], ["data.corpus", "too little text"]),
        ({"a.jsonl": '{"txt": "words"}'}, [], ["a.jsonl:1", "no field 'text'", "set data.text_field", "'txt'"]),
    ],
)
def test_wrong_corpus(tmp_path: Path, content: dict[str, str] | None, words: list[str], parts: list[str]) -> None:
    corpus = tmp_path / "corpus"
    if content is not None:
        corpus.mkdir()
        for name, text in content.items():
            (corpus / name).write_text(text)
    assert_refused(command(*tiny(corpus, tmp_path / "runs", "--nproc", "2", *words)), *parts)
    assert not (tmp_path / "runs").exists()


@pytest.mark.usefixtures("trained")  # the corpus is in the cache
@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["data.tokenizer.vocab_size=60000"], ["data.tokenizer.vocab_size", "too large for this corpus", "set it to"]),
        (["data.seq_len=999999", "model.max_seq_len=999999"], ["data.seq_len", "999999", "lower data.seq_len"]),
        (
            ["train.sample_prompt=" + "def f(x)" * 40],
            ["'train.sample_prompt' is", "'model.max_seq_len' is 64", "shorten"],
        ),
        (["checkpoint.resume=nowhere"], ["'checkpoint.resume'", "nowhere: no such run or checkpoint"]),
        (["run.dir={folder}/file/runs"], ["'run.dir'", "file is not a folder", "set run.dir"]),
    ],
)
def test_refused_before_processes_start(corpus: Path, tmp_path: Path, words: list[str], parts: list[str]) -> None:
    (tmp_path / "file").touch()
    filled = [word.format(folder=tmp_path) for word in words]
    assert_refused(command(*tiny(corpus, tmp_path / "runs", "--nproc", "2", *filled)), *parts)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_run_directory_of_another_run(trained: Trained) -> None:
    before = _tree(trained.folder)
    assert_refused(command(*trained.words, "optim.lr=0.5"), "holds another run", "'optim.lr'", "0.5", "run.name=")
    assert_refused(command(*trained.words, "train.steps=8", "checkpoint.resume=never"), "resume is never", "run.name")
    assert _tree(trained.folder) == before


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["model.n_layers=3"], ["another architecture", "'model.n_layers' is 2, not 3", "set model.n_layers=2"]),
        (["optim.name=sgd"], ["'optim.name' is adamw, not sgd", "optim.name=adamw", "checkpoint.load_optimizer=false"]),
        (["data.tokenizer.vocab_size=600", "model.vocab_size=600"], ["another architecture", "model.vocab_size"]),
        (["model.vocab_size=512", "data.eval_fraction=0.2"], ["another tokenizer"]),
        (["run.name=other"], ["has 6 steps already and 'train.steps' is 6", "set train.steps to more"]),
    ],
)
def test_checkpoint_of_something_else(trained: Trained, tmp_path: Path, words: list[str], parts: list[str]) -> None:
    """Found before processes start, and no folder is made for a run that cannot be."""
    resume = f"checkpoint.resume={trained.run.path}"
    assert_refused(command(*trained.words, f"run.dir={tmp_path}", resume, *words), str(trained.run.path), *parts)
    assert list(tmp_path.iterdir()) == []


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-100] ^= 1
    path.write_bytes(content)


def _shard(checkpoint: Path) -> Path:
    return sorted(checkpoint.glob("shard-*"))[1]


@pytest.mark.parametrize(
    ("damage", "name"),
    [
        (lambda folder: _flip(_shard(folder)), "shard-00002"),
        (lambda folder: _shard(folder).unlink(), "shard-00002"),
        (lambda folder: _flip(folder / "tokenizer.model"), "tokenizer.model"),
        (lambda folder: (folder / "trainer.json").write_text("{"), "trainer.json"),
        (lambda folder: _flip(folder / "manifest.json"), "manifest.json"),
    ],
)
def test_damaged_checkpoint_is_named(
    trained: Trained,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    damage: Callable[[Path], object],
    name: str,
) -> None:
    """Training goes on from the one before, see tests/trainer/test_damage.py."""
    from launch.cli import app

    newest = Path(shutil.copytree(trained.run.checkpoint(6), tmp_path / "checkpoint"))
    damage(newest)
    with pytest.raises(SystemExit) as end:
        app(["generate", str(newest)], standalone_mode=False)
    assert end.value.code == 2
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1
    assert f"{newest}: damaged: {name}" in error


def test_checkpoint_of_a_later_format(trained: Trained, tmp_path: Path) -> None:
    from common.errors import UserError
    from common.files import hash_file
    from trainer.manifest import read_trainer_state

    folder = tmp_path / "checkpoint"
    shutil.copytree(trained.run.checkpoint(6), folder)
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(manifest | {"format": 99}))
    (folder / "COMMIT").write_text(hash_file(folder / "manifest.json") + "\n")
    with pytest.raises(UserError, match="checkpoint format 99, this version reads 1"):
        read_trainer_state(folder)


def test_generate_from_nothing(tmp_path: Path) -> None:
    assert_refused(command("generate", tmp_path / "none"), "no such run or checkpoint")
    assert_refused(command("generate", tmp_path), "holds no committed checkpoint", "train first")
    assert_refused(command("generate"), "RUN_OR_CHECKPOINT")


@pytest.mark.parametrize(
    ("variables", "words", "parts"),
    [
        ({"RANK": "0"}, [], ["WORLD_SIZE", "not set though RANK is", "torchrun"]),
        ({"RANK": "2", "WORLD_SIZE": "2"}, [], ["RANK is 2 but WORLD_SIZE is 2"]),
        ({"RANK": "x", "WORLD_SIZE": "2"}, [], ["RANK must be a number, got 'x'"]),
        ({"RANK": "1", "WORLD_SIZE": "3"}, [], ["[rank 1]", "'train.global_batch_size'"]),
        ({"RANK": "0", "WORLD_SIZE": "2"}, ["--nproc", "2"], ["--nproc", "RANK"]),
    ],
)
def test_wrong_environment(
    corpus: Path, tmp_path: Path, variables: dict[str, str], words: list[str], parts: list[str]
) -> None:
    if len(variables) > 1:
        variables = variables | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29400"}
    arguments = tiny(corpus, tmp_path / "runs", "train.global_batch_size=32", *words)
    assert_refused(command(*arguments, **variables), *parts)
    assert not (tmp_path / "runs").exists()


def test_worker_without_words() -> None:
    assert_refused(command("-m", "launch.worker", program="python"), "usage: torchrun", "CONFIG")
    assert_refused(command("-m", "launch.worker", TINY, "modle.x=1", program="python"), "did you mean 'model'?")
