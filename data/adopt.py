"""Token files that others made in Megatron's format, as a dataset folder."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from common.errors import UserError
from data.checksums import entry_of
from data.dataset import TokenStream
from data.manifest import SPLITS, heading, with_totals, write_manifest
from data.shards import TokenFile
from data.tokenizer import Tokenizer

_READ_TOKENS = 1 << 20


def adopt(folder: Path, prefixes: Mapping[str, Sequence[Path]], tokenizer: Tokenizer) -> dict[str, Any]:
    """Fill an empty folder: links to the files, the tokenizer, and a manifest, which is written last and returned.

    Args:
        folder: to fill. Where its file system cannot link to the files, they are copied.
        prefixes: of the files of each split, without `.bin` and `.idx`.
        tokenizer: that made the ids.

    Raises:
        UserError: files that are damaged or of several types, an id that the tokenizer has not, a document that does
            not end with its end of a document.
    """
    stream = TokenStream.of_files([prefix for split in SPLITS for prefix in prefixes.get(split, ())])
    name = tokenizer.save(folder)
    splits: dict[str, Any] = {}
    sources: list[dict[str, Any]] = []
    for split in SPLITS:
        shards: list[dict[str, Any]] = []
        for number, prefix in enumerate(prefixes.get(split, ())):
            tokens = TokenFile(prefix)
            counts = {"documents": tokens.n_documents, "tokens": tokens.n_tokens, "bytes": _checked(tokens, tokenizer)}
            ends = {"first": [len(sources), 0], "last": [len(sources), tokens.n_documents - 1]}
            files = {}
            for path in (tokens.bin_path, tokens.idx_path):
                place = folder / f"{split}-{number:05d}{path.suffix}"
                _link(path, place)
                files[place.name] = entry_of(place)
            shards.append({"name": f"{split}-{number:05d}", **counts, **ends, "files": files})
            size = tokens.bin_path.stat().st_size
            sources.append({"file": str(tokens.bin_path), "bytes": size, "documents": tokens.n_documents})
        splits[split] = with_totals(shards)
    manifest = {
        **heading(stream.dtype.name, tokenizer, folder / name),
        "splits": splits,
        "sources": sources,
        "skipped": {},
        "job": {},
    }
    write_manifest(folder, manifest)
    return manifest


def _checked(tokens: TokenFile, tokenizer: Tokenizer) -> int:
    """Bytes of the text. Raises `UserError` if the tokenizer cannot have made the tokens."""
    path, n_bytes = tokens.bin_path, 0
    if not tokens.n_documents:
        raise UserError(f"{path}: holds no document; give a file that does")
    for start in range(0, tokens.n_tokens, _READ_TOKENS):
        ids = tokens.slice(start, min(start + _READ_TOKENS, tokens.n_tokens)).astype(np.int64)
        if ids.min() < 0 or ids.max() >= tokenizer.vocab_size:
            wrong = int(ids.min() if ids.min() < 0 else ids.max())
            raise UserError(
                f"{path}: has the token id {wrong:,}, and the tokenizer {tokenizer.vocab_size:,} ids; give --tokenizer "
                "the one that made the tokens"
            )
        n_bytes += int(tokenizer.token_bytes[ids].sum())
    starts, all_ids = tokens.document_starts, tokens.slice(0, tokens.n_tokens)
    whole = np.diff(starts) > 0
    whole[whole] = all_ids[starts[1:][whole] - 1] == tokenizer.eos_id
    if not whole.all():
        raise UserError(
            f"{path}: document {int(np.argmin(whole)):,} does not end with the tokenizer's id {tokenizer.eos_id} for "
            "the end of a document; name that token with --eos, or make the file with it (Megatron's --append-eod)"
        )
    return n_bytes


def _link(path: Path, place: Path) -> None:
    try:
        os.link(path.resolve(), place)
    except OSError:  # another file system, or one without links
        shutil.copyfile(path, place)
