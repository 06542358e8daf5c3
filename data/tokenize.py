"""The tokenizing job: documents of a source to a dataset folder, killed and continued as often as it likes.

One process reads documents in order and cuts them into chunks, others encode these, and the first one writes the
results in order. A group of shards (one of each split that has documents) ends with the document that brings it to
`shard_tokens` tokens. So what is written depends on neither the number of processes nor the size of a chunk. A group is
committed by a line in the journal, when its files are durable:

| key | content |
| --- | --- |
| `next` | file and record to go on from |
| `records`, `skipped` | records seen before that place, and how many of them gave no document, by reason |
| `documents` | how many documents each file gave to this group, by its number |
| `shards` | for each split the shard's part of the manifest |
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections import Counter
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from common.errors import UserError
from common.files import locked
from common.logs import get_logger
from data.encode import CHUNK_CHARS, Chunk, Encoded, Encoder, encode_here, encode_in_processes, read_chunks
from data.journal import Journal, refuse_other
from data.manifest import JOURNAL, MANIFEST, SPLITS, heading, read_manifest, with_totals, write_manifest
from data.progress import Progress
from data.readers import Position, Source
from data.shards import TokenWriter
from data.split import Split
from data.tokenizer import Tokenizer

SHARD_TOKENS = 100_000_000  # a minute of work on two cores, seconds on many: what a killed job does again
LOCK = ".lock"
_CHUNK_CHARS_HERE = 4 * CHUNK_CHARS  # enough for the threads of the tokenizer


@dataclass(frozen=True)
class Job:
    """What to tokenize, and how."""

    source: Source
    tokenizer: Tokenizer
    split: Split
    dtype: str  # of the ids on disk
    shard_tokens: int
    options: dict[str, Any]  # of the source and the split, as they go into the manifest
    may_be_empty: bool = False  # a part of a job is, where its files have no document

    @functools.cached_property
    def sources(self) -> list[list[Any]]:
        """Name, size and stamp of each input file, as they were when first asked for."""
        return self.source.described()

    def identity(self) -> dict[str, Any]:
        """What must be the same when the job goes on."""
        return {
            "sources": self.sources,
            "tokenizer": self.tokenizer.hash,
            "shard_tokens": self.shard_tokens,
            **self.options,
        }


@dataclass(frozen=True)
class Done:
    """A finished folder, and what this start did for it."""

    manifest: dict[str, Any]
    new_documents: int
    new_tokens: int
    new_bytes: int  # of text in UTF-8
    seconds: float

    def total(self, what: str) -> int:
        """`documents`, `tokens` or `bytes` of both splits."""
        return sum(self.manifest["splits"][split][what] for split in SPLITS)


def tokenize(folder: Path, job: Job, workers: int, progress: Progress) -> Done:
    """Make `folder` the dataset of a job, or go on where it was stopped, or find it finished.

    `workers` processes encode; 1: this process alone.

    Raises:
        UserError: whatever is wrong with the input, another job's folder or a second process at work in it, and what
            went wrong while writing. What was committed stays.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _only_one(folder):
            if (folder / MANIFEST).exists():
                return _finished(folder, job)
            return write_dataset(folder, job, workers, progress)
    except OSError as error:
        raise cannot_write(folder, error) from None


def cannot_write(folder: Path, error: OSError) -> UserError:
    """A full disk, missing permissions and the like, as the user's to mend."""
    return UserError(
        f"{folder}: cannot write {error.filename or 'there'}: {error.strerror}; mend that and give the same command "
        "again: it goes on from the last shard that was finished"
    )


def write_dataset(folder: Path, job: Job, workers: int | None, progress: Progress) -> Done:
    """Do the work of `tokenize`, in a folder that nobody else writes to; `workers` None: threads of this process.

    Raises `OSError` for what cannot be written, beside the errors of `tokenize`.
    """
    journal = Journal(folder, job.identity())
    name = job.tokenizer.save(folder)
    encoder = Encoder(folder / name, job.split, job.dtype)
    before = journal.entries[-1] if journal.entries else None
    if before:
        get_logger().info("%s: going on after %s records", folder, f"{before['records']:,}")
    writer = _Writer(folder, job, journal, encoder.pieces_per_document)
    started = time.monotonic()
    stream = _encoded(job, before, encoder, workers)
    try:
        with progress:
            for chunk, encoded in stream:
                writer.add(chunk, encoded)
                progress.update(job.source.bytes_read(), writer.documents, writer.tokens, writer.bytes)
            writer.commit()
    finally:
        stream.close()
        writer.discard()
    if job.source.described() != job.sources:
        raise UserError(
            f"{folder}: input files changed while they were read; remove the folder, and start again when they are "
            "at rest"
        )
    manifest = _manifest(job, journal.entries, folder / name)
    write_manifest(folder, manifest)
    journal.remove()
    return Done(manifest, writer.documents, writer.tokens, writer.bytes, time.monotonic() - started)


def _encoded(
    job: Job, before: dict[str, Any] | None, encoder: Encoder, workers: int | None
) -> Generator[tuple[Chunk, Encoded]]:
    beginning = Position(0, 0) if job.may_be_empty else None  # from a place on there need not be a document
    start = Position(*before["next"]) if before else beginning
    seen = (before["records"], before["skipped"]) if before else None
    # Small shards get small chunks: what is under way is lost with a killed job, and need not be more than a shard.
    chars = min(_CHUNK_CHARS_HERE if workers is None else CHUNK_CHARS, job.shard_tokens)
    chunks = read_chunks(job.source, start, seen, chars)
    if workers is None or workers == 1:
        return encode_here(chunks, encoder, workers)
    return encode_in_processes(chunks, encoder, workers)


