"""From a corpus to token files, once: a cache addressed by content, safe when many processes ask at the same time."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sentencepiece
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from common.errors import UserError
from common.files import atomic_write, hash_file, hash_json, locked, sync_directory
from common.logs import get_logger
from data.config import DataConfig
from data.corpus import Corpus
from data.shards import TokenFile, TokenWriter
from data.split import Split
from data.tokenizer import Tokenizer, load_tokenizer, train_sentencepiece

_FORMAT = 1  # goes into the cache key: raise it when the same corpus would give other files
_MANIFEST = "manifest.json"
_TOKENIZER = "tokenizer.model"
_FILES = (_TOKENIZER, "train.bin", "train.idx", "eval.bin", "eval.idx")
_ENCODE_BYTES = 4_000_000  # text handed to the tokenizer at once: enough for all cores, little enough for a live bar


@dataclass(frozen=True)
class PreparedData:
    """A folder that `prepare` made, and its manifest: `splits` (documents, tokens, bytes of text of each), `dtype`,
    `vocab_size`, `eos_id`, `tokenizer_hash`, `corpus_fingerprint`, `files` (size and hash of each), `sentencepiece`."""

    folder: Path
    manifest: dict[str, Any]

    @classmethod
    def open(cls, folder: Path) -> PreparedData:
        """Read the manifest and compare the files' sizes with it. Raises `UserError` for a damaged folder."""
        path = folder / _MANIFEST
        try:
            manifest = json.loads(path.read_bytes())
            sizes = {name: entry["bytes"] for name, entry in manifest["files"].items()}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"{path}: not a manifest ({error}); delete the folder to have it made again") from None
        for name, size in sizes.items():
            file = folder / name
            if not file.is_file() or file.stat().st_size != size:
                raise UserError(f"{file}: missing or not {size} bytes long; delete {folder} to have it made again")
        return cls(folder, manifest)

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return int(self.manifest["vocab_size"])

    @property
    def tokenizer_path(self) -> Path:
        """File of the tokenizer."""
        return self.folder / _TOKENIZER

    @property
    def tokenizer_hash(self) -> str:
        """Hash of the tokenizer's file."""
        return str(self.manifest["tokenizer_hash"])

    @property
    def data_hash(self) -> str:
        """Hash of everything that training reads: tokenizer and token files, wherever the folder lies."""
        return hash_json(self.manifest["files"])

    def tokenizer(self) -> Tokenizer:
        """Load the tokenizer."""
        return load_tokenizer(self.tokenizer_path)

    @functools.cached_property
    def train(self) -> TokenFile:
        """Tokens to train on."""
        return TokenFile(self.folder / "train")

    @functools.cached_property
    def eval(self) -> TokenFile:
        """Held-out tokens."""
        return TokenFile(self.folder / "eval")


def prepare(config: DataConfig, show_progress: bool = False) -> PreparedData:
    """Train the tokenizer and write the token files of a corpus, or find that done.

    May be called by any number of processes at once: one works, the others wait for it. The progress bar, on standard
    error, is shown by the one that works. Raises `UserError` for whatever is wrong with the corpus.
    """
    corpus = Corpus(config)
    fingerprint = corpus.fingerprint()
    identity = {
        "format": _FORMAT,
        "corpus": fingerprint,
        "text_field": config.text_field,
        "tokenizer": config.tokenizer.model_dump(),
        "eval_fraction": config.eval_fraction,
        "dtype": config.token_dtype,
    }
    cache = _cache_folder(config)
    folder = cache / hash_json(identity)[:24]
    if not (folder / _MANIFEST).is_file():
        try:
            with locked(folder.with_suffix(".lock")):
                if not (folder / _MANIFEST).is_file():
                    with _appearing_whole(folder) as partial:
                        _make(partial, corpus, fingerprint, config, show_progress)
        except OSError as error:
            raise UserError(
                f"data.cache_dir: cannot write {error.filename or cache}: {error.strerror}; set data.cache_dir or the "
                "environment variable GRAMIAN_CACHE to a folder with room that you may write"
            ) from None
    return PreparedData.open(folder)


