"""Parallelism, applied to a plain model from outside, in one order: checkpointing, compile, sharding.

All three wrap each block's `forward` on the instance or add hooks around it, so that no parameter changes its name.
"""

from __future__ import annotations

from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from models.transformer import Transformer
from trainer.activation import checkpoint_blocks
from trainer.compiled import compile_blocks
from trainer.config import TrainConfig
from trainer.layout import Layout
from trainer.precision import mixed_precision


def parallelize(model: Transformer, train: TrainConfig, layout: Layout, mesh: DeviceMesh) -> None:
    """Apply a config's knobs to a model on the meta device, in place. Afterwards its parameters are DTensors."""
    if train.activation_checkpointing != "none":
        checkpoint_blocks(model, train.activation_checkpointing, train.activation_checkpointing_every)
    if train.compile:
        compile_blocks(model)
    _shard(model, train, layout, mesh)


def _shard(model: Transformer, train: TrainConfig, layout: Layout, mesh: DeviceMesh) -> None:
    """Wrap each block, then what is left, with FSDP2 (`fully_shard`) or its replicating sibling."""
    policy = mixed_precision(train.precision)
    modules: list[nn.Module] = [*model.blocks, model]
    for module in modules:
        if layout.engine == "ddp":
            # Not torch's DistributedDataParallel: that rebuilds its buckets after the first backward pass, so that a
            # resumed run sums in another order than an unbroken one.
            replicate(module, mesh=mesh["dp_replicate"], mp_policy=policy)
        else:
            fully_shard(module, mesh=mesh if layout.dp_replicate > 1 else mesh["dp_shard"], mp_policy=policy)
        assert isinstance(module, FSDPModule)
        # Rule 1: gradients are summed over data ranks; the loss is already divided by the global count of tokens.
        module.set_force_sum_reduction_for_comms(True)
        module.set_gradient_divide_factor(1.0)
