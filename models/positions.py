"""Position tables, made from position numbers at every forward: no buffer to fill, move or shard.

Shapes: B batch, T position, D width of the residual stream, K width of a head, R how many of these are rotated, 2
cosine and sine.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from models.config import ModelConfig, RopeScaling
from models.layers import compute_dtype

SINUSOIDAL_BASE = 10000.0


def rope_table(config: ModelConfig, positions_T: Tensor, dtype: torch.dtype, local: bool = False) -> Tensor:
    """Cosines and sines `(2, T, R/2)` of the angles `t theta^(-2j/R)` (Su et al. 2021, eq. 15), in `dtype`.

    R is how many numbers of a head are rotated. Under yarn both are multiplied by its `attention_factor`.

    Args:
        local: the table of blocks with a window, where these have a base of their own.
    """
    own = local and config.rope_theta_local is not None
    theta = config.rope_theta_local if own and config.rope_theta_local is not None else config.rope_theta
    scaling = None if own else config.rope_scaling
    exponents = torch.arange(0, config.d_rotated, 2, device=positions_T.device).to(dtype) / config.d_rotated
    frequencies = 1.0 / theta**exponents
    factor = 1.0
    if scaling is not None:
        frequencies = scaled_frequencies(frequencies, theta, scaling)
        if scaling.kind == "yarn":
            given = scaling.attention_factor
            factor = 0.1 * math.log(scaling.factor) + 1.0 if given is None else given
    angles = positions_T.to(dtype)[:, None] * frequencies
    return torch.stack((angles.cos() * factor, angles.sin() * factor))


def scaled_frequencies(frequencies: Tensor, theta: float, scaling: RopeScaling) -> Tensor:
    """Frequencies `(R/2,)` changed for long sequences.

    - linear: divided by the factor (position interpolation, Chen et al. 2023).
    - llama3: by wavelength: short ones stay, long ones are divided, those between are a weighted mean of both, linear
      in `original_max_seq_len / wavelength` (Dubey et al. 2024; its reference implementation).
    - yarn: by pair j: the first ones stay, the last ones are divided, with a linear ramp between the pairs that turn
      `beta_fast` and `beta_slow` times in `original_max_seq_len` (Peng et al. 2023, section 3.2; ends as in its
      implementation).
    """
    divided = frequencies / scaling.factor
    if scaling.kind == "linear":
        return divided
    assert scaling.original_max_seq_len is not None
    if scaling.kind == "llama3":
        low = 1.0 if scaling.low_freq_factor is None else scaling.low_freq_factor
        high = 4.0 if scaling.high_freq_factor is None else scaling.high_freq_factor
        turns = scaling.original_max_seq_len * frequencies / (2 * math.pi)
        kept = ((turns - low) / (high - low)).clamp(0, 1)
    else:
        fast = 32.0 if scaling.beta_fast is None else scaling.beta_fast
        slow = 1.0 if scaling.beta_slow is None else scaling.beta_slow
        n_rotated = 2 * len(frequencies)

        def pair_with(turns: float) -> float:
            wavelength = scaling.original_max_seq_len / turns  # type: ignore[operator]
            return n_rotated * math.log(wavelength / (2 * math.pi)) / (2 * math.log(theta))

        first, last = pair_with(fast), pair_with(slow)
        if scaling.truncate is None or scaling.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, n_rotated - 1)
        pairs = torch.arange(len(frequencies), device=frequencies.device, dtype=frequencies.dtype)
        # Where both ends are one pair the ramp is a step.
        kept = 1.0 - ((pairs - first) / (max(last - first, 0.001))).clamp(0, 1)
    return kept * frequencies + (1 - kept) * divided


def rotate(x_BHTK: Tensor, rope_2TR: Tensor) -> Tensor:
    """Rotate the pairs `(x_j, x_{j + R/2})` of every head by their position's angles, in fp32; keeps the type.

    Pairing the two halves is the layout of Llama's checkpoints on the Hugging Face hub. Of a head's K numbers the first
    R are rotated. A table of its own for each row is `(2, B, 1, T, R/2)`.
    """
    dtype = compute_dtype(x_BHTK.dtype)
    if rope_2TR.dtype != dtype:
        # Mixed-precision wrappers may cast a block's inputs; for FSDP2 set cast_forward_inputs=False in the policy.
        raise TypeError(f"the rotary table arrived as {rope_2TR.dtype}, not {dtype}; do not cast a block's inputs")
    cos, sin = rope_2TR.unbind()
    n_rotated = 2 * cos.shape[-1]
    a, b = x_BHTK[..., :n_rotated].to(dtype).chunk(2, dim=-1)
    rotated = torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1).to(x_BHTK.dtype)
    return rotated if n_rotated == x_BHTK.shape[-1] else torch.cat((rotated, x_BHTK[..., n_rotated:]), dim=-1)


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
