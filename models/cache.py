"""Keys and values of the tokens seen so far, for generation.

Shapes: B batch, G key and value heads, S key position, K width of a head.
"""

from __future__ import annotations

import torch
from torch import Tensor

from common.errors import UserError
from models.config import ModelConfig


class KVCache:
    """Room for `max_len` positions of `batch` sequences in every layer; `Transformer.forward` writes and advances it.

    Set `length = 0` to start again. For use under `torch.no_grad()`: it is written in place.
    """

    def __init__(
        self, config: ModelConfig, batch: int, max_len: int, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        """Memory: `2 n_layers batch n_kv_heads max_len head_dim` numbers of `dtype` (the model's)."""
        if max_len > config.max_seq_len:
            raise UserError(
                f"{max_len} positions asked of a model made for {config.max_seq_len}; "
                "generate fewer tokens, or raise model.max_seq_len"
            )
        shape = (config.n_layers, batch, config.kv_heads, max_len, config.d_head)
        self.k_LBGSK = torch.zeros(shape, dtype=dtype, device=device)
        self.v_LBGSK = torch.zeros(shape, dtype=dtype, device=device)
        self.batch, self.max_len, self.length = batch, max_len, 0

    def reserve(self, batch: int, n_tokens: int) -> None:
        """Check that `n_tokens` more positions of `batch` sequences fit."""
        if batch != self.batch:
            raise ValueError(f"the cache holds {self.batch} sequences, not {batch}")
        if self.length + n_tokens > self.max_len:
            raise UserError(
                f"{self.length} + {n_tokens} tokens do not fit into a cache of {self.max_len}; generate fewer tokens"
            )

    def window(self, layer: int, n_tokens: int) -> tuple[Tensor, Tensor]:
        """Views `(B, G, length + n_tokens, K)` of a layer's keys and values; the last `n_tokens` are to be written."""
        end = self.length + n_tokens
        return self.k_LBGSK[layer, :, :, :end], self.v_LBGSK[layer, :, :, :end]
