"""Mixture of experts: a router that sends each token to a few of many MLPs (Shazeer et al. 2017).

Shapes: B row, T position, N token of all rows (B T), K choice of a token (top_k), M assignment (N K), D width of the
residual stream, E expert, F hidden width of an expert.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.config import ModelConfig
from models.grouped import grouped_mm
from models.layers import MLP, activate, compute_dtype

# Keeps a sum of sigmoids that all vanish from dividing by zero; too small to change any other.
_TINY = 1e-20


class Routing(NamedTuple):
    """What a router did, returned and never stored, so that a forward that is run twice counts nothing twice."""

    balance: Tensor
    """Sum over rows of the loss that balances the load; see `balance_loss`. A scalar, fp32 (fp64 in fp64).

    Under `aux_loss_over: batch` this rank's part of the loss of a micro-batch."""
    z: Tensor
    """Sum over rows of the mean over counted tokens of `logsumexp(logits)^2` (Zoph et al. 2022, eq. 5)."""
    counts: Tensor
    """(E,) int64: how often counted tokens chose each expert, before any was dropped."""
    dropped: Tensor
    """int64 scalar: how many of those choices were dropped."""

    @staticmethod
    def add_up(layers: list[Routing]) -> Routing:
        """All layers in one: losses added up, counts `(L, E)` and dropped `(L,)`."""
        balance, z, counts, dropped = (torch.stack(parts) for parts in zip(*layers, strict=True))
        return Routing(balance.sum(), z.sum(), counts, dropped)


