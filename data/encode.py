"""Documents to token ids, in chunks, over processes: in order, and the same whatever the number of processes."""

from __future__ import annotations

import bisect
import itertools
import multiprocessing
import os
import signal
import threading
from collections import Counter, deque
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from common.errors import UserError
from data.readers import Position, Source
from data.split import Split
from data.tokenizer import Tokenizer, load_tokenizer

CHUNK_CHARS = 1 << 20  # of text handed to a process at once: a fraction of a second's work, and small beside the model
_CHUNKS_PER_WORKER = 3  # in flight: one in work, the others so that nobody waits for the reader


@dataclass
class Chunk:
    """Documents that follow one another in the source."""

    texts: list[str] = field(default_factory=list)
    at: list[Position] = field(default_factory=list)
    records: list[int] = field(default_factory=list)  # of the source, up to and including each document
    # (i, how many of the records before document i gave no document, by reason), wherever that changes.
    skips: list[tuple[int, Counter[str]]] = field(default_factory=list)

    def before(self, i: int) -> dict[str, Any]:
        """What the source had counted when it gave document i: `records`, this one included, and `skipped`."""
        place = bisect.bisect_right(self.skips, i, key=lambda skip: skip[0]) - 1
        return {"records": self.records[i], "skipped": dict(sorted(self.skips[place][1].items()))}


@dataclass(frozen=True)
class Encoded:
    """A chunk's token ids. A document gives one piece, or two where each is cut for evaluation (see `data/split.py`);
    a piece is the ids of a text and the end-of-document id.

    Shapes: P pieces, M tokens of all pieces.
    """

    tokens: np.ndarray  # (M,) of the type on disk
    lengths: np.ndarray  # int64 (P,): tokens of each piece
    n_bytes: np.ndarray  # int64 (P,): UTF-8 bytes of each piece's text
    held_out: np.ndarray  # bool (P,)


@dataclass(frozen=True)
class Encoder:
    """How texts become pieces of ids. Processes are given it as it is, so it names the tokenizer's file only."""

    tokenizer_path: Path
    split: Split
    dtype: str

    @property
    def pieces_per_document(self) -> int:
        """1, or 2 where each document is cut."""
        return 1 if self.split.cut_fraction is None else 2

    def encode(self, tokenizer: Tokenizer, texts: list[str], threads: int | None) -> Encoded:
        """Encode documents. Raises `UserError` for an id that is not in the vocabulary: it must never be written."""
        pieces = list(self.split.apply(texts))
        ids = tokenizer.encode([text for _, text in pieces], threads)
        for row in ids:
            row.append(tokenizer.eos_id)
        lengths = np.fromiter(map(len, ids), dtype=np.int64, count=len(ids))
        tokens = np.fromiter(itertools.chain.from_iterable(ids), dtype=np.int64, count=int(lengths.sum()))
        if tokens.size and (tokens.min() < 0 or tokens.max() > tokenizer.max_id):
            wrong = next(token for token in tokens if not 0 <= token <= tokenizer.max_id)
            raise UserError(
                f"{self.tokenizer_path}: gave token id {wrong}, but its ids are 0 to {tokenizer.max_id}; "
                "the tokenizer's file is damaged, give another"
            )
        return Encoded(
            tokens.astype(self.dtype),
            lengths,
            np.fromiter((len(text.encode("utf-8")) for _, text in pieces), dtype=np.int64, count=len(pieces)),
            np.fromiter((held_out for held_out, _ in pieces), dtype=bool, count=len(pieces)),
        )


def read_chunks(
    source: Source, start: Position | None, before: tuple[int, dict[str, int]] | None, chars: int
) -> Iterator[Chunk]:
    """Group the documents from `start` on (see `Source.documents`) into chunks of about `chars` characters of text."""
    chunk, size, n_skipped = Chunk(), 0, -1
    for document in source.documents(start, before):
        if (now := source.skipped.total()) != n_skipped:
            chunk.skips.append((len(chunk.texts), source.skipped.copy()))
            n_skipped = now
        chunk.texts.append(document.text)
        chunk.at.append(document.at)
        chunk.records.append(source.records)
        size += len(document.text)
        if size >= chars:
            yield chunk
            chunk, size = Chunk(skips=[(0, chunk.skips[-1][1])]), 0
    if chunk.texts:
        yield chunk


def encode_here(chunks: Iterator[Chunk], encoder: Encoder, threads: int | None) -> Generator[tuple[Chunk, Encoded]]:
    """Encode in this process, with as many of the tokenizer's own threads; None: one for each core."""
    tokenizer = load_tokenizer(encoder.tokenizer_path)
    for chunk in chunks:
        yield chunk, encoder.encode(tokenizer, chunk.texts, threads)


def encode_in_processes(chunks: Iterator[Chunk], encoder: Encoder, workers: int) -> Generator[tuple[Chunk, Encoded]]:
    """Encode in `workers` processes, while this one reads ahead and gets the results in the order of `chunks`.

    Raises:
        UserError: a process was killed.
    """
    first = list(itertools.islice(chunks, 2))
    if len(first) < 2:  # not worth starting processes for
        yield from encode_here(iter(first), encoder, 1)
        return
    # Spawned ones: a fork would copy the locks of the reader's threads, and keep the lock of the folder.
    context = multiprocessing.get_context("spawn")
    others = multiprocessing.active_children()
    pool = ProcessPoolExecutor(workers, context, initializer=_begin_worker, initargs=(encoder,))
    pending: deque[tuple[Chunk, Future[Encoded]]] = deque()
    try:
        for chunk in itertools.chain(first, chunks):
            pending.append((chunk, pool.submit(_encode_in_worker, chunk.texts)))
            if len(pending) >= _CHUNKS_PER_WORKER * workers:
                yield _next(pending)
        while pending:
            yield _next(pending)
    except BrokenProcessPool:
        for process in multiprocessing.active_children():
            if process not in others:
                process.kill()  # the pool itself asks them by SIGTERM, and waits
        raise UserError(
            "a worker process of the tokenizer was killed, perhaps for want of memory; give the same command again, "
            "and it goes on, with fewer --workers if need be"
        ) from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _next(pending: deque[tuple[Chunk, Future[Encoded]]]) -> tuple[Chunk, Encoded]:
    chunk, future = pending.popleft()
    return chunk, future.result()


_worker: tuple[Encoder, Tokenizer]


def _begin_worker(encoder: Encoder) -> None:
    """What a process does first."""
    global _worker
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):  # they reach all; the parent ends us
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # A library that would use all cores in each process would make them wait for one another.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _worker = (encoder, load_tokenizer(encoder.tokenizer_path))


def _end_with_parent() -> None:
    """A killed parent cannot end its processes, and these would wait for work for ever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _encode_in_worker(texts: list[str]) -> Encoded:
    encoder, tokenizer = _worker
    return encoder.encode(tokenizer, texts, 1)
