"""Rows of several documents for tests: how they are cut, what they must give, and a stand-in for FlashAttention."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from models.transformer import Transformer

Result = tuple[Tensor, dict[str, Tensor]]
WAYS = ["masked", "looped", "varlen"]
KINDS: list[dict[str, Any]] = [
    {"n_kv_heads": 2, "qk_norm": True},
    {"position": "learned", "norm": "layernorm", "norm_bias": True, "activation": "gelu"},
    {"position": "sinusoidal", "activation": "relu", "attention_bias": True, "mlp_bias": True},
    {"position": "none", "n_kv_heads": 1, "qk_norm": True, "attention_bias": True, "tie_embeddings": True},
    {"attention_window": 7, "attention_global_every": 2, "attention_scale": 0.2, "rope_theta_local": 100.0},
]
# Kinds whose attention is none of these ways: it is written out.
WRITTEN_OUT: list[dict[str, Any]] = [
    {"position": "relative", "relative_clip": 5, "n_kv_heads": 2},
    {"attention_softcap": 2.0, "attention_sinks": True, "attention_window": 9},
]
T = 72  # more than the block of 32 or 64 queries that kernels work on
# The tokens of each document in each row; the last one of rows 1 and 2 is padding.
ROWS = [[3, 1, 40, 1, 27], [50, 22], [70, 2], [72]]
PADDED = (1, 2)


def numbers(rows: list[list[int]]) -> Tensor:
    """Document numbers `(B, T)` of rows cut so."""
    return torch.stack([torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in rows])


def spans(rows: list[list[int]]) -> list[tuple[int, slice]]:
    """Row and place of every document that is not padding."""
    ends = [torch.tensor([0, *row]).cumsum(0).tolist() for row in rows]
    found = [(b, slice(*pair)) for b, row in enumerate(ends) for pair in pairwise(row)]
    return [(b, where) for b, where in found if not (b in PADDED and where.stop == T)]


def flash(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, **keys: Any) -> Tensor:
    """What `varlen_attn` is documented to compute with the arguments that we give it, on any device, by definition."""
    back, ahead = keys.pop("window_size")
    scale = keys.pop("scale", None) or q.shape[2] ** -0.5
    assert keys == {"enable_gqa": q.shape[1] != k.shape[1]}
    assert ahead == 0
    assert cu_q.dtype == cu_k.dtype == torch.int32
    lengths = cu_q.diff().tolist()
    assert sum(lengths) == len(q)
    assert max(lengths) <= min(max_q, max_k)
    out = []
    for part in zip(*(x.split(lengths) for x in (q, k, v)), strict=True):
        q_HNK, k_HNK, v_HNK = (x.transpose(0, 1).repeat_interleave(q.shape[1] // x.shape[1], dim=0) for x in part)
        scores = scale * (q_HNK @ k_HNK.transpose(1, 2))
        n = scores.shape[1]
        hidden = torch.ones(n, n, dtype=torch.bool).triu(1)
        if back >= 0:
            hidden |= torch.ones(n, n, dtype=torch.bool).tril(-back - 1)
        out.append((scores.masked_fill(hidden, float("-inf")).softmax(dim=-1) @ v_HNK).transpose(0, 1))
    return torch.cat(out)


def loss_and_grads(
    model: Transformer, tokens_BT: Tensor, mask_BT: Tensor | None = None, documents_BT: Tensor | None = None
) -> Result:
    model.zero_grad()
    loss = model(tokens_BT, tokens_BT.roll(-1, dims=1), mask_BT, documents_BT=documents_BT).cross_entropy
    loss.backward()
    return loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def assert_close(ours: Result, expected: Result, tolerance: float) -> None:
    torch.testing.assert_close(ours[0].double(), expected[0].double(), rtol=tolerance, atol=0)
    assert ours[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        # A bias of the keys adds the same to all scores of a query: its exact gradient is 0, its computed one rounding.
        size = expected[1][name.replace("wk.bias", "wq.bias")].norm()
        assert (ours[1][name] - gradient).norm() <= tolerance * size, name
