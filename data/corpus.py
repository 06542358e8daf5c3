"""Documents in a fixed order, and a fingerprint of their content."""

from __future__ import annotations

import json
import os
import re
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from common.errors import UserError
from common.files import hash_file, hash_json
from data.config import BUILTIN_CORPUS, DataConfig

T = TypeVar("T")

_SURROGATES = re.compile("[\ud800-\udfff]")
_SUFFIXES = (".txt", ".jsonl")
_STDLIB_SUFFIXES = (".py", ".txt", ".rst", ".html")
# Tests are large tables of repeated lines; site-packages is what the user happened to install, not the library.
_STDLIB_SKIPPED = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


class Corpus:
    """The documents that `data.corpus` names: its paths in the order given, a folder's files by relative path.

    Opening it checks that the paths exist; reading checks their content. Documents without a visible character are
    skipped. Of the built-in corpus, files that are not UTF-8 are skipped; of a user's, they are an error.
    """

    def __init__(self, config: DataConfig) -> None:
        self.text_field = config.text_field
        self._files: list[tuple[Path, bool]] = []  # the file, and whether to skip it when it is not UTF-8
        for name in [config.corpus] if isinstance(config.corpus, str) else config.corpus:
            if name == BUILTIN_CORPUS:
                self._files += [(path, True) for path in stdlib_files()]
            else:
                self._files += [(path, False) for path in _files_at(Path(name).expanduser())]

    @property
    def files(self) -> list[Path]:
        """The files behind the corpus, in reading order."""
        return [path for path, _ in self._files]

    def fingerprint(self) -> str:
        """Hash of the files' kinds and bytes in order. Where they lie does not matter: a moved corpus stays itself."""
        return hash_json([[path.suffix, _reading(path, hash_file)] for path in self.files])

    def documents(self) -> Iterator[str]:
        """Yield the documents one by one, every time in the same order. Raises `UserError` if there is none."""
        empty = True
        for path, skip_undecodable in self._files:
            texts = self._lines(path) if path.suffix == ".jsonl" else _whole(path, skip_undecodable)
            for text in texts:
                if text.strip():
                    empty = False
                    yield text
        if empty:
            raise UserError(f"data.corpus: no document with any text in {_some(self.files)}; give one that has")

    def _lines(self, path: Path) -> Iterator[str]:
        """The documents of a JSONL file. Lines end at a newline only: JSON strings may hold Unicode line separators."""
        try:
            with open(path, "rb") as file:
                for number, line in enumerate(file, start=1):
                    if line.strip():
                        yield self._parse(line, f"{path}:{number}")
        except OSError as error:
            raise _unreadable(path, error) from None

    def _parse(self, line: bytes, where: str) -> str:
        try:
            record = json.loads(line.decode("utf-8"))
        except UnicodeDecodeError as error:
            raise UserError(f"{where}: not UTF-8 at byte {error.start} of the line; convert the file") from None
        except ValueError as error:
            raise UserError(f"{where}: not valid JSON: {error}; a .jsonl file holds one object a line") from None
        if not isinstance(record, dict):
            raise UserError(f"{where}: not a JSON object; each line must be one such as {{{self.text_field!r}: '...'}}")
        if self.text_field not in record:
            there = ", ".join(repr(key) for key in record) or "none"
            raise UserError(
                f"{where}: no field {self.text_field!r}; set data.text_field to one of those there: {there}"
            )
        text = record[self.text_field]
        if not isinstance(text, str):
            raise UserError(f"{where}: field {self.text_field!r} is not a string; set data.text_field to one that is")
        if _SURROGATES.search(text):  # JSON can escape what UTF-8 cannot hold
            raise UserError(f"{where}: field {self.text_field!r} has half a surrogate pair; repair the line")
        return text


def stdlib_files() -> list[Path]:
    """Sources and text files of the running interpreter's standard library, without tests, by relative path."""
    root = Path(sysconfig.get_path("stdlib"))
    files = _walk(
        root,
        _STDLIB_SUFFIXES,
        # config-* and _sysconfigdata* say where and how this machine's Python was built.
        skip_folder=lambda name: name in _STDLIB_SKIPPED or name.startswith("config-"),
        skip_file=lambda name: name.startswith("_sysconfigdata"),
    )
    if not files:
        raise UserError(f"data.corpus: this Python has no library sources in {root}; give paths of your own texts")
    return files


def _files_at(path: Path) -> list[Path]:
    if path.is_dir():
        hidden: Callable[[str], bool] = lambda name: name.startswith(".")  # noqa: E731
        files = _walk(path, _SUFFIXES, skip_folder=hidden, skip_file=hidden)
        if not files:
            raise UserError(f"data.corpus: folder {path} holds no {' or '.join(_SUFFIXES)} file; put some there")
        return files
    if not path.exists():
        raise UserError(
            f"data.corpus: {path} does not exist; give a .txt or .jsonl file, a folder of these, or '{BUILTIN_CORPUS}'"
        )
    if path.suffix not in _SUFFIXES:
        raise UserError(f"data.corpus: {path} has no supported extension; give {' or '.join(_SUFFIXES)}, or a folder")
    return [path]


def _walk(
    root: Path, suffixes: tuple[str, ...], skip_folder: Callable[[str], bool], skip_file: Callable[[str], bool]
) -> list[Path]:
    found: list[Path] = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if not skip_folder(name)]
        found += [Path(folder, name) for name in names if Path(name).suffix in suffixes and not skip_file(name)]
    return sorted(found, key=lambda path: path.relative_to(root).as_posix())


def _whole(path: Path, skip_undecodable: bool) -> Iterator[str]:
    content = _reading(path, Path.read_bytes)
    try:
        yield content.decode("utf-8")
    except UnicodeDecodeError as error:
        if not skip_undecodable:
            raise UserError(f"{path}: not UTF-8 at byte {error.start}; convert it, or leave it out") from None


def _reading(path: Path, read: Callable[[Path], T]) -> T:
    try:
        return read(path)
    except OSError as error:
        raise _unreadable(path, error) from None


def _unreadable(path: Path, error: OSError) -> UserError:
    return UserError(f"data.corpus: cannot read {path}: {error.strerror}; mend its permissions, or leave it out")


def _some(files: list[Path]) -> str:
    return f"{files[0]}" + (f" and {len(files) - 1} other files" if len(files) > 1 else "")
