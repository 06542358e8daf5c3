"""The `model.moe` section of the config: what makes a model a mixture of experts. Imports no torch."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from common.config import Config


class MoEConfig(Config):
    """Experts in place of the MLP, and the router that chooses `top_k` of them for each token."""

    n_experts: int = Field(8, gt=0, description="Number of experts in a layer.")
    top_k: int = Field(2, gt=0, description="Experts that each token goes to.")
    d_ff: int | None = Field(None, gt=0, description="Hidden width of one expert; left out, it is model.d_ff.")
    router: Literal["softmax", "sigmoid"] = Field(
        "softmax",
        description="How logits become the weights of experts: softmax over all experts, or a sigmoid for each.",
    )
    router_bias: bool = Field(False, description="Whether the router's logits have a learned bias.")
    selection_bias: bool = Field(
        False,
        description="Whether a number per expert is added to its score when experts are chosen, and only then; true "
        "wherever bias_update_rate is above 0.",
    )
    bias_update_rate: float = Field(
        0.0,
        ge=0,
        description="How far each update moves the selection bias: up for experts with less than the mean load of the "
        "global batch, down for those with more; 0: not at all.",
    )
    normalize: bool = Field(
        True, description="Whether the weights of the chosen experts are divided by their sum; false: as they come."
    )
    routed_scale: float = Field(1.0, gt=0, description="Factor on the sum of the chosen experts' outputs.")
    n_shared_experts: int = Field(
        0, ge=0, description="Experts that every token goes to; together one MLP of that many times the width."
    )
    n_dense_layers: int = Field(0, ge=0, description="Blocks at the start that keep an MLP, of width model.d_ff.")
    capacity_factor: float | None = Field(
        None,
        gt=0,
        description="Most assignments that an expert takes of one row, as a multiple of the even share; the rest, the "
        "later ones, are dropped; null: none is dropped.",
    )
    aux_loss_coef: float = Field(0.01, ge=0, description="Factor on the loss that balances the load of experts.")
    aux_loss_over: Literal["sequence", "batch"] = Field(
        "sequence",
        description="What load that loss balances. sequence: of each row, whatever the layout and the micro-batch; "
        "batch: of the micro-batch of all ranks together, so that its size matters.",
    )
    z_loss_coef: float = Field(
        0.001, ge=0, description="Factor on the mean square of the logarithm of the router's softmax denominator."
    )

    @model_validator(mode="before")
    @classmethod
    def _have_what_moves(cls, given: Any) -> Any:
        if isinstance(given, dict) and given.get("bias_update_rate"):
            return {"selection_bias": True, **given}
        return given

    @model_validator(mode="after")
    def _check(self) -> MoEConfig:
        if self.bias_update_rate and not self.selection_bias:
            raise ValueError("bias_update_rate moves the selection bias; leave model.moe.selection_bias out")
        if self.top_k > self.n_experts:
            raise ValueError(
                f"top_k={self.top_k} is above n_experts={self.n_experts}; set model.moe.top_k to at most that"
            )
        if self.top_k == 1 and self.normalize:
            raise ValueError(
                "with top_k=1 a normalised weight is always 1 and the router would learn nothing; "
                "set model.moe.normalize=false"
            )
        return self
