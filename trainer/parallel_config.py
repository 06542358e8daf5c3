"""The layout's part of the config. Imports no torch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from common.config import Config


class ParallelConfig(Config):
    """How the work is laid over processes. It changes no number beyond rounding."""

    engine: Literal["fsdp", "ddp", "deepspeed"] = Field(
        "fsdp",
        description="fsdp: parameters, gradients and optimizer state sharded; ddp: replicated on every rank; "
        "deepspeed: DeepSpeed's ZeRO.",
    )
    dp_replicate: int | None = Field(
        None,
        ge=1,
        description="fsdp: number of replicas of the sharded model (HSDP); ddp: leave it out. null: one on each "
        "machine if dp_shard is -1 and ep and tp go into the ranks of a machine, else 1.",
    )
    dp_shard: int = Field(-1, description="fsdp: ranks that share one copy of the model; -1: all that are left.")
    ep: int = Field(
        1,
        ge=1,
        description="fsdp, deepspeed at stages 1 and 2: ranks, of those of dp_shard x tp, over which the experts of a "
        "layer are spread.",
    )
    tp: int = Field(
        1,
        ge=1,
        description="fsdp: ranks that share the matrices of every layer and the tokens of every row (tensor and "
        "sequence parallelism); they read the same rows.",
    )
    tp_across_nodes: bool = Field(
        False, description="Whether the ranks of tp may be on several machines, between which they talk in every layer."
    )

    zero_stage: Literal[0, 1, 2, 3] | None = Field(
        None,
        description="deepspeed: what is cut over ranks. 0: nothing; 1: optimizer state; 2: gradients too; 3: "
        "parameters too; absent: 2.",
    )
    offload: Literal["none", "optimizer", "optimizer+params"] = Field(
        "none",
        description="deepspeed: what lives in the host's memory, and is updated there. optimizer: fp32 weights and "
        "optimizer state, from stage 1 on; optimizer+params: parameters too, at stage 3.",
    )
    deepspeed_config: str | None = Field(
        None, description="deepspeed: a DeepSpeed JSON, whose keys must not contradict those here; null: none."
    )

    @property
    def stage(self) -> int:
        """`zero_stage`, or its default."""
        return 2 if self.zero_stage is None else self.zero_stage

    @model_validator(mode="after")
    def _check(self) -> ParallelConfig:
        self._check_deepspeed()
        if self.dp_shard != -1 and self.dp_shard < 1:
            raise ValueError(f"'dp_shard' must be positive, or -1 for all ranks that are left, got {self.dp_shard}")
        if self.engine == "ddp" and (self.dp_replicate not in (None, 1) or self.dp_shard not in (-1, 1)):
            raise ValueError(
                "engine ddp replicates over all ranks; remove dp_replicate and dp_shard, or use engine: fsdp"
            )
        for key in ("ep", "tp"):
            if self.engine == "ddp" and getattr(self, key) != 1:
                raise ValueError(f"engine ddp replicates everything; remove {key}, or use engine: fsdp")
        return self

    def _check_deepspeed(self) -> None:
        for key, absent in (("zero_stage", None), ("offload", "none"), ("deepspeed_config", None)):
            if self.engine != "deepspeed" and getattr(self, key) != absent:
                raise ValueError(
                    f"'{key}' does nothing under engine: {self.engine} (it belongs to deepspeed); remove it"
                )
        if self.engine != "deepspeed":
            return
        for key in ("dp_replicate", "tp"):
            if getattr(self, key) not in (None, 1):
                raise ValueError(f"engine deepspeed has no {key}; remove it, or use engine: fsdp")
        if self.offload == "optimizer+params" and self.stage != 3:
            raise ValueError(
                f"'offload: optimizer+params' needs parameters to be cut, and 'zero_stage' is {self.stage}; set "
                f"zero_stage: 3, or offload: optimizer"
            )
        if self.offload == "optimizer" and self.stage == 0:
            raise ValueError(
                "'offload: optimizer' needs optimizer state to be cut, and 'zero_stage' is 0; set zero_stage: 1, 2 or 3"
            )
        if self.ep > 1 and self.stage in (0, 3):
            raise ValueError(
                f"'ep' ({self.ep}) goes with zero_stage 1 or 2, not with {self.stage}; set one of them, or use "
                f"engine: fsdp"
            )
