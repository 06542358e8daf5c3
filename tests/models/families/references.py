"""Tiny models of transformers, one or more per family, in which everything that the family may have acts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion

from models.cache import KVCache
from models.families import Family
from models.transformer import Transformer

VOCAB, T = 61, 24
NO_TOKENS = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
BASE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-2,
}
GEMMA = {**BASE, "head_dim": 10, "query_pre_attn_scalar": 6, "sliding_window": 5}
EXPERTS = {"num_local_experts": 6, "num_experts_per_tok": 2}
QWEN3_MOE = {**BASE, "head_dim": 8, "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 20}
GLM = {**BASE, "n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20}


def rope(kind: str, theta: float = 500.0, **keys: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": theta, **keys}}


LLAMA3 = rope(
    "llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16
)  # fmt: skip
YARN = rope("yarn", theta=50.0, factor=4.0, original_max_position_embeddings=16, beta_fast=1.2, beta_slow=0.2)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", GPT2),
    "gpt2-untied": ("gpt2", {**GPT2, "n_inner": 48, "tie_word_embeddings": False, "layer_norm_epsilon": 1e-3}),
    "llama": ("llama", {**BASE, **rope("default")}),
    "llama-3.1": ("llama", {**BASE, **LLAMA3, "tie_word_embeddings": True}),
    "llama-biases": ("llama", {**BASE, **rope("linear", factor=3.0), "attention_bias": True, "mlp_bias": True}),
    "llama-yarn": ("llama", {**BASE, **YARN, "head_dim": 12, "num_key_value_heads": 4}),
    "qwen3": ("qwen3", {**BASE, "head_dim": 12, "attention_bias": True, "tie_word_embeddings": True}),
    "qwen3-windows": (
        "qwen3",
        {**BASE, **YARN, "head_dim": 8, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0},
    ),
    "gemma2": ("gemma2", {**GEMMA, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}),
    "gemma2-untied": (
        "gemma2",
        {**GEMMA, "attn_logit_softcapping": None, "attention_bias": True, "tie_word_embeddings": False},
    ),
    "gemma3": ("gemma3_text", {**GEMMA, "num_hidden_layers": 3, "sliding_window_pattern": 3}),
    "gemma3-scaled": (
        "gemma3_text",
        {
            **GEMMA,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 500.0},
            },
        },
    ),
    "mixtral": ("mixtral", {**BASE, **EXPERTS}),
    "mixtral-windows": ("mixtral", {**BASE, **EXPERTS, **rope("default"), "head_dim": 12, "sliding_window": 5}),
    "qwen3-moe": ("qwen3_moe", {**QWEN3_MOE, "norm_topk_prob": True}),
    "qwen3-moe-dense-first": (
        "qwen3_moe",
        {**QWEN3_MOE, "mlp_only_layers": [0], "attention_bias": True, "use_sliding_window": True, "sliding_window": 5},
    ),
    "gpt-oss": ("gpt_oss", {**BASE, **EXPERTS, "head_dim": 12, "sliding_window": 5, "swiglu_limit": 0.5}),
    "gpt-oss-short-yarn": (
        "gpt_oss",
        {
            **BASE,
            **EXPERTS,
            **rope("yarn", factor=4.0, original_max_position_embeddings=16, truncate=False, attention_factor=1.5),
            "num_experts_per_tok": 1 + 2,
            "head_dim": 16,
            "sliding_window": 5,
            "attention_bias": False,
        },
    ),
    "gpt-oss-not-scaled": ("gpt_oss", {**BASE, **EXPERTS, **rope("default"), "head_dim": 8, "num_hidden_layers": 1}),
    "glm4-moe": ("glm4_moe", {**GLM, "attention_bias": True, "use_qk_norm": True, "routed_scaling_factor": 2.5}),
    "glm4-moe-sparse": (
        "glm4_moe",
        {
            **GLM,
            **rope("default", partial_rotary_factor=0.25),
            "head_dim": 16,
            "first_k_dense_replace": 0,
            "n_shared_experts": 2,
            "norm_topk_prob": False,
        },
    ),
}


def make_reference(case: str) -> nn.Module:
    """The model, with every parameter and buffer of its state random, so that each of them acts."""
    model_type, keys = CASES[case]
    config = AutoConfig.for_model(model_type, vocab_size=VOCAB, **keys, **NO_TOKENS)
    reference = AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", experts_implementation="eager"
    ).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, tensor in reference.state_dict().items():
            if name != "lm_head.weight" or not reference.config.tie_word_embeddings:
                gain = 1.0 if "norm" in name or ".ln_" in name else 0.0
                tensor.copy_(gain + 0.2 * torch.randn(tensor.shape, generator=generator))
    return reference


def published(reference: nn.Module, values: dict[str, Tensor]) -> dict[str, Tensor]:
    """Values by the names in the model, under the names and in the layout of its files."""
    return revert_weight_conversion(reference, values)


def make_ours(family: Family, config: Any, tensors: dict[str, Tensor]) -> Transformer:
    model = Transformer(config)
    model.load_state_dict(to_ours(family, config, tensors))
    return model


def to_ours(family: Family, config: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {
        item.name: item.build([tensors[name] for name in item.reads])
        for item in family.imports(config)
        if all(name in tensors for name in item.reads)
    }


def to_theirs(family: Family, config: Any, model: nn.Module) -> dict[str, Tensor]:
    state = model.state_dict()
    return {
        item.name: item.build([state[p.name] if p.index is None else state[p.name][p.index] for p in item.reads])
        for item in family.exports(config)
    }


def greedy(model: Transformer, tokens_BT: Tensor, n: int) -> Tensor:
    """The most likely n tokens after the prompts, `(B, n)`."""
    cache = KVCache(model.config, len(tokens_BT), tokens_BT.shape[1] + n, torch.float32, "cpu")
    found = []
    for _ in range(n):
        logits_BTV = model(tokens_BT, cache=cache)
        assert isinstance(logits_BTV, Tensor)
        tokens_BT = logits_BTV[:, -1:].argmax(-1)
        found.append(tokens_BT)
    return torch.cat(found, dim=1)