class _Writer:
    """Cuts what comes into groups of shards and commits them.

    Attributes: `documents`, `tokens` and `bytes` taken so far.
    """

    def __init__(self, folder: Path, job: Job, journal: Journal, pieces: int) -> None:
        self._folder, self._job, self._journal, self._pieces = folder, job, journal, pieces
        self.documents = self.tokens = self.bytes = 0
        self._begin_group()

    def _begin_group(self) -> None:
        self._open: dict[str, tuple[TokenWriter, dict[str, Any]]] = {}
        self._group_tokens = 0
        self._from_files: Counter[int] = Counter()
        self._next: dict[str, Any] = {}

    def add(self, chunk: Chunk, encoded: Encoded) -> None:
        """Write the documents of a chunk, and commit each group that becomes full."""
        ends = np.cumsum(encoded.lengths)[self._pieces - 1 :: self._pieces]  # token at which each document ends
        start = 0
        while start < len(ends):
            begin = int(ends[start - 1]) if start else 0
            full = np.searchsorted(ends, begin + self._job.shard_tokens - self._group_tokens)
            stop = min(int(full) + 1, len(ends))
            self._write(chunk, encoded, start, stop, slice(begin, int(ends[stop - 1])))
            if self._group_tokens >= self._job.shard_tokens:
                self.commit()
            start = stop

    def _write(self, chunk: Chunk, encoded: Encoded, start: int, stop: int, tokens: slice) -> None:
        """Write documents [start, stop) of a chunk, which are its tokens `tokens`, to the group."""
        pieces = slice(start * self._pieces, stop * self._pieces)
        held_out, lengths = encoded.held_out[pieces], encoded.lengths[pieces]
        ids, in_eval = encoded.tokens[tokens], np.repeat(held_out, lengths)
        for split, chosen, of_tokens in (("train", ~held_out, ~in_eval), ("eval", held_out, in_eval)):
            if not chosen.any():
                continue
            writer, shard = self._shard(split)
            writer.extend(ids[of_tokens], lengths[chosen])
            first, last = (start + int(piece) // self._pieces for piece in np.flatnonzero(chosen)[[0, -1]])
            shard["documents"], shard["tokens"] = writer.n_documents, writer.n_tokens
            shard["bytes"] += int(encoded.n_bytes[pieces][chosen].sum())
            shard["first"] = shard["first"] or _place(chunk.at[first])
            shard["last"] = _place(chunk.at[last])
        self._group_tokens += ids.size
        self._from_files.update(position.file for position in chunk.at[start:stop])
        last_at = chunk.at[stop - 1]
        self._next = {"next": [last_at.file, last_at.record + 1], **chunk.before(stop - 1)}
        self.documents += stop - start
        self.tokens += ids.size
        self.bytes += int(encoded.n_bytes[pieces].sum())

    def _shard(self, split: str) -> tuple[TokenWriter, dict[str, Any]]:
        if split not in self._open:
            name = f"{split}-{len(self._journal.entries):05d}"
            shard = {"name": name, "documents": 0, "tokens": 0, "bytes": 0, "first": None, "last": None, "files": {}}
            self._open[split] = (TokenWriter(self._folder / name, self._job.dtype), shard)
        return self._open[split]

    def commit(self) -> None:
        """Make the group that is being written durable, if it has documents."""
        if not self._open:
            return
        for writer, shard in self._open.values():
            writer.close()
            shard["files"] = writer.files
        files = {str(file): n for file, n in sorted(self._from_files.items())}
        shards = {split: self._open[split][1] for split in SPLITS if split in self._open}
        self._journal.commit({**self._next, "documents": files, "shards": shards})
        self._begin_group()

    def discard(self) -> None:
        """Leave nothing of a group that was not committed."""
        for writer, _ in self._open.values():
            writer.discard()


def _place(position: Position) -> list[int]:
    return [position.file, position.record]


def _manifest(job: Job, entries: list[dict[str, Any]], tokenizer_file: Path) -> dict[str, Any]:
    """Everything that is known at the end: see `data/manifest.py`."""
    documents: Counter[str] = Counter()
    for entry in entries:
        documents.update(entry["documents"])
    return {
        **heading(job.dtype, job.tokenizer, tokenizer_file),
        "splits": {s: with_totals([entry["shards"][s] for entry in entries if s in entry["shards"]]) for s in SPLITS},
        "sources": [
            {"file": file, "bytes": size, "documents": documents[str(i)]}
            for i, (file, size, _) in enumerate(job.sources)
        ],
        "skipped": dict(sorted(job.source.skipped.items())),
        "job": {"shard_tokens": job.shard_tokens, **job.options},
    }


def _finished(folder: Path, job: Job) -> Done:
    """The manifest of a finished folder. Raises `UserError` if it is another job's."""
    manifest = read_manifest(folder)
    (folder / JOURNAL).unlink(missing_ok=True)  # of a process that was killed between the two
    there = {
        "sources": [[source["file"], source["bytes"]] for source in manifest["sources"]],
        "tokenizer": manifest["tokenizer"]["hash"],
        **manifest["job"],
    }
    wanted = job.identity()
    refuse_other(folder, there, {**wanted, "sources": [source[:2] for source in wanted["sources"]]})
    return Done(manifest, 0, 0, 0, 0.0)


@contextlib.contextmanager
def _only_one(folder: Path) -> Iterator[None]:
    """A `with` block that only one process at a time can be in."""
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(locked(folder / LOCK, wait=False))
        except BlockingIOError:
            raise UserError(
                f"{folder}: another `gramian tokenize` is at work there; wait for it, or give another --out"
            ) from None
        yield
