"""A dataset folder: token shards with a manifest, read as one stream of tokens a split.

DIR/manifest.json        what there is, see data/manifest.py
DIR/tokenizer.*          the tokenizer that made the ids
DIR/train-00000.bin/.idx, train-00001 ..., eval-00000 ...    documents in data/shards.py's format
"""

from __future__ import annotations

import bisect
import functools
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from common.errors import UserError
from common.files import hash_json
from data.manifest import REMAKE, SPLITS, listed_files, read_manifest
from data.shards import TokenFile, read_header
from data.tokenizer import Tokenizer, load_tokenizer

# A mapped shard holds a file descriptor, and a process may have a thousand.
_OPEN_SHARDS = 64


@dataclass(frozen=True)
class Shard:
    """A pair `prefix`.bin, `prefix`.idx and what must be in it."""

    prefix: Path
    documents: int
    tokens: int


class TokenStream:
    """Shards of one type of token, read as one stream of tokens or document by document, as a `TokenFile` is.

    Nothing but the counts is held: files are mapped when they are read, and the documents' places only where asked for.

    Attributes: `name` for messages, `dtype` of a token, `n_tokens`, `n_documents`.
    """

    def __init__(self, name: str, shards: Sequence[Shard], dtype: np.dtype) -> None:
        self.name, self.dtype = name, np.dtype(dtype)
        self._shards = list(shards)
        # First token and first document of each shard, and the ends. Python's integers: they know no 2**31.
        self._first_token, self._first_document = [0], [0]
        for shard in self._shards:
            self._first_token.append(self._first_token[-1] + shard.tokens)
            self._first_document.append(self._first_document[-1] + shard.documents)
        self.n_tokens, self.n_documents = self._first_token[-1], self._first_document[-1]
        self._mapped: OrderedDict[int, np.ndarray] = OrderedDict()
        self._index: tuple[int, TokenFile] | None = None  # the shard whose documents were asked for last

    @classmethod
    def of_files(cls, prefixes: Sequence[Path], name: str = "tokens") -> TokenStream:
        """A stream of token files without a manifest, at least one. Raises `UserError` if their types differ."""
        files = [TokenFile(prefix) for prefix in prefixes]
        for file in files:
            if file.dtype != files[0].dtype:
                raise UserError(
                    f"{file.bin_path}: {file.dtype.name} tokens, but {files[0].bin_path} has {files[0].dtype.name}; "
                    "make them again with one tokenizer"
                )
        shards = [Shard(p, f.n_documents, f.n_tokens) for p, f in zip(prefixes, files, strict=True)]
        return cls(name, shards, files[0].dtype)

    @property
    def bin_path(self) -> str:
        """For messages, where a `TokenFile` has a path."""
        return self.name

    @functools.cached_property
    def document_starts(self) -> np.ndarray:
        """int64 (documents + 1,): token of the stream at which each document starts, and the end."""
        starts = np.empty(self.n_documents + 1, dtype=np.int64)
        starts[-1] = self.n_tokens
        for i, shard in enumerate(self._shards):
            first = self._first_document[i]
            starts[first : first + shard.documents] = self._file(i).document_starts[:-1]
            starts[first : first + shard.documents] += self._first_token[i]
        return starts

    @property
    def lengths(self) -> np.ndarray:
        """int64 (documents,): tokens of each document."""
        return np.diff(self.document_starts)

    def lengths_by_shard(self) -> Iterator[np.ndarray]:
        """The same shard by shard, for streams of more documents than memory holds."""
        for i in range(len(self._shards)):
            yield np.diff(self._file(i).document_starts)

    def slice(self, start: int, stop: int) -> np.ndarray:
        """Tokens [start, stop) of the stream: (stop - start,) of `dtype`; a view of the file within one shard, a copy
        across a border."""
        if not 0 <= start <= stop <= self.n_tokens:
            raise IndexError(f"tokens [{start}, {stop}) of {self.n_tokens} in {self.name}")
        if start == stop:
            return np.empty(0, dtype=self.dtype)
        i = bisect.bisect_right(self._first_token, start) - 1
        parts = []
        while start < stop:
            first, end = self._first_token[i], self._first_token[i + 1]
            if start < end:
                parts.append(self._tokens(i)[start - first : min(stop, end) - first])
            start, i = min(stop, end), i + 1
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def document(self, i: int) -> np.ndarray:
        """Tokens of document i, a view of its file."""
        if not 0 <= i < self.n_documents:
            raise IndexError(f"document {i} of {self.n_documents} in {self.name}")
        shard = bisect.bisect_right(self._first_document, i) - 1
        return self._file(shard).document(i - self._first_document[shard])

    def _tokens(self, i: int) -> np.ndarray:
        """All tokens of shard i, mapped. Its index is not read: the manifest says where it starts."""
        if (tokens := self._mapped.get(i)) is not None:
            self._mapped.move_to_end(i)
            return tokens
        shard = self._shards[i]
        path = shard.prefix.with_name(f"{shard.prefix.name}.bin")
        try:
            tokens = np.asarray(np.memmap(path, dtype=self.dtype, mode="r"))
        except (OSError, ValueError) as error:
            raise UserError(f"{path}: cannot be read: {error}; {REMAKE}") from None
        if len(tokens) != shard.tokens:
            raise UserError(f"{path}: {len(tokens)} tokens where there must be {shard.tokens}; {REMAKE}")
        self._mapped[i] = tokens
        if len(self._mapped) > _OPEN_SHARDS:
            self._mapped.popitem(last=False)  # views of it stay valid: they keep the map
        return tokens

    def _file(self, i: int) -> TokenFile:
        """Shard i with its index. Raises `UserError` if it is not what was listed."""
        if self._index is not None and self._index[0] == i:
            return self._index[1]
        shard = self._shards[i]
        file = TokenFile(shard.prefix)
        if (file.dtype, file.n_documents, file.n_tokens) != (self.dtype, shard.documents, shard.tokens):
            raise UserError(
                f"{file.idx_path}: {file.n_documents} documents, {file.n_tokens} {file.dtype.name} tokens where there "
                f"must be {shard.documents}, {shard.tokens} and {self.dtype.name}; {REMAKE}"
            )
        self._index = (i, file)
        return file


