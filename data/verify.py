"""Whether a dataset folder is what its manifest says, to the last bit."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.errors import UserError
from data.manifest import MANIFEST, listed_files, read_manifest

_READ_BYTES = 1 << 20


@dataclass(frozen=True)
class Problem:
    """Something that is not as it was written. `block` is a number from 0, with its place [`start`, `stop`) in bytes;
    all three are None where a whole file is meant."""

    file: str
    what: str
    block: int | None = None
    start: int | None = None
    stop: int | None = None

    def __str__(self) -> str:
        place = "" if self.block is None else f" block {self.block} (bytes {self.start:,} to {self.stop:,})"
        return f"{self.file}:{place} {self.what}"


@dataclass(frozen=True)
class Verified:
    """What was looked at and what was found."""

    files: int
    bytes: int
    problems: list[Problem]


def verify(folder: Path, workers: int, tell: Callable[[int, int], None] = lambda done, total: None) -> Verified:
    """Read every byte that the manifest names, in `workers` threads, and compare the checksums of all blocks.

    `tell` is given how many bytes of how many are read, as it goes on. Raises `UserError` if there is no such folder.
    """
    try:
        manifest = read_manifest(folder)
    except UserError as error:
        if not folder.is_dir():
            raise
        return Verified(1, 0, [Problem(MANIFEST, str(error).removeprefix(f"{folder / MANIFEST}: "))])
    listed, size = listed_files(manifest), manifest["block_bytes"]
    total, done = sum(entry["bytes"] for entry in listed.values()), 0
    problems: list[Problem] = []
    with ThreadPoolExecutor(workers) as pool:
        # hashlib lets other threads run. Results come in the order of the manifest.
        tasks = [
            (name, entry, block, (block * size, min((block + 1) * size, entry["bytes"])))
            for name, entry in listed.items()
            for block in range(max(1, len(entry["blocks"])))  # of an empty file one, so that it is looked at
        ]
        for found, (*_, (start, stop)) in zip(pool.map(lambda task: _check(folder, *task), tasks), tasks, strict=True):
            problems += found
            done += stop - start
            tell(done, total)
    return Verified(len(listed), total, problems)


def _check(folder: Path, name: str, entry: dict[str, Any], block: int, span: tuple[int, int]) -> list[Problem]:
    """What is wrong with one block of a file; with the first one, also what is wrong with the file."""
    path = folder / name
    start, stop = span
    try:
        if not path.is_file():
            return [Problem(name, "missing")] * (block == 0)
        size = path.stat().st_size
        wrong = []
        if block == 0 and size != entry["bytes"]:
            wrong.append(Problem(name, f"{size:,} bytes long, not {entry['bytes']:,}"))
        if entry["blocks"] and _hash(path, start, stop) != entry["blocks"][block]:
            wrong.append(Problem(name, "is cut off" if size < stop else "is damaged", block, start, stop))
    except OSError as error:
        return [Problem(name, f"cannot be read: {error.strerror}", block, start, stop)]
    return wrong


def _hash(path: Path, start: int, stop: int) -> str:
    digest = hashlib.blake2b(digest_size=32)
    with open(path, "rb") as file:
        file.seek(start)
        while (left := stop - file.tell()) > 0 and (content := file.read(min(left, _READ_BYTES))):
            digest.update(content)
    return digest.hexdigest()
