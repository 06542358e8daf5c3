"""Records of training runs, one an observation: JSONL as `gramian sweep run` writes it, or others' CSV and JSONL.

Which parameters and which operations are counted is never implied. A record of ours has them in every convention, and
`Counting` chooses; of others it is what their columns hold.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import Field

from common.config import Config
from common.errors import UserError
from common.files import read_json_lines

ParameterCount = Literal["active", "total", "active_non_embedding", "total_non_embedding"]
FlopCount = Literal["causal", "full_attention", "6nd"]
COLUMNS = ("params", "tokens", "flops", "loss", "budget", "group", "lr", "batch", "variant")
_NUMBERS = ("params", "tokens", "flops", "loss", "lr", "batch")
_WORDS = ("budget", "group", "variant")
# Where records do not say: FLOPs that differ by less than this factor from the next are of one budget, unless a chain
# of such spans more than the second; what lies this near to a budget that is given belongs to it.
_NEXT, _SPAN, _NEAR = 1.2, 1.5, 1.1


class Counting(Config):
    """What N and C stand for."""

    parameters: ParameterCount = Field(
        "active",
        description="N: those that one token uses (active) or all (total), with or without the tables by token and "
        "position.",
    )
    flops: FlopCount = Field(
        "causal",
        description="C: matrix products with causal attention, with the full square of positions, or 6 N D.",
    )


@dataclass(frozen=True)
class Points:
    """Observations as columns of equal length."""

    params: np.ndarray  # N
    tokens: np.ndarray  # D
    flops: np.ndarray  # C
    loss: np.ndarray  # nats per token
    budget: np.ndarray  # number of the budget that an observation belongs to, ascending with C; -1: to none
    group: np.ndarray  # observations of one group are resampled together
    lr: np.ndarray  # NaN where it is not known
    batch: np.ndarray  # tokens a step; NaN where it is not known
    variant: np.ndarray  # what else differs, as a word
    source: str  # for messages
    notes: tuple[str, ...] = field(default=())  # what was left out, and how missing columns were made

    def __len__(self) -> int:
        return len(self.loss)

    def take(self, chosen: Any) -> Points:
        """The observations of a boolean mask or of indices, which may repeat."""
        columns = {name: getattr(self, name)[chosen] for name in COLUMNS}
        return replace(self, **columns)

    def by_variant(self) -> dict[str, Points]:
        """The observations of each variant, in the order of the records."""
        return {name: self.take(self.variant == name) for name in dict.fromkeys(self.variant.tolist())}

    def without_highest(self, n: int) -> Points:
        """All but the n highest losses and what ties with the lowest of these, which is told in the notes."""
        if n == 0:
            return self
        if n >= len(self):
            raise UserError(f"{self.source}: --drop-highest {n} leaves nothing of {len(self)} records; drop fewer")
        left = self.take(np.asarray(self.loss < np.sort(self.loss)[-n]))
        gone = len(self) - len(left)
        return replace(left, notes=(*self.notes, f"{gone} records with the highest losses are left out"))

    @property
    def largest(self) -> np.ndarray:
        """Mask of the largest budget and what is beyond it; of the last tenth, where most belong to no budget."""
        if (self.budget < 0).mean() > 0.5 or self.budget.max() < 1:
            return self.flops >= np.quantile(self.flops, 0.9)
        return self.flops >= self.flops[self.budget == self.budget.max()].min()

    def best_of_each(self) -> Points:
        """Of runs that differ in their learning rate or batch alone the one with the least loss.

        Seeds stay: they are equal in both, and their spread is the noise.
        """
        cells: dict[tuple[Any, ...], dict[tuple[float, float], list[int]]] = {}
        lr, batch = np.nan_to_num(self.lr), np.nan_to_num(self.batch)
        for i in range(len(self)):
            cell = (self.variant[i], self.budget[i], self.params[i], self.tokens[i])
            cells.setdefault(cell, {}).setdefault((lr[i], batch[i]), []).append(i)
        chosen: list[int] = []
        for settings in cells.values():
            chosen += min(settings.values(), key=lambda rows: float(self.loss[np.array(rows)].mean()))
        return self.take(np.array(sorted(chosen), dtype=int))


def read_points(
    path: Path,
    columns: Mapping[str, str],
    counting: Counting,
    drop_highest: int = 0,
    budgets: Sequence[float] = (),
    leave_out: Collection[str] = (),
) -> Points:
    """Read a `.csv`, `.jsonl` or our own records.

    Args:
        columns: our name to the file's; a name that is left out is looked for as it is.
        drop_highest: how many of the highest losses to leave out.
        budgets: FLOPs of the budgets; what is near to none of them belongs to none. Empty: as the records say, or by
            how near they are to one another.
        leave_out: cells of ours that are not looked at.

    Raises:
        UserError: one line that says which row, which column and what is missing.
    """
    if unknown := sorted(columns.keys() - set(COLUMNS)):
        raise UserError(f"--column {unknown[0]}=...: there is no such column; choose of {', '.join(COLUMNS)}")
    rows = _read_rows(path)
    if not rows:
        raise UserError(f"{path}: no records; give a file with a header and a row for each run, or run the sweep")
    notes: list[str] = []
    if "cell" in rows[0]:
        if columns:
            raise UserError(f"{path} has records of `gramian sweep run`, whose columns are known; leave --column out")
        rows, notes = _own_rows(path, [row for row in rows if row.get("cell") not in leave_out], counting)
    else:
        rows = [_renamed(path, number, row, columns) for number, row in enumerate(rows, start=1)]
    _refuse_disagreement(path, rows)
    points = _as_points(path, rows, notes, of_others="cell" not in rows[0])
    if budgets:
        points = replace(points, budget=_nearest(points.flops, sorted(budgets)))
    return points.without_highest(drop_highest)


def _read_rows(path: Path) -> list[dict[str, Any]]:
    """Of others' tables every line must be a record; ours may have lines that a crash cut off, which are left out."""
    if not path.is_file():
        raise UserError(f"{path}: no such file; give a .csv or .jsonl of records, or run the sweep first")
    try:
        text = path.read_text(encoding="utf-8-sig")
        if path.suffix == ".csv":
            return list(csv.DictReader(text.splitlines()))
        rows = read_json_lines(path)
        if not (rows and isinstance(rows[0], dict) and "cell" in rows[0]):
            rows = [json.loads(line) for line in text.splitlines() if line.strip()]
    except (ValueError, csv.Error) as error:
        raise UserError(f"{path}: not a table of records ({error}); give a .csv, or a JSON object a line") from None
    if not all(isinstance(row, dict) for row in rows):
        raise UserError(f"{path}: not every line is a JSON object; give one a record")
    return rows


