"""What a checkpoint folder says of itself, and whether it is as it was written. Imports no torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from common.errors import UserError
from common.files import atomic_write, hash_file, sync_directory
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
    manifest = {"format": FORMAT_VERSION, "files": dict(sorted(files.items()))}
    atomic_write(folder / MANIFEST, json.dumps(manifest, indent=1))
    atomic_write(folder / COMMIT, hash_file(folder / MANIFEST) + "\n")
    sync_directory(folder.parent)


def damaged_files(folder: Path, part: int = 0, parts: int = 1) -> list[str]:
    """Files of the manifest that are absent or not as they were written, looking at one of `parts` parts of them."""
    if not _manifest_is_whole(folder):
        return [MANIFEST]
    return [name for name, entry in list(_files(folder).items())[part::parts] if not _is_whole(folder / name, entry)]


def refuse_damaged(folder: Path, names: list[str]) -> None:
    """Raise a `UserError` that lists the damaged files of a checkpoint, if there are any."""
    if names:
        raise UserError(
            f"{folder}: damaged: {', '.join(sorted(set(names)))}; "
            f"remove that checkpoint's folder to continue from the one before it"
        )


def read_trainer_state(folder: Path) -> dict[str, Any]:
    """The plain data of a committed checkpoint.

    Raises:
        UserError: damage, or a format that this version does not know.
    """
    if not _manifest_is_whole(folder):
        refuse_damaged(folder, [MANIFEST])
    version = json.loads((folder / MANIFEST).read_bytes()).get("format")
    if version != FORMAT_VERSION:
        raise UserError(
            f"{folder} has checkpoint format {version}, this version reads {FORMAT_VERSION}; "
            f"use the version of gramian that wrote it"
        )
    if not _is_whole(folder / STATE, _files(folder).get(STATE)):
        refuse_damaged(folder, [STATE])
    state: dict[str, Any] = json.loads((folder / STATE).read_bytes())
    return state


def _manifest_is_whole(folder: Path) -> bool:
    manifest, commit = folder / MANIFEST, folder / COMMIT
    return manifest.is_file() and commit.is_file() and commit.read_bytes().strip() == hash_file(manifest).encode()


def _is_whole(path: Path, entry: Any) -> bool:
    return path.is_file() and fingerprint(path) == entry


def _files(folder: Path) -> dict[str, Any]:
    files: dict[str, Any] = json.loads((folder / MANIFEST).read_bytes())["files"]
    return files
