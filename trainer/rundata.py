"""What a run reads, over all its stages. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from common.files import hash_json
from data.dataset import Dataset
from data.loader import Part, StagedBatches
from data.sources import Sources, check_one_tokenizer, open_sources
from data.tokenizer import Tokenizer
from trainer.config import TrainingConfig


@dataclass(frozen=True)
class RunData:
    """The sources of each stage; all of one tokenizer."""

    stages: tuple[Sources, ...]

    def __post_init__(self) -> None:
        check_one_tokenizer([dataset for sources in self.stages for dataset in sources.datasets])

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return self.stages[0].vocab_size

    @property
    def tokenizer_hash(self) -> str:
        """Hash of all that decides the ids of a text."""
        return self.stages[0].tokenizer_hash

    @property
    def tokenizer_path(self) -> Path:
        """File of the tokenizer."""
        return self.stages[0].tokenizer_path

    def tokenizer(self) -> Tokenizer:
        """Load the tokenizer."""
        return self.stages[0].tokenizer()

    @property
    def data_hash(self) -> str:
        """Hash of all that the run reads."""
        hashes = [sources.data_hash for sources in self.stages]
        return hashes[0] if len(hashes) == 1 else hash_json(hashes)

    def data_hash_at(self, config: TrainingConfig, step: int) -> str:
        """Hash of what the stage of update number `step` reads."""
        return self.stages[config.stage_at(step).number].data_hash

    @property
    def folder(self) -> str:
        """All folders, for the record."""
        return ", ".join(dict.fromkeys(sources.folder for sources in self.stages))


def open_run_data(config: TrainingConfig, show_progress: bool = False) -> RunData:
    """Open, or prepare, what all stages of a config read.

    Raises:
        UserError: whatever is wrong with the corpus or a dataset folder.
    """
    opened: dict[Path, Dataset] = {}

    def open_once(folder: Path) -> Dataset:
        """Stages share what they both read."""
        place = folder.resolve()
        if place not in opened:
            opened[place] = Dataset.open(folder)
        return opened[place]

    prepared: dict[str, Sources] = {}
    for stage in config.plan:
        key = hash_json(stage.config.data.origin())
        if key not in prepared:
            prepared[key] = open_sources(stage.config.data, show_progress, open_once)
    return RunData(tuple(prepared[hash_json(stage.config.data.origin())] for stage in config.plan))


def batches_of(config: TrainingConfig, data: RunData) -> StagedBatches:
    """The batches of all stages. Raises `UserError` for a source that is shorter than a row."""
    stages = [
        Part(sources, stage.config.data, stage.config.train.global_batch_size, stage.steps)
        for stage, sources in zip(config.plan, data.stages, strict=True)
    ]
    return StagedBatches(stages, config.run.seed)