def _own_rows(path: Path, rows: list[dict[str, Any]], counting: Counting) -> tuple[list[dict[str, Any]], list[str]]:
    """Records of ours by a convention; runs that diverged have no loss and are told of."""
    done, notes = [], []
    for number, row in enumerate(rows, start=1):
        try:
            if row["loss"] is None:
                notes.append(f"{row['name']} diverged and is left out")
                continue
            flops = row["flops"].get(counting.flops)
            params = row["params"][counting.parameters]
            done.append(
                {
                    "cell": row["cell"],
                    "params": params,
                    "tokens": row["tokens"],
                    "flops": 6 * params * row["tokens"] if flops is None else flops,
                    **{key: row[key] for key in ("loss", "lr", "batch", "budget", "group", "variant")},
                }
            )
        except (KeyError, TypeError) as error:
            raise UserError(
                f"{path} row {number}: a record of a sweep without {error}; run the sweep again without that row"
            ) from None
    if not done:
        why = (
            f"all {len(rows)} runs diverged; lower the learning rate of the sweep"
            if rows
            else "no run of the sweep as it is now; run it"
        )
        raise UserError(f"{path}: {why}")
    return done, notes


def _renamed(path: Path, number: int, row: dict[str, Any], columns: Mapping[str, str]) -> dict[str, Any]:
    """A row of others under our names; every other column stays, as it tells rows apart."""
    result = {f"their {key}": value for key, value in row.items() if key not in columns.values()}
    for ours, theirs in columns.items():
        if theirs not in row:
            known = ", ".join(map(str, row))
            raise UserError(f"{path} row {number}: no column '{theirs}' for {ours}; it has {known}")
        result[ours] = row[theirs]
    for name in COLUMNS:
        if name not in result and f"their {name}" in result:
            result[name] = result.pop(f"their {name}")
    for name in _NUMBERS:
        if name in result:
            result[name] = _number(f"{path} row {number}", columns.get(name, name), result[name])
    missing = [name for name in ("loss", "params") if name not in result]
    if not missing and "tokens" not in result and "flops" not in result:
        missing = ["tokens"]
    if missing:
        raise UserError(
            f"{path}: no column '{missing[0]}'; name it with --column {missing[0]}=NAME, where the file has "
            f"{', '.join(map(str, row))}"
        )
    return result


