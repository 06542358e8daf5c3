"""A decoder written from the equations: one sequence, a loop over heads and over queries, float64, no module.

It shares no code with the models but the names of parameters. Dense, with positions learned or relative.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from models.config import ModelConfig


def logits(weights: dict[str, Tensor], config: ModelConfig, tokens: list[int]) -> Tensor:
    """Logits (T, V) of one sequence."""
    x = weights["embedding.weight"][tokens]
    if config.position == "learned":
        x = x + weights["position_embedding.weight"][: len(tokens)]
    for layer in range(config.n_layers):

        def of(name: str, layer: int = layer) -> Tensor | None:
            return weights.get(f"blocks.{layer}.{name}")

        def norm(name: str, x: Tensor, layer: int = layer) -> Tensor:
            return normalised(x, weights.get(f"blocks.{layer}.{name}.weight"), config)

        window = config.window_of(layer)
        for kind in ("attention", "mlp"):

            def f(x: Tensor, kind: str = kind, window: int | None = window) -> Tensor:
                return attention(x, of, config, window) if kind == "attention" else mlp(x, of)

            if config.norm_placement == "post":  # Vaswani et al. 2017: LayerNorm(x + Sublayer(x))
                x = norm(f"{kind}_norm", x + f(x))
            elif config.norm_placement == "pre":
                x = x + f(norm(f"{kind}_norm", x))
            else:
                x = x + norm(f"{kind}_post_norm", f(norm(f"{kind}_norm", x)))
    x = normalised(x, weights["norm.weight"], config)
    z = x @ weights["head.weight"].T
    return z if config.logit_softcap is None else config.logit_softcap * torch.tanh(z / config.logit_softcap)


def normalised(x: Tensor, weight: Tensor | None, config: ModelConfig) -> Tensor:
    assert weight is not None
    gain = 1 + weight if config.norm_unit_offset else weight
    if config.norm == "layernorm":
        centred = x - x.mean(-1, keepdim=True)
        return centred / (centred.square().mean(-1, keepdim=True) + config.norm_eps).sqrt() * gain
    return x / (x.square().mean(-1, keepdim=True) + config.norm_eps).sqrt() * gain


def attention(x: Tensor, of, config: ModelConfig, window: int | None) -> Tensor:  # type: ignore[no-untyped-def]
    width, shared = config.d_head, config.n_heads // config.kv_heads
    scale = config.attention_scale or 1 / math.sqrt(width)
    q, k, v = (x @ of(f"attention.{name}.weight").T for name in ("wq", "wk", "wv"))
    bias, sinks, cap = of("attention.scores.relative_bias"), of("attention.scores.sinks"), config.attention_softcap
    rows = []
    for t in range(len(x)):
        first = 0 if window is None else max(0, t - window + 1)
        heads = []
        for h in range(config.n_heads):
            g = h // shared
            mine, theirs = slice(h * width, (h + 1) * width), slice(g * width, (g + 1) * width)
            scores = []
            for s in range(first, t + 1):
                score = scale * (q[t, mine] @ k[s, theirs])
                if cap is not None:
                    score = cap * torch.tanh(score / cap)
                scores.append(score if bias is None else score + bias[h, min(t - s, config.relative_clip)])
            powers = torch.stack(scores).exp()
            total = powers.sum() if sinks is None else powers.sum() + sinks[h].exp()
            heads.append((powers / total) @ v[first : t + 1, theirs])
        rows.append(torch.cat(heads))
    return torch.stack(rows) @ of("attention.wo.weight").T


def mlp(x: Tensor, of) -> Tensor:  # type: ignore[no-untyped-def]
    gate, up = x @ of("mlp.w_gate.weight").T, x @ of("mlp.w_up.weight").T
    return (gate * torch.sigmoid(gate) * up) @ of("mlp.w_down.weight").T
