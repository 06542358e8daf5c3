"""The families, as data. Source: the classes of transformers 5.24, models/<model_type>, and the published files."""

from __future__ import annotations

from typing import Any

from models.families.codecs import Codec, DenseList, Key, Rope, Windows
from models.families.family import Family
from models.families.weights import Joined, Rule

_GPT2 = Family(
    "gpt2",
    "GPT2LMHeadModel",
    keys=(
        Key("vocab_size", "vocab_size"),
        Key("n_layers", "n_layer"),
        Key("d_model", "n_embd"),
        Key("n_heads", "n_head"),
        Key("d_ff", "n_inner", lambda hf: 4 * hf["n_embd"]),
        Key("max_seq_len", "n_positions"),
        Key("norm_eps", "layer_norm_epsilon"),
        Key("tie_embeddings", "tie_word_embeddings", True),
    ),
    fixed={
        "norm": "layernorm",
        "norm_bias": True,
        "activation": "gelu_tanh",
        "position": "learned",
        "attention_bias": True,
        "mlp_bias": True,
    },
    demanded={
        "activation_function": "gelu_new",
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
    },
    outside={
        "transformer.wte": "embedding",
        "transformer.wpe": "position_embedding",
        "transformer.ln_f": "norm",
        "lm_head": "head",
    },
    blocks="transformer.h.",
    block={
        "ln_1": "attention_norm",
        "attn.c_attn": Joined(("attention.wq", "attention.wk", "attention.wv")),
        "attn.c_proj": Joined(("attention.wo",)),
        "ln_2": "mlp_norm",
        "mlp.c_fc": Joined(("mlp.w_up",)),
        "mlp.c_proj": Joined(("mlp.w_down",)),
    },
    without_meaning=r"\.attn\.(masked_)?bias$|^lm_head\.weight$",
)


_SILU = {"hidden_act": "silu"}


