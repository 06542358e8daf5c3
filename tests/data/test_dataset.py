"""Dataset folders: several shards as one stream, and damage that is named."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from common.errors import UserError
from data import dataset as module
from data.dataset import Dataset, Shard, TokenStream
from data.manifest import FORMAT, MANIFEST, read_manifest, write_manifest
from data.prepare import PreparedData
from data.shards import TokenFile, TokenWriter
from data.tokenizer import Tokenizer

DOCUMENTS = [[5, 6, 7, 1], [8, 1], [1], [65_535, 0, 1], [2, 1], [3, 4, 1]]


@pytest.fixture(scope="module")
def folder(unbroken: Path) -> Path:
    return unbroken


@pytest.fixture
def damaged(folder: Path, tmp_path: Path) -> Path:
    """A copy to be damaged."""
    shutil.copytree(folder, tmp_path / "copy")
    return tmp_path / "copy"


def stream(folder: Path, *sizes: int) -> TokenStream:
    """`DOCUMENTS` in shards of so many documents."""
    prefixes, place = [], 0
    for number, size in enumerate(sizes):
        prefixes.append(folder / f"s{number}")
        with TokenWriter(prefixes[-1], "uint16") as writer:
            for document in DOCUMENTS[place : place + size]:
                writer.append(document)
        place += size
    return TokenStream.of_files(prefixes)


@pytest.mark.parametrize("sizes", [(6,), (1, 1, 1, 1, 1, 1), (2, 3, 1), (0, 4, 0, 0, 2, 0)])
@pytest.mark.parametrize("open_shards", [1, 64])
def test_shards_read_as_one_stream(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, ...], open_shards: int
) -> None:
    monkeypatch.setattr(module, "_OPEN_SHARDS", open_shards)
    tokens, flat = stream(tmp_path, *sizes), [token for document in DOCUMENTS for token in document]
    assert (tokens.n_tokens, tokens.n_documents, tokens.dtype) == (15, 6, np.uint16)
    for start in range(16):
        for stop in range(start, 16):
            part = tokens.slice(start, stop)
            assert part.tolist() == flat[start:stop]
            assert part.dtype == np.uint16
    assert tokens.document_starts.tolist() == [0, 4, 6, 7, 10, 12, 15]
    assert tokens.document_starts.dtype == np.int64
    assert tokens.lengths.tolist() == [4, 2, 1, 3, 2, 3]
    assert np.concatenate(list(tokens.lengths_by_shard())).tolist() == [4, 2, 1, 3, 2, 3]
    for i in (5, 0, 3, 4, 1, 2):
        assert tokens.document(i).tolist() == DOCUMENTS[i]
    for start, stop in ((0, 16), (-1, 2), (3, 2)):
        with pytest.raises(IndexError):
            tokens.slice(start, stop)
    for i in (-1, 6):
        with pytest.raises(IndexError):
            tokens.document(i)


def test_views_outlive_the_map_of_their_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_OPEN_SHARDS", 1)
    tokens = stream(tmp_path, 1, 5)
    first = tokens.slice(0, 4)
    tokens.slice(4, 15)
    assert first.tolist() == DOCUMENTS[0]


def test_places_beyond_two_gibibytes(tmp_path: Path) -> None:
    """Two sparse shards of 3 * 2**30 tokens: the second begins beyond 2**31 tokens and 2**32 bytes."""
    for name in ("a", "b"):
        with TokenWriter(tmp_path / name, "uint16") as writer:
            writer._lengths.extend([2**30] * 3)  # without their tokens, which nobody has room for
        with open(tmp_path / f"{name}.bin", "wb") as file:
            file.write(struct.pack("<H", ord(name)))
            file.seek(2 * (2**31 + 5))
            file.write(struct.pack("<H", ord(name) + 1000))
            file.truncate(6 * 2**30)
    tokens = TokenStream.of_files([tmp_path / "a", tmp_path / "b"])
    first = 3 * 2**30
    assert tokens.n_tokens == 2 * first
    assert tokens.document_starts.tolist() == [i * 2**30 for i in range(7)]
    assert tokens.slice(2**31 + 4, 2**31 + 7).tolist() == [0, 1097, 0]
    assert tokens.slice(first - 1, first + 2).tolist() == [0, 98, 0]
    assert tokens.slice(first + 2**31 + 5, first + 2**31 + 6).tolist() == [1098]
    assert tokens.document(5)[4:6].tolist() == [0, 1098]


def test_mixed_types_are_refused(tmp_path: Path) -> None:
    for name, dtype in (("a", "uint16"), ("b", "int32")):
        with TokenWriter(tmp_path / name, dtype) as writer:
            writer.append([1])
    with pytest.raises(UserError, match=r"b\.bin: int32 tokens, but .*a\.bin has uint16; make them again"):
        TokenStream.of_files([tmp_path / "a", tmp_path / "b"])


def test_a_folder_opens_as_what_was_written(folder: Path, tokenizer: Tokenizer) -> None:
    dataset = Dataset.open(folder)
    assert (dataset.vocab_size, dataset.eos_id, dataset.dtype) == (600, 1, np.uint16)
    assert dataset.tokenizer_path == folder / "tokenizer.model"
    assert dataset.tokenizer().hash == dataset.tokenizer_hash == tokenizer.hash
    for name, split in (("train", dataset.train), ("eval", dataset.eval)):
        files = [TokenFile(path.with_suffix("")) for path in sorted(folder.glob(f"{name}-*.bin"))]
        assert len(files) > 3
        expected = np.concatenate([file.slice(0, file.n_tokens) for file in files])
        assert np.array_equal(split.slice(0, split.n_tokens), expected)
        assert split.n_documents == sum(file.n_documents for file in files)
        assert split.document_starts[-1] == split.n_tokens == len(expected)
        assert np.array_equal(split.document(split.n_documents - 1), files[-1].document(files[-1].n_documents - 1))


def test_data_hash_follows_content_not_place(folder: Path, damaged: Path, prepared: PreparedData) -> None:
    original = Dataset.open(folder).data_hash
    assert Dataset.open(damaged).data_hash == original
    manifest = read_manifest(damaged)
    del manifest["hash" if "hash" in manifest else "sources"]  # what is not read by training does not count
    write_manifest(damaged, manifest)
    assert Dataset.open(damaged).data_hash == original
    manifest["splits"]["train"]["shards"].pop()
    write_manifest(damaged, manifest)
    assert len({Dataset.open(damaged).data_hash, original, prepared.data_hash}) == 3


def _other_type(folder: Path) -> None:
    """An index that says int32, of the same length, whatever the manifest's checksums say."""
    path = folder / "train-00001.idx"
    content = bytearray(path.read_bytes())
    content[17] = 4
    path.write_bytes(content)


