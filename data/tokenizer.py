"""Tokenizers: training one on a corpus, and encoding and decoding with it exactly."""

from __future__ import annotations

import functools
import hashlib
import io
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import sentencepiece

from common.errors import UserError
from common.machine import available_cores
from data.config import MIN_VOCAB_SIZE, TokenizerConfig

SAMPLE_BYTES = 16_000_000  # of text to train on: BPE merges settle long before, and it takes seconds
_CHUNK_CHARS = 2000
_TOO_LITTLE = "data.corpus: too little text to train a tokenizer on; give more"
_SPACE = "\u2581"  # SentencePiece writes a space inside pieces as this character
# SentencePiece drops a whole training sentence that holds NUL or U+2585, and takes U+2581 for a space.
_RESERVED = re.compile("[\0\u2581\u2585]")


class Tokenizer(Protocol):
    """What the rest of the project knows of a tokenizer."""

    @property
    def vocab_size(self) -> int:
        """Number of ids; they are 0 ... vocab_size - 1."""

    @property
    def eos_id(self) -> int:
        """Id that ends a document. No text encodes to it."""

    @property
    def token_bytes(self) -> np.ndarray:
        """int64 (vocab_size,): UTF-8 bytes that each id stands for; their sum over a text's ids is its length."""

    @property
    def hash(self) -> str:
        """Hash of everything that decides the ids."""

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text, without any special token."""

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text; special tokens give nothing, bytes that are no UTF-8 give U+FFFD."""


class SentencePieceTokenizer:
    """A SentencePiece model with byte fallback, such as `train_sentencepiece` returns.

    `decode(encode([text])[0]) == text` for every text that UTF-8 can hold. SentencePiece alone would return a space
    for U+2581; we encode that character as its three bytes instead.
    """

    def __init__(self, model: bytes) -> None:
        self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        self.vocab_size: int = self._processor.vocab_size()
        self.eos_id: int = self._processor.eos_id()
        self.hash = hashlib.blake2b(model, digest_size=32).hexdigest()
        self._space_ids = [self._processor.piece_to_id(f"<0x{byte:02X}>") for byte in _SPACE.encode("utf-8")]

    @functools.cached_property
    def token_bytes(self) -> np.ndarray:
        sizes = np.zeros(self.vocab_size, dtype=np.int64)
        for token in range(self.vocab_size):
            if self._processor.is_byte(token):
                sizes[token] = 1
            elif not (self._processor.is_control(token) or self._processor.is_unknown(token)):
                sizes[token] = len(self._processor.id_to_piece(token).replace(_SPACE, " ").encode("utf-8"))
        return sizes

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text. Texts are spread over the cores, so give many at once."""
        parts = [text.split(_SPACE) for text in texts]
        flat = [part for text_parts in parts for part in text_parts]
        encoded = iter(self._processor.encode(flat, num_threads=available_cores()))
        result = []
        for text_parts in parts:
            ids = next(encoded)
            for _ in text_parts[1:]:
                ids += self._space_ids
                ids += next(encoded)
            result.append(ids)
        return result

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Text of a row of ids. Raises `IndexError` for an id outside the vocabulary."""
        return self._processor.decode([int(token) for token in ids])


def load_tokenizer(path: Path) -> Tokenizer:
    """Read a tokenizer file. Raises `UserError` if it is none."""
    try:
        return SentencePieceTokenizer(path.read_bytes())
    except OSError as error:
        raise UserError(f"{path}: cannot read the tokenizer: {error.strerror}") from None
    except RuntimeError:
        raise UserError(f"{path}: not a SentencePiece model; delete its folder to have it made again") from None


def train_sentencepiece(texts: Iterable[str], n_bytes: int, config: TokenizerConfig) -> bytes:
    """Train a BPE model and return the bytes of its file: the same for the same texts, whatever the machine.

    `n_bytes` is the size of all texts; of more than `SAMPLE_BYTES`, evenly spaced pieces are used.
    """
    stride = max(1, -(-n_bytes // SAMPLE_BYTES))
    sample = [chunk for number, chunk in enumerate(_chunks(texts)) if number % stride == 0]
    if not sample:
        raise UserError(_TOO_LITTLE)
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(sample),
            model_writer=model,
            model_type="bpe",
            vocab_size=config.vocab_size,
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
        raise _explained(str(error), config.vocab_size) from None
    return model.getvalue()


def _chunks(texts: Iterable[str]) -> Iterator[str]:
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


def _explained(message: str, vocab_size: int) -> UserError:
    """SentencePiece's message as one line that names the key and a value that works."""
    key = f"data.tokenizer.vocab_size: {vocab_size}"
    if too_high := re.search(r"Vocabulary size too high .*<= (\d+)", message):
        largest = int(too_high[1])
        if largest < MIN_VOCAB_SIZE:
            return UserError(_TOO_LITTLE)
        return UserError(f"{key} is too large for this corpus; set it to {largest} or less, or give more text")
    if too_small := re.search(r"smaller than required_chars. \d+ vs (\d+)", message):
        return UserError(f"{key} is too small for the characters of this corpus; set it to {too_small[1]} or more")
    return UserError(f"data.tokenizer: SentencePiece could not be trained: {message}")
