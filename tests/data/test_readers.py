"""Sources: order, places, what is left out and what is refused, whatever the format."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import UserError
from data.formats import lines
from data.readers import Document, Position, Source
from tests.data import containers
from tests.data.containers import Maker

# What a reader could stumble over: characters that other readers end lines at, long texts, quotes, every plane.
TEXTS = [
    *(
        "one",
        "two\r\nlines\n",
        "a\u2028b\u2029c\x85d\x0b\x0c\x1ce",
        '"quoted" \\ \\n',
        "\ufefffirst",
        "\0",
        "é\U0001f600",
    ),
    *(f"document {i} " * (i * i) for i in range(1, 20)),
    "x" * 300_000,
]

by_container = pytest.mark.parametrize("make", containers.ALL, ids=lambda make: make.__name__)


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    """What the project's logger says, which does not pass it on once a command has set it up."""
    monkeypatch.setattr(logging.getLogger("gramian"), "propagate", True)
    return caplog


def texts_of(source: Source, start: Position | None = None) -> list[str]:
    return [document.text for document in source.documents(start)]


def write_lines(path: Path, *records: object) -> Path:
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in records), encoding="utf-8")
    return path


@by_container
def test_documents_are_the_same_in_every_container(make: Maker, tmp_path: Path) -> None:
    source = Source([make(tmp_path, TEXTS)])
    documents = list(source.documents())
    assert [document.text for document in documents] == TEXTS
    assert list(source.documents()) == documents  # again
    assert (source.records, source.skipped) == (len(TEXTS), {})
    if make in containers.IN_ONE_FILE:
        assert [document.at for document in documents] == [Position(0, i) for i in range(len(TEXTS))]


@by_container
def test_a_position_gives_exactly_the_tail(make: Maker, tmp_path: Path) -> None:
    texts = [text if i % 3 else " " for i, text in enumerate(TEXTS)]  # every third gives no document
    source = Source([make(tmp_path, texts), make(make_folder(tmp_path / "more"), texts[:2])])
    documents = list(source.documents())
    for i, document in enumerate(documents):
        assert list(source.documents(document.at)) == documents[i:]
        after = Position(document.at.file, document.at.record + 1)  # there may be an empty one, or none
        assert list(source.documents(after)) == documents[i + 1 :]
    assert list(source.documents(Position(len(source.files), 0))) == []
    assert list(source.documents(Position(len(source.files) - 1, 1000))) == []


def make_folder(path: Path) -> Path:
    path.mkdir()
    return path


@given(texts=st.lists(st.text(st.characters(exclude_categories=["Cs"])), min_size=1))
@settings(max_examples=25, deadline=None)
def test_any_text_in_any_container(texts: list[str], tmp_path_factory: pytest.TempPathFactory) -> None:
    expected = [text for text in texts if text.strip()]
    folder = tmp_path_factory.mktemp("any")
    for make in containers.IN_ONE_FILE:
        source = Source([make(folder, texts)])
        if expected:
            assert texts_of(source) == expected
            assert source.skipped["empty"] == len(texts) - len(expected)
        else:
            with pytest.raises(UserError, match="--input: no document with any text"):
                texts_of(source)


def test_what_is_passed_over_is_neither_opened_nor_parsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = tmp_path / "0.jsonl.zst"
    first.write_bytes(b"not even zstd")
    second = write_lines(tmp_path / "1.jsonl", "not JSON", "", '{"text": "b"}', '{"text": "c"}')
    third = Path(containers.parquet(tmp_path, TEXTS))
    source = Source([first, second, third])
    read: list[object] = []
    for module, name in ((lines, "open"), (lines, "_parse")):
        real = getattr(module, name, open)
        monkeypatch.setattr(module, name, lambda *a, real=real: (read.append(a[0]), real(*a))[1], raising=False)
    assert texts_of(source, Position(1, 2)) == ["c", *TEXTS]
    assert read == [second, b'{"text": "c"}\n']

    import pyarrow.parquet as pq

    groups: list[int] = []
    real_batches = pq.ParquetFile.iter_batches

    def watched(self: pq.ParquetFile, size: int, row_groups: list[int], **options: object) -> Iterator[object]:
        groups.extend(row_groups)
        return real_batches(self, size, row_groups=row_groups, **options)

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", watched)
    assert texts_of(source, Position(2, 15)) == TEXTS[15:]
    assert groups == [2, 3]


