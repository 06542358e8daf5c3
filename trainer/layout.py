"""Which rank does what: the arithmetic of meshes and batches, before any process exists. Imports no torch."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, replace

from common.errors import UserError
from common.ranks import ranks_on_this_machine
from trainer.config import TrainingConfig
from trainer.engines.zero_config import check_accelerate, zero_config


@dataclass(frozen=True)
class Layout:
    """A config's layout on a given number of ranks. All ranks are data ranks so far."""

    engine: str
    dp_replicate: int
    dp_shard: int
    ep: int
    tp: int
    micro_batch_size: int
    accumulation: int
    seq_len: int
    by_machine: bool = False  # one replica on each machine, by default
    stages: tuple[Layout, ...] = ()  # of each stage, if there are several; the first's numbers are ours

    def at(self, stage: int) -> Layout:
        """The layout of a stage, by its number."""
        return self.stages[stage] if self.stages else self

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.data_ranks * self.tp

    @property
    def data_ranks(self) -> int:
        """Number of ranks, or groups of `tp` ranks, that read different rows."""
        return self.dp_replicate * self.dp_shard

    @property
    def efsdp(self) -> int:
        """Number of ranks that share the same experts."""
        return self.dp_shard * self.tp // self.ep

    @property
    def global_batch_size(self) -> int:
        """Sequences per update over all ranks."""
        return self.data_ranks * self.micro_batch_size * self.accumulation

    def describe(self) -> str:
        """The mesh and the batch arithmetic, one line each."""
        ranks = f"{self.world_size} rank{'s' if self.world_size > 1 else ''}"
        mesh = f"mesh   {self.engine}: {ranks} = dp_replicate {self.dp_replicate} x dp_shard {self.dp_shard}"
        if self.tp > 1:
            mesh += f" x tp {self.tp}"
            ranks = f"{self.data_ranks} group{'s' if self.data_ranks > 1 else ''} of ranks"
        if self.ep > 1:
            mesh += f"; experts: dp_replicate {self.dp_replicate} x efsdp {self.efsdp} x ep {self.ep}"
        if self.by_machine:
            mesh += "\n       one replica on each machine; parallel.dp_replicate=1 shards over all of them"
        return mesh + "\n" + "\n".join(layout._describe_batch(ranks) for layout in self.stages or (self,))

    def _describe_batch(self, ranks: str) -> str:
        return (
            f"batch  {self.global_batch_size} sequences = {ranks} x {self.micro_batch_size} per "
            f"micro-batch x {self.accumulation} accumulated; "
            f"x {self.seq_len} positions = {self.global_batch_size * self.seq_len:,} positions a step"
        )


def plan_layout(config: TrainingConfig, world_size: int, on_a_machine: int | None = None) -> Layout:
    """Lay a config over `world_size` ranks, in all its stages.

    Args:
        on_a_machine: ranks of each machine; default: what the environment says, or all of them.

    Raises:
        UserError: ranks or sequences that do not divide, for which the line names the key and values that would do; a
            DeepSpeed or Accelerate config that contradicts this one.
    """
    layout = _plan_stages(config, world_size, on_a_machine or ranks_on_this_machine())
    if config.parallel.engine == "deepspeed":
        zero_config(config, layout)
    check_accelerate(config, layout, os.environ)
    return layout


def _plan_stages(config: TrainingConfig, world_size: int, on_a_machine: int | None) -> Layout:
    if not config.stages:
        return _plan_stage(config, world_size, on_a_machine)
    layouts = []
    for stage in config.plan:
        try:
            layouts.append(_plan_stage(stage.config, world_size, on_a_machine))
        except UserError as error:
            raise UserError(f"stages.{stage.number}: {error}") from None
    return replace(layouts[0], stages=tuple(layouts))