class Experts(nn.Module):
    """The MLPs of `models.layers`, one per expert, each for its own rows."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        assert config.moe is not None
        self.config = config
        e, d, f = config.moe.n_experts, config.d_model, config.d_ff_expert

        def table(wanted: bool, *shape: int) -> nn.Parameter | None:
            return nn.Parameter(torch.empty(shape)) if wanted else None

        self.w_gate = table(config.gated, e, f, d)
        self.w_up = nn.Parameter(torch.empty(e, f, d))
        self.w_down = nn.Parameter(torch.empty(e, d, f))
        self.gate_bias = table(config.gated and config.mlp_bias, e, f)
        self.up_bias = table(config.mlp_bias, e, f)
        self.down_bias = table(config.mlp_bias, e, d)
        self.held: Callable[[Tensor], Tensor] = lambda parameter: parameter
        """What of a parameter is on this device: all of it, unless experts are spread over several."""

    def forward(self, x_MD: Tensor, ends_E: Tensor, whole: bool = False) -> Tensor:
        """Rows sorted by expert, `ends` where each expert's end; zero for rows of none. See `grouped_mm`."""

        def product(x_M: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
            return grouped_mm(x_M, self.held(w), ends_E, None if bias is None else self.held(bias), whole)

        gate_MF = None if self.w_gate is None else product(x_MD, self.w_gate, self.gate_bias)
        up_MF = product(x_MD, self.w_up, self.up_bias)
        return product(activate(self.config, up_MF, gate_MF), self.w_down, self.down_bias)


def here(experts: Experts, x_MD: Tensor, ends_E: Tensor, whole: bool) -> Callable[[], Tensor]:
    """Bring rows to their experts, and what these make of them back: here all experts are on this device.

    `MoE.carry` can be another one that takes them further. It starts them on their way, and gives what waits for them.

    Args:
        x_MD: rows sorted by expert.
        ends_E: int32, where each expert's rows end. What lies behind the last is nobody's, and comes back as zeros.
        whole: that nothing lies there.
    """
    return partial(experts, x_MD, ends_E, whole)


class Take(torch.autograd.Function):
    """Rows of x in another order, each `k` times. The gradient gathers too, where torch's own would scatter: slowly, or
    in an order that changes from run to run."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows_M: Tensor, back_M: Tensor, k: int) -> Tensor:
        """`back`: where the copies of x's first row went, then those of the second, and so on."""
        ctx.save_for_backward(back_M)
        ctx.k = k
        return x.index_select(0, rows_M)

    @staticmethod
    def backward(ctx: Any, *dy: Tensor) -> tuple[Tensor | None, ...]:
        (back_M,) = ctx.saved_tensors
        if ctx.k == 1:
            return dy[0].index_select(0, back_M), None, None, None
        return F.embedding_bag(back_M.unflatten(0, (-1, ctx.k)), dy[0], mode="sum"), None, None, None


class Combine(torch.autograd.Function):
    """`sum over k of w[n, k] y[back[n, k]]`, in the type of w, without a copy of y for each step of the way."""

    @staticmethod
    def forward(ctx: Any, y_MD: Tensor, w_NK: Tensor, back_M: Tensor, order_M: Tensor) -> Tensor:
        """`order`: where each row of y belongs, of all k of the first n, then of the second, and so on."""
        ctx.save_for_backward(y_MD, w_NK, back_M, order_M)
        return F.embedding_bag(back_M.view_as(w_NK), y_MD.to(w_NK.dtype), per_sample_weights=w_NK, mode="sum")

    @staticmethod
    def backward(ctx: Any, *dy: Tensor) -> tuple[Tensor | None, ...]:
        y_MD, w_NK, back_M, order_M = ctx.saved_tensors
        dy_MD = dy[0].index_select(0, order_M // w_NK.shape[1])
        dw_M = (dy_MD * y_MD).sum(-1)
        dy_MD = dy_MD.mul_(w_NK.flatten().index_select(0, order_M)[:, None])
        return dy_MD.to(y_MD.dtype), dw_M.index_select(0, back_M).view_as(w_NK), None, None


class Router(nn.Linear):
    """Logits of experts, in fp32 or wider whatever comes in (Fedus et al. 2022, 2.4)."""

    def forward(self, x_BTD: Tensor) -> Tensor:
        dtype = compute_dtype(x_BTD.dtype)
        bias_E = None if self.bias is None else self.bias.to(dtype)
        return F.linear(x_BTD.to(dtype), self.weight.to(dtype), bias_E)


class MoE(nn.Module):
    """`shared(x) + sum over the chosen experts e of g_e expert_e(x)`, with g the gate weights.

    Scores are a softmax over the logits of all experts (Shazeer et al. 2017; Jiang et al. 2024, Mixtral) or a sigmoid
    of each (DeepSeek-AI 2024, V3, eqs. 12-16, with the selection bias). Gate weights are the scores of the chosen,
    normalised or not, times `routed_scale`; normalised softmax scores are the softmax over the chosen logits (gpt-oss).
    With top_k 1, not normalised, and a capacity it is the layer of Fedus et al. 2022, Switch Transformers.
    """

    selection_bias: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        assert config.moe is not None
        self.moe = config.moe
        self.router = Router(config.d_model, self.moe.n_experts, bias=self.moe.router_bias)
        self.experts = Experts(config)
        shared = self.moe.n_shared_experts
        self.shared = MLP(config, shared * config.d_ff_expert) if shared else None
        if self.moe.selection_bias:
            self.register_buffer("selection_bias", torch.zeros(self.moe.n_experts, dtype=torch.float32))
        self.carry = here
        self.whole_rows: Callable[[Tensor], Tensor] = lambda logits_BTE: logits_BTE
        self.own_part: Callable[[Tensor], Tensor] = lambda choices_BTK: choices_BTK
        """Where ranks share the tokens of a row: to what is decided over whole rows, and from it."""
        self.total: Callable[[Tensor], Tensor] = lambda counts: counts
        """Sums over all ranks that share a micro-batch, which is one unless the trainer knows of more."""

    def forward(self, x_BTD: Tensor, counted_BT: Tensor | None = None, drop: bool = True) -> tuple[Tensor, Routing]:
        """The layer's output in x's type, and what the router did.

        Args:
            counted_BT: bool, the tokens that count for losses and counts; None: all. The others are computed alike.
            drop: whether experts have a capacity where the config gives them one.
        """
        logits_BTE = self.whole_rows(self.router(x_BTD))
        scores_BTE = logits_BTE.sigmoid() if self.moe.router == "sigmoid" else logits_BTE.softmax(-1)
        chosen_BTK, weights_BTK = self._choose(scores_BTE)
        assigned_BTE = torch.zeros_like(scores_BTE, dtype=torch.bool).scatter(-1, chosen_BTK, True)
        if counted_BT is None:
            counted_BT = torch.ones_like(assigned_BTE[..., 0])
        counts_BE = (assigned_BTE & counted_BT[..., None]).sum(1)
        dropped = counts_BE.new_zeros(())
        limited = drop and self.moe.capacity_factor is not None
        if limited:
            kept_BTK = self._within_capacity(assigned_BTE).gather(-1, chosen_BTK)
            dropped = (counted_BT[..., None] & ~kept_BTK).sum()
            chosen_BTK = chosen_BTK.where(kept_BTK, self.moe.n_experts)
        own = (x_BTD, self.own_part(chosen_BTK), self.own_part(weights_BTK))
        x_ND, chosen_NK, weights_NK = (t.flatten(0, 1) for t in own)
        y_BTD = self.mix(x_ND, chosen_NK, weights_NK, whole=not limited).view_as(x_BTD)
        if self.moe.aux_loss_over == "sequence":
            balance = balance_loss(scores_BTE, counts_BE, counted_BT)
        else:
            balance = self._balance_of_batch(scores_BTE, counts_BE, counted_BT)
        return y_BTD, Routing(balance, z_loss(logits_BTE, counted_BT), counts_BE.sum(0), dropped)

    def mix(self, x_ND: Tensor, chosen_NK: Tensor, weights_NK: Tensor, whole: bool) -> Tensor:
        """What the chosen experts make of each token, weighted and added up in the weights' type; and the shared ones.

        Args:
            chosen_NK: int64 numbers of experts; E for a choice that goes nowhere and adds nothing.
            whole: that no choice is of that kind.
        """
        sorted_M, order_M = chosen_NK.flatten().sort(stable=True)
        experts_E = torch.arange(self.moe.n_experts, device=x_ND.device)
        ends_E = torch.searchsorted(sorted_M, experts_E, right=True, out_int32=True)
        places_M = torch.arange(chosen_NK.numel(), device=x_ND.device)
        back_M = torch.zeros_like(places_M).scatter(0, order_M, places_M)
        k = chosen_NK.shape[1]
        arrival = self.carry(self.experts, Take.apply(x_ND, order_M // k, back_M, k), ends_E, whole)
        shared_ND = None if self.shared is None else self.shared(x_ND)  # while they travel
        y_ND = Combine.apply(arrival(), weights_NK, back_M, order_M).to(x_ND.dtype)
        return y_ND if shared_ND is None else y_ND + shared_ND

    def _choose(self, scores_BTE: Tensor) -> tuple[Tensor, Tensor]:
        """The chosen experts `(B, T, K)`, best first, and their gate weights."""
        wanted_BTE = scores_BTE.detach()
        if self.moe.selection_bias:
            wanted_BTE = wanted_BTE + self.selection_bias
        chosen_BTK = wanted_BTE.topk(self.moe.top_k, dim=-1).indices
        weights_BTK = scores_BTE.gather(-1, chosen_BTK)
        if self.moe.normalize:
            weights_BTK = weights_BTK / (weights_BTK.sum(-1, keepdim=True) + _TINY)
        return chosen_BTK, weights_BTK * self.moe.routed_scale

    def _balance_of_batch(self, scores_BTE: Tensor, counts_BE: Tensor, counted_BT: Tensor) -> Tensor:
        """`balance_loss` of one row that holds the tokens of all ranks: this rank's part of it, which are to be added.

        Its f are those of all ranks, and of P it is the sum over this rank's tokens divided by the number of all.
        """
        sums = self.total(torch.cat([counts_BE.sum(0), counted_BT.sum()[None]]))
        counts_1E, n_tokens = sums[None, :-1], sums[-1].clamp(min=1)
        one_row_TE, counted_T = scores_BTE.flatten(0, 1)[None], counted_BT.flatten()[None]
        return balance_loss(one_row_TE, counts_1E, counted_T) * (counted_T.sum() / n_tokens)

    def _within_capacity(self, assigned_BTE: Tensor) -> Tensor:
        """Which assignments an expert still has room for: `ceil(capacity_factor T K / E)` of each row, at least 1.

        First come, first served, by position. (Lepikhin et al. 2021 and later code serve all first choices before any
        second one: then a later token's first choice pushes out an earlier token's second, which so sees the future.)
        """
        assert self.moe.capacity_factor is not None
        share = assigned_BTE.shape[1] * self.moe.top_k / self.moe.n_experts
        return assigned_BTE.cumsum(1) <= max(1, math.ceil(self.moe.capacity_factor * share))


def balance_loss(scores_BTE: Tensor, counts_BE: Tensor, counted_BT: Tensor) -> Tensor:
    """`E sum_e f_e P_e` of each row, summed over rows; 1 in a row whose load is even, 0 in one without counted tokens.

    f is the share of the row's assignments that went to e, without gradient, P the mean over its tokens of the router's
    probability for e: the softmax (Fedus et al. 2022, Switch Transformers, eqs. 4-6), or sigmoid scores divided by
    their sum (DeepSeek-AI 2024, V3, eqs. 17-20; per sequence there too).
    """
    probabilities_BTE = scores_BTE / (scores_BTE.sum(-1, keepdim=True) + _TINY)
    f_BE = counts_BE.to(scores_BTE.dtype) / counts_BE.sum(1, keepdim=True).clamp(min=1)
    return len(f_BE[0]) * (f_BE * _row_means(probabilities_BTE, counted_BT)).sum()


def z_loss(logits_BTE: Tensor, counted_BT: Tensor) -> Tensor:
    """The mean over each row's tokens of `logsumexp(logits)^2`, summed over rows (Zoph et al. 2022, ST-MoE, eq. 5)."""
    return _row_means(logits_BTE.logsumexp(-1, keepdim=True).square(), counted_BT).sum()


def _row_means(x_BTE: Tensor, counted_BT: Tensor) -> Tensor:
    """Mean over the counted tokens of each row; 0 where there are none."""
    n_B1 = counted_BT.sum(1, keepdim=True).clamp(min=1)
    return x_BTE.where(counted_BT[..., None], 0.0).sum(1) / n_B1
