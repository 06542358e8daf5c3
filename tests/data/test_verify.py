"""Every damage to a dataset folder is found, and its file and block are named."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.errors import UserError
from data import checksums
from data.checksums import BlockHasher, entry_of
from data.manifest import MANIFEST, listed_files, read_manifest
from data.tokenizer import Tokenizer
from data.verify import Problem, verify
from tests.data.jobs import job, run

BLOCK = 1 << 12  # so that small files have several


@pytest.fixture(scope="module")
def folder(paragraphs: Path, tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("verified") / "tokens"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checksums, "BLOCK_BYTES", BLOCK)
        run(folder, job([paragraphs], tokenizer, 40_000))
    return folder


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> Path:
    shutil.copytree(folder, tmp_path / "tokens")
    return tmp_path / "tokens"


def flip(path: Path, bit: int) -> None:
    with open(path, "r+b") as file:
        file.seek(bit // 8)
        byte = file.read(1)[0]
        file.seek(bit // 8)
        file.write(bytes([byte ^ (1 << bit % 8)]))


def test_a_whole_folder_is_whole(folder: Path) -> None:
    told: list[tuple[int, int]] = []
    found = verify(folder, 2, lambda done, total: told.append((done, total)))
    listed = listed_files(read_manifest(folder))
    assert found.problems == []
    assert found.files == len(listed) == len([p for p in folder.iterdir() if p.name not in (MANIFEST, ".lock")])
    assert found.bytes == sum((folder / name).stat().st_size for name in listed)
    assert told[-1] == (found.bytes, found.bytes)


def test_two_hundred_flipped_bits_are_found_and_placed(copy: Path) -> None:
    rng = random.Random(11)
    files = sorted(path for path in copy.iterdir() if path.name != ".lock")
    hit = set()
    for turn in range(200):
        path = files[turn % len(files)]
        bit = rng.randrange(8 * path.stat().st_size)
        flip(path, bit)
        found = verify(copy, 1)
        if path.name == MANIFEST:
            assert [problem.file for problem in found.problems] == [MANIFEST]
            assert "damaged" in found.problems[0].what
        else:
            block = bit // 8 // BLOCK
            size = path.stat().st_size
            expected = Problem(path.name, "is damaged", block, block * BLOCK, min((block + 1) * BLOCK, size))
            assert found.problems == [expected]
            hit.add((path.name, block))
        flip(path, bit)
    assert {name for name, _ in hit} == {path.name for path in files} - {MANIFEST}
    assert max(block for _, block in hit) > 10
    assert verify(copy, 1).problems == []


def test_a_byte_cut_off_or_added_is_found(copy: Path) -> None:
    for name, entry in listed_files(read_manifest(copy)).items():
        path, size = copy / name, entry["bytes"]
        whole = path.read_bytes()
        path.write_bytes(whole[:-1])
        last = (size - 1) // BLOCK
        assert verify(copy, 1).problems == [
            Problem(name, f"{size - 1:,} bytes long, not {size:,}"),
            Problem(name, "is cut off", last, last * BLOCK, size),
        ]
        path.write_bytes(whole + b"x")
        assert verify(copy, 1).problems == [Problem(name, f"{size + 1:,} bytes long, not {size:,}")]
        path.write_bytes(whole)


def test_every_cut_of_the_manifest_is_found(copy: Path) -> None:
    whole = (copy / MANIFEST).read_bytes()
    for size in (0, 1, len(whole) // 2, len(whole) - 100, len(whole) - 2, len(whole) - 1):
        (copy / MANIFEST).write_bytes(whole[:size])
        assert [problem.file for problem in verify(copy, 1).problems] == [MANIFEST]


def test_what_is_missing_is_found(copy: Path) -> None:
    (copy / "train-00001.bin").unlink()
    assert verify(copy, 2).problems == [Problem("train-00001.bin", "missing")]
    (copy / MANIFEST).unlink()
    (problem,) = verify(copy, 2).problems
    assert str(problem).startswith("manifest.json: missing; ")
    with pytest.raises(UserError, match="no such dataset folder"):
        verify(copy / "nowhere", 1)


def test_problems_are_one_line_each() -> None:
    assert str(Problem("a.bin", "is damaged", 2, 2048, 3000)) == "a.bin: block 2 (bytes 2,048 to 3,000) is damaged"
    assert str(Problem("a.bin", "missing")) == "a.bin: missing"


@pytest.mark.parametrize("size", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK])
def test_blocks_do_not_depend_on_the_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(checksums, "BLOCK_BYTES", BLOCK)
    content = os.urandom(size)
    (tmp_path / "file").write_bytes(content)
    expected = entry_of(tmp_path / "file")
    assert (expected["bytes"], len(expected["blocks"])) == (size, -(-size // BLOCK))
    for step in (7, 1000, 3 * BLOCK):
        hasher = BlockHasher()
        for place in range(0, size, step):
            hasher.update(content[place : place + step])
        assert hasher.entry() == expected
