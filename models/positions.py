"""Position tables, made from position numbers at every forward: no buffer to fill, move or shard.

Shapes: B batch, T position, D width of the residual stream, K width of a head, 2 cosine and sine.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from models.layers import compute_dtype

SINUSOIDAL_BASE = 10000.0


def rope_table(positions_T: Tensor, d_head: int, theta: float, dtype: torch.dtype) -> Tensor:
    """Cosines and sines `(2, T, K/2)` of the angles `t theta^(-2j/K)` (Su et al. 2021, eq. 15), in `dtype`."""
    exponents = torch.arange(0, d_head, 2, device=positions_T.device).to(dtype) / d_head
    angles = positions_T.to(dtype)[:, None] * (1.0 / theta**exponents)
    return torch.stack((angles.cos(), angles.sin()))


def rotate(x_BHTK: Tensor, rope_2TK: Tensor) -> Tensor:
    """Rotate the pairs `(x_j, x_{j + K/2})` of every head by their position's angles, in fp32; keeps the type.

    Pairing the two halves is the layout of Llama's checkpoints on the Hugging Face hub. A table of its own for each row
    is `(2, B, 1, T, K/2)`.
    """
    dtype = compute_dtype(x_BHTK.dtype)
    if rope_2TK.dtype != dtype:
        # Mixed-precision wrappers may cast a block's inputs; for FSDP2 set cast_forward_inputs=False in the policy.
        raise TypeError(f"the rotary table arrived as {rope_2TK.dtype}, not {dtype}; do not cast a block's inputs")
    a, b = x_BHTK.to(dtype).chunk(2, dim=-1)
    cos, sin = rope_2TK.unbind()
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1).to(x_BHTK.dtype)


def sinusoidal_table(positions_T: Tensor, d_model: int, dtype: torch.dtype) -> Tensor:
    """`(T, D)`: column 2j is `sin(t / 10000^(2j/D))`, column 2j+1 its cosine (Vaswani et al. 2017, 3.5)."""
    columns = torch.arange(d_model, device=positions_T.device)
    exponents = (columns - columns % 2).to(dtype) / d_model
    angles = positions_T.to(dtype)[:, None] / SINUSOIDAL_BASE**exponents
    return torch.where(columns % 2 == 0, angles.sin(), angles.cos())


def take_rows(table_TD: Tensor, positions_BT: Tensor | None) -> Tensor:
    """Rows of the table by position, `(B, T, D)`, or without positions the table. Gradients of a row add up in fp32."""
    if positions_BT is None:
        return table_TD
    return F.embedding(positions_BT, table_TD.to(compute_dtype(table_TD.dtype))).to(table_TD.dtype)
