"""`gramian checkpoint export` and `import`, as a user calls them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.launch.commands import command
from tests.launch.conftest import Ended, Trained


def test_there_and_back(trained: Trained, tmp_path: Path, gramian: Callable[..., Ended]) -> None:
    """A run goes out by the command; what comes back generates the same text."""
    out, back = tmp_path / "hf", tmp_path / "back"
    result = command(
        "checkpoint", "export", trained.run.path, "--to", "hf", "--out", out, "--json", tmp_path / "a.json"
    )
    assert (result.returncode, result.stderr) == (0, "")
    report = json.loads((tmp_path / "a.json").read_text())
    assert report["checkpoint"] == str(trained.run.checkpoint(6))  # the newest
    assert (report["model_type"], report["dtype"], report["dry_run"], report["notes"]) == ("llama", "fp32", False, [])
    assert {file["name"]: file["bytes"] for file in report["files"]} == {
        p.name: p.stat().st_size for p in out.iterdir()
    }
    assert result.stdout == (
        f"{out} holds llama: {report['parameters']:,} parameters in fp32, {len(report['files'])} files, "
        f"{report['bytes']:,} bytes\n"
    )
    done = gramian("checkpoint", "import", out, "--out", back, "--json", tmp_path / "b.json")
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith(f"{back} holds llama: {report['parameters']:,} parameters in fp32\n")
    assert json.loads((tmp_path / "b.json").read_text())["parameters"] == report["parameters"]
    assert continuation(gramian, trained.run.path) == continuation(gramian, back)


def continuation(gramian: Callable[..., Ended], checkpoint: Path) -> list[int]:
    words = ["--prompt", "def ", "--max-tokens", "20", "--temperature", "0", "--json", "-"]
    (one,) = json.loads(gramian("generate", checkpoint, *words).out)["continuations"]
    assert len(one["tokens"]) > 5
    return list(one["tokens"])


def test_dry_run_writes_nothing(trained: Trained, tmp_path: Path, gramian: Callable[..., Ended]) -> None:
    out = tmp_path / "hf"
    words = [
        "checkpoint",
        "export",
        trained.run.checkpoint(3),
        "--out",
        out,
        "--dtype",
        "bf16",
        "--max-shard-size",
        "100KB",
    ]
    dry = gramian(*words, "--dry-run", "--json", tmp_path / "dry.json")
    assert (dry.code, dry.err) == (0, "")
    assert not out.exists()
    assert f"{out} would hold llama" in dry.out
    done = gramian(*words)
    assert done.code == 0
    there = {path.name: path.stat().st_size for path in out.iterdir()}
    files = {file["name"]: file["bytes"] for file in json.loads((tmp_path / "dry.json").read_text())["files"]}
    assert files == there
    for name, size in there.items():
        assert f"{name} " in dry.out
        assert f" {size:,} " in dry.out
    assert max(size for name, size in there.items() if name.startswith("model-")) < 102_000


def test_json_to_the_terminal_is_json_alone(trained: Trained, tmp_path: Path, gramian: Callable[..., Ended]) -> None:
    done = gramian("checkpoint", "export", trained.run.path, "--out", tmp_path / "hf", "--json", "-")
    assert json.loads(done.out)["model_type"] == "llama"
    assert (
        json.loads(gramian("checkpoint", "import", tmp_path / "hf", "--out", tmp_path / "b", "--json", "-").out)[
            "notes"
        ]
        == []
    )


def test_notes_are_told_beside(trained: Trained, tmp_path: Path, gramian: Callable[..., Ended]) -> None:
    assert gramian("checkpoint", "export", trained.run.path, "--out", tmp_path / "hf").code == 0
    (tmp_path / "hf" / "tokenizer.json").unlink()
    done = gramian("checkpoint", "import", tmp_path / "hf", "--out", tmp_path / "back")
    assert done.code == 0
    assert done.err.startswith("gramian: note: the folder has no tokenizer.json or tokenizer.model")
    done = gramian("checkpoint", "export", tmp_path / "back", "--out", tmp_path / "again")
    assert (done.code, done.err) == (0, "gramian: note: the checkpoint has no tokenizer, and so has the folder\n")
    done = gramian("generate", tmp_path / "back")
    assert (done.code, len(done.err.splitlines())) == (2, 1)
    assert f"{tmp_path / 'back' / 'tokenizer.model'}: cannot read the tokenizer" in done.err


def damaged(checkpoint: Path) -> Path:
    shard = sorted(checkpoint.glob("shard-*"))[0]
    content = bytearray(shard.read_bytes())
    content[-100] ^= 1
    shard.write_bytes(content)
    return checkpoint


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ("export {run} --out {new} --to onnx", ["--to onnx", "choose hf", "or deepspeed"]),
        ("export {run} --out {new} --to deepspeed --dtype bf16", ["--to deepspeed", "leave --dtype"]),
        ("export {run} --out {new} --dtype int8", ["--dtype int8", "fp32, bf16 or fp16"]),
        ("export {run} --out {new} --max-shard-size 5XB", ["--max-shard-size 5XB", "5GB"]),
        ("export {run} --out {new} --max-shard-size 0", ["--max-shard-size 0", "5GB"]),
        ("export {run} --out {new} --json {new}/a.json", ["--json", "cannot be written"]),
        ("export {folder}/no --out {new}", ["no such run or checkpoint"]),
        ("export {folder} --out {new}", ["holds no committed checkpoint"]),
        ("export {run} --out {run}", ["--out", "is there already"]),
        ("export {run} --out {run} --dry-run", ["--out", "is there already"]),
        ("export {damaged} --out {new}", ["damaged: shard-00001-model-00001-of-00001.safetensors"]),
        ("import {run} --out {new}", ["no Hugging Face folder (no config.json)"]),
        ("import {folder}/no --out {new}", ["no Hugging Face folder (no config.json)"]),
        ("import {bloom} --out {new}", ["config.json", 'model_type "bloom" is not supported', "llama"]),
        ("import {run} --out {run}", ["--out", "is there already"]),
        ("import {run} --out {new} --from gguf", ["--from gguf", "choose hf", "or deepspeed"]),
        ("import {run} --out {new} --config configs/tiny.yaml", ["--config", "leave it out"]),
        ("import {run} --out {new} --from deepspeed", ["no folder 'zero'", "ds_to_universal"]),
    ],
)
def test_wrong_input(
    trained: Trained, tmp_path: Path, gramian: Callable[..., Ended], words: str, parts: list[str]
) -> None:
    bloom, copy, new = tmp_path / "bloom", tmp_path / "damaged", tmp_path / "new"
    bloom.mkdir()
    (bloom / "config.json").write_text('{"model_type": "bloom"}')
    if "{damaged}" in words:
        damaged(Path(shutil.copytree(trained.run.checkpoint(6), copy)))
    names = {"run": trained.run.path, "folder": tmp_path, "new": new, "bloom": bloom, "damaged": copy}
    before = sorted(tmp_path.rglob("*"))
    done = gramian("checkpoint", *words.format(**names).split())
    assert (done.code, done.out) == (2, "")
    assert len(done.err.splitlines()) == 1, done.err
    for part in parts:
        assert part in done.err
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("word", ["export", "import"])
def test_help_imports_nothing_heavy(word: str) -> None:
    result = command("checkpoint", word, "--help", PYTHONPROFILEIMPORTTIME="1")
    assert result.returncode == 0
    assert f"Usage: gramian checkpoint {word}" in result.stdout
    imported = {line.rpartition("|")[2].strip() for line in result.stderr.splitlines()}
    assert "launch.cli" in imported
    assert not imported & {"torch", "numpy", "yaml", "tokenizers", "trainer.exchange"}
