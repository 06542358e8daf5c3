"""The formula for floating-point operations against torch's counter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from models.config import ModelConfig, preset_names
from models.flops import forward_flops_per_token, training_flops_per_token
from models.transformer import Transformer

MOE = {"n_experts": 4, "top_k": 2, "d_ff": 24}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama, grouped and tied": {"n_kv_heads": 2, "head_dim": 6, "tie_embeddings": True},
    "gpt": {"activation": "gelu_tanh", "position": "learned", "norm": "layernorm", "norm_bias": True}
    | {"mlp_bias": True, "attention_bias": True, "tie_embeddings": True},
    "qwen3": {"qk_norm": True, "n_kv_heads": 1, "head_dim": 12},
    "gemma2": {"activation": "geglu_tanh", "norm_placement": "both", "attention_softcap": 5.0, "logit_softcap": 5.0}
    | {"attention_window": 4, "attention_global_every": 2, "norm_unit_offset": True},
    "gemma3": {"activation": "geglu_tanh", "qk_norm": True, "attention_window": 4, "rope_theta_local": 100.0},
    "mixtral": {"n_kv_heads": 2, "moe": {"n_experts": 4, "top_k": 2}},
    "gpt-oss": {"activation": "swiglu_clamped", "attention_sinks": True, "attention_bias": True, "mlp_bias": True}
    | {"attention_window": 4, "attention_global_every": 2, "moe": {**MOE, "router_bias": True}},
    "glm": {"n_layers": 3, "moe": {**MOE, "router": "sigmoid", "selection_bias": True, "n_shared_experts": 2}}
    | {"attention_bias": True, "attention_out_bias": False, "rope_fraction": 0.5},
    "glm, dense at first": {"n_layers": 3, "moe": {**MOE, "n_dense_layers": 2, "n_shared_experts": 1}},
    "switch": {"activation": "relu", "position": "relative", "moe": {"n_experts": 4, "top_k": 1, "normalize": False}},
    "post-norm": {"norm_placement": "post", "position": "sinusoidal", "norm": "layernorm", "final_norm": False},
}


@pytest.mark.parametrize("keys", FAMILIES.values(), ids=FAMILIES)
def test_formula_equals_the_counter(build: Callable[..., Transformer], tokens_BT: Tensor, keys: dict[str, Any]) -> None:
    model = build(**keys)
    per_token = forward_flops_per_token(model.config, 16, causal=False)
    # The fused CPU kernel counts as nothing; the plain one multiplies the full square, masked or not.
    with sdpa_kernel(SDPBackend.MATH):
        with FlopCounterMode(display=False) as forward:
            model(tokens_BT, tokens_BT)
        with FlopCounterMode(display=False) as both:
            model(tokens_BT, tokens_BT).cross_entropy.backward()
    assert forward.get_total_flops() == per_token * tokens_BT.numel()
    assert both.get_total_flops() == training_flops_per_token(model.config, 16, causal=False) * tokens_BT.numel()


# The others stand in `make verify`.
QUICK = {"llama-1m", "llama-8m", "llama-125m", "llama3-8b", "gpt2-124m", "qwen3-0.6b", "gemma2-2b", "gemma3-1b"}
QUICK |= {"gpt-oss-20b", "glm-4.5-air", "switch-base-8", "moe-8m"}


@pytest.mark.parametrize(
    "preset", [pytest.param(name, marks=() if name in QUICK else pytest.mark.verify) for name in preset_names()]
)
def test_formula_equals_the_counter_at_full_size(preset: str) -> None:
    """On the meta device, where nothing is computed."""
    config = ModelConfig(preset=preset)
    config = config.with_vocab_size(config.vocab_size or 4096)
    with torch.device("meta"):
        model, tokens = Transformer(config), torch.zeros(2, min(512, config.max_seq_len), dtype=torch.long)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(tokens)
    per_token = forward_flops_per_token(config, tokens.shape[1], causal=False)
    assert counter.get_total_flops() == per_token * tokens.numel()


def _attention(config: ModelConfig, seq_len: int, causal: bool) -> int:
    """What a token's forward pass costs beyond that of one that sees nothing."""
    return forward_flops_per_token(config, seq_len, causal) - forward_flops_per_token(config, 0, causal)


def test_causal_attention_is_half_the_square(build: Callable[..., Transformer]) -> None:
    config = build().config
    assert _attention(config, 16, causal=False) == 4 * 2 * 32 * 16
    assert 2 * _attention(config, 16, causal=True) == _attention(config, 16, causal=False)


@pytest.mark.parametrize("window", [1, 8, 100, 256, 1000])
def test_causal_attention_in_a_window_counts_the_keys_that_are_seen(window: int) -> None:
    """Added up here one by one, less the part of a key by which the convention is too low."""
    T, keys = 256, {"n_layers": 3, "n_heads": 2, "head_dim": 8, "vocab_size": 10}
    config = ModelConfig(attention_window=window, attention_global_every=3, **keys)
    seen = [2 * min(t + 1, window) + t + 1 for t in range(T)]  # in two blocks with the window, and one without
    expected = sum(seen) / T - (2 * min(window, T) / T + 1) / 2
    assert _attention(config, T, causal=True) == pytest.approx(4 * 2 * 8 * expected, abs=1)
    assert _attention(config, T, causal=False) == 4 * 2 * 8 * 3 * T


def test_a_window_that_holds_all_is_none() -> None:
    for T in (1, 16, 333):
        plain, wide = (ModelConfig(vocab_size=10, attention_window=window) for window in (None, 333))
        assert forward_flops_per_token(wide, T, causal=True) == forward_flops_per_token(plain, T, causal=True)


def test_training_is_near_six_per_parameter_and_token(build: Callable[..., Transformer]) -> None:
    """The usual estimate: 6 x parameters, here without the embedding's lookup and at short length."""
    model = build()
    weights = sum(p.numel() for n, p in model.named_parameters() if p.ndim == 2 and n != "embedding.weight")
    assert training_flops_per_token(model.config, 0, causal=True) == 6 * weights


@pytest.mark.parametrize(("preset", "billions"), [("llama3-405b", 405.85), ("mixtral-8x7b", 12.88)])
def test_a_model_costs_near_six_per_active_parameter(preset: str, billions: float) -> None:
    flops = training_flops_per_token(ModelConfig(preset=preset), 2048, causal=True)
    assert flops == pytest.approx(6e9 * billions, rel=0.05)
