"""Configuration of the optimizer and of the learning-rate schedule. Imports no torch."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from common.config import Config

OptimizerName = Literal["adamw", "adam", "sgd", "adagrad", "rmsprop"]
Role = Literal["embedding", "head", "hidden_matrix", "expert_matrix", "router", "vector"]

# What each optimizer accepts beyond lr and weight_decay, with the value used when the key is absent. They are torch's
# defaults but for beta2: 0.95 is the usual choice for language models (Brown et al. 2020), torch has 0.999.
OPTIONS: dict[str, dict[str, Any]] = {
    "adamw": {"betas": (0.9, 0.95), "eps": 1e-8},
    "adam": {"betas": (0.9, 0.95), "eps": 1e-8},
    "sgd": {"momentum": 0.9, "nesterov": False},
    "adagrad": {"eps": 1e-10},
    "rmsprop": {"alpha": 0.99, "eps": 1e-8, "momentum": 0.0},
}


class RoleOptions(Config):
    """What one role of parameters does differently."""

    lr_scale: float = Field(1.0, gt=0, description="Factor on the learning rate of this role.")
    weight_decay: float | None = Field(
        None, ge=0, description="Weight decay of this role; absent: `optim.weight_decay`, and 0 for the role `vector`."
    )


class OptimConfig(Config):
    """The optimizer. All are `torch.optim`'s, with its conventions (docs/optimizers.md)."""

    name: OptimizerName = Field("adamw", description="Which optimizer.")
    lr: float = Field(1e-3, gt=0, description="Peak learning rate; the schedule multiplies it.")
    weight_decay: float = Field(
        0.0,
        ge=0,
        description="Weight decay of matrices: decoupled (times lr) for adamw, added to the gradient for the others.",
    )
    betas: tuple[float, float] | None = Field(
        None, description="adam, adamw: decay of the first and second moments; absent: 0.9 and 0.95."
    )
    eps: float | None = Field(
        None, gt=0, description="adam, adamw, rmsprop, adagrad: added to the root; absent: torch's default."
    )
    momentum: float | None = Field(
        None, ge=0, lt=1, description="sgd, rmsprop: momentum; absent: 0.9 for sgd, 0 for rmsprop."
    )
    nesterov: bool | None = Field(None, description="sgd: Nesterov's form of momentum; absent: false.")
    alpha: float | None = Field(None, ge=0, lt=1, description="rmsprop: decay of the squares; absent: 0.99.")
    roles: dict[Role, RoleOptions] = Field(
        default_factory=dict,
        description="Per role of parameters (embedding, head, hidden_matrix, expert_matrix, router, vector): "
        "`lr_scale` and `weight_decay`.",
    )

    @model_validator(mode="after")
    def _check(self) -> OptimConfig:
        for key in ("betas", "eps", "momentum", "nesterov", "alpha"):
            if getattr(self, key) is not None and key not in OPTIONS[self.name]:
                users = ", ".join(name for name, options in OPTIONS.items() if key in options)
                raise ValueError(f"'{key}' does nothing under name: {self.name} (it belongs to {users}); remove it")
        if self.betas is not None and not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"'betas' must lie in [0, 1), got {list(self.betas)}")
        if self.nesterov and self.options()["momentum"] == 0:
            raise ValueError("'nesterov' needs momentum above 0; set optim.momentum=0.9")
        return self

    def options(self) -> dict[str, Any]:
        """Keyword arguments of the `torch.optim` class, apart from lr and weight_decay."""
        return {k: d if getattr(self, k) is None else getattr(self, k) for k, d in OPTIONS[self.name].items()}

    def weight_decay_of(self, role: str) -> float:
        """Weight decay of a role. Vectors (norm gains, biases) are not decayed unless asked for."""
        options = self.roles.get(role)  # type: ignore[call-overload]
        if options is not None and options.weight_decay is not None:
            return float(options.weight_decay)
        return 0.0 if role == "vector" else self.weight_decay

    def lr_scale_of(self, role: str) -> float:
        """Factor on the learning rate of a role."""
        options = self.roles.get(role)  # type: ignore[call-overload]
        return 1.0 if options is None else float(options.lr_scale)


class ScheduleConfig(Config):
    """The learning rate as a function of the step; see optim/schedules.py for the formulas."""

    name: Literal["constant", "linear", "cosine", "wsd", "inverse_sqrt"] = Field(
        "cosine",
        description="Shape after the warm-up: constant, linear, cosine, wsd (stable, then decay), inverse_sqrt.",
    )
    warmup_steps: int = Field(0, ge=0, description="Steps of linear warm-up from 0; inverse_sqrt needs at least 1.")
    decay_steps: int | None = Field(
        None, ge=1, description="wsd: length of the final decay in steps; absent: a fifth of train.steps."
    )
    min_lr_ratio: float | None = Field(
        None, ge=0, le=1, description="linear, cosine, wsd: final learning rate over the peak; absent: 0.1 (wsd: 0)."
    )

    @model_validator(mode="after")
    def _check(self) -> ScheduleConfig:
        if self.decay_steps is not None and self.name != "wsd":
            raise ValueError(f"'decay_steps' does nothing under name: {self.name} (it belongs to wsd); remove it")
        if self.min_lr_ratio is not None and self.name in ("constant", "inverse_sqrt"):
            raise ValueError(f"'min_lr_ratio' does nothing under name: {self.name}; remove it")
        if self.name == "inverse_sqrt" and self.warmup_steps == 0:
            raise ValueError("'warmup_steps' must be at least 1 for inverse_sqrt: it divides by it")
        return self
