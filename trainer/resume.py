"""Where a run goes on, and from which checkpoint."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from common.logs import get_logger
from models.config import ModelConfig
from trainer.checkpoint import load_engine
from trainer.config import TrainingConfig
from trainer.engines.base import Engine
from trainer.exchange.initial import load_folder, open_source
from trainer.health import Health
from trainer.manifest import read_trainer_state
from trainer.rundata import RunData
from trainer.rundir import RunDirectory
from trainer.runtime import Runtime
from trainer.start import check_fits, starting_checkpoint


@dataclass(frozen=True)
class Progress:
    """How far a run is: steps, valid tokens seen, the loss scaler, what went wrong; the rest follows from the step."""

    step: int
    tokens: int
    loss_scaler: dict[str, Any] = field(default_factory=dict)  # `Engine.scaler_state()`
    health: Health = field(default_factory=Health)


def trainer_state(config: TrainingConfig, model: ModelConfig, data: RunData, progress: Progress) -> dict[str, Any]:
    """The plain data of a checkpoint."""
    return {
        "step": progress.step,
        "tokens": progress.tokens,
        "loss_scaler": progress.loss_scaler,
        "health": progress.health.state(),
        "model": model.model_dump(mode="json"),
        "config": config.tree(),
        "tokenizer_hash": data.tokenizer_hash,
        "data_hash": data.data_hash_at(config, progress.step),
        "torch": torch.__version__,
    }


def resume(config: TrainingConfig, run: RunDirectory, data: RunData, engine: Engine, runtime: Runtime) -> Progress:
    """Load the run's newest committed checkpoint, or else the one that `checkpoint.resume` names.

    A run that begins has its initial weights, and takes those of `model.init_from` if that is given.

    Raises:
        UserError: a checkpoint that is damaged, or of something else; the line says which.
    """
    # Rank 0 decides: a file system may show other ranks another state.
    choice = [starting_checkpoint(config, run) if runtime.is_main else None]
    dist.broadcast_object_list(choice)
    folder = choice[0]
    if folder is None:
        if config.model.init_from is not None:
            _load_initial_weights(config.model.init_from, data, engine, runtime)
        return Progress(0, 0)
    state = read_trainer_state(folder)
    check_fits(folder, state, config, config.model.with_vocab_size(data.vocab_size), data)
    # The state in a run's own checkpoints is never left behind.
    fresh = not config.checkpoint.load_optimizer and folder.parent != run.checkpoints
    load_engine(folder, engine, runtime, weights_only=fresh)
    engine.load_scaler_state(state.get("loss_scaler", {}))
    if runtime.is_main:
        get_logger().info("resumed from %s%s", folder, ", with a fresh optimizer" if fresh else "")
    return _progress(state)


def load_newest(run: RunDirectory, engine: Engine, runtime: Runtime) -> Progress | None:
    """Load the run's own newest committed checkpoint over what is there; None if it has none."""
    choice = [run.committed()[-1:] if runtime.is_main else []]
    dist.broadcast_object_list(choice)
    if not choice[0]:
        return None
    folder = run.checkpoint(choice[0][0])
    state = read_trainer_state(folder)
    load_engine(folder, engine, runtime)
    engine.load_scaler_state(state["loss_scaler"])
    return _progress(state)


def _progress(state: dict[str, Any]) -> Progress:
    # Checkpoints from before either have none.
    return Progress(state["step"], state["tokens"], state.get("loss_scaler", {}), Health.of(state.get("health", {})))


def _load_initial_weights(where: str, data: RunData, engine: Engine, runtime: Runtime) -> None:
    source = open_source(where)
    if source.folder is None:
        load_engine(source.path, engine, runtime, weights_only=True)
    else:
        state = engine.state_dict()
        weights = {name: tensor for name, tensor in state.items() if name.startswith("model.")}
        load_folder(source.folder, {name.removeprefix("model."): tensor for name, tensor in weights.items()})
        engine.load_state_dict(state)
    if runtime.is_main:
        get_logger().info("initial weights from %s", source.path)
        theirs = source.tokenizer_hash()
        if theirs not in (None, data.tokenizer_hash):
            get_logger().warning(
                "%s has another tokenizer than this run: its weights know token ids by other meanings", source.path
            )
