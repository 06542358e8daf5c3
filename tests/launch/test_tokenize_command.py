"""`gramian tokenize`, `gramian data inspect` and `gramian data verify` as a user meets them."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from common.files import hash_file
from common.logs import get_logger
from data.prepare import prepare
from launch.cli import app
from tests.launch.commands import BIN, assert_refused, command, environment
from tests.runs import TINY
from trainer.config import load_config


@pytest.fixture(scope="module")
def model(corpus: Path, cache: Path) -> Path:
    """A SentencePiece model of the small corpus."""
    return prepare(load_config(TINY, [f"data.corpus={corpus}"]).data).tokenizer_path


@pytest.fixture(scope="module")
def words(paragraphs: Path, model: Path) -> list[str]:
    """A job of many small shards; --out is still to be given."""
    return [
        *("tokenize", "--input", str(paragraphs), "--tokenizer", str(model), "--eval-fraction", "0.1"),
        *("--shard-tokens", "3000"),
    ]


@pytest.fixture(scope="module")
def made(words: list[str], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """The job, done with one worker; and what the command printed."""
    folder = tmp_path_factory.mktemp("made") / "tokens"
    result = command(*words, "--out", folder, "--workers", "1")
    assert result.returncode == 0, result.stderr
    return folder, result


def content(folder: Path) -> dict[str, str]:
    return {path.name: hash_file(path) for path in folder.iterdir() if path.name != ".lock"}


def workers_of(pid: int) -> list[int]:
    """Child processes that encode: spawned ones, not the one that tracks resources."""
    found = []
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        words = Path(f"/proc/{child}/cmdline").read_bytes()
        if b"spawn_main" in words:
            found.append(int(child))
    return found


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_killed_five_times_at_random_it_ends_as_if_never_killed(
    made: tuple[Path, subprocess.CompletedProcess[str]], words: list[str], tmp_path: Path
) -> None:
    """SIGKILL of the command or of one of its two workers, each time a few more shards on."""
    folder, _ = made
    ours, rng, committed = tmp_path / "tokens", random.Random(2), 0
    for turn in range(5):
        process = subprocess.Popen(
            [BIN / "gramian", *words, "--out", ours, "--workers", "2"],
            env=environment(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        journal, target = ours / "journal.log", committed + rng.randint(1, 3)
        while process.poll() is None and not (journal.is_file() and journal.read_bytes().count(b"\n") > target):
            time.sleep(0.002)
        time.sleep(rng.random() * 0.02)
        assert process.poll() is None, process.stderr
        workers = workers_of(process.pid)
        assert len(workers) == 2
        os.kill(process.pid if turn % 2 == 0 else rng.choice(workers), signal.SIGKILL)
        _, error = process.communicate(timeout=60)
        if turn % 2 == 0:
            assert process.returncode == -signal.SIGKILL
        else:
            assert process.returncode == 2
            assert len(error.splitlines()) == 1
            assert "worker process of the tokenizer was killed" in error
        # The workers of a killed parent end by themselves.
        limit = time.monotonic() + 20
        while any(map(is_alive, workers)) and time.monotonic() < limit:
            time.sleep(0.01)
        assert not any(map(is_alive, workers))
        assert not (ours / "manifest.json").exists()
        now = journal.read_bytes().count(b"\n") - 1
        assert now >= committed
        committed = now
    result = command(*words, "--out", ours, "--workers", "2")
    assert result.returncode == 0, result.stderr
    assert f"{ours}: going on after " in result.stdout
    assert content(ours) == content(folder)


def test_summary(
    made: tuple[Path, subprocess.CompletedProcess[str]], words: list[str], paragraphs: Path, tmp_path: Path
) -> None:
    folder, result = made
    documents = len(paragraphs.read_text(encoding="utf-8").splitlines())
    manifest = json.loads((folder / "manifest.json").read_text())
    held_out = manifest["splits"]["eval"]["documents"]
    last = result.stdout.splitlines()[-1]
    assert last.startswith(f"{folder}: {documents:,} documents ({held_out} held out), ")
    for part in (" bytes per token, 0 records skipped; ", " MB/s, ", " tokens/s"):
        assert part in last
    again = command(*words, "--out", folder, "--json", "-")
    assert again.returncode == 0
    record = json.loads(again.stdout)
    assert record["this_start"] == {"documents": 0, "tokens": 0, "bytes": 0, "seconds": 0.0}
    assert record["splits"]["eval"]["documents"] == held_out
    assert record["tokenizer"]["kind"] == "sentencepiece"
    once_more = command(*words, "--out", folder, "--json", tmp_path / "report.json")
    assert once_more.stdout.splitlines()[-1].endswith("it was finished already")
    assert json.loads((tmp_path / "report.json").read_text()) == record


def test_skipped_records_are_told(model: Path, tmp_path: Path) -> None:
    lines = ['{"body": "one"}', "{", '{"body": ""}', '{"body": "a longer document"}', '{"body": "x"}'] * 20
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    words = ["--input", tmp_path / "a.jsonl", "--tokenizer", model, "--out", tmp_path / "t", "--text-field", "body"]
    result = command(
        *("tokenize", *words, "--min-chars", "2", "--max-chars", "10", "--max-bad-share", "0.3", "--eval-fraction", "0")
    )
    assert result.returncode == 0, result.stderr
    assert "20 documents (0 held out)" in result.stdout
    assert "80 records skipped (20 bad, 20 empty, 20 too long, 20 too short)" in result.stdout
    assert "a.jsonl:2: " in result.stderr


def test_a_job_array(corpus: Path, model: Path, tmp_path: Path) -> None:
    words = ["tokenize", "--input", corpus, "--tokenizer", model, "--out", tmp_path / "tokens"]
    first = command(*words, "--shard", "1/2")
    assert first.returncode == 0, first.stderr
    assert "1 of 2 parts are missing: part-00000-of-00002" in first.stdout
    assert_refused(command("data", "inspect", tmp_path / "tokens"), "manifest.json: missing")
    second = command(*words, "--shard", "0/2")
    assert "all 2 parts are there; it is whole" in second.stdout
    verified = command("data", "verify", tmp_path / "tokens")
    assert verified.returncode == 0
    assert ": all as written" in verified.stdout


def here(*words: str | Path) -> int:
    """Run a command in this process, with no other loggers left behind; its exit code."""
    logger = get_logger()
    before = logger.handlers[:], logger.propagate, logger.level
    try:
        app(list(map(str, words)), standalone_mode=False)
    except SystemExit as end:
        return int(end.code or 0)
    finally:
        logger.handlers[:], logger.propagate = before[:2]
        logger.setLevel(before[2])
    return 0


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["--min-chars", "9", "--max-chars", "5"], ["--max-chars 5 is less than --min-chars 9"]),
        (["--shard", "2/2"], ["--shard", "'2/2' is not i/n with i from 0 to n - 1"]),
        (["--shard", "0/2"], ["--shard: 1 input files cannot be shared by 2 parts"]),
        (["--tokenizer", "{folder}/none"], ["none: cannot read the tokenizer: No such file"]),
        (["--input", "{folder}/none"], ["--input", "none does not exist"]),
        (["--text-field", "body"], ["paragraphs.jsonl:1", "no field 'body'", "--text-field"]),
        (["--json", "{folder}/no/report.json"], ["--json", "cannot be written"]),
        (["--out", "{folder}/file"], ["file", "cannot write", "give the same command again"]),
    ],
)
def test_wrong_words_are_one_line(
    paragraphs: Path,
    model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    parts: list[str],
) -> None:
    (tmp_path / "file").touch()
    given = dict(zip(words[::2], words[1::2], strict=True))
    options = {"--input": str(paragraphs), "--tokenizer": str(model), "--out": str(tmp_path / "t"), **given}
    code = here("tokenize", *(word.format(folder=tmp_path) for pair in options.items() for word in pair))
    (line,) = capsys.readouterr().err.splitlines()
    assert code == 2
    assert all(part in line for part in parts), line


def test_shares_are_shares(paragraphs: Path, model: Path, tmp_path: Path) -> None:
    words = ["tokenize", "--input", paragraphs, "--tokenizer", model, "--out", tmp_path / "tokens"]
    for share in ("nan", "1.5"):
        assert_refused(command(*words, "--eval-fraction", share), "--eval-fraction")
    assert not (tmp_path / "tokens").exists()


def test_inspect(
    made: tuple[Path, subprocess.CompletedProcess[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, _ = made
    result = command("data", "inspect", folder, "--samples", "2", "--plot", tmp_path / "lengths.png")
    assert result.returncode == 0, result.stderr
    manifest = json.loads((folder / "manifest.json").read_text())
    for split in ("train", "eval"):
        counts = manifest["splits"][split]
        (row,) = [line for line in result.stdout.splitlines() if line.startswith(f"│ {split}")]
        assert [cell.strip() for cell in row.strip("│").split("│")] == [
            split,
            *(f"{counts[what]:,}" for what in ("documents", "tokens", "bytes")),
            f"{counts['bytes'] / counts['tokens']:.3f}",
            str(len(counts["shards"])),
        ]
        assert sum(line.startswith(f"{split} ") for line in result.stdout.splitlines()) == 2
    assert (tmp_path / "lengths.png").read_bytes().startswith(b"\x89PNG")
    assert here("data", "inspect", folder, "--json", "-") == 0
    record = json.loads(capsys.readouterr().out)
    assert len(record["splits"]["train"]["samples"]) == 3
    assert record["splits"]["train"]["documents"] == manifest["splits"]["train"]["documents"]
    assert here("data", "inspect", tmp_path / "none") == 2
    assert "none: no such dataset folder" in capsys.readouterr().err


def test_verify(
    made: tuple[Path, subprocess.CompletedProcess[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, _ = made
    assert here("data", "verify", folder) == 0
    output = capsys.readouterr()
    assert (output.out.startswith(f"{folder}: "), output.err) == (True, "")
    shutil.copytree(folder, tmp_path / "copy")
    damaged = tmp_path / "copy" / "train-00001.bin"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"\xff")
    (tmp_path / "copy" / "eval-00000.idx").unlink()
    result = command("data", "verify", tmp_path / "copy", "--json", tmp_path / "report.json")
    assert result.returncode == 1
    assert result.stderr.splitlines() == [
        f"gramian: {tmp_path / 'copy'}: 2 of {len(content(folder)) - 1} files are not as written; make them again, or "
        "bring them from where a good copy is"
    ]
    size = damaged.stat().st_size
    assert sorted(result.stdout.splitlines()) == [
        "eval-00000.idx: missing",
        f"train-00001.bin: block 0 (bytes 0 to {size:,}) is damaged",
    ]
    report = json.loads((tmp_path / "report.json").read_text())
    assert {problem["file"] for problem in report["problems"]} == {"eval-00000.idx", "train-00001.bin"}
    (tmp_path / "copy" / "manifest.json").unlink()
    assert here("data", "verify", tmp_path / "copy") == 1
    assert capsys.readouterr().out.startswith("manifest.json: missing")
    assert here("data", "verify", tmp_path / "none") == 2
    assert "no such dataset folder" in capsys.readouterr().err
