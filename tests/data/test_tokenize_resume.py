"""The tokenizing job, killed, starved of room and given other words: what it committed is never lost."""

from __future__ import annotations

import errno
import io
import json
import os
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from common.errors import UserError
from common.files import locked
from data.journal import Journal
from data.manifest import JOURNAL, MANIFEST
from data.shards import TokenWriter
from data.tokenizer import Tokenizer
from tests.data.jobs import content, job, run, shards, texts

pytestmark = pytest.mark.usefixtures("no_fsync")


def in_child(work: Callable[[], object]) -> int:
    """Run `work` in a fork of this process; how the fork ended (a negative number: the signal)."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_killed_at_any_durable_step_it_goes_on(
    unbroken: Path, paragraphs: Path, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGKILL at a random call of fsync, rename or write, over and over: the end is that of an unbroken run."""
    rng, folder, kills = random.Random(5), tmp_path / "tokens", 0
    left = 0

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def counting(*words: Any) -> Any:
            nonlocal left
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*words)

        return counting

    monkeypatch.setattr(os, "fsync", counted(os.fsync))
    monkeypatch.setattr(os, "replace", counted(os.replace))
    monkeypatch.setattr(TokenWriter, "_write", counted(TokenWriter._write))
    committed = 0
    while not (folder / MANIFEST).exists():
        left = rng.randint(1, 60)
        end = in_child(lambda: run(folder, job([paragraphs], tokenizer)))
        assert end in (0, -signal.SIGKILL)
        kills += end != 0
        if (folder / JOURNAL).exists():
            lines = len((folder / JOURNAL).read_bytes().splitlines())
            assert lines >= committed
            committed = lines
    assert kills > 5
    run(folder, job([paragraphs], tokenizer))
    assert content(folder) == content(unbroken)


