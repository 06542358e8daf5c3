"""What the published `config.json` of each preset says of its architecture; our own presets in the same words."""

from __future__ import annotations

from typing import Any

_GPT2 = {"model_type": "gpt2", "layer_norm_epsilon": 1e-5, "activation_function": "gelu_new"}
_LLAMA = {"model_type": "llama", "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": False}
_LAPTOP = {**_LLAMA, "rope_theta": 10000.0, "tie_word_embeddings": True, "max_position_embeddings": 1024}
_QWEN3 = {
    "vocab_size": 151936,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "attention_bias": False,
    "hidden_act": "silu",
}
_GEMMA = {
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-6,
    "hidden_activation": "gelu_pytorch_tanh",
    "attention_bias": False,
}
_GEMMA2 = {
    **_GEMMA,
    "model_type": "gemma2",
    "vocab_size": 256000,
    "max_position_embeddings": 8192,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}
_GEMMA3 = {
    **_GEMMA,
    "model_type": "gemma3_text",
    "rope_theta": 1000000.0,
    "rope_local_base_freq": 10000.0,
    "sliding_window_pattern": 6,
}
_GPT_OSS = {
    "model_type": "gpt_oss",
    "vocab_size": 201088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150000.0,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "original_max_position_embeddings": 4096,
        "truncate": False,
    },
    "sliding_window": 128,
    "num_experts_per_tok": 4,
    "attention_bias": True,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
}


def _sizes(vocab: int, layers: int, width: int, heads: int, kv_heads: int, ff: int) -> dict[str, int]:
    return {
        "vocab_size": vocab,
        "num_hidden_layers": layers,
        "hidden_size": width,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": ff,
    }


PUBLISHED: dict[str, dict[str, Any]] = {
    "gpt2-124m": {**_GPT2, "vocab_size": 50257, "n_layer": 12, "n_embd": 768, "n_head": 12, "n_positions": 1024},
    "gpt3-175b": {**_GPT2, "vocab_size": 50257, "n_layer": 96, "n_embd": 12288, "n_head": 96, "n_positions": 2048},
    "llama-1m": {**_LAPTOP, **_sizes(4096, 4, 128, 4, 2, 256)},
    "llama-8m": {**_LAPTOP, **_sizes(4096, 8, 256, 8, 8, 768)},
    "llama-125m": {**_LAPTOP, **_sizes(50257, 12, 768, 12, 12, 2048), "max_position_embeddings": 2048},
    "llama2-7b": {
        **_LLAMA,
        **_sizes(32000, 32, 4096, 32, 32, 11008),
        "max_position_embeddings": 4096,
        "rope_theta": 10000.0,
    },
    "llama3-8b": {**_LLAMA, **_sizes(128256, 32, 4096, 32, 8, 14336), "max_position_embeddings": 8192},
    "llama3-70b": {**_LLAMA, **_sizes(128256, 80, 8192, 64, 8, 28672), "max_position_embeddings": 8192},
    "llama3-405b": {
        **_LLAMA,
        **_sizes(128256, 126, 16384, 128, 8, 53248),
        "max_position_embeddings": 131072,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    },
    "qwen3-0.6b": {
        **_QWEN3,
        **_sizes(151936, 28, 1024, 16, 8, 3072),
        "model_type": "qwen3",
        "tie_word_embeddings": True,
    },
    "qwen3-8b": {
        **_QWEN3,
        **_sizes(151936, 36, 4096, 32, 8, 12288),
        "model_type": "qwen3",
        "tie_word_embeddings": False,
    },
    "qwen3-30b-a3b": {
        **_QWEN3,
        **_sizes(151936, 48, 2048, 32, 4, 6144),
        "model_type": "qwen3_moe",
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "tie_word_embeddings": False,
    },
    "gemma2-2b": {**_GEMMA2, **_sizes(256000, 26, 2304, 8, 4, 9216)},
    "gemma2-9b": {**_GEMMA2, **_sizes(256000, 42, 3584, 16, 8, 14336)},
    "gemma3-1b": {
        **_GEMMA3,
        **_sizes(262144, 26, 1152, 4, 1, 6912),
        "max_position_embeddings": 32768,
        "sliding_window": 512,
    },
    "gemma3-4b": {
        **_GEMMA3,
        **_sizes(262208, 34, 2560, 8, 4, 10240),
        "max_position_embeddings": 131072,
        "sliding_window": 1024,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    },
    "mixtral-8x7b": {
        **_sizes(32000, 32, 4096, 32, 8, 14336),
        "model_type": "mixtral",
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 32768,
        "rope_theta": 1000000.0,
        "rms_norm_eps": 1e-5,
        "sliding_window": None,
        "tie_word_embeddings": False,
    },
    "moe-8m": {
        **_sizes(4096, 4, 256, 4, 2, 256),
        "model_type": "mixtral",
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 1024,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
    },
    "gpt-oss-20b": {**_GPT_OSS, "num_hidden_layers": 24, "num_local_experts": 32},
    "gpt-oss-120b": {**_GPT_OSS, "num_hidden_layers": 36, "num_local_experts": 128},
    "glm-4.5-air": {
        **_sizes(151552, 46, 4096, 96, 8, 10944),
        "model_type": "glm4_moe",
        "head_dim": 128,
        "moe_intermediate_size": 1408,
        "n_routed_experts": 128,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "partial_rotary_factor": 0.5,
        "rope_theta": 1000000.0,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "attention_bias": True,
        "use_qk_norm": False,
        "num_nextn_predict_layers": 1,
        "tie_word_embeddings": False,
    },
}
