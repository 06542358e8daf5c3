"""Where a run goes on, and from which checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from common.errors import UserError
from common.logs import get_logger
from data.prepare import PreparedData
from models.config import ModelConfig
from trainer.checkpoint import load_engine, read_trainer_state
from trainer.config import TrainingConfig, differences
from trainer.engines.base import Engine
from trainer.rundir import RunDirectory, find_checkpoint
from trainer.runtime import Runtime


@dataclass(frozen=True)
class Progress:
    """How far a run is: updates made, valid tokens seen. Everything else is a function of the step."""

    step: int
    tokens: int


def trainer_state(config: TrainingConfig, model: ModelConfig, data: PreparedData, progress: Progress) -> dict[str, Any]:
    """The plain data of a checkpoint."""
    return {
        "step": progress.step,
        "tokens": progress.tokens,
        "model": model.model_dump(mode="json"),
        "config": config.tree(),
        "tokenizer_hash": data.tokenizer_hash,
        "data_hash": data.data_hash,
        "torch": torch.__version__,
    }


def resume(config: TrainingConfig, run: RunDirectory, data: PreparedData, engine: Engine, runtime: Runtime) -> Progress:
    """Load the run's newest committed checkpoint, or else the one that `checkpoint.resume` names.

    Raises:
        UserError: a checkpoint of another architecture, tokenizer or corpus; the line says which.
    """
    steps = run.committed()
    if steps:
        folder = run.checkpoint(steps[-1])
    elif config.checkpoint.resume not in ("auto", "never"):
        folder = find_checkpoint(Path(config.checkpoint.resume))
    else:
        return Progress(0, 0)
    state = read_trainer_state(folder)
    _check_architecture(folder, state["model"], config.model.with_vocab_size(data.vocab_size))
    for key, what in (("tokenizer_hash", "tokenizer"), ("data_hash", "corpus")):
        if state[key] != getattr(data, key):
            raise UserError(
                f"{folder} was trained with another {what} than this config gives now; "
                f"restore the {what}, or start anew under another run.name"
            )
    load_engine(folder, engine, runtime)
    if runtime.is_main:
        get_logger().info("resumed from %s", folder)
    return Progress(state["step"], state["tokens"])


def _check_architecture(folder: Path, theirs: dict[str, Any], model: ModelConfig) -> None:
    ours = model.model_dump(mode="json")
    changed = [key for key in differences(ours, theirs) if key != "preset"]
    if changed:
        key = changed[0]
        raise UserError(
            f"{folder} is a checkpoint of another architecture: its 'model.{key}' is {theirs.get(key)}, "
            f"not {ours.get(key)}; set model.{key}={theirs.get(key)}, or choose another checkpoint"
        )
