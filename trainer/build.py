"""From a config to an engine with its model and optimizer, on the ranks at hand."""

from __future__ import annotations

from importlib import import_module

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from models.config import ModelConfig
from models.transformer import Transformer
from optim.build import build_optimizer
from trainer.config import TrainingConfig
from trainer.engines.base import Engine
from trainer.engines.native import NativeEngine
from trainer.layout import Layout
from trainer.mesh import build_mesh
from trainer.parallelize import parallelize
from trainer.runtime import Runtime


def planned_optimizer(config: TrainingConfig, model_config: ModelConfig, layout: Layout) -> Optimizer:
    """The optimizer that rank 0 of a layout would have, on the meta device: nothing is allocated, nobody is asked."""
    fake = import_module("torch.testing._internal.distributed.fake_pg")  # which makes the backend known
    dist.init_process_group("fake", rank=0, world_size=layout.world_size, store=fake.FakeStore())
    try:
        with torch.device("meta"):
            model = Transformer(model_config)
        roles = model.parameter_roles()
        parallelize(model, config.train, layout, build_mesh(layout, "cpu"))
        return build_optimizer(dict(model.named_parameters()), roles, config.optim)
    finally:
        dist.destroy_process_group()


def build_engine(config: TrainingConfig, model_config: ModelConfig, layout: Layout, runtime: Runtime) -> Engine:
    """Build the model without memory, let the engine distribute and initialise it, make its optimizer."""
    with torch.device("meta"):
        model = Transformer(model_config)
    roles = model.parameter_roles()
    engine = NativeEngine(config, layout, build_mesh(layout, runtime.device.type), runtime.device)
    engine.prepare(model, lambda parameters: build_optimizer(parameters, roles, config.optim))
    return engine
