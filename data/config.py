"""The `data:` section of the configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, SerializerFunctionWrapHandler, field_validator, model_serializer, model_validator

from common.config import Config
from common.errors import UserError
from data.order import DEFAULT_WINDOW, Shuffle

BUILTIN_CORPUS = "python-stdlib"
DEFAULT_VOCAB_SIZE = 4096
MIN_VOCAB_SIZE = 300  # 256 byte pieces + 2 specials, and some room for characters
N_BYTE_IDS = 257  # of the tokenizer of bytes: each byte, and the end of a document

# Megatron's writer takes 16 bits below 65,500 ids, not 65,536; the same cut-off keeps our files the same as its own.
_AUTO_UINT16_BELOW = 65_500
_UINT16_IDS = 65_536
# Keys that say how a dataset folder is made of a corpus; a folder that is there already has no use for them.
_OF_CORPUS = ("corpus", "text_field", "tokenizer", "eval_fraction", "dtype", "cache_dir")
ORIGIN_KEYS = (*_OF_CORPUS, "path", "mixture")  # what says where the tokens are from

PackingName = Literal["concat", "pad", "best_fit"]


class TokenizerConfig(Config):
    """How text becomes token ids."""

    kind: Literal["sentencepiece", "bytes", "file"] = Field(
        default="sentencepiece",
        description="`sentencepiece` trains a model with byte fallback on the corpus, so that every text can be "
        "encoded and decoded exactly; `bytes` takes each byte for a token, and a 257th for the end of a document; "
        "`file` reads `path`, and is the default where that is given.",
    )
    model: Literal["bpe", "unigram"] = Field(
        default="bpe", description="What `sentencepiece` trains: byte-pair encoding, or a unigram language model."
    )
    vocab_size: int | None = Field(
        default=DEFAULT_VOCAB_SIZE,
        description="Number of token ids that `sentencepiece` trains, 300 or more: 256 single bytes and 2 special "
        "tokens (unknown, end of document) are part of it; rounding the model's embedding up is the model's affair. "
        "The other kinds have a number of their own, and `null` here.",
    )
    path: str | None = Field(
        default=None,
        description="Tokenizer to use instead of training one: a SentencePiece `.model` or a Hugging Face "
        "`tokenizer.json`, or a folder with one.",
    )
    eos: str | None = Field(
        default=None,
        description="Special token of `path` that ends a document; by default the one that the file says, else the "
        "first of `</s>`, `<|endoftext|>`, `<eos>`, `<|end_of_text|>` that it has.",
    )

    @model_validator(mode="before")
    @classmethod
    def _defaults_by_kind(cls, tree: Any) -> Any:
        """`path` alone says the kind; only what is trained has a size to choose."""
        if not isinstance(tree, dict):
            return tree
        if tree.get("path") is not None:
            tree = {"kind": "file", **tree}
        if tree.get("kind", "sentencepiece") != "sentencepiece":
            tree = {"vocab_size": None, **tree}
        return tree

    @field_validator("vocab_size")
    @classmethod
    def _room_for_bytes(cls, value: int | None) -> int | None:
        if value is not None and value < MIN_VOCAB_SIZE:
            raise ValueError(
                f"{value} is too small: byte fallback needs 256 pieces and 2 specials beside the characters; "
                f"give {MIN_VOCAB_SIZE} or more"
            )
        return value

    @model_validator(mode="after")
    def _keys_of_the_kind(self) -> TokenizerConfig:
        trained = self.kind == "sentencepiece"
        if self.path is not None and self.kind != "file":
            raise ValueError(f"'path' is a tokenizer to use, and kind is {self.kind}; leave out one of them")
        if self.path is None and self.kind == "file":
            raise ValueError("kind is file, but there is no 'path'; give it")
        if trained and self.vocab_size is None:
            raise ValueError(f"'vocab_size' must be a whole number for kind {self.kind}, got null")
        if not trained and self.vocab_size is not None:
            raise ValueError(f"'vocab_size' is not to choose for kind {self.kind}; leave it out, or set it to null")
        if self.eos is not None and self.path is None:
            raise ValueError("'eos' names a token of 'path', which is not given; leave it out")
        return self

    @property
    def known_size(self) -> int | None:
        """Number of token ids as far as it is known without reading a file."""
        return N_BYTE_IDS if self.kind == "bytes" else self.vocab_size


class SourceConfig(Config):
    """One source of a mixture."""

    path: str = Field(description="Dataset folder, as `gramian tokenize` makes it.")
    weight: float = Field(description="Share of the samples, relative to the other weights; above 0.")

    @model_validator(mode="after")
    def _something_of_it(self) -> SourceConfig:
        if self.weight <= 0:
            raise ValueError(f"the weight of {self.path} must be above 0, got {self.weight:g}; or leave the source out")
        return self


class ShuffleConfig(Config):
    """How the rows of an epoch are shuffled."""

    block: int | None = Field(
        default=None,
        ge=1,
        description="Rows that follow one another on disk and are read close together, for a slow file system: blocks "
        "are shuffled, and rows within a window of blocks; `null`: every row may come anywhere in the epoch.",
    )
    window: int | None = Field(
        default=None, ge=1, description=f"With `block`: blocks in a window; absent: {DEFAULT_WINDOW}."
    )

    @model_validator(mode="after")
    def _window_of_blocks(self) -> ShuffleConfig:
        if self.window is not None and self.block is None:
            raise ValueError("'window' does nothing without 'block'; give both, or remove it")
        return self

    def order(self) -> Shuffle:
        """As a function."""
        return Shuffle(self.block, DEFAULT_WINDOW if self.window is None else self.window)


class DataConfig(Config):
    """What is read, and how it is cut into rows."""

    path: str | None = Field(
        default=None,
        description="Dataset folder to train on, as `gramian tokenize` makes it, instead of `corpus`; of the keys of "
        "this section that follow, only `seq_len`, `packing`, `document_mask` and `shuffle` then have a meaning.",
    )
    mixture: list[SourceConfig] = Field(
        default_factory=list,
        description="Several dataset folders instead of one, made with one tokenizer: a list of `{path: DIR, weight: "
        "W}`. After any number of samples each source has its share of them to within one.",
    )
    corpus: str | list[str] = Field(
        default=BUILTIN_CORPUS,
        description="`python-stdlib` (the running interpreter's own library sources, nothing to download), or one "
        "path or a list of paths to .txt files (a document each), .jsonl, .jsonl.gz or .jsonl.zst files (a document a "
        "line), .parquet or .arrow files (a document a row), folders or globs of these, or `hf:NAME[:CONFIG][:SPLIT]`, "
        "a dataset of the Hugging Face hub or a folder of one.",
    )
    text_field: str = Field(
        default="text",
        description="Key or column that holds the document, in each object of a .jsonl file and each row of a table.",
    )
    tokenizer: TokenizerConfig = Field(
        default=TokenizerConfig(), description="Tokenizer, trained on the training part of the corpus."
    )
    seq_len: int = Field(default=256, ge=1, description="Number of tokens in one row, that is, predictions per row.")
    packing: PackingName = Field(
        default="concat",
        description="How documents fill rows: `concat` cuts the stream of all documents, separated by end-of-document "
        "tokens, into rows without a gap; `pad` starts every document on a row of its own and masks the rest of its "
        "last row out of the loss; `best_fit` puts whole documents together so that they fill rows, and cuts only "
        "those that are longer than a row.",
    )
    document_mask: bool = Field(
        default=False,
        description="Whether the documents of a row are kept apart: attention and positions stay within a document, "
        "and no document's first token is predicted from the one before it. If not, a token sees all that comes before "
        "it in its row.",
    )
    shuffle: ShuffleConfig = Field(default=ShuffleConfig(), description="The order of rows in an epoch.")
    eval_fraction: float = Field(
        default=0.02,
        gt=0.0,
        lt=0.5,
        description="Share of documents held out for evaluation, chosen by a hash of their content, at least one; of "
        "a corpus of one document this share of its end is held out.",
    )
    dtype: Literal["auto", "uint16", "int32"] = Field(
        default="auto",
        description="Type of a token id on disk; `auto` is uint16 below 65,500 ids and int32 from there on, as in "
        "Megatron.",
    )
    cache_dir: str | None = Field(
        default=None,
        description="Folder for tokenizers and token files, shared between runs; by default that of the environment "
        "variable GRAMIAN_CACHE, else ~/.cache/gramian.",
    )

    @field_validator("corpus", mode="before")
    @classmethod
    def _path_or_paths(cls, value: Any) -> Any:
        paths = value if isinstance(value, list) else [value]
        if not paths or not all(isinstance(path, str) and path for path in paths):
            raise ValueError(f"{value!r} is neither '{BUILTIN_CORPUS}' nor a path nor a list of paths")
        return value

    @model_validator(mode="after")
    def _ids_fit(self) -> DataConfig:
        size = self.tokenizer.known_size
        if self.dtype == "uint16" and size is not None and size > _UINT16_IDS:
            raise UserError(
                f"data.dtype: uint16 holds {_UINT16_IDS:,} token ids and data.tokenizer.vocab_size is "
                f"{size:,}; set data.dtype to int32 or auto"
            )
        return self

    @model_validator(mode="after")
    def _one_origin(self) -> DataConfig:
        if self.path is None and not self.mixture:
            return self
        origin = "mixture" if self.mixture else "path"
        given = self.model_fields_set
        if unread := [key for key in (*_OF_CORPUS, "path") if key in given and key != origin]:
            raise ValueError(f"'{unread[0]}' does nothing beside '{origin}', which holds tokens already; remove it")
        folders = [Path(source.path).expanduser().resolve() for source in self.mixture]
        if twice := [n for n, folder in enumerate(folders) if folder in folders[:n]]:
            name = self.mixture[twice[0]].path
            raise ValueError(f"{name} is in 'mixture' twice; give it once, with the sum of its weights")
        return self

    @model_serializer(mode="wrap")
    def _without_unread_keys(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """A resolved config holds what it can be read from again."""
        tree: dict[str, Any] = serialize(self)
        return {
            key: value
            for key, value in tree.items()
            if self.reads_corpus or (key not in _OF_CORPUS and (key != "path" or self.path is not None))
        }

    def origin(self) -> dict[str, Any]:
        """The keys that say where the tokens are from, as plain data."""
        tree = self.model_dump(mode="json")
        return {key: tree[key] for key in ORIGIN_KEYS if key in tree}

    @property
    def reads_corpus(self) -> bool:
        """Whether the tokens are to be made of `corpus`, and not in dataset folders already."""
        return self.path is None and not self.mixture

    @property
    def known_vocab_size(self) -> int | None:
        """Number of token ids as far as it is known without reading a file."""
        return self.tokenizer.known_size if self.reads_corpus else None

    @property
    def token_dtype(self) -> Literal["uint16", "int32"]:
        """`dtype` with `auto` resolved by the vocabulary's size, which must be known without reading a file."""
        if self.dtype != "auto":
            return self.dtype
        assert self.tokenizer.known_size is not None
        return "uint16" if self.tokenizer.known_size < _AUTO_UINT16_BELOW else "int32"
