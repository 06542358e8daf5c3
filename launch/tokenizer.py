"""`gramian tokenizer train`: a SentencePiece model from texts."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, cast

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from common.errors import UserError
from common.files import atomic_write
from common.logs import setup_logging
from data.config import MIN_VOCAB_SIZE
from data.readers import Source
from data.tokenizer import SentencePieceTokenizer
from data.tokenizers.training import SAMPLE_BYTES, check_special, in_chunks, sampled, train_sentencepiece

_MODELS = ("bpe", "unigram")
_MEASURED_BYTES = 1_000_000  # of the sample, to count tokens in
_UPDATE_EVERY = 256  # documents


def run_train(
    inputs: list[str],
    vocab_size: int,
    out: Path,
    kind: str,
    text_field: str,
    sample_bytes: int | None,
    special: list[str],
) -> None:
    """Train a tokenizer on a sample of `inputs` and write its file to `out`."""
    if kind not in _MODELS:
        raise UserError(f"--kind: '{kind}' is not known; give {' or '.join(_MODELS)}")
    if vocab_size < MIN_VOCAB_SIZE:
        raise UserError(
            f"--vocab-size: {vocab_size} is too small: byte fallback needs 256 pieces and 2 specials beside the "
            f"characters; give {MIN_VOCAB_SIZE} or more"
        )
    check_special(special)
    _check_writable(out)
    setup_logging()
    source = Source(inputs, text_field)
    started = time.monotonic()
    sample = sampled(in_chunks(_texts(source)), sample_bytes or SAMPLE_BYTES)
    model = train_sentencepiece(
        sample,
        vocab_size,
        cast(Literal["bpe", "unigram"], kind),
        special=special,
        sample_bytes=sys.maxsize,
        size_name="--vocab-size",
        input_name="--input",
    )
    try:
        atomic_write(out, model)
    except OSError as error:
        raise UserError(f"--out: cannot write {out}: {error.strerror}; give another file") from None
    tokenizer = SentencePieceTokenizer(model, where=str(out))
    measured = sampled(iter(sample), _MEASURED_BYTES)
    n_bytes = sum(len(text.encode("utf-8")) for text in measured)
    n_tokens = sum(map(len, tokenizer.encode(measured)))
    special_tokens = ", ".join(f"{name} {token}" for name, token in tokenizer.special_tokens.items())
    print(f"tokenizer     {out}, {len(model):,} bytes, hash {tokenizer.hash[:16]}")
    print(f"pieces        {tokenizer.vocab_size:,} ({kind}); special: {special_tokens}")
    print(f"sample        {sum(len(text.encode('utf-8')) for text in sample):,} bytes of {source.records:,} records")
    print(f"compression   {n_bytes / n_tokens:.3f} bytes per token, on {n_bytes:,} bytes of the sample")
    print(f"time          {time.monotonic() - started:.1f} s", flush=True)


def _check_writable(out: Path) -> None:
    """Find before the work is done that its result has no place."""
    if out.is_dir():
        raise UserError(f"--out: {out} is a folder; give the name of the file, for example {out / 'tokenizer.model'}")
    parent = next(folder for folder in out.absolute().parents if folder.exists())
    if not parent.is_dir():
        raise UserError(f"--out: {parent} is not a folder; give another file")


def _texts(source: Source) -> Iterator[str]:
    """The texts of all documents, with a bar on a terminal."""
    columns = (TextColumn("reading"), BarColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task("reading", total=source.total_bytes or None)
        for number, document in enumerate(source.documents()):
            if number % _UPDATE_EVERY == 0:
                bar.update(task, completed=source.bytes_read())
            yield document.text
