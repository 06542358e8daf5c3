"""The `model` section of the config, and the presets it can start from. Imports no torch."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from common.config import Config, read_tree
from common.errors import UserError
from models.moe_config import MoEConfig

PRESET_DIR = Path(__file__).parent / "presets"


def preset_names() -> list[str]:
    """Names of the presets that ship with the project, sorted."""
    return sorted(path.stem for path in PRESET_DIR.glob("*.yaml"))


def load_preset(name: str) -> dict[str, Any]:
    """The keys of one preset as plain data; `ValueError` (for pydantic to report) if there is none of that name."""
    names = preset_names()
    if name not in names:
        near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
        hint = f"did you mean '{near[0]}'? " if near else ""
        raise ValueError(f"no preset '{name}'; {hint}set model.preset to one of: {', '.join(names)}")
    return read_tree(PRESET_DIR / f"{name}.yaml")


class RopeScaling(Config):
    """How rotary frequencies are changed for sequences longer than a model was first trained on."""

    kind: Literal["linear", "llama3", "yarn"] = Field(
        description="linear: all frequencies divided by the factor; llama3: the low ones only, with a ramp between; "
        "yarn: Peng et al. 2023.",
    )
    factor: float = Field(ge=1, description="What frequencies are divided by.")
    original_max_seq_len: int | None = Field(
        None, gt=0, description="llama3, yarn: longest sequence of the training before."
    )
    low_freq_factor: float | None = Field(
        None, gt=0, description="llama3: wavelengths above original_max_seq_len / this are scaled; absent: 1."
    )
    high_freq_factor: float | None = Field(
        None, gt=0, description="llama3: wavelengths below original_max_seq_len / this are kept; absent: 4."
    )
    beta_fast: float | None = Field(
        None, gt=0, description="yarn: what turns more often than this in original_max_seq_len is kept; absent: 32."
    )
    beta_slow: float | None = Field(
        None, gt=0, description="yarn: what turns less often than this is divided by the factor; absent: 1."
    )
    truncate: bool | None = Field(None, description="yarn: whether the ramp's ends are whole numbers; absent: true.")
    attention_factor: float | None = Field(
        None, gt=0, description="yarn: factor on the rotated queries and keys; absent: 0.1 ln(factor) + 1."
    )

    @model_validator(mode="after")
    def _check(self) -> RopeScaling:
        owners = {
            "original_max_seq_len": ("llama3", "yarn"),
            "low_freq_factor": ("llama3",),
            "high_freq_factor": ("llama3",),
            **dict.fromkeys(("beta_fast", "beta_slow", "truncate", "attention_factor"), ("yarn",)),
        }
        for key, kinds in owners.items():
            if getattr(self, key) is not None and self.kind not in kinds:
                raise ValueError(f"'{key}' does nothing under kind: {self.kind} (it belongs to {', '.join(kinds)})")
        if self.kind != "linear" and self.original_max_seq_len is None:
            raise ValueError(f"'original_max_seq_len' is needed under kind: {self.kind}")
        return self


class ModelConfig(Config):
    """Architecture of a decoder-only transformer. The defaults are a tiny Llama-like model."""

    preset: str | None = Field(
        None, description="Named model in models/presets whose values are used for every key that is not given here."
    )
    init_from: str | None = Field(
        None,
        description="Folder (a Hugging Face folder, a run or a checkpoint) whose architecture is used for every key "
        "that is not given here, and whose weights a new run starts from; null: initial weights are drawn.",
    )
    vocab_size: int | None = Field(
        None, gt=0, description="Rows of the embedding; left out, it is the size of the tokenizer's vocabulary."
    )
    n_layers: int = Field(4, gt=0, description="Number of blocks, each one attention and one MLP.")
    d_model: int = Field(128, gt=0, description="Width of the residual stream.")
    n_heads: int = Field(4, gt=0, description="Number of query heads in each attention.")
    n_kv_heads: int | None = Field(
        None, gt=0, description="Number of key and value heads (grouped-query attention); left out, it is n_heads."
    )
    head_dim: int | None = Field(None, gt=0, description="Width of one head; left out, it is d_model / n_heads.")
    d_ff: int = Field(256, gt=0, description="Hidden width of the MLP.")
    max_seq_len: int = Field(1024, gt=0, description="Longest sequence, in tokens, that the model accepts.")
    norm: Literal["rmsnorm", "layernorm"] = Field("rmsnorm", description="Kind of every normalisation layer.")
    norm_eps: float = Field(1e-5, gt=0, description="Number added to the mean square or variance in the norms.")
    norm_bias: bool = Field(False, description="Whether the norms have a bias beside their gain.")
    norm_unit_offset: bool = Field(
        False, description="Whether a norm's weight is the difference of its gain from 1, as in Gemma."
    )
    norm_placement: Literal["pre", "post", "both"] = Field(
        "pre",
        description="Where a block normalises: pre: x + f(norm(x)); post: norm(x + f(x)); both: x + norm(f(norm(x))).",
    )
    final_norm: bool = Field(True, description="Whether the residual stream is normalised once more before the head.")
    activation: Literal["swiglu", "swiglu_clamped", "geglu", "geglu_tanh", "gelu", "gelu_tanh", "relu"] = Field(
        "swiglu",
        description="Nonlinearity of the MLP and of experts. The first four are gated and have three matrices, the "
        "others two; swiglu_clamped is gpt-oss's form, geglu_tanh Gemma's, gelu_tanh GPT-2's.",
    )
    activation_limit: float | None = Field(
        None, gt=0, description="swiglu_clamped: where its inputs are cut off; absent: 7."
    )
    position: Literal["rope", "learned", "sinusoidal", "relative", "none"] = Field(
        "rope",
        description="How positions enter: rotating queries and keys, a learned or a sinusoidal vector added to the "
        "embedding, a learned number added to the scores by how far a key lies back, or not at all.",
    )
    rope_theta: float = Field(10000.0, gt=0, description="Base of the rotary frequencies; read where position is rope.")
    rope_theta_local: float | None = Field(
        None,
        gt=0,
        description="rope: base in the blocks with a window, which are then not scaled; left out, all are alike.",
    )
    rope_scaling: RopeScaling | None = Field(
        None, description="rope: change of the frequencies for long sequences; null: none."
    )
    rope_fraction: float = Field(1.0, gt=0, le=1, description="rope: the first part of each head that is rotated.")
    relative_clip: int = Field(
        128, gt=0, description="relative: keys that lie this far back and further share one number."
    )
    scale_embedding: bool = Field(False, description="Whether the embedding is multiplied by sqrt(d_model).")
    tie_embeddings: bool = Field(False, description="Whether the head shares the embedding's matrix.")
    attention_bias: bool = Field(False, description="Whether the query, key, value and output projections have biases.")
    attention_out_bias: bool | None = Field(
        None, description="Whether the output projection has a bias; left out, it is attention_bias."
    )
    attention_scale: float | None = Field(None, gt=0, description="Factor on the scores; left out, 1 / sqrt(head_dim).")
    attention_softcap: float | None = Field(
        None, gt=0, description="Scores s become c tanh(s / c) with this c; null: they stay."
    )
    attention_sinks: bool = Field(
        False, description="Whether each head has a learned score that takes part in the softmax and gives no value."
    )
    attention_window: int | None = Field(
        None, gt=0, description="A token sees itself and the tokens before it, this many in all; null: all of them."
    )
    attention_global_every: int | None = Field(
        None, gt=0, description="With a window: every n-th block sees all tokens; null: none does."
    )
    mlp_bias: bool = Field(False, description="Whether the matrices of the MLP and of experts have biases.")
    qk_norm: bool = Field(False, description="Whether each query and key head is normalised before the scores.")
    logit_softcap: float | None = Field(
        None, gt=0, description="Logits z become c tanh(z / c) with this c; null: they stay."
    )
    moe: MoEConfig | None = Field(None, description="Experts in place of the MLP; null: a dense model.")
    init_std: float = Field(
        0.02,
        gt=0,
        description="Standard deviation of initial weights; projections into the residual stream divide it by "
        "sqrt(2 n_layers).",
    )
    mup_base_width: int | None = Field(
        None,
        gt=0,
        description="Initial values by width, in the maximal update parametrization: hidden matrices have init_std "
        "times sqrt(this / d_model), the head and routers init_std times this / d_model; null: widths start alike.",
    )

    @model_validator(mode="before")
    @classmethod
    def _lay_over_preset(cls, given: Any) -> Any:
        if isinstance(given, dict) and isinstance(given.get("preset"), str):
            return {**load_preset(given["preset"]), **given}
        return given

    @model_validator(mode="after")
    def _check_shapes(self) -> ModelConfig:
        if self.head_dim is None and self.d_model % self.n_heads:
            raise ValueError(
                f"n_heads={self.n_heads} does not divide d_model={self.d_model}; "
                "set model.n_heads to a divisor of model.d_model, or give model.head_dim"
            )
        if self.n_heads % self.kv_heads:
            raise ValueError(
                f"n_kv_heads={self.kv_heads} does not divide n_heads={self.n_heads}; "
                "set model.n_kv_heads to a divisor of model.n_heads"
            )
        if self.position == "rope" and self.d_rotated % 2:
            raise ValueError(
                f"{self.d_rotated} numbers of each head cannot be rotated in pairs; "
                "set model.head_dim to an even number, or model.position to another kind"
            )
        return self

    @model_validator(mode="after")
    def _check_what_belongs_together(self) -> ModelConfig:
        rope, window = self.position == "rope", self.attention_window is not None
        idle = {  # keys that are given, and would do nothing
            "rope_scaling": (self.rope_scaling is not None and not rope, "position: rope"),
            "rope_fraction": (self.rope_fraction != 1 and not rope, "position: rope"),
            "rope_theta_local": (self.rope_theta_local is not None and not (rope and window), "rope and a window"),
            "attention_global_every": (self.attention_global_every is not None and not window, "attention_window"),
            "activation_limit": (
                self.activation_limit is not None and self.activation != "swiglu_clamped",
                "activation: swiglu_clamped",
            ),
            "norm_unit_offset": (self.norm_unit_offset and self.norm != "rmsnorm", "norm: rmsnorm"),
        }
        if self.mup_base_width is not None and self.tie_embeddings:
            raise ValueError(
                "'mup_base_width' needs a head that starts apart from the embedding; set model.tie_embeddings=false"
            )
        for key, (nothing_to_do, owner) in idle.items():
            if nothing_to_do:
                raise ValueError(f"'{key}' does nothing here (it belongs to {owner}); remove it")
        if self.moe is not None and self.moe.n_dense_layers >= self.n_layers:
            raise ValueError(
                f"moe.n_dense_layers={self.moe.n_dense_layers} leaves no block of {self.n_layers} with experts; "
                "set model.moe.n_dense_layers to less, or model.moe to null"
            )
        return self

    @property
    def kv_heads(self) -> int:
        """Number of key and value heads."""
        return self.n_heads if self.n_kv_heads is None else self.n_kv_heads

    @property
    def d_head(self) -> int:
        """Width of one head."""
        return self.d_model // self.n_heads if self.head_dim is None else self.head_dim

    @property
    def d_rotated(self) -> int:
        """How many numbers of a head are rotated, under `position: rope`."""
        return int(self.d_head * self.rope_fraction)

    @property
    def plain_scores(self) -> bool:
        """Whether attention is softmax of scaled products alone, which fused kernels compute."""
        return self.attention_softcap is None and not self.attention_sinks and self.position != "relative"

    @property
    def gated(self) -> bool:
        """Whether the MLP and experts have a gate, and so three matrices."""
        return self.activation in ("swiglu", "swiglu_clamped", "geglu", "geglu_tanh")

    @property
    def d_ff_expert(self) -> int:
        """Hidden width of one expert of a mixture."""
        return self.d_ff if self.moe is None or self.moe.d_ff is None else self.moe.d_ff

    def window_of(self, layer: int) -> int | None:
        """How many tokens, itself included, a token sees in a block; None: all before it."""
        every = self.attention_global_every
        return None if every is not None and (layer + 1) % every == 0 else self.attention_window

    def is_sparse(self, layer: int) -> bool:
        """Whether a block has experts in place of the MLP."""
        return self.moe is not None and layer >= self.moe.n_dense_layers

    @property
    def vocab(self) -> int:
        """The vocabulary's size; `UserError` while it is still the tokenizer's to say."""
        if self.vocab_size is None:
            raise UserError("model.vocab_size is not known here; set model.vocab_size, or give a tokenizer")
        return self.vocab_size

    def with_vocab_size(self, n_tokens: int) -> ModelConfig:
        """This config for a tokenizer of `n_tokens`; a larger vocabulary that was asked for is kept (padding)."""
        if self.vocab_size is None:
            return self.model_copy(update={"vocab_size": n_tokens})
        if self.vocab_size < n_tokens:
            raise UserError(
                f"model.vocab_size is {self.vocab_size}, but the tokenizer has {n_tokens} tokens; "
                f"leave model.vocab_size out, or set it to at least {n_tokens}"
            )
        return self
