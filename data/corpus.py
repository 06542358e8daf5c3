"""The corpus that a training config names."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from data.config import DataConfig
from data.readers import Source


class Corpus:
    """The documents that `data.corpus` names; see `Source`."""

    def __init__(self, config: DataConfig) -> None:
        paths = [config.corpus] if isinstance(config.corpus, str) else config.corpus
        self.source = Source(paths, config.text_field, input_name="data.corpus", field_name="data.text_field")

    @property
    def files(self) -> list[Path]:
        """The files behind the corpus, in reading order."""
        return self.source.files

    def fingerprint(self) -> str:
        """Hash of the files' kinds and bytes in order."""
        return self.source.fingerprint()

    def documents(self) -> Iterator[str]:
        """Yield the documents one by one, every time in the same order. Raises `UserError` if there is none."""
        return (document.text for document in self.source.documents())
