"""Normalisation and MLP.

Shapes: B batch, T position, D width of the residual stream, F hidden width of the MLP.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.config import ModelConfig

# Of gpt-oss's SwiGLU: where its inputs are cut off unless the config says, and the slope in x sigmoid(slope x).
CLAMP, SIGMOID_SLOPE = 7.0, 1.702


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """What norms, rotations and losses compute in: fp32, or fp64 in a model that is fp64 (a reference run)."""
    return torch.promote_types(dtype, torch.float32)


class Norm(nn.Module):
    """RMSNorm (Zhang and Sennrich 2019, eq. 4) or LayerNorm (Ba et al. 2016, eq. 4) over the last dimension.

    With `unit_offset` the gain is `1 + weight` (Gemma Team 2024). Computes in `compute_dtype` whatever the parameters'
    type, and returns the input's type.
    """

    def __init__(
        self, kind: Literal["rmsnorm", "layernorm"], width: int, eps: float, bias: bool, unit_offset: bool = False
    ) -> None:
        super().__init__()
        self.kind, self.eps, self.unit_offset = kind, eps, unit_offset
        self.weight = nn.Parameter(torch.zeros(width) if unit_offset else torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        dtype = compute_dtype(x.dtype)
        gain = self.weight.to(dtype) + 1.0 if self.unit_offset else self.weight.to(dtype)
        bias = None if self.bias is None else self.bias.to(dtype)
        if self.kind == "layernorm":
            return F.layer_norm(x.to(dtype), gain.shape, gain, bias, self.eps).to(x.dtype)
        y = F.rms_norm(x.to(dtype), gain.shape, gain, self.eps)
        return (y if bias is None else y + bias).to(x.dtype)


def make_norm(config: ModelConfig, width: int) -> Norm:
    """A norm of the config's kind over vectors of `width`."""
    return Norm(config.norm, width, config.norm_eps, config.norm_bias, config.norm_unit_offset)


def activate(config: ModelConfig, up: Tensor, gate: Tensor | None) -> Tensor:
    """The nonlinearity between the MLP's matrices, elementwise; `gate` is None for those without one.

    Gated, with a the activation: `a(gate) * up` (Shazeer 2020, eqs. 5 and 6). `swiglu_clamped` cuts both off at the
    limit L, the gate from above alone, and is `clip(gate) sigmoid(1.702 clip(gate)) (clip(up) + 1)` (gpt-oss).
    """
    kind = config.activation
    if gate is None:
        return F.relu(up) if kind == "relu" else F.gelu(up, approximate="tanh" if kind == "gelu_tanh" else "none")
    if kind == "swiglu":
        return F.silu(gate) * up
    if kind == "swiglu_clamped":
        limit = CLAMP if config.activation_limit is None else config.activation_limit
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return gate * torch.sigmoid(SIGMOID_SLOPE * gate) * (up + 1.0)
    return F.gelu(gate, approximate="tanh" if kind == "geglu_tanh" else "none") * up


class MLP(nn.Module):
    """`w_down(activate(w_up x, w_gate x))`; ungated activations have no `w_gate`."""

    def __init__(self, config: ModelConfig, d_ff: int | None = None) -> None:
        super().__init__()
        d, f, bias = config.d_model, config.d_ff if d_ff is None else d_ff, config.mlp_bias
        self.config = config
        self.w_gate = nn.Linear(d, f, bias=bias) if config.gated else None
        self.w_up = nn.Linear(d, f, bias=bias)
        self.w_down = nn.Linear(f, d, bias=bias)

    def forward(self, x_BTD: Tensor) -> Tensor:
        gate_BTF = None if self.w_gate is None else self.w_gate(x_BTD)
        return self.w_down(activate(self.config, self.w_up(x_BTD), gate_BTF))
