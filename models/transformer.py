"""Decoder-only transformer: what a single device would compute.

Shapes: B batch, T position, D width of the residual stream, V vocabulary, R rotated numbers of a head, L layer, E
expert.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypedDict

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.errors import UserError
from models.attention import Attention
from models.cache import CachedKeys, KVCache
from models.config import ModelConfig
from models.documents import Documents, find_documents
from models.init import Init
from models.layers import MLP, Norm, compute_dtype, make_norm
from models.loss import capped, summed_cross_entropy
from models.moe import Experts, MoE, Routing
from models.positions import rope_table, sinusoidal_table, take_rows


class Role(TypedDict):
    """What an optimizer must know of a parameter; see `Transformer.parameter_roles`."""

    role: str
    parts: int
    heads: int


class Losses(NamedTuple):
    """What a forward with targets gives: sums, which the trainer divides by counts of the whole global batch."""

    cross_entropy: Tensor
    """Sum of `-log p(target)` over the tokens that count, in nats: a scalar, fp32 (fp64 in a model of fp64)."""
    routing: Routing | None
    """Of all layers with experts together; see `add_up`. None in a dense model."""


def look_up(tokens_BT: Tensor, weight_VD: Tensor) -> Tensor:
    """Rows of the embedding by token."""
    # Gradients of tokens with one id are summed in fp32. A GPU's kernel does so; the CPU's takes the table's type.
    summed = compute_dtype(weight_VD.dtype) if weight_VD.device.type == "cpu" else weight_VD.dtype
    return F.embedding(tokens_BT, weight_VD.to(summed)).to(weight_VD.dtype)


def summed_loss(x_BTD: Tensor, weight_VD: Tensor, targets_BT: Tensor, mask_BT: Tensor, softcap: float | None) -> Tensor:
    """`summed_cross_entropy` of rows."""
    hidden_ND, targets_N, mask_N = x_BTD.flatten(0, 1), targets_BT.flatten(), mask_BT.flatten()
    return summed_cross_entropy(hidden_ND, weight_VD, targets_N, mask_N, softcap=softcap)


class Block(nn.Module):
    """Attention and MLP (or experts), each f in a residual branch: `x + f(norm(x))` (Xiong et al. 2020, pre-LN).

    Or, by `norm_placement`, `norm(x + f(x))` (Vaswani et al. 2017, post-LN) or `x + norm(f(norm(x)))` (Gemma Team
    2024).
    """

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.placement = config.norm_placement
        both, width = self.placement == "both", config.d_model
        self.attention_norm = make_norm(config, width)
        self.attention = Attention(config, layer)
        self.attention_post_norm = make_norm(config, width) if both else None
        self.mlp_norm = make_norm(config, width)
        self.mlp = None if config.is_sparse(layer) else MLP(config)
        self.moe = MoE(config) if config.is_sparse(layer) else None
        self.mlp_post_norm = make_norm(config, width) if both else None

    def forward(
        self,
        x_BTD: Tensor,
        rope_2TR: Tensor | None = None,
        cached: CachedKeys | None = None,
        documents: Documents | None = None,
        counted_BT: Tensor | None = None,
    ) -> tuple[Tensor, Routing | None]:
        """The residual stream after this block, and what its router did.

        Args:
            counted_BT: bool, the tokens that count for the load of experts; None: all.
        """
        h_BTD = self.attention(self._before(self.attention_norm, x_BTD), rope_2TR, cached, documents)
        x_BTD = self._after(self.attention_norm, self.attention_post_norm, x_BTD, h_BTD)
        h_BTD, routing = self._before(self.mlp_norm, x_BTD), None
        if self.moe is not None:
            # What an expert's capacity drops depends on a whole row, which a cache does not see.
            h_BTD, routing = self.moe(h_BTD, counted_BT, drop=cached is None)
        elif self.mlp is not None:
            h_BTD = self.mlp(h_BTD)
        return self._after(self.mlp_norm, self.mlp_post_norm, x_BTD, h_BTD), routing

    def _before(self, norm: Norm, x_BTD: Tensor) -> Tensor:
        return x_BTD if self.placement == "post" else norm(x_BTD)

    def _after(self, norm: Norm, post_norm: Norm | None, x_BTD: Tensor, h_BTD: Tensor) -> Tensor:
        if self.placement == "post":
            return norm(x_BTD + h_BTD)
        return x_BTD + (h_BTD if post_norm is None else post_norm(h_BTD))


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
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.n_layers))
        self.norm = make_norm(config, config.d_model) if config.final_norm else None
        self.head = None if config.tie_embeddings else nn.Linear(config.d_model, config.vocab, bias=False)
        # Where ranks share the vocabulary and the tokens of a row, these are other functions.
        self.look_up: Callable[[Tensor, Tensor], Tensor] = look_up
        self.own_part: Callable[[Tensor], Tensor] = lambda table_TD: table_TD
        self.summed_loss: Callable[..., Tensor] = summed_loss

    def forward(
        self,
        tokens_BT: Tensor,
        targets_BT: Tensor | None = None,
        mask_BT: Tensor | None = None,
        cache: KVCache | None = None,
        documents_BT: Tensor | None = None,
    ) -> Tensor | Losses:
        """Logits `(B, T, V)` in fp32, or with targets the SUM of `-log p(target)` where the mask is true.

        Args:
            tokens_BT: int64 ids below `vocab_size` (not checked here).
            targets_BT: int64 ids to predict at each position.
            mask_BT: bool; where false, the target does not count, nor the token for the load of experts. None: all do.
            cache: keys and values of earlier tokens; this call's are appended. For generation, without gradients.
            documents_BT: int, the document of each token, non-decreasing along T. A token then sees only its own
                document, and positions start at 0 in each. None: a row is one document. Not together with a cache.

        Raises:
            UserError: the sequence is longer than `model.max_seq_len`.
        """
        documents = self._documents(tokens_BT, documents_BT, cache)
        starts_BT = None
        if documents is not None:
            starts_BT = documents.starts_BT
        elif cache is not None:
            cache.reserve(*tokens_BT.shape)
            starts_BT = cache.starts(tokens_BT.shape[1])
        x_BTD, ropes = self._embed(tokens_BT, 0 if cache is None else cache.length, starts_BT)
        routings = []
        for i, block in enumerate(self.blocks):
            rope_2TR = ropes[self.config.window_of(i) is not None]
            cached = None if cache is None else cache.layer(i, tokens_BT.shape[1], starts_BT)
            x_BTD, routing = block(x_BTD, rope_2TR, cached, documents, mask_BT)
            routings += [] if routing is None else [routing]
        if cache is not None:
            cache.length += tokens_BT.shape[1]
        if self.norm is not None:
            x_BTD = self.norm(x_BTD)

        weight_VD = self.embedding.weight if self.head is None else self.head.weight
        if targets_BT is None:
            logits_BTV = F.linear(x_BTD, weight_VD)
            return capped(logits_BTV.to(compute_dtype(logits_BTV.dtype)), self.config.logit_softcap)
        if mask_BT is None:
            mask_BT = torch.ones_like(targets_BT, dtype=torch.bool)
        loss = self.summed_loss(x_BTD, weight_VD, targets_BT, mask_BT, self.config.logit_softcap)
        return Losses(loss, Routing.add_up(routings) if routings else None)

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
        self, tokens_BT: Tensor, first: int, starts_BT: Tensor | None
    ) -> tuple[Tensor, tuple[Tensor | None, Tensor | None]]:
        """The residual stream's start and, for rotary positions, the tables of blocks without and with a window.

        Args:
            first: place of the first token in its row.
            starts_BT: place from which the positions of each token count; None: 0.
        """
        config, device = self.config, tokens_BT.device
        end = first + tokens_BT.shape[1]
        if end > config.max_seq_len:
            raise UserError(
                f"a sequence of {end} tokens is longer than model.max_seq_len={config.max_seq_len}; "
                "raise model.max_seq_len, or shorten data.seq_len"
            )
        x_BTD = self.look_up(tokens_BT, self.embedding.weight)
        if config.scale_embedding:
            x_BTD = x_BTD * config.d_model**0.5
        dtype = compute_dtype(x_BTD.dtype)
        places_T = torch.arange(first, end, device=device)
        # Rows that count from places of their own take their positions from the table of one that counts from 0.
        positions_BT = None if starts_BT is None else places_T - starts_BT
        table_T = places_T if positions_BT is None else torch.arange(end, device=device)
        if config.position == "rope":
            tables = [rope_table(config, table_T, dtype)]
            tables.append(rope_table(config, table_T, dtype, local=True) if config.rope_theta_local else tables[0])
            if positions_BT is not None:
                tables = [table_2TR[:, positions_BT[:, None]] for table_2TR in tables]
            return x_BTD, (tables[0], tables[1])
        if self.position_embedding is not None:
            x_BTD = x_BTD + self.own_part(take_rows(self.position_embedding(table_T), positions_BT))
        elif config.position == "sinusoidal":
            table_TD = sinusoidal_table(table_T, config.d_model, dtype)
            x_BTD = (x_BTD + self.own_part(take_rows(table_TD, positions_BT))).to(x_BTD.dtype)
        return x_BTD, (None, None)

    def expert_layers(self) -> list[MoE]:
        """The layers with experts, in order of their blocks."""
        return [block.moe for block in self.blocks if isinstance(block.moe, MoE)]

    def parameter_roles(self) -> dict[str, Role]:
        """Role of every parameter by name, as plain data for the optimizer (rule 6).

        `role`: `embedding` (tables by token or by position), `head`, `hidden_matrix` (every matrix inside a block but
        those below), `expert_matrix` (the matrices of all experts of a layer, stacked along dim 0), `router`, `vector`
        (gains, biases, sinks). `parts`: matrices fused along dim 0, always 1 here. `heads`: heads stacked along dim 0,
        which the rows of wq, wk and wv are; 1 for all others, also for wo, whose heads lie along dim 1.
        """
        heads = {"wq": self.config.n_heads, "wk": self.config.kv_heads, "wv": self.config.kv_heads}
        roles: dict[str, Role] = {}
        for name, module, last in self._owners():
            role = "hidden_matrix"
            if last == "relative_bias" or isinstance(module, nn.Embedding):
                role = "embedding"
            elif name.endswith("bias") or last == "sinks" or isinstance(module, Norm):
                role = "vector"
            elif module is self.head:
                role = "head"
            elif last == "router":
                role = "router"
            elif isinstance(module, Experts):
                role = "expert_matrix"
            roles[name] = {"role": role, "parts": 1, "heads": heads.get(last, 1) if role == "hidden_matrix" else 1}
        return roles

    def initial_values(self) -> dict[str, Init]:
        """How every parameter starts: GPT-2's scheme (Radford et al. 2019, 2.3), as plain data.

        Matrices are normal with `init_std`; wo and w_down, whose outputs add up over 2 n_layers residual branches, with
        `init_std / sqrt(2 n_layers)`. Gains are ones, biases, sinks and the numbers of relative positions zeros.
        Buffers start at zero. `mup_base_width` scales them by width (Yang et al. 2022, table 3).
        """
        config = self.config
        ratio = 1.0 if config.mup_base_width is None else config.mup_base_width / config.d_model
        scales = {"hidden_matrix": ratio**0.5, "expert_matrix": ratio**0.5, "head": ratio, "router": ratio}
        roles = self.parameter_roles()
        values: dict[str, Init] = {}
        for name, module, last in self._owners():
            if name.endswith("bias") or last == "sinks":
                values[name] = Init("zeros")
            elif isinstance(module, Norm):
                values[name] = Init("zeros" if module.unit_offset else "ones")
            else:
                std = config.init_std * scales.get(roles[name]["role"], 1.0)
                values[name] = Init("normal", std / (2 * config.n_layers) ** 0.5 if last in ("wo", "w_down") else std)
        return values

    def _owners(self) -> list[tuple[str, nn.Module, str]]:
        """(full name, owning module, last part of the name that is no mere `weight` or `bias`) of every parameter."""
        return [
            (f"{path}.{leaf}", module, path.split(".")[-1] if leaf in ("weight", "bias") else leaf)
            for path, module in self.named_modules()
            for leaf, _ in module.named_parameters(recurse=False)
        ]
