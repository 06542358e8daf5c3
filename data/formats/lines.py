"""Text files, and JSONL: plain, .gz or .zst."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from data.formats.records import Problem, Progress, Record, TextField, read_to_the_end, refuse_empty

_BUFFER = 1 << 20
_ZST_BUFFER = 1 << 16  # compressed bytes handed over at once: what comes out is a few times more, and must fit memory
_ZST_WINDOW = 1 << 31  # `zstd --long=31`, the largest there is


def text_records(path: Path, skip: int, progress: Progress) -> Iterator[Record]:
    """A text file is one record."""
    if skip:
        return
    content = path.read_bytes()
    progress.records, progress.tell = 1, lambda: len(content)
    try:
        yield 0, content.decode("utf-8")
    except UnicodeDecodeError as error:
        yield 0, Problem(str(path), f"not UTF-8 at byte {error.start}; convert it, or leave it out")


def json_records(path: Path, suffix: str, field: TextField, skip: int, progress: Progress) -> Iterator[Record]:
    """A JSONL file is a record a line, blank lines left out. Lines that are skipped are not parsed.

    Lines end at a newline only: JSON strings may hold Unicode line separators.
    """
    damages: tuple[type[Exception], ...] = ()
    if suffix.endswith(".gz"):
        damages = (zlib.error,)
    elif suffix.endswith(".zst"):
        import zstandard

        damages = (zstandard.ZstdError,)
    with open(path, "rb") as raw, read_to_the_end(path, progress, *damages):
        progress.tell = raw.tell
        try:
            with _unpacked(path, raw, suffix) as lines:
                for line_number, line in enumerate(lines, start=1):
                    if line.isspace():
                        continue
                    number = progress.records
                    progress.records += 1
                    if number >= skip:
                        yield number, _parse(line, f"{path}:{line_number}", field)
        finally:
            place = raw.tell()
            progress.tell = lambda: place


def _parse(line: bytes, where: str, field: TextField) -> str | Problem:
    try:
        record: Any = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        return Problem(where, f"not UTF-8 at byte {error.start} of the line; convert the file")
    except (ValueError, RecursionError) as error:
        return Problem(where, f"not valid JSON: {error}; a .jsonl file holds one object a line")
    return field.of(record, where)


@contextlib.contextmanager
def _unpacked(path: Path, raw: BinaryIO, suffix: str) -> Iterator[BinaryIO]:
    """The content of a file that is open; closing it is the caller's."""
    if suffix.endswith(".gz"):
        refuse_empty(path)
        with gzip.GzipFile(fileobj=raw) as packed:
            yield io.BufferedReader(packed, _BUFFER)  # type: ignore[type-var]
    elif suffix.endswith(".zst"):
        refuse_empty(path)
        yield io.BufferedReader(_ZstFrames(raw), _BUFFER)  # type: ignore[type-var]
    else:
        yield raw


class _ZstFrames(io.RawIOBase):
    """All frames of a .zst file, one after the other.

    zstandard's own stream reader takes the end of the file for the end of the content, also inside a frame.
    """

    def __init__(self, raw: BinaryIO) -> None:
        import zstandard

        self._raw, self._decompressor = raw, zstandard.ZstdDecompressor(max_window_size=_ZST_WINDOW)
        self._frame: Any = None
        self._content = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._content:
            packed = self._frame.unused_data if self._frame is not None and self._frame.eof else b""
            packed = packed or self._raw.read(_ZST_BUFFER)
            if not packed:
                if self._frame is not None and not self._frame.eof:
                    raise EOFError("it ends inside a frame")
                return 0
            if self._frame is None or self._frame.eof:
                self._frame = self._decompressor.decompressobj()
            self._content = memoryview(self._frame.decompress(packed))
        n = min(len(buffer), len(self._content))
        buffer[:n], self._content = self._content[:n], self._content[n:]
        return n
