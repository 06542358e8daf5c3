"""From a sweep's file to its runs: which there are, what each costs, which share a prefix."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from common.errors import UserError
from common.files import atomic_write, hash_json
from models.config import ModelConfig
from models.flops import parameter_counts, training_flops_per_token
from optim.schedules import decay_start
from scaling.records import Counting
from scaling.sweepfile import SweepConfig
from scaling.transfer import transferred
from trainer.config import TrainingConfig, load_config
from trainer.rundir import is_free

# Of the keys that two starts of one run may differ in, those that change its result.
_OF_THE_RESULT = ("train.steps", "eval.batches")
_SETTINGS = ("run.seed", "optim.lr", "train.global_batch_size")  # axes that make no variants


@dataclass(frozen=True)
class Cell:
    """One run of a sweep. Its id is a hash of all that decides the result, so that no other run has it."""

    id: str
    name: str
    base: Path
    words: tuple[str, ...]  # laid over the base
    config: TrainingConfig
    variant: str
    budget: str
    width: int
    params: dict[str, int]  # by each convention
    tokens: int  # positions
    flops: dict[str, float]  # by each convention but 6nd
    held_out: bool

    @property
    def decay_start(self) -> int | None:
        """Under wsd the last step of the constant part; None: there is no such part."""
        schedule = self.config.schedule
        if schedule.name != "wsd" or self.config.stages:
            return None
        start = decay_start(schedule, self.config.train.steps)
        return start if start >= max(1, schedule.warmup_steps) else None

    def counted(self, counting: Counting) -> tuple[int, float]:
        """N and C by a convention."""
        n = self.params[counting.parameters]
        return n, 6.0 * n * self.tokens if counting.flops == "6nd" else self.flops[counting.flops]


@dataclass(frozen=True)
class Trunk:
    """The constant part that cells of different lengths share, from step 1 to the last decay's start."""

    name: str
    base: Path
    words: tuple[str, ...]  # without train.steps
    cells: tuple[Cell, ...]  # ascending by the step at which they branch off


def design(sweep: SweepConfig) -> list[Cell]:
    """All runs of a sweep, smallest budgets first.

    Raises:
        UserError: a config that is refused, or a budget that no size can be trained for.
    """
    cells: dict[str, Cell] = {}
    settings = _combinations({key: values for key, values in sweep.axes.items() if key in _SETTINGS})
    for variant, keys in variants_of(sweep).items():
        for values, factor, width in itertools.product(settings, sweep.lr.factors, sweep.sizes.widths):
            words = size_words(sweep, {**keys, **values}, factor, width)
            size = _measure(sweep.base_file, words)
            for value in sweep.budgets.values:
                cell = _cell(sweep, variant, words, size, width, value)
                if cell is not None:
                    cells.setdefault(cell.id, cell)
    if not cells:
        raise UserError(f"sweep '{sweep.name}' has no runs: budgets.within leaves no size for any budget; widen it")
    return sorted(cells.values(), key=lambda cell: (float(cell.budget), cell.name))


def variants_of(sweep: SweepConfig) -> dict[str, dict[str, Any]]:
    """Keys of each variant, by its name: those that are named, times the axes that are no mere settings."""
    axes = {key: values for key, values in sweep.axes.items() if key not in _SETTINGS}
    return {
        " ".join(filter(None, [name, *(f"{key}={_word(value)}" for key, value in values.items())])): {**keys, **values}
        for name, keys in (sweep.variants or {"": {}}).items()
        for values in _combinations(axes)
    }


def _combinations(axes: Mapping[str, list[Any]]) -> list[dict[str, Any]]:
    """Every choice of one value for each key."""
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]


def _cell(
    sweep: SweepConfig, variant: str, words: tuple[str, ...], size: _Size, width: int, budget: float
) -> Cell | None:
    """One run; None where the budget is outside `budgets.within` for the size."""
    n, row = size.counts[sweep.counting.parameters], size.row
    if sweep.budgets.kind == "flops":
        tokens = budget / size.flops_per_token(sweep.counting)
        low, high = sweep.budgets.within or (0.0, float("inf"))
        if not low <= tokens / n <= high:
            return None
    else:
        tokens = budget * n if sweep.budgets.kind == "tokens_per_parameter" else budget
    steps = max(1, round(tokens / row))
    words += (f"train.steps={steps}", f"eval.every={steps}", "checkpoint.every=null", "checkpoint.keep=1")
    config = load_config(sweep.base_file, words)
    if config.eval.batches == 0:
        raise UserError(f"sweep '{sweep.name}': 'eval.batches' is 0, and the held-out loss is what is fitted; set it")
    identity = hash_json(_of_the_result(config.tree()))[:12]
    label = f"{budget:g}".replace("+", "")
    name = "-".join(part for part in (_plain(variant), f"w{width}", f"b{label}", identity) if part)
    place = [f"run.name={name}", f"run.dir={json.dumps(str(sweep.folder / 'runs'))}"]
    return Cell(
        identity,
        name,
        sweep.base_file,
        (*words, *place),
        load_config(sweep.base_file, (*words, *place)),
        variant,
        repr(float(budget)),
        width,
        size.counts,
        steps * row,
        {key: per_token * steps * row for key, per_token in size.flops.items()},
        sweep.hold_out_largest and budget == sweep.budgets.values[-1],
    )


