"""No position sees a later one, whatever the kind of positions, with and without the cache."""

from __future__ import annotations

import typing
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import models.attention
from models.cache import KVCache
from models.config import ModelConfig
from models.transformer import Transformer

Build = Callable[..., Transformer]
# From the config itself, so that a new kind is held to this from its first day.
POSITIONS: tuple[str, ...] = typing.get_args(ModelConfig.model_fields["position"].annotation)
PIECES = {"whole": [16], "prompt, then tokens": [7, *[1] * 9], "pieces": [1, 4, 6, 5]}
every_position = pytest.mark.parametrize("position", POSITIONS)
every_kind = pytest.mark.parametrize(
    "keys",
    [
        {"n_kv_heads": 2},
        {"norm": "layernorm", "norm_bias": True, "activation": "gelu", "attention_bias": True, "mlp_bias": True},
        {"qk_norm": True, "tie_embeddings": True, "final_norm": False},
        {"attention_window": 6, "attention_global_every": 2, "norm_placement": "post"},
        {"attention_sinks": True, "attention_softcap": 2.0, "attention_window": 6, "attention_global_every": 2},
        {"moe": {"n_experts": 4, "top_k": 2}},
    ],
    ids=["grouped", "biases", "qk-norm", "window", "sinks", "experts"],
)


def plain(model: Transformer, tokens_BT: Tensor) -> Tensor:
    """Logits of one forward over the whole sequence."""
    return model(tokens_BT)


def cached(pieces: list[int]) -> Callable[[Transformer, Tensor], Tensor]:
    """Logits of the same sequence, fed to the cache in pieces."""

    def logits(model: Transformer, tokens_BT: Tensor) -> Tensor:
        cache = KVCache(model.config, len(tokens_BT), tokens_BT.shape[1], torch.float32, "cpu")
        return torch.cat([model(piece, cache=cache) for piece in tokens_BT.split(pieces, dim=1)], dim=1)

    return logits


def leaks(
    model: Transformer, logits: Callable[[Transformer, Tensor], Tensor], tokens_BT: Tensor, tolerance: float = 0.0
) -> list[int]:
    """Positions whose change shows in a logit before them, to the last bit unless a tolerance is given.

    Raises:
        AssertionError: a change does not show in the logits from its own position on.
    """
    before = logits(model, tokens_BT)
    found = []
    for j in range(tokens_BT.shape[1]):
        changed = tokens_BT.clone()
        changed[:, j] = (changed[:, j] + 1) % model.config.vocab
        after = logits(model, changed)
        if (after[:, :j] - before[:, :j]).abs().sum() > tolerance:
            found.append(j)
        assert (after[:, j:] - before[:, j:]).abs().amax(dim=(0, 2)).min() > 1e-4
    return found


def test_the_kinds_are_known() -> None:
    assert {"rope", "learned", "sinusoidal", "relative", "none"} <= set(POSITIONS)


@torch.no_grad()
@every_position
@every_kind
def test_a_changed_token_changes_no_logit_before_it(
    build: Build, tokens_BT: Tensor, position: str, keys: dict[str, Any]
) -> None:
    # A product rounds by the number of its rows, and how many rows an expert has depends on all tokens.
    assert leaks(build(position=position, **keys), plain, tokens_BT, 1e-2 if "moe" in keys else 0.0) == []


@torch.no_grad()
@every_position
@pytest.mark.parametrize("pieces", PIECES.values(), ids=PIECES)
def test_nor_with_the_cache(build: Build, tokens_BT: Tensor, position: str, pieces: list[int]) -> None:
    assert leaks(build(position=position, n_kv_heads=2), cached(pieces), tokens_BT) == []


@torch.no_grad()
@every_kind
@pytest.mark.parametrize("pieces", PIECES.values(), ids=PIECES)
def test_the_cache_gives_the_logits_of_the_whole_for_every_kind(
    build: Build, tokens_BT: Tensor, keys: dict[str, Any], pieces: list[int]
) -> None:
    model = build(**keys)
    torch.testing.assert_close(cached(pieces)(model, tokens_BT), model(tokens_BT), rtol=1e-5, atol=1e-5)


@torch.no_grad()
@every_position
@pytest.mark.parametrize("pieces", PIECES.values(), ids=PIECES)
def test_the_cache_gives_the_logits_of_the_whole(
    build: Build, tokens_BT: Tensor, position: str, pieces: list[int]
) -> None:
    model = build(position=position, n_kv_heads=2)
    torch.testing.assert_close(cached(pieces)(model, tokens_BT), model(tokens_BT), rtol=1e-5, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize(
    ("logits", "starts"), [(plain, {0}), (cached([16]), {0}), (cached([1, 4, 6, 5]), {0, 1, 5, 11})]
)
def test_attention_without_a_mask_is_caught(
    build: Build,
    tokens_BT: Tensor,
    monkeypatch: pytest.MonkeyPatch,
    logits: Callable[[Transformer, Tensor], Tensor],
    starts: set[int],
) -> None:
    """Attention to everything there is fails the check everywhere but where a piece starts: nothing came before."""
    attention = F.scaled_dot_product_attention

    def unmasked(*args: Any, **kwargs: Any) -> Tensor:
        return attention(*args, **{**kwargs, "attn_mask": None, "is_causal": False})

    monkeypatch.setattr(models.attention.F, "scaled_dot_product_attention", unmasked)
    assert set(leaks(build(), logits, tokens_BT)) == set(range(16)) - starts


@torch.no_grad()
def test_attention_one_too_far_is_caught(build: Build, tokens_BT: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mask that is off by one, in the forward and with the cache."""
    attention = F.scaled_dot_product_attention

    def peeking(q: Tensor, k: Tensor, v: Tensor, **kwargs: Any) -> Tensor:
        T, S = q.shape[2], k.shape[2]
        mask = torch.ones(T, S, dtype=torch.bool).tril(diagonal=S - T + 1)
        return attention(q, k, v, **{**kwargs, "attn_mask": mask, "is_causal": False})

    monkeypatch.setattr(models.attention.F, "scaled_dot_product_attention", peeking)
    assert leaks(build(n_layers=1), plain, tokens_BT) == list(range(1, 16))
    assert leaks(build(n_layers=1), cached([7, 9]), tokens_BT) == [j for j in range(1, 16) if j != 7]
