"""The whole configuration tree, put together from each package's part. Imports no torch."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import Field, PrivateAttr, ValidationError, field_validator, model_validator

from common.config import Config, apply_overrides, read_tree, validate
from common.errors import UserError
from data.config import DataConfig
from models.config import ModelConfig
from optim.config import OptimConfig, ScheduleConfig
from trainer.parallel_config import ParallelConfig
from trainer.stages import Stage, StageConfig


class RunConfig(Config):
    """Where the run lives, and its seed."""

    name: str = Field("run", description="Name of the run, and of its folder under `run.dir`.")
    dir: str = Field("runs", description="Folder of all runs, relative to the working directory.")
    seed: int = Field(0, ge=0, lt=2**63, description="Seed of the initial weights and of the order of the data.")

    @field_validator("name")
    @classmethod
    def _is_a_folder_name(cls, name: str) -> str:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
            raise ValueError(
                f"must be a plain folder name of letters, digits, '.', '_' and '-', got {name!r}; "
                f"the folder it lies in is run.dir"
            )
        return name

    @property
    def folder(self) -> Path:
        """The run directory."""
        return Path(self.dir).expanduser() / self.name


class TrainConfig(Config):
    """How long and in what pieces to train."""

    steps: int = Field(
        1000, ge=1, description="Optimizer updates of the whole run; with `stages` they follow from these."
    )
    global_batch_size: int = Field(32, ge=1, description="Sequences per update over all ranks, whatever the layout.")
    micro_batch_size: int = Field(8, ge=1, description="Sequences per rank in one forward and backward pass.")
    grad_clip: float | None = Field(
        1.0,
        gt=0,
        description="Largest gradient norm over all parameters; larger gradients are scaled down; null: none.",
    )
    precision: Literal["fp32", "bf16", "fp16"] = Field(
        "fp32",
        description="Precision of matrix products and activations; weights, optimizer state and sums of gradients are "
        "fp32 in all. fp16 scales the loss, and skips updates whose gradients overflow.",
    )
    loss_scale_init: float | None = Field(
        None, ge=1, description="fp16: the factor on the loss at the start; absent: 2^16."
    )
    loss_scale_interval: int | None = Field(
        None, ge=1, description="fp16: updates in a row without overflow that double the factor; absent: 2000."
    )
    activation_checkpointing: Literal["none", "full", "selective"] = Field(
        "none",
        description="What the backward pass computes again to save memory. full: a whole block, of which only the "
        "input is kept; selective: the MLP's wide products and everything elementwise, while attention and its "
        "projections are kept.",
    )
    activation_checkpointing_every: int = Field(
        1,
        ge=1,
        description="full, selective: only blocks 0, n, 2n, ... are computed again; from model.n_layers on only the "
        "first.",
    )
    compile: bool = Field(False, description="Compile each block with torch.compile.")
    deterministic: bool = Field(
        False,
        description="Use only algorithms that give the same bits every time, and refuse operators that have none; "
        "slower on a GPU. `gramian certify --repeat` checks it.",
    )
    max_skipped_steps: int = Field(
        10,
        ge=1,
        description="Updates skipped in a row, because loss or gradient norm is not finite, at which the run ends.",
    )
    spike_score: float | None = Field(
        10.0,
        gt=0,
        description="Loss spikes are reported from here on: robust standard deviations above the median of the last "
        "64 losses; null: none.",
    )
    on_spike: Literal["report", "roll_back"] = Field(
        "report",
        description="roll_back: after a spike go back to the newest checkpoint, and on with the batches that follow: "
        "those since then are left out.",
    )
    max_roll_backs: int | None = Field(
        None, ge=1, description="roll_back: how often in a run; later spikes are only reported; absent: 3."
    )
    sample_prompt: str | None = Field(
        None, description="Text that the trained model continues when the run ends; null: no sample."
    )
    max_hours: float | None = Field(
        None,
        gt=0,
        description="Stop, with a checkpoint, before this time from the start is over; null: no limit but the end of "
        "the SLURM job, if this is one.",
    )
    hang_minutes: float | None = Field(
        15.0,
        gt=0,
        description="A rank that is longer at one step's data, at its computation or at a batch of an evaluation is "
        "taken to hang, and the processes end so that the launcher can begin anew. Three times as long for set-up, the "
        "first step and saves. null: no watch.",
    )

    @model_validator(mode="after")
    def _check(self) -> TrainConfig:
        for key in ("loss_scale_init", "loss_scale_interval"):
            if getattr(self, key) is not None and self.precision != "fp16":
                raise ValueError(
                    f"'{key}' does nothing under precision: {self.precision} (it belongs to fp16); remove it"
                )
        if self.on_spike == "roll_back" and self.spike_score is None:
            raise ValueError("'on_spike: roll_back' needs spikes to be looked for; set spike_score")
        if self.on_spike == "report" and self.max_roll_backs is not None:
            raise ValueError(
                "'max_roll_backs' does nothing under on_spike: report (it belongs to roll_back); remove it"
            )
        if self.activation_checkpointing_every > 1 and self.activation_checkpointing == "none":
            raise ValueError(
                "'activation_checkpointing_every' does nothing under activation_checkpointing: none "
                "(it belongs to full, selective); remove it"
            )
        return self


class CheckpointConfig(Config):
    """When to save, what to keep, where to continue."""

    every: int | None = Field(
        100, ge=1, description="Steps between checkpoints; null: none by steps. The last step is always saved."
    )
    every_minutes: float | None = Field(
        None, gt=0, description="Also save when this many minutes have passed since the save before; null: do not."
    )
    keep: int = Field(3, ge=1, description="Newest committed checkpoints to keep.")
    keep_every: int = Field(
        0, ge=0, description="Also save at multiples of this step, and keep those for good; 0: none."
    )
    async_: bool = Field(True, alias="async", description="Write in the background while training goes on.")
    when_busy: Literal["wait", "skip"] = Field(
        "wait",
        description="What to do when a save is due and the one before is still being written. skip: leave it out, "
        "unless it is the last one of the run or one that is kept for good.",
    )
    max_failures: int = Field(
        3,
        ge=1,
        description="Saves that fail in a row, for example for want of room, after which the run ends. Before that "
        "training goes on.",
    )
    resume: str = Field(
        "auto",
        description="auto: continue from the newest committed checkpoint of this run; never: refuse a run that "
        "has one; a path: start this run from that checkpoint.",
    )
    load_optimizer: bool = Field(
        True,
        description="false: of the checkpoint that `resume` names take weights, step and position in the data, and "
        "begin with a fresh optimizer.",
    )


class EvalConfig(Config):
    """Evaluation on the held-out documents."""

    every: int = Field(100, ge=1, description="Steps between evaluations; the last step is always evaluated.")
    batches: int = Field(8, ge=0, description="Global batches per evaluation; 0: no evaluation.")


class LogConfig(Config):
    """What is reported."""

    every: int = Field(1, ge=1, description="Steps between rows of metrics.jsonl and lines on the terminal.")
    spectra_every: int = Field(
        0,
        ge=0,
        description="Steps between rows with singular values of gradients, weights and updates; 0: none.",
    )


class LaunchConfig(Config):
    """Starting processes, and starting them again."""

    max_restarts: int = Field(
        3,
        ge=0,
        description="With --nproc 2 or more: how often processes are started again, from the newest checkpoint, after "
        "one died, hung or failed.",
    )
    preflight: bool = Field(
        False,
        description="Check versions, clocks and the speed between ranks before training, as `gramian doctor --nodes` "
        "does.",
    )


class TrainingConfig(Config):
    """One training run, from corpus to checkpoint."""

    run: RunConfig = Field(RunConfig(), description="Name, place and seed.")
    model: ModelConfig = Field(ModelConfig(), description="The decoder's architecture.")
    data: DataConfig = Field(DataConfig(), description="Corpus, tokenizer and sequences.")
    optim: OptimConfig = Field(OptimConfig(), description="The optimizer.")
    schedule: ScheduleConfig = Field(ScheduleConfig(), description="The learning rate over the run.")
    train: TrainConfig = Field(TrainConfig(), description="Length, batch and precision.")
    parallel: ParallelConfig = Field(ParallelConfig(), description="The layout over processes.")
    checkpoint: CheckpointConfig = Field(CheckpointConfig(), description="Saving and resuming.")
    eval: EvalConfig = Field(EvalConfig(), description="Evaluation in the loop.")
    log: LogConfig = Field(LogConfig(), description="Reporting.")
    launch: LaunchConfig = Field(LaunchConfig(), description="Processes.")
    stages: list[StageConfig] = Field(
        default_factory=list, description="Stages one after the other, each with what differs in it; none: one stage."
    )
    _plan: tuple[Stage, ...] = PrivateAttr(())

    @model_validator(mode="before")
    @classmethod
    def _take_architecture(cls, given: Any) -> Any:
        model = given.get("model") if isinstance(given, dict) else None
        if not isinstance(model, dict) or not isinstance(model.get("init_from"), str):
            return given
        from trainer.exchange.initial import lay_architecture_under  # which reads run directories, and so this module

        return {**given, "model": lay_architecture_under(model)}

    @model_validator(mode="after")
    def _check(self) -> TrainingConfig:
        if self.data.seq_len > self.model.max_seq_len:
            raise UserError(
                f"'data.seq_len' ({self.data.seq_len}) is longer than 'model.max_seq_len' ({self.model.max_seq_len}); "
                f"set data.seq_len={self.model.max_seq_len} or less, or raise model.max_seq_len"
            )
        vocab_size = self.model.vocab_size
        n_tokens = self.data.known_vocab_size
        if vocab_size is not None and n_tokens is not None and vocab_size < n_tokens:
            raise UserError(
                f"'model.vocab_size' ({vocab_size}) is smaller than 'data.tokenizer.vocab_size' "
                f"({n_tokens}): some tokens would have no embedding; "
                f"set model.vocab_size=null to take the tokenizer's"
            )
        return self

    @model_validator(mode="after")
    def _check_engine(self) -> TrainingConfig:
        parallel, train = self.parallel, self.train
        if parallel.engine != "deepspeed":
            return self
        if parallel.stage == 0 and train.precision != "fp32":
            raise UserError(
                f"'train.precision' is {train.precision}, for which DeepSpeed at 'parallel.zero_stage' 0 has no fp32 "
                f"weights that could be cut again; set parallel.zero_stage=2"
            )
        if parallel.stage == 1 and train.precision == "bf16" and parallel.offload == "none":
            raise UserError(
                "'train.precision' is bf16, for which DeepSpeed at 'parallel.zero_stage' 1 has an optimizer of another "
                "make; set parallel.zero_stage=2"
            )
        if parallel.stage == 3 and train.compile:
            raise UserError(
                "'train.compile' does not go with 'parallel.zero_stage' 3, which gathers parameters between the "
                "operators of a block; set parallel.zero_stage=2, or parallel.engine=fsdp"
            )
        if parallel.stage == 3 and train.activation_checkpointing == "selective":
            raise UserError(
                "'train.activation_checkpointing' is selective, which cannot tell the gathering of parameters at "
                "'parallel.zero_stage' 3 from what a block computes; set it to full, or parallel.zero_stage=2"
            )
        if self.log.spectra_every:
            raise UserError(
                "'log.spectra_every' looks at gradients that DeepSpeed does not keep; set it to 0, or "
                "parallel.engine=fsdp"
            )
        return self

    @model_validator(mode="after")
    def _check_shared_matrices(self) -> TrainingConfig:
        model, tp = self.model, self.parallel.tp
        divided = {
            "model.n_heads": model.n_heads,
            "model.n_kv_heads": model.kv_heads,
            "model.d_ff": model.d_ff,
            "model.vocab_size": self.known_vocab_size,
            "data.seq_len": self.data.seq_len,
        }
        for key, size in divided.items():
            if size is not None and size % tp:
                more = f"{-(-size // tp) * tp}" if key != "model.n_kv_heads" else "a multiple of it"
                raise UserError(
                    f"'parallel.tp' ({tp}) does not divide '{key}' ({size}); set {key}={more}, or another parallel.tp"
                )
        return self

    @model_validator(mode="after")
    def _check_experts(self) -> TrainingConfig:
        moe, ep = self.model.moe, self.parallel.ep
        if moe is None and ep > 1:
            raise UserError("'parallel.ep' spreads experts, and the model has none; remove it, or set model.moe")
        if moe is not None and moe.capacity_factor is not None:
            share = self.data.seq_len * moe.top_k / moe.n_experts
            if moe.capacity_factor * share < 1:
                enough = math.ceil(100 / share) / 100  # two digits are read more easily
                raise UserError(
                    f"'model.moe.capacity_factor' ({moe.capacity_factor:g}) leaves an expert less than one token of a "
                    f"row of {self.data.seq_len}; set it to {enough:g} or more, or data.seq_len to more"
                )
        return self

    @model_validator(mode="after")
    def _lay_out_stages(self) -> TrainingConfig:
        """Check the config of every stage, and count the steps."""
        if not self.stages:
            return self
        steps, plan = 0, []
        for number, stage in enumerate(self.stages):
            config = validate(TrainingConfig, stage.laid_over(self.tree()), f"stages.{number}")
            plan.append(Stage(number, steps, config, stage.schedule is not None))
            steps += config.train.steps
        if "steps" in self.train.model_fields_set and self.train.steps != steps:
            raise UserError(
                f"'train.steps' is {self.train.steps}, but the stages have {steps} steps; remove train.steps"
            )
        self._plan = tuple(plan)
        self.__dict__["train"] = self.train.model_copy(update={"steps": steps})  # the model is frozen for all others
        return self

    @property
    def plan(self) -> tuple[Stage, ...]:
        """The stages in order; without `stages` the whole run is one."""
        return self._plan or (Stage(0, 0, self, False),)

    def stage_at(self, step: int) -> Stage:
        """The stage of update number `step`, counted from 1; past the end, the last one."""
        return next(stage for stage in reversed(self.plan) if step > stage.first or stage.first == 0)

    @property
    def known_vocab_size(self) -> int | None:
        """Rows of the embedding as far as they are known without reading a file."""
        return self.model.vocab_size or self.data.known_vocab_size

    def tree(self) -> dict[str, Any]:
        """The resolved config as plain data."""
        return self.model_dump(mode="json")

    def yaml(self) -> str:
        """The resolved config as a file that `load_config` reads again."""
        return yaml.safe_dump(self.tree(), sort_keys=False, allow_unicode=True)


def load_config(path: Path | str, overrides: Iterable[str] = ()) -> TrainingConfig:
    """Read a YAML config, apply `key.path=value` words and check everything that needs no process count.

    Raises:
        UserError: one line that names the file or override, the key and the fix.
    """
    words = list(overrides)
    return validate(TrainingConfig, apply_overrides(read_tree(Path(path)), words), str(path), words)


def as_this_version_writes(cls: type[Config], tree: dict[str, Any]) -> dict[str, Any]:
    """A stored config tree with the defaults of keys that did not exist when it was written."""
    try:
        return cls.model_validate(tree).model_dump(mode="json")
    except (ValidationError, UserError):
        return tree  # of a version that differs by more; the comparison will name what


def differences(ours: dict[str, Any], theirs: dict[str, Any], prefix: str = "") -> list[str]:
    """Dotted keys whose values differ between two config trees."""
    keys: list[str] = []
    for key in sorted({*ours, *theirs}):
        a, b = ours.get(key), theirs.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            keys += differences(a, b, f"{prefix}{key}.")
        elif a != b:
            keys.append(f"{prefix}{key}")
    return keys
