"""Tokenizers: what the rest of the project knows of one, and how one is loaded, whatever its kind."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from common.errors import UserError
from data.config import TokenizerConfig
from data.tokenizers import byte, huggingface, sentencepieces
from data.tokenizers.byte import ByteTokenizer
from data.tokenizers.huggingface import HuggingFaceTokenizer
from data.tokenizers.sentencepieces import SentencePieceTokenizer

FILE_NAMES = (sentencepieces.FILE_NAME, huggingface.FILE_NAME, byte.FILE_NAME)  # that `save` writes


class Tokenizer(Protocol):
    """What the rest of the project knows of a tokenizer."""

    @property
    def kind(self) -> str:
        """`sentencepiece`, `huggingface` or `bytes`."""

    @property
    def vocab_size(self) -> int:
        """Number of ids; they are 0 ... vocab_size - 1. Some may stand for nothing."""

    @property
    def max_id(self) -> int:
        """Largest id that can occur, special and added tokens included."""

    @property
    def eos_id(self) -> int:
        """Id that ends a document. No text encodes to it."""

    @property
    def special_tokens(self) -> dict[str, int]:
        """Names and ids of the tokens that no text encodes to, the end of a document among them."""

    @property
    def exact(self) -> bool:
        """Whether every text comes back from its ids, and `token_bytes` add up to its length.

        Found by trying texts that are known to be changed by normalisation, and random ones.
        """

    @property
    def token_bytes(self) -> np.ndarray:
        """int64 (vocab_size,): UTF-8 bytes that each id stands for; their sum over a text's ids is its length.

        Of a tokenizer that is not exact it is the length of what the ids stand for, which may be another text.
        """

    @property
    def hash(self) -> str:
        """Hash of everything that decides the ids: the file's bytes and the choice of the end of a document."""

    def encode(self, texts: Sequence[str], threads: int | None = None) -> list[list[int]]:
        """Ids of each text, without any special token, also where the text has the name of one.

        `threads` is the number of threads (default: all cores); the ids do not depend on it.
        """

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text; special tokens give nothing, bytes that are no UTF-8 give U+FFFD."""

    def save(self, folder: Path) -> str:
        """Write the tokenizer's file into a folder, whole or not at all, and return its name, of `FILE_NAMES`.

        `load_tokenizer` of that file gives the same tokenizer, its end of document included.
        """


def load_tokenizer(path: Path, eos: str | None = None) -> Tokenizer:
    """Read a tokenizer: a SentencePiece model, a `tokenizer.json`, what `save` wrote; the name `bytes` needs no file.

    Args:
        path: the file, or a folder that has one under its usual name.
        eos: name of the special token that ends a document, where the file does not tell.

    Raises:
        UserError: it is no tokenizer, or the end of a document is unknown; the line says which names there are.
    """
    if path.is_dir():
        there = [name for name in FILE_NAMES if (path / name).is_file()]
        if len(there) != 1:
            raise UserError(f"{path}: holds {' and '.join(there) or 'no tokenizer file'}; name the file itself")
        path = path / there[0]
    try:
        content = path.read_bytes()
    except OSError as error:
        if str(path) == ByteTokenizer.kind:
            return ByteTokenizer()
        raise UserError(f"{path}: cannot read the tokenizer: {error.strerror}") from None
    tree = _json(content)
    if isinstance(tree, dict) and tree.get("kind") == ByteTokenizer.kind:
        return ByteTokenizer()
    if isinstance(tree, dict):
        return HuggingFaceTokenizer(content, eos, str(path))
    try:
        if content:  # SentencePiece takes nothing for a model
            return SentencePieceTokenizer(content, eos, str(path))
        raise RuntimeError
    except RuntimeError:
        raise UserError(
            f"{path}: no tokenizer (neither a SentencePiece model nor a tokenizer.json); give another file, or, if it "
            "was made here, delete its folder to have it made again"
        ) from None


def given_tokenizer(config: TokenizerConfig) -> Tokenizer | None:
    """The tokenizer that a config names; None if it is to be trained first."""
    if config.path is not None:
        return load_tokenizer(Path(config.path).expanduser(), config.eos)
    return ByteTokenizer() if config.kind == "bytes" else None


def _json(content: bytes) -> Any:
    try:
        return json.loads(content) if content.lstrip()[:1] == b"{" else None
    except ValueError:
        return None
