"""Hugging Face's tokenizer.json, through the `tokenizers` library."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from common.errors import UserError
from common.files import atomic_write
from data.tokenizers.common import choose_eos, is_exact
from data.tokenizers.pieces import PieceEncoder

FILE_NAME = "tokenizer.json"
# Our mark on the entry of the token that ends a document, where the file alone would not tell; the library ignores it.
_MARK = "ends_document"
_BYTE_PIECE = re.compile("<0x[0-9A-F]{2}>")


class HuggingFaceTokenizer:
    """A tokenizer.json.

    Padding, truncation and templates (a begin token before each text) that the file may ask for are not applied. The
    library gives a special token's id to a text that spells its name; here such a text is encoded like any other.

    Args:
        content: bytes of the file.
        eos: name of the special token that ends a document; by default the one marked in the file, else a common one.
        where: the file, for messages.
    """

    kind = "huggingface"

    def __init__(self, content: bytes, eos: str | None = None, where: str = FILE_NAME) -> None:
        import tokenizers

        try:
            self._tree = json.loads(content)
            added = self._tree.get("added_tokens") or []
            names = [token["content"] for token in added if token["special"]]
            marked = next((token["content"] for token in added if token.get(_MARK)), None)
            self._tokenizer = tokenizers.Tokenizer.from_buffer(content)
        except Exception as error:  # the library raises nothing more special
            raise UserError(f"{where}: not a tokenizer.json: {error}; give another file") from None
        chosen = choose_eos(marked if eos is None else eos, names, where)
        if chosen != marked and (marked is not None or chosen != choose_eos(None, names, where)):
            for token in added:
                token.pop(_MARK, None)
                if token["content"] == chosen:
                    token[_MARK] = True
            content = json.dumps(self._tree, ensure_ascii=False).encode("utf-8")
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._tokenizer.encode_special_tokens = True
        self._content, self._where, self._added = content, where, added
        self._ids: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        self.special_tokens: dict[str, int] = {name: self._ids[name] for name in names}
        self._names = {token: name for name, token in self.special_tokens.items()}
        self.max_id = max(self._ids.values())  # with gaps, and tokens added above the model's, more than their number
        self.vocab_size = self.max_id + 1
        self.eos_id = self.special_tokens[chosen]
        self.hash = hashlib.blake2b(content + b"\0" + chosen.encode("utf-8"), digest_size=32).hexdigest()

    @functools.cached_property
    def token_bytes(self) -> np.ndarray:
        kinds = list(_kinds(self._tree.get("decoder")))
        sizes = np.zeros(self.vocab_size, dtype=np.int64)
        plain = {token["content"] for token in self._added}
        alphabet = _byte_alphabet()
        for piece, token in self._ids.items():
            if token in self._names:
                continue
            if "ByteLevel" in kinds:
                # A character a byte; only a token that was added may have others.
                in_alphabet = alphabet.issuperset(piece)
                sizes[token] = len(piece) if in_alphabet else len(piece.encode("utf-8"))
            elif "ByteFallback" in kinds and _BYTE_PIECE.fullmatch(piece):
                sizes[token] = 1
            elif piece in plain:
                sizes[token] = len(piece.encode("utf-8"))
            elif space := _written_space(self._tree.get("decoder")):
                sizes[token] = len(piece.replace(space, " ").encode("utf-8"))
            else:
                sizes[token] = len(self._tokenizer.decode([token], skip_special_tokens=True).encode("utf-8"))
        return sizes

    @functools.cached_property
    def exact(self) -> bool:
        return is_exact(self)

    def encode(self, texts: Sequence[str], threads: int | None = None) -> list[list[int]]:
        """Ids of each text. Texts are spread over all cores unless `threads` is 1: the library can do no other."""
        with _parallel(threads != 1):
            rows = self._by_pieces(texts) if threads == 1 else self._by_library(texts)
        for number, ids in enumerate(rows):
            if not self._names.keys().isdisjoint(ids):
                rows[number] = self._without_special(texts[number], ids)
        return rows

    def _by_library(self, texts: Sequence[str]) -> list[list[int]]:
        return [encoding.ids for encoding in self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]

    def _by_pieces(self, texts: Sequence[str]) -> list[list[int]]:
        """The same on one core, which is mostly faster."""
        if self._pieces is None:
            return self._by_library(texts)
        rows = [self._pieces.encode(text) for text in texts]
        left = iter(self._by_library([text for text, ids in zip(texts, rows, strict=True) if ids is None]))
        return [next(left) if ids is None else ids for ids in rows]

    @functools.cached_property
    def _pieces(self) -> PieceEncoder | None:
        return PieceEncoder.of(self._tree, self._tokenizer)

    def _without_special(self, text: str, ids: list[int]) -> list[int]:
        """Ids of a text of whose ids some are special, because the model's vocabulary has special tokens as pieces.

        Their names are cut after the first character, so that the model never sees them whole. What stays is a token
        that is special and stands for what is unknown.
        """
        found = [self._names[token] for token in self._names.keys() & set(ids)]
        spelt = [re.escape(name) for name in found if name in text]
        if spelt:
            cuts = [match.start() + 1 for match in re.finditer("|".join(spelt), text)]
            ids = []
            for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
                ids += self._tokenizer.encode(text[start:end], add_special_tokens=False).ids
        if self.eos_id in ids:
            raise UserError(
                f"{self._where}: '{self._names[self.eos_id]}' ends a document and is also what some text encodes to; "
                "name another token with --eos or data.tokenizer.eos"
            )
        return ids

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Text of a row of ids. Raises `IndexError` for an id outside the vocabulary."""
        row = [int(token) for token in ids]
        if row and not 0 <= min(row) <= max(row) <= self.max_id:
            raise IndexError(f"ids {min(row)} ... {max(row)} of {self.vocab_size}")
        return self._tokenizer.decode(row, skip_special_tokens=True)

    def save(self, folder: Path) -> str:
        atomic_write(folder / FILE_NAME, self._content)
        return FILE_NAME


@contextlib.contextmanager
def _parallel(parallel: bool) -> Iterator[None]:
    """Whether the library may use threads, which it asks the environment at each call.

    A process that it used threads in must not be forked with them: it warns, on standard error, unless told here.
    """
    name = "TOKENIZERS_PARALLELISM"
    before = os.environ.get(name)
    os.environ[name] = "true" if parallel else "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _parts(decoder: Any) -> Iterator[dict[str, Any]]:
    """A decoder, or those of a sequence."""
    if decoder:
        inner = decoder.get("decoders")
        if inner is None:
            yield decoder
        else:
            for part in inner:
                yield from _parts(part)


def _kinds(decoder: Any) -> Iterator[str]:
    return (part["type"] for part in _parts(decoder))


def _written_space(decoder: Any) -> str | None:
    """The character that stands for a space inside pieces, if the decoder has one, as SentencePiece does."""
    for part in _parts(decoder):
        if part["type"] == "Metaspace":
            return str(part["replacement"])
        if part["type"] == "Replace" and part["content"] == " ":
            return part["pattern"].get("String")  # type: ignore[no-any-return]
    return None


@functools.cache
def _byte_alphabet() -> frozenset[str]:
    """The 256 characters that byte-level pieces are written in."""
    from tokenizers import pre_tokenizers

    return frozenset(pre_tokenizers.ByteLevel.alphabet())
