"""Normalisation and MLP.

Shapes: B batch, T position, D width of the residual stream, F hidden width of the MLP.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.config import ModelConfig


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """What norms, rotations and losses compute in: fp32, or fp64 in a model that is fp64 (a reference run)."""
    return torch.promote_types(dtype, torch.float32)


class Norm(nn.Module):
    """RMSNorm (Zhang and Sennrich 2019, eq. 4) or LayerNorm (Ba et al. 2016, eq. 4) over the last dimension.

    Computes in `compute_dtype` whatever the parameters' type, and returns the input's type.
    """

    def __init__(self, kind: Literal["rmsnorm", "layernorm"], width: int, eps: float, bias: bool) -> None:
        super().__init__()
        self.kind, self.eps = kind, eps
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        dtype = compute_dtype(x.dtype)
        weight = self.weight.to(dtype)
        bias = None if self.bias is None else self.bias.to(dtype)
        if self.kind == "layernorm":
            return F.layer_norm(x.to(dtype), weight.shape, weight, bias, self.eps).to(x.dtype)
        y = F.rms_norm(x.to(dtype), weight.shape, weight, self.eps)
        return (y if bias is None else y + bias).to(x.dtype)


def make_norm(config: ModelConfig, width: int) -> Norm:
    """A norm of the config's kind over vectors of `width`."""
    return Norm(config.norm, width, config.norm_eps, config.norm_bias)


class MLP(nn.Module):
    """`w_down(act(w_up x))`, or SwiGLU `w_down(silu(w_gate x) * w_up x)` (Shazeer 2020, eq. 6)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        d, f, bias = config.d_model, config.d_ff, config.mlp_bias
        self.activation = config.activation
        self.w_gate = nn.Linear(d, f, bias=bias) if self.activation == "swiglu" else None
        self.w_up = nn.Linear(d, f, bias=bias)
        self.w_down = nn.Linear(f, d, bias=bias)

    def forward(self, x_BTD: Tensor) -> Tensor:
        h_BTF = self.w_up(x_BTD)
        if self.w_gate is not None:
            h_BTF = F.silu(self.w_gate(x_BTD)) * h_BTF
        elif self.activation == "relu":
            h_BTF = F.relu(h_BTF)
        else:
            h_BTF = F.gelu(h_BTF, approximate="tanh" if self.activation == "gelu_tanh" else "none")
        return self.w_down(h_BTF)
