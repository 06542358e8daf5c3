"""From a config to an engine with its model and optimizer, on the ranks at hand."""

from __future__ import annotations

from importlib import import_module

import torch
import torch.distributed as dist

from models.config import ModelConfig
from models.transformer import Transformer
from optim.build import build_optimizer
from optim.matrix import MatrixOptimizer
from optim.table import Routing, routing_of
from trainer.config import TrainingConfig
from trainer.engines.base import Engine
from trainer.engines.native import NativeEngine
from trainer.engines.zero import ZeroEngine
from trainer.layout import Layout
from trainer.mesh import build_mesh
from trainer.parallelize import parallelize
from trainer.runtime import Runtime


def planned_routing(config: TrainingConfig, model_config: ModelConfig, layout: Layout) -> Routing:
    """What the rule for matrices of a layout would do, from the meta device: nothing is allocated, nobody is asked."""
    fake = import_module("torch.testing._internal.distributed.fake_pg")  # which makes the backend known
    dist.init_process_group("fake", rank=0, world_size=layout.world_size, store=fake.FakeStore())
    try:
        with torch.device("meta"):
            model = Transformer(model_config)
        roles = model.parameter_roles()
        deepspeed = config.parallel.engine == "deepspeed"  # which cuts parameters when it starts
        if not deepspeed:
            parallelize(model, config.train, layout, build_mesh(layout, "cpu"))
        optimizer = build_optimizer(dict(model.named_parameters()), roles, config.optim)
        assert isinstance(optimizer, MatrixOptimizer)
        routing = routing_of(optimizer)
        return routing._replace(unknown="chosen at start") if deepspeed else routing
    finally:
        dist.destroy_process_group()


def build_engine(config: TrainingConfig, model_config: ModelConfig, layout: Layout, runtime: Runtime) -> Engine:
    """Build the model without memory, let the engine distribute and initialise it, make its optimizer."""
    with torch.device("meta"):
        model = Transformer(model_config)
    roles = model.parameter_roles()
    engine: Engine
    if config.parallel.engine == "deepspeed":
        engine = ZeroEngine(config, layout, runtime.device)
    else:
        engine = NativeEngine(config, layout, build_mesh(layout, runtime.device.type), runtime.device)
    engine.prepare(model, lambda parameters: build_optimizer(parameters, roles, config.optim))
    return engine
