"""The engines `fsdp` and `ddp`: torch's FSDP2, sharding or replicating."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from models.transformer import Transformer
from optim.boxes import local
from optim.build import named_state
from trainer.clip import global_norm
from trainer.config import TrainingConfig
from trainer.engines.base import Engine, OptimizerFactory
from trainer.initialize import initialize
from trainer.layout import Layout
from trainer.parallelize import parallelize
from trainer.scaler import make_scaler


class NativeEngine(Engine):
    """FSDP2 over `mesh`: `fully_shard` for engine fsdp (HSDP with replicas), `replicate` for engine ddp.

    Master weights, gradients and optimizer state are fp32; in bf16 and fp16 FSDP2 casts the gathered weights
    (trainer/precision.py).
    """

    def __init__(self, config: TrainingConfig, layout: Layout, mesh: DeviceMesh, device: torch.device) -> None:
        self._config = config
        self._layout = layout
        self._mesh = mesh
        self._device = device
        self.scaler = make_scaler(config.train)

    def prepare(self, model: Transformer, make_optimizer: OptimizerFactory) -> None:
        inits = model.initial_values()
        parallelize(model, self._config.train, self._layout, self._mesh)
        model.to_empty(device=self._device)
        # FSDP2 swaps full parameters in while a module computes; these are the sharded ones, which live throughout.
        self.parameters: dict[str, Tensor] = dict(model.named_parameters())
        initialize(self.parameters, inits, self._config.run.seed)
        self.buffers: dict[str, Tensor] = dict(model.named_buffers())
        for buffer in self.buffers.values():
            buffer.zero_()
        self.model = model
        self.optimizer = make_optimizer(self.parameters)

    @property
    def loss_scale(self) -> float:
        return 1.0 if self.scaler is None else self.scaler.scale

    def micro_backward(self, loss: Tensor, last: bool) -> None:
        assert isinstance(self.model, FSDPModule)
        self.model.set_requires_gradient_sync(last)
        (loss if self.scaler is None else loss * self.scaler.scale).backward()

    def gradients(self) -> dict[str, Tensor]:
        return {name: p.grad for name, p in self.parameters.items() if p.grad is not None}

    def grad_norm(self) -> float:
        return global_norm(self.gradients().values()) / self.loss_scale

    def step(self, scale: float) -> None:
        factor = scale / self.loss_scale
        if factor != 1.0:
            torch._foreach_mul_([local(gradient) for gradient in self.gradients().values()], factor)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.scaler is not None:
            self.scaler.good_step()

    def skip(self, overflow: bool) -> None:
        self.optimizer.zero_grad()
        if overflow and self.scaler is not None:
            self.scaler.overflow()

    def scaler_state(self) -> dict[str, Any]:
        return {} if self.scaler is None else self.scaler.state()

    def load_scaler_state(self, state: Mapping[str, Any]) -> None:
        if self.scaler is not None and state:
            self.scaler.load_state(state)

    def state_dict(self) -> dict[str, Tensor]:
        weights = self.parameters | self.buffers
        return {f"model.{name}": tensor.detach() for name, tensor in weights.items()} | {
            f"optim.{name}": tensor for name, tensor in named_state(self.optimizer).items()
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        # `state_dict()` gives the live tensors, so DCP has already loaded into them.
        return None
