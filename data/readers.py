"""Documents of files of many formats, in a fixed order, from any place on."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from common.errors import UserError
from common.files import hash_file, hash_json
from common.logs import get_logger
from data.formats.hub import hub_records
from data.formats.lines import json_records, text_records
from data.formats.records import Problem, Progress, Record, TextField
from data.formats.tables import arrow_records, parquet_records
from data.inputs import Input, find_inputs

_LOGGED_PROBLEMS = 20  # bad records that are told one by one; the rest is only counted
_EARLY_PROBLEMS = 9  # that many are borne before the end, because early on a few are a large share by chance


@dataclass(frozen=True)
class Position:
    """Where a document is. Records are numbered from 0, alike in every format: blank lines are none."""

    file: int  # index into `Source.files`
    record: int  # number of the record in that file


@dataclass(frozen=True)
class Document:
    """A text and where it came from."""

    text: str
    at: Position


class Source:
    """The documents of `inputs`: paths in the order given, the files of folders and globs by relative path.

    Opening it checks that the paths exist; reading checks their content.

    Args:
        inputs: files, folders, globs, `hf:NAME[:CONFIG][:SPLIT]`, or `python-stdlib`; see `data/inputs.py`.
        text_field: key or column that holds the document.
        min_chars, max_chars: documents of fewer or more characters are skipped, as are those without a visible one.
        max_bad_share: share of the records that may be unusable (not JSON, no text, not UTF-8). They are counted and
            reported with file and line or record; more of them are a `UserError`. With 0, the first one is.
        input_name, field_name: what the user gave `inputs` and `text_field` as, for messages.

    Attributes:
        files: what is read, in reading order.
        records: number of records seen since the beginning (see `documents`).
        skipped: how many of them gave no document, by reason: `empty`, `too short`, `too long`, `bad`.
    """

    def __init__(
        self,
        inputs: Sequence[str | Path],
        text_field: str = "text",
        min_chars: int = 1,
        max_chars: int | None = None,
        max_bad_share: float = 0.0,
        *,
        input_name: str = "--input",
        field_name: str = "--text-field",
    ) -> None:
        self.text_field = text_field
        self._field = TextField(text_field, field_name)
        self._min_chars, self._max_chars, self._max_bad_share = min_chars, max_chars, max_bad_share
        self._input_name = input_name
        self._inputs: list[Input] = [found for name in inputs for found in find_inputs(str(name), input_name)]
        self.files: list[Path] = [found.path for found in self._inputs]
        self.records = 0
        self.skipped: Counter[str] = Counter()
        self._bytes_before = 0
        self._progress = Progress()

    @property
    def total_bytes(self) -> int:
        """Size of all files, compressed as they are; a streamed dataset counts as nothing."""
        return sum(found.n_bytes for found in self._inputs)

    def bytes_read(self) -> int:
        """About how many of `total_bytes` lie before the place that reading has come to."""
        return self._bytes_before + self._progress.tell()

    def described(self) -> list[list[str | int]]:
        """Of each file what tells, without reading it, whether it is still the same: its name, its bytes, and its time
        of change in nanoseconds (of a streamed dataset: its version)."""
        files: list[list[str | int]] = []
        for found in self._inputs:
            try:
                version = found.shard.identity if found.shard else found.path.stat().st_mtime_ns
            except OSError as error:
                raise self._unreadable(found, error) from None
            files.append([str(found.path), found.n_bytes, version])
        return files

    def part(self, first: int, stop: int) -> Source:
        """The documents of files `first` ... `stop` - 1 alone; its positions count from the first of these."""
        part = copy.copy(self)
        part._inputs, part.files = self._inputs[first:stop], self.files[first:stop]
        part.records, part.skipped, part._progress = 0, Counter(), Progress()
        return part

    def fingerprint(self) -> str:
        """Hash of the files' kinds and bytes in order. Where they lie does not matter: a moved corpus stays itself.

        Reads everything. Of a streamed dataset it is the version that `datasets` names.
        """
        parts = []
        for found in self._inputs:
            try:
                content = found.shard.identity if found.shard else hash_file(found.path)
            except OSError as error:
                raise self._unreadable(found, error) from None
            parts.append([found.path.suffix if found.lenient else found.suffix, content])
        return hash_json(parts)

    def documents(
        self, start: Position | None = None, before: tuple[int, Mapping[str, int]] | None = None
    ) -> Iterator[Document]:
        """Yield the documents one by one, every time in the same order.

        Args:
            start: go on here (this record included) instead of at the beginning. What lies before is passed over
                cheaply: files are not opened, row groups not read, lines not parsed.
            before: `records` and `skipped` as they were at `start`, so that the share of bad records is judged as in
                one go; without it both count from `start` on.

        Raises:
            UserError: a file that cannot be read to its end, too many bad records, or, of all documents, none.
        """
        self.records, self.skipped = (before[0], Counter(before[1])) if before else (0, Counter())
        self._bytes_before, self._progress = 0, Progress()
        place = start or Position(0, 0)
        yielded = start is not None
        for number, found in enumerate(self._inputs):
            if number >= place.file:
                self._progress = Progress()
                for record, text in self._records(found, place.record if number == place.file else 0):
                    self.records += 1
                    if isinstance(text, Problem):
                        self._count_problem(text, found)
                    elif self._is_kept(text):
                        yielded = True
                        yield Document(text, Position(number, record))
                self._progress = Progress()
            self._bytes_before += found.n_bytes
        if self.skipped["bad"] > self._max_bad_share * self.records:
            raise UserError(f"{self._input_name}: {self._too_many_bad()}; mend them, or allow a larger share")
        if not yielded:
            raise UserError(f"{self._input_name}: no document with any text in {self._some()}; give one that has")

    def _records(self, found: Input, skip: int) -> Iterator[Record]:
        """Records of a file from number `skip` on."""
        try:
            if found.shard:
                yield from hub_records(found.shard, self._field, skip, self._progress)
            elif found.suffix == ".txt":
                yield from text_records(found.path, skip, self._progress)
            elif found.suffix == ".parquet":
                yield from parquet_records(found.path, self._field, skip, self._progress)
            elif found.suffix == ".arrow":
                yield from arrow_records(found.path, self._field, skip, self._progress)
            else:
                yield from json_records(found.path, found.suffix, self._field, skip, self._progress)
        except OSError as error:
            raise self._unreadable(found, error) from None

    def _is_kept(self, text: str) -> bool:
        """Whether a text is a document; counts it if not."""
        reason = None
        if not text or text.isspace():
            reason = "empty"
        elif len(text) < self._min_chars:
            reason = "too short"
        elif self._max_chars is not None and len(text) > self._max_chars:
            reason = "too long"
        if reason:
            self.skipped[reason] += 1
        return reason is None

    def _count_problem(self, problem: Problem, found: Input) -> None:
        if found.lenient:
            return
        self.skipped["bad"] += 1
        if self._max_bad_share == 0:
            raise UserError(f"{problem.where}: {problem.what}")
        bad = self.skipped["bad"]
        if bad <= _LOGGED_PROBLEMS:
            last = "; further ones are only counted" if bad == _LOGGED_PROBLEMS else ""
            get_logger().warning("%s: %s (left out%s)", problem.where, problem.what, last)
        if bad > max(_EARLY_PROBLEMS, self._max_bad_share * self.records):
            raise UserError(f"{problem.where}: {problem.what}; {self._too_many_bad()}")

    def _too_many_bad(self) -> str:
        bad, records = self.skipped["bad"], self.records
        return f"{bad:,} of {records:,} records are bad, more than the share of {self._max_bad_share:g} that is allowed"

    def _unreadable(self, found: Input, error: OSError) -> UserError:
        return UserError(
            f"{self._input_name}: cannot read {found.path}: {error.strerror}; mend its permissions, or leave it out"
        )

    def _some(self) -> str:
        return f"{self.files[0]}" + (f" and {len(self.files) - 1} other files" if len(self.files) > 1 else "")