def _as_format(folder: Path, number: int) -> None:
    write_manifest(folder, {**read_manifest(folder), "format": number})


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda f: (f / "train-00001.bin").unlink(),
            r"train-00001\.bin: missing or not \d+ bytes .*make the folder again",
        ),
        (lambda f: (f / "eval-00000.idx").write_bytes(b""), r"eval-00000\.idx: missing or not \d+ bytes"),
        (lambda f: (f / "tokenizer.model").unlink(), r"tokenizer\.model: missing or not"),
        (_other_type, r"train-00001\.idx: \d+ documents of int32 tokens where the manifest says \d+ of uint16"),
        (lambda f: (f / MANIFEST).unlink(), r"manifest\.json: missing; .* is no dataset folder, or its manifest"),
        (lambda f: ((f / MANIFEST).unlink(), (f / "journal.log").touch()), r"copy: not finished; give the same"),
        (lambda f: (f / MANIFEST).write_text("{}"), r"manifest\.json: damaged: its content does not fit"),
        (
            lambda f: (f / MANIFEST).write_text((f / MANIFEST).read_text().replace("uint16", "int32")),
            r"manifest\.json: damaged",
        ),
        (lambda f: _as_format(f, FORMAT + 1), rf"format {FORMAT + 1}, this version reads {FORMAT}"),
        (lambda f: shutil.rmtree(f), r"copy: no such dataset folder; `gramian tokenize --out"),
    ],
)
def test_damage_is_named(damaged: Path, damage: Callable[[Path], object], message: str) -> None:
    damage(damaged)
    with pytest.raises(UserError, match=message) as error:
        Dataset.open(damaged)
    assert "\n" not in str(error.value)


def test_another_tokenizer_is_refused(damaged: Path) -> None:
    """Of the same size, so that only its content tells."""
    path = damaged / "tokenizer.model"
    content = path.read_bytes()
    place = content.index(b"def")
    path.write_bytes(content[:place] + b"fed" + content[place + 3 :])
    with pytest.raises(UserError, match=r"tokenizer\.model: not the tokenizer that made the tokens of this folder"):
        Dataset.open(damaged).tokenizer()


def test_a_shard_that_is_not_what_was_listed(tmp_path: Path) -> None:
    stream(tmp_path, 6)
    for shard, message in (
        (Shard(tmp_path / "s0", 6, 14), r"s0\.bin: 15 tokens where there must be 14"),
        (Shard(tmp_path / "none", 6, 15), r"none\.bin: cannot be read: .*No such file"),
    ):
        with pytest.raises(UserError, match=message):
            TokenStream("x", [shard], np.dtype("uint16")).slice(0, 3)
    with pytest.raises(UserError, match=r"s0\.idx: 6 documents, 15 uint16 tokens where there must be 5, 15 and uint16"):
        TokenStream("x", [Shard(tmp_path / "s0", 5, 15)], np.dtype("uint16")).document(0)


def test_a_manifest_is_its_content_and_a_checksum(tmp_path: Path) -> None:
    content = {"format": FORMAT, "a": [], "b": [{"c": "\u2028\udc80"}, {}], "d": {}, "e": {"f": {"g": {"h": None}}}}
    write_manifest(tmp_path, content)
    text = (tmp_path / MANIFEST).read_text()
    assert {**content, "hash": json.loads(text)["hash"]} == json.loads(text)
    assert read_manifest(tmp_path) == content
