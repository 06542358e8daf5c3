"""Configuration of the optimizer and of the learning-rate schedule. Imports no torch."""

from __future__ import annotations

from difflib import get_close_matches
from typing import Any, Literal

from pydantic import Field, model_validator

from common.config import Config

Role = Literal["embedding", "head", "hidden_matrix", "expert_matrix", "router", "vector"]

# Rules for matrices (optim/rule.py), by where their class is; a user's own is given in the same way.
RULES = {
    "muon": "optim.muon:Muon",
    "shampoo": "optim.shampoo:Shampoo",
    "soap": "optim.soap:SOAP",
    "galore": "optim.galore:GaLore",
}

# Roles of parameters that are matrices, or have some: what a rule updates.
MATRIX_ROLES = ("hidden_matrix", "expert_matrix")

# What each optimizer accepts beyond lr and weight_decay, with the value used when the key is absent. Those of torch are
# torch's defaults but for beta2: 0.95 is the usual choice for language models (Brown et al. 2020), torch has 0.999.
OPTIONS: dict[str, dict[str, Any]] = {
    "adamw": {"betas": (0.9, 0.95), "eps": 1e-8},
    "adam": {"betas": (0.9, 0.95), "eps": 1e-8},
    "sgd": {"momentum": 0.9, "nesterov": False},
    "adagrad": {"eps": 1e-10},
    "rmsprop": {"alpha": 0.99, "eps": 1e-8, "momentum": 0.0},
    "muon": {
        "momentum": 0.95,
        "nesterov": True,
        "scale": "original",
        "coefficients": "polar_express",
        "ns_steps": None,
    },
    "shampoo": {
        "betas": (0.9, 0.95),
        "eps": 1e-8,
        "factor_beta": 0.95,
        "exponent": 0.25,
        "block_size": None,
        "grafting": "adam",
        "precondition_every": 10,
        "start_step": 1,
        "ridge": 1e-4,
    },
    "soap": {"betas": (0.95, 0.95), "eps": 1e-8, "factor_beta": 0.95, "precondition_every": 10, "max_dim": 10000},
    "galore": {"betas": (0.9, 0.95), "eps": 1e-8, "rank": 128, "precondition_every": 200, "update_scale": 0.25},
}


def _check_betas(betas: tuple[float, float]) -> None:
    if not all(0 <= beta < 1 for beta in betas):
        raise ValueError(f"'betas' must lie in [0, 1), got {list(betas)}")


class RoleOptions(Config):
    """What one role of parameters does differently."""

    lr_scale: float = Field(1.0, gt=0, description="Factor on the learning rate of this role.")
    weight_decay: float | None = Field(
        None, ge=0, description="Weight decay of this role; absent: `optim.weight_decay`, and 0 for the role `vector`."
    )


class AdamWOptions(Config):
    """AdamW for what a rule for matrices leaves: embeddings, head, routers, gains and biases."""

    lr: float = Field(3e-3, gt=0, description="Its peak learning rate; the schedule multiplies it too.")
    weight_decay: float = Field(0.0, ge=0, description="Its decoupled weight decay; 0 for the role `vector`.")
    betas: tuple[float, float] = Field((0.9, 0.95), description="Decay of the first and second moments.")
    eps: float = Field(1e-8, gt=0, description="Added to the root.")

    @model_validator(mode="after")
    def _check(self) -> AdamWOptions:
        _check_betas(self.betas)
        return self


