"""From a config to an engine with its model and optimizer, on the ranks at hand."""

from __future__ import annotations

import torch

from models.config import ModelConfig
from models.transformer import Transformer
from optim.build import build_optimizer
from trainer.config import TrainingConfig
from trainer.engines.base import Engine
from trainer.engines.native import NativeEngine
from trainer.layout import Layout
from trainer.mesh import build_mesh
from trainer.runtime import Runtime


def build_engine(config: TrainingConfig, model_config: ModelConfig, layout: Layout, runtime: Runtime) -> Engine:
    """Build the model without memory, let the engine distribute and initialise it, make its optimizer."""
    with torch.device("meta"):
        model = Transformer(model_config)
    roles = model.parameter_roles()
    engine = NativeEngine(config, layout, build_mesh(layout, runtime.device.type), runtime.device)
    engine.prepare(model, lambda parameters: build_optimizer(parameters, roles, config.optim))
    return engine