@dataclass(frozen=True)
class Dataset:
    """A dataset folder and its manifest. Made by `open`."""

    folder: Path
    manifest: dict[str, Any]

    @classmethod
    def open(cls, folder: Path) -> Dataset:
        """Read the manifest, and compare the size of every file and the head of every index with it.

        Raises:
            UserError: whatever is wrong, with the file.
        """
        folder = Path(folder)
        manifest = read_manifest(folder)
        for name, entry in listed_files(manifest).items():
            path = folder / name
            size = path.stat().st_size if path.is_file() else None
            if size != entry["bytes"]:
                raise UserError(
                    f"{path}: missing or not {entry['bytes']} bytes long; `gramian data verify {folder}` lists all "
                    f"damage, {REMAKE}"
                )
        dtype = np.dtype(manifest["dtype"])
        for split in SPLITS:
            for shard in manifest["splits"][split]["shards"]:
                path = folder / f"{shard['name']}.idx"
                found, _, documents = read_header(path)
                if (found, documents) != (dtype, shard["documents"]):
                    raise UserError(
                        f"{path}: {documents} documents of {found.name} tokens where the manifest says "
                        f"{shard['documents']} of {dtype.name}; {REMAKE}"
                    )
        return cls(folder, manifest)

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return int(self.manifest["vocab_size"])

    @property
    def eos_id(self) -> int:
        """Id that ends every document."""
        return int(self.manifest["eos_id"])

    @property
    def dtype(self) -> np.dtype:
        """Type of a token id on disk."""
        return np.dtype(self.manifest["dtype"])

    @property
    def tokenizer_path(self) -> Path:
        """File of the tokenizer."""
        return self.folder / self.manifest["tokenizer"]["file"]

    @property
    def tokenizer_hash(self) -> str:
        """Hash of all that decides the ids of a text."""
        return str(self.manifest["tokenizer"]["hash"])

    @property
    def data_hash(self) -> str:
        """Hash of everything that training reads: tokenizer and token files, wherever the folder lies."""
        shards = {split: self.manifest["splits"][split]["shards"] for split in SPLITS}
        entries = {split: [list(shard["files"].values()) for shard in shards[split]] for split in SPLITS}
        return hash_json([self.tokenizer_hash, self.eos_id, entries])

    def tokenizer(self) -> Tokenizer:
        """Load the tokenizer. Raises `UserError` if it is not the one that made the ids."""
        tokenizer = load_tokenizer(self.tokenizer_path)
        if tokenizer.hash != self.tokenizer_hash:
            raise UserError(
                f"{self.tokenizer_path}: not the tokenizer that made the tokens of this folder; put that one back, or "
                f"{REMAKE}"
            )
        return tokenizer

    @functools.cached_property
    def train(self) -> TokenStream:
        """Tokens to train on."""
        return self._stream("train")

    @functools.cached_property
    def eval(self) -> TokenStream:
        """Held-out tokens; there may be none."""
        return self._stream("eval")

    def _stream(self, split: str) -> TokenStream:
        listed = self.manifest["splits"][split]["shards"]
        shards = [Shard(self.folder / shard["name"], shard["documents"], shard["tokens"]) for shard in listed]
        return TokenStream(str(self.folder / split), shards, self.dtype)
