"""The `model` section of the config, and the presets it can start from. Imports no torch."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from common.config import Config, read_tree
from common.errors import UserError

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


class ModelConfig(Config):
    """Architecture of a decoder-only, pre-norm transformer. The defaults are a tiny Llama-like model."""

    preset: str | None = Field(
        None, description="Named model in models/presets whose values are used for every key that is not given here."
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
    final_norm: bool = Field(True, description="Whether the residual stream is normalised once more before the head.")
    activation: Literal["swiglu", "gelu", "gelu_tanh", "relu"] = Field(
        "swiglu",
        description="Nonlinearity of the MLP: swiglu has three matrices, the others two; gelu_tanh is GPT-2's form.",
    )
    position: Literal["rope", "learned", "sinusoidal", "none"] = Field(
        "rope",
        description="How positions enter: rotating queries and keys, a learned or a sinusoidal vector added to the "
        "embedding, or not at all.",
    )
    rope_theta: float = Field(10000.0, gt=0, description="Base of the rotary frequencies; read where position is rope.")
    tie_embeddings: bool = Field(False, description="Whether the head shares the embedding's matrix.")
    attention_bias: bool = Field(False, description="Whether the query, key, value and output projections have biases.")
    mlp_bias: bool = Field(False, description="Whether the MLP's matrices have biases.")
    qk_norm: bool = Field(False, description="Whether each query and key head is normalised before the scores.")
    init_std: float = Field(
        0.02,
        gt=0,
        description="Standard deviation of initial weights; projections into the residual stream divide it by "
        "sqrt(2 n_layers).",
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
        if self.position == "rope" and self.d_head % 2:
            raise ValueError(
                f"heads of odd width {self.d_head} cannot be rotated in pairs; "
                "set model.head_dim to an even number, or model.position to another kind"
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
