"""Where a run goes on, and from which checkpoint."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from common.errors import UserError
from common.logs import get_logger
from models.config import ModelConfig
from trainer.config import TrainingConfig, as_this_version_writes, differences
from trainer.engines.base import Engine
from trainer.exchange.initial import load_folder, open_source
from trainer.health import Health
from trainer.load import damage_seen_by_all, load_engine
from trainer.manifest import read_trainer_state
from trainer.rundata import RunData
from trainer.rundir import RunDirectory, is_free, lookup
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
    folder = _choose(config, run, runtime)
    if folder is None:
        if config.model.init_from is not None:
            _load_initial_weights(config.model.init_from, data, engine, runtime)
        return Progress(0, 0)
    state = read_trainer_state(folder)
    check_fits(folder, state, config, config.model.with_vocab_size(data.vocab_size), data)
    # The state in a run's own checkpoints is never left behind.
    own = folder.parent == run.checkpoints
    fresh = not config.checkpoint.load_optimizer and not own
    load_engine(folder, engine, runtime, weights_only=fresh, checked=own)
    engine.load_scaler_state(state.get("loss_scaler", {}))
    if runtime.is_main:
        get_logger().info("resumed from %s%s", folder, ", with a fresh optimizer" if fresh else "")
        changed = [] if own else _changed_keys(config, state["config"])
        for line in changed:
            get_logger().info("  not as in that checkpoint: %s", line)
        run.events.record("resume", step=state["step"], checkpoint=str(folder), fresh_optimizer=fresh, changed=changed)
    return _progress(state)


def load_newest(config: TrainingConfig, run: RunDirectory, engine: Engine, runtime: Runtime) -> Progress | None:
    """Load the run's own newest whole checkpoint over what is there; None if it has none."""
    folder = _choose(config, run, runtime)
    if folder is None or folder.parent != run.checkpoints:
        return None
    state = read_trainer_state(folder)
    load_engine(folder, engine, runtime, checked=True)
    engine.load_scaler_state(state["loss_scaler"])
    return _progress(state)


def _progress(state: dict[str, Any]) -> Progress:
    # Checkpoints from before either have none.
    return Progress(state["step"], state["tokens"], state.get("loss_scaler", {}), Health.of(state.get("health", {})))


def _choose(config: TrainingConfig, run: RunDirectory, runtime: Runtime) -> Path | None:
    """The checkpoint to go on from; of the run's own the newest whole one, and damaged ones are put aside.

    Rank 0 decides: a file system may show other ranks another state.
    """
    while True:
        choice: list[Any] = [None]
        if runtime.is_main:
            try:
                choice = [starting_checkpoint(config, run)]
            except UserError as error:
                choice = [error]
        dist.broadcast_object_list(choice)
        folder: Path | None = choice[0]
        if isinstance(folder, UserError):
            raise folder
        own = folder is not None and folder.parent == run.checkpoints
        found = damage_seen_by_all(folder, runtime) if own and folder is not None else {}
        if runtime.is_main:
            _tell_what_is_passed_over(run, folder if own else None, found)
        if not found:
            return folder


def _tell_what_is_passed_over(run: RunDirectory, folder: Path | None, found: dict[str, str]) -> None:
    """On rank 0: put `folder` aside if anything was `found` damaged; else name what was never committed."""
    step = next((step for step, saved in run.saved().items() if saved == folder), -1)
    if found:
        aside = run.put_aside(step)
        files = ", ".join(f"{name} {what}" for name, what in sorted(found.items()))
        get_logger().warning("%s is DAMAGED: %s; it is now %s, and the one before is taken", folder, files, aside.name)
        run.events.record("damaged", step=step, files=found, renamed=str(aside))
    else:
        for newer, torn in run.saved().items():
            if newer > step:
                get_logger().warning("%s was never committed and is ignored; a later save removes it", torn)


def _changed_keys(config: TrainingConfig, theirs: dict[str, Any]) -> list[str]:
    """Keys that change numbers and are not as in another run's config, with both values."""
    ours, theirs = config.tree(), as_this_version_writes(TrainingConfig, theirs)
    keys = [key for key in differences(ours, theirs) if not is_free(key) and key not in ("run.name", "model.preset")]
    return [f"{key} is {lookup(ours, key)}, was {lookup(theirs, key)}" for key in keys]


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
