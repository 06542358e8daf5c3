"""What a checkpoint folder says of itself, and whether it is as it was written. Imports no torch."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common.errors import UserError
from common.files import atomic_write, hash_bytes, hash_file, sync_directory
from trainer.rundir import COMMIT

FORMAT_VERSION = 1
MANIFEST = "manifest.json"
STATE = "trainer.json"
TOKENIZER = "tokenizer.model"  # whatever its kind


def fingerprint(path: Path) -> dict[str, Any]:
    """A file's entry in the manifest: size and hash."""
    return {"bytes": path.stat().st_size, "blake2b": hash_file(path)}


def commit(folder: Path, files: dict[str, Any]) -> None:
    """Make a checkpoint exist: write its manifest, with an entry for each of its files, and then COMMIT."""
    manifest = json.dumps({"format": FORMAT_VERSION, "files": dict(sorted(files.items()))}, indent=1)
    atomic_write(folder / MANIFEST, manifest)
    atomic_write(folder / COMMIT, _commitment(manifest.encode()))
    sync_directory(folder.parent)


def damage(
    folder: Path, part: int = 0, parts: int = 1, tell: Callable[[int], None] = lambda n_bytes: None
) -> dict[str, str]:
    """What is not as it was written, by the names of files; reads one of `parts` parts of them, to the last byte.

    `tell` is given how many bytes were read, as it goes on.

    Raises:
        UserError: a format that this version does not know, or a file that may not be read.
    """
    files, found = _read_manifest(folder)
    for name, entry in list(files.items())[part::parts]:
        if what := _wrong(folder / name, entry, tell):
            found[name] = what
    if files and part == 0:  # DCP would read these too
        found |= {path.name: "not in the manifest" for path in folder.glob("*.safetensors") if path.name not in files}
    return found


def sizes_agree(folder: Path) -> bool:
    """Whether a checkpoint looks whole without a look into its large files."""
    try:
        files, wrong = _read_manifest(folder)
        return not wrong and all((folder / name).stat().st_size == entry["bytes"] for name, entry in files.items())
    except (OSError, UserError):
        return False


def bytes_of(folder: Path) -> int:
    """Size of a checkpoint's files, as they are."""
    return sum(path.stat().st_size for path in folder.iterdir() if path.is_file())


def refuse_damaged(folder: Path, found: dict[str, str]) -> None:
    """Raise a `UserError` that lists the damaged files of a checkpoint, if there are any."""
    if found:
        raise UserError(
            f"{folder}: damaged: {', '.join(sorted(found))}; bring it again from where a good copy is, or take another "
            f"checkpoint of the run"
        )


def state_damage(folder: Path) -> dict[str, str]:
    """What is not as it was written, of the files that say what a checkpoint is."""
    files, found = _read_manifest(folder)
    if not found and (what := _wrong(folder / STATE, files.get(STATE))):
        found = {STATE: what}
    return found


def read_trainer_state(folder: Path) -> dict[str, Any]:
    """The plain data of a committed checkpoint.

    Raises:
        UserError: damage, or a format that this version does not know.
    """
    refuse_damaged(folder, state_damage(folder))
    state: dict[str, Any] = json.loads((folder / STATE).read_bytes())
    return state


def _commitment(manifest: bytes) -> bytes:
    return hash_bytes(manifest).encode() + b"\n"


def _read_manifest(folder: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """Entries of the manifest by file; or none, and what is wrong with it or with COMMIT."""
    for name in (COMMIT, MANIFEST):
        if not (folder / name).is_file():
            return {}, {name: "missing"}
    content, committed = _read(folder / MANIFEST), _read(folder / COMMIT)
    expected = _commitment(content)
    if committed != expected:
        # Hashes of different bytes have nothing in common: where most is right, it is not the manifest that changed.
        alike = sum(a == b for a, b in zip(committed, expected, strict=False))
        blamed = COMMIT if len(committed) != len(expected) or 2 * alike > len(expected) else MANIFEST
        return {}, {blamed: "is damaged"}
    manifest = json.loads(content)
    if (version := manifest.get("format")) != FORMAT_VERSION:
        raise UserError(
            f"{folder} has checkpoint format {version}, this version reads {FORMAT_VERSION}; "
            f"use the version of gramian that wrote it"
        )
    return manifest["files"], {}


def _wrong(path: Path, entry: Any, tell: Callable[[int], None] = lambda n_bytes: None) -> str | None:
    """What is wrong with a file, if anything is."""
    if entry is None:
        return "missing"
    try:
        if (size := path.stat().st_size) != entry["bytes"]:
            return f"is {size:,} bytes long, not {entry['bytes']:,}"
        return None if hash_file(path, tell) == entry["blake2b"] else "is damaged"
    except FileNotFoundError:
        return "missing"
    except OSError as error:
        if error.errno == errno.EIO:  # a bad place of the disk
            return f"cannot be read: {error.strerror}"
        raise UserError(f"{path} cannot be read: {error.strerror}; mend that, and start again") from None


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}; mend that, and start again") from None