def _cache_folder(config: DataConfig) -> Path:
    return Path(config.cache_dir or os.environ.get("GRAMIAN_CACHE") or "~/.cache/gramian").expanduser()


@contextlib.contextmanager
def _appearing_whole(folder: Path) -> Iterator[Path]:
    """An empty folder to work in, renamed to `folder` if all goes well and removed if not."""
    partial = folder.with_suffix(".partial")
    for leftover in (partial, folder):  # of a killed process; a folder whose manifest someone removed
        if leftover.exists():
            shutil.rmtree(leftover)
    partial.mkdir()
    try:
        yield partial
        os.rename(partial, folder)
        sync_directory(folder.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _make(folder: Path, corpus: Corpus, fingerprint: str, config: DataConfig, show_progress: bool) -> None:
    """Do the work, in an empty folder."""
    started = time.monotonic()
    split = Split.plan(corpus.documents(), config.eval_fraction)
    get_logger().info("training a tokenizer of %d pieces on %s", config.tokenizer.vocab_size, config.corpus)
    to_train_on = (text for held_out, text in split.apply(corpus.documents()) if not held_out)
    model = train_sentencepiece(to_train_on, split.n_bytes, config.tokenizer)
    atomic_write(folder / _TOKENIZER, model)
    tokenizer = load_tokenizer(folder / _TOKENIZER)
    trained = time.monotonic()

    splits = _encode(folder, corpus, split, tokenizer, config.token_dtype, show_progress)
    if corpus.fingerprint() != fingerprint:
        raise UserError("data.corpus: its files changed while they were read; start again when they are at rest")
    manifest = {
        "format": _FORMAT,
        "splits": splits,
        "dtype": config.token_dtype,
        "vocab_size": tokenizer.vocab_size,
        "eos_id": tokenizer.eos_id,
        "tokenizer_hash": tokenizer.hash,
        "corpus_fingerprint": fingerprint,
        "files": {n: {"bytes": (folder / n).stat().st_size, "hash": hash_file(folder / n)} for n in _FILES},
        "sentencepiece": sentencepiece.__version__,
    }
    atomic_write(folder / _MANIFEST, json.dumps(manifest, indent=2) + "\n")
    get_logger().info(
        "prepared %s documents, %s tokens (tokenizer %.1f s, encoding %.1f s)",
        *(f"{sum(part[what] for part in splits.values()):,}" for what in ("documents", "tokens")),
        trained - started,
        time.monotonic() - trained,
    )


def _encode(
    folder: Path, corpus: Corpus, split: Split, tokenizer: Tokenizer, dtype: str, show_progress: bool
) -> dict[str, dict[str, int]]:
    """Write the token files of both splits and return what is in them."""
    counts = {name: {"documents": 0, "tokens": 0, "bytes": 0} for name in ("train", "eval")}
    bar = Progress(
        TextColumn("encoding"),
        BarColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        disable=not show_progress,
    )
    with TokenWriter(folder / "train", dtype) as train, TokenWriter(folder / "eval", dtype) as held, bar:
        task = bar.add_task("encoding", total=split.n_bytes)
        for batch in _batches(split.apply(corpus.documents())):
            for (held_out, text), ids in zip(batch, tokenizer.encode([text for _, text in batch]), strict=True):
                count = counts["eval" if held_out else "train"]
                (held if held_out else train).append([*ids, tokenizer.eos_id])
                count["documents"] += 1
                count["tokens"] += len(ids) + 1
                count["bytes"] += len(text.encode("utf-8"))
            bar.update(task, completed=sum(count["bytes"] for count in counts.values()))
    return counts


def _batches(documents: Iterator[tuple[bool, str]]) -> Iterator[list[tuple[bool, str]]]:
    """Group documents into runs of about `_ENCODE_BYTES` characters."""
    batch: list[tuple[bool, str]] = []
    size = 0
    for held_out, text in documents:
        batch.append((held_out, text))
        size += len(text)
        if size >= _ENCODE_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
