"""What every format gives: records, problems, progress, and one kind of error for a damaged file."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.errors import UserError

_SURROGATES = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True)
class Problem:
    """Why a record is no text."""

    where: str  # the file, and the line or record in it as people count, from 1
    what: str  # and what to do


Record = tuple[int, str | Problem]  # the record's number in its file, from 0


@dataclass
class Progress:
    """How far a file has been read."""

    records: int = 0  # read or skipped so far
    tell: Callable[[], int] = lambda: 0  # bytes of the file, compressed as it is


@dataclass(frozen=True)
class TextField:
    """The key or column that holds the document, and what the user sets it with."""

    name: str
    set_with: str

    def of(self, record: Any, where: str) -> str | Problem:
        """The document of a record that was parsed."""
        if not isinstance(record, dict):
            return Problem(where, f"not a JSON object; each line must be one such as {{{self.name!r}: '...'}}")
        if self.name not in record:
            return Problem(where, self.missing(record))
        text = record[self.name]
        if not isinstance(text, str):
            return Problem(where, f"field {self.name!r} is not a string; set {self.set_with} to one that is")
        # Cheap for the most part: Python knows of a string whether it is all ASCII.
        if not text.isascii() and _SURROGATES.search(text):  # JSON can escape what UTF-8 cannot hold
            return Problem(where, f"field {self.name!r} has half a surrogate pair; repair the line")
        return text

    def missing(self, there: Any) -> str:
        """The message for a record or table without the field; `there` are the names it has."""
        names = ", ".join(repr(name) for name in there) or "none"
        return f"no field {self.name!r}; set {self.set_with} to one of those there: {names}"


@contextlib.contextmanager
def read_to_the_end(path: Path, progress: Progress, *damages: type[Exception]) -> Iterator[None]:
    """Turn whatever a library raises over a cut or damaged file into one `UserError`.

    `damages` are the library's own classes of exceptions. An `OSError` of the operating system passes through; one that
    a library made up (it has no number) is damage.
    """
    try:
        yield
    except Exception as error:
        from_the_system = isinstance(error, OSError) and error.errno is not None
        if from_the_system or not isinstance(error, (EOFError, OSError, *damages)):
            raise
        raise UserError(
            f"{path}: cut short or damaged after {progress.records:,} records ({str(error).rstrip('.')}); "
            "fetch or make it again"
        ) from None


def refuse_empty(path: Path) -> None:
    """No compressed file and no table is 0 bytes long: that is what a failed copy leaves."""
    if path.stat().st_size == 0:
        raise EOFError("the file is empty")