def test_a_stream_is_shared_between_its_files(tmp_path: Path) -> None:
    """Each of a streamed dataset's files is one of the source, so that places in it can be reached."""
    source = Source([containers.streamed(tmp_path, TEXTS)])
    assert [path.name for path in source.files] == ["streamed:default:train:0", "streamed:default:train:1"]
    assert {document.at.file for document in source.documents()} == {0, 1}
    assert source.total_bytes == 0


@by_container
def test_progress_ends_where_the_bytes_end(make: Maker, tmp_path: Path) -> None:
    source = Source([make(tmp_path, TEXTS)])
    seen = [source.bytes_read() for _ in source.documents()]
    assert seen == sorted(seen)
    assert source.bytes_read() == source.total_bytes
    size = sum(path.stat().st_size for path in source.files if path.exists())
    assert source.total_bytes == size
    last = list(source.documents())[-1].at
    for _ in source.documents(last):  # counts what was passed over
        break
    assert source.bytes_read() >= size / 2


def test_lengths(tmp_path: Path) -> None:
    path = write_lines(
        tmp_path / "a.jsonl", *({"text": text} for text in ("", " \n", "a", "ab", "abc", "äöüß", "   d"))
    )
    source = Source([path], min_chars=2, max_chars=3)
    assert texts_of(source) == ["ab", "abc"]
    assert source.skipped == {"empty": 2, "too short": 1, "too long": 2}
    assert source.records == 7
    with pytest.raises(UserError, match=r"no document with any text in .*a.jsonl"):
        texts_of(Source([path], min_chars=100))


# --- bad records

BAD = [
    ('{"text": ', "not valid JSON"),
    ('["text"]', "not a JSON object"),
    ('{"body": "x"}', "no field 'text'"),
    ('{"text": null}', "field 'text' is not a string"),
    ('{"text": "\\udc00"}', "field 'text' has half a surrogate"),
    ("[" * 100_000, "not valid JSON"),
]


@pytest.mark.parametrize(("line", "what"), BAD, ids=[what for _, what in BAD])
def test_a_bad_record_ends_it_or_is_counted(
    line: str, what: str, tmp_path: Path, warnings: pytest.LogCaptureFixture
) -> None:
    path = write_lines(tmp_path / "a.jsonl", {"text": "a"}, "", line, {"text": "b"})
    with pytest.raises(UserError, match=rf"a\.jsonl:3: {what}"):
        texts_of(Source([path]))
    assert not warnings.records
    source = Source([path], max_bad_share=0.5)
    assert list(source.documents()) == [Document("a", Position(0, 0)), Document("b", Position(0, 2))]
    assert (source.records, source.skipped) == (3, {"bad": 1})
    (warning,) = warnings.records
    assert warning.levelno == logging.WARNING
    assert f"{path}:3: {what}" in warning.getMessage()


def test_more_than_the_share_is_too_much(tmp_path: Path, warnings: pytest.LogCaptureFixture) -> None:
    good, bad = {"text": "a"}, "bad"
    path = write_lines(tmp_path / "a.jsonl", *[bad] * 2, *[good] * 8)
    assert len(texts_of(Source([path], max_bad_share=0.2))) == 8
    with pytest.raises(UserError, match=r"--input: 2 of 10 records are bad, more than the share of 0.19 .*mend them"):
        texts_of(Source([path], max_bad_share=0.19))
    path = write_lines(tmp_path / "b.jsonl", *[good] * 30, *[bad] * 970)
    warnings.clear()
    with pytest.raises(UserError, match=r"b\.jsonl:40: not valid JSON.*; 10 of 40 records are bad, more than .* 0.1 "):
        texts_of(Source([path], max_bad_share=0.1))  # long before the end
    path = write_lines(tmp_path / "c.jsonl", *[good, bad] * 50)
    warnings.clear()
    assert len(texts_of(Source([path], max_bad_share=0.5))) == 50
    assert len(warnings.records) == 20
    assert "further ones are only counted" in warnings.records[-1].getMessage()


