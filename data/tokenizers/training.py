"""Training a SentencePiece model that loses nothing, on a bounded sample, the same on every machine."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

import sentencepiece

from common.errors import UserError
from data.config import MIN_VOCAB_SIZE

SAMPLE_BYTES = 16_000_000  # of text to train on: BPE merges settle long before, and it takes seconds
_CHUNK_CHARS = 2000
# SentencePiece drops a whole training sentence that holds NUL or U+2585, and takes U+2581 for a space.
_RESERVED = re.compile("[\0\u2581\u2585]")
_OWN_PIECES = re.compile(r"<unk>|</s>|<0x[0-9A-F]{2}>")


def train_sentencepiece(
    texts: Iterable[str],
    vocab_size: int,
    model: Literal["bpe", "unigram"] = "bpe",
    *,
    special: Sequence[str] = (),
    sample_bytes: int = SAMPLE_BYTES,
    size_name: str = "data.tokenizer.vocab_size",
    input_name: str = "data.corpus",
) -> bytes:
    """Train a model and return the bytes of its file: the same for the same texts, whatever the machine.

    Args:
        texts: read once; of more than `sample_bytes`, evenly spaced pieces are used, half as many bytes at least.
        vocab_size: number of ids: the unknown (0), the end of a document (1), those of `special`, 256 bytes, pieces.
        special: names of further tokens that no text encodes to; they get the ids 2, 3, ...
        size_name, input_name: what the user gave `vocab_size` and `texts` as, for messages.
    """
    check_special(special)
    sample = sampled(in_chunks(texts), sample_bytes)
    too_little = f"{input_name}: too little text to train a tokenizer on; give more"
    if not sample:
        raise UserError(too_little)
    file = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(sample),
            model_writer=file,
            model_type=model,
            vocab_size=vocab_size,
            control_symbols=list(special),
            # Nothing may change the text: no normalisation, no added, removed or merged spaces, bytes for the rare.
            byte_fallback=True,
            normalization_rule_name="identity",
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            allow_whitespace_only_pieces=True,
            max_sentence_length=4 * _CHUNK_CHARS,
            unk_id=0,
            eos_id=1,
            bos_id=-1,
            pad_id=-1,
            unk_surface="",
            num_threads=1,  # the model file records it
            minloglevel=2,
        )
    except RuntimeError as error:
        raise _explained(str(error), f"{size_name}: {vocab_size}", too_little) from None
    return file.getvalue()


def check_special(names: Sequence[str]) -> None:
    """Raise `UserError` for a name that cannot be that of a special token."""
    for name in names:
        if not name or name.split() != [name] or _OWN_PIECES.fullmatch(name) or list(names).count(name) > 1:
            raise UserError(f"'{name}' cannot be a special token: it is empty, has spaces, or is there already")


def sampled(chunks: Iterable[str], n_bytes: int) -> list[str]:
    """All chunks if they fit into `n_bytes`, else every 2nd, 4th, 8th ..., the first such choice that fits.

    One pass, and never more than `n_bytes` and a chunk in memory. The choice depends on nothing but the chunks.
    """
    kept: list[str] = []
    size, stride = 0, 1
    for number, chunk in enumerate(chunks):
        if number % stride:
            continue
        kept.append(chunk)
        size += len(chunk.encode("utf-8"))
        while size > n_bytes and len(kept) > 1:
            stride *= 2
            kept = kept[::2]
            size = sum(len(chunk.encode("utf-8")) for chunk in kept)
    return kept


def in_chunks(texts: Iterable[str]) -> Iterator[str]:
    """Cut texts into sentences of at most `_CHUNK_CHARS` characters, after a newline where there is one.

    A newline stays inside its sentence: so SentencePiece learns pieces such as ':\\n' (6 % fewer tokens than a sentence
    a line on the Python library), and no line is too long for its limit, which would drop it.
    """
    for text in texts:
        for part in _RESERVED.split(text):
            start = 0
            while start < len(part):
                end = start + _CHUNK_CHARS
                if end < len(part):
                    end = part.rfind("\n", start, end) + 1 or end
                yield part[start:end]
                start = end


def _explained(message: str, given: str, too_little: str) -> UserError:
    """SentencePiece's message as one line that names what was given and a value that works."""
    if too_high := re.search(r"Vocabulary size (?:is )?too high .*<= (\d+)", message):
        largest = int(too_high[1])
        if largest < MIN_VOCAB_SIZE:
            return UserError(too_little)
        return UserError(f"{given} is too large for this corpus; set it to {largest} or less, or give more text")
    if too_small := re.search(r"smaller than required_chars. \d+ vs (\d+)", message):
        return UserError(f"{given} is too small for the characters of this corpus; set it to {too_small[1]} or more")
    return UserError(f"{given.partition(':')[0]}: SentencePiece could not be trained: {message}")
