"""Decoder-only transformer, pre-norm: what a single device would compute.

Shapes: B batch, T position, D width of the residual stream, V vocabulary, K width of a head, G key and value heads,
S key position.
"""

from __future__ import annotations

from typing import TypedDict

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.errors import UserError
from models.attention import Attention
from models.cache import KVCache
from models.config import ModelConfig
from models.documents import Documents, find_documents
from models.init import Init
from models.layers import MLP, Norm, compute_dtype, make_norm
from models.loss import summed_cross_entropy
from models.positions import rope_table, sinusoidal_table, take_rows


class Role(TypedDict):
    """What an optimizer must know of a parameter; see `Transformer.parameter_roles`."""

    role: str
    parts: int
    heads: int


class Block(nn.Module):
    """`y = x + attention(norm(x))`, then `y + mlp(norm(y))` (Xiong et al. 2020, pre-LN)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = make_norm(config, config.d_model)
        self.attention = Attention(config)
        self.mlp_norm = make_norm(config, config.d_model)
        self.mlp = MLP(config)

    def forward(
        self,
        x_BTD: Tensor,
        rope_2TK: Tensor | None = None,
        cached_k_BGSK: Tensor | None = None,
        cached_v_BGSK: Tensor | None = None,
        documents: Documents | None = None,
    ) -> Tensor:
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), rope_2TK, cached_k_BGSK, cached_v_BGSK, documents)
        return x_BTD + self.mlp(self.mlp_norm(x_BTD))


class Transformer(nn.Module):
    """Token ids in; logits, or the summed loss, out. No dropout and no randomness.

    Everything that needs the embedding, the final norm or the head happens in this `forward`, and a block's parameters
    are read only in that block's `forward`: a wrapper that gathers parameters module by module can rely on it.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab, config.d_model)
        learned = config.position == "learned"
        self.position_embedding = nn.Embedding(config.max_seq_len, config.d_model) if learned else None
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layers))
        self.norm = make_norm(config, config.d_model) if config.final_norm else None
        self.head = None if config.tie_embeddings else nn.Linear(config.d_model, config.vocab, bias=False)

    def forward(
        self,
        tokens_BT: Tensor,
        targets_BT: Tensor | None = None,
        mask_BT: Tensor | None = None,
        cache: KVCache | None = None,
        documents_BT: Tensor | None = None,
    ) -> Tensor:
        """Logits `(B, T, V)`, or with targets the SUM of `-log p(target)` where the mask is true, in fp32.

        Args:
            tokens_BT: int64 ids below `vocab_size` (not checked here).
            targets_BT: int64 ids to predict at each position.
            mask_BT: bool; where false, the target does not count. None: all count.
            cache: keys and values of earlier tokens; this call's are appended. For generation, without gradients.
            documents_BT: int, the document of each token, non-decreasing along T. A token then sees only its own
                document, and positions start at 0 in each. None: a row is one document. Not together with a cache.

        Raises:
            UserError: the sequence is longer than `model.max_seq_len`.
        """
        documents = self._documents(tokens_BT, documents_BT, cache)
        x_BTD, rope_2TK = self._embed(tokens_BT, cache, documents)
        for i, block in enumerate(self.blocks):
            if documents is not None:
                x_BTD = block(x_BTD, rope_2TK, None, None, documents)
            elif cache is None:
                x_BTD = block(x_BTD, rope_2TK)
            else:
                x_BTD = block(x_BTD, rope_2TK, *cache.window(i, tokens_BT.shape[1]))
        if cache is not None:
            cache.length += tokens_BT.shape[1]
        if self.norm is not None:
            x_BTD = self.norm(x_BTD)

        weight_VD = self.embedding.weight if self.head is None else self.head.weight
        if targets_BT is None:
            logits_BTV = F.linear(x_BTD, weight_VD)
            return logits_BTV.to(compute_dtype(logits_BTV.dtype))
        if mask_BT is None:
            mask_BT = torch.ones_like(targets_BT, dtype=torch.bool)
        return summed_cross_entropy(x_BTD.flatten(0, 1), weight_VD, targets_BT.flatten(), mask_BT.flatten())

    def _documents(self, tokens_BT: Tensor, documents_BT: Tensor | None, cache: KVCache | None) -> Documents | None:
        """What all blocks need to know of the documents."""
        if documents_BT is None:
            return None
        if cache is not None:
            raise ValueError("documents go with whole rows, a cache with the rest of one: give one of the two")
        if documents_BT.shape != tokens_BT.shape:
            raise ValueError(f"documents of shape {tuple(documents_BT.shape)} for tokens {tuple(tokens_BT.shape)}")
        return find_documents(documents_BT, self.config, self.embedding.weight.dtype)

    def _embed(
        self, tokens_BT: Tensor, cache: KVCache | None, documents: Documents | None
    ) -> tuple[Tensor, Tensor | None]:
        """The residual stream's start and, for rotary positions, the table that all blocks share."""
        B, T = tokens_BT.shape
        start = 0 if cache is None else cache.length
        if cache is not None:
            cache.reserve(B, T)
        if start + T > self.config.max_seq_len:
            raise UserError(
                f"a sequence of {start + T} tokens is longer than model.max_seq_len={self.config.max_seq_len}; "
                "raise model.max_seq_len, or shorten data.seq_len"
            )
        weight_VD = self.embedding.weight
        # Gradients of tokens with one id are summed in fp32. A GPU's kernel does so; the CPU's takes the table's type.
        summed = compute_dtype(weight_VD.dtype) if weight_VD.device.type == "cpu" else weight_VD.dtype
        x_BTD = F.embedding(tokens_BT, weight_VD.to(summed)).to(weight_VD.dtype)
        positions_T = torch.arange(start, start + T, device=tokens_BT.device)
        dtype = compute_dtype(x_BTD.dtype)
        # The tables are those of one long document, from which the tokens of several take their rows.
        positions_BT = None if documents is None else positions_T - documents.starts_BT
        if self.config.position == "rope":
            rope_2TK = rope_table(positions_T, self.config.d_head, self.config.rope_theta, dtype)
            return x_BTD, rope_2TK if positions_BT is None else rope_2TK[:, positions_BT[:, None]]
        if self.position_embedding is not None:
            x_BTD = x_BTD + take_rows(self.position_embedding(positions_T), positions_BT)
        elif self.config.position == "sinusoidal":
            table_TD = sinusoidal_table(positions_T, self.config.d_model, dtype)
            x_BTD = (x_BTD + take_rows(table_TD, positions_BT)).to(x_BTD.dtype)
        return x_BTD, None

    def parameter_roles(self) -> dict[str, Role]:
        """Role of every parameter by name, as plain data for the optimizer (rule 6).

        `role`: `embedding` (token and learned-position tables), `head`, `hidden_matrix` (every matrix inside a block),
        `vector` (gains and biases). `parts`: matrices fused along dim 0, always 1 here. `heads`: heads stacked along
        dim 0, which the rows of wq, wk and wv are; 1 for all others, also for wo, whose heads lie along dim 1.
        """
        heads = {"wq": self.config.n_heads, "wk": self.config.kv_heads, "wv": self.config.kv_heads}
        roles: dict[str, Role] = {}
        for name, module, leaf in self._owners():
            last = name.split(".")[-2]
            if leaf == "bias" or isinstance(module, Norm):
                roles[name] = {"role": "vector", "parts": 1, "heads": 1}
            elif isinstance(module, nn.Embedding):
                roles[name] = {"role": "embedding", "parts": 1, "heads": 1}
            elif module is self.head:
                roles[name] = {"role": "head", "parts": 1, "heads": 1}
            else:
                roles[name] = {"role": "hidden_matrix", "parts": 1, "heads": heads.get(last, 1)}
        return roles

    def initial_values(self) -> dict[str, Init]:
        """How every parameter starts: GPT-2's scheme (Radford et al. 2019, 2.3), as plain data.

        Matrices are normal with `init_std`; wo and w_down, whose outputs add up over 2 n_layers residual branches, with
        `init_std / sqrt(2 n_layers)`. Gains are ones, biases zeros.
        """
        residual_std = self.config.init_std / (2 * self.config.n_layers) ** 0.5
        values: dict[str, Init] = {}
        for name, module, leaf in self._owners():
            if leaf == "bias":
                values[name] = Init("zeros")
            elif isinstance(module, Norm):
                values[name] = Init("ones")
            else:
                residual = name.split(".")[-2] in ("wo", "w_down")
                values[name] = Init("normal", residual_std if residual else self.config.init_std)
        return values

    def _owners(self) -> list[tuple[str, nn.Module, str]]:
        """(full name, owning module, last part of the name) of every parameter."""
        return [
            (f"{path}.{leaf}", module, leaf)
            for path, module in self.named_modules()
            for leaf, _ in module.named_parameters(recurse=False)
        ]
