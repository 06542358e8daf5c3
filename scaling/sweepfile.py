"""SWEEP.yaml: a base config, a family of sizes, budgets and axes. Imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, PrivateAttr, field_validator, model_validator

from common.config import Config, read_tree, validate
from common.errors import UserError
from scaling.records import Counting
from trainer.config import RunConfig


class SizesConfig(Config):
    """A family of models that differ in width, and in all that follows from it by a rule."""

    widths: list[int] = Field(
        description="`model.d_model` of each size, each a multiple of head_dim, or of twice `heads`."
    )
    head_dim: int | None = Field(
        None,
        ge=2,
        description="Width of one head, the same in all: n_heads = width / head_dim; absent: 64, or by `heads`.",
    )
    heads: int | None = Field(
        None,
        ge=1,
        description="n_heads, the same in all, so that heads grow instead: for small widths. `lr.transfer: mup` then "
        "divides scores by their width and not its root.",
    )
    layers: int | None = Field(None, ge=1, description="Blocks, the same in all; absent: by `aspect`.")
    aspect: float | None = Field(
        None,
        gt=0,
        description="Width over number of blocks: n_layers = width / aspect, rounded, at least 1; absent: 64.",
    )
    d_ff: float = Field(4.0, gt=0, description="`model.d_ff` over the width; rounded to a multiple of 8.")
    heads_per_kv: int = Field(
        1, ge=1, description="Query heads that share one of keys, where this divides them; else 1."
    )

    @model_validator(mode="after")
    def _check(self) -> SizesConfig:
        if self.layers is not None and self.aspect is not None:
            raise ValueError("'layers' and 'aspect' both say how deep models are; remove one of them")
        if not self.widths or len(set(self.widths)) < len(self.widths):
            raise ValueError(f"'widths' must be different numbers, got {self.widths}")
        if self.heads is not None and self.head_dim is not None:
            raise ValueError("'heads' and 'head_dim' both say how many heads there are; remove one of them")
        of = f"{self.step}, for {self.heads} heads of even width" if self.heads else f"head_dim={self.step}"
        for width in self.widths:
            if width < 1 or width % self.step:
                raise ValueError(f"'widths' has {width}, which is no multiple of {of}")
        return self

    @property
    def step(self) -> int:
        """What widths are multiples of."""
        return 2 * self.heads if self.heads else self.head_dim or 64

    def model(self, width: int) -> dict[str, Any]:
        """The `model` keys of one width."""
        heads = self.heads or width // self.step
        layers = self.layers or max(1, round(width / (self.aspect or 64.0)))
        kv = heads // self.heads_per_kv if heads % self.heads_per_kv == 0 else heads
        d_ff = 8 * max(1, round(self.d_ff * width / 8))
        shape = {"d_model": width, "n_layers": layers, "n_heads": heads, "n_kv_heads": kv, "d_ff": d_ff}
        return {f"model.{key}": value for key, value in {**shape, "head_dim": None}.items()}


class BudgetsConfig(Config):
    """How long each size is trained: one of the three."""

    flops: list[float] | None = Field(None, description="FLOPs of a run, as `counting.flops` counts them (IsoFLOP).")
    tokens_per_parameter: list[float] | None = Field(None, description="D / N, as `counting.parameters` counts N.")
    tokens: list[float] | None = Field(None, description="D.")
    within: tuple[float, float] | None = Field(
        None, description="flops: least and largest D / N; a size for which a budget is outside is left out of it."
    )

    @model_validator(mode="after")
    def _check(self) -> BudgetsConfig:
        given = [key for key in ("flops", "tokens_per_parameter", "tokens") if getattr(self, key) is not None]
        if len(given) != 1:
            raise ValueError(f"give one of flops, tokens_per_parameter and tokens, got {', '.join(given) or 'none'}")
        if not self.values or any(not value > 0 for value in self.values):
            raise ValueError(f"'{given[0]}' must be numbers above 0, got {self.values}")
        if self.within is not None and (self.flops is None or not 0 < self.within[0] < self.within[1]):
            raise ValueError("'within' is two numbers, the smaller first, and belongs to flops")
        return self

    @property
    def kind(self) -> str:
        """Which of the three."""
        return next(key for key in ("flops", "tokens_per_parameter", "tokens") if getattr(self, key) is not None)

    @property
    def values(self) -> list[float]:
        """Its numbers, ascending."""
        return sorted(set(getattr(self, self.kind)))


class LrConfig(Config):
    """How learning rates go from size to size."""

    factors: list[float] = Field(
        [1.0], description="Each cell is run at its learning rates times each; the best counts."
    )
    transfer: Literal["none", "mup"] = Field(
        "none",
        description="none: the same at every size; mup: initial values and learning rates by width, so that the best "
        "stays (Yang et al. 2022, table 3); sets model.mup_base_width, optim.roles and, under sizes.heads, "
        "model.attention_scale.",
    )
    base_width: int | None = Field(None, ge=1, description="mup: width at which nothing changes; absent: the smallest.")

    @model_validator(mode="after")
    def _check(self) -> LrConfig:
        if not self.factors or any(not factor > 0 for factor in self.factors):
            raise ValueError(f"'factors' must be numbers above 0, got {self.factors}")
        if self.base_width is not None and self.transfer != "mup":
            raise ValueError("'base_width' does nothing under transfer: none (it belongs to mup); remove it")
        return self


class ExecutionConfig(Config):
    """How runs are made. It changes no number."""

    parallel: int = Field(1, ge=1, description="Runs at a time on this machine, or jobs of a cluster.")
    threads: int = Field(1, ge=1, description="CPU threads of each.")
    retries: int = Field(1, ge=0, description="How often a run that failed is tried again, each time the sweep is run.")
    share_prefix: bool = Field(
        True,
        description="Under `schedule.name: wsd`: runs that differ in length alone branch off one trunk, which has the "
        "constant part of all; the same numbers for less compute.",
    )
    flops_per_second: float | None = Field(
        None, gt=0, description="Of one run, to estimate time; absent: as measured in runs that are done."
    )
    price_per_hour: float | None = Field(None, gt=0, description="Of the machine, to estimate cost.")


class SweepConfig(Config):
    """One sweep."""

    name: str = Field("sweep", description="Name of the sweep, and of its folder under `dir`.")
    dir: str = Field("sweeps", description="Folder of all sweeps, relative to the working directory.")
    base: str = Field(description="Config that all runs are made of, relative to the sweep's file.")
    overrides: dict[str, Any] = Field(default_factory=dict, description="Dotted keys laid over it, for all runs.")
    sizes: SizesConfig = Field(description="The family of models.")
    budgets: BudgetsConfig = Field(description="How long each is trained.")
    variants: dict[str, dict[str, Any]] = Field(
        default_factory=dict,
        description="Names, each with dotted keys, that are fitted apart; the first is the reference.",
    )
    axes: dict[str, list[Any]] = Field(
        default_factory=dict,
        description="Dotted keys, each with values, of which every combination is run. `run.seed` repeats a cell, "
        "`optim.lr` and `train.global_batch_size` are settings of which the best counts, any other makes variants.",
    )
    lr: LrConfig = Field(LrConfig(), description="Learning rates from size to size.")
    counting: Counting = Field(Counting(), description="What N and C stand for.")
    hold_out_largest: bool = Field(
        False, description="Predict the largest budget from the others before its runs are started."
    )
    execution: ExecutionConfig = Field(ExecutionConfig(), description="How runs are made.")
    _file: Path = PrivateAttr(Path())

    @field_validator("name")
    @classmethod
    def _is_a_folder_name(cls, name: str) -> str:
        return RunConfig(name=name).name

    @model_validator(mode="after")
    def _check(self) -> SweepConfig:
        for key, values in self.axes.items():
            if not values or "." not in key:
                raise ValueError(f"axes: '{key}' must be a dotted key with a list of values, like optim.lr: [1.0e-3]")
        if self.hold_out_largest and len(self.budgets.values) < 2:
            raise ValueError("'hold_out_largest' needs a budget beside the largest; add one to budgets")
        return self

    @property
    def folder(self) -> Path:
        """Of runs, records and reports."""
        return Path(self.dir).expanduser() / self.name

    @property
    def base_file(self) -> Path:
        """The base config."""
        return self._file.parent / self.base


def load_sweep(path: Path) -> SweepConfig:
    """Read and check a sweep's file; what it says of runs is checked when these are designed.

    Raises:
        UserError: one line that names the file, the key and the fix.
    """
    sweep = validate(SweepConfig, read_tree(path), str(path))
    sweep._file = path
    if not sweep.base_file.is_file():
        raise UserError(f"{path}: 'base' is {sweep.base}, but there is no {sweep.base_file}; name a config")
    return sweep
