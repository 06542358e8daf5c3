"""The tokenizing job: what it writes depends on nothing but its words, and what it committed is never lost."""

from __future__ import annotations

import errno
import gzip
import json
import os
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.errors import UserError
from common.files import locked
from data import encode
from data import tokenize as module
from data.dataset import Dataset
from data.encode import Encoder
from data.journal import Journal
from data.manifest import JOURNAL, MANIFEST, listed_files
from data.prepare import PreparedData
from data.shards import TokenWriter
from data.split import Split
from data.tokenizer import Tokenizer
from tests.data.jobs import content, job, megatron_documents, run, texts

pytestmark = pytest.mark.usefixtures("no_fsync")


@pytest.fixture(scope="module")
def unbroken(paragraphs: Path, tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The paragraphs, tokenized in one go by this process."""
    folder = tmp_path_factory.mktemp("unbroken") / "tokens"
    run(folder, job([paragraphs], tokenizer))
    return folder


def shards(folder: Path) -> dict[str, str]:
    return {name: hashed for name, hashed in content(folder).items() if name != MANIFEST}


def test_an_independent_reader_finds_the_source(unbroken: Path, paragraphs: Path, tokenizer: Tokenizer) -> None:
    """Document by document, with a reader that knows only Megatron's format."""
    split = list(Split.at(0.1).apply(texts(paragraphs)))
    manifest = json.loads((unbroken / MANIFEST).read_text())
    for name, held_out in (("train", False), ("eval", True)):
        expected = [text for held, text in split if held == held_out]
        listed = [shard["name"] for shard in manifest["splits"][name]["shards"]]
        assert listed == sorted(path.stem for path in unbroken.glob(f"{name}-*.bin"))
        read = [ids for shard in listed for ids in megatron_documents(unbroken / shard)]
        assert len(listed) > 3
        assert [tokenizer.decode(ids[:-1]) for ids in read] == expected
        assert {ids[-1] for ids in read} == {tokenizer.eos_id}
        counts = {
            "documents": len(read),
            "tokens": sum(map(len, read)),
            "bytes": sum(len(t.encode()) for t in expected),
        }
        assert counts.items() <= manifest["splits"][name].items()


def test_shards_end_with_the_document_that_fills_them(unbroken: Path, paragraphs: Path) -> None:
    manifest = json.loads((unbroken / MANIFEST).read_text())
    groups: dict[str, list[dict[str, Any]]] = {}
    for split in ("train", "eval"):
        for shard in manifest["splits"][split]["shards"]:
            groups.setdefault(shard["name"][-5:], []).append(shard)
    n_records = -1
    for number, group in sorted(groups.items()):
        documents = {shard["name"]: megatron_documents(unbroken / shard["name"]) for shard in group}
        last = max(group, key=lambda shard: shard["last"])
        tokens = sum(shard["tokens"] for shard in group)
        assert tokens - len(documents[last["name"]][-1]) < 4000
        assert tokens >= 4000 or number == max(groups)
        # One group goes on where the other ended.
        assert min(shard["first"] for shard in group)[1] == n_records + 1
        n_records = last["last"][1]
        assert all(shard["documents"] == len(documents[shard["name"]]) for shard in group)
    assert n_records == len(texts(paragraphs)) - 1
    assert manifest["sources"] == [
        {"file": str(paragraphs), "bytes": paragraphs.stat().st_size, "documents": n_records + 1}
    ]


def test_every_container_gives_the_same_shards(
    unbroken: Path, paragraphs: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    import pyarrow
    import pyarrow.parquet
    import zstandard

    raw = paragraphs.read_bytes()
    table = pyarrow.table({"text": texts(paragraphs)})
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(raw))
    (tmp_path / "a.jsonl.zst").write_bytes(zstandard.compress(raw))
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet", row_group_size=100)
    with pyarrow.ipc.new_stream(tmp_path / "a.arrow", table.schema) as stream:
        stream.write_table(table, max_chunksize=50)
    for name in ("a.jsonl.gz", "a.jsonl.zst", "a.parquet", "a.arrow"):
        run(tmp_path / "tokens" / name, job([tmp_path / name], tokenizer))
        assert shards(tmp_path / "tokens" / name) == shards(unbroken), name


@pytest.mark.parametrize("workers", [1, 2])
def test_output_does_not_depend_on_the_workers(
    unbroken: Path,
    paragraphs: Path,
    tokenizer: Tokenizer,
    tmp_path: Path,
    workers: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nor on the size of the chunks that they get."""
    monkeypatch.setattr(module, "CHUNK_CHARS", 700 * workers)
    started: list[int] = []
    in_processes = encode.encode_in_processes
    monkeypatch.setattr(
        module, "encode_in_processes", lambda *words: (started.append(words[2]), in_processes(*words))[1]
    )
    run(tmp_path / "tokens", job([paragraphs], tokenizer), workers)
    assert started == [2] * (workers - 1)
    assert content(tmp_path / "tokens") == content(unbroken)


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
    write, commit = TokenWriter._write, Journal.commit

    def no_room(room_left: int, name: str) -> None:
        nonlocal room
        room -= room_left
        if room < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), name)

    def limited(writer: TokenWriter, what: bytes) -> None:
        no_room(len(what), str(writer._bin))
        write(writer, what)

    def torn(journal: Journal, entry: dict[str, Any]) -> None:
        if room < 3000:
            with open(journal._path, "ab") as file:
                file.write(b"half a line")
        no_room(3000, str(journal._path))
        commit(journal, entry)

    monkeypatch.setattr(TokenWriter, "_write", limited)
    monkeypatch.setattr(Journal, "commit", torn)
    committed = 0
    for room in (5_000, 15_000, 28_000, 45_000):  # noqa: B007 (read by the functions above)
        with pytest.raises(
            UserError, match=r"cannot write .*: No space left on device; .* goes on from the last shard"
        ):
            run(folder, job([paragraphs], tokenizer))
        assert not list(folder.glob("*.partial"))
        lines = (folder / JOURNAL).read_bytes().count(b"\n")
        assert lines >= committed
        committed = lines
    assert committed > 3
    room = 1 << 40
    run(folder, job([paragraphs], tokenizer))
    assert content(folder) == content(unbroken)


def test_an_id_outside_the_vocabulary_is_never_written(
    paragraphs: Path, prepared: PreparedData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken:
        max_id, eos_id = 600, 1

        def encode(self, texts: list[str], threads: int | None = None) -> list[list[int]]:
            return [[5, 601] for _ in texts]

    monkeypatch.setattr(encode, "load_tokenizer", lambda path: Broken())
    with pytest.raises(UserError, match=r"tokenizer\.model: gave token id 601, but its ids are 0 to 600"):
        run(tmp_path / "tokens", job([paragraphs], prepared.tokenizer()))
    assert {path.name for path in (tmp_path / "tokens").iterdir()} == {".lock", JOURNAL, "tokenizer.model"}


def test_ids_up_to_the_largest_fit_their_type(tmp_path: Path) -> None:
    class Large:
        eos_id = 0

        def __init__(self, max_id: int) -> None:
            self.max_id = max_id

        def encode(self, texts: list[str], threads: int | None = None) -> list[list[int]]:
            return [[self.max_id] for _ in texts]

    for dtype, largest in (("uint16", 65_499), ("int32", 65_500), ("int32", 2**31 - 1)):
        encoded = Encoder(tmp_path, Split.at(0.0), dtype).encode(Large(largest), ["a", "b"], 1)  # type: ignore[arg-type]
        assert encoded.tokens.tolist() == [largest, 0, largest, 0]
        assert encoded.tokens.dtype == np.dtype(dtype)


def test_no_document_at_all_is_one_line(tokenizer: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": " "}\n')
    with pytest.raises(UserError, match=r"--input: no document with any text in .*a\.jsonl"):
        run(tmp_path / "tokens", job([tmp_path / "a.jsonl"], tokenizer))


def test_the_share_held_out(paragraphs: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    everything = len(texts(paragraphs))
    for fraction, held_out in ((0.0, 0), (1.0, everything)):
        run(tmp_path / str(fraction), job([paragraphs], tokenizer, eval_fraction=fraction))
        dataset = Dataset.open(tmp_path / str(fraction))
        assert (dataset.train.n_documents, dataset.eval.n_documents) == (everything - held_out, held_out)
        empty = dataset.train if held_out else dataset.eval
        assert empty.slice(0, 0).size == empty.n_tokens == 0
        assert empty.document_starts.tolist() == [0]


def test_the_manifest_answers_for_every_file(unbroken: Path) -> None:
    manifest = json.loads((unbroken / MANIFEST).read_text())
    assert {*listed_files(manifest), MANIFEST, ".lock"} == {path.name for path in unbroken.iterdir()}
