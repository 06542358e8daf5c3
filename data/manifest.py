"""`manifest.json` of a dataset folder: what the folder holds. It is written last; what it does not name does not exist.

| key | content |
| --- | --- |
| `format` | number of this format |
| `block_bytes` | size of the blocks that have a checksum each: 64 MiB |
| `dtype` | type of a token id in the .bin files: `uint16` or `int32` |
| `vocab_size`, `eos_id` | number of ids, and the one that ends each document |
| `tokenizer` | `kind`, `file`, `hash` (of all that decides the ids), and the file's `bytes` and `blocks` |
| `splits` | for `train` and `eval`: `documents`, `tokens`, `bytes` (of their text in UTF-8) and the `shards` |
| a shard | `name`, its counts, `first` and `last` (file and record of its first and last document, counted from 0 in `sources`), `files`: each one's `bytes` and `blocks` |
| `sources` | the files that were read, with their `bytes` and the `documents` taken from each |
| `skipped` | records that gave no document, by reason |
| `job` | the options that decided the content |
| `parts` | of a folder merged from parts (`--shard i/n`): their folders, with the files that no shard names |
| `hash` | BLAKE2b-256 of all bytes of the manifest before it |

`blocks` are BLAKE2b-256 hashes of each block of a file. Sources are named as they were given. There is no time or host in
it, so that the same words give the same bytes.
"""  # noqa: E501

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.errors import UserError
from common.files import atomic_write
from data import checksums

if TYPE_CHECKING:
    from data.tokenizer import Tokenizer

FORMAT = 2
MANIFEST = "manifest.json"
JOURNAL = "journal.log"  # of a job that is not finished; not a .jsonl, which a reader would take for texts
REMAKE = "make the folder again"  # what to do about damage, in messages
SPLITS = ("train", "eval")

_SEALED = re.compile(rb'(?P<body>\{\n.*),\n  "hash": "(?P<hash>[0-9a-f]{64})"\n\}\n', re.DOTALL)


def heading(dtype: str, tokenizer: Tokenizer, file: Path) -> dict[str, Any]:
    """What a manifest begins with; `file` is the tokenizer's in the folder."""
    return {
        "format": FORMAT,
        "block_bytes": checksums.BLOCK_BYTES,
        "dtype": dtype,
        "vocab_size": tokenizer.vocab_size,
        "eos_id": tokenizer.eos_id,
        "tokenizer": {
            "kind": tokenizer.kind,
            "file": file.name,
            "hash": tokenizer.hash,
            **checksums.entry_of(file),
        },
    }


def with_totals(shards: list[dict[str, Any]]) -> dict[str, Any]:
    """A split: its shards, and what they hold together."""
    counts = {what: sum(shard[what] for shard in shards) for what in ("documents", "tokens", "bytes")}
    return {**counts, "shards": shards}


def write_manifest(folder: Path, content: dict[str, Any]) -> None:
    """Write `folder`/manifest.json, whole or not at all."""
    body = _pretty(content).removesuffix("\n}")
    atomic_write(folder / MANIFEST, f'{body},\n  "hash": "{_hash(body.encode("utf-8"))}"\n}}\n')


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read and check `folder`/manifest.json.

    Raises:
        UserError: there is no such folder, its job is not finished, the manifest is missing, damaged or of another
            format.
    """
    path = folder / MANIFEST
    if not folder.is_dir():
        if folder.with_name(f"{folder.name}.idx").is_file():
            raise UserError(
                f"{folder}: token files, and no dataset folder; `gramian data adopt {folder} --tokenizer FILE --out "
                "DIR` makes one of them"
            )
        raise UserError(f"{folder}: no such dataset folder; `gramian tokenize --out {folder}` makes one")
    try:
        sealed = _SEALED.fullmatch(path.read_bytes())
    except FileNotFoundError:
        if (folder / JOURNAL).is_file():
            raise UserError(
                f"{folder}: not finished; give the same `gramian tokenize` command again, and it goes on"
            ) from None
        raise UserError(
            f"{path}: missing; {folder} is no dataset folder, or its manifest was deleted: make it again with "
            "`gramian tokenize`"
        ) from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}; mend its permissions") from None
    if sealed is None or sealed["hash"].decode() != _hash(sealed["body"]):
        raise UserError(f"{path}: damaged: its content does not fit its checksum; {REMAKE}")
    content: dict[str, Any] = json.loads(sealed["body"] + b"\n}")
    if content["format"] != FORMAT:
        raise UserError(
            f"{path}: format {content['format']}, this version reads {FORMAT}; use the version of gramian that wrote it"
        )
    return content


def listed_files(manifest: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """All files that a manifest answers for, by their path in the folder: `bytes` and `blocks` of each."""
    tokenizer = manifest["tokenizer"]
    files = {tokenizer["file"]: {key: tokenizer[key] for key in ("bytes", "blocks")}}
    for owner in (*manifest.get("parts", ()), *(s for split in SPLITS for s in manifest["splits"][split]["shards"])):
        files.update(owner["files"])
    return files


def _pretty(value: Any, indent: str = "") -> str:
    """JSON for people too: a line for each key of the outer three levels, and one for each shard and source."""
    deeper = indent + "  "
    if isinstance(value, dict) and value and len(deeper) <= 6:
        lines = [f"{deeper}{json.dumps(key)}: {_pretty(inner, deeper)}" for key, inner in value.items()]
        return "{\n" + ",\n".join(lines) + f"\n{indent}}}"
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return "[\n" + ",\n".join(f"{deeper}{json.dumps(inner)}" for inner in value) + f"\n{indent}]"
    return json.dumps(value)


def _hash(body: bytes) -> str:
    return hashlib.blake2b(body, digest_size=32).hexdigest()
