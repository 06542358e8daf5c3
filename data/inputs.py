"""Which files an input names: a file, a folder, a glob, a `datasets` name, or the built-in corpus; in a fixed order."""

from __future__ import annotations

import glob
import os
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from common.errors import UserError
from data.config import BUILTIN_CORPUS
from data.formats.hub import PREFIX, HubShard, saved_files, streamed

# What is read, by the end of its name; a document a file, a document a line, a document a row.
SUFFIXES = (".txt", ".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet", ".arrow")

_STDLIB_SUFFIXES = (".py", ".txt", ".rst", ".html")
# Tests are large tables of repeated lines; site-packages is what the user happened to install, not the library.
_STDLIB_SKIPPED = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


@dataclass(frozen=True)
class Input:
    """One file to read."""

    path: Path  # of a streamed dataset's file, its name
    suffix: str  # the format, of `SUFFIXES`
    lenient: bool = False  # a file that is not UTF-8 is left out without a word
    shard: HubShard | None = None  # of a streamed dataset

    @property
    def n_bytes(self) -> int:
        """Size of the file, compressed as it is; 0 where it is not known, or not there any more."""
        try:
            return 0 if self.shard else self.path.stat().st_size
        except OSError:
            return 0


def find_inputs(name: str, called: str) -> list[Input]:
    """The files that `name` stands for, in reading order: a folder's and a glob's by relative path.

    `called` is what the user gave the name as, for messages. Raises `UserError` if there is nothing to read.
    """
    if name == BUILTIN_CORPUS:
        return [Input(path, ".txt", lenient=True) for path in stdlib_files(called)]
    if name.startswith(PREFIX):
        return _dataset(name.removeprefix(PREFIX), called)
    path = Path(name).expanduser()
    if path.is_dir():
        try:
            files = _walk(path, SUFFIXES, skip_folder=_is_hidden, skip_file=_is_hidden)
        except OSError as error:
            raise UserError(
                f"{called}: cannot read {error.filename or path}: {error.strerror}; mend its permissions"
            ) from None
        if not files:
            raise UserError(f"{called}: folder {path} holds no {_any_of(SUFFIXES)} file; put some there")
    elif path.exists():
        files = [path]
        if _suffix(path.name, SUFFIXES) is None:
            raise UserError(f"{called}: {path} has no supported extension; give {_any_of(SUFFIXES)}, or a folder")
    elif glob.has_magic(name):
        found = [Path(match) for match in glob.glob(str(path), recursive=True)]
        files = sorted(p for p in found if p.is_file() and _suffix(p.name, SUFFIXES) is not None)
        if not files:
            raise UserError(f"{called}: no {_any_of(SUFFIXES)} file matches {name}; check the pattern")
    else:
        raise UserError(
            f"{called}: {path} does not exist; give a {_any_of(SUFFIXES)} file, a folder or a glob of these, "
            f"{PREFIX}NAME for a dataset of the Hugging Face hub, or '{BUILTIN_CORPUS}'"
        )
    return [Input(file, _suffix(file.name, SUFFIXES) or "") for file in files]


def _dataset(name: str, called: str) -> list[Input]:
    """Files of a dataset given as NAME[:CONFIG][:SPLIT]; NAME may be a folder, also one with colons in its name."""
    parts = name.split(":")
    cut = next((n for n in range(len(parts), 0, -1) if Path(":".join(parts[:n])).expanduser().is_dir()), 1)
    name, words = ":".join(parts[:cut]), parts[cut:]
    if not all([name, *words]) or len(words) > 2:
        raise UserError(f"{called}: '{PREFIX}{':'.join(parts)}' is not of the form {PREFIX}NAME[:CONFIG][:SPLIT]")
    folder = Path(name).expanduser()
    if folder.is_dir():
        files = saved_files(folder, words[-1] if words else None, called)
        if files is not None:
            return [Input(path, ".arrow") for path in files]
        name = str(folder)
    return [Input(Path(shard.name), "", shard=shard) for shard in streamed(name, words, called)]


def stdlib_files(called: str = "data.corpus") -> list[Path]:
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
        raise UserError(f"{called}: this Python has no library sources in {root}; give paths of your own texts")
    return files


def _walk(
    root: Path, suffixes: tuple[str, ...], skip_folder: Callable[[str], bool], skip_file: Callable[[str], bool]
) -> list[Path]:
    def refuse(error: OSError) -> None:
        raise error  # os.walk would leave the folder out in silence

    found: list[Path] = []
    for folder, subfolders, names in os.walk(root, onerror=refuse):
        subfolders[:] = [name for name in subfolders if not skip_folder(name)]
        found += [Path(folder, name) for name in names if _suffix(name, suffixes) and not skip_file(name)]
    return sorted(found, key=lambda path: path.relative_to(root).as_posix())


def _is_hidden(name: str) -> bool:
    return name.startswith(".")


def _suffix(name: str, suffixes: tuple[str, ...]) -> str | None:
    """The one of `suffixes` that a file's name ends with; a name that is nothing else has none."""
    return next((suffix for suffix in suffixes if name.endswith(suffix) and name != suffix), None)


def _any_of(suffixes: tuple[str, ...]) -> str:
    return f"{', '.join(suffixes[:-1])} or {suffixes[-1]}"
