"""Approaches that read the optimum off the data: the envelope, IsoFLOP parabolas, and power laws of what is best.

Hoffmann et al. 2022, approaches 1 and 2. A parabola in log N is symmetric, and a loss surface with alpha != beta is
not: approach 2 is biased wherever the sizes of a budget lie unevenly around its optimum, and approach 3 is not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from common.errors import UserError
from scaling.checks import distinct
from scaling.records import Points

_GRID = 200  # amounts of compute at which the envelope is looked at


@dataclass(frozen=True)
class PowerLaw:
    """`y = factor x^exponent`."""

    factor: float
    exponent: float

    def at(self, x: float) -> float:
        """y at x."""
        return float(self.factor * x**self.exponent)


def power_law(x: np.ndarray, y: np.ndarray) -> PowerLaw:
    """Least squares in logarithms."""
    exponent, intercept = np.polyfit(np.log(x), np.log(y), 1)
    return PowerLaw(float(np.exp(intercept)), float(exponent))


@dataclass(frozen=True)
class Vertex:
    """A parabola `L = c2 u^2 + c1 u + c0`, u = log x, through the runs of a budget, and its least point."""

    flops: float  # of the budget, median
    best: float  # x at the vertex
    loss: float
    low: float  # least and largest x that were tried
    high: float
    coefficients: np.ndarray  # c2, c1, c0
    residuals: np.ndarray
    rows: np.ndarray  # of the points

    @property
    def usable(self) -> bool:
        """Whether there is a least point, not far from what was tried."""
        return bool(self.coefficients[0] > 0 and self.loss > 0 and self.low / 3 < self.best < self.high * 3)

    @property
    def inside(self) -> bool:
        """Whether it lies between what was tried."""
        return self.usable and self.low < self.best < self.high


def vertex_of(x: np.ndarray, loss: np.ndarray, flops: float, rows: np.ndarray) -> Vertex:
    """Least squares of the loss on log x; of three x or more."""
    u = np.log(x)
    middle = u.mean()
    c2, c1, c0 = np.polyfit(u - middle, loss, 2)
    with np.errstate(all="ignore"):
        place = -c1 / (2 * c2)
        best, lowest = float(np.exp(middle + place)), float(c0 - c1**2 / (4 * c2))
    coefficients = np.array([c2, c1 - 2 * c2 * middle, c0 - c1 * middle + c2 * middle**2])
    left = loss - np.polyval(coefficients, u)
    return Vertex(flops, best, lowest, float(x.min()), float(x.max()), coefficients, left, rows)


def vertices(points: Points) -> list[Vertex]:
    """The parabola in log N of every budget, ascending.

    Raises:
        UserError: a budget with fewer than three sizes, or no budgets at all.
    """
    numbers = sorted(set(points.budget.tolist()) - {-1})
    if not numbers:
        raise UserError(
            f"{points.source}: the FLOPs of {len(points)} records form no budgets; name them with --budgets C,C,..."
        )
    found = []
    for number in numbers:
        rows = np.flatnonzero(points.budget == number)
        sizes, flops = points.params[rows], float(np.median(points.flops[rows]))
        if (n := distinct(sizes)) < 3:
            raise UserError(
                f"{points.source}: the budget of {flops:.2e} FLOPs has {n} size{'s' * (n != 1)}, and a parabola needs "
                f"three; add runs of it, or name other budgets with --budgets"
            )
        found.append(vertex_of(sizes, points.loss[rows], flops, rows))
    return found


@dataclass(frozen=True)
class Frontier:
    """How optimal size, tokens and loss grow with compute."""

    params: PowerLaw
    tokens: PowerLaw
    loss: PowerLaw
    flops: np.ndarray  # the budgets that went in
    best_params: np.ndarray
    best_tokens: np.ndarray
    best_loss: np.ndarray


def _frontier(source: str, flops: np.ndarray, params: np.ndarray, tokens: np.ndarray, loss: np.ndarray) -> Frontier:
    if len(flops) < 2:
        raise UserError(f"{source}: {len(flops)} budgets with an optimum, and a law needs two; add budgets or sizes")
    of_params, of_tokens, of_loss = (power_law(flops, values) for values in (params, tokens, loss))
    return Frontier(of_params, of_tokens, of_loss, flops, params, tokens, loss)


def isoflop(points: Points, found: list[Vertex] | None = None) -> Frontier:
    """Approach 2: a law through the vertices. Budgets whose parabola has none near the sizes tried are left out."""
    found = [vertex for vertex in found or vertices(points) if vertex.usable]
    flops, best = np.array([v.flops for v in found]), np.array([v.best for v in found])
    tokens = []
    for vertex in found:  # at a given compute log D is nearly linear in log N
        x, y = np.log(points.params[vertex.rows]), np.log(points.tokens[vertex.rows])
        slope, intercept = np.polyfit(x - x.mean(), y, 1)
        tokens.append(np.exp(intercept + slope * (np.log(vertex.best) - x.mean())))
    return _frontier(points.source, flops, best, np.array(tokens), np.array([v.loss for v in found]))


def isoflop_draws(points: Points, found: list[Vertex], n: int, seed: int = 0) -> list[Frontier]:
    """Approach 2 of resampled losses: those of the parabolas plus residuals, drawn over all budgets.

    Empty where no budget has more sizes than its parabola has coefficients: nothing then says how noisy they are.
    """
    free = sum(len(vertex.rows) - 3 for vertex in found)
    if free <= 0:
        return []
    residuals = np.concatenate([vertex.residuals for vertex in found])
    residuals = residuals * (len(residuals) / free) ** 0.5
    generator, result = np.random.default_rng(seed), []
    for _ in range(n):
        drawn = []
        for vertex in found:
            noise = generator.choice(residuals, len(vertex.rows))
            loss = points.loss[vertex.rows] - vertex.residuals + noise
            drawn.append(vertex_of(points.params[vertex.rows], loss, vertex.flops, vertex.rows))
        if sum(vertex.usable for vertex in drawn) >= 2:  # else there is nothing to draw a law through
            result.append(isoflop(points, drawn))
    return result


class _Curves(NamedTuple):
    """The runs of each size over all their tokens, interpolated in logarithms at the same amounts of compute.

    Sizes ascend; where a size has no runs on either side its values are NaN.
    """

    log_flops_C: np.ndarray
    log_params_S: np.ndarray
    log_loss_SC: np.ndarray
    log_tokens_SC: np.ndarray


def _curves(points: Points) -> _Curves:
    curves = []
    for size in sorted(set(points.params.tolist())):
        rows = np.flatnonzero(points.params == size)
        rows = rows[np.argsort(points.flops[rows])]
        if distinct(points.flops[rows]) >= 2:
            curves.append((np.log(size), *(np.log(of[rows]) for of in (points.flops, points.loss, points.tokens))))
    if len(curves) < 3:
        raise UserError(
            f"{points.source}: {len(curves)} sizes with two or more numbers of tokens, and an envelope needs three; "
            f"add runs"
        )
    grid = np.linspace(min(c[1][0] for c in curves), max(c[1][-1] for c in curves), _GRID)
    losses, tokens = (
        np.stack([np.interp(grid, c[1], c[of], left=np.nan, right=np.nan) for c in curves]) for of in (2, 3)
    )
    return _Curves(grid, np.array([c[0] for c in curves]), losses, tokens)


def _lowest(source: str, curves: _Curves, sizes: np.ndarray) -> Frontier:
    """The envelope of some sizes, given by their ascending places among `curves`."""
    losses_SC = curves.log_loss_SC[sizes]
    here_SC = np.isfinite(losses_SC)
    best_C = np.where(here_SC, losses_SC, np.inf).argmin(0)
    first_C, last_C = here_SC.argmax(0), len(sizes) - 1 - here_SC[::-1].argmax(0)
    chosen = np.flatnonzero((here_SC.sum(0) >= 3) & (first_C < best_C) & (best_C < last_C))
    rows = sizes[best_C[chosen]]
    if len(set(rows.tolist())) < 2:
        raise UserError(f"{source}: the envelope meets fewer than two sizes between others; add sizes or budgets")
    of_best = curves.log_params_S[rows], curves.log_tokens_SC[rows, chosen], curves.log_loss_SC[rows, chosen]
    return _frontier(source, *(np.exp(values) for values in (curves.log_flops_C[chosen], *of_best)))


def envelope(points: Points) -> Frontier:
    """Approach 1: at many amounts of compute the size with least loss, and laws through these.

    Only compute that three sizes or more reach is looked at, and only where the best is neither the smallest nor the
    largest of these.
    """
    curves = _curves(points)
    return _lowest(points.source, curves, np.arange(len(curves.log_params_S)))


def envelope_draws(points: Points, n: int, seed: int = 0) -> list[Frontier]:
    """Approach 1 of sizes drawn with replacement, each with its curve (Hoffmann et al. 2022 draw 80% of the runs).

    Empty where half of the draws or more have no envelope: what is left would be of those alone that agree.
    """
    curves, generator, result = _curves(points), np.random.default_rng(seed), []
    for _ in range(n):
        sizes = np.unique(generator.integers(len(curves.log_params_S), size=len(curves.log_params_S)))
        try:
            result.append(_lowest(points.source, curves, sizes))
        except UserError:
            continue
    return result if 2 * len(result) > n else []


@dataclass(frozen=True)
class SettingLaw:
    """How the best learning rate or batch depends on size and tokens: `factor N^by_params D^by_tokens`."""

    factor: float
    by_params: float
    by_tokens: float
    cells: int  # that have a best value inside those tried
    at_edge: int  # that have not, and are left out


def setting_law(points: Points, setting: str) -> SettingLaw:
    """Power law of the best `lr` or `batch`, where three values or more were tried at several N and D.

    The best is the vertex of a parabola in the setting's logarithm (as DeepSeek-AI 2024 and Li et al. 2025 do).
    """
    cells: dict[tuple[float, float], list[int]] = {}
    for i in range(len(points)):
        cells.setdefault((float(points.params[i]), float(points.tokens[i])), []).append(i)
    best, at_edge = [], 0
    for place in cells.values():
        rows = np.array(place)
        values = getattr(points, setting)[rows]
        if np.isnan(values).any() or distinct(values) < 3:
            continue
        vertex = vertex_of(values, points.loss[rows], float(points.flops[rows[0]]), rows)
        if not vertex.inside:
            at_edge += 1
            continue
        best.append((vertex.best, float(points.params[rows].mean()), float(points.tokens[rows].mean())))
    by_tokens = bool(best) and distinct(np.array([b[2] for b in best])) >= 2
    by_params = bool(best) and distinct(np.array([b[1] for b in best])) >= 2
    if len(best) < 2 + by_tokens + by_params - 1 or not (by_tokens or by_params):
        raise UserError(
            f"{points.source}: {len(best)} sizes and budgets with a best {setting} inside three or more that were "
            f"tried ({at_edge} at the edge); add values of {setting}, or sizes"
        )
    values, params, tokens = np.log(np.array(best)).T
    columns = [np.ones_like(params), *([params] if by_params else []), *([tokens] if by_tokens else [])]
    solution = np.linalg.lstsq(np.stack(columns, axis=1), values, rcond=None)[0].tolist()
    return SettingLaw(
        float(np.exp(solution[0])),
        solution[1] if by_params else 0.0,
        solution[-1] if by_tokens else 0.0,
        len(best),
        at_edge,
    )
