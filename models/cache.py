"""Keys and values of the tokens seen so far, for generation.

Shapes: L layer, B batch, T query position, G key and value heads, S key position, K width of a head.
"""

from __future__ import annotations

import torch
from torch import Tensor

from common.errors import UserError
from models.config import ModelConfig


class CachedKeys:
    """One layer's view of the cache in one forward."""

    def __init__(self, k_BGSK: Tensor, v_BGSK: Tensor, starts_BT: Tensor | None) -> None:
        self._k_BGSK, self._v_BGSK = k_BGSK, v_BGSK
        self.starts_BT = starts_BT
        """The first key that each query may see; None: all."""

    def add(self, k_BGTK: Tensor, v_BGTK: Tensor) -> tuple[Tensor, Tensor]:
        """Write the keys and values of T more tokens; return those of all, `(B, G, S, K)`."""
        n = k_BGTK.shape[2]
        self._k_BGSK[:, :, -n:] = k_BGTK
        self._v_BGSK[:, :, -n:] = v_BGTK
        return self._k_BGSK, self._v_BGSK


class KVCache:
    """Room for `max_len` positions of `batch` sequences in every layer; `Transformer.forward` writes and advances it.

    Sequences of different lengths are filled up at their left, and `padding_B` says by how many tokens: these are seen
    by no other token, and positions start at 0 after them. Set `length = 0` to start again. For use under
    `torch.no_grad()`: it is written in place.
    """

    def __init__(
        self,
        config: ModelConfig,
        batch: int,
        max_len: int,
        dtype: torch.dtype,
        device: torch.device | str,
        padding_B: Tensor | None = None,
    ) -> None:
        """Memory: `2 n_layers batch n_kv_heads max_len head_dim` numbers of `dtype` (the model's).

        Args:
            padding_B: int64, the number of tokens at the left of each sequence that do not belong to it; None: 0.
        """
        longest = max_len if padding_B is None else max_len - int(padding_B.min())
        if longest > config.max_seq_len:
            raise UserError(
                f"{longest} positions asked of a model made for {config.max_seq_len}; "
                "generate fewer tokens, or raise model.max_seq_len"
            )
        shape = (config.n_layers, batch, config.kv_heads, max_len, config.d_head)
        self.k_LBGSK = torch.zeros(shape, dtype=dtype, device=device)
        self.v_LBGSK = torch.zeros(shape, dtype=dtype, device=device)
        self.batch, self.max_len, self.length = batch, max_len, 0
        self.padding_B = padding_B

    def reserve(self, batch: int, n_tokens: int) -> None:
        """Check that `n_tokens` more positions of `batch` sequences fit."""
        if batch != self.batch:
            raise ValueError(f"the cache holds {self.batch} sequences, not {batch}")
        if self.length + n_tokens > self.max_len:
            raise UserError(
                f"{self.length} + {n_tokens} tokens do not fit into a cache of {self.max_len}; generate fewer tokens"
            )

    def starts(self, n_tokens: int) -> Tensor | None:
        """`(B, T)`: the first key that each of the next `n_tokens` may see; None: all that come before it.

        What fills a sequence up is kept apart like a document of its own.
        """
        if self.padding_B is None:
            return None
        places_T = torch.arange(self.length, self.length + n_tokens, device=self.padding_B.device)
        return torch.where(places_T < self.padding_B[:, None], 0, self.padding_B[:, None])

    def layer(self, layer: int, n_tokens: int, starts_BT: Tensor | None) -> CachedKeys:
        """A layer's keys and values up to and with the next `n_tokens`, which are to be added."""
        end = self.length + n_tokens
        return CachedKeys(self.k_LBGSK[layer, :, :, :end], self.v_LBGSK[layer, :, :, :end], starts_BT)
