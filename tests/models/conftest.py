from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from models.config import ModelConfig
from models.transformer import Transformer

TINY: dict[str, Any] = {"vocab_size": 61, "n_layers": 2, "d_model": 32, "n_heads": 4, "d_ff": 48, "max_seq_len": 16}
Build = Callable[..., Transformer]


@pytest.fixture
def build() -> Build:
    """Makes a tiny model whose parameters are all random, gains and biases too, so that each of them acts."""

    def make(seed: int = 0, **keys: Any) -> Transformer:
        model = Transformer(ModelConfig(**{**TINY, **keys}))
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, init in model.initial_values().items():
                p = model.get_parameter(name)
                mean, std = (1.0, 0.2) if init.kind == "ones" else (0.0, 0.2)
                p.copy_(mean + std * torch.randn(p.shape, generator=generator))
        return model

    return make


@pytest.fixture
def tokens_BT() -> torch.Tensor:
    return torch.randint(0, TINY["vocab_size"], (3, 16), generator=torch.Generator().manual_seed(1))
