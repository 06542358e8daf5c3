"""Causal multi-head attention with grouped queries.

Shapes: B batch, T query position, S key position, D width of the residual stream, H query heads, G key and value
heads, K width of a head.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.config import ModelConfig
from models.documents import Documents, attend
from models.layers import make_norm
from models.positions import rotate


class Attention(nn.Module):
    """`softmax(Q K^T / sqrt(K)) V`, causal (Vaswani et al. 2017, eq. 1), `G` heads of keys shared by `H` of queries.

    With `qk_norm`, every query and key head is normalised before it is rotated, with one gain for all heads.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        d, k, bias = config.d_model, config.d_head, config.attention_bias
        self.d_head, self.grouped = k, config.n_heads != config.kv_heads
        self.wq = nn.Linear(d, config.n_heads * k, bias=bias)
        self.wk = nn.Linear(d, config.kv_heads * k, bias=bias)
        self.wv = nn.Linear(d, config.kv_heads * k, bias=bias)
        self.wo = nn.Linear(config.n_heads * k, d, bias=bias)
        self.q_norm = make_norm(config, k) if config.qk_norm else None
        self.k_norm = make_norm(config, k) if config.qk_norm else None

    def forward(
        self,
        x_BTD: Tensor,
        rope_2TK: Tensor | None = None,
        cached_k_BGSK: Tensor | None = None,
        cached_v_BGSK: Tensor | None = None,
        documents: Documents | None = None,
    ) -> Tensor:
        """Returns `(B, T, D)`. The cached tensors end in T rows that are still to be written, and are written here.

        With `documents`, and then without a cache, a token sees only its own document.
        """
        B, T, _ = x_BTD.shape
        q_BTHK = self.wq(x_BTD).view(B, T, -1, self.d_head)
        k_BTGK = self.wk(x_BTD).view(B, T, -1, self.d_head)
        v_BTGK = self.wv(x_BTD).view(B, T, -1, self.d_head)
        if self.q_norm is not None and self.k_norm is not None:
            q_BTHK, k_BTGK = self.q_norm(q_BTHK), self.k_norm(k_BTGK)
        q_BHTK, k_BGSK, v_BGSK = q_BTHK.transpose(1, 2), k_BTGK.transpose(1, 2), v_BTGK.transpose(1, 2)
        if rope_2TK is not None:
            q_BHTK, k_BGSK = rotate(q_BHTK, rope_2TK), rotate(k_BGSK, rope_2TK)
        if documents is not None:
            return self.wo(attend(q_BHTK, k_BGSK, v_BGSK, documents).flatten(2))

        mask_TS = None
        if cached_k_BGSK is not None and cached_v_BGSK is not None:
            cached_k_BGSK[:, :, -T:] = k_BGSK
            cached_v_BGSK[:, :, -T:] = v_BGSK
            k_BGSK, v_BGSK = cached_k_BGSK, cached_v_BGSK
            S = k_BGSK.shape[2]
            # SDPA's is_causal lines the first query up with the first key; here the last ones belong together.
            mask_TS = torch.ones(T, S, dtype=torch.bool, device=x_BTD.device).tril(diagonal=S - T)
        y_BHTK = F.scaled_dot_product_attention(
            q_BHTK,
            k_BGSK,
            v_BGSK,
            attn_mask=mask_TS,
            is_causal=mask_TS is None,
            enable_gqa=self.grouped,
        )
        return self.wo(y_BHTK.transpose(1, 2).flatten(2))
