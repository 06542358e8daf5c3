"""The `data:` section of the configuration."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from common.config import Config
from common.errors import UserError

BUILTIN_CORPUS = "python-stdlib"
MIN_VOCAB_SIZE = 300  # 256 byte pieces + 2 specials, and some room for characters

# Megatron's writer takes 16 bits below 65,500 ids, not 65,536; the same cut-off keeps our files the same as its own.
_AUTO_UINT16_BELOW = 65_500
_UINT16_IDS = 65_536


class TokenizerConfig(Config):
    """How text becomes token ids."""

    kind: Literal["sentencepiece"] = Field(
        default="sentencepiece",
        description="Tokenizer family; `sentencepiece` trains a byte-pair encoding with byte fallback on the corpus, "
        "so that every text can be encoded and decoded exactly.",
    )
    vocab_size: int = Field(
        default=4096,
        description="Number of token ids, 300 or more: 256 single bytes and 2 special tokens (unknown, end of "
        "document) are part of it; rounding the model's embedding up is the model's affair.",
    )

    @field_validator("vocab_size")
    @classmethod
    def _room_for_bytes(cls, value: int) -> int:
        if value < MIN_VOCAB_SIZE:
            raise ValueError(
                f"{value} is too small: byte fallback needs 256 pieces and 2 specials beside the characters; "
                f"give {MIN_VOCAB_SIZE} or more"
            )
        return value


class DataConfig(Config):
    """What is read, and how it is cut into rows."""

    corpus: str | list[str] = Field(
        default=BUILTIN_CORPUS,
        description="`python-stdlib` (the running interpreter's own library sources, nothing to download), or one "
        "path or a list of paths to .txt files (a document each), .jsonl files (a document a line) or folders of them.",
    )
    text_field: str = Field(default="text", description="Key that holds the document in each object of a .jsonl file.")
    tokenizer: TokenizerConfig = Field(
        default=TokenizerConfig(), description="Tokenizer, trained on the training part of the corpus."
    )
    seq_len: int = Field(default=256, ge=1, description="Number of tokens in one row, that is, predictions per row.")
    packing: Literal["concat", "pad"] = Field(
        default="concat",
        description="How documents fill rows: `concat` cuts the stream of all documents, separated by end-of-document "
        "tokens, into rows without a gap; `pad` starts every document on a row of its own and masks the rest of its "
        "last row out of the loss.",
    )
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
        if self.dtype == "uint16" and self.tokenizer.vocab_size > _UINT16_IDS:
            raise UserError(
                f"data.dtype: uint16 holds {_UINT16_IDS:,} token ids and data.tokenizer.vocab_size is "
                f"{self.tokenizer.vocab_size:,}; set data.dtype to int32 or auto"
            )
        return self

    @property
    def token_dtype(self) -> Literal["uint16", "int32"]:
        """`dtype` with `auto` resolved by the vocabulary's size."""
        if self.dtype != "auto":
            return self.dtype
        return "uint16" if self.tokenizer.vocab_size < _AUTO_UINT16_BELOW else "int32"
