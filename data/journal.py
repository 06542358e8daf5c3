"""What a tokenizing job has finished, line by line, so that a killed one goes on.

The first line of `journal.log` says which job it is, each further one that a group of shards is on disk. A line is a
checksum and a JSON object; what follows the first line that does not fit its checksum was never committed.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from pathlib import Path
from typing import Any

from common.errors import UserError
from common.files import atomic_write, naming
from common.logs import get_logger
from data.manifest import JOURNAL, SPLITS
from data.shards import PARTIAL

_OURS = re.compile(rf"(?:{'|'.join(SPLITS)})-\d{{5,}}\.(?:bin|idx)(?:{re.escape(PARTIAL)})?|\..*{re.escape(PARTIAL)}")


class Journal:
    """The journal of the job in `folder`, opened to go on. Only one process may have it open.

    Attributes: `entries`, the committed groups; see `data/tokenize.py` for what is in one.

    Raises:
        UserError: the folder holds another job's work, or files that no job wrote.
    """

    def __init__(self, folder: Path, identity: dict[str, Any]) -> None:
        self._path = folder / JOURNAL
        self.entries: list[dict[str, Any]] = []
        lines = _good_lines(self._path)
        if lines and len(lines) > 1:
            refuse_other(folder, lines[0], identity)
        elif not lines and (foreign := sorted(p.name for p in folder.iterdir() if not p.name.startswith("."))):
            raise UserError(
                f"{folder}: holds {foreign[0]}, which no unfinished `gramian tokenize` left there; give --out a new "
                "folder"
            )
        for entry in lines[1:]:
            if damaged := _first_damaged(folder, entry):
                get_logger().warning("%s: missing or of another size; going on from before it", damaged)
                break
            self.entries.append(entry)
        # Also drops a torn end and what came after a damaged shard.
        content = b"".join(map(_line, [identity, *self.entries]))
        if not self._path.is_file() or self._path.read_bytes() != content:
            atomic_write(self._path, content)
        known = {name for entry in self.entries for name in _files(entry)}
        for path in folder.iterdir():
            if path.name not in known and _OURS.fullmatch(path.name):
                path.unlink()

    def commit(self, entry: dict[str, Any]) -> None:
        """Record a group of shards whose files are durable and have their names."""
        with naming(self._path), open(self._path, "ab") as file:
            file.write(_line(entry))
            file.flush()
            os.fsync(file.fileno())
        self.entries.append(entry)

    def remove(self) -> None:
        """The job is finished."""
        self._path.unlink()


def refuse_other(folder: Path, there: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Raise a `UserError` that says what differs, if two identities do."""
    for key in wanted:
        if there.get(key) == wanted[key]:
            continue
        if key == "sources":
            what = _difference(there[key], wanted[key])
        elif key == "tokenizer":
            what = "with another tokenizer"
        elif key == "part":
            what = "as a part of other input files"
        else:
            what = f"with --{key.replace('_', '-')} {there.get(key)}, not {wanted[key]}"
        raise UserError(f"{folder}: was begun {what}; give the same again, or another --out")


def _difference(there: list[list[Any]], wanted: list[list[Any]]) -> str:
    """How the files read differ. Each is a list of name, size and, where it is known, time of change."""
    if [file[0] for file in there] != [file[0] for file in wanted]:
        n = next((i for i, (a, b) in enumerate(zip(there, wanted, strict=False)) if a[0] != b[0]), None)
        if n is None:
            return f"with {len(there)} input files, not {len(wanted)}"
        return f"with input file {n + 1} {there[n][0]}, not {wanted[n][0]}"
    name = next(a[0] for a, b in zip(there, wanted, strict=True) if a != b)
    return f"before {name} was changed"


def _line(record: dict[str, Any]) -> bytes:
    text = json.dumps(record, separators=(",", ":")).encode("ascii")
    return b"%s %s\n" % (_check(text), text)


def _good_lines(path: Path) -> list[dict[str, Any]]:
    """The records up to the first line that is torn or damaged."""
    if not path.is_file():
        return []
    records = []
    for line in path.read_bytes().splitlines(keepends=True):
        check, _, text = line[:-1].partition(b" ")
        if not line.endswith(b"\n") or check != _check(text):
            break
        records.append(json.loads(text))
    return records


def _check(text: bytes) -> bytes:
    return hashlib.blake2b(text, digest_size=16).hexdigest().encode("ascii")


def _files(entry: dict[str, Any]) -> dict[str, Any]:
    return {name: file for shard in entry["shards"].values() for name, file in shard["files"].items()}


def _first_damaged(folder: Path, entry: dict[str, Any]) -> Path | None:
    for name, file in _files(entry).items():
        path = folder / name
        if not path.is_file() or path.stat().st_size != file["bytes"]:
            return path
    return None
