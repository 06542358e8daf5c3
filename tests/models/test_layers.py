"""Norms and MLPs against their formulas in float64."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from models.config import ModelConfig
from models.layers import MLP, Norm, activate

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": lambda x: 0.5 * x * (1 + torch.erf(x / math.sqrt(2))),
    "gelu_tanh": lambda x: 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "relu": lambda x: torch.where(x > 0, x, torch.zeros_like(x)),
    "swiglu": lambda x: x / (1 + torch.exp(-x)),
}
ACTIVATIONS |= {"geglu": ACTIVATIONS["gelu"], "geglu_tanh": ACTIVATIONS["gelu_tanh"]}


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("bias", [False, True])
def test_mlp_is_its_formula(activation: str, bias: bool) -> None:
    torch.manual_seed(0)
    mlp = MLP(ModelConfig(d_model=8, n_heads=2, d_ff=12, activation=activation, mlp_bias=bias)).double()
    x = torch.randn(5, 8, dtype=torch.float64)
    act = ACTIVATIONS[activation]

    def linear(layer: torch.nn.Linear, v: Tensor) -> Tensor:
        return v @ layer.weight.T + (layer.bias if bias else 0)

    up = linear(mlp.w_up, x)
    hidden = act(up) if mlp.w_gate is None else act(linear(mlp.w_gate, x)) * up
    torch.testing.assert_close(mlp(x), linear(mlp.w_down, hidden), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("limit", [None, 0.5])
def test_clamped_swiglu_is_its_formula(limit: float | None) -> None:
    """gpt-oss: the gate is cut off from above alone, the other from both sides, and 1 is added to it."""
    config = ModelConfig(activation="swiglu_clamped", activation_limit=limit)
    at = 7.0 if limit is None else limit
    for gate, up in [(0.3, 0.4), (9.0, 8.0), (-9.0, -8.0), (7.5, -0.1)]:
        g, u = min(gate, at), max(-at, min(up, at))
        expected = g / (1 + math.exp(-1.702 * g)) * (u + 1)
        got = activate(config, torch.tensor(up, dtype=torch.float64), torch.tensor(gate, dtype=torch.float64))
        assert got.item() == pytest.approx(expected, rel=1e-12)


def test_a_gain_stored_as_its_difference_from_one() -> None:
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    plain, offset = Norm("rmsnorm", 6, 1e-5, False), Norm("rmsnorm", 6, 1e-5, False, unit_offset=True)
    assert torch.equal(plain(x), offset(x))  # both as they start
    with torch.no_grad():
        plain.weight.copy_(torch.arange(6.0))
        offset.weight.copy_(torch.arange(6.0) - 1)
    assert torch.equal(plain(x), offset(x))


@pytest.mark.parametrize("kind", ["rmsnorm", "layernorm"])
@pytest.mark.parametrize("bias", [False, True])
def test_norm_is_its_formula(kind: str, bias: bool) -> None:
    torch.manual_seed(0)
    norm = Norm(kind, 6, 1e-2, bias).double()  # type: ignore[arg-type]
    with torch.no_grad():
        for p in norm.parameters():
            p.normal_()
    x = torch.randn(4, 6, dtype=torch.float64)
    centred = x - x.mean(-1, keepdim=True) if kind == "layernorm" else x
    expected = centred / torch.sqrt((centred**2).mean(-1, keepdim=True) + 1e-2) * norm.weight
    expected = expected if norm.bias is None else expected + norm.bias
    torch.testing.assert_close(norm(x), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", ["rmsnorm", "layernorm"])
def test_norm_of_bf16_computes_in_fp32_and_rounds_once(kind: str) -> None:
    torch.manual_seed(0)
    norm = Norm(kind, 64, 1e-5, True).bfloat16()  # type: ignore[arg-type]
    with torch.no_grad():
        for p in norm.parameters():
            p.normal_()
    x = (3 + torch.randn(7, 64)).bfloat16()
    rounded = norm(x)
    assert torch.equal(rounded, norm.float()(x.float()).bfloat16())