@given(bad=st.sets(st.integers(0, 59)), place=st.integers(0, 59), share=st.sampled_from([0.1, 0.2, 0.4]))
@settings(max_examples=60, deadline=None)
def test_the_share_is_judged_alike_when_reading_goes_on(
    bad: set[int], place: int, share: float, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """With the counts of what came before, a job that was stopped anywhere ends as one that was not."""
    folder = tmp_path_factory.mktemp("share")
    path = write_lines(folder / "a.jsonl", *("bad" if i in bad else {"text": str(i)} for i in range(60)))

    def rest_of(source: Source, read: list[str], documents: Iterator[Document]) -> tuple[object, ...]:
        """All texts and counts, or the error."""
        try:
            return [*read, *(document.text for document in documents)], source.records, dict(source.skipped)
        except UserError as error:
            return (str(error),)

    source = Source([path], max_bad_share=share)
    whole = rest_of(source, [], source.documents())
    read: list[str] = []
    documents = source.documents()
    with contextlib.suppress(UserError):
        for document in documents:
            read.append(document.text)
            if document.at.record >= place:
                before = (source.records, dict(source.skipped))
                other = Source([path], max_bad_share=share)
                after = Position(0, document.at.record + 1)
                assert rest_of(other, read, other.documents(after, before)) == whole
                break


def test_files_that_are_not_utf8_count_as_records(tmp_path: Path, warnings: pytest.LogCaptureFixture) -> None:
    for name, content in (("a.txt", b"fine"), ("b.txt", b"caf\xe9"), ("c.txt", "fin\u00e9".encode())):
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=r"b\.txt: not UTF-8 at byte 3"):
        texts_of(Source([tmp_path]))
    assert texts_of(Source([tmp_path], max_bad_share=0.4)) == ["fine", "finé"]
    assert "b.txt" in warnings.text


# --- which files