def size_words(sweep: SweepConfig, keys: Mapping[str, Any], factor: float, width: int) -> tuple[str, ...]:
    """Everything laid over the base but the length: overrides, size, variant and axes, learning rates."""
    laid = {**sweep.overrides, **sweep.sizes.model(width), **keys}
    words = [f"{key}={_word(value)}" for key, value in laid.items()]
    if factor != 1.0 or sweep.lr.transfer != "none":
        config = load_config(sweep.base_file, words)
        words += [f"optim.lr={config.optim.lr * factor!r}"]
        if config.optim.is_rule:
            words += [f"optim.adamw.lr={config.optim.adamw.lr * factor!r}"]
        if sweep.lr.transfer == "mup":
            base = sweep.lr.base_width or min(sweep.sizes.widths)
            keys = transferred(config, base, heads_grow=sweep.sizes.heads is not None)
            words += [f"{key}={_word(value)}" for key, value in keys.items()]
    return tuple(words)


class _Size(NamedTuple):
    """What a config's model costs, whatever its length."""

    flops: dict[str, int]  # a token, by each convention but 6nd
    row: int  # positions of a step
    counts: dict[str, int]  # parameters by each convention

    def flops_per_token(self, counting: Counting) -> float:
        """By a convention."""
        n = self.counts[counting.parameters]
        return 6.0 * n if counting.flops == "6nd" else float(self.flops[counting.flops])


def _measure(base: Path, words: tuple[str, ...]) -> _Size:
    config = load_config(base, words)
    if config.stages:
        raise UserError(f"{base} has stages, whose length a sweep cannot choose; take a base without")
    if (vocab := config.known_vocab_size) is None:
        raise UserError(f"{base}: the vocabulary's size is not in the config; set model.vocab_size in 'overrides'")
    model = config.model.with_vocab_size(vocab)
    flops = {
        name: training_flops_per_token(model, config.data.seq_len, causal=name == "causal")
        for name in ("causal", "full_attention")
    }
    return _Size(flops, config.train.global_batch_size * config.data.seq_len, counted_parameters(model))


@cache
def counted_parameters(model: ModelConfig) -> dict[str, int]:
    """N in each convention. Without embeddings: without tables by token or position; a head of its own stays."""
    counts = parameter_counts(model)
    return {
        **{kind: counts[kind] for kind in ("active", "total")},
        **{f"{kind}_non_embedding": counts[kind] - counts["embedding"] for kind in ("active", "total")},
    }


def _of_the_result(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """A config tree without what changes no result."""
    kept: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and value:
            if inner := _of_the_result(value, f"{name}."):
                kept[key] = inner
        elif name != "run.name" and (name in _OF_THE_RESULT or not is_free(name)):
            kept[key] = value
    return kept


def trunks(cells: list[Cell]) -> list[Trunk]:
    """The prefixes that two cells or more share."""
    groups: dict[str, list[Cell]] = {}
    for cell in cells:
        if cell.decay_start is not None:
            tree = _of_the_result(cell.config.tree())
            tree["schedule"] = {"warmup_steps": cell.config.schedule.warmup_steps}
            del tree["train"]["steps"]
            groups.setdefault(hash_json(tree)[:12], []).append(cell)
    found = []
    for key, group in groups.items():
        if len({cell.decay_start for cell in group}) < 2:
            continue
        group.sort(key=lambda cell: cell.decay_start or 0)
        first, schedule = group[0], group[0].config.schedule
        name = "-".join(part for part in ("trunk", _plain(first.variant), f"w{first.width}", key) if part)
        words = [word for word in first.words if not word.startswith(("train.steps=", "run.name=", "schedule"))]
        words += [f"run.name={name}", f"schedule={{name: constant, warmup_steps: {schedule.warmup_steps}}}"]
        words += ["checkpoint.keep=1000", "eval.batches=0"]
        found.append(Trunk(name, first.base, tuple(words), tuple(group)))
    return found


def write_config_for(sweep: SweepConfig, variant: str, flops: float, params: float, out: Path) -> dict[str, Any]:
    """Write a config of the family's size nearest to N = `params`, trained for the budget.

    Returns:
        the file, width, N, D and a summary in words.
    """
    settings = {key: values[0] for key, values in sweep.axes.items() if key in _SETTINGS}
    keys = {**variants_of(sweep)[variant], **settings}

    @cache
    def measured(width: int) -> _Size:
        return _measure(sweep.base_file, size_words(sweep, keys, 1.0, width))

    def counted(width: int) -> int:
        return measured(width).counts[sweep.counting.parameters]

    step = sweep.sizes.step
    low, high = 1, 2
    while counted(high * step) < params and high < 4096:
        low, high = high, 2 * high
    while high - low > 1:  # N grows with the width
        middle = (low + high) // 2
        low, high = (middle, high) if counted(middle * step) < params else (low, middle)
    width = min((low * step, high * step), key=lambda w: abs(counted(w) - params))
    n, row = counted(width), measured(width).row
    steps = max(1, round(flops / measured(width).flops_per_token(sweep.counting) / row))
    name = f"run.name={sweep.name}-{flops:.0e}".replace("+", "")
    config = load_config(sweep.base_file, [*size_words(sweep, keys, 1.0, width), f"train.steps={steps}", name])
    atomic_write(out, config.yaml())
    summary = (
        f"width {width}, {config.model.n_layers} blocks, N = {n:,} ({n / params - 1:+.1%} of the best), "
        f"{steps:,} steps of {row:,} tokens; look at it with `gramian train {out} --dry-run`"
    )
    return {"file": str(out), "width": width, "params": n, "tokens": steps * row, "summary": summary}


def _word(value: Any) -> str:
    """A value as YAML reads it from a word."""
    return json.dumps(value)


def _plain(variant: str) -> str:
    """A variant as part of a folder's name."""
    return "".join(c if c.isalnum() or c in "._" else "-" for c in variant).strip("-._")