def _plan_stage(config: TrainingConfig, world_size: int, here: int | None) -> Layout:
    """Lay a config without stages, or one stage's config, over `world_size` ranks."""
    parallel, train, tp = config.parallel, config.train, config.parallel.tp
    if here is not None and here % tp and not parallel.tp_across_nodes:
        raise UserError(
            f"'parallel.tp' ({tp}) does not divide the {here} processes of a machine, so that every layer would wait "
            f"for the network; choose one of {_divisors(here)}, or set parallel.tp_across_nodes=true"
        )
    if world_size % tp:
        raise UserError(
            f"'parallel.tp' ({tp}) does not divide the {world_size} processes; "
            f"choose one of {_divisors(world_size)}, or another --nproc"
        )
    data_ranks = world_size // tp
    machines = _machines(config, world_size, here)
    if parallel.engine == "ddp":
        replicate, shard = world_size, 1
    else:
        replicate, shard = parallel.dp_replicate or machines, parallel.dp_shard
        if shard == -1:
            if data_ranks % replicate:
                raise UserError(
                    f"'parallel.dp_replicate' ({replicate}) does not divide the {data_ranks} processes{_each(tp)}; "
                    f"choose one of {_divisors(data_ranks)}, or another --nproc"
                )
            shard = data_ranks // replicate
        elif replicate * shard != data_ranks:
            raise UserError(
                f"'parallel.dp_replicate' ({replicate}) x 'parallel.dp_shard' ({shard}) is {replicate * shard}, "
                f"but there are {data_ranks} processes{_each(tp)}; set parallel.dp_shard=-1, or "
                f"--nproc {replicate * shard * tp}"
            )
    _check_experts(config, shard * tp)
    if train.global_batch_size % data_ranks:
        fitting = _round_up(train.global_batch_size, data_ranks * train.micro_batch_size)
        raise UserError(
            f"'train.global_batch_size' ({train.global_batch_size}) is not divisible by the {data_ranks} "
            f"processes{_each(tp)}; set train.global_batch_size={fitting}, or another --nproc"
        )
    per_rank = train.global_batch_size // data_ranks
    if per_rank % train.micro_batch_size:
        fitting = max(d for d in _divisors(per_rank) if d <= train.micro_batch_size)
        raise UserError(
            f"'train.micro_batch_size' ({train.micro_batch_size}) does not divide the {per_rank} sequences of a rank "
            f"(train.global_batch_size {train.global_batch_size} / {data_ranks} processes{_each(tp)}); "
            f"set train.micro_batch_size={fitting}"
        )
    return Layout(
        engine=parallel.engine,
        dp_replicate=replicate,
        dp_shard=shard,
        ep=parallel.ep,
        tp=tp,
        micro_batch_size=train.micro_batch_size,
        accumulation=per_rank // train.micro_batch_size,
        seq_len=config.data.seq_len,
        by_machine=machines > 1,
    )


def _machines(config: TrainingConfig, world_size: int, here: int | None) -> int:
    """How many machines have a replica each because the config leaves it open: inside one the messages of shards
    are quick, and between them only sums of gradients travel. 1: it is not left open, or ep or tp do not fit in."""
    parallel = config.parallel
    open_to_us = parallel.engine == "fsdp" and parallel.dp_replicate is None and parallel.dp_shard == -1
    if not open_to_us or here is None or world_size % here or here % math.lcm(parallel.tp, parallel.ep):
        return 1
    moe, machines = config.model.moe, world_size // here
    return machines if moe is None or _cut_unevenly(config, parallel.ep, here // parallel.ep) is None else 1


def _each(tp: int) -> str:
    """What processes are counted by where several read the same rows."""
    return f" (groups of {tp}, by parallel.tp)" if tp > 1 else ""


def _check_experts(config: TrainingConfig, ranks: int) -> None:
    """Refuse a `parallel.ep` that does not go into the experts and the ranks that it borrows, or cuts experts unevenly.

    The line offers what all of these allow, so that nobody is sent from one refusal to the next.
    """
    moe, ep = config.model.moe, config.parallel.ep
    if moe is None:
        return
    choices = [d for d in _divisors(math.gcd(moe.n_experts, ranks)) if _cut_unevenly(config, d, ranks // d) is None]
    if moe.n_experts % ep or ranks % ep:
        raise UserError(
            f"'parallel.ep' ({ep}) has to divide the {moe.n_experts} experts of 'model.moe.n_experts' and the {ranks} "
            f"ranks of 'parallel.dp_shard'{' x tp' * (config.parallel.tp > 1)}; choose "
            f"{f'one of {choices}, or ' if choices else ''}another --nproc"
        )
    if (width := _cut_unevenly(config, ep, ranks // ep)) is not None:
        raise UserError(
            f"{ranks // ep} ranks share {moe.n_experts // ep} experts, but divide neither these nor {width}; set "
            f"{f'parallel.ep to one of {choices}, or ' if choices else ''}parallel.dp_replicate to more"
        )


def _cut_unevenly(config: TrainingConfig, ep: int, efsdp: int) -> str | None:
    """The width of experts, if any, that FSDP2 would have to cut into unequal parts, which it cannot.

    It cuts experts where they are fewer than the ranks that share them, unless they are sharded with all else.
    """
    moe, tp = config.model.moe, config.parallel.tp
    if moe is None or (ep == 1 and tp == 1) or moe.n_experts // ep % efsdp == 0:
        return None
    widths = {"d_ff": config.model.d_ff_expert, "d_model": config.model.d_model}
    return next((f"{key} ({width})" for key, width in widths.items() if width % efsdp), None)


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
