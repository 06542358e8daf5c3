"""Fixtures of the data tests: prepared small corpora, a tokenizer, and token files made from plain lists."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from data.config import DataConfig, TokenizerConfig
from data.prepare import PreparedData, prepare
from data.shards import TokenFile, TokenWriter
from data.tokenizer import Tokenizer
from tests.data.jobs import job, run


@pytest.fixture(scope="session")
def config(corpus: Path) -> DataConfig:
    """A configuration for the small corpus."""
    return DataConfig(corpus=str(corpus), tokenizer=TokenizerConfig(vocab_size=600), seq_len=64)


@pytest.fixture(scope="session")
def prepared(config: DataConfig, cache: Path) -> PreparedData:
    """The small corpus, prepared."""
    return prepare(config)


@pytest.fixture(scope="session")
def tokenizer(prepared: PreparedData) -> Tokenizer:
    """The small corpus' tokenizer."""
    return prepared.tokenizer()


@pytest.fixture(scope="session")
def texts(corpus: Path) -> list[str]:
    """The documents of the small corpus."""
    return [path.read_text(encoding="utf-8") for path in sorted(corpus.iterdir())]


@pytest.fixture
def token_file(tmp_path: Path) -> Callable[..., TokenFile]:
    """Make a token file of the documents given as lists of ids."""

    def make(*documents: list[int], dtype: str = "uint16") -> TokenFile:
        with TokenWriter(tmp_path / "tokens", dtype) as writer:
            for document in documents:
                writer.append(document)
        return TokenFile(tmp_path / "tokens")

    return make


@pytest.fixture(scope="session")
def unbroken(paragraphs: Path, tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The paragraphs in many small shards, tokenized in one go by one process."""
    folder = tmp_path_factory.mktemp("unbroken") / "tokens"
    run(folder, job([paragraphs], tokenizer))
    return folder


@pytest.fixture
def no_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    """A killed process loses nothing that the kernel has: without waiting for the disk, tests of that show the same."""
    monkeypatch.setattr(os, "fsync", lambda _: None)