class OptimConfig(Config):
    """The optimizer: one of `torch.optim`, with its conventions, or a rule for matrices (docs/optimizers.md)."""

    name: str = Field(
        "adamw",
        description="Which optimizer: adamw, adam, sgd, adagrad, rmsprop; for matrices muon, shampoo, soap, galore, or "
        "the class of your own rule, as `package.module:Class`.",
    )
    lr: float = Field(1e-3, gt=0, description="Peak learning rate; the schedule multiplies it.")
    weight_decay: float = Field(
        0.0,
        ge=0,
        description="Weight decay of matrices: decoupled (times lr) for adamw and rules for matrices, added to the "
        "gradient for the others.",
    )
    betas: tuple[float, float] | None = Field(
        None,
        description="adam, adamw, shampoo, soap, galore: decay of the first and second moments; absent: 0.9 and 0.95 "
        "(soap: 0.95 twice). shampoo: of the gradient that is preconditioned, and of the grafted optimizer.",
    )
    eps: float | None = Field(
        None, gt=0, description="All with second moments: added to the root; absent: 1e-8 (adagrad: 1e-10)."
    )
    momentum: float | None = Field(
        None, ge=0, lt=1, description="sgd, rmsprop, muon: momentum; absent: 0.9 for sgd, 0 for rmsprop, 0.95 for muon."
    )
    nesterov: bool | None = Field(
        None, description="sgd, muon: Nesterov's form of momentum; absent: false for sgd, true for muon."
    )
    alpha: float | None = Field(None, ge=0, lt=1, description="rmsprop: decay of the squares; absent: 0.99.")
    scale: Literal["original", "rms", "spectral"] | None = Field(
        None,
        description="muon: factor on an update of m rows and n columns: original sqrt(max(1, m/n)), rms "
        "0.2 sqrt(max(m, n)), spectral sqrt(m/n); absent: original.",
    )
    coefficients: Literal["keller", "polar_express", "polar_express_8"] | None = Field(
        None, description="muon: table of the Newton-Schulz iteration; absent: polar_express."
    )
    ns_steps: int | None = Field(None, ge=1, description="muon: number of iterations; absent: the table's.")
    factor_beta: float | None = Field(
        None,
        ge=0,
        le=1,
        description="shampoo, soap: decay of the factors G G^T and G^T G; 1 (shampoo): their sum; absent: 0.95.",
    )
    exponent: float | None = Field(
        None, gt=0, le=1, description="shampoo: the factors' inverse power, on each side; absent: 0.25."
    )
    block_size: int | None = Field(
        None, ge=1, description="shampoo: matrices are cut into blocks of at most this side; absent: not at all."
    )
    grafting: Literal["adam", "sgd", "rmsprop", "adagrad", "none"] | None = Field(
        None, description="shampoo: whose update's norm an update gets; absent: adam."
    )
    precondition_every: int | None = Field(
        None,
        ge=1,
        description="shampoo, soap, galore: updates between new roots, bases, projections; absent: 10 (galore: 200).",
    )
    start_step: int | None = Field(
        None, ge=1, description="shampoo: first update that is preconditioned; before it, the grafted one; absent: 1."
    )
    ridge: float | None = Field(
        None, ge=0, lt=1, description="shampoo: added to eigenvalues, times the largest; absent: 1e-4."
    )
    max_dim: int | None = Field(None, ge=1, description="soap: a longer side is not rotated; absent: 10000.")
    rank: int | None = Field(None, ge=1, description="galore: rank of the projection; absent: 128.")
    update_scale: float | None = Field(None, gt=0, description="galore: factor on the update; absent: 0.25.")
    options: dict[str, Any] = Field(
        default_factory=dict, description="Of your own rule: keyword arguments of its constructor."
    )
    split_heads: bool = Field(
        False, description="Rules for matrices: take the rows of each head in wq, wk, wv as a matrix of its own."
    )
    adamw: AdamWOptions = Field(
        default_factory=AdamWOptions, description="Rules for matrices: AdamW for all that is no matrix."
    )
    roles: dict[Role, RoleOptions] = Field(
        default_factory=dict,
        description="Per role of parameters (embedding, head, hidden_matrix, expert_matrix, router, vector): "
        "`lr_scale` and `weight_decay`.",
    )

    @model_validator(mode="after")
    def _check(self) -> OptimConfig:
        if not self.is_rule and self.name not in OPTIONS:
            near = get_close_matches(self.name, OPTIONS, n=1)
            hint = f"did you mean '{near[0]}'? " if near else ""
            raise ValueError(
                f"there is no optimizer '{self.name}'; {hint}choose {', '.join(OPTIONS)}, or package.module:Class"
            )
        for key in sorted({key for options in OPTIONS.values() for key in options}):
            if getattr(self, key) is not None and key not in OPTIONS.get(self.name, {}):
                users = ", ".join(name for name, options in OPTIONS.items() if key in options)
                advice = "give it in optim.options" if self.is_own_rule else "remove it"
                raise ValueError(f"'{key}' does nothing under name: {self.name} (it belongs to {users}); {advice}")
        if self.options and not self.is_own_rule:
            raise ValueError(
                f"'options' are those of a rule of your own, not of {self.name}; give them as optim.<option>"
            )
        for key, given in (("split_heads", self.split_heads), ("adamw", self.adamw != AdamWOptions())):
            if given and not self.is_rule:
                raise ValueError(
                    f"'{key}' does nothing under name: {self.name} (it belongs to {', '.join(RULES)}); remove it"
                )
        if self.betas is not None:
            _check_betas(self.betas)
        if self.factor_beta == 1 and self.name == "soap":
            raise ValueError("'factor_beta' must be below 1 for soap; only shampoo can take the sum of factors")
        if self.nesterov and self.resolved()["momentum"] == 0:
            raise ValueError("'nesterov' needs momentum above 0; set optim.momentum=0.9")
        return self

    @property
    def is_rule(self) -> bool:
        """Whether matrices get a rule of their own, and all else AdamW."""
        return self.name in RULES or self.is_own_rule

    @property
    def is_own_rule(self) -> bool:
        """Whether `name` is where a user's rule is."""
        return ":" in self.name

    def resolved(self) -> dict[str, Any]:
        """Keyword arguments of the `torch.optim` class, apart from lr and weight_decay, or of the rule."""
        if self.name not in OPTIONS:
            return dict(self.options)
        return {k: d if getattr(self, k) is None else getattr(self, k) for k, d in OPTIONS[self.name].items()}

    def has_matrices(self, role: str) -> bool:
        """Whether the parameters of a role are updated by a rule for matrices."""
        return self.is_rule and role in MATRIX_ROLES

    def lr_of(self, role: str) -> float:
        """Peak learning rate of a role."""
        return (self.adamw.lr if self.is_rule and not self.has_matrices(role) else self.lr) * self.lr_scale_of(role)

    def weight_decay_of(self, role: str) -> float:
        """Weight decay of a role. Vectors (norm gains, biases) are not decayed unless asked for."""
        options = self.roles.get(role)  # type: ignore[call-overload]
        if options is not None and options.weight_decay is not None:
            return float(options.weight_decay)
        if role == "vector":
            return 0.0
        return self.adamw.weight_decay if self.is_rule and not self.has_matrices(role) else self.weight_decay

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
