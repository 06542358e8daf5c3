"""A mixture-of-experts layer in float64, token by token and expert by expert, from the equations alone.

For a token x with logits z = W x + b, scores s = softmax(z) or sigmoid(z), and C the top_k of s + selection bias:

    y = MLP_shared(x) + scale * sum over e in C, if e has room, of g_e MLP_e(x),    g_e = s_e or s_e / sum over C of s
    MLP_e(x) = W_down a(W_up x + b_up, W_gate x + b_gate) + b_down

Per row, over its n counted tokens: balance = E sum_e (times e was chosen / (n top_k)) (mean of s_e / sum of s), and
z = mean of logsumexp(z)^2. An expert has room for ceil(capacity_factor T top_k / E) choices of a row, at least one,
and gives it to the first that come.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from models.config import ModelConfig

Parameters = dict[str, Tensor]


class Answer(NamedTuple):
    y: Tensor
    balance: Tensor
    z: Tensor
    counts: list[int]
    dropped: int
    sent: list[list[int]]
    """For each token its experts, best first; the number of experts where a choice was dropped."""
    margin: float
    """The smallest gap between the last expert chosen and the first one not."""


def answer(p: Parameters, config: ModelConfig, x_BTD: Tensor, counted: list[list[bool]], drop: bool = True) -> Answer:
    """What a layer with these parameters (by their names in `MoE`) and buffers should give."""
    moe = config.moe
    assert moe is not None
    x_BTD = x_BTD.double()
    p = {name: value.double() for name, value in p.items()}
    E, K, (B, T, _) = moe.n_experts, moe.top_k, x_BTD.shape
    room = math.inf
    if drop and moe.capacity_factor is not None:
        room = max(1, math.ceil(moe.capacity_factor * T * K / E))
    balance, z, counts, dropped, ys, sent, margin = (
        x_BTD.new_zeros(()),
        x_BTD.new_zeros(()),
        [0] * E,
        0,
        [],
        [],
        math.inf,
    )
    for b in range(B):
        taken, chosen_counted, probabilities, squares = [0] * E, [0] * E, [], []
        for t in range(T):
            x = x_BTD[b, t]
            logits = p["router.weight"] @ x + p.get("router.bias", 0.0)
            exponentials = torch.exp(logits)
            scores = exponentials / exponentials.sum() if moe.router == "softmax" else 1 / (1 + torch.exp(-logits))
            wish = (scores + p["selection_bias"] if moe.selection_bias else scores).tolist()
            best = sorted(range(E), key=lambda e: -wish[e])
            chosen = best[:K]
            margin = min([margin, *(wish[best[K - 1]] - wish[e] for e in best[K:])])
            total = sum(scores[e] for e in chosen) if moe.normalize else 1.0
            y = mlp(p, config, "shared.", None, x) if moe.n_shared_experts else torch.zeros_like(x)
            sent.append([])
            for e in chosen:
                fits = taken[e] < room
                taken[e] += 1
                if fits:
                    y = y + moe.routed_scale * scores[e] / total * mlp(p, config, "experts.", e, x)
                dropped += counted[b][t] and not fits
                chosen_counted[e] += counted[b][t]
                sent[-1].append(e if fits else E)
            ys.append(y)
            if counted[b][t]:
                probabilities.append(scores / scores.sum())
                squares.append(torch.log(exponentials.sum()) ** 2)
        n = len(squares)
        for e in range(E):
            counts[e] += chosen_counted[e]
            for probability in probabilities:
                balance = balance + E * chosen_counted[e] / (n * K) * probability[e] / n
        z = z + sum(square / n for square in squares)
    return Answer(torch.stack(ys).view_as(x_BTD), balance, z, counts, dropped, sent, margin)


def mlp(p: Parameters, config: ModelConfig, path: str, expert: int | None, x: Tensor) -> Tensor:
    """One MLP: an expert of `experts.`, or the shared one, whose parameters are named as those of linear layers."""

    def linear(which: str, x: Tensor) -> Tensor:
        if expert is None:
            return p[f"{path}w_{which}.weight"] @ x + p.get(f"{path}w_{which}.bias", 0.0)
        y = p[f"{path}w_{which}"][expert] @ x
        return y + p[f"{path}{which}_bias"][expert] if config.mlp_bias else y

    up, kind = linear("up", x), config.activation
    if kind == "relu":
        hidden = up * (up > 0)
    elif kind == "gelu":
        hidden = gelu(up)
    else:
        gate = linear("gate", x)
        if kind == "swiglu":
            hidden = gate / (1 + torch.exp(-gate)) * up
        elif kind == "geglu":
            hidden = gelu(gate) * up
        else:
            assert kind == "swiglu_clamped"
            limit = config.activation_limit or 7.0
            gate, up = torch.clamp(gate, max=limit), torch.clamp(up, min=-limit, max=limit)
            hidden = gate / (1 + torch.exp(-1.702 * gate)) * (up + 1)
    return linear("down", hidden)


def gelu(x: Tensor) -> Tensor:
    return x * (1 + torch.erf(x / math.sqrt(2))) / 2
