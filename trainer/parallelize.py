"""Parallelism, applied to a plain model from outside, in one order: tensors, experts, checkpointing,
compile, sharding.

All three wrap each block's `forward` on the instance or add hooks around it, so that no parameter changes its name.
"""

from __future__ import annotations

from functools import partial

from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Shard

from models.transformer import Transformer
from trainer.activation import checkpoint_blocks
from trainer.compiled import compile_blocks
from trainer.config import TrainConfig
from trainer.experts import balance_over_ranks, distribute_experts
from trainer.layout import Layout
from trainer.mesh import expert_mesh
from trainer.precision import mixed_precision
from trainer.tensors import distribute_matrices


def parallelize(model: Transformer, train: TrainConfig, layout: Layout, mesh: DeviceMesh) -> None:
    """Apply a config's knobs to a model on the meta device, in place. Afterwards its parameters are DTensors."""
    if layout.tp > 1:
        distribute_matrices(model, mesh["tp"])
    apart = model.config.moe is not None and layout.ep * layout.tp > 1
    of_experts = expert_mesh(layout, mesh.device_type) if apart else None
    if of_experts is not None and layout.ep > 1:
        distribute_experts(model, of_experts["ep"])
    wrap_blocks(model, train, layout.tp)
    _shard(model, train, layout, mesh, of_experts)


def wrap_blocks(model: Transformer, train: TrainConfig, copies: int) -> None:
    """What is done to blocks before parameters are sharded, in place. `copies` ranks each have the same rows."""
    if model.config.moe is not None and model.config.moe.aux_loss_over == "batch":
        balance_over_ranks(model, copies)
    if train.activation_checkpointing != "none":
        checkpoint_blocks(model, train.activation_checkpointing, train.activation_checkpointing_every)
    if train.compile:
        compile_blocks(model)


def _shard(
    model: Transformer, train: TrainConfig, layout: Layout, mesh: DeviceMesh, of_experts: DeviceMesh | None
) -> None:
    """Wrap each block, then what is left, with FSDP2 (`fully_shard`) or its replicating sibling.

    Experts that are spread over ranks are wrapped first, over the ranks that hold the same ones.
    """
    policy = mixed_precision(train.precision)
    if of_experts is not None:
        shared = of_experts["dp_replicate", "efsdp"] if layout.dp_replicate > 1 else of_experts["efsdp"]
        place = partial(_place_of_experts, layout.efsdp)
        for layer in model.expert_layers():
            fully_shard(layer.experts, mesh=shared, mp_policy=policy, shard_placement_fn=place)
            _sum_gradients(layer.experts)
    modules: list[nn.Module] = [*model.blocks, model]
    for module in modules:
        if layout.engine == "ddp":
            # Not torch's DistributedDataParallel: that rebuilds its buckets after the first backward pass, so that a
            # resumed run sums in another order than an unbroken one.
            replicate(module, mesh=mesh["dp_replicate"], mp_policy=policy)
        else:
            data = mesh["dp_replicate", "dp_shard"] if layout.dp_replicate > 1 else mesh["dp_shard"]
            fully_shard(module, mesh=data, mp_policy=policy)
        _sum_gradients(module)


def _sum_gradients(module: nn.Module) -> None:
    """Rule 1: gradients are summed over data ranks; the loss is already divided by the global count of tokens."""
    assert isinstance(module, FSDPModule)
    module.set_force_sum_reduction_for_comms(True)
    module.set_gradient_divide_factor(1.0)


def _place_of_experts(efsdp: int, parameter: nn.Parameter) -> Shard:
    """Whole experts for each rank, where there are enough for all; else a part of each, along its first dimension."""
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return Shard(0) if local.shape[0] % efsdp == 0 else Shard(1)
