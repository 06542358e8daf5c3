"""A job in parts: any order, any number, one dataset."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import UserError
from data.dataset import Dataset
from data.manifest import MANIFEST, listed_files, read_manifest
from data.parts import Part, files_of, parse_part, tokenize_part
from data.progress import Progress
from data.tokenizer import Tokenizer
from data.verify import verify
from tests.data.jobs import content, job, megatron_documents, run, texts

pytestmark = pytest.mark.usefixtures("no_fsync")

QUIET = Progress("none", 0)


@pytest.fixture(scope="module")
def inputs(paragraphs: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The paragraphs in seven files of very different sizes; one has no document."""
    folder = tmp_path_factory.mktemp("inputs")
    lines = paragraphs.read_text(encoding="utf-8").splitlines(keepends=True)
    bounds = [0, 10, 11, 300, 300, 320, 500, len(lines)]
    for number, (start, stop) in enumerate(itertools.pairwise(bounds)):
        (folder / f"{number}.jsonl").write_text("".join(lines[start:stop]) or '{"text": ""}\n', encoding="utf-8")
    return sorted(folder.iterdir())


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_parts_make_the_whole(
    inputs: list[Path], paragraphs: Path, tokenizer: Tokenizer, tmp_path: Path, order: tuple[int, ...]
) -> None:
    whole, folder = job(inputs, tokenizer), tmp_path / "tokens"
    run(tmp_path / "whole", whole)
    left = {0, 1, 2}
    for number in order:
        assert not (folder / MANIFEST).exists()
        left -= {number}
        _, missing = tokenize_part(folder, whole, Part(number, 3), 1, QUIET)
        assert missing == [Part(other, 3).name for other in sorted(left)]
    merged, expected = Dataset.open(folder), Dataset.open(tmp_path / "whole")
    for ours, theirs in ((merged.train, expected.train), (merged.eval, expected.eval)):
        assert ours.n_documents == theirs.n_documents
        assert ours.slice(0, ours.n_tokens).tolist() == theirs.slice(0, theirs.n_tokens).tolist()
    assert merged.train.n_documents + merged.eval.n_documents == len(texts(paragraphs))
    for key in ("dtype", "vocab_size", "eos_id", "tokenizer", "skipped", "sources", "job"):
        assert merged.manifest[key] == expected.manifest[key]
    assert merged.tokenizer().hash == tokenizer.hash
    shards = [shard for split in ("train", "eval") for shard in merged.manifest["splits"][split]["shards"]]
    for shard in shards:
        file, record = shard["first"]
        first = json.loads(inputs[file].read_text().splitlines()[record])["text"]
        assert tokenizer.decode(megatron_documents(folder / shard["name"])[0][:-1]) == first
    assert verify(folder, 1).problems == []
    # Again: nothing is done, and it is the same as in any other order.
    before = content(folder / "part-00001-of-00003")
    done, missing = tokenize_part(folder, whole, Part(1, 3), 1, QUIET)
    assert (done.new_documents, missing) == (0, [])
    assert content(folder / "part-00001-of-00003") == before


def test_damage_to_a_part_is_found(inputs: list[Path], tokenizer: Tokenizer, tmp_path: Path) -> None:
    for number in range(2):
        tokenize_part(tmp_path, job(inputs, tokenizer, 40_000), Part(number, 2), 1, QUIET)
    listed = listed_files(read_manifest(tmp_path))
    assert {"part-00001-of-00002/manifest.json", "part-00000-of-00002/train-00000.bin"} < set(listed)
    for name in listed:
        whole = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        assert [problem.file for problem in verify(tmp_path, 1).problems] == [name]
        (tmp_path / name).write_bytes(whole)


def test_parts_of_other_jobs_are_refused(inputs: list[Path], tokenizer: Tokenizer, tmp_path: Path) -> None:
    def part(folder: Path, files: list[Path], number: int, of: int, **words: object) -> None:
        tokenize_part(folder, job(files, tokenizer, **words), Part(number, of), 1, QUIET)  # type: ignore[arg-type]

    part(tmp_path / "a", inputs, 0, 2)
    with pytest.raises(UserError, match=r"a: holds parts of 2, not of 3; give another --out"):
        part(tmp_path / "a", inputs, 0, 3)
    with pytest.raises(UserError, match=r"a: holds part-00000-of-00002, which no unfinished"):
        run(tmp_path / "a", job(inputs, tokenizer))
    with pytest.raises(UserError, match=r"part-00001-of-00002: made from other input files, with other options"):
        part(tmp_path / "a", inputs, 1, 2, eval_fraction=0.3)
    assert not (tmp_path / "a" / MANIFEST).exists()
    part(tmp_path / "b", inputs, 0, 2)
    with pytest.raises(UserError, match=r"part-00000-of-00002: was begun (with|as a part of other) "):
        part(tmp_path / "b", inputs[:-1], 0, 2)
    run(tmp_path / "c", job(inputs, tokenizer))
    with pytest.raises(UserError, match=r"c: holds a dataset that was made without --shard"):
        part(tmp_path / "c", inputs, 0, 2)
    with pytest.raises(UserError, match=r"--shard: 7 input files cannot be shared by 8 parts; give at most 7"):
        part(tmp_path / "d", inputs, 0, 8)


def test_parts_without_any_document_are_one_line(tokenizer: Tokenizer, tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_text('{"text": ""}\n')
    whole = job([tmp_path / "a.jsonl", tmp_path / "b.jsonl"], tokenizer)
    tokenize_part(tmp_path / "tokens", whole, Part(0, 2), 1, QUIET)
    with pytest.raises(UserError, match=r"tokens: no document with any text in any of the 2 input files"):
        tokenize_part(tmp_path / "tokens", whole, Part(1, 2), 1, QUIET)


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=40), st.data())
def test_files_are_shared_in_runs_of_about_equal_size(sizes: list[int], data: st.DataObject) -> None:
    parts = data.draw(st.integers(1, len(sizes)))
    runs = [files_of(Part(number, parts), sizes) for number in range(parts)]
    assert runs[0][0] == 0
    assert runs[-1][1] == len(sizes)
    assert all(a[1] == b[0] for a, b in itertools.pairwise(runs))
    assert all(start < stop for start, stop in runs)


def test_equal_files_are_shared_equally() -> None:
    assert [files_of(Part(n, 4), [5] * 8) for n in range(4)] == [(0, 2), (2, 4), (4, 6), (6, 8)]
    assert [files_of(Part(n, 3), [90, 5, 5, 80, 5, 85]) for n in range(3)] == [(0, 1), (1, 4), (4, 6)]


def test_shard_words() -> None:
    assert parse_part("3/4") == Part(3, 4)
    assert Part(3, 4).name == "part-00003-of-00004"
    for words in ("4/4", "1", "a/4", "1/", "-1/4", "1/4/5", "1/0"):
        with pytest.raises(UserError, match=r"--shard: '.*' is not i/n with i from 0 to n - 1, for example 0/4"):
            parse_part(words)
