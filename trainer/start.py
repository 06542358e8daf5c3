"""Where a run starts from, and whether it can: checked before processes are started. Imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from common.errors import UserError
from models.config import ModelConfig
from trainer.config import TrainingConfig, as_this_version_writes, differences
from trainer.exchange.initial import open_source
from trainer.manifest import read_trainer_state, state_damage
from trainer.rundata import RunData, batches_of
from trainer.rundir import RunDirectory, find_checkpoint, run_directory


def starting_checkpoint(config: TrainingConfig, run: RunDirectory) -> Path | None:
    """The run's newest committed checkpoint, or else the one that `checkpoint.resume` names; None: a new run.

    Raises:
        UserError: there is no checkpoint where `checkpoint.resume` points, or none that is whole is left of the run's.
    """
    if steps := run.committed():
        return run.checkpoint(steps[-1])
    if damaged := run.damaged():
        raise UserError(
            f"{run.path} has no whole checkpoint left: {', '.join(path.name for path in damaged)}; bring one again "
            f"from where a good copy is and take .damaged off its name, or remove them all to start from the beginning"
        )
    if config.checkpoint.resume in ("auto", "never"):
        return None
    try:
        return find_checkpoint(Path(config.checkpoint.resume).expanduser())
    except UserError as error:
        raise UserError(f"'checkpoint.resume': {error}") from None


def evaluation_is_due(config: TrainingConfig, step: int) -> bool:
    """Whether a run evaluates after update number `step`."""
    return config.eval.batches > 0 and (step == config.train.steps or step % config.eval.every == 0)


def owes_evaluation(config: TrainingConfig, run: RunDirectory, step: int) -> bool:
    """Whether a checkpoint of the run's own was saved in place of the evaluation that was due, as a stop was asked."""
    if step not in run.committed() or not evaluation_is_due(config, step):
        return False
    return not any(row["step"] == step and "eval_loss" in row for row in run.read_metrics())


def check_start(config: TrainingConfig, run: RunDirectory, data: RunData) -> None:
    """Refuse what would fail later: a rule that is not there, a corpus without a whole row, a checkpoint of another."""
    if config.optim.is_own_rule:
        from optim.build import make_rule  # which imports torch

        make_rule(config.optim)
    batches = batches_of(config, data)
    if config.eval.batches:
        for stage in batches.stages:
            stage.check_held_out()
    if config.train.sample_prompt is not None:
        n_tokens = len(data.tokenizer().encode([config.train.sample_prompt])[0])
        if n_tokens >= config.model.max_seq_len:
            raise UserError(
                f"'train.sample_prompt' is {n_tokens} tokens long but 'model.max_seq_len' is "
                f"{config.model.max_seq_len}; shorten the prompt"
            )
    model = config.model.with_vocab_size(data.vocab_size)
    folder = starting_checkpoint(config, run)
    if own := run.committed():
        # Damage is for the workers to find, who read every byte, and go on from the one before.
        newest_first = (run.checkpoint(step) for step in reversed(own))
        folder = next((folder for folder in newest_first if not state_damage(folder)), None)
    if folder is not None:
        check_fits(folder, read_trainer_state(folder), config, model, data)
    elif (
        not own
        and config.model.init_from is not None
        and (source := open_source(config.model.init_from)).folder is not None
    ):
        source.folder.tensors()


def check_fits(folder: Path, state: dict[str, Any], config: TrainingConfig, model: ModelConfig, data: RunData) -> None:
    """Refuse a checkpoint that this config cannot go on from.

    Raises:
        UserError: a checkpoint of another architecture, optimizer, tokenizer or corpus; the line says which.
    """
    if state.get("weights_only"):
        raise UserError(
            f"{folder} has weights alone, without the state of an optimizer, so that no run can go on from it; "
            f"start a new run with model.init_from={folder}"
        )
    ours, theirs = model.model_dump(mode="json"), as_this_version_writes(ModelConfig, state["model"])
    changed = [key for key in differences(ours, theirs) if key not in ("preset", "init_from")]
    if changed:
        key = changed[0]
        raise UserError(
            f"{folder} is a checkpoint of another architecture: its 'model.{key}' is {theirs.get(key)}, "
            f"not {ours.get(key)}; set model.{key}={theirs.get(key)}, or choose another checkpoint"
        )
    optimizer = state["config"]["optim"]["name"]
    if optimizer != config.optim.name and config.checkpoint.load_optimizer:
        raise UserError(
            f"{folder} is a checkpoint of another optimizer: its 'optim.name' is {optimizer}, not {config.optim.name}; "
            f"set optim.name={optimizer}, or checkpoint.load_optimizer=false to go on with a fresh optimizer"
        )
    hashes = {"tokenizer_hash": data.tokenizer_hash, "data_hash": data.data_hash_at(config, state["step"])}
    for key, what in (("tokenizer_hash", "tokenizer"), ("data_hash", "corpus")):
        if state[key] != hashes[key]:
            raise UserError(
                f"{folder} was trained with another {what} than this config gives now; "
                f"restore the {what}, or start anew under another run.name"
            )
    # The run's own is at the last step where its evaluation is what is left to do.
    if state["step"] >= config.train.steps + (folder.parent == run_directory(config).checkpoints):
        raise UserError(
            f"{folder} has {state['step']} steps already and 'train.steps' is {config.train.steps}; "
            f"set train.steps to more, or choose another checkpoint"
        )
