"""Causal multi-head attention with grouped queries.

Shapes: B batch, T query position, S key position, D width of the residual stream, H query heads, G key and value
heads, K width of a head.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.cache import CachedKeys
from models.config import ModelConfig
from models.documents import Documents, attend, document_mask
from models.layers import make_norm
from models.positions import rotate
from models.scores import Scores


class Attention(nn.Module):
    """`softmax(Q K^T / sqrt(K)) V`, causal (Vaswani et al. 2017, eq. 1), `G` heads of keys shared by `H` of queries.

    With `qk_norm`, every query and key head is normalised before it is rotated, with one gain for all heads. With a
    window, which `layer` decides, query t sees keys t - window + 1 to t. What else may happen to the scores is in
    `models/scores.py`; without it, a fused kernel computes the whole.
    """

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        d, k, bias = config.d_model, config.d_head, config.attention_bias
        out_bias = bias if config.attention_out_bias is None else config.attention_out_bias
        self.d_head, self.grouped, self.window = k, config.n_heads != config.kv_heads, config.window_of(layer)
        self.scale = config.attention_scale  # None: 1 / sqrt(K)
        self.wq = nn.Linear(d, config.n_heads * k, bias=bias)
        self.wk = nn.Linear(d, config.kv_heads * k, bias=bias)
        self.wv = nn.Linear(d, config.kv_heads * k, bias=bias)
        self.wo = nn.Linear(config.n_heads * k, d, bias=out_bias)
        self.q_norm = make_norm(config, k) if config.qk_norm else None
        self.k_norm = make_norm(config, k) if config.qk_norm else None
        self.scores = None if config.plain_scores else Scores(config)

    def forward(
        self,
        x_BTD: Tensor,
        rope_2TK: Tensor | None = None,
        cached: CachedKeys | None = None,
        documents: Documents | None = None,
    ) -> Tensor:
        """Returns `(B, T, D)`. Keys and values are added to `cached`, and those before them seen.

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
        if documents is not None and self.scores is None:
            y_BTHK = attend(q_BHTK, k_BGSK, v_BGSK, documents, self.window, self.scale)
            return self.wo(y_BTHK.flatten(2))

        starts_BT = None if documents is None else documents.starts_BT
        if cached is not None:
            k_BGSK, v_BGSK = cached.add(k_BGSK, v_BGSK)
            starts_BT = cached.starts_BT
        S = k_BGSK.shape[2]
        # SDPA's is_causal lines the first query up with the first key; with a cache the last ones belong together.
        causal = cached is None and starts_BT is None and (self.window is None or self.window >= T)
        mask = None if causal and self.scores is None else visible(T, S, x_BTD.device, self.window, starts_BT)
        if self.scores is not None:
            assert mask is not None
            return self.wo(self.scores(q_BHTK, k_BGSK, v_BGSK, mask).transpose(1, 2).flatten(2))
        y_BHTK = F.scaled_dot_product_attention(
            q_BHTK,
            k_BGSK,
            v_BGSK,
            attn_mask=mask,
            is_causal=mask is None,
            enable_gqa=self.grouped,
            scale=self.scale,
        )
        return self.wo(y_BHTK.transpose(1, 2).flatten(2))


def visible(T: int, S: int, device: torch.device, window: int | None, starts_BT: Tensor | None) -> Tensor:
    """Which keys each query sees: bool `(T, S)`, or `(B, 1, T, S)` with `starts_BT`. The last T keys are the queries'.

    `starts_BT` is the first key that a query may see. Every query sees itself.
    """
    if starts_BT is not None:
        return document_mask(starts_BT, S, window)
    mask_TS = torch.ones(T, S, dtype=torch.bool, device=device).tril(diagonal=S - T)
    return mask_TS if window is None else mask_TS.triu(diagonal=S - T - window + 1)
