"""Stages of a run, as data: what changes at given token counts. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydantic import Field

from common.config import Config
from data.config import ORIGIN_KEYS, PackingName, ShuffleConfig, SourceConfig
from optim.config import ScheduleConfig

if TYPE_CHECKING:
    from trainer.config import TrainingConfig


class StageData(Config):
    """What a stage reads differently."""

    path: str | None = Field(None, description="Another dataset folder, in place of the data that the config names.")
    mixture: list[SourceConfig] | None = Field(None, description="Other dataset folders and weights, likewise.")
    seq_len: int | None = Field(None, ge=1, description="Another number of tokens in one row.")
    packing: PackingName | None = Field(None, description="Another packing.")
    document_mask: bool | None = Field(None, description="Whether the documents of a row are kept apart.")
    shuffle: ShuffleConfig | None = Field(None, description="Another order of rows, given whole.")


class StageTrain(Config):
    """What batches a stage has."""

    global_batch_size: int | None = Field(None, ge=1, description="Another number of sequences per update.")
    micro_batch_size: int | None = Field(None, ge=1, description="Another number of sequences per rank and pass.")


class StageOptim(Config):
    """What a stage changes of the optimizer."""

    lr: float | None = Field(None, gt=0, description="Another peak learning rate.")


class StageConfig(Config):
    """One stage: its length, and the keys that differ in it from the rest of the config."""

    tokens: int = Field(
        ge=1,
        description="Length, counted in positions, which are tokens unless rows have padding: the stage has "
        "tokens / (train.global_batch_size x data.seq_len) steps, rounded down, at least one.",
    )
    data: StageData = Field(StageData(), description="What is read.")
    train: StageTrain = Field(StageTrain(), description="Batches.")
    optim: StageOptim = Field(StageOptim(), description="The optimizer.")
    schedule: ScheduleConfig | None = Field(
        None,
        description="A schedule of the stage's own, given whole, over its own steps; absent: `schedule` goes on, over "
        "the steps of the whole run.",
    )

    def laid_over(self, tree: dict[str, Any]) -> dict[str, Any]:
        """The config of the stage as plain data, from that of the run: one without stages, of the stage's steps."""
        ours = self.model_dump(mode="json", exclude_none=True)
        result = {section: dict(keys) for section, keys in tree.items() if section != "stages"}
        if ours["data"].keys() & {"path", "mixture"}:
            for key in ORIGIN_KEYS:
                result["data"].pop(key, None)
        for section in ("data", "train", "optim"):
            result[section] |= ours[section]
        if self.schedule is not None:
            result["schedule"] = ours["schedule"]
        result["train"]["steps"] = max(
            1, self.tokens // (result["train"]["global_batch_size"] * result["data"]["seq_len"])
        )
        return result


@dataclass(frozen=True)
class Stage:
    """Where a stage lies in a run, and what holds in it."""

    number: int  # from 0
    first: int  # updates before it
    config: TrainingConfig  # one without stages, whose train.steps are the stage's
    own_schedule: bool

    @property
    def steps(self) -> int:
        """Updates of the stage."""
        return self.config.train.steps
