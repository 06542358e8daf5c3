"""Generation with the cache gives the logits of the full forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from common.errors import UserError
from models.cache import KVCache
from models.transformer import Transformer


@torch.no_grad()
@pytest.mark.parametrize("keys", [{"n_kv_heads": 2}, {"position": "learned"}, {"position": "sinusoidal"}])
@pytest.mark.parametrize("pieces", [[7, 1, 1, 1, 1], [1, 4, 6, 1], [16]])
def test_cached_logits_equal_the_full_forward(
    build: Callable[..., Transformer], tokens_BT: Tensor, keys: dict[str, Any], pieces: list[int]
) -> None:
    model = build(**keys, qk_norm=True)
    cache = KVCache(model.config, 3, 16, torch.float32, "cpu")
    full = model(tokens_BT)
    start = 0
    for n in pieces:
        logits = model(tokens_BT[:, start : start + n], cache=cache)
        torch.testing.assert_close(logits, full[:, start : start + n], rtol=1e-5, atol=1e-5)
        start += n
        assert cache.length == start
    cache.length = 0
    torch.testing.assert_close(model(tokens_BT[:, :5], cache=cache), full[:, :5], rtol=1e-5, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize(
    "keys",
    [
        {"n_kv_heads": 2},
        {"position": "learned", "attention_window": 5},
        {"position": "sinusoidal", "norm_placement": "post"},
        {"attention_window": 5, "attention_global_every": 2, "attention_sinks": True, "rope_theta_local": 50.0},
        {"position": "relative", "relative_clip": 4},
        {"moe": {"n_experts": 4, "top_k": 2, "capacity_factor": 0.5}},
    ],
)
def test_rows_filled_up_at_the_left_give_what_they_give_alone(
    build: Callable[..., Transformer], tokens_BT: Tensor, keys: dict[str, Any]
) -> None:
    """Whatever fills them up, and however they come in."""
    model = build(**keys)
    padding = [0, 3, 7]
    for pieces in ([10, 1, 1, 1, 1, 1, 1], [16]):
        cache = KVCache(model.config, 3, 16, torch.float32, "cpu", torch.tensor(padding))
        together = torch.cat([model(piece, cache=cache) for piece in tokens_BT.split(pieces, dim=1)], dim=1)
        assert together.isfinite().all()
        for b, n in enumerate(padding):
            alone = model(tokens_BT[b : b + 1, n:], cache=KVCache(model.config, 1, 16 - n, torch.float32, "cpu"))
            torch.testing.assert_close(together[b, n:], alone[0], rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_what_does_not_fit_is_refused(build: Callable[..., Transformer], tokens_BT: Tensor) -> None:
    model = build()
    with pytest.raises(UserError, match=r"raise model\.max_seq_len"):
        KVCache(model.config, 3, 17, torch.float32, "cpu")
    cache = KVCache(model.config, 3, 8, torch.float32, "cpu")
    model(tokens_BT[:, :6], cache=cache)
    with pytest.raises(UserError, match=r"6 \+ 3 tokens do not fit into a cache of 8"):
        model(tokens_BT[:, :3], cache=cache)
    with pytest.raises(ValueError, match="holds 3 sequences, not 1"):
        model(tokens_BT[:1, :1], cache=cache)
