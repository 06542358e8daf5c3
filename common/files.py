"""Files that are whole or absent: atomic writes, content hashes, a lock between processes."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

_BLOCK = 1 << 20


def atomic_write(path: Path, content: bytes | str) -> None:
    """Write a file so that a reader, or a crash, sees the old content or the new, never a part of it.

    What is no file, a pipe or a device, is written to as it is.
    """
    data = content.encode("utf-8") if isinstance(content, str) else content
    if path.exists() and not path.is_file():
        with naming(path):
            path.write_bytes(data)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with naming(path):
            with open(partial, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, path)
            sync_directory(path.parent)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Give an `OSError` of an open file, as of a full disk, the file's name, which it does not know."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def hash_file(path: Path, tell: Callable[[int], None] = lambda n_bytes: None) -> str:
    """BLAKE2b-256 of a file's bytes, in hexadecimal; `tell` is given how many were read, as it goes on."""
    digest = hashlib.blake2b(digest_size=32)
    with open(path, "rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
            tell(len(block))
    return digest.hexdigest()


def read_json_lines(path: Path) -> list[Any]:
    """The values of a file with one a line, without lines that a crash or a full disk cut off; none if it is absent."""
    values = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        with contextlib.suppress(json.JSONDecodeError):
            values.append(json.loads(line))
    return values


def append_json_line(path: Path, value: Any) -> None:
    """Add a line to a file of one value a line, in one write that other processes' fall before or after.

    A line that a crash or a full disk cut off before it stays apart.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        size = os.fstat(file).st_size
        cut_off = size > 0 and os.pread(file, 1, size - 1) != b"\n"
        os.write(file, ("\n" * cut_off + json.dumps(value) + "\n").encode())
    finally:
        os.close(file)


def hash_bytes(content: bytes) -> str:
    """BLAKE2b-256 of bytes, in hexadecimal."""
    return hashlib.blake2b(content, digest_size=32).hexdigest()


def hash_json(value: Any) -> str:
    """BLAKE2b-256 of a JSON value, independent of the order of keys, in hexadecimal."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hash_bytes(text.encode("utf-8"))


def next_numbered(folder: Path) -> Path:
    """`folder`/0000, or the number after the largest that is there; not made yet."""
    numbers = [int(path.name) for path in folder.glob("*") if path.name.isdecimal()]
    return folder / f"{max(numbers, default=-1) + 1:04d}"


@contextlib.contextmanager
def locked(path: Path, wait: bool = True) -> Iterator[None]:
    """Hold an exclusive lock on `path` (made if absent); it is released when the process ends, however it ends.

    Raises:
        BlockingIOError: another process holds it and `wait` is false.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        yield
