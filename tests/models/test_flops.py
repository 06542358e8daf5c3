"""The formula for floating-point operations against torch's counter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from models.config import ModelConfig
from models.flops import forward_flops_per_token, training_flops_per_token
from models.transformer import Transformer


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"n_kv_heads": 2, "head_dim": 6, "tie_embeddings": True},
        {"activation": "relu", "position": "learned", "norm": "layernorm", "mlp_bias": True, "attention_bias": True},
    ],
)
def test_formula_equals_the_counter(build: Callable[..., Transformer], tokens_BT: Tensor, keys: dict[str, Any]) -> None:
    model = build(**keys)
    per_token = forward_flops_per_token(model.config, 16, causal=False)
    # The fused CPU kernel counts as nothing; the plain one multiplies the full square, masked or not.
    with sdpa_kernel(SDPBackend.MATH):
        with FlopCounterMode(display=False) as forward:
            model(tokens_BT, tokens_BT)
        with FlopCounterMode(display=False) as both:
            model(tokens_BT, tokens_BT).backward()
    assert forward.get_total_flops() == per_token * tokens_BT.numel()
    assert both.get_total_flops() == training_flops_per_token(model.config, 16, causal=False) * tokens_BT.numel()


def test_causal_attention_is_half_the_square(build: Callable[..., Transformer]) -> None:
    config = build().config
    square = forward_flops_per_token(config, 16, causal=False) - forward_flops_per_token(config, 0, causal=False)
    assert square == 4 * 2 * 32 * 16
    causal = forward_flops_per_token(config, 16, causal=True) - forward_flops_per_token(config, 0, causal=True)
    assert 2 * causal == square


def test_training_is_near_six_per_parameter_and_token(build: Callable[..., Transformer]) -> None:
    """The usual estimate: 6 x parameters, here without the embedding's lookup and at short length."""
    model = build()
    weights = sum(p.numel() for n, p in model.named_parameters() if p.ndim == 2 and n != "embedding.weight")
    assert training_flops_per_token(model.config, 0, causal=True) == 6 * weights


def test_a_published_model_costs_near_six_per_parameter() -> None:
    flops = training_flops_per_token(ModelConfig(preset="llama3-405b"), 8192, causal=True)
    assert flops == pytest.approx(6 * 405.85e9, rel=0.05)
