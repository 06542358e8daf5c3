"""From a corpus to a dataset folder, once: a cache addressed by content, safe when many processes ask at once."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import sentencepiece

from common.errors import UserError
from common.files import hash_json, locked, sync_directory
from common.logs import get_logger
from data.config import DataConfig
from data.corpus import Corpus
from data.dataset import Dataset
from data.manifest import FORMAT, MANIFEST, REMAKE
from data.progress import Progress
from data.shards import dtype_for
from data.split import Split
from data.tokenize import SHARD_TOKENS, Job, write_dataset
from data.tokenizer import Tokenizer, given_tokenizer
from data.tokenizers.sentencepieces import SentencePieceTokenizer
from data.tokenizers.training import train_sentencepiece

PreparedData = Dataset  # what `prepare` gives


def prepare(config: DataConfig, show_progress: bool = False) -> Dataset:
    """Train the tokenizer and write the dataset folder of a corpus, or find that done.

    May be called by any number of processes at once: one works, the others wait for it. The progress bar, on standard
    error, is shown by the one that works. Raises `UserError` for whatever is wrong with the corpus.
    """
    corpus = Corpus(config)
    fingerprint = corpus.fingerprint()
    given = given_tokenizer(config.tokenizer)
    identity = {
        "format": FORMAT,  # of the folder; it rises when the same corpus would give other files
        "corpus": fingerprint,
        "text_field": config.text_field,
        "tokenizer": given.hash if given else config.tokenizer.model_dump(),
        "eval_fraction": config.eval_fraction,
        "dtype": _dtype(config, given) if given else config.token_dtype,
    }
    cache = _cache_folder(config)
    folder = cache / hash_json(identity)[:24]
    if not (folder / MANIFEST).is_file():
        try:
            with locked(folder.with_suffix(".lock")):
                if not (folder / MANIFEST).is_file():
                    with _appearing_whole(folder) as partial:
                        _make(partial, corpus, fingerprint, given, config, show_progress)
        except OSError as error:
            raise UserError(
                f"data.cache_dir: cannot write {error.filename or cache}: {error.strerror}; set data.cache_dir or the "
                "environment variable GRAMIAN_CACHE to a folder with room that you may write"
            ) from None
    try:
        return Dataset.open(folder)
    except UserError as error:
        raise UserError(str(error).replace(REMAKE, f"delete {folder} to have it made again")) from None


def _dtype(config: DataConfig, tokenizer: Tokenizer) -> str:
    n_ids = max(tokenizer.vocab_size, tokenizer.max_id + 1)
    if config.dtype == "uint16" and n_ids > 1 << 16:
        raise UserError(
            f"data.dtype: uint16 holds 65,536 token ids and the tokenizer has {n_ids:,}; set data.dtype to int32 or "
            "auto"
        )
    return dtype_for(n_ids) if config.dtype == "auto" else config.dtype


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


def _make(
    folder: Path, corpus: Corpus, fingerprint: str, given: Tokenizer | None, config: DataConfig, show_progress: bool
) -> None:
    """Do the work, in an empty folder."""
    started = time.monotonic()
    options: dict[str, Any] = {"text_field": config.text_field, "eval_fraction": config.eval_fraction}
    split = Split.plan(corpus.documents(), config.eval_fraction)
    tokenizer = given or _train(corpus, split, config)
    if given is None:
        options["sentencepiece"] = sentencepiece.__version__
    trained = time.monotonic()

    options["corpus_fingerprint"] = fingerprint
    job = Job(corpus.source, tokenizer, split, _dtype(config, tokenizer), SHARD_TOKENS, options)
    progress = Progress("bar" if show_progress else "none", corpus.source.total_bytes)
    done = write_dataset(folder, job, None, progress)
    if corpus.fingerprint() != fingerprint:
        raise UserError("data.corpus: its files changed while they were read; start again when they are at rest")
    get_logger().info(
        "prepared %s documents, %s tokens (tokenizer %.1f s, encoding %.1f s)",
        *(f"{done.total(what):,}" for what in ("documents", "tokens")),
        trained - started,
        time.monotonic() - trained,
    )


def _train(corpus: Corpus, split: Split, config: DataConfig) -> Tokenizer:
    """A tokenizer of the training part of the corpus."""
    size = config.tokenizer.vocab_size
    assert size is not None  # the config sees to it
    get_logger().info("training a tokenizer of %d pieces on %s", size, config.corpus)
    to_train_on = (text for held_out, text in split.apply(corpus.documents()) if not held_out)
    return SentencePieceTokenizer(train_sentencepiece(to_train_on, size, config.tokenizer.model))