def _number(where: str, column: str, value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise UserError(f"{where}: '{column}' is {value!r}, not a number; correct the row or remove it") from None
    if not math.isfinite(number) or number <= 0:
        raise UserError(
            f"{where}: '{column}' is {value}, where a finite number above 0 is needed; correct the row or remove it"
        )
    return number


def _refuse_disagreement(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Two rows that are the same run have the same loss; of ours the cell says what is the same."""
    seen: dict[str, tuple[int, Any]] = {}
    for number, row in enumerate(rows, start=1):
        key = row.get("cell") or json.dumps({k: v for k, v in row.items() if k != "loss"}, sort_keys=True)
        first, loss = seen.setdefault(key, (number, row["loss"]))
        if loss != row["loss"]:
            raise UserError(
                f"{path}: rows {first} and {number} are the same run with losses {loss} and {row['loss']}; "
                f"remove the wrong one, or add a column that tells them apart (a seed)"
            )


def _as_points(path: Path, rows: list[dict[str, Any]], notes: list[str], of_others: bool) -> Points:
    unique: dict[str, dict[str, Any]] = {}
    for row in rows:
        unique.setdefault(row.get("cell") or json.dumps(row, sort_keys=True), row)
    if len(unique) < len(rows):
        notes.append(f"{len(rows) - len(unique)} rows are there twice and count once")
    rows = list(unique.values())
    for name, made, how in (("tokens", "flops", "flops / (6 params)"), ("flops", "tokens", "6 params tokens")):
        if of_others and name not in rows[0]:
            for row in rows:
                row[name] = row[made] / (6 * row["params"]) if name == "tokens" else 6 * row["params"] * row[made]
            notes.append(f"{name} are taken to be {how}")
    numbers = {name: np.array([float(row.get(name, math.nan)) for row in rows]) for name in _NUMBERS}
    words = {name: np.array([str(row.get(name, "")) for row in rows]) for name in _WORDS}
    budgets = group_budgets(numbers["flops"], words["budget"])
    if all(word == "" for word in words["group"]):
        words["group"] = np.array([str(i) for i in range(len(rows))])
    return Points(
        **numbers, budget=budgets, group=words["group"], variant=words["variant"], source=str(path), notes=tuple(notes)
    )


def group_budgets(flops: np.ndarray, names: np.ndarray) -> np.ndarray:
    """Number of each observation's budget, ascending with C: by name, or by FLOPs that lie close to one another."""
    if any(name != "" for name in names):
        order = sorted(set(names), key=lambda name: float(np.median(flops[names == name])))
        return np.array([order.index(name) for name in names])
    by_size = np.argsort(flops, kind="stable")
    steps = np.diff(np.log(flops[by_size])) > math.log(_NEXT)
    chain = np.empty(len(flops), dtype=int)
    chain[by_size] = np.concatenate([[0], np.cumsum(steps)])
    result, number = np.full(len(flops), -1), 0
    for i in range(chain.max() + 1):
        inside = chain == i
        if flops[inside].max() <= _SPAN * flops[inside].min():
            result[inside], number = number, number + 1
    return result


def _nearest(flops: np.ndarray, budgets: list[float]) -> np.ndarray:
    """Number of the budget that each observation is near to; -1: none."""
    away = np.abs(np.log(flops[:, None] / np.array(budgets)))
    nearest = away.argmin(axis=1)
    return np.where(away[np.arange(len(flops)), nearest] <= math.log(_NEAR), nearest, -1)
