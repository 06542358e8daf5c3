"""What a `data:` section reads: one dataset folder, or several with weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from common.errors import UserError
from common.files import hash_json
from data.config import DataConfig
from data.dataset import Dataset
from data.prepare import prepare
from data.tokenizer import Tokenizer


@dataclass(frozen=True)
class Sources:
    """Datasets of one tokenizer and their weights; a single dataset has weight 1."""

    datasets: tuple[Dataset, ...]
    weights: tuple[float, ...] = (1.0,)

    def __post_init__(self) -> None:
        check_one_tokenizer(self.datasets)
        by_content: dict[str, Dataset] = {}
        for dataset in self.datasets:
            if (other := by_content.setdefault(dataset.data_hash, dataset)) is not dataset:
                raise UserError(
                    f"data.mixture: {other.folder} and {dataset.folder} hold the same tokens; give one of them, with "
                    "the sum of the weights"
                )

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return self.datasets[0].vocab_size

    @property
    def eos_id(self) -> int:
        """Id that ends every document."""
        return self.datasets[0].eos_id

    @property
    def tokenizer_hash(self) -> str:
        """Hash of all that decides the ids of a text."""
        return self.datasets[0].tokenizer_hash

    @property
    def tokenizer_path(self) -> Path:
        """File of the tokenizer."""
        return self.datasets[0].tokenizer_path

    def tokenizer(self) -> Tokenizer:
        """Load the tokenizer."""
        return self.datasets[0].tokenizer()

    @property
    def data_hash(self) -> str:
        """Hash of all tokens, wherever the folders lie; of a single dataset it is that one's own."""
        hashes = [dataset.data_hash for dataset in self.datasets]
        return hashes[0] if len(hashes) == 1 else hash_json(hashes)

    @property
    def folder(self) -> str:
        """The folders, for the record."""
        return ", ".join(str(dataset.folder) for dataset in self.datasets)


def open_sources(
    config: DataConfig, show_progress: bool = False, open_folder: Callable[[Path], Dataset] = Dataset.open
) -> Sources:
    """Open the dataset folders of a config, or prepare its corpus first.

    Raises:
        UserError: a folder that is damaged or no dataset, or folders of different tokenizers.
    """
    if config.reads_corpus:
        return Sources((prepare(config, show_progress),))
    if config.path is not None:
        return Sources((open_folder(Path(config.path).expanduser()),))
    datasets = tuple(open_folder(Path(source.path).expanduser()) for source in config.mixture)
    return Sources(datasets, tuple(source.weight for source in config.mixture))


def check_one_tokenizer(datasets: Sequence[Dataset]) -> None:
    """Refuse datasets whose ids do not mean the same."""
    first = datasets[0]
    for other in datasets[1:]:
        if (other.tokenizer_hash, other.eos_id) != (first.tokenizer_hash, first.eos_id):
            raise UserError(
                f"{other.folder} was made with another tokenizer than {first.folder}; make one of them again with the "
                "tokenizer of the other (gramian tokenize --tokenizer)"
            )
