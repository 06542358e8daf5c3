"""Which rule updates which parameter, with what learning rate, and on which rank: a table that names each once."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from optim.matrix import MatrixOptimizer

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


def routing_rows(optimizer: MatrixOptimizer, rule: str, lr: float) -> list[Row]:
    """Rows of the table, in the model's order. `lr` is `optim.lr`, `rule` what the config calls it."""
    owned: dict[str, list[tuple[tuple[int, int], int]]] = {}
    for matrix, owner in zip(optimizer.matrices, optimizer.owners, strict=True):
        owned.setdefault(matrix.parameter, []).append((matrix.shape, owner))
    rows: dict[tuple[object, ...], Row] = {}
    for group in optimizer.param_groups:
        for name, parameter in zip(group["names"], group["params"], strict=True):
            shapes = [shape for shape, _ in owned.get(name, [])]
            peak, decay = lr * group["lr_scale"], group["weight_decay"]
            if shapes:
                counts = {shape: shapes.count(shape) for shape in shapes}
                what = ", ".join(_times(count, shape) for shape, count in counts.items())
                scales = {optimizer.rule.factor(*shape) for shape in shapes}
                row = Row([], what, rule, peak, min(scales), decay, [])
            else:
                row = Row([], _times(1, tuple(parameter.shape)), "adamw", peak, 1.0, decay, [])
            key = (re.sub(r"\d+", "*", name), *row[1:6])
            row = rows.setdefault(key, row)
            row.names.append(name)
            row.owners.extend(owner for _, owner in owned.get(name, []))
    return list(rows.values())


def routing_table(optimizer: MatrixOptimizer, rule: str, lr: float) -> str:
    """The table as text, one row a line."""
    lines = [HEADER]
    for row in routing_rows(optimizer, rule, lr):
        owners = f"ranks {_ranges(row.owners)}" if row.owners else "each its part"
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