def _like_llama(
    model_type: str,
    name: str,
    *keys: Codec,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    tied: bool = False,
    fixed: dict[str, Any] | None = None,
    demanded: dict[str, Any] | None = None,
    block: dict[str, Rule] | None = None,
    **other: Any,
) -> Family:
    """What Llama and its successors share, and beside it what one of them has; `kv_heads` to `tied` are defaults."""
    common = (
        Key("vocab_size", "vocab_size"),
        Key("n_layers", "num_hidden_layers"),
        Key("d_model", "hidden_size"),
        Key("n_heads", "num_attention_heads"),
        Key("n_kv_heads", "num_key_value_heads", kv_heads),
        Key("head_dim", "head_dim", head_dim or (lambda hf: hf["hidden_size"] // hf["num_attention_heads"])),
        Key("d_ff", "intermediate_size"),
        Key("max_seq_len", "max_position_embeddings"),
        Key("norm_eps", "rms_norm_eps"),
        Key("tie_embeddings", "tie_word_embeddings", tied),
    )
    common_block: dict[str, Rule] = {
        "input_layernorm": "attention_norm",
        "self_attn.q_proj": "attention.wq",
        "self_attn.k_proj": "attention.wk",
        "self_attn.v_proj": "attention.wv",
        "self_attn.o_proj": "attention.wo",
        "self_attn.q_norm": "attention.q_norm",
        "self_attn.k_norm": "attention.k_norm",
        "post_attention_layernorm": "mlp_norm",
        "mlp.gate_proj": "mlp.w_gate",
        "mlp.up_proj": "mlp.w_up",
        "mlp.down_proj": "mlp.w_down",
    }
    return Family(
        model_type,
        f"{name}ForCausalLM",
        keys=(*common, *keys),
        fixed=fixed or {},
        demanded=demanded or _SILU,
        outside={"model.embed_tokens": "embedding", "model.norm": "norm", "lm_head": "head"},
        blocks="model.layers.",
        block=common_block | (block or {}),
        **other,
    )


def _gemma(model_type: str, name: str, *keys: Codec, fixed: dict[str, Any], demanded: dict[str, Any]) -> Family:
    return _like_llama(
        model_type,
        name,
        _ATTENTION_BIAS,
        # Whole numbers come back: the same power of the same number.
        Key("attention_scale", "query_pre_attn_scalar", 256, lambda x: x**-0.5, lambda s: max(1, round(s**-2))),
        *keys,
        kv_heads=4,
        head_dim=256,
        tied=True,
        fixed={
            "activation": "geglu_tanh",
            "norm_unit_offset": True,
            "norm_placement": "both",
            "scale_embedding": True,
            **fixed,
        },
        demanded={
            "hidden_activation": "gelu_pytorch_tanh",
            "use_bidirectional_attention": False,
            **demanded,
        },
        block={
            "post_attention_layernorm": "attention_post_norm",
            "pre_feedforward_layernorm": "mlp_norm",
            "post_feedforward_layernorm": "mlp_post_norm",
        },
    )


_ATTENTION_BIAS = Key("attention_bias", "attention_bias", False)
_TOP_K = Key("moe.top_k", "num_experts_per_tok")
# Where every block has experts, the one width is theirs.
_EXPERTS_ONLY = (Key("moe.n_experts", "num_local_experts"), _TOP_K, Key("moe.d_ff", "intermediate_size"))
_EXPERTS_BLOCK: dict[str, Rule] = {
    "mlp.gate": "moe.router",
    "mlp.experts.{e}.gate_proj.weight": "moe.experts.w_gate",
    "mlp.experts.{e}.up_proj.weight": "moe.experts.w_up",
    "mlp.experts.{e}.down_proj.weight": "moe.experts.w_down",
}
_GPT_OSS_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}

_ALL = (
    _GPT2,
    _like_llama("llama", "Llama", _ATTENTION_BIAS, Key("mlp_bias", "mlp_bias", False), Rope()),
    _like_llama(
        "qwen3",
        "Qwen3",
        _ATTENTION_BIAS,
        Rope(),
        Windows(4096, every=1, switch="use_sliding_window"),
        kv_heads=32,
        head_dim=128,
        fixed={"qk_norm": True},
    ),
    _gemma(
        "gemma2",
        "Gemma2",
        Key("attention_softcap", "attn_logit_softcapping", 50.0),
        Key("logit_softcap", "final_logit_softcapping", 30.0),
        Rope(),
        Windows(4096, every=2),
        fixed={},
        demanded={},
    ),
    _gemma(
        "gemma3_text",
        "Gemma3",
        Key("logit_softcap", "final_logit_softcapping", None),
        Rope(1e6, theta_local=1e4, kinds=("linear",)),
        Windows(4096, every=6),
        fixed={"qk_norm": True},
        demanded={"attn_logit_softcapping": None},  # which the class has, and does not apply
    ),
    _like_llama(
        "mixtral",
        "Mixtral",
        *_EXPERTS_ONLY,
        Rope(1e6),
        Windows(None),
        kv_heads=8,
        aliases={"num_experts": "num_local_experts"},
        block={
            "block_sparse_moe.gate": "moe.router",
            "block_sparse_moe.experts.{e}.w1.weight": "moe.experts.w_gate",
            "block_sparse_moe.experts.{e}.w3.weight": "moe.experts.w_up",
            "block_sparse_moe.experts.{e}.w2.weight": "moe.experts.w_down",
        },
    ),
    _like_llama(
        "qwen3_moe",
        "Qwen3Moe",
        _ATTENTION_BIAS,
        Key("moe.n_experts", "num_experts"),
        _TOP_K,
        Key("moe.d_ff", "moe_intermediate_size"),
        Key("moe.normalize", "norm_topk_prob", False),
        DenseList(),
        Rope(),
        Windows(4096, switch="use_sliding_window"),
        kv_heads=4,
        fixed={"qk_norm": True},
        aliases={"num_local_experts": "num_experts"},
        block=_EXPERTS_BLOCK,
    ),
    _like_llama(
        "gpt_oss",
        "GptOss",
        Key("attention_bias", "attention_bias", True),
        Key("activation_limit", "swiglu_limit", 7.0),
        *_EXPERTS_ONLY,
        Rope(150000.0, scaling=_GPT_OSS_YARN),
        Windows(128, every=2),
        kv_heads=8,
        head_dim=64,
        fixed={"activation": "swiglu_clamped", "attention_sinks": True, "mlp_bias": True, "moe.router_bias": True},
        demanded={**_SILU, "swiglu_alpha": 1.702},
        aliases={"num_experts": "num_local_experts"},
        block={
            "self_attn.sinks": "attention.scores.sinks",
            "mlp.router": "moe.router",
            "mlp.experts.gate_up_proj": Joined(("moe.experts.w_gate", "moe.experts.w_up"), interleaved=True),
            "mlp.experts.gate_up_proj_bias": Joined(
                ("moe.experts.gate_bias", "moe.experts.up_bias"), transposed=False, interleaved=True
            ),
            "mlp.experts.down_proj": Joined(("moe.experts.w_down",)),
            "mlp.experts.down_proj_bias": "moe.experts.down_bias",
        },
    ),
    _like_llama(
        "glm4_moe",
        "Glm4Moe",
        _ATTENTION_BIAS,
        Key("qk_norm", "use_qk_norm", False),
        Key("moe.n_experts", "n_routed_experts"),
        _TOP_K,
        Key("moe.d_ff", "moe_intermediate_size"),
        # The class has a shared MLP always; without experts it would be one of width 0.
        Key("moe.n_shared_experts", "n_shared_experts", 1, to_theirs=lambda ours: max(1, ours)),
        Key("moe.n_dense_layers", "first_k_dense_replace", 1),
        Key("moe.normalize", "norm_topk_prob", True),
        Key("moe.routed_scale", "routed_scaling_factor", 1.0),
        Rope(fraction=0.5),
        kv_heads=8,
        fixed={"attention_out_bias": False, "moe.router": "sigmoid", "moe.selection_bias": True},
        demanded={**_SILU, "n_group": 1, "topk_group": 1},
        written={"num_nextn_predict_layers": 0},
        aliases={"num_local_experts": "n_routed_experts"},
        block={
            **_EXPERTS_BLOCK,
            "mlp.gate.e_score_correction_bias": "moe.selection_bias",
            "mlp.shared_experts.gate_proj": "moe.shared.w_gate",
            "mlp.shared_experts.up_proj": "moe.shared.w_up",
            "mlp.shared_experts.down_proj": "moe.shared.w_down",
        },
        # The block after the last one of the published sizes predicts further tokens; transformers knows it by number.
        without_meaning=r"\.rotary_emb\.inv_freq$|^lm_head\.weight$|^model\.layers\.(46|92)\.",
    ),
)
FAMILIES = {family.model_type: family for family in _ALL}
