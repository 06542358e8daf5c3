"""Attention whose scores are more than products of queries and keys, written out: no fused kernel is made for it.

Shapes: B batch, T query position, S key position, H query heads, G key and value heads, K width of a head, C offsets
of the relative bias.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from models.config import ModelConfig
from models.layers import compute_dtype


class Scores(nn.Module):
    """`softmax(cap(scale Q K^T) + bias) V`, with a column more in the softmax for the sink.

    - `attention_softcap` c: scores s become `c tanh(s / c)` (Gemma Team 2024, section 2).
    - `position: relative`: head h adds `relative_bias[h, min(t - s, C - 1)]` (after Shaw et al. 2018, eq. 5, and Raffel
      et al. 2020, section 2.1, whose number per offset this is, without their buckets).
    - `attention_sinks`: head h has a score of its own, `sinks[h]`, that takes its share of the softmax and has no value
      (Agarwal et al. 2025, gpt-oss; Xiao et al. 2023).

    Scores are `(B, H, T, S)` in fp32 (fp64 in a model of fp64), so memory is square in the length.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.softcap = config.attention_softcap
        self.scale = config.d_head**-0.5 if config.attention_scale is None else config.attention_scale
        self.sinks = nn.Parameter(torch.zeros(config.n_heads)) if config.attention_sinks else None
        relative = config.position == "relative"
        offsets = config.relative_clip + 1
        self.relative_bias = nn.Parameter(torch.zeros(config.n_heads, offsets)) if relative else None

    def forward(self, q_BHTK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor, mask: Tensor) -> Tensor:
        """Returns `(B, H, T, K)`. `mask` is bool, true where a query sees a key; the last T keys are the queries'."""
        H, T, S = q_BHTK.shape[1], q_BHTK.shape[2], k_BGSK.shape[2]
        k_BHSK, v_BHSK = (x.repeat_interleave(H // x.shape[1], dim=1) for x in (k_BGSK, v_BGSK))
        dtype = compute_dtype(q_BHTK.dtype)
        scores_BHTS = (q_BHTK @ k_BHSK.transpose(2, 3)).to(dtype) * self.scale
        if self.softcap is not None:
            scores_BHTS = self.softcap * (scores_BHTS / self.softcap).tanh()
        if self.relative_bias is not None:
            back_TS = torch.arange(S - T, S, device=mask.device)[:, None] - torch.arange(S, device=mask.device)
            back_TS = back_TS.clamp(0, self.relative_bias.shape[1] - 1)
            scores_BHTS = scores_BHTS + self.relative_bias.to(dtype)[:, back_TS]
        scores_BHTS = scores_BHTS.masked_fill(~mask, float("-inf"))
        if self.sinks is not None:
            sinks = self.sinks.to(dtype)[:, None, None].expand(len(scores_BHTS), H, T, 1)
            weights_BHTS = torch.cat([scores_BHTS, sinks], dim=-1).softmax(dim=-1)[..., :-1]
        else:
            weights_BHTS = scores_BHTS.softmax(dim=-1)
        return weights_BHTS.to(v_BHSK.dtype) @ v_BHSK