def stop_after(folder: Path, groups: int, work: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> None:
    """Do `work` until so many groups are committed."""

    class Stopped(Exception):
        pass

    def commit(journal: Journal, entry: dict[str, Any]) -> None:
        real(journal, entry)
        if len(journal.entries) == groups:
            raise Stopped

    real = Journal.commit
    with monkeypatch.context() as patch:
        patch.setattr(Journal, "commit", commit)
        with pytest.raises(Stopped):
            work()
    assert len((folder / JOURNAL).read_bytes().splitlines()) == groups + 1


def test_a_torn_journal_is_read_to_its_last_whole_line(
    unbroken: Path, paragraphs: Path, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "tokens"
    stop_after(folder, 3, lambda: run(folder, job([paragraphs], tokenizer)), monkeypatch)
    lines = (folder / JOURNAL).read_bytes().splitlines(keepends=True)
    for tail, good in ((lines[3][:-1], 2), (lines[3][:20], 2), (b"", 2), (lines[3].replace(b"train", b"trein"), 2)):
        (folder / JOURNAL).write_bytes(b"".join(lines[:3]) + tail)
        assert len(Journal(folder, job([paragraphs], tokenizer).identity()).entries) == good
        assert (folder / JOURNAL).read_bytes() == b"".join(lines[:3])
        assert {path.stem[-5:] for path in folder.glob("*.bin")} == {"00000", "00001"}
    run(folder, job([paragraphs], tokenizer))
    assert content(folder) == content(unbroken)


@pytest.mark.parametrize("damage", [lambda path: path.unlink(), lambda path: path.write_bytes(b"short")])
def test_a_committed_shard_that_is_gone_is_made_again(
    unbroken: Path,
    paragraphs: Path,
    tokenizer: Tokenizer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    damage: Callable[[Path], object],
) -> None:
    folder = tmp_path / "tokens"
    stop_after(folder, 4, lambda: run(folder, job([paragraphs], tokenizer)), monkeypatch)
    damage(folder / "train-00001.bin")
    run(folder, job([paragraphs], tokenizer))
    assert content(folder) == content(unbroken)


def test_what_was_skipped_is_counted_once_however_often_it_stops(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = []
    for i in range(60):
        lines += [json.dumps({"text": f"number {i} " * 9}), '{"text": ""}', "{broken", '{"text": "x"}'][: 1 + i % 4]
    for name, part in (("a.jsonl", lines[:70]), ("b.jsonl", lines[70:])):
        (tmp_path / name).write_text("\n".join(part) + "\n")
    inputs = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]

    def again(folder: Path) -> None:
        run(folder, job(inputs, tokenizer, 300, min_chars=2, max_bad_share=0.25))

    again(tmp_path / "whole")
    for groups in (1, 2, 5):
        stop_after(tmp_path / "stopped", groups, lambda: again(tmp_path / "stopped"), monkeypatch)
    again(tmp_path / "stopped")
    manifest = json.loads((tmp_path / "stopped" / MANIFEST).read_text())
    assert manifest["skipped"] == {"bad": 30, "empty": 45, "too short": 15}
    assert [source["documents"] for source in manifest["sources"]] == [28, 32]
    assert content(tmp_path / "stopped") == content(tmp_path / "whole")


def test_a_finished_folder_is_left_alone(unbroken: Path, paragraphs: Path, tokenizer: Tokenizer) -> None:
    before = {path: path.stat().st_mtime_ns for path in unbroken.iterdir()}
    done = run(unbroken, job([paragraphs], tokenizer), 2)
    assert (done.new_documents, done.seconds, done.total("documents")) == (0, 0.0, len(texts(paragraphs)))
    assert {path: path.stat().st_mtime_ns for path in unbroken.iterdir()} == before
    (unbroken / JOURNAL).write_text("of a process that was killed after it wrote the manifest")
    run(unbroken, job([paragraphs], tokenizer))
    assert not (unbroken / JOURNAL).exists()


@pytest.mark.parametrize("finished", [True, False])
def test_other_words_are_refused(
    unbroken: Path,
    paragraphs: Path,
    tokenizer: Tokenizer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    finished: bool,
) -> None:
    folder = unbroken
    copied = tmp_path / "copied.jsonl"
    copied.write_bytes(paragraphs.read_bytes())
    if not finished:
        folder = tmp_path / "tokens"
        stop_after(folder, 1, lambda: run(folder, job([paragraphs], tokenizer)), monkeypatch)
    before = content(folder)

    class Other:
        hash = "another"

        def __getattr__(self, name: str) -> Any:
            return getattr(tokenizer, name)

    for other, message in (
        (job([paragraphs], tokenizer, 5000), "--shard-tokens 4000, not 5000"),
        (job([paragraphs], tokenizer, eval_fraction=0.2), "--eval-fraction 0.1, not 0.2"),
        (job([paragraphs], tokenizer, min_chars=7), "--min-chars 1, not 7"),
        (job([paragraphs], Other()), "with another tokenizer"),
        (job([copied], tokenizer), "with input file 1 .*paragraphs.jsonl, not .*copied.jsonl"),
        (job([paragraphs, copied], tokenizer), "with 1 input files, not 2"),
    ):
        with pytest.raises(UserError, match=rf"{folder}: was begun .*{message}; give the same again, or another --out"):
            run(folder, other)
    assert content(folder) == before


def test_input_that_changed_is_refused(
    paragraphs: Path, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, folder = tmp_path / "a.jsonl", tmp_path / "tokens"
    source.write_bytes(paragraphs.read_bytes())
    stop_after(folder, 1, lambda: run(folder, job([source], tokenizer)), monkeypatch)
    os.utime(source, ns=(0, 0))
    with pytest.raises(UserError, match=r"was begun before .*a\.jsonl was changed"):
        run(folder, job([source], tokenizer))
    (folder / JOURNAL).unlink()
    with pytest.raises(UserError, match=r"holds .*, which no unfinished `gramian tokenize` left there"):
        run(folder, job([source], tokenizer))


def test_input_that_changes_while_it_is_read_is_refused(tokenizer: Tokenizer, paragraphs: Path, tmp_path: Path) -> None:
    source, folder = tmp_path / "a.jsonl", tmp_path / "tokens"
    source.write_bytes(paragraphs.read_bytes())
    changed = job([source], tokenizer)
    assert changed.sources
    os.utime(source, ns=(0, 0))
    with pytest.raises(UserError, match=r"tokens: input files changed while they were read; remove the folder"):
        run(folder, changed)
    assert not (folder / MANIFEST).exists()


def test_output_inside_the_input_folder(
    unbroken: Path, paragraphs: Path, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the job leaves there is no text to the next start."""
    (tmp_path / "a.jsonl").write_bytes(paragraphs.read_bytes())
    folder = tmp_path / "tokens"
    stop_after(folder, 2, lambda: run(folder, job([tmp_path], tokenizer)), monkeypatch)
    run(folder, job([tmp_path], tokenizer))
    assert shards(folder) == shards(unbroken)


def test_a_folder_of_something_else_is_not_touched(paragraphs: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "tokens").mkdir()
    (tmp_path / "tokens" / "train-00000.bin").write_bytes(b"precious")
    with pytest.raises(UserError, match=r"holds train-00000\.bin, which no unfinished .*; give --out a new folder"):
        run(tmp_path / "tokens", job([paragraphs], tokenizer))
    assert (tmp_path / "tokens" / "train-00000.bin").read_bytes() == b"precious"


def test_before_anything_is_committed_other_words_begin_anew(
    unbroken: Path, paragraphs: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    (tmp_path / "bad.jsonl").write_text("{")
    with pytest.raises(UserError, match=r"bad\.jsonl:1"):
        run(tmp_path / "tokens", job([tmp_path / "bad.jsonl"], tokenizer))
    run(tmp_path / "tokens", job([paragraphs], tokenizer))
    assert content(tmp_path / "tokens") == content(unbroken)


def test_two_at_once_are_refused(paragraphs: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    with (
        locked(tmp_path / "tokens" / ".lock"),
        pytest.raises(UserError, match=r"another `gramian tokenize` is at work there"),
    ):
        run(tmp_path / "tokens", job([paragraphs], tokenizer))


def test_a_full_disk_loses_nothing_that_was_committed(
    unbroken: Path, paragraphs: Path, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, room = tmp_path / "tokens", 0

    class Limited(io.FileIO):
        def write(self, content: Any) -> int:
            nonlocal room
            room -= 3000 if str(self.name).endswith(JOURNAL) else len(content)  # so that some falls on a line of it
            if room < 0:
                super().write(content[: len(content) // 2])
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # as write(2) does: without a name
            return super().write(content)

    monkeypatch.setattr("data.shards.open", Limited, raising=False)
    monkeypatch.setattr("data.journal.open", Limited, raising=False)
    committed, named = 0, set()
    for room in (5_000, 15_000, 28_000, 11_500, 45_000):  # noqa: B007 (read by the class above)
        with pytest.raises(
            UserError, match=r"cannot write .*: No space left on device; .* goes on from the last shard"
        ) as error:
            run(folder, job([paragraphs], tokenizer))
        named.add(Path(str(error.value).partition("cannot write ")[2].partition(": No space")[0]).suffixes[0])
        assert not list(folder.glob("*.partial"))
        lines = (folder / JOURNAL).read_bytes().count(b"\n")
        assert lines >= committed
        committed = lines
    assert committed > 3
    assert named == {".bin", ".idx", ".log"}
    room = 1 << 40
    run(folder, job([paragraphs], tokenizer))
    assert content(folder) == content(unbroken)
