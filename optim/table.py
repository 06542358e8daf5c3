"""Which rule updates which parameter, with what learning rate, and on which rank: a table that names each once."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from optim.matrix import MatrixOptimizer
from optim.ownership import Matrix
from optim.rule import Rule

HEADER = ("parameters", "matrices", "rule", "lr", "scale", "decay", "owners")


class Row(NamedTuple):
    """Parameters of several blocks that have all else in common."""

    names: list[str]
    matrices: str  # how many of which shape; of AdamW's, the parameters' shape
    rule: str
    lr: float  # the peak, before the schedule
    scale: float  # the rule's own factor on an update of this shape
    decay: float
    owners: list[int]  # ranks that compute the update; empty: each rank that of its part


class Routing(NamedTuple):
    """What an optimizer with a rule for matrices does with which parameter."""

    groups: list[dict[str, Any]]  # with `names`, `lr_scale` and `weight_decay`
    shapes: Mapping[str, tuple[int, ...]]  # of the parameters
    owned: Sequence[tuple[Matrix, int]]  # each matrix, and the rank that updates it
    rule: Rule
    unknown: str = ""  # what to say in place of owners, if anything


def routing_of(optimizer: MatrixOptimizer) -> Routing:
    """That of an optimizer of named parameters."""
    shapes = {n: tuple(p.shape) for g in optimizer.param_groups for n, p in zip(g["names"], g["params"], strict=True)}
    owned = list(zip(optimizer.matrices, optimizer.owners, strict=True))
    return Routing(optimizer.param_groups, shapes, owned, optimizer.rule)


def routing_rows(routing: Routing, rule: str, lr: float) -> list[Row]:
    """Rows of the table, in the model's order. `lr` is `optim.lr`, `rule` what the config calls it."""
    owned: dict[str, list[tuple[tuple[int, int], int]]] = {}
    for matrix, owner in routing.owned:
        owned.setdefault(matrix.parameter, []).append((matrix.shape, owner))
    rows: dict[tuple[object, ...], Row] = {}
    for group in routing.groups:
        for name in group["names"]:
            shapes = [shape for shape, _ in owned.get(name, [])]
            peak, decay = lr * group["lr_scale"], group["weight_decay"]
            if shapes:
                counts = {shape: shapes.count(shape) for shape in shapes}
                what = ", ".join(_times(count, shape) for shape, count in counts.items())
                scales = {routing.rule.factor(*shape) for shape in shapes}
                row = Row([], what, rule, peak, min(scales), decay, [])
            else:
                row = Row([], _times(1, routing.shapes[name]), "adamw", peak, 1.0, decay, [])
            key = (re.sub(r"\d+", "*", name), *row[1:6])
            row = rows.setdefault(key, row)
            row.names.append(name)
            row.owners.extend(owner for _, owner in owned.get(name, []))
    return list(rows.values())


def routing_table(routing: Routing, rule: str, lr: float) -> str:
    """The table as text, one row a line."""
    lines = [HEADER]
    for row in routing_rows(routing, rule, lr):
        owners = (routing.unknown or f"ranks {_ranges(row.owners)}") if row.owners else "each its part"
        lines.append(
            (_pattern(row.names), row.matrices, row.rule, f"{row.lr:g}", f"{row.scale:.3g}", f"{row.decay:g}", owners)
        )
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


def _times(count: int, shape: tuple[int, ...]) -> str:
    sides = " x ".join(map(str, shape))
    return sides if count == 1 else f"{count} of {sides}"


def _pattern(names: list[str]) -> str:
    """One name, or the names of several blocks as `blocks.0-3.attention.wq.weight`."""
    if len(names) == 1:
        return names[0]
    numbers = [int(re.findall(r"\d+", name)[0]) for name in names]
    return re.sub(r"\d+", _ranges(numbers), names[0], count=1)


def _ranges(numbers: Iterable[int]) -> str:
    """`0-2,5` for 0, 1, 2 and 5."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