def test_globs_are_sorted_and_take_what_can_be_read(tmp_path: Path) -> None:
    for name in ("b.txt", "a/z.txt", "a/b/c.jsonl", "c.md", ".hidden.txt", "d.parquet/part.txt", "[x].txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text('{"text": "x"}')

    def names(*given: str) -> list[str]:
        return [path.relative_to(tmp_path).as_posix() for path in Source([tmp_path / name for name in given]).files]

    assert names("*") == ["[x].txt", "b.txt"]
    assert names("**/*.txt") == ["[x].txt", "a/z.txt", "b.txt", "d.parquet/part.txt"]
    assert names("?.txt", "a/*/*") == ["b.txt", "a/b/c.jsonl"]
    assert names("[x].txt") == ["[x].txt"]  # a file of that name wins over the pattern
    assert names("d.parquet") == ["d.parquet/part.txt"]
    assert names("a") == ["a/b/c.jsonl", "a/z.txt"]
    with pytest.raises(UserError, match=r"--input: no .txt, .* or .arrow file matches .*\*.pdf; check the pattern"):
        names("*.pdf")


def test_messages_name_what_the_user_gave(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", {"body": "x"})
    with pytest.raises(UserError, match="no field 'text'; set --text-field to one of those there: 'body'"):
        texts_of(Source([path]))
    with pytest.raises(UserError, match=r"data\.corpus: nope does not exist; give a \.txt, .*'python-stdlib'"):
        Source(["nope"], input_name="data.corpus")


def test_a_folder_that_cannot_be_listed_is_not_taken_for_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "closed").mkdir()
    real = os.scandir

    def denied(path: str) -> object:
        if Path(path).name == "closed":
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", denied)
    with pytest.raises(UserError, match=r"--input: cannot read .*closed: Permission denied; mend"):
        Source([tmp_path])


def test_a_file_that_is_gone_is_named(tmp_path: Path) -> None:
    for name in ("a.txt", "b.jsonl", "c.parquet"):
        (tmp_path / name).symlink_to(tmp_path / "nowhere")
        source = Source([tmp_path])
        assert source.total_bytes == 0
        for use in (source.documents, source.fingerprint, source.described):
            with pytest.raises(UserError, match=rf"--input: cannot read .*{name}: No such file"):
                list(use())
        (tmp_path / name).unlink()


def test_fingerprints_tell_formats_and_contents_apart(tmp_path: Path) -> None:
    prints = [Source([make(tmp_path, TEXTS)]).fingerprint() for make in containers.ALL]
    assert len(set(prints)) == len(prints)
    assert Source([tmp_path / "x.jsonl"]).fingerprint() == prints[0]
    write_lines(tmp_path / "x.jsonl", {"text": "other"})
    assert Source([tmp_path / "x.jsonl"]).fingerprint() != prints[0]


# --- names of datasets


def test_splits_of_saved_datasets(tmp_path: Path) -> None:
    import datasets

    datasets.disable_progress_bars()
    both = {"train": datasets.Dataset.from_dict({"text": ["a"]}), "test": datasets.Dataset.from_dict({"text": ["b"]})}
    datasets.DatasetDict(both).save_to_disk(tmp_path / "both")
    datasets.DatasetDict({"x": both["train"], "y": both["test"]}).save_to_disk(tmp_path / "x:y")
    both["train"].save_to_disk(tmp_path / "one")
    assert texts_of(Source([f"hf:{tmp_path / 'both'}"])) == ["a"]
    assert texts_of(Source([f"hf:{tmp_path / 'both'}:test"])) == ["b"]
    assert texts_of(Source([f"hf:{tmp_path / 'x:y'}:y"])) == ["b"]
    for name, message in (
        ("both:dev", r"both has no split 'dev'; add one of :train, :test"),
        ("x:y", r"x:y has several splits; add one of :x, :y"),
        ("one:test", r"one has no splits; leave out ':test'"),
        ("one:a:b:c", r"is not of the form hf:NAME\[:CONFIG\]\[:SPLIT\]"),
        ("", r"is not of the form hf:NAME|cannot be opened"),
    ):
        with pytest.raises(UserError, match=message):
            Source([f"hf:{tmp_path / name if name else ''}"])
    (tmp_path / "one" / "state.json").write_text("{")
    with pytest.raises(UserError, match=r"state.json: not as `datasets` writes it"):
        Source([f"hf:{tmp_path / 'one'}"])


def test_configurations_and_splits_of_streamed_datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for name, text in (("en/train", "a"), ("en/test", "b"), ("de/train", "c")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write_lines(tmp_path / f"{name}.jsonl", {"text": text})
    (tmp_path / "README.md").write_text(
        "---\nconfigs:\n"
        "- config_name: en\n  data_files:\n  - {split: train, path: en/train.jsonl}\n"
        "  - {split: test, path: en/test.jsonl}\n"
        "- config_name: de\n  data_files: de/train.jsonl\n---\n"
    )
    for words, text in ((":en", "a"), (":en:test", "b"), (":de", "c"), (":de:train", "c")):
        assert texts_of(Source([f"hf:{tmp_path}{words}"])) == [text]
    for words, message in (
        ("", "cannot be opened: Config name is missing"),
        (":fr", "cannot be opened"),
        (":en:dev", "has no split 'dev'; add one of :train, :test"),
    ):
        with pytest.raises(UserError, match=message):
            Source([f"hf:{tmp_path}{words}"])
    with pytest.raises(UserError, match=r"--input: hf:no/such-dataset cannot be opened: .*; check the name"):
        Source(["hf:no/such-dataset"])


def test_a_stream_that_breaks_is_told_once(tmp_path: Path) -> None:
    """By us; so in a process of its own, where the library has its logger as it likes."""
    write_lines(tmp_path / "train.jsonl", {"text": "a"}, '{"text": "b')
    code = (
        "import sys; from common.errors import UserError; from data.readers import Source\n"
        "try: list(Source(['hf:' + sys.argv[1]]).documents())\n"
        "except UserError as error: print(error)"
    )
    words = [sys.executable, "-c", code, str(tmp_path)]
    root = Path(__file__).parents[2]
    done = subprocess.run(words, cwd=root, capture_output=True, text=True)
    assert done.stderr == ""
    assert re.search(r"hf:.*:train:0: reading stopped after 0 records \(.*JSON.*\); try again$", done.stdout.strip())


def test_columns_that_are_not_there_or_no_text(tmp_path: Path) -> None:
    for make in (containers.parquet, containers.arrow_stream, containers.arrow_file):
        name = make(tmp_path, ["a"])
        with pytest.raises(UserError, match=r"no field 'body'; set --text-field to one of .*: 'id', 'text', 'more'"):
            texts_of(Source([name], "body"))
        with pytest.raises(UserError, match=r"column 'id' holds int64, not text; set --text-field"):
            texts_of(Source([name], "id"))
    with pytest.raises(UserError, match=r"record 1: no field 'body'; set --text-field to one of .*'text'"):
        texts_of(Source([containers.streamed(tmp_path, ["a"])], "body"))
