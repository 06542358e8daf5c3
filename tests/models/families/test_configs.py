"""The content of config.json files in both spellings, and what is refused, each in one line."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
from transformers import AutoConfig

from common.errors import UserError
from models.config import ModelConfig
from models.families import FAMILIES, family_for, read_folder_config
from models.families.codecs import REQUIRED, Key, meanings
from models.layers import CLAMP
from tests.models.families.references import BASE, EXPERTS, GEMMA, GLM, GPT2, LLAMA3, QWEN3_MOE, rope

SIZES = {**BASE, "num_hidden_layers": 4, "vocab_size": 61}
# What the published files say that is read, and some of what is not, in the spelling before transformers 5.
PUBLISHED: dict[str, dict[str, Any]] = {
    "gpt2-124m": {
        "model_type": "gpt2", "vocab_size": 50257, "n_ctx": 1024, "n_embd": 768, "n_head": 12, "n_layer": 12,
        "n_positions": 1024, "layer_norm_epsilon": 1e-5, "activation_function": "gelu_new", "attn_pdrop": 0.1,
    },
    "llama3-405b": {
        "model_type": "llama", "vocab_size": 128256, "hidden_size": 16384, "intermediate_size": 53248,
        "num_hidden_layers": 126, "num_attention_heads": 128, "num_key_value_heads": 8, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131072, "hidden_act": "silu", "attention_bias": False, "mlp_bias": False,
        "tie_word_embeddings": False, "pretraining_tp": 1, "rope_theta": 500000.0,
        "rope_scaling": {
            "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_type": "llama3",
            "original_max_position_embeddings": 8192,
        },
    },
    "qwen3-8b": {
        "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288, "head_dim": 128,
        "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6, "hidden_act": "silu", "rope_theta": 1000000, "rope_scaling": None,
        "sliding_window": None, "use_sliding_window": False, "max_window_layers": 36, "tie_word_embeddings": False,
    },
    "gemma2-9b": {
        "model_type": "gemma2", "vocab_size": 256000, "hidden_size": 3584, "intermediate_size": 14336, "head_dim": 256,
        "num_hidden_layers": 42, "num_attention_heads": 16, "num_key_value_heads": 8, "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-6, "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 256, "sliding_window": 4096, "sliding_window_size": 4096, "rope_theta": 10000.0,
        "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "cache_implementation": "hybrid",
    },
    "gemma3-4b": {
        "model_type": "gemma3_text", "vocab_size": 262208, "hidden_size": 2560, "intermediate_size": 10240,
        "num_hidden_layers": 34, "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-6, "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 256, "head_dim": 256,
        "sliding_window": 1024, "sliding_window_pattern": 6, "rope_theta": 1000000, "rope_local_base_freq": 10000,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "attn_logit_softcapping": None, "final_logit_softcapping": None,
    },
    "mixtral-8x7b": {
        "model_type": "mixtral", "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-5, "hidden_act": "silu", "num_experts_per_tok": 2, "num_local_experts": 8,
        "rope_theta": 1000000.0, "sliding_window": None, "tie_word_embeddings": False, "router_aux_loss_coef": 0.02,
    },
    "qwen3-30b-a3b": {
        "model_type": "qwen3_moe", "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144,
        "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "max_position_embeddings": 40960,
        "head_dim": 128, "rms_norm_eps": 1e-6, "hidden_act": "silu", "decoder_sparse_step": 1, "mlp_only_layers": [],
        "moe_intermediate_size": 768, "norm_topk_prob": True, "num_experts": 128, "num_experts_per_tok": 8,
        "rope_theta": 1000000.0, "rope_scaling": None, "sliding_window": None, "use_sliding_window": False,
        "max_window_layers": 48, "tie_word_embeddings": False,
    },
    "gpt-oss-20b": {
        "model_type": "gpt_oss", "vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880, "head_dim": 64,
        "num_hidden_layers": 24, "num_attention_heads": 64, "num_key_value_heads": 8, "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5, "hidden_act": "silu", "attention_bias": True, "swiglu_limit": 7.0, "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"] * 12, "num_local_experts": 32, "num_experts_per_tok": 4,
        "experts_per_token": 4, "initial_context_length": 4096, "tie_word_embeddings": False, "rope_theta": 150000,
        "rope_scaling": {
            "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
            "rope_type": "yarn", "truncate": False,
        },
    },
    "glm-4.5-air": {
        "model_type": "glm4_moe", "vocab_size": 151552, "hidden_size": 4096, "intermediate_size": 10944,
        "num_hidden_layers": 46, "num_attention_heads": 96, "num_key_value_heads": 8, "max_position_embeddings": 131072,
        "head_dim": 128, "rms_norm_eps": 1e-5, "hidden_act": "silu", "attention_bias": True, "use_qk_norm": False,
        "n_group": 1, "topk_group": 1, "n_shared_experts": 1, "n_routed_experts": 128, "num_experts_per_tok": 8,
        "moe_intermediate_size": 1408, "first_k_dense_replace": 1, "norm_topk_prob": True, "rope_theta": 1000000,
        "routed_scaling_factor": 1.0, "partial_rotary_factor": 0.5, "rope_scaling": None, "tie_word_embeddings": False,
        "num_nextn_predict_layers": 1,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_files_mean_the_same_in_both_spellings(name: str) -> None:
    content = PUBLISHED[name]
    family, config = read_folder_config(content, name)
    newer = AutoConfig.for_model(**json.loads(json.dumps(content))).to_dict()
    assert "rope_theta" not in newer
    assert meanings(read_folder_config(newer, name)[1]) == meanings(config)
    assert family_for(config) is family
    assert meanings(ModelConfig(preset=name)) == meanings(config)
    written = AutoConfig.for_model(**family.write_config(config)).to_dict()
    assert meanings(read_folder_config(written, name)[1]) == meanings(config)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_defaults_are_those_of_the_class(model_type: str) -> None:
    # 96 heads, the class's own number, would have 21 of 42 numbers rotated.
    heads = {"num_attention_heads": 64} if model_type == "glm4_moe" else {}
    full = AutoConfig.for_model(model_type, **heads).to_dict()
    needed = {k.theirs for k in FAMILIES[model_type].keys if isinstance(k, Key) and k.default is REQUIRED}
    aliases = FAMILIES[model_type].aliases
    bare = {key: value for key, value in full.items() if aliases.get(key, key) in needed}
    ours = [read_folder_config({**content, "model_type": model_type}, "")[1] for content in (bare, full)]
    assert meanings(ours[0]) == meanings(ours[1])


def test_defaults_of_scaling_and_clamp() -> None:
    content = {**SIZES, "model_type": "gpt_oss", **EXPERTS}
    for rope_scaling in ({}, {"rope_scaling": None}):
        assert read_folder_config({**content, **rope_scaling}, "")[1].rope_scaling is not None
    config = read_folder_config({**content, "swiglu_limit": CLAMP}, "")[1]
    assert meanings(config) == meanings(config.model_copy(update={"activation_limit": None}))


def test_what_only_training_reads_changes_no_family() -> None:
    config = ModelConfig(preset="mixtral-8x7b", init_std=0.01, moe={"n_experts": 8, "aux_loss_coef": 0.5})
    assert family_for(config).model_type == "mixtral"


def test_other_names_of_tensors() -> None:
    gpt2, llama, glm = FAMILIES["gpt2"], FAMILIES["llama"], FAMILIES["glm4_moe"]
    assert gpt2.canonical("h.0.ln_1.weight") == gpt2.canonical("transformer.h.0.ln_1.weight")
    assert llama.canonical("lm_head.weight") == "lm_head.weight"
    assert gpt2.ignored("transformer.h.0.attn.bias")
    assert gpt2.ignored("transformer.h.0.attn.masked_bias")
    assert not gpt2.ignored("transformer.h.0.attn.c_attn.bias")
    assert llama.ignored("model.layers.0.self_attn.rotary_emb.inv_freq")
    assert llama.ignored("lm_head.weight")
    assert glm.ignored("model.layers.46.eh_proj.weight")
    assert not any(glm.ignored(f"model.layers.{i}.mlp.gate.weight") for i in (0, 4, 45, 460))
    assert not llama.ignored("model.layers.46.mlp.gate_proj.weight")


def test_reading_a_config_imports_no_torch() -> None:
    code = (
        "import sys, models.families as f; f.read_folder_config({}, 'x') if 0 else 0; sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


FULL, SLIDING = "full_attention", "sliding_attention"
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"model_type": "mamba"}, 'model_type "mamba"'),
    ({"vocab_size": 61}, "model_type null"),
    ({"model_type": "llama", **SIZES, "hidden_act": "gelu"}, 'hidden_act: "gelu"'),
    ({"model_type": "llama", **SIZES, "quantization_config": {"quant_method": "mxfp4"}}, "quantization_config"),
    ({"model_type": "llama", **SIZES, "per_layer_config": {"0": {"head_dim": 4}}}, "per_layer_config"),
    ({"model_type": "llama", **SIZES, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, 'rope_type: "dynamic"'),
    ({"model_type": "llama", **SIZES, "rope_scaling": {"type": "yarn", "mscale": 0.7}}, "rope_scaling.mscale: 0.7"),
    ({"model_type": "llama", **SIZES, "rope_scaling": "linear"}, 'rope_scaling: "linear"'),
    ({"model_type": "llama", **SIZES, "rope_scaling": {"type": "linear"}}, "rope_scaling.factor"),
    ({"model_type": "llama", **SIZES, **rope("default", partial_rotary_factor=0.5)}, "partial_rotary_factor: 0.5"),
    ({"model_type": "llama", **SIZES, "hidden_size": None}, "'hidden_size' must be a number, got null"),
    ({"model_type": "llama", **SIZES, "num_hidden_layers": 1.5}, "'n_layers': must be a whole number, got 1.5"),
    (
        {"model_type": "llama", **{k: v for k, v in SIZES.items() if k != "rms_norm_eps"}},
        "'rms_norm_eps' must be a number, got null",
    ),
    ({"model_type": "gpt2", **GPT2}, "'vocab_size' must be a number"),
    *[
        ({"model_type": "gpt2", **GPT2, "vocab_size": 61, key: value}, f"{key}: {json.dumps(value)}")
        for key, value in (
            ("scale_attn_by_inverse_layer_idx", True),
            ("scale_attn_weights", False),
            ("add_cross_attention", True),
            ("activation_function", "relu"),
        )
    ],
    ({"model_type": "qwen3", **SIZES, "use_sliding_window": True, "max_window_layers": 2}, "layer_types"),
    ({"model_type": "qwen3", **SIZES, "layer_types": [SLIDING] * 4}, "sliding_window: null"),
    ({"model_type": "gemma2", **SIZES, "layer_types": [FULL, SLIDING] * 2}, "layer_types"),
    ({"model_type": "gemma2", **SIZES, "layer_types": [SLIDING, FULL]}, "layer_types"),
    ({"model_type": "gemma2", **SIZES, "layer_types": "all"}, 'layer_types: "all"'),
    ({"model_type": "gemma2", **SIZES, "use_bidirectional_attention": True}, "use_bidirectional_attention: true"),
    ({"model_type": "gemma2", **SIZES, "query_pre_attn_scalar": 0}, "query_pre_attn_scalar: 0"),
    ({"model_type": "gemma3_text", **SIZES, "sliding_window_pattern": "six"}, "a value is of no use"),
    ({"model_type": "gemma3_text", **SIZES, "attn_logit_softcapping": 50.0}, "attn_logit_softcapping: 50.0"),
    (
        {"model_type": "gemma3_text", **SIZES, "rope_parameters": {SLIDING: {"rope_type": "linear", "factor": 8.0}}},
        "rope_parameters.sliding_attention.rope_type",
    ),
    ({"model_type": "gemma3_text", **SIZES, **LLAMA3, "rope_scaling": {"rope_type": "yarn"}}, 'rope_type: "yarn"'),
    ({"model_type": "qwen3_moe", **SIZES, **QWEN3_MOE, "decoder_sparse_step": 2}, "decoder_sparse_step: 2"),
    ({"model_type": "qwen3_moe", **SIZES, **QWEN3_MOE, "mlp_only_layers": [1]}, "mlp_only_layers: [1]"),
    ({"model_type": "qwen3_moe", **SIZES, **QWEN3_MOE, "mlp_only_layers": [0, 1]}, "leaves no block"),
    ({"model_type": "gpt_oss", **SIZES, **EXPERTS, "swiglu_alpha": 1.0}, "swiglu_alpha: 1.0"),
    ({"model_type": "glm4_moe", **SIZES, **GLM, "n_group": 2}, "n_group: 2"),
    ({"model_type": "mixtral", **SIZES, **EXPERTS, "num_experts_per_tok": 1}, "top_k=1"),
]


@pytest.mark.parametrize(("content", "named"), REFUSED)
def test_import_refuses_by_name(content: dict[str, Any], named: str) -> None:
    with pytest.raises(UserError) as error:
        read_folder_config(content, "DIR/config.json")
    assert str(error.value).startswith("DIR/config.json: ")
    assert named in str(error.value)


LLAMA = {"vocab_size": 61}
MOE = {**LLAMA, "moe": {"n_experts": 4, "top_k": 2}}
SWITCH = {**MOE, "moe": {"n_experts": 4, "top_k": 1, "normalize": False, "capacity_factor": 1.25}}
GPT2_OURS = read_folder_config({"model_type": "gpt2", **GPT2, "vocab_size": 61, "layer_norm_epsilon": 1e-5}, "")[1]
GEMMA_OURS = read_folder_config({"model_type": "gemma2", **GEMMA, "vocab_size": 61}, "")[1]
GLM_OURS = read_folder_config({"model_type": "glm4_moe", **GLM, "vocab_size": 61}, "")[1]
GLM_MOE = GLM_OURS.model_dump()["moe"]
NOT_EXPORTED: list[tuple[dict[str, Any], str]] = [
    ({**LLAMA, "position": "sinusoidal"}, "model.position: sinusoidal (nearest: llama)"),
    ({**LLAMA, "position": "relative", "relative_clip": 4}, "model.position: relative, model.relative_clip: 4"),
    ({**LLAMA, "norm_placement": "post"}, "model.norm_placement: post (nearest: llama)"),
    ({**LLAMA, "norm_bias": True}, "model.norm_bias: true (nearest: llama)"),
    ({**LLAMA, "final_norm": False}, "model.final_norm: false (nearest: llama)"),
    ({**LLAMA, "activation": "geglu"}, "model.activation: geglu (nearest: llama)"),
    ({**LLAMA, "attention_scale": 0.3}, "model.attention_scale: 0.3 (nearest: llama)"),
    ({**LLAMA, "rope_fraction": 0.5}, "model.rope_fraction: 0.5 (nearest: llama)"),
    ({**LLAMA, "qk_norm": True, "attention_window": 4, "mlp_bias": True}, "model.mlp_bias: true (nearest: qwen3)"),
    ({**GPT2_OURS.model_dump(), "head_dim": 4}, "model.head_dim: 4 (nearest: gpt2)"),
    ({**GPT2_OURS.model_dump(), "activation": "gelu"}, "model.activation: gelu (nearest: gpt2)"),
    ({**GPT2_OURS.model_dump(), "position": "none"}, "model.position: none (nearest: gpt2)"),
    ({**GEMMA_OURS.model_dump(), "attention_scale": 0.41}, "model.attention_scale: 0.41 (nearest: gemma2)"),
    ({**GEMMA_OURS.model_dump(), "attention_scale": 2.0}, "model.attention_scale: 2.0 (nearest: gemma2)"),
    (
        {**MOE, "attention_window": 4, "attention_global_every": 2},
        "model.attention_global_every: 2 (nearest: mixtral)",
    ),
    (
        {**MOE, "qk_norm": True, "moe": {**MOE["moe"], "n_shared_experts": 1}},
        "n_shared_experts: 1 (nearest: qwen3_moe)",
    ),
    ({**GLM_OURS.model_dump(), "moe": {**GLM_MOE, "n_shared_experts": 0}}, "n_shared_experts: 0 (nearest: glm4_moe)"),
    ({**GLM_OURS.model_dump(), "moe": {**GLM_MOE, "selection_bias": False}}, "selection_bias: false"),
    ({**MOE, "moe": {**MOE["moe"], "capacity_factor": 2.0}}, "model.moe.capacity_factor: 2.0 (nearest: mixtral)"),
    (SWITCH, "model.moe.capacity_factor: 1.25"),
]


@pytest.mark.parametrize(("keys", "named"), NOT_EXPORTED)
def test_export_refuses_what_no_class_has(keys: dict[str, Any], named: str) -> None:
    with pytest.raises(UserError) as error:
        family_for(ModelConfig(**keys))
    assert str(error.value).startswith("no Hugging Face class has model.")
    assert named in str(error.value)


def test_export_needs_a_vocabulary() -> None:
    with pytest.raises(UserError, match=r"model\.vocab_size is not known"):
        family_for(ModelConfig())
