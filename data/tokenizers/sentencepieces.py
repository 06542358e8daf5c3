"""SentencePiece models: ours, which are exact, and those of others."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import sentencepiece

from common.files import atomic_write
from common.machine import available_cores
from data.tokenizers.common import choose_eos, is_exact, probes, round_trips

FILE_NAME = "tokenizer.model"
_SPACE = "\u2581"  # SentencePiece writes a space inside pieces as this character


class SentencePieceTokenizer:
    """A SentencePiece model, such as `train_sentencepiece` returns.

    Of one with byte fallback and without normalisation, `decode(encode([text])[0]) == text` for every text that UTF-8
    can hold. SentencePiece alone would return a space for U+2581; we encode that character as its three bytes instead.

    Args:
        model: content of the file.
        eos: name of the control piece that ends a document; by default the one that the model says, else a common one.
        where: the file, for messages.
    """

    kind = "sentencepiece"

    def __init__(self, model: bytes, eos: str | None = None, where: str = "tokenizer") -> None:
        processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        names = [processor.id_to_piece(token) for token in range(processor.vocab_size()) if processor.is_control(token)]
        own = processor.id_to_piece(processor.eos_id()) if processor.eos_id() >= 0 else None
        chosen = choose_eos(own if eos is None else eos, names, where)
        if chosen != own:
            model = _with_eos(model, chosen)
            processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        self._model, self._processor = model, processor
        self.special_tokens: dict[str, int] = {name: processor.piece_to_id(name) for name in names}
        self.vocab_size: int = processor.vocab_size()
        self.max_id = self.vocab_size - 1
        self.eos_id: int = processor.eos_id()
        self.hash = hashlib.blake2b(model, digest_size=32).hexdigest()
        self._space_ids = [processor.piece_to_id(f"<0x{byte:02X}>") for byte in _SPACE.encode("utf-8")]
        # Cutting a text at U+2581 is right only where encoding the parts changes nothing at their ends.
        self._cuts = all(processor.is_byte(token) for token in self._space_ids)
        self._cuts = self._cuts and round_trips(self, probes())

    @functools.cached_property
    def token_bytes(self) -> np.ndarray:
        sizes = np.zeros(self.vocab_size, dtype=np.int64)
        for token in range(self.vocab_size):
            if self._processor.is_byte(token):
                sizes[token] = 1
            elif not (self._processor.is_control(token) or self._processor.is_unknown(token)):
                sizes[token] = len(self._processor.id_to_piece(token).replace(_SPACE, " ").encode("utf-8"))
        return sizes

    @functools.cached_property
    def exact(self) -> bool:
        return is_exact(self)

    def encode(self, texts: Sequence[str], threads: int | None = None) -> list[list[int]]:
        """Ids of each text. Texts are spread over the threads, by default one a core, so give many at once."""
        threads = threads or available_cores()
        if not self._cuts or not any(_SPACE in text for text in texts):
            return self._processor.encode(list(texts), num_threads=threads)
        parts = [text.split(_SPACE) for text in texts]
        flat = [part for text_parts in parts for part in text_parts]
        encoded = iter(self._processor.encode(flat, num_threads=threads))
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

    def save(self, folder: Path) -> str:
        atomic_write(folder / FILE_NAME, self._model)
        return FILE_NAME


def _with_eos(model: bytes, piece: str) -> bytes:
    """The model with another end-of-document piece.

    A protocol buffer that is appended to another of its kind is merged into it: this one holds nothing but field 47
    (eos_piece) of field 2 (trainer_spec), see sentencepiece_model.proto.
    """
    name = piece.encode("utf-8")
    spec = _varint(47 << 3 | 2) + _varint(len(name)) + name
    return model + _varint(2 << 3 | 2) + _varint(len(spec)) + spec


def _varint(value: int) -> bytes:
    result = bytearray()
    while value > 0x7F:
        result.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*result, value])
